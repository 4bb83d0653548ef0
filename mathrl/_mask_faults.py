"""What a loss mask gets wrong, seen from the row that it should have come from.

One explanation for a whole row, such as a shift, is worth more than a list of its positions, so
that those are tried first. What remains is named by where it lies: before the first output,
between two, at the edge of one.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mathrl._truth import BOUNDARY, CONTEXT, Truth
from mathrl.faults import Fault

Bools = npt.NDArray[np.bool_]


def shifted(values: Bools, by: int) -> Bools:
    """Values moved `by` positions to the right (to the left if negative); False comes in."""
    moved = np.zeros_like(values)
    if by > 0:
        moved[by:] = values[:-by]
    else:
        moved[:by] = values[-by:]
    return moved


def mask_faults(row: int, mask: Bools, attended: Bools, truth: Truth) -> list[Fault]:
    """Name what is wrong with one row of a loss mask.

    Args:
        row: its index, for the report.
        mask: shape (T,), the whole width of the batch.
        attended: the attention mask, shape (T + 1,).
        truth: what the row should be, and where in the width it lies.

    Returns:
        Faults; none if the mask is right.

    Source: derived in the book, chapter 9.
    """
    right = np.zeros_like(mask)
    right[truth.window] = truth.mask
    wrong = mask != right
    if not wrong.any():
        return []
    inside = np.zeros_like(mask)
    inside[truth.window] = True
    at = tuple(np.flatnonzero(wrong).tolist())
    if not mask.any():
        return [Fault("row not trained", row, at)]
    for by, kind in ((1, "mask one late"), (-1, "mask one early")):
        moved = shifted(right, by)
        # At the edge of a row a shift may differ in one target, and is then no likelier than that
        # this target alone is wrong.
        if len(at) > 1 and any(np.array_equal(mask, m) for m in (moved, moved & inside)):
            return [Fault(kind, row, at)]
    everything = (attended[1:], attended[:-1], inside)
    if any(np.array_equal(mask, m) for m in everything):
        return [Fault("attention mask used as loss mask", row, at)]
    if np.array_equal(mask[truth.window], ~truth.mask) and not (mask & ~inside).any():
        return [Fault("mask inverted", row, at)]
    found: dict[str, list[int]] = {}
    if (mask & ~inside).any():
        found["padding trained"] = np.flatnonzero(mask & ~inside).tolist()
    for kind, t in _by_place(mask[truth.window], truth):
        found.setdefault(kind, []).append(truth.start + t)
    return [Fault(kind, row, tuple(targets)) for kind, targets in found.items()]


def _by_place(mask: Bools, truth: Truth) -> Iterator[tuple[str, int]]:
    """Name each wrong target by the stretch it lies in, one writer's run of targets."""
    edges = np.flatnonzero(np.diff(truth.writers)) + 1
    bounds = list(itertools.pairwise([0, *edges.tolist(), len(mask)]))
    writers = [int(truth.writers[start]) for start, _ in bounds]
    for n, ((start, stop), writer) in enumerate(zip(bounds, writers, strict=True)):
        got, right = mask[start:stop], truth.mask[start:stop]
        wrong = (start + np.flatnonzero(got != right)).tolist()
        if not wrong:
            continue
        if writer == BOUNDARY:
            kinds = dict.fromkeys(wrong, "target crosses a boundary")
        elif writer == CONTEXT:
            before = n == 0 or writers[n - 1] == BOUNDARY
            after = n + 1 == len(bounds) or writers[n + 1] == BOUNDARY
            kinds = _context_kinds(got, start, wrong, before, after)
        elif right.any():
            kinds = _output_kinds(got, start, wrong)
        else:
            kinds = dict.fromkeys(wrong, "history trained twice")
        yield from ((kinds[t], t) for t in wrong)


def _context_kinds(
    got: Bools, start: int, wrong: list[int], before: bool, after: bool
) -> dict[int, str]:
    """Trained context: all of a stretch, or the part of it that touches an output."""
    kind = "prompt trained" if before else "tool tokens trained"
    if after:
        kind = "mask runs past an output"
    kinds = dict.fromkeys(wrong, kind)
    if got.all() or after:
        return kinds
    head = int(np.argmin(got))  # trained targets just after the output that precedes
    tail = int(np.argmin(got[::-1]))  # and just before the output that follows
    if not before:
        kinds.update(dict.fromkeys(range(start, start + head), "mask runs past an output"))
    stop = start + len(got)
    kinds.update(dict.fromkeys(range(stop - tail, stop), "header trained"))
    return kinds


def _output_kinds(got: Bools, start: int, wrong: list[int]) -> dict[int, str]:
    """Left-out targets of an output: all, the last, the first, or others."""
    if not got.any():
        kind = "call not trained"
    elif len(wrong) == 1 and wrong[0] == start + len(got) - 1:
        kind = "stop token not trained"
    elif len(wrong) == 1 and wrong[0] == start:
        kind = "first sampled token not trained"
    else:
        kind = "sampled tokens not trained"
    return dict.fromkeys(wrong, kind)
