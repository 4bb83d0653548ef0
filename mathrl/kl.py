"""Staying near a reference: the KL divergence and its sampled estimators.

`KL(π‖ref) = Σ_k π_k (log π_k - log ref_k)`, in nats, is the reverse divergence when `π` is the
policy being trained; the forward one, `KL(ref‖π)`, is `divergence` with its arguments swapped.

An estimator sees only the sampled action `a`. Write `ℓ = log π(a) - log ref(a)`; the table is for
`a ~ π` and a reference with the support of `π`. "As a loss" means differentiating the estimator
with the samples held fixed; "in the reward" means detaching it and multiplying with the score.

| estimator | per token | expected value | expected gradient as a loss | in the reward |
|---|---|---|---|---|
| `k1` | `ℓ` | `KL(π‖ref)` | `0` | `∇KL(π‖ref)` |
| `k2` | `ℓ²/2` | biased | `∇KL(π‖ref)` | biased |
| `k3` | `e^{-ℓ} - 1 + ℓ` | `KL(π‖ref)` | `∇KL(ref‖π)` | `∇KL(π‖ref) - ∇KL(ref‖π)` |

An unbiased value therefore says nothing about the gradient. Estimates are per token and are
aggregated by the caller, once. Summed over a sampled sequence, the values of `k1` and `k3`
estimate the divergence of the sequences. Their per-token gradients do not add up to its gradient:
an early token also decides which later tokens are reached, and a loss on each token's own
estimate drops that term, while the sum of `k1` in the reward of every token keeps it.
"""

import math

import torch
from torch import Tensor

from mathrl import _checks


def divergence(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Exact `KL(π‖ref) = Σ_k π_k (log π_k - log ref_k)` over the last dimension.

    Its gradient in the logits of `π` is `π_k (log π_k - log ref_k - KL)`. In the logits of `ref`
    it is `ref - π`, so `divergence(ref_log_probs, log_probs)`, the forward divergence, has the
    gradient `π - ref` in the logits of `π`.

    Args:
        log_probs: log-probabilities of whole distributions, shape (..., V), float32 or float64.
        ref_log_probs: the same, for the reference.

    Returns:
        Nats, shape (...). An action with `π = 0` contributes exactly 0 to value and gradient,
        whatever the reference. An action with `π > 0` and `ref = 0` makes the divergence `inf`,
        which has no gradient: what comes back is NaN.

    Raises:
        TypeError: an argument is not float32 or float64.
        ValueError: the shapes differ, or a row of probabilities does not sum to 1.

    Source: derived in the book, chapter 4.

    >>> log_probs = torch.tensor([0.5, 0.3, 0.2]).log()
    >>> ref_log_probs = torch.tensor([0.2, 0.5, 0.3]).log()
    >>> divergence(log_probs, ref_log_probs)
    tensor(0.2238)
    >>> divergence(ref_log_probs, log_probs)
    tensor(0.1938)
    """
    _checks.normalized(log_probs=log_probs, ref_log_probs=ref_log_probs)
    _checks.same_shape(log_probs=log_probs, ref_log_probs=ref_log_probs)
    # Masking comes before the product: 0 * inf is NaN, and so is its gradient.
    log_ratio = (log_probs - ref_log_probs).masked_fill(log_probs == -math.inf, 0.0)
    terms = log_probs.exp() * log_ratio
    # A probability that underflows to 0 still meets a reference of 0 with infinite divergence.
    return terms.masked_fill(log_ratio == math.inf, math.inf).sum(-1)


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate of `KL(π‖ref)` by the log-ratio `ℓ = log π(a) - log ref(a)` of the sampled action.

    Value: unbiased for `a ~ π`, and either sign. As a loss: expected gradient 0, since it is the
    expected score; it does nothing but add noise. In the reward: expected gradient
    `∇KL(π‖ref)`, the one to use there.

    Args:
        log_probs: log-probabilities of the sampled actions, any shape, float32 or float64.
        ref_log_probs: the reference's log-probabilities of the same actions, the same shape.

    Returns:
        Nats, the shape of the arguments.

    Raises:
        TypeError: an argument is not float32 or float64.
        ValueError: the shapes differ, or an entry is not finite.

    Source: Schulman (2020), http://joschu.net/blog/kl-approx.html; the gradient, arXiv:2506.09477.

    >>> k1(torch.tensor([0.5, 0.3]).log(), torch.tensor([0.2, 0.5]).log())
    tensor([ 0.9163, -0.5108])
    """
    _check_pair(log_probs=log_probs, ref_log_probs=ref_log_probs)
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Half the squared log-ratio, `ℓ²/2`: a loss whose expected gradient is `∇KL(π‖ref)`.

    Value: never negative, biased (`E k2` differs from the divergence at third order in `ℓ`). As
    a loss: expected gradient exactly `∇KL(π‖ref)` for `a ~ π`, the one to use there. In the
    reward: expected gradient `∇E[k2] - ∇KL(π‖ref)`, not that of a divergence.

    Args:
        log_probs: log-probabilities of the sampled actions, any shape, float32 or float64.
        ref_log_probs: the reference's log-probabilities of the same actions, the same shape.

    Returns:
        Nats squared, the shape of the arguments.

    Raises:
        TypeError: an argument is not float32 or float64.
        ValueError: the shapes differ, or an entry is not finite.

    Source: Schulman (2020), http://joschu.net/blog/kl-approx.html; the gradient, arXiv:2510.01555.

    >>> k2(torch.tensor([0.5, 0.3]).log(), torch.tensor([0.2, 0.5]).log())
    tensor([0.4198, 0.1305])
    """
    _check_pair(log_probs=log_probs, ref_log_probs=ref_log_probs)
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate of `KL(π‖ref)` by `e^{-ℓ} - 1 + ℓ`: unbiased and never negative.

    Value: unbiased for `a ~ π` when `π` covers the reference; reference mass `m` on actions that
    `π` never takes lowers the expectation to `KL - m`. As a loss: expected gradient `π - ref`,
    that is `∇KL(ref‖π)`, the forward divergence. In the reward: expected gradient
    `∇KL(π‖ref) - ∇KL(ref‖π)`. Through `importance_weighted` its gradient is `∇KL(π‖ref)`.

    Args:
        log_probs: log-probabilities of the sampled actions, any shape, float32 or float64.
        ref_log_probs: the reference's log-probabilities of the same actions, the same shape.

    Returns:
        Nats, the shape of the arguments.

    Raises:
        TypeError: an argument is not float32 or float64.
        ValueError: the shapes differ, or an entry is not finite.

    Source: Schulman (2020), http://joschu.net/blog/kl-approx.html; the gradient, arXiv:2510.01555.

    >>> k3(torch.tensor([0.5, 0.3]).log(), torch.tensor([0.2, 0.5]).log())
    tensor([0.3163, 0.1558])
    """
    _check_pair(log_probs=log_probs, ref_log_probs=ref_log_probs)
    log_ratio = ref_log_probs - log_probs
    # expm1: near zero e^x - 1 cancels, and float32 has nothing left of x²/2 at x = 1e-4.
    return torch.expm1(log_ratio) - log_ratio


def importance_weighted(estimate: Tensor, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Estimate for actions drawn from an older policy: `π(a)/old(a) · estimate`.

    For `a ~ old`, with `old` positive wherever `π` is, the expectation is `E_π[estimate]`. The
    weight is part of the graph, so the expected gradient is `∇E_π[estimate]`: for `k1` and `k3`
    it is `∇KL(π‖ref)`, also on-policy, where the weight is 1 and its gradient is not. With
    `log_probs.detach()` the weight is a constant and the expected gradient is
    `E_π[∇estimate]`: right for `k2`, but 0 for `k1` and `∇KL(ref‖π)` for `k3`.

    Args:
        estimate: per-token estimates, any shape, float32 or float64.
        log_probs: log-probabilities of the sampled actions now, the same shape.
        old_log_probs: their log-probabilities under the policy that drew them, the same shape.

    Returns:
        The shape of the arguments.

    Raises:
        TypeError: an argument is not float32 or float64.
        ValueError: the shapes differ, or an entry is not finite.

    Source: arXiv:2512.02556, section 3.1; derived in the book, chapter 4.

    >>> log_probs = torch.tensor([0.5, 0.3]).log()
    >>> old_log_probs = torch.tensor([0.25, 0.6]).log()
    >>> importance_weighted(torch.tensor([0.3163, 0.1558]), log_probs, old_log_probs)
    tensor([0.6326, 0.0779])
    """
    _check_pair(estimate=estimate, log_probs=log_probs, old_log_probs=old_log_probs)
    return (log_probs - old_log_probs).exp() * estimate


def _check_pair(**tensors: Tensor) -> None:
    _checks.full_precision(**tensors)
    _checks.same_shape(**tensors)
    _checks.finite(**tensors)
