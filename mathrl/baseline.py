"""Baselines: from the rewards of a group to advantages.

A group is G samples `a_i ~ π` of one task, with rewards `r_i`. Its policy-gradient estimate is
`ĝ = (1/G) Σ_i A_i ∇log π(a_i)`, and a baseline chooses the advantages `A_i`. In expectation:

| baseline | advantage | `E[ĝ]` |
|---|---|---|
| `leave_one_out` | `r_i` minus the mean of the others | `∇J` |
| `optimal` | `r_i` minus a weighted mean of the others | `∇J` |
| `group_mean` | `r_i` minus the mean of all | `(1 - 1/G) ∇J` |
| `standardized` | the same, over the group's deviation | `∇J` times a factor that depends on `π` |
| `batch_standardized` | mean and deviation of the batch | the same, weaker as the batch grows |
| `gae` | returns minus a critic's value | depends on the critic for `λ < 1` |

The factor of the standardised ones is for rewards that take two values; in general the direction
changes too. A baseline that looks at `r_i` itself is biased, and a baseline need not reduce the
variance.

Rules for every function but `gae`, which has its own. Rewards have shape (..., G): one group in
each row. Float16 and bfloat16 are upcast to float32. Groups of unequal size are padded and `mask`,
of the same shape, is 1 at rewards and 0 at padding: padding may hold anything, enters no statistic,
and its advantage is exactly 0. Equal rewards give advantages of exactly 0. Errors: TypeError if
`rewards` is not a floating tensor; ValueError if shapes differ, if `mask` holds other values than
0 and 1, if a group has too few rewards, if a reward is NaN or infinite, or if the rewards of a
group lie further apart than their type can say.
"""

import math

import torch
from torch import Tensor

from mathrl import _checks


def group_mean(rewards: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Advantage over the mean of the group: `A_i = r_i - (1/G) Σ_j r_j`.

    The mean contains `r_i`, which pulls it towards the sample it judges: `E[ĝ] = (1 - 1/G) ∇J`.
    The direction is right and the length is short by a factor that a learning rate absorbs, as
    long as every group has the same size.

    Args:
        rewards: shape (..., G), G at least 1.
        mask: 1 at rewards, 0 at padding, the same shape.

    Returns:
        Advantages, shape (..., G).

    Source: GRPO without its division, arXiv:2503.20783; derived in the book, chapter 3.

    >>> group_mean(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """
    centered, _ = _center(rewards, mask, least=1)
    return centered


def leave_one_out(rewards: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Advantage over the mean of the others: `A_i = r_i - (1/(G-1)) Σ_{j≠i} r_j`.

    The others are independent of sample i, so the estimate is unbiased: `E[ĝ] = ∇J`. The
    advantages are those of `group_mean` times `G/(G-1)`.

    Args:
        rewards: shape (..., G), G at least 2: a group of one has no others.
        mask: 1 at rewards, 0 at padding, the same shape; at least two rewards in each row.

    Returns:
        Advantages, shape (..., G).

    Source: RLOO, arXiv:2402.14740; derived in the book, chapter 3.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    centered, count = _center(rewards, mask, least=2)
    # Not `count / (count - 1)`: a quotient of two integer tensors is float32.
    return centered * count / (count - 1)


def standardized(
    rewards: Tensor, *, ddof: int = 0, eps: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    """Advantage of the group mean over the group's standard deviation, `(r_i - mean)/(std + eps)`.

    `std² = Σ_j (r_j - mean)² / (G - ddof)`. The default, `ddof = 0`, is the convention of the
    book's derivations; `torch.std`, and TRL with it, uses `ddof = 1`, which makes every advantage
    smaller by `√((G-1)/G)`. For rewards 0 and 1 with success probability p the expected gradient
    is `(E[std]/(p(1-p))) ∇p` (`ddof = 0`, `eps = 0`): hard and easy tasks are weighted up, and
    large groups ascend `2 arcsin √p` instead of p.

    Args:
        rewards: shape (..., G), G at least 1. A group of one has advantage 0.
        ddof: 0 or 1.
        eps: added to the standard deviation; at 0 the advantages do not depend on the scale of
            the rewards. It is not needed against equal rewards, which give exactly 0 without it.
        mask: 1 at rewards, 0 at padding, the same shape.

    Returns:
        Advantages, shape (..., G).

    Raises:
        ValueError: also if `ddof` is not 0 or 1, or `eps` is negative or not finite.

    Source: GRPO, arXiv:2402.03300; what the division does, arXiv:2503.20783 and chapter 3.

    >>> rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    >>> standardized(rewards)
    tensor([ 1.7321, -0.5774, -0.5774, -0.5774])
    >>> standardized(rewards, ddof=1)
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """
    if ddof not in (0, 1):
        raise ValueError(f"`ddof` must be 0 or 1, got {ddof}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"`eps` must be finite and not negative, got {eps}")
    centered, count = _center(rewards, mask, least=1)
    # Rewards are equal exactly when their range is 0. A deviation computed from them is no test:
    # it can round to something else. Measured in ranges, the squares cannot underflow either.
    width = centered.amax(-1, keepdim=True) - centered.amin(-1, keepdim=True)
    unit = torch.where(width > 0, width, 1.0)
    variance = (centered / unit).square().sum(-1, keepdim=True) / (count - ddof).clamp(min=1)
    deviation = unit * torch.where(width > 0, variance, 1.0).sqrt()
    return centered / (deviation + eps)


def batch_standardized(
    rewards: Tensor, *, ddof: int = 0, eps: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    """`standardized` with the mean and the standard deviation of all rewards in the batch.

    Tasks share one baseline and one scale, so a task keeps its weight against the others; an
    easy task's samples all count as good and a hard task's as bad, which adds variance.

    Args:
        rewards: shape (..., G), at least 1 reward in all.
        ddof: 0 or 1, as in `standardized`.
        eps: added to the standard deviation.
        mask: 1 at rewards, 0 at padding, the same shape.

    Returns:
        Advantages, shape (..., G).

    Raises:
        ValueError: also if `ddof` is not 0 or 1, or `eps` is negative or not finite.

    Source: REINFORCE++, arXiv:2501.03262.

    >>> rewards = torch.tensor([[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0]])
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> batch_standardized(rewards, mask=mask)
    tensor([[ 0.7071,  0.7071,  0.0000],
            [-1.4142,  0.0000,  0.0000]])
    """
    _check_rewards(rewards)
    if mask is not None:
        _checks.same_shape(rewards=rewards, mask=mask)
        mask = mask.flatten()
    flat = standardized(rewards.flatten(), ddof=ddof, eps=eps, mask=mask)
    return flat.reshape(rewards.shape)


def optimal(rewards: Tensor, squared_norms: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Advantage over an estimate of the constant baseline of least variance.

    Among constants b, the variance of `(r - b) ∇log π(a)`, summed over components, is least at
    `b* = E[‖∇log π‖² r] / E[‖∇log π‖²]`: the mean reward, weighted with squared score norms. This
    function estimates it for sample i from the others only,
    `b_i = Σ_{j≠i} w_j r_j / Σ_{j≠i} w_j` with `w_j = ‖∇log π(a_j)‖²`, which keeps the estimate of
    the gradient unbiased, `E[ĝ] = ∇J`, whatever the weights. `b_i` itself is a ratio of averages:
    it tends to `b*` as G grows, and in a small group its own noise can cost more than it saves.
    With equal weights this is `leave_one_out`.

    Args:
        rewards: shape (..., G), G at least 2.
        squared_norms: the `w_j`, not negative, the same shape and a floating type.
        mask: 1 at rewards, 0 at padding, the same shape; at least two rewards in each row.

    Returns:
        Advantages, shape (..., G).

    Raises:
        ValueError: also if a weight is negative, NaN or infinite, or if all the others of a
            sample have weight 0.

    Source: Greensmith, Bartlett, Baxter (2004), JMLR 5; derived in the book, chapter 3.

    >>> optimal(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([1.0, 1.0, 3.0]))
    tensor([ 0.6250, -0.6250,  0.0000])
    """
    centered, _ = _center(rewards, mask, least=2)
    _checks.floating(squared_norms=squared_norms)
    _checks.same_shape(rewards=rewards, squared_norms=squared_norms)
    keep = _keep(rewards, mask)
    weights = squared_norms.to(centered.dtype).masked_fill(~keep, 0.0)
    _checks.finite(squared_norms=weights)
    _checks.reject(weights < 0, weights, "`squared_norms` must not be negative")
    # Summing the others, instead of subtracting sample i from the sum of all, loses nothing to
    # cancellation when one weight outgrows the rest.
    others = 1.0 - torch.eye(rewards.shape[-1], dtype=centered.dtype, device=centered.device)
    total = (weights @ others).masked_fill(~keep, 1.0)
    _checks.reject(total == 0, total, "`squared_norms` must give the others of a sample weight")
    return (centered - (weights * centered) @ others / total).masked_fill(~keep, 0.0)


def gae(rewards: Tensor, values: Tensor, *, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    """Generalised advantage estimation, with a critic's values as the baseline of each step.

    `A_t = Σ_k (γλ)^k δ_{t+k}` with `δ_t = r_t + γ V_{t+1} - V_t`. At `λ = 1` this is the discounted
    return minus `V_t`; at `λ = 0` it is `δ_t`.

    Args:
        rewards: shape (..., T), T at least 1.
        values: shape (..., T + 1). The last one is the value of what comes after step T: 0 if the
            episode has ended, the critic's value if it was only cut off. Which of the two is for
            the caller to say.
        gamma: discount, in [0, 1].
        lam: in [0, 1].

    Returns:
        Advantages, shape (..., T).

    Raises:
        TypeError: an argument is not a float32 or float64 tensor.
        ValueError: the shapes do not match, an entry is not finite, or `gamma` or `lam` is outside
            [0, 1].

    Source: Schulman and others (2016), arXiv:1506.02438, equations 11 and 16.

    >>> rewards, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 4.0, 3.0, 0.0])
    >>> gae(rewards, values, gamma=0.9)
    tensor([0.2300, 0.7000, 0.0000])
    """
    _checks.full_precision(rewards=rewards, values=values)
    if rewards.dim() == 0 or rewards.shape[-1] == 0:
        raise ValueError(
            f"`rewards` must have shape (..., T), T at least 1, got {tuple(rewards.shape)}"
        )
    if values.shape != (*rewards.shape[:-1], rewards.shape[-1] + 1):
        raise ValueError(
            f"`values` has shape {tuple(values.shape)}, expected that of `rewards`, "
            f"{tuple(rewards.shape)}, with one more step"
        )
    _checks.finite(rewards=rewards, values=values)
    for name, share in (("gamma", gamma), ("lam", lam)):
        if not 0 <= share <= 1:
            raise ValueError(f"`{name}` must lie in [0, 1], got {share}")
    delta = rewards + gamma * values[..., 1:] - values[..., :-1]
    # From the end: A_t = δ_t + γλ A_{t+1}. A loop, because a matrix of decays would be T by T.
    advantages = [delta[..., -1]]
    for step in delta[..., :-1].flip(-1).unbind(-1):
        advantages.append(step + gamma * lam * advantages[-1])
    return torch.stack(advantages[::-1], dim=-1)


def _check_rewards(rewards: Tensor) -> None:
    _checks.floating(rewards=rewards)
    if rewards.dim() == 0:
        raise ValueError("`rewards` must have shape (..., G), got ()")


def _keep(rewards: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones_like(rewards, dtype=torch.bool)
    _checks.same_shape(rewards=rewards, mask=mask)
    _checks.binary(mask=mask)
    return mask.bool()


def _center(rewards: Tensor, mask: Tensor | None, least: int) -> tuple[Tensor, Tensor]:
    """Rewards minus the mean of their group, 0 at padding, and the count of each group."""
    _check_rewards(rewards)
    keep = _keep(rewards, mask)
    count = keep.sum(-1, keepdim=True)
    _checks.reject(count < least, count, f"each group needs at least {least} rewards")
    if rewards.dtype in (torch.float16, torch.bfloat16):
        rewards = rewards.float()
    _checks.finite(rewards=rewards.masked_fill(~keep, 0.0))
    # Measured from the lowest reward, equal rewards are exactly 0, and so is their mean.
    lowest = rewards.masked_fill(~keep, math.inf).amin(-1, keepdim=True)
    shifted = (rewards - lowest).masked_fill(~keep, 0.0)
    total = shifted.sum(-1, keepdim=True)
    _checks.reject(total == math.inf, total, "`rewards` of a group must not lie so far apart")
    mean = total / count
    return (shifted - mean).masked_fill(~keep, 0.0), count
