"""The replay of six tokens: three small trajectories, built and audited by `mathrl`.

The page gets every table whole. The script hides what the reader is to predict, and looks up what
`audit_batch` says about each mask that can be proposed.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mathrl.audit import audit, audit_batch
from mathrl.trajectory import Built, Call, Row, build

NAMES = ("U", "A₁", "A₂", "T₁", "T₂", "B", "S", "V", "C", "A₁A₂")
U, A1, A2, T1, T2, B, S, V, C, A12 = range(len(NAMES))
COLUMNS = ("input", "target", "author", "mask", "log-prob", "advan\N{SOFT HYPHEN}tage", "call")
# The step that reveals a column; the first step shows the calls alone.
STEPS = (1, 1, 2, 2, 3, 3, 3)


class Case(NamedTuple):
    """A trajectory to replay."""

    title: str
    story: str
    calls: tuple[Call, ...]


_REQUEST = Call(prompt_ids=[U], output_ids=[A1, A2], log_probs=[-0.2, -0.4])
_REPLY = Call(prompt_ids=[U, A1, A2, T1, T2], output_ids=[B], log_probs=[-0.3])
CASES = {
    "base": Case(
        "base case",
        "The model asks a tool, reads its answer and replies. Every id is kept.",
        (_REQUEST, _REPLY),
    ),
    "compaction": Case(
        "compaction",
        "After the reply, the user goes on with V. The runner has replaced the tool’s two tokens "
        "by a summary S.",
        (
            _REQUEST,
            _REPLY,
            Call(prompt_ids=[U, A1, A2, S, B, V], output_ids=[C], log_probs=[-0.5]),
        ),
    ),
    "template": Case(
        "re-rendered template",
        "The request is rendered and tokenised again for the second call. Its text is the same; "
        "its two tokens have become one.",
        (_REQUEST, Call(prompt_ids=[U, A12, T1, T2], output_ids=[B], log_probs=[-0.3])),
    ),
}


def text(ids: Sequence[int]) -> str:
    """The text of some ids; A₁A₂ is one token."""
    return "".join(NAMES[i] for i in ids)


def built(case: Case) -> Built:
    """The rows of a case, with advantage 1."""
    return build(case.calls, advantages=1.0, decode=text)


def loss(rows: Sequence[Row]) -> float:
    """Sum of the negative log-probabilities of what is trained."""
    return sum(-p for row in rows for p in row.old_log_probs if p is not None)


def _tokens(ids: Sequence[int]) -> str:
    return " ".join(NAMES[i] for i in ids)


def _signed(cell: str) -> str:
    return cell.replace("-", "\N{MINUS SIGN}")


def _call(number: int, call: Call) -> str:
    log_probs = _signed(", ".join(f"{p:g}" for p in call.log_probs or ()))
    return (
        f"<li>call {number}: {_tokens(call.prompt_ids)} → <b>{_tokens(call.output_ids)}</b>, "
        f"log-prob {log_probs}</li>"
    )


def _row(number: int, row: Row) -> str:
    lines = []
    for t, line in enumerate(audit(row).lines):
        position, _, author, log_prob, advantage, call, _ = line
        target = NAMES[row.targets[t]]
        mask = str(row.mask[t])
        cells = (target, author, mask, _signed(log_prob), _signed(advantage), call)
        kind = ' class="trained"' if row.mask[t] else ""
        body = "".join(
            f'<td data-step="{step}">{cell}</td>'
            for step, cell in zip(STEPS[1:], cells, strict=True)
        )
        lines.append(
            f'<tr{kind}><th scope="row" data-step="{STEPS[0]}">{position} '
            f"{NAMES[row.inputs[t]]}</th>{body}</tr>"
        )
    head = "".join(f'<th scope="col">{column}</th>' for column in COLUMNS)
    return (
        f'<table class="numbers"><caption>Row {number}: {_tokens(row.tokens)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def _section(name: str, case: Case) -> str:
    made = built(case)
    targets = sum(len(row.mask) for row in made.rows)
    calls = "".join(_call(number, call) for number, call in enumerate(case.calls))
    splits = "".join(f'<p class="split">{split}.</p>' for split in made.splits)
    rows = "".join(_row(number, row) for number, row in enumerate(made.rows))
    return (
        f'<section data-case="{name}"><p><b class="title">{case.title}.</b> {case.story}</p>'
        f'<ol class="calls">{calls}</ol><div class="rows">{splits}{rows}</div>'
        f'<p class="sum"><span class="targets">{targets}</span> targets; trained, the negative '
        f'log-probs sum to <span class="loss">{loss(made.rows):g}</span>.</p></section>'
    )


def replay() -> str:
    """All cases, each with its calls, its splits and the audit of its rows."""
    return "".join(_section(name, case) for name, case in CASES.items())


def _verdict(row: Row, mask: Sequence[int]) -> str:
    faults = audit_batch([row.tokens], [[1] * len(row.tokens)], [mask], rows=[row])
    return "; ".join(str(replace(fault, row=None)) for fault in faults)


def replay_data() -> str:
    """What `audit_batch` says of every mask of each row of each case; nothing of the right one."""
    verdicts = {
        name: [
            {
                "".join(map(str, mask)): _verdict(row, mask)
                for mask in itertools.product((0, 1), repeat=len(row.mask))
            }
            for row in built(case).rows
        ]
        for name, case in CASES.items()
    }
    return json.dumps(verdicts, ensure_ascii=False, separators=(",", ":"))
