"""Rollouts: groups of sampled responses with their rewards, and what a policy makes of them.

The training loop needs two things: draw a batch, and read its log-probabilities again under the
current parameters. `TreeRollouts` does both from the tree of all responses, and gives the
distribution over all N of them as well; `TokenRollouts` samples token by token with a cache and
reads whole sequences, which is what large grammars need.

Axes: R prompts of a batch, G samples of each, T tokens, N responses of the grammar.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mathrl.decoder import Decoder
from mathrl.grammar import Grammar
from mathrl.problem import Problem
from mathrl.responses import Enumeration, draw, enumerate_all, sample, score


class Reading(NamedTuple):
    """A batch under one policy: `log_probs` (R, G, T); with a tree, the `joint` (R, N)."""

    log_probs: Tensor
    joint: Tensor | None = None


class Batch(NamedTuple):
    """Samples as they were drawn, and what the policy that drew them thought of them.

    `rows` (R,) of the prompts; `tokens`, `mask` and `log_probs` (R, G, T), the last without
    gradient; `reading`, the same numbers with theirs, for the first update; `rewards` (R, G).
    With a tree also `choice` (R, G), the number of each response among the N; `joint` (R, N), the
    log-probabilities of all; `values` (R,), the exact expected rewards.
    """

    rows: Tensor
    tokens: Tensor
    mask: Tensor
    log_probs: Tensor
    reading: Reading
    rewards: Tensor
    choice: Tensor | None = None
    joint: Tensor | None = None
    values: Tensor | None = None


class Rollouts(Protocol):
    """What `train.reinforce` asks for."""

    def __len__(self) -> int:
        """The number of prompts."""
        ...

    def uniforms(self, rows: int, size: int, generator: torch.Generator) -> Tensor:
        """The randomness of `rows` groups of `size` samples; the first axis is the rows'."""
        ...

    def sample(
        self, model: Decoder, rows: Tensor, uniforms: Tensor, temperature: float = 1.0
    ) -> Batch:
        """Draw and pay one group for each row."""
        ...

    def read(self, model: Decoder, batch: Batch, temperature: float = 1.0) -> Reading:
        """Log-probabilities of a batch under a policy, with gradients."""
        ...

    def reader(self, model: Decoder, temperature: float = 1.0) -> Callable[[Batch], Reading]:
        """`read` under a policy that stays as it is, without gradients."""
        ...


class TreeRollouts:
    """Rollouts of a problem whose responses can be listed: one pass samples and reads them all.

    >>> from mathrl.arithmetic import TRAIN
    >>> from mathrl.decoder import DecoderConfig
    >>> from mathrl.problem import arithmetic_problem
    >>> rollouts, model = TreeRollouts(arithmetic_problem(TRAIN)), Decoder(DecoderConfig())
    >>> uniforms = rollouts.uniforms(20, 8, torch.Generator().manual_seed(0))
    >>> batch = rollouts.sample(model, torch.arange(20), uniforms)
    >>> batch.tokens.shape, batch.rewards.shape
    (torch.Size([20, 8, 3]), torch.Size([20, 8]))
    """

    def __init__(self, problem: Problem) -> None:
        """Keep the problem."""
        self.problem = problem

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self.problem.prompts)

    def uniforms(self, rows: int, size: int, generator: torch.Generator) -> Tensor:
        """One number for each sample: (rows, size), float64."""
        return torch.rand(rows, size, generator=generator, dtype=torch.float64)

    def sample(
        self, model: Decoder, rows: Tensor, uniforms: Tensor, temperature: float = 1.0
    ) -> Batch:
        """Draw whole responses from their joint distribution."""
        everything = self._enumerate(model, rows, temperature)
        joint, table = everything.joint.detach(), self.problem.rewards[rows]  # (R, N) both
        choice = draw(joint, uniforms.to(joint.device))  # (R, G)
        reading = Reading(_pick(everything.log_probs, choice), everything.joint)
        return Batch(
            rows=rows,
            tokens=everything.tokens[choice],
            mask=everything.mask[choice],
            log_probs=reading.log_probs.detach(),
            reading=reading,
            rewards=table.gather(1, choice),
            choice=choice,
            joint=joint,
            values=(joint.exp() * table).sum(1),
        )

    def read(self, model: Decoder, batch: Batch, temperature: float = 1.0) -> Reading:
        """Log-probabilities of the samples and of all responses."""
        assert batch.choice is not None
        everything = self._enumerate(model, batch.rows, temperature)
        return Reading(_pick(everything.log_probs, batch.choice), everything.joint)

    def reader(self, model: Decoder, temperature: float = 1.0) -> Callable[[Batch], Reading]:
        """Enumerate once; every batch is looked up."""
        with torch.no_grad():
            rows = torch.arange(len(self), device=self.problem.prompts.device)
            log_probs = self._enumerate(model, rows, temperature).log_probs

        def look_up(batch: Batch) -> Reading:
            assert batch.choice is not None
            mine = log_probs[batch.rows]
            return Reading(_pick(mine, batch.choice), mine.sum(-1))

        return look_up

    def _enumerate(self, model: Decoder, rows: Tensor, temperature: float) -> Enumeration:
        return enumerate_all(model, self.problem.prompts[rows], self.problem.grammar, temperature)


class TokenRollouts:
    """Rollouts token by token, for any grammar and any reward.

    >>> from mathrl.arithmetic import TRAIN
    >>> from mathrl.decoder import DecoderConfig
    >>> from mathrl.problem import arithmetic_problem
    >>> problem, model = arithmetic_problem(TRAIN), Decoder(DecoderConfig())
    >>> rollouts = TokenRollouts(problem.prompts, problem.grammar, lambda rows, tokens, mask: (
    ...     tokens == problem.targets[rows, None]).all(-1).float())
    >>> uniforms = rollouts.uniforms(20, 8, torch.Generator().manual_seed(0))
    >>> rollouts.sample(model, torch.arange(20), uniforms).rewards.shape
    torch.Size([20, 8])
    """

    def __init__(
        self,
        prompts: Tensor,
        grammar: Grammar,
        reward: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        tolerance: float = 1e-3,
    ) -> None:
        """Keep what rollouts are made of.

        Args:
            prompts: int64, (P, L).
            grammar: the tokens allowed at each step.
            reward: from `rows` (R,), `tokens` (R, G, T) and `mask` (R, G, T) to rewards (R, G).
            tolerance: the largest difference, in nats, between the log-probability of a token
                when it was sampled and when the whole sequence is read. The two passes round
                differently; a larger difference means that they are not of one distribution.
        """
        self.prompts, self.grammar, self.reward = prompts, grammar, reward
        self.tolerance = tolerance

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self.prompts)

    def uniforms(self, rows: int, size: int, generator: torch.Generator) -> Tensor:
        """One number for each token: (rows, size, T), float64."""
        shape = (rows, size, self.grammar.length)
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def sample(
        self, model: Decoder, rows: Tensor, uniforms: Tensor, temperature: float = 1.0
    ) -> Batch:
        """Draw token by token, then read the sequences as training will.

        Raises:
            ValueError: the rewards have another shape.
            RuntimeError: sampling and reading disagree by more than `tolerance`.
        """
        prompts = self.prompts[rows]
        drawn = sample(model, prompts, self.grammar, uniforms.to(prompts.device), temperature)
        rewards = self.reward(rows, drawn.tokens, drawn.mask)
        if rewards.shape != drawn.tokens.shape[:2]:
            expected = tuple(drawn.tokens.shape[:2])
            raise ValueError(f"`reward` returned {tuple(rewards.shape)}, expected {expected}")
        reading = self._read(model, rows, drawn.tokens, temperature)
        log_probs = reading.log_probs.detach()
        apart = (log_probs - drawn.log_probs).abs().max().item()
        if not apart <= self.tolerance:
            raise RuntimeError(f"a token was sampled and read with log-probs {apart} nats apart")
        return Batch(rows, drawn.tokens, drawn.mask, log_probs, reading, rewards)

    def read(self, model: Decoder, batch: Batch, temperature: float = 1.0) -> Reading:
        """One pass over whole sequences."""
        return self._read(model, batch.rows, batch.tokens, temperature)

    def reader(self, model: Decoder, temperature: float = 1.0) -> Callable[[Batch], Reading]:
        """Read every batch anew."""
        return torch.no_grad()(lambda batch: self.read(model, batch, temperature))

    def _read(self, model: Decoder, rows: Tensor, tokens: Tensor, temperature: float) -> Reading:
        prompts = self.prompts[rows].repeat_interleave(tokens.shape[1], 0)
        log_probs = score(model, prompts, tokens.flatten(0, 1), self.grammar, temperature)
        return Reading(log_probs.view(tokens.shape))


def _pick(log_probs: Tensor, choice: Tensor) -> Tensor:
    """From (R, N, T) and (R, G) to (R, G, T)."""
    return log_probs.gather(1, choice[:, :, None].expand(-1, -1, log_probs.shape[2]))
