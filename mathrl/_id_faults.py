"""Whether the ids of a row are those that were sampled, and its attention mask fits them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mathrl._truth import Truth
from mathrl.faults import Fault

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def place(ids: Ints, attended: Bools, truth: Truth) -> int | None:
    """The column at which the tokens of a row start, wherever its padding is; None if nowhere."""
    last = len(ids) - truth.length
    likely = [int(np.argmax(attended)), 0, last]
    for start in (*likely, *np.flatnonzero(ids == truth.tokens[0]).tolist()):
        if 0 <= start <= last and _equal(ids[start : start + truth.length], truth.tokens):
            return start
    return None


def attention_faults(
    row: int, ids: Ints, attended: Bools, truth: Truth, pad_id: int | None
) -> list[Fault]:
    """Compare the attention mask with the columns that hold the tokens of the row."""
    right = np.zeros_like(attended)
    right[truth.start : truth.start + truth.length] = True
    hidden, extra = right & ~attended, attended & ~right
    if extra.any():
        kind = (
            "attention mask on the wrong side" if hidden.any() else "attention mask covers padding"
        )
        return [Fault(kind, row, _before(np.flatnonzero(extra)))]
    if not hidden.any():
        return []
    if pad_id is not None and (ids[hidden] == pad_id).all():
        kind = "stop token taken for padding"
    elif _has_hole(attended):
        kind = "hole in the attention mask"
    else:
        kind = "attention mask hides tokens"
    return [Fault(kind, row, _before(np.flatnonzero(hidden)))]


def hole_faults(row: int, ids: Ints, attended: Bools, pad_id: int | None) -> list[Fault]:
    """What can be said of an attention mask without the row it should have come from."""
    if not _has_hole(attended):
        return []
    inside = np.flatnonzero(attended)
    columns = np.setdiff1d(np.arange(inside[0], inside[-1]), inside)
    is_pad = pad_id is not None and bool((ids[columns] == pad_id).all())
    kind = "stop token taken for padding" if is_pad else "hole in the attention mask"
    return [Fault(kind, row, _before(columns))]


def id_faults(
    row: int, ids: Ints, attended: Bools, truths: Sequence[Truth | None], bos_id: int | None
) -> list[Fault]:
    """Say how the attended ids of a row differ from those that were sampled."""
    truth = truths[row]
    assert truth is not None
    got, want = ids[attended], truth.tokens
    others = (t for b, t in enumerate(truths) if b != row and t is not None)
    if any(_equal(got, other.tokens) for other in others):
        return [Fault("rows in another order", row)]
    if starts_twice(got, bos_id) and not starts_twice(want, bos_id):
        return [Fault("second start token", row)]
    head = _agreement(got, want)
    tail = _agreement(got[::-1], want[::-1])
    if head + tail >= len(got) < len(want):
        kind = "tokens dropped"
    elif head + tail >= len(want) < len(got):
        kind = "tokens inserted"
    else:
        kind = "ids differ"
    columns = np.flatnonzero(attended)
    at = int(columns[head]) if head < len(columns) else len(ids)
    old = want[head] if head < len(want) else "the end"
    new = got[head] if head < len(got) else "the end"
    return [Fault(kind, row, (max(at - 1, 0),), f"sampled {old}, found {new}")]


def starts_twice(got: Ints, bos_id: int | None) -> bool:
    """Whether a sequence begins with two start tokens."""
    return bos_id is not None and len(got) > 1 and bool((got[:2] == bos_id).all())


def _has_hole(attended: Bools) -> bool:
    return int(np.count_nonzero(np.diff(attended.astype(np.int8), prepend=0, append=0) > 0)) > 1


def _agreement(first: Ints, second: Ints) -> int:
    """How many leading entries are equal."""
    size = min(len(first), len(second))
    unequal = np.flatnonzero(first[:size] != second[:size])
    return int(unequal[0]) if len(unequal) else size


def _equal(first: Ints, second: Ints) -> bool:
    return len(first) == len(second) and bool((first == second).all())


def _before(columns: npt.NDArray[np.intp]) -> tuple[int, ...]:
    """Columns of tokens as positions of targets."""
    return tuple(int(c) - 1 for c in columns if c)
