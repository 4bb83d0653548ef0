"""The policy: from logits to log-probabilities, their score function and their entropy.

A policy is a softmax of logits `θ`, `π_k = e^{θ_k} / Σ_j e^{θ_j}`. Log-probabilities are natural
logarithms. An action that may not be taken has log-probability `-inf` and probability exactly 0;
it receives a gradient of exactly 0. Shapes match exactly: nothing is broadcast but a mask of
shape (V,), where the function says so.
"""

import math

import torch
from torch import Tensor

from mathrl import _checks


def restricted_log_softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    """Log-probabilities of the softmax over the allowed actions only.

    The normaliser sums over the allowed actions. Normalising over all actions and dropping some
    afterwards leaves probabilities that sum to less than 1, so that every sampled token is
    reported less likely than it was.

    Args:
        logits: shape (..., V); float16 and bfloat16 are upcast to float32. Entries that are not
            allowed may hold anything, NaN included.
        allowed: boolean, of the shape of `logits`, or of shape (V,): one set for every row.

    Returns:
        Log-probabilities in nats, shape (..., V), `-inf` where not allowed. No gradient, NaN or
        otherwise, passes through an action that is not allowed.

    Raises:
        TypeError: `logits` is not a floating tensor, or `allowed` is not boolean.
        ValueError: the shapes differ, a row allows nothing, or an allowed logit is not finite.

    Source: derived in the book, chapter 2.

    >>> logits = torch.tensor([2.0, 1.0, 0.0])
    >>> allowed = torch.tensor([True, False, True])
    >>> restricted_log_softmax(logits, allowed)
    tensor([-0.1269,    -inf, -2.1269])
    """
    logits = _upcast(logits)
    _checks.tensor(allowed=allowed)
    if allowed.dtype != torch.bool:
        raise TypeError(f"`allowed` must be boolean, got {allowed.dtype}")
    if allowed.shape not in (logits.shape, logits.shape[-1:]):
        raise ValueError(
            f"`allowed` has shape {tuple(allowed.shape)}, expected {tuple(logits.shape)}, "
            f"the shape of `logits`, or {tuple(logits.shape[-1:])}"
        )
    count = allowed.sum(-1)
    _checks.reject(count == 0, count, "`allowed` must keep at least one action in each row")
    _checks.finite(logits=logits.masked_fill(~allowed, 0.0))
    inside = torch.log_softmax(logits.masked_fill(~allowed, -math.inf), dim=-1)
    # The second fill stops what would come back through a forbidden entry, for example NaN from
    # a downstream 0 * -inf, before the softmax spreads it over the whole row.
    return inside.masked_fill(~allowed, -math.inf)


def log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target under the softmax of `logits / temperature`.

    The temperature is the one that sampled the targets. Sampling at one temperature and scoring
    at another makes the importance ratio of an unchanged policy differ from 1. To score under a
    restricted policy, pass what `restricted_log_softmax` returned: it is already normalised, and
    normalising again changes nothing.

    Args:
        logits: shape (B, T, V), or any (..., V); float16 and bfloat16 are upcast to float32,
            because bfloat16 keeps 8 bits and a log-probability near -10 needs more.
        targets: int64, shape (B, T), or the shape of `logits` without its last dimension. Every
            target, padding included, lies in [0, V); masks apply later, to what this returns.
        temperature: positive.

    Returns:
        Log-probabilities in nats, the shape of `targets`. The gradient in the logits is the score
        divided by the temperature.

    Raises:
        TypeError: `logits` is not a floating tensor, or `targets` is not int64.
        ValueError: the shapes do not match, a target is out of range, the temperature is not
            positive and finite, or the log-probability of a target is not finite (a NaN or
            infinite logit in its row, or a target that the policy forbids).

    Source: derived in the book, chapter 2.

    >>> logits = torch.tensor([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]])
    >>> log_probs(logits, torch.tensor([[0, 2]]))
    tensor([[-0.4076, -1.0986]])
    """
    logits = _upcast(logits)
    _check_actions("targets", targets, "logits", logits)
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be positive and finite, got {temperature}")
    full = torch.log_softmax(logits / temperature, dim=-1)
    selected = full.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    expected = "`logits` must give every target a finite log-probability"
    _checks.reject(~torch.isfinite(selected), selected, expected)
    return selected


def score(log_probs: Tensor, actions: Tensor) -> Tensor:
    """Score function `∇_θ log π(a) = onehot(a) - π`, the gradient in the logits.

    Its expectation under `π` is zero, which is why a baseline that does not depend on the action
    adds no bias; weighted with the reward its expectation is the policy gradient.

    Args:
        log_probs: log-probabilities of whole distributions, shape (..., V), float32 or float64.
        actions: int64, shape (...), each in [0, V) and of positive probability.

    Returns:
        Shape (..., V). Each row sums to 0 and is exactly 0 at actions of probability 0.

    Raises:
        TypeError: `log_probs` is not float32 or float64, or `actions` is not int64.
        ValueError: the shapes do not match, a row of probabilities does not sum to 1, an action
            is out of range, or an action has probability 0.

    Source: Williams (1992), doi:10.1007/BF00992696; derived in the book, chapter 2.

    >>> score(torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor(1))
    tensor([-0.5000,  0.7000, -0.2000])
    """
    _checks.normalized(log_probs=log_probs)
    _check_actions("actions", actions, "log_probs", log_probs)
    chosen = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    _checks.reject(chosen == -math.inf, actions, "`actions` must have positive probability")
    one_hot = torch.nn.functional.one_hot(actions, log_probs.shape[-1])
    return one_hot - log_probs.exp()


def entropy(log_probs: Tensor) -> Tensor:
    """Entropy `H(π) = -Σ_k π_k log π_k` in nats, with `0 log 0 = 0`.

    Its gradient in the logits is `∂H/∂θ_k = -π_k (log π_k + H)`, exactly 0 at a forbidden action.
    The average of `-log π(a)` over sampled actions has the same value and, differentiated as it
    stands, an expected gradient of zero: it is no entropy bonus.

    Args:
        log_probs: log-probabilities of whole distributions, shape (..., V), float32 or float64;
            `-inf` at forbidden actions.

    Returns:
        Shape (...), between 0 and log V.

    Raises:
        TypeError: `log_probs` is not float32 or float64.
        ValueError: a row of probabilities does not sum to 1.

    Source: derived in the book, chapter 2.

    >>> entropy(torch.tensor([0.5, 0.5, 0.0]).log())
    tensor(0.6931)
    """
    _checks.normalized(log_probs=log_probs)
    # Masking comes before the product: 0 * -inf is NaN, and so is its gradient.
    finite = log_probs.masked_fill(log_probs == -math.inf, 0.0)
    return -(log_probs.exp() * finite).sum(-1)


def _upcast(logits: Tensor) -> Tensor:
    _checks.floating(logits=logits)
    if logits.dim() == 0:
        raise ValueError("`logits` must have shape (..., V), got ()")
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _check_actions(name: str, actions: Tensor, over: str, values: Tensor) -> None:
    _checks.tensor(**{name: actions})
    if actions.dtype != torch.int64:
        raise TypeError(f"`{name}` must be int64, got {actions.dtype}")
    if actions.shape != values.shape[:-1]:
        raise ValueError(
            f"`{name}` has shape {tuple(actions.shape)}, expected {tuple(values.shape[:-1])}, "
            f"the shape of `{over}` without its last dimension"
        )
    size = values.shape[-1]
    _checks.reject((actions < 0) | (actions >= size), actions, f"`{name}` must lie in [0, {size})")
