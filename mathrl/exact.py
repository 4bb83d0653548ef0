"""Exact answers for small worlds: everything is counted, nothing is sampled.

numpy in float64, without torch, so that nothing here shares code with the functions it judges.

A policy over A actions is the softmax of its `logits`, shape (A,); `-inf` forbids an action. What
a forbidden action would have contributed is dropped before it is multiplied, so that `0 log 0` is
0 and every gradient is exactly 0 there, whatever the value at that action: a reward, `-inf`, NaN.
Gradients are in the logits, logarithms are natural. A policy over trajectories of T choices is a
tree: `steps`, a list of arrays of logits of shapes (A1,), (A1, A2), … (A1, …, AT), in which the
last axis is the choice and the axes before it are the path that led there.

Rules for every function: TypeError if an argument does not hold numbers; ValueError if shapes
disagree, if a policy has NaN or `inf` among its logits or forbids everything, or if a value is
not finite at an action that is allowed. Formulas are derived in the book, chapters 2 to 5.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Actions = NDArray[np.int64]
Steps = Sequence[ArrayLike]

MOST_GROUPS = 10_000_000
_ENTRIES = 2**20  # numbers in one chunk of an enumeration


def log_softmax(logits: ArrayLike) -> Array:
    """Log-probabilities `θ_k - log Σ_j e^{θ_j}` over the last axis, shape (..., A).

    >>> log_softmax([0.0, 0.0, -np.inf]).round(4)
    array([-0.6931, -0.6931,    -inf])
    """
    array = _numbers("logits", logits)
    if array.ndim == 0:
        raise ValueError("`logits` must have shape (..., A), got ()")
    return _normalize("logits", array)


def softmax(logits: ArrayLike) -> Array:
    """Probabilities `π_k = e^{θ_k} / Σ_j e^{θ_j}` over the last axis, shape (..., A).

    >>> softmax([0.2, -0.1, 0.4]).round(6)
    array([0.337585, 0.250089, 0.412327])
    """
    return np.exp(log_softmax(logits))


def expectation(logits: ArrayLike, values: ArrayLike) -> Array:
    """`E[f(a)]` for `a ~ π`, where `values` lists `f(a)`, shape (A, ...); returns shape (...).

    >>> expectation(np.log([0.5, 0.3, 0.2]), [1, 0, 0]).round(3)
    np.float64(0.5)
    """
    log_probs = _policy("logits", logits)
    array = _numbers("values", values)
    expected = _known("values", array, log_probs, array.shape[1:])
    return np.tensordot(np.exp(log_probs), expected, axes=1)[()]


def value(logits: ArrayLike, rewards: ArrayLike) -> float:
    """Expected reward `J = Σ_k π_k r_k`; `rewards` has shape (A,).

    >>> round(value([0.2, -0.1, 0.4], [1, 0, 0.5]), 6)
    0.543748
    """
    log_probs = _policy("logits", logits)
    return float(np.exp(log_probs) @ _known("rewards", rewards, log_probs))


def gradient(logits: ArrayLike, rewards: ArrayLike) -> Array:
    """Policy gradient `∂J/∂θ_k = π_k (r_k - J)`, shape (A,).

    >>> gradient([0.2, -0.1, 0.4], [1, 0, 0.5]).round(6)
    array([ 0.154024, -0.135985, -0.018038])
    """
    log_probs = _policy("logits", logits)
    return _centered(np.exp(log_probs), _known("rewards", rewards, log_probs))


def hessian(logits: ArrayLike, rewards: ArrayLike) -> Array:
    """Second derivatives of `J`: with `g = ∇J`, `∂²J/∂θ_j∂θ_k = δ_jk g_k - π_j g_k - π_k g_j`.

    >>> hessian([0.0, 0.0], [1, 0])
    array([[0., 0.],
           [0., 0.]])
    """
    probs, slope = softmax(logits), gradient(logits, rewards)
    return np.diag(slope) - np.outer(probs, slope) - np.outer(slope, probs)


def score(logits: ArrayLike) -> Array:
    """Score functions, shape (A, A): row `a` is `∇ log π(a) = onehot(a) - π`.

    The row of a forbidden action, which is never drawn, is 0.

    >>> score(np.log([0.5, 0.3, 0.2])).round(3)
    array([[ 0.5, -0.3, -0.2],
           [-0.5,  0.7, -0.2],
           [-0.5, -0.3,  0.8]])
    """
    log_probs = _policy("logits", logits)
    rows = np.eye(len(log_probs)) - np.exp(log_probs)
    return _known("score", rows, log_probs, log_probs.shape)


def entropy(logits: ArrayLike) -> float:
    """Entropy `H = -Σ_k π_k log π_k`, in nats.

    >>> round(entropy([0.0, 0.0, -np.inf]), 6)
    0.693147
    """
    return value(logits, -_policy("logits", logits))


def entropy_gradient(logits: ArrayLike) -> Array:
    """`∂H/∂θ_k = -π_k (log π_k + H)`: the policy gradient of the rewards `-log π`.

    That these rewards move with `θ` adds nothing, because the expected score is 0.

    >>> entropy_gradient([1.0, 0.0, -np.inf]).round(4)
    array([-0.1966,  0.1966,  0.    ])
    """
    return gradient(logits, -_policy("logits", logits))


def kl(logits: ArrayLike, ref_logits: ArrayLike) -> float:
    """Reverse divergence `KL(π‖ref) = Σ_k π_k (log π_k - log ref_k)`, in nats.

    It is `inf` if the reference forbids an action that the policy allows. The forward divergence
    `KL(ref‖π)` is `kl(ref_logits, logits)`.

    >>> round(kl(np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])), 6)
    0.223805
    """
    own, ref = _pair(logits, ref_logits)
    return float(tree_kl([own], [ref])[0])


def kl_gradient(logits: ArrayLike, ref_logits: ArrayLike) -> Array:
    """`∇KL(π‖ref) = π_k (log π_k - log ref_k - KL)`, in the logits of `π`.

    Raises:
        ValueError: the divergence is infinite.

    >>> kl_gradient(np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])).round(6)
    array([ 0.346243, -0.220389, -0.125854])
    """
    own, ref = _pair(logits, ref_logits)
    if kl(own, ref) == math.inf:
        raise ValueError("`ref_logits` must allow every action that `logits` allows")
    return tree_kl_gradient([own], [ref])[0]


def forward_kl_gradient(logits: ArrayLike, ref_logits: ArrayLike) -> Array:
    """`∇KL(ref‖π) = π - ref`, in the logits of `π`.

    Raises:
        ValueError: the divergence is infinite.

    >>> forward_kl_gradient(np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])).round(6)
    array([ 0.3, -0.2, -0.1])
    """
    own, ref = _pair(logits, ref_logits)
    if kl(ref, own) == math.inf:
        raise ValueError("`logits` must allow every action that `ref_logits` allows")
    return np.exp(own) - np.exp(ref)


class Moments(NamedTuple):
    """Mean, shape (D,), and covariance, shape (D, D), of an estimate of D numbers."""

    mean: Array
    covariance: Array

    @property
    def variance(self) -> float:
        """Trace of the covariance: the expected squared distance from the mean."""
        return float(np.trace(self.covariance))


def moments(logits: ArrayLike, estimator: Callable[[Actions], Array], size: int) -> Moments:
    """Moments of any estimator that sees a group of `size` independent actions.

    All A^G groups of allowed actions are visited, twice, in chunks of bounded memory.

    Args:
        logits: shape (A,).
        estimator: from groups of actions, shape (N, G), to estimates, shape (N, D).
        size: G, at least 1.

    Returns:
        Mean (D,) and covariance (D, D).

    Raises:
        ValueError: the groups are more than `MOST_GROUPS`, or an estimate has another shape or
            is not finite.

    >>> drawn = moments(np.log([0.5, 0.3, 0.2]), lambda actions: 1.0 * actions, 2)
    >>> drawn.mean.round(3), round(drawn.variance, 3)
    (array([0.7, 0.7]), 1.22)
    """
    first = [w @ x for w, x in _estimates(logits, estimator, size)]
    mean: Array = np.sum(first, axis=0)
    centered = ((w, x - mean) for w, x in _estimates(logits, estimator, size))
    return Moments(mean, np.sum([(w * x.T) @ x for w, x in centered], axis=0))


def group_moments(
    logits: ArrayLike, rewards: ArrayLike, advantages: Callable[[Array], Array], size: int
) -> Moments:
    """Moments of the policy-gradient estimator `ĝ = (1/G) Σ_i A_i ∇log π(a_i)` by enumeration.

    Args:
        logits: shape (A,).
        rewards: shape (A,).
        advantages: from the rewards of groups, shape (N, G), to advantages, shape (N, G).
        size: G, at least 1.

    Returns:
        Mean (A,) and covariance (A, A).

    Raises:
        ValueError: the groups are more than `MOST_GROUPS`, or the advantages have another shape,
            are not finite, or make a group depend on the groups beside it.

    >>> group_mean = lambda rewards: rewards - rewards.mean(1, keepdims=True)
    >>> group_moments(np.log([0.5, 0.3, 0.2]), [1, 0, 0], group_mean, 4).mean.round(4)
    array([ 0.1875, -0.1125, -0.075 ])
    """
    log_probs = _policy("logits", logits)
    table, scores = _known("rewards", rewards, log_probs), score(logits)

    def estimator(actions: Actions) -> Array:
        weights = _advantages(advantages, table[actions])
        return np.einsum("ng,ngd->nd", weights, scores[actions]) / actions.shape[1]

    return moments(logits, estimator, size)


def binary_moments(
    logits: ArrayLike, rewards: ArrayLike, advantages: Callable[[Array], Array], size: int
) -> Moments:
    """What `group_moments` returns when rewards take two values, at any group size.

    The advantage of a member may depend only on its own reward and on the number `S` of successes
    in its group, as it does for every baseline of chapter 3. Then it is enough to sum over
    `S ~ Binomial(G, p)`: given which members succeed, their actions are independent.

    Args:
        logits: shape (A,).
        rewards: shape (A,); the higher value is a success.
        advantages: from the rewards of groups, shape (N, G), to advantages, shape (N, G).
        size: G, at least 1.

    Returns:
        Mean (A,) and covariance (A, A).

    Raises:
        ValueError: the allowed actions do not have exactly two rewards, or the advantages have
            another shape, are not finite, or depend on the order of the group or on the groups
            beside it.

    >>> group_mean = lambda rewards: rewards - rewards.mean(1, keepdims=True)
    >>> binary_moments(np.log([0.5, 0.3, 0.2]), [1, 0, 0], group_mean, 1000).mean.round(5)
    array([ 0.24975, -0.14985, -0.0999 ])
    """
    log_probs = _policy("logits", logits)
    table = _known("rewards", rewards, log_probs)
    allowed = log_probs > -np.inf
    levels = np.unique(table[allowed])
    if len(levels) != 2:
        raise ValueError(f"`rewards` must take two values at allowed actions, got {levels}")
    low, high = levels
    probs, success = np.exp(log_probs), allowed & (table == high)
    successes = np.arange(_size(size) + 1)
    won, lost = _advantages_by_outcome(advantages, low, high, size)

    # Given success, an action is a draw from π restricted to successes; the same for failure.
    given = [softmax(np.where(outcome, log_probs, -np.inf)) for outcome in (success, ~success)]
    counts = np.stack([successes, size - successes]) / size
    weights = np.stack([won, lost])
    conditional_mean = (counts * weights).T @ (np.stack(given) - probs)

    # Rounding can carry a sum of probabilities past 1.
    chance = binomial(size, min(1.0, probs[success].sum()))
    within = chance @ (counts * weights**2).T / size
    mean = chance @ conditional_mean
    centered = conditional_mean - mean
    spread = sum(w * (np.diag(q) - np.outer(q, q)) for w, q in zip(within, given, strict=True))
    return Moments(mean, (chance * centered.T) @ centered + spread)


def binomial(size: int, p: float) -> Array:
    """Probabilities of 0 … `size` successes among `size` trials, shape (size + 1,).

    Raises:
        TypeError: `size` is not an integer.
        ValueError: `size` is negative or `p` lies outside [0, 1].

    >>> binomial(2, 0.5)
    array([0.25, 0.5 , 0.25])
    """
    _size(size, least=0)
    if not 0 <= p <= 1:
        raise ValueError(f"`p` must lie in [0, 1], got {p}")
    if p in (0, 1):
        return np.eye(size + 1)[round(p) * size]
    # Through logarithms: 1024 choose 512 is near the largest float, and p^512 near the smallest.
    factorials = np.array([math.lgamma(k + 1) for k in range(size + 1)])
    successes = np.arange(size + 1)
    ways = factorials[-1] - factorials - factorials[::-1]
    return np.exp(ways + successes * math.log(p) + (size - successes) * math.log1p(-p))


def std_factor(p: float, size: int, ddof: int = 0) -> float:
    """Factor `c` in `E[ĝ] = c ∇p` when a group's rewards 0 and 1 are standardised.

    `c = √((G - ddof)/G) E[s] / (p(1-p))`, where `s` is the standard deviation of the rewards of a
    group of G with `ddof = 0`. It is 1 at G = 2 and tends to `1/√(p(1-p))` as G grows.

    Args:
        p: success probability, in (0, 1).
        size: G, at least 1.
        ddof: 0 or 1, of the standard deviation that is divided by.

    Raises:
        TypeError: `size` is not an integer.
        ValueError: an argument is outside its range.

    >>> round(std_factor(0.01, 8), 4), round(std_factor(0.5, 8, ddof=1), 3)
    (2.6089, 1.736)
    """
    if not 0 < p < 1:
        raise ValueError(f"`p` must lie in (0, 1), got {p}")
    if ddof not in (0, 1):
        raise ValueError(f"`ddof` must be 0 or 1, got {ddof}")
    share = np.arange(_size(size) + 1) / size
    deviation = binomial(size, p) @ np.sqrt(share * (1 - share))
    return math.sqrt((size - ddof) / size) * float(deviation) / (p * (1 - p))


def tree_value(steps: Steps, rewards: ArrayLike) -> float:
    """Expected reward of a policy over trajectories; `rewards` has shape (A1, …, AT).

    >>> tree_value([[0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]]], [[1, 0], [1, 1]])
    0.75
    """
    log_probs = _tree("steps", steps)
    return float((np.exp(_path(log_probs)) * _known("rewards", rewards, _path(log_probs))).sum())


def tree_gradient(steps: Steps, rewards: ArrayLike) -> list[Array]:
    """Policy gradient of `tree_value`, in the shapes of `steps`.

    At each choice it is `reach · π_k (Q_k - V)`: the probability of getting there, times the
    gradient of the value from there on.

    >>> tree_gradient([[0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]]], [[1, 0], [1, 1]])[0]
    array([-0.125,  0.125])
    """
    log_probs = _tree("steps", steps)
    gains: list[Array] = [np.zeros(array.shape) for array in log_probs]
    gains[-1] = _known("rewards", rewards, _path(log_probs))
    return _ascend(log_probs, gains)


def tree_kl(steps: Steps, ref_steps: Steps) -> Array:
    """Expected divergence of each step along the tree, shape (T,), in nats.

    The sum is the divergence between the distributions of whole trajectories. A step is `inf` if
    the reference forbids a choice that the policy can make.

    >>> tree_kl([np.log([0.5, 0.3, 0.2])], [np.log([0.2, 0.5, 0.3])]).round(6)
    array([0.223805])
    """
    log_probs = _tree("steps", steps)
    ratios = _log_ratios(log_probs, _tree("ref_steps", ref_steps))
    chances = [np.exp(_path(log_probs[: t + 1])) for t in range(len(log_probs))]
    # A probability may underflow to 0 where the ratio is infinite: no product of the two.
    return np.array(
        [
            math.inf if (ratio == math.inf).any() else (chance * ratio).sum()
            for chance, ratio in zip(chances, ratios, strict=True)
        ]
    )


def tree_kl_gradient(steps: Steps, ref_steps: Steps) -> list[Array]:
    """Gradient of `tree_kl(steps, ref_steps).sum()`, in the shapes of `steps`.

    It is the policy gradient of the log-ratios as rewards: an early choice answers for its own
    step and for the steps that it leads to.

    Raises:
        ValueError: the divergence is infinite.

    >>> tree_kl_gradient([np.log([0.5, 0.3, 0.2])], [np.log([0.2, 0.5, 0.3])])[0].round(6)
    array([ 0.346243, -0.220389, -0.125854])
    """
    log_probs = _tree("steps", steps)
    if tree_kl(steps, ref_steps).sum() == math.inf:
        raise ValueError("`ref_steps` must allow every choice that `steps` allow")
    return _ascend(log_probs, _log_ratios(log_probs, _tree("ref_steps", ref_steps)))


def _numbers(name: str, values: ArrayLike) -> Array:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"`{name}` must be one array of numbers: {error}") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(f"`{name}` must hold real numbers, got {array.dtype}")
    return array.astype(np.float64)


def _normalize(name: str, logits: Array) -> Array:
    if np.isnan(logits).any() or (logits == np.inf).any():
        raise ValueError(f"`{name}` must be finite, or -inf where forbidden, got {logits.tolist()}")
    if logits.shape[-1] == 0 or (logits == -np.inf).all(-1).any():
        raise ValueError(f"`{name}` must allow at least one action, got {logits.tolist()}")
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _policy(name: str, logits: ArrayLike) -> Array:
    array = _numbers(name, logits)
    if array.ndim != 1:
        raise ValueError(f"`{name}` must have shape (A,), got {array.shape}")
    return _normalize(name, array)


def _pair(logits: ArrayLike, ref_logits: ArrayLike) -> tuple[Array, Array]:
    own, ref = _policy("logits", logits), _policy("ref_logits", ref_logits)
    if own.shape != ref.shape:
        raise ValueError(f"`ref_logits` has shape {ref.shape}, expected {own.shape}")
    return own, ref


def _known(name: str, values: ArrayLike, log_probs: Array, more: tuple[int, ...] = ()) -> Array:
    """Values at allowed actions and 0 at forbidden ones; `more` are axes after the policy's."""
    array = _numbers(name, values)
    if array.shape != log_probs.shape + more:
        raise ValueError(f"`{name}` has shape {array.shape}, expected {log_probs.shape + more}")
    forbidden = (log_probs == -np.inf).reshape(log_probs.shape + (1,) * len(more))
    kept = np.where(forbidden, 0.0, array)
    if not np.isfinite(kept).all():
        raise ValueError(f"`{name}` must be finite at allowed actions, got {array.tolist()}")
    return kept


def _centered(probs: Array, values: Array) -> Array:
    # Adding 0 turns the -0.0 of a forbidden action into 0.0.
    return probs * (values - (probs * values).sum(-1, keepdims=True)) + 0.0


def _size(size: int, least: int = 1) -> int:
    if not isinstance(size, (int, np.integer)):
        raise TypeError(f"`size` must be an integer, got {type(size).__name__}")
    if size < least:
        raise ValueError(f"`size` must be at least {least}, got {size}")
    return int(size)


def _estimates(
    logits: ArrayLike, estimator: Callable[[Actions], Array], size: int
) -> Iterator[tuple[Array, Array]]:
    """Probabilities (N,) and estimates (N, D) of all groups, in chunks."""
    log_probs = _policy("logits", logits)
    allowed = np.flatnonzero(log_probs > -np.inf)
    count = len(allowed) ** _size(size)
    if count > MOST_GROUPS:
        raise ValueError(f"`size` makes {count} groups, expected at most {MOST_GROUPS}")
    chunk = max(1, _ENTRIES // (size * len(log_probs)))
    width: tuple[int, ...] | None = None
    for start in range(0, count, chunk):
        index = np.arange(start, min(start + chunk, count))
        digits = np.stack([index // len(allowed) ** place for place in range(size)], axis=1)
        actions = allowed[digits % len(allowed)]
        estimates = np.asarray(estimator(actions), dtype=np.float64)
        width = estimates.shape[1:] if width is None else width
        if estimates.shape != (len(index), *width) or len(width) != 1:
            raise ValueError(f"`estimator` returned {estimates.shape}, expected ({len(index)}, D)")
        if not np.isfinite(estimates).all():
            raise ValueError("`estimator` must return finite numbers")
        yield np.exp(log_probs[actions].sum(1)), estimates


def _advantages(advantages: Callable[[Array], Array], rewards: Array) -> Array:
    weights = np.asarray(advantages(np.ascontiguousarray(rewards)), dtype=np.float64)
    if weights.shape != rewards.shape:
        raise ValueError(f"`advantages` returned {weights.shape}, expected {rewards.shape}")
    if not np.isfinite(weights).all():
        raise ValueError("`advantages` must return finite numbers")
    alone = np.asarray(advantages(np.ascontiguousarray(rewards[-1:])), dtype=np.float64)
    if not np.allclose(alone, weights[-1:]):
        raise ValueError("`advantages` must judge each group alone, without the groups beside it")
    return weights


def _advantages_by_outcome(
    advantages: Callable[[Array], Array], low: float, high: float, size: int
) -> tuple[Array, Array]:
    """Advantage of a success and of a failure, each against the number of successes, 0 … G."""
    successes = np.arange(size + 1)
    won = np.arange(size) < successes[:, None]
    weights = _advantages(advantages, np.where(won, high, low))
    reverse = _advantages(advantages, np.where(won, high, low)[:, ::-1])[:, ::-1]
    first, last = weights[:, 0], weights[:, -1]
    expected = np.where(won, first[:, None], last[:, None])
    if not (np.allclose(weights, expected) and np.allclose(reverse, expected)):
        raise ValueError("`advantages` must depend on the own reward and the number of successes")
    # A group without successes has no success to judge; its weight is never used.
    return np.where(successes > 0, first, 0.0), np.where(successes < size, last, 0.0)


def _tree(name: str, steps: Steps) -> list[Array]:
    if len(steps) == 0:
        raise ValueError(f"`{name}` must hold at least one step")
    log_probs = [_numbers(f"{name}[{t}]", step) for t, step in enumerate(steps)]
    for t, array in enumerate(log_probs):
        before = log_probs[t - 1].shape if t else ()
        if array.ndim != t + 1 or array.shape[:-1] != before:
            raise ValueError(
                f"`{name}[{t}]` has shape {array.shape}, expected {(*before, 'A')}".replace("'", "")
            )
    return [_normalize(f"{name}[{t}]", array) for t, array in enumerate(log_probs)]


def _path(log_probs: list[Array]) -> Array:
    """Log-probability of every trajectory, shape (A1, …, AT)."""
    total = np.zeros(())
    for step in log_probs:
        total = total[..., None] + step
    return total


def _reach(log_probs: list[Array]) -> list[Array]:
    """Probability of coming to each choice: shapes (), (A1,), …, (A1, …, A(T-1))."""
    return [np.exp(_path(log_probs[:t])) for t in range(len(log_probs))]


def _log_ratios(log_probs: list[Array], ref_log_probs: list[Array]) -> list[Array]:
    """`log π - log ref` of every choice that can be reached and made, and 0 elsewhere."""
    if len(ref_log_probs) != len(log_probs):
        raise ValueError(f"`ref_steps` has {len(ref_log_probs)} steps, expected {len(log_probs)}")
    ratios = []
    for t, (own, ref) in enumerate(zip(log_probs, ref_log_probs, strict=True)):
        if own.shape != ref.shape:
            raise ValueError(f"`ref_steps[{t}]` has shape {ref.shape}, expected {own.shape}")
        taken = _path(log_probs[: t + 1]) > -np.inf
        ratios.append(np.where(taken, np.where(taken, own, 0.0) - ref, 0.0))
    return ratios


def _ascend(log_probs: list[Array], gains: list[Array]) -> list[Array]:
    """Policy gradient at each choice, where a choice earns its gain and what follows from it."""
    slopes: list[Array] = []
    later = np.zeros(log_probs[-1].shape)
    for reach, own, gain in reversed(list(zip(_reach(log_probs), log_probs, gains, strict=True))):
        total = np.where(own == -np.inf, 0.0, gain + later)
        slopes.append(reach[..., None] * _centered(np.exp(own), total))
        later = (np.exp(own) * total).sum(-1)
    return slopes[::-1]
