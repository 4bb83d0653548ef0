"""Checking rows by hand, and other people's tensors by name.

Two arrays of the same length may still disagree position by position. `audit` puts side by side
what must belong together: the input position, the token it predicts, who wrote that token, and
the values that will multiply its log-probability. `audit_batch` compares the tensors of another
trainer with the rows they should have come from.
"""

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mathrl._batch_faults import Accumulator, Batch, LossFunction, as_array, shape_faults
from mathrl._truth import truth_of
from mathrl.faults import Fault
from mathrl.splits import Decoder
from mathrl.trajectory import Row

COLUMNS = (
    "input position",
    "predicted token",
    "author",
    "old log-prob",
    "advantage",
    "call",
    "weight",
)
NONE, MISSING = "–", "missing"


@dataclass(frozen=True, slots=True)
class Audit:
    """The table of one row: a heading, and for each target a line of text cells."""

    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    trained: tuple[bool, ...]
    """For each line whether its target is trained."""

    def text(self) -> str:
        """The table in plain text, columns aligned; `*` marks a target that is trained."""
        cells = [self.columns, *self.lines]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        marks = [" ", *("*" if trained else " " for trained in self.trained)]
        return "\n".join(
            f"{mark} " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for mark, line in zip(marks, cells, strict=True)
        )

    def html(self) -> str:
        """The table in HTML, every text escaped; lines of trained targets have their class."""
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        body = []
        for (first, *rest), trained in zip(self.lines, self.trained, strict=True):
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
            kind = ' class="trained"' if trained else ""
            body.append(f'<tr{kind}><th scope="row">{html.escape(first)}</th>{cells}</tr>')
        return (
            f'<table class="audit">\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
            + "\n".join(body)
            + "\n</tbody>\n</table>"
        )


def audit(row: Row, *, decode: Decoder | None = None, fold: int | None = None) -> Audit:
    """Show what each target of a row is, who wrote it, and what it is trained with.

    Args:
        row: from `trajectory.build`.
        decode: ids to text; without it tokens are shown as ids.
        fold: runs of more than this many untrained targets of one author become one line.

    Returns:
        The table; `text()` and `html()` write it. A log-probability or an advantage that a
        trained target lacks reads "missing"; where nothing is trained there is a dash.

    Raises:
        ValueError: `fold` is negative.

    Source: derived in the book, chapter 9.

    >>> from mathrl.trajectory import Call, build
    >>> calls = [Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-0.2, -0.4]),
    ...          Call(prompt_ids=[0, 1, 2, 3, 3], output_ids=[4])]
    >>> [row] = build(calls, advantages=1.0).rows
    >>> print(audit(row, decode=lambda ids: "".join("UABTC"[i] for i in ids)).text())
      input position  predicted token  author   old log-prob  advantage  call  weight
    * 0 'U'           1 'A'            policy   -0.2          1          0     1
    * 1 'A'           2 'B'            policy   -0.4          1          0     1
      2 'B'           3 'T'            context  –             –          –     0
      3 'T'           3 'T'            context  –             –          –     0
    * 4 'T'           4 'C'            policy   missing       1          1     1
    """
    if fold is not None and fold < 0:
        raise ValueError(f"`fold` must not be negative, got {fold}")
    lines, trained, start = [], [], 0
    for (mask, author, call), run in itertools.groupby(
        zip(row.mask, row.authors, row.calls, strict=True)
    ):
        stop = start + sum(1 for _ in run)
        if mask or fold is None or stop - start <= fold:
            shown = [_line(row, t, decode) for t in range(start, stop)]
        else:
            span, count = f"{start} to {stop - 1}", f"{stop - start} tokens"
            shown = [(span, count, author, NONE, NONE, _call(call), "0")]
        lines += shown
        trained += [bool(mask)] * len(shown)
        start = stop
    return Audit(COLUMNS, tuple(lines), tuple(trained))


def _line(row: Row, t: int, decode: Decoder | None) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return f"{value:.6g}" if value is not None else MISSING if row.mask[t] else NONE

    target = row.tokens[t + 1]
    return (
        f"{t} {decode([row.tokens[t]])!r}" if decode else str(t),
        f"{target} {decode([target])!r}" if decode else str(target),
        row.authors[t],
        shown(row.old_log_probs[t]),
        shown(row.advantages[t]),
        _call(row.calls[t]),
        f"{row.weights[t]:.6g}",
    )


def _call(call: int | None) -> str:
    return NONE if call is None else str(call)


def audit_batch(
    input_ids: Any,
    attention_mask: Any,
    loss_mask: Any,
    *,
    old_log_probs: Any = None,
    log_probs: Any = None,
    advantages: Any = None,
    labels: Any = None,
    segments: Any = None,
    rows: Sequence[Row | Sequence[Row] | None] | None = None,
    pad_id: int | None = None,
    bos_id: int | None = None,
    tolerance: float = 1e-3,
    loss_fn: LossFunction | None = None,
    accumulate: Accumulator | None = None,
) -> list[Fault]:
    """Name what is wrong with tensors that another trainer has made, and where.

    Without `rows` only what contradicts itself is seen. With them, the rows that `build` makes of
    the same calls, everything is compared with what was sampled.

    A tensor other than `input_ids` and `attention_mask`, of shape (B, L), is read by its width W.
    L - 1: an entry for each target. L: an entry for each token, the first of which is no target.
    Less: entries for the last W tokens, as where a prompt is followed by a response.

    Args:
        input_ids: shape (B, L); tensors, arrays or nested lists, here and below.
        attention_mask: 1 at tokens, 0 at padding, shape (B, L).
        loss_mask: 1 where a target is trained.
        old_log_probs: from sampling, in nats; NaN where missing.
        log_probs: of the trainer at its first update, when the policy has not changed yet.
        advantages: (B,), or by width as above.
        labels: (B, L), or by width as above: ids where trained and negative elsewhere. Of width L,
            they are those of a model that shifts them itself.
        segments: (B, L), which of several packed sequences a token belongs to.
        rows: for each row of the batch the row it was made of, a list of rows that were packed in
            this order, or None for a row of padding.
        pad_id: the id of padding.
        bos_id: the id that starts a sequence.
        tolerance: in nats, and for advantages.
        loss_fn: from `log_probs`, `old_log_probs`, `advantages` (those that are given), `mask` and
            `attention_mask`, all torch tensors of shape (B, L-1), to the loss. It is called again
            on batches that should have the same loss.
        accumulate: from a list of such batches, the micro-batches of one step, to their loss.

    Returns:
        Faults, each with its name, row and targets; none for a batch that is right.

    Raises:
        ValueError: `rows` has another number of rows than the batch, or `accumulate` is given
            without `loss_fn`.

    Source: derived in the book, chapters 9 and 10.

    >>> from mathrl.trajectory import Call, build
    >>> calls = [Call(prompt_ids=[0], output_ids=[1, 2]),
    ...          Call(prompt_ids=[0, 1, 2, 3, 3], output_ids=[4])]
    >>> ids, ones = [[0, 1, 2, 3, 3, 4]], [[1] * 6]
    >>> audit_batch(ids, ones, [[1, 1, 0, 0, 1]], rows=build(calls).rows)
    []
    >>> for fault in audit_batch(ids, ones, [[0, 1, 1, 0, 0]], rows=build(calls).rows):
    ...     print(fault)
    mask one late, row 0, targets 0, 2, 4: the mask of the inputs is used for the targets: off by one
    """  # noqa: E501
    if accumulate is not None and loss_fn is None:
        raise ValueError("`accumulate` needs `loss_fn`, the loss that it should equal")
    ids, attended = as_array(input_ids), as_array(attention_mask)
    given = {"loss_mask": loss_mask, "old_log_probs": old_log_probs, "log_probs": log_probs,
             "advantages": advantages, "labels": labels, "segments": segments}  # fmt: skip
    columns = {name: as_array(value) for name, value in given.items() if value is not None}
    if rows is not None and len(rows) != len(ids):
        raise ValueError(f"`rows` has {len(rows)} rows, but the batch has {len(ids)}")
    if found := shape_faults(ids, attended, columns):
        return found
    truths = [None if row is None else truth_of(row) for row in rows or [None] * len(ids)]
    batch = Batch(ids, attended != 0, columns, truths, pad_id, bos_id, tolerance)
    found = [] if batch.mask.any() else [Fault("nothing trained")]
    for row in range(len(ids)):
        found += batch.row_faults(row, filler=rows is not None and truths[row] is None)
    return found + (batch.loss_faults(loss_fn, accumulate) if loss_fn else [])
