"""Policy-gradient losses per token, and one aggregation that micro-batching cannot change.

Each objective maps log-probabilities of shape (B, T) to losses of shape (B, T), to be minimised.
`aggregate` makes one number of them. With `ρ = π(a)/old(a)`, `A` the advantage and `sg` for what
is not differentiated:

| objective | loss per token | gradient in `log π` |
|---|---|---|
| `reinforce` | `-A log π` | `-A` |
| `ppo_clip` | `-min(ρA, clip(ρ)A)` | `-ρA`, or 0 outside the clip on the side of `A` |
| `dual_clip` | `-max(min(ρA, clip(ρ)A), cA)` for `A < 0` | also 0 where `A < 0` and `ρ > c` |
| `cispo` | `-sg(clip(ρ)) A log π` | `-clip(ρ)A`: never 0 by clipping |
| `gspo` | `ppo_clip` with the geometric mean of a sequence's ratios | `-sA`, or 0 |

Rules for every function. Tensors have the same shape and are float32 or float64. Where `mask` is 0
they may hold anything: the loss there is 0, and so is its gradient. Where it is 1, and everywhere
without a mask, values are finite. Advantages are constants: one that requires a gradient is an
error. Errors: TypeError for another type; ValueError for a shape, a mask of other values than 0 and
1, a value that is not finite, a bound outside its range, or a ratio that overflows.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from mathrl import _checks

Mode = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Importance ratio `ρ = π(a)/old(a) = exp(log_probs - old_log_probs)`, per token.

    For `a ~ old` the expectation of `ρ f(a)` is that of `f` under `π`. At the first update of a
    batch it is exactly 1; if it is not, the two log-probabilities are not of the same distribution.

    Args:
        log_probs: log-probabilities of the sampled tokens now, any shape.
        old_log_probs: their log-probabilities under the policy that sampled them.

    Returns:
        Ratios, the shape of the arguments.

    Source: Schulman and others (2017), arXiv:1707.06347.

    >>> ratio(torch.tensor([0.5, 0.3]).log(), torch.tensor([0.25, 0.6]).log())
    tensor([2.0000, 0.5000])
    """
    log_probs, old_log_probs = _read(None, log_probs=log_probs, old_log_probs=old_log_probs)
    value = (log_probs - old_log_probs).exp()
    _checks.finite(ratio=value)
    return value


def reinforce(log_probs: Tensor, advantages: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """REINFORCE: `-A log π(a)`. Its value means nothing, its expected gradient is `-∇J`.

    Args:
        log_probs: log-probabilities of the sampled tokens, (B, T).
        advantages: (B, T).
        mask: 1 at trained tokens, (B, T).

    Returns:
        Loss per token, (B, T).

    Source: Williams (1992), doi:10.1007/BF00992696.

    >>> reinforce(torch.tensor([-0.5, -2.0]), torch.tensor([1.0, -1.0]))
    tensor([ 0.5000, -2.0000])
    """
    log_probs, advantages = _read(mask, log_probs=log_probs, advantages=advantages)
    return -advantages * log_probs


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
) -> Tensor:
    """PPO's clipped surrogate: `-min(ρA, clip(ρ, 1 - clip_low, 1 + clip_high) A)`.

    The gradient is that of `-ρA`, or exactly 0 where the step has gone far enough: `A > 0` and
    `ρ > 1 + clip_high`, or `A < 0` and `ρ < 1 - clip_low`. The minimum is taken after multiplying
    with the advantage; a ratio that is clipped before loses the gradient on the other side too.

    Args:
        log_probs: log-probabilities of the sampled tokens now, (B, T).
        old_log_probs: their log-probabilities under the policy that sampled them, (B, T).
        advantages: (B, T).
        clip_low: in [0, 1].
        clip_high: at least 0; larger than `clip_low` in DAPO, arXiv:2503.14476.
        mask: 1 at trained tokens, (B, T).

    Returns:
        Loss per token, (B, T).

    Source: Schulman and others (2017), arXiv:1707.06347, equation 7.

    >>> log_probs, old_log_probs = torch.tensor([3.0, 3.0]).log(), torch.zeros(2)
    >>> ppo_clip(log_probs, old_log_probs, torch.tensor([1.0, -1.0]))
    tensor([-1.2000,  3.0000])
    """
    log_probs, old_log_probs, advantages = _read(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    return -_clipped(ratio(log_probs, old_log_probs), advantages, clip_low, clip_high)


def dual_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ceiling: float = 3.0,
    mask: Tensor | None = None,
) -> Tensor:
    """`ppo_clip` with a bound where it has none: for `A < 0` the objective is at least `ceiling·A`.

    Without it one token with a negative advantage and a huge ratio can dominate a batch. Beyond
    the bound the gradient is exactly 0, so a token that has become far too likely is not pushed
    back.

    Args:
        log_probs: log-probabilities of the sampled tokens now, (B, T).
        old_log_probs: their log-probabilities under the policy that sampled them, (B, T).
        advantages: (B, T).
        clip_low: in [0, 1].
        clip_high: at least 0.
        ceiling: greater than 1.
        mask: 1 at trained tokens, (B, T).

    Returns:
        Loss per token, (B, T).

    Source: Ye and others (2019), arXiv:1912.09729, equation 5.

    >>> log_probs = torch.tensor([5.0, 2.0]).log()
    >>> dual_clip(log_probs, torch.zeros(2), torch.tensor([-1.0, -1.0]))
    tensor([3., 2.])
    """
    if not 1 < ceiling < math.inf:
        raise ValueError(f"`ceiling` must be finite and greater than 1, got {ceiling}")
    log_probs, old_log_probs, advantages = _read(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    clipped = _clipped(ratio(log_probs, old_log_probs), advantages, clip_low, clip_high)
    bounded = torch.maximum(clipped, ceiling * advantages)
    return -torch.where(advantages < 0, bounded, clipped)


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
) -> Tensor:
    """CISPO: `-sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π(a)`.

    The ratio is a weight and not what is optimised, so clipping bounds the gradient of a token and
    never removes it. The default leaves the lower side open.

    Args:
        log_probs: log-probabilities of the sampled tokens now, (B, T).
        old_log_probs: their log-probabilities under the policy that sampled them, (B, T).
        advantages: (B, T).
        clip_low: in [0, 1].
        clip_high: at least 0.
        mask: 1 at trained tokens, (B, T).

    Returns:
        Loss per token, (B, T).

    Source: MiniMax (2025), arXiv:2506.13585, equation 4.

    >>> log_probs = torch.tensor([-1.0], requires_grad=True)
    >>> cispo(log_probs, torch.tensor([-3.0]), torch.ones(1)).backward()
    >>> log_probs.grad
    tensor([-1.2000])
    """
    log_probs, old_log_probs, advantages = _read(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    _check_bounds(clip_low, clip_high)
    weight = ratio(log_probs, old_log_probs).detach().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * log_probs


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """GSPO: the clipped surrogate with one ratio for each sequence, `s = (Π_t ρ_t)^{1/n}`.

    Every token of a sequence shares the value `s` and carries its own gradient,
    `sg(s) · ρ_t/sg(ρ_t)`; averaged over the tokens of a sequence (`sequence_mean_token_mean`) this
    is the objective of the paper. `s` is a geometric mean and no importance weight: the expectation
    of `s f` under the old policy is not that of `f` under the new one.

    Args:
        log_probs: log-probabilities of the sampled tokens now, (B, T).
        old_log_probs: their log-probabilities under the policy that sampled them, (B, T).
        advantages: (B, T).
        mask: 1 at trained tokens, (B, T); at least one in each row.
        clip_low: in [0, 1].
        clip_high: at least 0.

    Returns:
        Loss per token, (B, T), 0 where the mask is 0.

    Source: Zheng and others (2025), arXiv:2507.18071, equations 5 and 13.

    >>> log_probs = torch.tensor([[0.5, 0.2]]).log()
    >>> old_log_probs = torch.tensor([[0.4, 0.25]]).log()
    >>> gspo(log_probs, old_log_probs, torch.ones(1, 2), torch.ones(1, 2))
    tensor([[-1., -1.]])
    """
    keep = _check_mask(mask, log_probs=log_probs)
    log_probs, old_log_probs, advantages = _read(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    log_ratio = log_probs - old_log_probs  # 0 where the mask is 0
    mean = log_ratio.sum(-1, keepdim=True) / keep.sum(-1, keepdim=True)
    # The value of the sequence's ratio, the gradient of the token's own log-probability.
    shared = (mean.detach() + log_ratio - log_ratio.detach()).exp()
    _checks.finite(ratio=shared)
    return -_clipped(shared, advantages, clip_low, clip_high)


def clip_fraction(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Share of the trained tokens whose gradient `ppo_clip` sets to 0.

    A ratio outside the interval counts only on the side of its advantage: a token with `A > 0` and
    a small ratio is not clipped. Tokens with `A = 0` have no gradient to lose and do not count as
    clipped.

    Args:
        log_probs: log-probabilities of the sampled tokens now, (B, T).
        old_log_probs: their log-probabilities under the policy that sampled them, (B, T).
        advantages: (B, T).
        mask: 1 at trained tokens, (B, T); at least one in each row.
        clip_low: in [0, 1].
        clip_high: at least 0.

    Returns:
        A number in [0, 1], shape ().

    Source: the diagnostic of arXiv:1707.06347, with the sign of the advantage.

    >>> ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5]])
    >>> advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    >>> clip_fraction(ratios.log(), torch.zeros(1, 4), advantages, torch.ones(1, 4))
    tensor(0.5000)
    """
    _check_bounds(clip_low, clip_high)
    keep = _check_mask(mask, log_probs=log_probs)
    log_probs, old_log_probs, advantages = _read(
        mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages
    )
    value = ratio(log_probs, old_log_probs).detach()
    far = torch.where(advantages > 0, value > 1 + clip_high, value < 1 - clip_low)
    clipped = far & (advantages != 0)
    return clipped[keep].to(log_probs.dtype).mean()


def denominator(mask: Tensor, mode: Mode) -> int:
    """What `aggregate` divides by, counted on the whole batch.

    Count it once over all micro-batches and all processes (the counts add up), and give the same
    number to each call of `aggregate`.

    Args:
        mask: 1 at trained tokens, (B, T); at least one in each row.
        mode: not `"constant"`, whose constant is yours to choose.

    Returns:
        The number of trained tokens for `"token_mean"`, else the number of sequences.

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> denominator(mask, "token_mean"), denominator(mask, "sequence_mean_token_mean")
    (3, 2)
    """
    _check_mode(mode)
    if mode == "constant":
        raise ValueError('`mode` "constant" has no denominator to count: choose one')
    keep = _check_mask(mask)
    return int(keep.sum()) if mode == "token_mean" else keep.shape[0]


def aggregate(loss: Tensor, mask: Tensor, mode: Mode, denominator: float) -> Tensor:
    """One number from per-token losses, with the denominator said aloud.

    | mode | sums | divide by |
    |---|---|---|
    | `token_mean` | all tokens | trained tokens of the batch |
    | `sequence_mean_token_mean` | the mean of each sequence | sequences of the batch |
    | `sequence_mean_token_sum` | all tokens | sequences of the batch |
    | `constant` | all tokens | a constant, such as sequences times the longest length allowed |

    The denominator is that of the whole batch, `denominator(mask, mode)`, also when the batch
    arrives in pieces: the sum over micro-batches, or over processes, is then the value and the
    gradient of the whole. Dividing each piece by its own count and averaging is not.

    Args:
        loss: per-token losses, (B, T), float32 or float64.
        mask: 1 at trained tokens, (B, T); at least one in each row. Sequences are never split.
        mode: one of the four.
        denominator: greater than 0.

    Returns:
        Shape (). What the loss holds where the mask is 0 enters neither value nor gradient.

    Raises:
        TypeError: `loss` or `mask` is not a tensor, or `loss` is not float32 or float64.
        ValueError: a shape differs, the mask holds other values than 0 and 1 or has a row without
            a trained token, the mode is unknown, or the denominator is not positive and finite.

    Source: the modes of GRPO, DAPO (arXiv:2503.14476) and Dr. GRPO (arXiv:2503.20783).

    >>> loss = torch.tensor([[1.0, 1.0, 0.0], [4.0, 0.0, 0.0]])
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> aggregate(loss, mask, "token_mean", 3), aggregate(loss, mask, "sequence_mean_token_mean", 2)
    (tensor(2.), tensor(2.5000))
    """
    _checks.full_precision(loss=loss)
    _check_mode(mode)
    keep = _check_mask(mask, loss=loss)
    if not 0 < denominator < math.inf:
        raise ValueError(f"`denominator` must be positive and finite, got {denominator}")
    kept = loss.masked_fill(~keep, 0.0)
    if mode == "sequence_mean_token_mean":
        kept = kept / keep.sum(-1, keepdim=True)
    return kept.sum() / denominator


def _clipped(value: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    _check_bounds(low, high)
    return torch.minimum(value * advantages, value.clamp(1 - low, 1 + high) * advantages)


def _read(mask: Tensor | None, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, checked, and 0 where the mask is 0."""
    _checks.full_precision(**tensors)
    _checks.same_shape(**tensors)
    if "advantages" in tensors and tensors["advantages"].requires_grad:
        raise ValueError("`advantages` must not require a gradient: detach them")
    if mask is not None:
        _checks.same_shape(log_probs=tensors["log_probs"], mask=mask)
        _checks.binary(mask=mask)
        # Filled before anything is computed: 0 * NaN is NaN, and so is its gradient.
        tensors = {name: value.masked_fill(mask == 0, 0.0) for name, value in tensors.items()}
    _checks.finite(**tensors)
    return tuple(tensors.values())


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1:
        raise ValueError(f"`clip_low` must lie in [0, 1], got {low}")
    if not 0 <= high < math.inf:
        raise ValueError(f"`clip_high` must be finite and at least 0, got {high}")


def _check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"`mode` must be one of {get_args(Mode)}, got {mode!r}")


def _check_mask(mask: Tensor, **like: Tensor) -> Tensor:
    """A mask of whole sequences, as booleans: shape (B, T), at least one token in each."""
    _checks.same_shape(**like, mask=mask)
    _checks.binary(mask=mask)
    if mask.dim() != 2:
        raise ValueError(f"`mask` must have shape (B, T), got {tuple(mask.shape)}")
    count = mask.sum(-1)
    _checks.reject(count == 0, count, "`mask` must keep at least one token in each row")
    return mask.bool()
