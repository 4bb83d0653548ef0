"""What log-probabilities and advantages get wrong, seen from the row they should have come from.

Values at the right places are compared first. If they differ, explanations that account for
every one of them are tried, from the most to the least specific; "differ" is what is left.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mathrl._truth import Floats, Truth
from mathrl.faults import Fault

Positions = npt.NDArray[np.int64]
_TRANSFORMS: tuple[tuple[str, Callable[[Floats], Floats]], ...] = (
    ("old log-probs negated", lambda x: -x),
    ("probabilities, not log-probs", np.exp),
    ("another base of logarithm", lambda x: x / math.log(2)),
    ("another base of logarithm", lambda x: x / math.log(10)),
)


def old_log_prob_faults(
    row: int, values: Floats, truths: Sequence[Truth | None], tolerance: float
) -> list[Fault]:
    """Name what is wrong with one row of old log-probabilities.

    Args:
        row: its index in the batch.
        values: shape (T,), the whole width of the batch.
        truths: what each row should be; the one at `row` is known.
        tolerance: in nats.

    Returns:
        Faults; none if every trained target has the value recorded for it, and none, or NaN,
        where none was recorded.

    Source: derived in the book, chapter 9.
    """
    truth = truths[row]
    assert truth is not None
    at, want = _trained(truth, truth.old_log_probs)
    got, missing = values[at], np.isnan(want)
    found = []
    for kind, where in (
        ("filler log-prob", missing & (got == 0.0)),
        ("invented log-prob", missing & (got != 0.0) & ~np.isnan(got)),
    ):
        if where.any():
            found.append(Fault(kind, row, _listed(at[where])))
    at, want, got = at[~missing], want[~missing], got[~missing]
    bad = ~_close(got, want, tolerance)
    if bad.any():
        kind = _explain_old(row, values, at, want, truths, tolerance)
        found.append(Fault(kind, row, _listed(at[bad]), _example(got[bad], want[bad])))
    return found


def _explain_old(
    row: int, values: Floats, at: Positions, want: Floats, truths: Sequence[Truth | None],
    tolerance: float,
) -> str:  # fmt: skip
    got = values[at]
    bad = ~_close(got, want, tolerance)
    if not np.isfinite(got).all():
        return "not finite"
    if _is_off_by_one(values, at, want, tolerance):
        return "old log-probs off by one"
    truth = truths[row]
    assert truth is not None
    first = at - truth.start
    last = first + len(values) - (truth.length - 1)
    if any(_matches(values, places, want, tolerance) for places in (first, last)):
        return "old log-probs on the wrong side"
    run = np.arange(len(at))
    for start in (at[0], 0, truth.start, len(values) - len(at)):
        if _matches(values, start + run, want, tolerance):
            return "old log-probs without gaps"
    if _of_another_row(row, values, truths, tolerance, lambda t: t.old_log_probs):
        return "old log-probs of another row"
    if (got[bad] == 0.0).all():
        return "filler log-prob"
    for kind, transform in _TRANSFORMS:
        if _close(got, transform(want), tolerance).all():
            return kind
    if _is_constant(got - want, tolerance):
        return "old log-probs off by a constant"
    return "old log-probs differ"


def advantage_faults(
    row: int, values: Floats, truths: Sequence[Truth | None], tolerance: float
) -> list[Fault]:
    """Name what is wrong with one row of advantages; arguments as for the log-probabilities.

    Source: derived in the book, chapter 9.
    """
    truth = truths[row]
    assert truth is not None
    at, want = _trained(truth, truth.advantages)
    known = ~np.isnan(want)
    at, want = at[known], want[known]
    got = values[at]
    bad = ~_close(got, want, tolerance)
    if not bad.any():
        return []
    if not np.isfinite(got).all():
        kind = "not finite"
    elif _is_off_by_one(values, at, want, tolerance):
        kind = "advantages off by one"
    elif _close(got, -want, tolerance).all():
        kind = "advantages negated"
    elif _of_another_row(row, values, truths, tolerance, lambda t: t.advantages):
        kind = "advantages of another row"
    else:
        kind = "advantages differ"
    return [Fault(kind, row, _listed(at[bad]), _example(got[bad], want[bad]))]


def ratio_faults(
    row: int, log_probs: Floats, old_log_probs: Floats, at: Positions, tolerance: float
) -> list[Fault]:
    """Name why the ratio of an unchanged policy to itself is not 1.

    Args:
        row: its index in the batch.
        log_probs: the trainer's log-probabilities, shape (T,).
        old_log_probs: the sampler's, shape (T,).
        at: positions of the trained targets.
        tolerance: in nats.

    Returns:
        Faults; none if the two agree at every trained target. Missing values are not compared.

    Source: derived in the book, chapter 9.
    """
    at = at[~np.isnan(old_log_probs[at])]
    new, old = log_probs[at], old_log_probs[at]
    bad = ~_close(new, old, tolerance)
    if not bad.any():
        return []
    if not np.isfinite(new).all():
        kind = "not finite"
    elif (old[bad] == 0.0).all():
        kind = "filler log-prob"
    elif _is_off_by_one(log_probs, at, old, tolerance):
        kind = "log-probs off by one"
    elif _is_constant(new - old, tolerance):
        kind = "ratio off by a constant"
    else:
        kind = "ratio not 1"
    return [Fault(kind, row, _listed(at[bad]), _example(new[bad], old[bad]))]


def unexplained_faults(row: int, values: Floats, at: Positions) -> list[Fault]:
    """What can be said of old log-probabilities without the row they should have come from.

    Several values of exactly 0 and no other are a filler: a policy that is certain of every token
    it samples has nothing to learn.

    Source: derived in the book, chapter 9.
    """
    got = values[at]
    if not len(at):
        return []
    if np.isinf(got).any():
        return [Fault("not finite", row, _listed(at[np.isinf(got)]))]
    if len(at) > 1 and (got == 0.0).all():
        return [Fault("filler log-prob", row, _listed(at))]
    positive = got > 0.0
    if positive.any():
        all_probabilities = ((got >= 0.0) & (got <= 1.0)).all()
        kind = "probabilities, not log-probs" if all_probabilities else "old log-probs negated"
        return [Fault(kind, row, _listed(at[positive]))]
    return []


def _trained(truth: Truth, column: Floats) -> tuple[Positions, Floats]:
    """Positions of the trained targets in the width of the batch, and their values."""
    inside = np.flatnonzero(truth.mask)
    return inside + truth.start, column[inside]


def _close(got: Floats, want: Floats, tolerance: float) -> npt.NDArray[np.bool_]:
    # Not `np.isclose`: its overhead is most of the time of a small batch.
    return np.abs(got - want) <= tolerance


def _matches(values: Floats, places: Positions, want: Floats, tolerance: float) -> bool:
    """Whether the wanted values stand at these places, as many of them as lie in the width."""
    inside = (places >= 0) & (places < len(values))
    return bool(inside.any()) and bool(
        _close(values[places[inside]], want[inside], tolerance).all()
    )


def _is_off_by_one(values: Floats, at: Positions, want: Floats, tolerance: float) -> bool:
    """Whether the values stand one place later or earlier; the outermost may be cut off."""
    return (
        _matches(values, at + 1, want, tolerance)
        or _matches(values, at - 1, want, tolerance)
        or _matches(values, at[:-1] + 1, want[:-1], tolerance)
        or _matches(values, at[1:] - 1, want[1:], tolerance)
    )


def _of_another_row(
    row: int, values: Floats, truths: Sequence[Truth | None], tolerance: float,
    column: Callable[[Truth], Floats],
) -> bool:  # fmt: skip
    for other, truth in enumerate(truths):
        if other != row and truth is not None:
            at, want = _trained(truth, column(truth))
            known = ~np.isnan(want)
            if known.any() and _matches(values, at[known], want[known], tolerance):
                return True
    return False


def _is_constant(difference: Floats, tolerance: float) -> bool:
    return len(difference) > 1 and bool(np.ptp(difference) <= tolerance)


def _listed(at: Positions) -> tuple[int, ...]:
    return tuple(at.tolist())


def _example(got: Floats, want: Floats) -> str:
    return f"first {got[0]:.6g}, expected {want[0]:.6g}"
