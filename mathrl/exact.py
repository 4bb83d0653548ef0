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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Actions = NDArray[np.int64]

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
    return float(tree_kl([logits], [ref_logits])[0])


def kl_gradient(logits: ArrayLike, ref_logits: ArrayLike) -> Array:
    """`∇KL(π‖ref) = π_k (log π_k - log ref_k - KL)`, in the logits of `π`.

    Raises:
        ValueError: the divergence is infinite.

    >>> kl_gradient(np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])).round(6)
    array([ 0.346243, -0.220389, -0.125854])
    """
    return tree_kl_gradient([logits], [ref_logits])[0]


def forward_kl_gradient(logits: ArrayLike, ref_logits: ArrayLike) -> Array:
    """`∇KL(ref‖π) = π - ref`, in the logits of `π`.

    Raises:
        ValueError: the divergence is infinite.

    >>> forward_kl_gradient(np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.5, 0.3])).round(6)
    array([ 0.3, -0.2, -0.1])
    """
    if kl(ref_logits, logits) == math.inf:
        raise ValueError("`logits` must allow every action that `ref_logits` allows")
    return softmax(logits) - softmax(ref_logits)


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
    mean = sum(w @ x for w, x in _estimates(logits, estimator, size))
    centered = ((w, x - mean) for w, x in _estimates(logits, estimator, size))
    return Moments(mean, sum((w * x.T) @ x for w, x in centered))


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
        ValueError: the groups are more than `MOST_GROUPS`, or the advantages have another shape
            or are not finite.

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
            another shape, are not finite, or depend on the order of the group.

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
    within = binomial(size, probs[success].sum()) @ (counts * weights**2).T / size

    chance = binomial(size, probs[success].sum())
    mean = chance @ conditional_mean
    centered = conditional_mean - mean
    spread = sum(w * (np.diag(q) - np.outer(q, q)) for w, q in zip(within, given, strict=True))
    return Moments(mean, (chance * centered.T) @ centered + spread)
