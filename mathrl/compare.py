"""Comparing results that are few: intervals, paired seeds, calibration. numpy, without torch."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

MOST_PAIRS = 20
"""The largest number of pairs for which all sign flips are visited."""


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval for a success probability after n independent trials.

    It holds the probabilities p that a test with the standard deviation of p itself does not
    reject. `p̂ ± z √(p̂(1-p̂)/n)`, the Wald interval, has width 0 after 5 of 5, and at n = 5,
    p = 0.9 covers p with probability 0.401 in place of 0.95; Wilson's with 0.919.

    Args:
        successes: 0 to n.
        n: trials, at least 1.
        confidence: in (0, 1).

    Returns:
        Low and high end, in [0, 1].

    Raises:
        ValueError: an argument is outside its range.

    Source: Wilson (1927), doi:10.1080/01621459.1927.10502953.

    >>> [round(end, 3) for end in wilson(5, 5)]
    [0.566, 1.0]
    """
    if n < 1:
        raise ValueError(f"`n` must be at least 1, got {n}")
    if not 0 <= successes <= n:
        raise ValueError(f"`successes` must lie in [0, n = {n}], got {successes}")
    z = NormalDist().inv_cdf(_tail(confidence))
    centre = (successes + z * z / 2) / (n + z * z)
    margin = z * math.sqrt(successes * (n - successes) / n + z * z / 4) / (n + z * z)
    # At the ends the exact bound is 0 or 1, which rounding may miss.
    low = 0.0 if successes == 0 else max(0.0, centre - margin)
    high = 1.0 if successes == n else min(1.0, centre + margin)
    return low, high


class Paired(NamedTuple):
    """Differences of n pairs: mean, its interval, and two exact two-sided p-values."""

    n: int
    mean: float
    low: float
    high: float
    sign_p: float
    permutation_p: float


def paired(first: ArrayLike, second: ArrayLike, confidence: float = 0.95) -> Paired:
    """Compare two methods that were run with the same seeds, seed by seed.

    Pairing removes what the seed does to both. The interval is Student's, for differences that
    are nearly normal. The p-values assume less: the sign test that a difference is as likely to
    be positive as negative, the permutation test that its distribution is symmetric about 0;
    both are exact. With n pairs neither can be below `2^(1-n)`: 0.0625 with 5 seeds.

    Args:
        first: one number for each seed, shape (n,), n at least 2.
        second: the same seeds in the same order; `mean` is that of `first - second`.
        confidence: of the interval, in (0, 1).

    Raises:
        TypeError: an argument does not hold real numbers.
        ValueError: the shapes differ, a number is not finite, or n is below 2 or above
            `MOST_PAIRS`.

    >>> result = paired([0.99, 0.98, 1.0, 0.97, 0.99], [0.95, 0.97, 0.96, 0.96, 0.94])
    >>> round(result.mean, 3), result.sign_p, result.permutation_p
    (0.03, 0.0625, 0.0625)
    """
    one, two = _numbers("first", first), _numbers("second", second)
    if one.ndim != 1 or not 2 <= len(one) <= MOST_PAIRS:
        raise ValueError(f"`first` must have shape (n,), 2 <= n <= {MOST_PAIRS}, got {one.shape}")
    if two.shape != one.shape:
        raise ValueError(f"`second` has shape {two.shape}, expected {one.shape}")
    difference, n = one - two, len(one)
    mean = float(difference.mean())
    margin = student_quantile(_tail(confidence), n - 1) * difference.std(ddof=1) / math.sqrt(n)
    return Paired(
        n, mean, float(mean - margin), float(mean + margin), _sign(difference), _flips(difference)
    )


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's distribution with an integer number of degrees of freedom.

    Args:
        probability: in (0, 1).
        degrees: at least 1.

    Raises:
        ValueError: an argument is outside its range.

    Source: Abramowitz and Stegun (1964), 26.7.3 and 26.7.4, inverted by bisection.

    >>> round(student_quantile(0.975, 4), 4)
    2.7764
    """
    if not 0 < probability < 1:
        raise ValueError(f"`probability` must lie in (0, 1), got {probability}")
    if degrees < 1:
        raise ValueError(f"`degrees` must be at least 1, got {degrees}")
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        if _student_inside(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


class Calibration(NamedTuple):
    """Each bin's share of the weight, mean confidence and accuracy, shape (bins,), and totals.

    An empty bin has share 0 and NaN for the other two. `ece` is `Σ share |confidence - accuracy|`
    and `brier` the mean of `(confidence - outcome)²`.
    """

    share: NDArray[np.float64]
    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    ece: float
    brier: float


def calibration(
    confidence: ArrayLike, outcome: ArrayLike, weight: ArrayLike | None = None, bins: int = 10
) -> Calibration:
    """How far stated probabilities agree with what came out.

    For a policy over enumerated responses: `confidence` the probability of each response,
    `outcome` whether it is right and `weight` again its probability. That is the expectation,
    without sampling error, over responses drawn from the policy.

    Args:
        confidence: in [0, 1], any shape.
        outcome: 0 or 1, the same shape.
        weight: not negative, the same shape; 1 by default.
        bins: intervals of equal length; a confidence of 1 is in the last.

    Raises:
        TypeError: an argument does not hold real numbers.
        ValueError: the shapes differ, an entry is outside its range, or all weights are 0.

    Source: Guo and others (2017), arXiv:1706.04599, equations 2, 3 and 5.

    >>> round(calibration([0.9, 0.9, 0.9, 0.9], [1, 1, 1, 0]).ece, 3)
    0.15
    """
    stated, came = _numbers("confidence", confidence), _numbers("outcome", outcome)
    weights = np.ones_like(stated) if weight is None else _numbers("weight", weight)
    for name, array in (("outcome", came), ("weight", weights)):
        if array.shape != stated.shape:
            raise ValueError(f"`{name}` has shape {array.shape}, expected {stated.shape}")
    for name, bad, expected in (
        ("confidence", (stated < 0) | (stated > 1), "lie in [0, 1]"),
        ("outcome", (came != 0) & (came != 1), "be 0 or 1"),
        ("weight", weights < 0, "not be negative"),
    ):
        if bad.any():
            raise ValueError(f"`{name}` must {expected}")
    if bins < 1:
        raise ValueError(f"`bins` must be at least 1, got {bins}")
    if not weights.sum() > 0:
        raise ValueError("`weight` must not be 0 everywhere")
    weights = weights / weights.sum()
    where = np.minimum((stated * bins).astype(np.int64), bins - 1).ravel()
    share, said, held = (
        np.bincount(where, (weights * values).ravel(), bins).astype(np.float64)
        for values in (np.ones_like(stated), stated, came)
    )
    with np.errstate(invalid="ignore"):
        mean_said, mean_held = said / share, held / share
    brier = float((weights * (stated - came) ** 2).sum())
    return Calibration(share, mean_said, mean_held, float(np.abs(said - held).sum()), brier)


def _sign(difference: NDArray[np.float64]) -> float:
    positive, negative = int((difference > 0).sum()), int((difference < 0).sum())
    n = positive + negative
    tail = sum(math.comb(n, k) for k in range(max(positive, negative), n + 1)) / 2**n
    return min(1.0, 2 * tail)


def _flips(difference: NDArray[np.float64]) -> float:
    """Share of all sign flips whose sum is at least as far from 0 as the sum observed."""
    sums = np.zeros(1)
    for size in np.abs(difference):
        sums = np.concatenate([sums + size, sums - size])
    # Equal sums must count as equal, though they were added up in another order.
    observed = abs(difference.sum()) - 1e-12 * np.abs(difference).sum()
    return float((np.abs(sums) >= observed).mean())


def _student_inside(angle: float, degrees: int) -> float:
    """P(|T| < √degrees tan(angle)) by the finite series of the cosine's powers."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    series = 0.0
    for power in range(2 + odd, degrees + 1, 2):
        series += term
        term *= cosine**2 * (power - 1) / power
    return (angle + sine * series) * 2 / math.pi if odd else sine * series


def _tail(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must lie in (0, 1), got {confidence}")
    return (1 + confidence) / 2


def _numbers(name: str, values: ArrayLike | Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"`{name}` must hold real numbers, got {array.dtype}")
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` must be finite")
    return array.astype(np.float64)
