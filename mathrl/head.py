"""The loss from hidden states: logits of a chunk of tokens at a time, and never all of them.

The logits of N tokens over V words are the largest tensor of a training step, and autograd keeps
several of their size. A policy-gradient loss `L = Σ_t m_t ℓ(log p_t) / d_t` does not need them: it
is local to a token, so its gradient in the logits `z_t` is known as soon as these are,

`∂L/∂z_t = (m_t/d_t) ℓ'(log p_t) (onehot(y_t) - softmax(z_t / τ)) / τ`,

with `ℓ'` by autograd of the objective on the chunk's log-probabilities alone. So each chunk's
logits are formed once, in one buffer, become their own gradient there, and are multiplied at once
into the gradients of hidden states and head. The backward pass only scales these. Peak memory
is that of the two gradients, in the type of the computation, and of one chunk.

This is another order of the same operations, not an approximation. It has been timed on CPU only.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mathrl import _checks


class HeadLoss(NamedTuple):
    """The loss, and what is known of each token on the way; only the loss has a gradient.

    Attributes:
        loss: shape ().
        log_probs: of the targets, in nats, in their shape; 0 where the mask is 0.
        entropy: of the policy at each token, in nats, the same; None if it was not asked for.
    """

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None


def loss_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    objective: Callable[..., Tensor],
    *,
    mask: Tensor,
    denominator: float | Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_size: int = 96,
    **per_token: Tensor,
) -> HeadLoss:
    """Loss `Σ_t m_t ℓ_t / d_t` of the policy `softmax(hidden @ weight.T / temperature)`.

    `ℓ` is any objective per token: `objective.reinforce`, `ppo_clip`, `dual_clip`, `cispo`, one of
    these with its bounds set by `functools.partial`, or one's own. It is called on each chunk as
    `objective(log_probs, **per_token)`, everything of shape (n,). It must be local: the loss of a
    token depends on that token alone. `objective.gspo` is not.

    Args:
        hidden: (B, T, H), or any (..., H). Computed in float32, or in float64 if `hidden` or
            `weight` is; half precision is upcast, and its gradients are rounded once, at the end.
        weight: of the head, (V, H).
        targets: int64, the shape of `hidden` without its last dimension; in [0, V) where trained.
        objective: maps log-probabilities (n,) and the rest by name to losses (n,).
        mask: 1 at trained tokens, else 0; the shape of `targets`. Other tokens are skipped: there
            the other arguments may hold anything, and the gradient of `hidden` is exactly 0.
        denominator: what the loss is divided by, counted on the whole batch: micro-batches then
            add up to it. One number, or one for each token in the shape of `targets`, such as the
            length of its sequence times the number of sequences.
        temperature: the one that sampled the targets.
        entropy: whether to return the entropies; costs the memory of a second chunk.
        chunk_size: tokens of which the logits are held at once.
        per_token: what the objective takes besides log-probabilities, such as `old_log_probs` and
            `advantages`: constants, in the shape of `targets`.

    Returns:
        The loss, and detached log-probabilities and entropies.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a shape or a range differs from the above; a trained token has a value that is
            not finite, or no finite log-probability; an argument in `per_token` requires a
            gradient; the objective returns another shape or does not depend on `log_probs`.

    Source: derived above; Liger's chunked losses order the work alike, arXiv:2410.10989.

    >>> from mathrl.objective import reinforce
    >>> hidden = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]], requires_grad=True)
    >>> weight, targets = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0, 0]])
    >>> advantages, mask = torch.tensor([[1.0, -1.0]]), torch.tensor([[1, 1]])
    >>> result = loss_from_hidden(
    ...     hidden, weight, targets, reinforce, mask=mask, denominator=2, advantages=advantages
    ... )
    >>> result.loss.backward()
    >>> result.log_probs, hidden.grad
    (tensor([[-0.3133, -2.1269]]), tensor([[[-0.1345,  0.1345],
             [ 0.4404, -0.4404]]]))
    """
    keep = _check(hidden, weight, targets, mask, per_token)
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be positive and finite, got {temperature}")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"`chunk_size` must be an integer and at least 1, got {chunk_size!r}")
    job = _Job(
        objective,
        targets.flatten(),
        keep.flatten().nonzero().squeeze(-1),
        _divisors(denominator, keep, _working_type(hidden, weight)).flatten(),
        {name: value.flatten() for name, value in per_token.items()},
        temperature,
        entropy,
        chunk_size,
        torch.is_grad_enabled(),
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss, log_probs, entropies = _Head.apply(flat, weight, job)  # type: ignore[no-untyped-call]
    spread = entropies.view(targets.shape) if entropy else None
    return HeadLoss(loss, log_probs.view(targets.shape), spread)


class _Job(NamedTuple):
    """What is asked of the N tokens, besides their hidden states and the head."""

    objective: Callable[..., Tensor]
    targets: Tensor  # (N,)
    rows: Tensor  # the trained ones among the N
    divisors: Tensor  # (N,)
    per_token: dict[str, Tensor]  # (N,) each
    temperature: float
    entropy: bool
    chunk_size: int
    gradients: bool


class _Done(NamedTuple):
    """What one pass over the chunks leaves; a gradient that nobody needs is None."""

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None
    gradients: tuple[Tensor | None, Tensor | None]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, job: _Job) -> tuple[Tensor | None, ...]:
        needed = [job.gradients and need for need in ctx.needs_input_grad[:2]]
        done = _pass(hidden, weight, job, needed)
        ctx.save_for_backward(hidden, weight)
        ctx.job, ctx.gradients = job, done.gradients
        ctx.mark_non_differentiable(*(out for out in done[1:3] if out is not None))
        return done[:3]

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("the loss from hidden states has no second derivative")
        hidden, weight = ctx.saved_tensors
        if ctx.gradients is None:  # a second backward, on a graph that was retained
            ctx.gradients = _pass(hidden, weight, ctx.job, ctx.needs_input_grad[:2]).gradients
        # Handed over, scaled in place: a copy would be one more tensor of the size of the head.
        gradients, ctx.gradients = ctx.gradients, None
        return *(
            None if gradient is None else gradient.mul_(grad_loss).to(like.dtype)
            for gradient, like in zip(gradients, (hidden, weight), strict=True)
        ), None


def _pass(hidden: Tensor, weight: Tensor, job: _Job, needed: Any) -> _Done:
    """Loss and gradients, forward and backward within each chunk."""
    dtype = _working_type(hidden, weight)
    weight = weight.to(dtype)
    vocabulary = weight.shape[0]
    loss = weight.new_zeros(())
    log_probs = weight.new_zeros(hidden.shape[0])
    entropy = torch.zeros_like(log_probs) if job.entropy else None
    grad_hidden = weight.new_zeros(hidden.shape) if needed[0] else None
    grad_weight = torch.zeros_like(weight) if needed[1] else None
    height = min(job.chunk_size, len(job.rows))
    buffer = weight.new_empty(vocabulary * height)

    for start in range(0, len(job.rows), job.chunk_size):
        rows = job.rows[start : start + job.chunk_size]
        states = hidden[rows].to(dtype) / job.temperature
        targets = job.targets[rows].unsqueeze(0)
        # Words by tokens, (V, n): all three products are faster than on (n, V). Autocast leaves
        # them alone, because the output is given.
        out = buffer[: vocabulary * len(rows)].view(vocabulary, len(rows))
        logits = torch.mm(weight, states.T, out=out)
        logits.sub_(logits.amax(0, keepdim=True))
        chosen = logits.gather(0, targets)
        shifted = logits.clone() if job.entropy else None
        total = logits.exp_().sum(0, keepdim=True)  # from here on, `logits` holds exponentials
        log_probs[rows] = (chosen - total.log()).squeeze(0)
        if entropy is not None and shifted is not None:
            entropy[rows] = (total.log() - shifted.mul_(logits).sum(0) / total).squeeze(0)
        part, slope = _objective(job, rows, log_probs[rows], any(needed))
        loss += part
        # Equal rewards or clipping often leave a whole chunk without gradient.
        if slope is None or not slope.any():
            continue
        slope = slope.unsqueeze(0)
        logits.mul_(-slope / total).scatter_add_(0, targets, slope)  # and from here the gradient
        if grad_weight is not None:
            grad_weight.addmm_(logits, states)
        if grad_hidden is not None:
            grad_hidden[rows] = torch.mm(logits.T, weight, out=states).div_(job.temperature)
    return _Done(loss, log_probs, entropy, (grad_hidden, grad_weight))


def _objective(
    job: _Job, rows: Tensor, log_probs: Tensor, differentiate: bool
) -> tuple[Tensor, Tensor | None]:
    """A chunk's part of the loss, and its derivative in each log-probability."""
    if not torch.isfinite(log_probs).all():
        place = rows[~torch.isfinite(log_probs)][0].item()
        raise ValueError(
            "`hidden` and `weight` must give every trained target a finite log-probability, "
            f"and do not for token {place} of the flattened `targets`"
        )
    with torch.set_grad_enabled(differentiate):
        leaf = log_probs.requires_grad_(differentiate)
        losses = job.objective(leaf, **{name: v[rows] for name, v in job.per_token.items()})
        _checks.tensor(objective=losses)
        if losses.shape != leaf.shape:
            raise ValueError(
                f"`objective` must return one loss for each token, shape {tuple(leaf.shape)}, "
                f"got {tuple(losses.shape)}"
            )
        part = (losses / job.divisors[rows]).sum()
    if not differentiate:
        return part, None
    if not part.requires_grad:
        raise ValueError("`objective` must return a loss that depends on `log_probs`")
    return part.detach(), torch.autograd.grad(part, leaf)[0].to(leaf.dtype)


def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, per_token: dict[str, Tensor]
) -> Tensor:
    """Where a token is trained, once all arguments have the right types, shapes and ranges."""
    _checks.floating(hidden=hidden, weight=weight)
    _checks.tensor(targets=targets)
    if targets.dtype != torch.int64:
        raise TypeError(f"`targets` must be int64, got {targets.dtype}")
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"`hidden` has shape {tuple(hidden.shape)} and `weight` {tuple(weight.shape)}, "
            "expected (..., H) and (V, H)"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"`targets` has shape {tuple(targets.shape)}, expected {tuple(hidden.shape[:-1])}, "
            "the shape of `hidden` without its last dimension"
        )
    _checks.same_shape(targets=targets, mask=mask, **per_token)
    _checks.binary(mask=mask)
    keep = mask.bool()
    size = weight.shape[0]
    outside = keep & ((targets < 0) | (targets >= size))
    _checks.reject(outside, targets, f"`targets` must lie in [0, {size}) where the mask is 1")
    for name, value in per_token.items():
        if value.requires_grad:
            raise ValueError(f"`{name}` must not require a gradient: detach it")
        _checks.finite(**{name: value.masked_fill(~keep, 0)})
    return keep


def _divisors(denominator: float | Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    """The denominator of each token."""
    value = torch.as_tensor(denominator, dtype=dtype, device=keep.device)
    if value.shape not in ((), keep.shape):
        raise ValueError(
            f"`denominator` has shape {tuple(value.shape)}, expected (), or {tuple(keep.shape)}, "
            "the shape of `targets`"
        )
    if value.requires_grad:
        raise ValueError("`denominator` must not require a gradient: detach it")
    value = value.expand(keep.shape)
    bad = keep & ~((value > 0) & (value < math.inf))
    _checks.reject(bad, value, "`denominator` must be positive and finite where the mask is 1")
    return value


def _working_type(hidden: Tensor, weight: Tensor) -> torch.dtype:
    double = torch.float64 in (hidden.dtype, weight.dtype)
    return torch.float64 if double else torch.float32
