"""Two rewards of one response: was the puzzle solved, and in what order was it written.

A puzzle has M cells and a canonical order of them. A response emits actions, each of which names a
cell. The **solve** reward is 1 if every cell is named exactly once, all with the right value, and
then the end token; otherwise 0. The **order** reward asks only when cells were named: a cell that
stands at place i of the canonical order and is named first by action j (both counted from 0) earns
`1 / (1 + |i - j|)`; the reward is the mean over the canonical cells. Duplicates and unknown cells
earn nothing and use up an index; an illegal token ends parsing.

Public descriptions of the paper disagree on two things, which are options here: whether a cell must
have the right value to earn anything, and whether its cells are averaged or summed.

numpy in float64, without torch. Rules: arrays have exactly the shapes that are named, nothing is
broadcast; TypeError if an argument does not hold numbers of the named kind, ValueError if shapes
disagree. Derived in the book, chapter 13. How the two are mixed is in `mathrl.mixture`.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Reduce = Literal["mean", "sum"]

STOP = -1  # in an array of cells: an illegal token, the end token or padding


def order_reward(
    actions: Sequence[Hashable | None],
    canonical: Sequence[Hashable],
    *,
    waves: Sequence[int] | None = None,
    correct: Sequence[bool] | None = None,
    require_correct: bool = False,
    reduce: Reduce = "mean",
) -> float:
    """How close the order of a response is to the canonical order, in [0, 1] (or [0, M]).

    Args:
        actions: the cell that each emitted action names; None is an illegal token.
        canonical: the M cells in canonical order, M at least 1.
        waves: the wave of each canonical cell, not decreasing. The cells of one wave are tied:
            each may stand at any of the wave's places, and is measured from the nearest of them.
        correct: for each action whether its value is right; read if `require_correct`.
        require_correct: a cell whose first mention has a wrong value earns nothing.
        reduce: over the M canonical cells, named or not.

    Returns:
        The reward; 1 for the canonical order with `reduce="mean"`.

    Raises:
        ValueError: `canonical` is empty or repeats a cell, `waves` or `correct` has another
            length, `waves` decreases, or `correct` is missing although it is required.

    Source: Gupta and Gupta (2026), *Bootstrapped mixed rewards for RL post-training*.

    >>> order_reward("abc", "abc"), order_reward("bac", "abc")
    (1.0, 0.6666666666666666)
    >>> order_reward("bac", "abc", waves=[0, 0, 1])
    1.0
    """
    _check_reduce(reduce)
    if not canonical or len(set(canonical)) < len(canonical):
        raise ValueError(f"`canonical` must hold distinct cells, at least one, got {canonical!r}")
    if waves is not None and len(waves) != len(canonical):
        raise ValueError(f"`waves` must have {len(canonical)} entries, got {len(waves)}")
    if waves is not None and list(waves) != sorted(waves):
        raise ValueError(f"`waves` must not decrease, got {waves!r}")
    if correct is not None and len(correct) != len(actions):
        raise ValueError(f"`correct` must have {len(actions)} entries, got {len(correct)}")
    if require_correct and correct is None:
        raise ValueError("`correct` must be given when `require_correct` is true")
    named: dict[Hashable, int] = {}
    for index, cell in enumerate(actions):
        if cell is None:
            break
        named.setdefault(cell, index)
    wave = list(range(len(canonical))) if waves is None else list(waves)
    earned = []
    for place, cell in enumerate(canonical):
        if cell not in named or (require_correct and correct and not correct[named[cell]]):
            continue
        first = wave.index(wave[place])
        last = first + wave.count(wave[place]) - 1
        earned.append(1 / (1 + max(0, first - named[cell], named[cell] - last)))
    # Exactly rounded, so that two responses with the same distances have the same reward.
    total = math.fsum(earned)
    return total / len(canonical) if reduce == "mean" else total


def order_rewards(
    cells: ArrayLike,
    canonical: ArrayLike,
    *,
    waves: ArrayLike | None = None,
    correct: ArrayLike | None = None,
    require_correct: bool = False,
    reduce: Reduce = "mean",
) -> Array:
    """`order_reward` of B responses at once, in time proportional to B T M.

    Args:
        cells: the cell of each action, integers (B, T). `STOP` (-1) is an illegal token: what
            follows it is not read, so it serves for the end token and as padding too.
        canonical: each response's cells in canonical order, integers (B, M), not negative.
        waves: the wave of each canonical cell, integers (B, M), not decreasing along a row.
        correct: whether the value of each action is right, booleans (B, T).
        require_correct: as in `order_reward`.
        reduce: as in `order_reward`.

    Returns:
        Rewards, shape (B,), equal to those of `order_reward`.

    >>> order_rewards([[1, 0, 2], [0, 1, -1]], [[0, 1, 2], [0, 1, 2]]).round(4)
    array([0.6667, 0.6667])
    """
    _check_reduce(reduce)
    named = _named(cells)
    known = _known(canonical, len(named))
    place = np.broadcast_to(np.arange(known.shape[1]), known.shape)
    first = last = place
    if waves is not None:
        wave = _integers("waves", waves)
        _check_shape("waves", wave, known.shape)
        if (np.diff(wave, axis=1) < 0).any():
            raise ValueError("`waves` must not decrease along a row")
        tied = wave[:, :, None] == wave[:, None, :]
        first = tied.argmax(2)
        last = first + tied.sum(2) - 1
    mentions = _mentions(named, known)
    paid, index = mentions.any(2), mentions.argmax(2)  # the index of the first mention
    if correct is not None:
        right = np.pad(_booleans("correct", correct, named.shape), [(0, 0), (0, 1)])
        if require_correct:
            paid &= np.take_along_axis(right, index, 1)
    elif require_correct:
        raise ValueError("`correct` must be given when `require_correct` is true")
    distance = np.maximum(0, np.maximum(first - index, index - last))
    # Sorted, so that the rounding of a sum does not depend on which cell earned what: else two
    # equal rewards differ in the last bit, and a group normalisation makes that bit an advantage.
    total = np.sort(np.where(paid, 1 / (1 + distance), 0.0), axis=1).sum(1)
    return total / known.shape[1] if reduce == "mean" else total


def solve_rewards(
    cells: ArrayLike, canonical: ArrayLike, *, correct: ArrayLike, ended: ArrayLike
) -> Array:
    """1 where a response names every cell exactly once, all right, and then ends; else 0.

    Args:
        cells: the cell of each action before the end token, integers (B, T), padded with `STOP`.
        canonical: the M cells, integers (B, M), not negative, in any order.
        correct: whether the value of each action is right, booleans (B, T).
        ended: whether the end token came right after the last cell, booleans (B,); false for a
            response that was cut off or that stopped at an illegal token.

    Returns:
        Rewards, shape (B,).

    >>> right = [[True, True], [True, True]]
    >>> solve_rewards([[1, 0], [0, 0]], [[0, 1], [0, 1]], correct=right, ended=[True, True])
    array([1., 0.])
    """
    named = _named(cells)
    known = _known(canonical, len(named))
    right = _booleans("correct", correct, named.shape)
    end = _booleans("ended", ended, named.shape[:1])
    read = _read(named)
    exact = read.sum(1) == known.shape[1]
    every = np.all(np.any(_mentions(named, known), axis=2), axis=1)
    return (exact & every & (right | ~read).all(1) & end).astype(np.float64)


def uniform_order_reward(cells: int) -> float:
    """Expected order reward of M cells named in uniformly random order: `(2(M+1)h_M - 3M) / M²`.

    `h_M` is the harmonic number `1 + 1/2 + … + 1/M`. A policy that has learned no order earns this.

    >>> round(uniform_order_reward(9), 4)
    0.3652
    """
    if type(cells) is not int or cells < 1:
        raise ValueError(f"`cells` must be an int of at least 1, got {cells!r}")
    harmonic = math.fsum(1 / k for k in range(1, cells + 1))
    return (2 * (cells + 1) * harmonic - 3 * cells) / cells**2


def _read(named: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which actions come before the first `STOP`."""
    return np.logical_and.accumulate(named != STOP, axis=1)


def _mentions(named: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether cell i is named by action j, (B, M, T + 1): one more, so that T may be 0."""
    read = np.pad(np.where(_read(named), named, STOP), [(0, 0), (0, 1)], constant_values=STOP)
    return known[:, :, None] == read[:, None, :]


def _check_reduce(reduce: str) -> None:
    if reduce not in get_args(Reduce):
        raise ValueError(f'`reduce` must be "mean" or "sum", got {reduce!r}')


def _array(name: str, values: ArrayLike, kinds: str, expected: str) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"`{name}` must be one array: {error}") from None
    if array.dtype.kind not in kinds:
        raise TypeError(f"`{name}` must hold {expected}, got {array.dtype}")
    return array


def _integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = _array(name, values, "iu", "integers")
    if array.ndim != 2:
        raise ValueError(f"`{name}` must have two dimensions, got shape {array.shape}")
    return array.astype(np.int64)


def _named(cells: ArrayLike) -> NDArray[np.int64]:
    array = _integers("cells", cells)
    if (array < STOP).any():
        raise ValueError(f"`cells` must be at least {STOP}, got {array.min()}")
    return array


def _known(canonical: ArrayLike, rows: int) -> NDArray[np.int64]:
    array = _integers("canonical", canonical)
    if len(array) != rows or array.shape[1] == 0:
        raise ValueError(
            f"`canonical` must have shape ({rows}, M), M at least 1, got {array.shape}"
        )
    ordered = np.sort(array, axis=1)
    if (ordered < 0).any() or (np.diff(ordered, axis=1) == 0).any():
        raise ValueError("`canonical` must hold distinct cells, not negative, in each row")
    return array


def _booleans(name: str, values: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    array = _array(name, values, "b", "booleans")
    _check_shape(name, array, shape)
    return array


def _check_shape(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"`{name}` has shape {array.shape}, expected {shape}")
