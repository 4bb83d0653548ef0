"""From a batch of rollouts to the loss of an update: advantages, objective, divergence, entropy.

Every choice of chapters 2 to 4 meets here, each one made by a `ReinforceConfig`. A batch may be
one process's share of a larger one: what is divided by counts the whole batch, so that the losses
of the shares, and their gradients, add up to those of the whole.

Axes: R prompts of a share, G samples of each, T tokens, N responses of the grammar.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mathrl import baseline, kl, objective, parallel, policy
from mathrl.config import ReinforceConfig
from mathrl.rollout import Batch, Reading

ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}
OBJECTIVES: dict[str, Any] = {
    "ppo_clip": objective.ppo_clip,
    "dual_clip": objective.dual_clip,
    "cispo": objective.cispo,
}

Known = TypeVar("Known")


class Whole(NamedTuple):
    """Counts of the whole batch: prompts, sampled tokens, and what `aggregate` divides by."""

    prompts: int
    tokens: int
    denominator: float


def count(config: ReinforceConfig, batch: Batch, prompts: int) -> Whole:
    """Count the whole batch, over all processes.

    Args:
        config: for the aggregation.
        batch: this process's share.
        prompts: of the whole batch.
    """
    mask = batch.mask.flatten(0, 1)  # (R G, T)
    tokens = int(parallel.total(mask.sum()))
    if config.constant is not None:
        return Whole(prompts, tokens, config.constant)
    own = torch.tensor(objective.denominator(mask, config.aggregation), device=mask.device)
    return Whole(prompts, tokens, int(parallel.total(own)))


def advantages(
    config: ReinforceConfig, batch: Batch, ref: Reading | None, share: slice, prompts: int
) -> Tensor:
    """Advantages of this share's samples.

    Args:
        config: for the baseline, and for a divergence in the reward.
        batch: this process's share.
        ref: the batch under the reference, or None.
        share: which rows of the whole batch they are: `batch_standardized` looks at all.
        prompts: of the whole batch.

    Returns:
        Shape (R, G), without gradient.

    Raises:
        ValueError: the divergence needs a reference, or the baseline "optimal" a tree.
    """
    rewards = batch.rewards.to(batch.log_probs.dtype)  # (R, G)
    if config.beta and config.kl_placement == "reward":
        ref_log_probs = _needed("a reference", ref).log_probs
        away = ESTIMATORS[config.kl](batch.log_probs, ref_log_probs)  # (R, G, T), 0 at padding
        rewards = rewards - config.beta * away.sum(-1)
    if config.baseline == "none":
        return rewards
    if config.baseline == "optimal":
        return baseline.optimal(rewards, _score_norms(batch))
    if config.baseline == "batch_standardized":
        whole = parallel.gather(rewards, share, prompts)
        return baseline.batch_standardized(whole, ddof=config.ddof, eps=config.eps)[share]
    if config.baseline == "standardized":
        return baseline.standardized(rewards, ddof=config.ddof, eps=config.eps)
    if config.baseline == "group_mean":
        return baseline.group_mean(rewards)
    return baseline.leave_one_out(rewards)


def policy_loss(
    config: ReinforceConfig,
    now: Reading,
    batch: Batch,
    advantages: Tensor,
    whole: Whole,
    ref: Reading | None = None,
    entropy: float = 0.0,
) -> Tensor:
    """The number whose gradient an update follows.

    Per token the objective, plus `beta` times the estimated divergence if that belongs in the
    loss; these are aggregated once. Then, per prompt and averaged over prompts, `beta` times the
    exact divergence between the distributions over whole responses, and minus `entropy` times
    the entropy of that distribution.

    Args:
        config: objective, aggregation and divergence.
        now: the batch under the current parameters.
        batch: the batch as it was sampled.
        advantages: (R, G), without gradient.
        whole: counts of the whole batch.
        ref: the batch under the reference, or None.
        entropy: coefficient of the entropy.

    Returns:
        Shape ().

    Raises:
        ValueError: the divergence needs a reference, or it or the entropy a tree.
    """
    log_probs, old_log_probs, weights, mask = _by_sample(now, batch, advantages)
    losses = _objective(config, log_probs, old_log_probs, weights, mask)  # (R G, T)
    beta = config.beta if config.kl_placement == "loss" else 0.0
    if beta and config.kl != "exact":
        ref_log_probs = _needed("a reference", ref).log_probs.flatten(0, 1)
        away = ESTIMATORS[config.kl](log_probs, ref_log_probs)  # (R G, T)
        if config.kl_weighted:
            away = kl.importance_weighted(away, log_probs, old_log_probs)
        losses = losses + beta * away
    loss = objective.aggregate(losses, mask, config.aggregation, whole.denominator)
    if beta and config.kl == "exact":
        ref_joint = _needed("a tree", _needed("a reference", ref).joint)
        away = kl.divergence(_needed("a tree", now.joint), ref_joint)  # (R,)
        loss = loss + beta * away.sum() / whole.prompts
    if entropy:
        spread = policy.entropy(_needed("a tree", now.joint))  # (R,)
        loss = loss - entropy * spread.sum() / whole.prompts
    return loss


@torch.no_grad()
def parts(
    config: ReinforceConfig,
    now: Reading,
    batch: Batch,
    advantages: Tensor,
    whole: Whole,
    ref: Reading | None = None,
) -> dict[str, Tensor]:
    """What is recorded of a batch, besides its loss; the parts of all shares add up.

    Args:
        config: for the clip bounds.
        now: the batch as it was read for the last update.
        batch: the batch as it was sampled.
        advantages: (R, G).
        whole: counts of the whole batch.
        ref: the batch under the reference, or None.

    Returns:
        Numbers of shape (), as `train.reinforce` lists them.
    """
    per_prompt = {
        "reward": batch.rewards.mean(1),
        "equal_groups": (batch.rewards == batch.rewards[:, :1]).all(1),
        "zero_groups": (batch.rewards == 0).all(1),
    }
    if batch.values is not None and batch.joint is not None:
        per_prompt |= {"value": batch.values, "entropy": policy.entropy(batch.joint)}
    if ref is not None:
        exact = batch.joint is not None and ref.joint is not None
        per_prompt["kl"] = (
            kl.divergence(_needed("a tree", batch.joint), _needed("a tree", ref.joint))
            if exact
            else kl.k1(batch.log_probs, ref.log_probs).sum(-1).mean(1)
        )
    own = {name: numbers.double().sum() / whole.prompts for name, numbers in per_prompt.items()}
    if config.objective in ("ppo_clip", "dual_clip"):
        new, old, weights, mask = _by_sample(now, batch, advantages)
        bounds = _given(config, "clip_low", "clip_high")
        fraction = objective.clip_fraction(new, old, weights, mask, **bounds)
        own["clip_fraction"] = fraction.double() * batch.mask.sum() / whole.tokens
    return own


def _objective(
    config: ReinforceConfig,
    log_probs: Tensor,
    old_log_probs: Tensor,
    weights: Tensor,
    mask: Tensor,
) -> Tensor:
    if config.objective == "reinforce":
        return objective.reinforce(log_probs, weights)
    bounds = _given(config, "clip_low", "clip_high", "ceiling")
    if config.objective == "gspo":
        return objective.gspo(log_probs, old_log_probs, weights, mask, **bounds)
    loss: Tensor = OBJECTIVES[config.objective](log_probs, old_log_probs, weights, **bounds)
    return loss


def _by_sample(
    now: Reading, batch: Batch, advantages: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities now and when sampled, advantages and mask, (R G, T) each."""
    spread = advantages[:, :, None].expand(-1, -1, batch.mask.shape[2])
    pieces = (now.log_probs, batch.log_probs, spread, batch.mask)
    one, two, three, four = (piece.flatten(0, 1) for piece in pieces)
    return one, two, three, four


def _score_norms(batch: Batch) -> Tensor:
    """`‖∇ log π(y)‖² = 1 - 2π(y) + Σ π²`, the gradient being in N logits of whole responses."""
    probs = _needed("a tree", batch.joint).exp()  # (R, N)
    drawn = probs.gather(1, _needed("a tree", batch.choice))  # (R, G)
    return 1 - 2 * drawn + probs.square().sum(1, keepdim=True)


def _given(config: ReinforceConfig, *names: str) -> dict[str, float]:
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _needed(what: str, value: Known | None) -> Known:
    if value is None:
        raise ValueError(f"the settings need {what}, and there is none")
    return value
