"""Two training loops: learn from demonstrations, then from rewards.

`supervise` raises the log-probability of given responses. `reinforce` draws groups of responses,
turns their rewards into advantages and descends a loss per token; every choice of chapters 2 to 4
is a setting. Both change the model in place and return a record of each step and what was spent.

For a given number of threads the result is a function of model, data and settings. Under
`torchrun` the loops run unchanged: each process takes its share of the batch, the gradients are
added up, and the parameters are those of one process, up to the order of float additions.

Axes: R prompts of a batch, G samples of each, T tokens, N responses of the grammar.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mathrl import loss, objective, parallel
from mathrl.config import Config, ReinforceConfig, SupervisedConfig
from mathrl.decoder import Decoder
from mathrl.evaluate import Budget
from mathrl.grammar import Grammar
from mathrl.progress import progress
from mathrl.responses import response_mask, score
from mathrl.rollout import Batch, Reading, Rollouts

Record = dict[str, float]


class History(NamedTuple):
    """A record of plain numbers for each step, and what all steps spent."""

    records: list[Record]
    budget: Budget


def supervise(
    model: Decoder,
    prompts: Tensor,
    responses: Tensor,
    grammar: Grammar,
    config: SupervisedConfig,
    *,
    measure: Callable[[], Record] | None = None,
    measure_every: int = 10,
    show: bool = True,
) -> History:
    """Maximise the log-probability of demonstrations under the grammar.

    Args:
        model: changed in place.
        prompts: int64, (P, L).
        responses: int64, (P, T), what a demonstration answers.
        grammar: of the responses.
        config: settings.
        measure: called after each `measure_every` steps and after the last; its numbers are added
            to the record of that step.
        measure_every: steps between two measurements.
        show: report progress.

    Returns:
        Records with `step`, `loss` in nats, `gradient_norm` and the budget spent so far.

    Raises:
        ValueError: as `responses.score`; a batch is larger than the data or smaller than the
            number of processes.
        RuntimeError: the gradient is not finite.

    >>> from mathrl.arithmetic import TRAIN
    >>> from mathrl.decoder import DecoderConfig
    >>> from mathrl.problem import arithmetic_problem
    >>> problem, model = arithmetic_problem(TRAIN), Decoder(DecoderConfig())
    >>> data = problem.prompts, problem.targets, problem.grammar
    >>> history = supervise(model, *data, SupervisedConfig(steps=3))
    >>> [round(record["loss"], 1) for record in history.records]
    [4.6, 4.3, 4.2]
    """
    generator = torch.Generator().manual_seed(config.seed)
    batches = _batches(len(prompts), config.batch_size, generator)
    optimizer, log = _start(model, config), _Log(measure, measure_every)
    with log.running("supervise", config.steps, [model], show):
        for rows in itertools.islice(batches, config.steps):
            mask = response_mask(responses[rows], grammar.end)  # (B, T)
            denominator = objective.denominator(mask, config.aggregation)
            share = parallel.share(len(rows))
            mine = rows[share]
            log_probs = score(model, prompts[mine], responses[mine], grammar)  # (B, T)
            nll = objective.aggregate(-log_probs, mask[share], config.aggregation, denominator)
            gradient_norm = _update(model, optimizer, nll, config)
            spent = Budget(trained_tokens=int(mask.sum()), optimizer_steps=1)
            log.write({"loss": nll}, {"gradient_norm": gradient_norm}, spent)
    return log.history()


def reinforce(
    model: Decoder,
    rollouts: Rollouts,
    config: ReinforceConfig,
    *,
    reference: Decoder | None = None,
    measure: Callable[[], Record] | None = None,
    measure_every: int = 10,
    show: bool = True,
) -> History:
    """Ascend the expected reward by policy gradient.

    Args:
        model: changed in place.
        rollouts: what draws, pays and reads batches: `TreeRollouts` or `TokenRollouts`.
        config: settings.
        reference: the policy to stay near, unchanged; needed if `config.beta` is not 0.
        measure: called after each `measure_every` steps and after the last; its numbers are added
            to the record of that step.
        measure_every: steps between two measurements.
        show: report progress.

    Returns:
        Records of each step, before its updates unless said otherwise: `reward`, the mean of the
        samples; `equal_groups` and `zero_groups`, the shares of groups whose rewards are all
        equal, or all 0; `loss` and `gradient_norm` of the last epoch; with a tree `value`, the
        exact expected reward, and `entropy`; with a reference `kl`, exact with a tree and
        else its k1 estimate; `clip_fraction` of the last epoch for PPO's objectives; and the
        budget spent so far.

    Raises:
        ValueError: a setting needs a reference or a tree that is not there, or a batch is larger
            than the data or smaller than the number of processes.
        RuntimeError: the ratio of the first epoch is not exactly 1 at the first step, where a
            second reading is compared with the sampling; or a gradient is not finite.

    >>> from mathrl.arithmetic import TRAIN
    >>> from mathrl.decoder import DecoderConfig
    >>> from mathrl.problem import arithmetic_problem
    >>> from mathrl.rollout import TreeRollouts
    >>> rollouts, model = TreeRollouts(arithmetic_problem(TRAIN)), Decoder(DecoderConfig())
    >>> history = reinforce(model, rollouts, ReinforceConfig(steps=2))
    >>> history.budget.samples, history.budget.positions
    (320, 900)
    """
    if config.beta and reference is None:
        raise ValueError(f"`reference` must be given, because `beta` is {config.beta}")
    if reference is model:
        raise ValueError("`reference` must be another network than `model`, which changes")
    generator = torch.Generator().manual_seed(config.seed)
    batches = _batches(len(rollouts), config.prompts_per_step, generator)
    optimizer, log = _start(model, config), _Log(measure, measure_every)
    with log.running("reinforce", config.steps, [model, reference], show):
        refer = None if reference is None else rollouts.reader(reference, config.temperature)
        for step, rows in enumerate(itertools.islice(batches, config.steps)):
            uniforms = rollouts.uniforms(len(rows), config.group_size, generator)
            share = parallel.share(len(rows))
            batch = rollouts.sample(model, rows[share], uniforms[share], config.temperature)
            ref = None if refer is None else refer(batch)
            advantages = loss.advantages(config, batch, ref, share, len(rows))  # (R, G)
            whole = loss.count(config, batch, len(rows))
            entropy = config.entropy * (1 - step / config.steps if config.entropy_anneal else 1)
            if step == 0:
                _check_ratio(rollouts.read(model, batch, config.temperature), batch)
            for epoch in range(config.epochs):
                again = epoch > 0  # the first update reads what the sampling pass computed
                now = rollouts.read(model, batch, config.temperature) if again else batch.reading
                value = loss.policy_loss(config, now, batch, advantages, whole, ref, entropy)
                gradient_norm = _update(model, optimizer, value, config)
            parts = {"loss": value, **loss.parts(config, now, batch, advantages, whole, ref)}
            spent = Budget(
                samples=len(rows) * config.group_size,
                sampled_tokens=whole.tokens,
                trained_tokens=whole.tokens * config.epochs,
                optimizer_steps=config.epochs,
            )
            log.write(parts, {"gradient_norm": gradient_norm}, spent)
    return log.history()


def _start(model: Decoder, config: Config) -> torch.optim.AdamW:
    parallel.same_start(model)
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _batches(count: int, size: int | None, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of one batch after the other; every row comes once before any comes twice."""
    if size is not None and size > count:
        raise ValueError(f"a batch of {size} is larger than the data, {count}")
    while True:
        order = torch.arange(count) if size is None else torch.randperm(count, generator=generator)
        yield from torch.split(order, size or count)


def _update(
    model: Decoder, optimizer: torch.optim.Optimizer, value: Tensor, config: Config
) -> float:
    """One step against the gradient of the whole batch; return its norm before clipping."""
    optimizer.zero_grad()
    torch.autograd.backward(value)
    parameters = list(model.parameters())
    parallel.add_gradients(parameters)
    longest = math.inf if config.max_grad_norm is None else config.max_grad_norm
    norm = nn.utils.clip_grad_norm_(parameters, longest, error_if_nonfinite=True)
    optimizer.step()
    return norm.item()


def _check_ratio(now: Reading, batch: Batch) -> None:
    """A second reading before any update gives what sampling gave, to the last bit.

    So the ratio of the first epoch is exactly 1. What breaks it, such as dropout or another
    temperature, breaks it at the first step.
    """
    if not torch.equal(now.log_probs, batch.log_probs):
        apart = (now.log_probs - batch.log_probs).abs().max().item()
        raise RuntimeError(
            "the importance ratio must be exactly 1 at the first epoch, but log-probs are up to "
            f"{apart} nats apart: the model is not a function of its input (dropout?)"
        )


class _Log:
    """Adds up parts over processes, keeps records and budget, measures, reports progress."""

    def __init__(self, measure: Callable[[], Record] | None, every: int) -> None:
        if every < 1:
            raise ValueError(f"`measure_every` must be at least 1, got {every}")
        self.measure, self.every = measure, every
        self.records: list[Record] = []
        self.budget = Budget()
        self.positions = 0

    @contextlib.contextmanager
    def running(
        self, label: str, steps: int, models: list[Decoder | None], show: bool
    ) -> Iterator[None]:
        self.steps = steps
        hooks = [m.register_forward_pre_hook(self._count) for m in models if m is not None]
        try:
            with progress(label, steps, show=show) as self.advance:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def write(self, parts: dict[str, Tensor], numbers: Record, spent: Budget) -> None:
        positions = torch.tensor(float(self.positions), device=parts["loss"].device)
        pieces = [part.detach().double() for part in (*parts.values(), positions)]
        *sums, seen = parallel.total(torch.stack(pieces)).tolist()
        self.positions = 0
        self.budget += spent + Budget(positions=int(seen))
        step = len(self.records) + 1
        record = {"step": step, **dict(zip(parts, sums, strict=True)), **numbers}
        self.records.append(record | asdict(self.budget))
        if self.measure and (step % self.every == 0 or step == self.steps):
            self.records[-1] |= self.measure()
        self.advance(f"loss {record['loss']:.4f}")

    def history(self) -> History:
        return History(self.records, self.budget)

    def _count(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.positions += inputs[0].numel()
