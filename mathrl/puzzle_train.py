"""How a puzzler learns: from solutions in some order, then from rewards.

`supervise` and `reinforce` change a model in place, keep their state in a file and go on from it
when they are called again, see `mathrl.resume`. What is random in a step is a function of the seed
and of the step. Under `torchrun` both run unchanged: each process takes its share of a batch.

Shape comments: R puzzles of a batch, G responses to each, T = cells + 1 actions, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mathrl import objective, parallel, resume
from mathrl.config import Config
from mathrl.mixture import MixedReward, Norm, Scales
from mathrl.puzzler import Puzzler, log_probs, sample
from mathrl.resume import Record
from mathrl.reward import STOP, order_rewards
from mathrl.zebra.puzzles import Puzzles, relabel
from mathrl.zebra.tokens import EOS, Codec, Ints
from mathrl.zebra.verifier import solved

Array = NDArray[np.float64]

Order = Literal["random", "solver"]
Second = Literal["order", "correct_order", "cells"]
"""The reward that is mixed with solving: order of any cells, of right ones, or right cells."""


@dataclass(frozen=True)
class PuzzleSupervised(Config):
    """Settings of `supervise`.

    Args:
        batch_size: R, puzzles of an update.
        orders: G, solutions of each puzzle in an update, each in its own order.
        order: "random", a new order each time, or "solver", the canonical one.
        targets: "sampled": the loss of an action is its own negative log-probability. "expected":
            the mean of that over all actions that a random order may have put there, given those
            before; the same loss in expectation, with less noise. For order "random" only.
        warmup: steps over which the learning rate rises from 0.
        final: the learning rate at the last step as a share of the highest; it falls linearly.
        relabel: give values and attributes new names each time, and clues a new order.
        every: steps between two records, see `resume.train`.
    """

    steps: int = 1000
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    batch_size: int = 128
    orders: int = 1
    order: Order = "random"
    targets: Literal["sampled", "expected"] = "sampled"
    warmup: int = 100
    final: float = 0.05
    relabel: bool = True
    every: int = 100

    def __post_init__(self) -> None:
        """Check every setting."""
        super().__post_init__()
        self._positive("batch_size", "orders", "every")
        self._refuse(self.warmup < 0, "`warmup` must not be negative")
        self._refuse(not 0 <= self.final <= 1, "`final` must lie in [0, 1]")
        sampled = self.targets == "sampled"
        self._refuse(self.order == "solver" and not sampled, '`targets` "expected" need "random"')

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        >>> settings = PuzzleSupervised(steps=3, learning_rate=1.0, warmup=0, final=0.5)
        >>> [settings.rate(step) for step in range(3)]
        [1.0, 0.75, 0.5]
        """
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        fall = 1 - (1 - self.final) * step / max(1, self.steps - 1)
        return self.learning_rate * rise * fall


@dataclass(frozen=True)
class PuzzleReinforced(Config):
    """Settings of `reinforce`: one update on each batch of rollouts.

    Args:
        prompts_per_step: R, puzzles of a batch, none twice.
        group_size: G, responses to each.
        temperature: of the policy that samples and is trained.
        alpha: nominal share of the solve reward.
        second: the other reward.
        norm: of `mixture.MixedReward`.
        eps: of `mixture.MixedReward`.
        relabel: as for supervision.
        every: steps between two records.
    """

    steps: int = 200
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float | None = 1.0
    prompts_per_step: int = 32
    group_size: int = 8
    temperature: float = 1.0
    alpha: float = 1.0
    second: Second = "order"
    norm: Norm = "group"
    eps: float = 1e-6
    relabel: bool = True
    every: int = 10

    def __post_init__(self) -> None:
        """Check every setting."""
        super().__post_init__()
        self._positive("prompts_per_step", "group_size", "temperature", "every")
        self._refuse(not 0 <= self.alpha <= 1, "`alpha` must lie in [0, 1]")
        self._refuse(self.aggregation == "constant", '`aggregation` must not be "constant" here')


def supervise(
    path: Path,
    model: Puzzler,
    puzzles: Puzzles,
    config: PuzzleSupervised,
    *,
    measure: Callable[[], Record] | None = None,
    show: bool = True,
) -> list[Record]:
    """Maximise the log-probability of solutions.

    Args:
        path: of the state.
        model: changed in place.
        puzzles: to learn from.
        config: settings.
        measure: see `resume.train`.
        show: report progress.

    Returns:
        Records with `loss`, in nats per action, and `gradient_norm`.

    Raises:
        ValueError: a batch is smaller than the number of processes.
        RuntimeError: a gradient is not finite.
        resume.ResumeError: the state is of another run.
    """
    codec, optimizer = model.config.codec, _optimizer(model, config)
    share = parallel.share(config.batch_size)

    def update(step: int) -> Record:
        rng = np.random.default_rng((config.seed, step))
        rows = rng.integers(len(puzzles.clues), size=config.batch_size)
        batch = _batch(puzzles, rows, config.relabel, rng)
        actions = demonstrations(batch, codec, config.order, config.orders, rng)  # (R, G, T)
        mine = _tensor(model, actions[share])
        logits = model(_tensor(model, batch.clues[share]), mine[..., :-1])  # (R, G, T, V)
        full = torch.log_softmax(logits, -1)
        if config.targets == "expected":
            nll = -(expected_targets(mine, codec.vocabulary).to(full.dtype) * full).sum(-1)
        else:
            nll = -full.gather(-1, mine[..., None])[..., 0]  # (R, G, T)
        loss = nll.sum() / (config.batch_size * config.orders * codec.length)
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step)
        norm = _update(model, optimizer, loss, config)
        return {"loss": parallel.total(loss).item(), "gradient_norm": norm}

    return resume.train(
        path, model, optimizer, update, steps=config.steps, every=config.every,
        settings=_settings(model, config), measure=measure, show=show,
    )  # fmt: skip


def reinforce(
    path: Path,
    model: Puzzler,
    puzzles: Puzzles,
    config: PuzzleReinforced,
    scales: Scales,
    *,
    measure: Callable[[], Record] | None = None,
    show: bool = True,
) -> list[Record]:
    """Ascend a mixed reward by the policy gradient of groups.

    There is one update on each batch, by the policy that sampled it: the importance ratio is 1, so
    clipping would change nothing.

    Args:
        path: of the state.
        model: changed in place.
        puzzles: to draw prompts from; their waves define the order that is paid.
        config: settings.
        scales: of the mixture, from `mixture.bootstrap_scales`.
        measure: see `resume.train`.
        show: report progress.

    Returns:
        Records with the mean `solve` and `second` rewards, the diagnosis of `mixture.MixedReward`,
        `gradient_norm`, and `apart`: the largest difference, in nats, between the log-probability
        of a token when it was sampled and when it was trained.

    Raises:
        ValueError: there are fewer puzzles than prompts, or a batch is smaller than the number of
            processes.
        RuntimeError: a gradient is not finite.
        resume.ResumeError: the state is of another run.
    """
    codec, optimizer = model.config.codec, _optimizer(model, config)
    mix = MixedReward(config.alpha, scales, config.norm, eps=config.eps)
    R, G = config.prompts_per_step, config.group_size
    share = parallel.share(R)

    def update(step: int) -> Record:
        rng = np.random.default_rng((config.seed, step))
        batch = _batch(puzzles, rng.permutation(len(puzzles.clues))[:R], config.relabel, rng)
        uniforms = torch.from_numpy(rng.random((R, G, codec.length)))[share]
        batch = batch.select(share)
        clues = _tensor(model, batch.clues)
        drawn = sample(model, clues, uniforms.to(clues.device), config.temperature)
        rewards = component_rewards(batch, drawn.tokens.cpu().numpy(), config.second)  # (2, r, G)
        both = parallel.gather(torch.from_numpy(rewards).transpose(0, 1), share, R)  # (R, 2, G)
        mixed = mix(both[:, 0].numpy(), both[:, 1].numpy())
        advantages = torch.from_numpy(mixed.advantages[share])[..., None].expand(drawn.mask.shape)
        now = log_probs(model, clues, drawn.tokens, config.temperature)  # (r, G, T)
        apart = ((now.detach() - drawn.log_probs) * drawn.mask).abs().max()
        now, mask = now.flatten(0, 1), drawn.mask.flatten(0, 1)
        weights = advantages.flatten(0, 1).to(now)
        losses = objective.reinforce(now, weights, mask=mask)
        count = R * G
        if config.aggregation == "token_mean":
            count = int(parallel.total(mask.sum()))
        loss = objective.aggregate(losses, mask, config.aggregation, count)
        norm = _update(model, optimizer, loss, config)
        means = {"solve": both[:, 0].mean().item(), "second": both[:, 1].mean().item()}
        known = {k: float(v) for k, v in mixed.diagnosis._asdict().items() if v is not None}
        return {**means, **known, "gradient_norm": norm, "apart": _largest(apart)}

    if len(puzzles.clues) < R:
        raise ValueError(f"`puzzles` must be at least {R}, got {len(puzzles.clues)}")
    return resume.train(
        path, model, optimizer, update, steps=config.steps, every=config.every,
        settings=_settings(model, config) | {"scales": list(scales)}, measure=measure, show=show,
    )  # fmt: skip


def demonstrations(
    puzzles: Puzzles, codec: Codec, order: Order, count: int, rng: np.random.Generator
) -> Ints:
    """Solutions as actions, (N, count, T): each in a random order, or all in the canonical one.

    >>> from mathrl.zebra.clues import Size
    >>> from mathrl.zebra.puzzles import from_puzzles
    >>> from mathrl.zebra.generator import generate
    >>> puzzles, codec = from_puzzles([generate(Size(2, 2), 0, 0)], 8), Codec(Size(2, 2), 8)
    >>> demonstrations(puzzles, codec, "solver", 1, np.random.default_rng(0))
    array([[[3, 5, 2, 8, 0]]])
    """
    shape = (len(puzzles.values), count, codec.cells)
    if order == "random":
        cells = np.argsort(rng.random(shape), -1)
    else:
        cells = np.broadcast_to(puzzles.canonical()[:, None], shape)
    values = np.take_along_axis(np.broadcast_to(puzzles.values[:, None], shape), cells, -1)
    return codec.join(cells, values)


def expected_targets(actions: Tensor, vocabulary: int) -> Tensor:
    """The distribution of the next action of a solution whose order is uniformly random.

    Given the actions so far, each of those still to come is as likely as the others; `EOS` comes
    when there are none.

    Args:
        actions: int64, (..., T), a solution and `EOS`.
        vocabulary: V.

    Returns:
        Probabilities, (..., T, V), float32.

    >>> expected_targets(torch.tensor([2, 3, 0]), 4)
    tensor([[0.0000, 0.0000, 0.5000, 0.5000],
            [0.0000, 0.0000, 0.0000, 1.0000],
            [1.0000, 0.0000, 0.0000, 0.0000]])
    """
    cells = actions.shape[-1] - 1
    last = torch.nn.functional.one_hot(actions, vocabulary).float()  # (..., T, V)
    to_come = last[..., :-1, :].flip(-2).cumsum(-2).flip(-2)  # those from here on, without EOS
    left = torch.arange(cells, 0, -1, device=actions.device)[:, None]
    return torch.cat([to_come / left, last[..., -1:, :]], -2)


def component_rewards(puzzles: Puzzles, tokens: Ints, second: Second) -> Array:
    """The two rewards of responses: solving, and `second`.

    Args:
        puzzles: N of them.
        tokens: responses, (N, G, T), with `EOS` after their end.
        second: "order", `reward.order_rewards`; "correct_order", the same with
            `require_correct`; "cells", the share of cells whose first mention is right.

    Returns:
        Shape (2, N, G).
    """
    N, G, T = tokens.shape
    flat = tokens.reshape(N * G, T)
    values = np.repeat(puzzles.values, G, 0)  # (NG, cells)
    houses = puzzles.size.houses
    solve = solved(values, flat, houses).astype(np.float64)
    # The cell of an action; EOS, and all after it, is STOP, which ends what is read.
    cells = np.where(flat == EOS, STOP, (flat - 1) // houses)
    right = (flat != EOS) & ((flat - 1) % houses == np.take_along_axis(values, cells, 1))
    canonical = np.repeat(puzzles.canonical(), G, 0)
    if second == "cells":
        other = _right_cells(cells, right, values.shape[1])
    else:
        other = order_rewards(
            cells, canonical, correct=right, require_correct=second == "correct_order"
        )
    return np.stack([solve, other]).reshape(2, N, G)


def _right_cells(cells: Ints, right: NDArray[np.bool_], count: int) -> Array:
    """The share of cells whose first mention is right, (B,)."""
    mentions = cells[:, None, :] == np.arange(count)[:, None]  # (B, cells, T)
    first = mentions.argmax(2)
    return (mentions.any(2) & np.take_along_axis(right, first, 1)).mean(1)


def measure(
    model: Puzzler, puzzles: Puzzles, *, seed: int = 0, second: Second = "order", batch: int = 500
) -> dict[str, Array]:
    """What a model does with each of N puzzles: greedily, and with one sample.

    Args:
        model: unchanged.
        puzzles: shared out over the processes.
        seed: of the samples.
        second: see `component_rewards`.
        batch: puzzles at once.

    Returns:
        Rewards, (N,) each: `greedy_solve`, `greedy_second`, `solve` and `second`.
    """
    N, length = len(puzzles.clues), model.config.codec.length
    uniforms = np.random.default_rng(seed).random((N, 1, length))
    share = parallel.share(N)
    rows = []
    for start in range(share.start, share.stop, batch):
        chosen = slice(start, min(start + batch, share.stop))
        part = puzzles.select(chosen)
        clues = _tensor(model, part.clues)
        drawn = torch.from_numpy(uniforms[chosen]).to(clues.device)
        rewards = [
            component_rewards(part, sample(model, clues, how).tokens.cpu().numpy(), second)[..., 0]
            for how in (None, drawn)
        ]
        rows.append(np.concatenate(rewards).T)  # (n, 4)
    whole = parallel.gather(torch.from_numpy(np.concatenate(rows)), share, N).numpy()
    names = ("greedy_solve", "greedy_second", "solve", "second")
    return dict(zip(names, whole.T, strict=True))


def _batch(puzzles: Puzzles, rows: Ints, renamed: bool, rng: np.random.Generator) -> Puzzles:
    chosen = puzzles.select(rows)
    return relabel(chosen, rng) if renamed else chosen


def _tensor(model: Puzzler, array: Ints) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(model.head.weight.device)


def _optimizer(model: Puzzler, config: Config) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _update(model: Puzzler, optimizer: torch.optim.AdamW, loss: Tensor, config: Config) -> float:
    """One step against the gradient of the whole batch; return its norm before clipping."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    parameters = list(model.parameters())
    parallel.add_gradients(parameters)
    longest = math.inf if config.max_grad_norm is None else config.max_grad_norm
    norm = nn.utils.clip_grad_norm_(parameters, longest, error_if_nonfinite=True)
    optimizer.step()
    return norm.item()


def _settings(model: Puzzler, config: Config) -> dict[str, Any]:
    return {"model": asdict(model.config), **config.to_dict()}


def _largest(value: Tensor) -> float:
    """The greatest over the processes, as a sum of one entry from each."""
    entries = value.new_zeros(parallel.size())
    entries[parallel.rank()] = value
    return parallel.total(entries).max().item()
