"""What a policy can do: exact success and failures, pass@k, and what it cost.

Where all responses can be listed nothing is sampled: success is the probability of the responses
that are paid. `mathrl.compare` holds what is needed when there are only samples or seeds.

Axes: P prompts, N responses of the grammar.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mathrl import arithmetic, kl, policy
from mathrl.decoder import Decoder
from mathrl.problem import Problem, arithmetic_problem, reasons
from mathrl.responses import Enumeration, enumerate_all


def value(model: Decoder, problem: Problem, temperature: float = 1.0) -> Tensor:
    """Exact expected reward `J = Σ_y π(y) r(y)` of each prompt, with gradients.

    With the contract's reward it is the probability of success of one sample.

    Args:
        model: the network.
        problem: prompts, grammar, rewards.
        temperature: of the policy.

    Returns:
        Shape (P,).

    >>> from mathrl.decoder import DecoderConfig
    >>> problem = arithmetic_problem(arithmetic.TASKS)
    >>> value(Decoder(DecoderConfig()), problem).shape
    torch.Size([25])
    """
    joint = enumerate_all(model, problem.prompts, problem.grammar, temperature).joint
    return (joint.exp() * problem.rewards.to(joint.dtype)).sum(1)


def gradient(model: Decoder, problem: Problem) -> dict[str, Tensor]:
    """Exact policy gradient: that of the mean of `value` over the prompts, in every parameter.

    >>> from mathrl.decoder import DecoderConfig
    >>> gradient(Decoder(DecoderConfig()), arithmetic_problem([(3, 4)]))["head.weight"].shape
    torch.Size([14, 48])
    """
    parameters = dict(model.named_parameters())
    slopes = torch.autograd.grad(value(model, problem).mean(), list(parameters.values()))
    return dict(zip(parameters, slopes, strict=True))


@torch.no_grad()
def failures(
    model: Decoder, tasks: Sequence[tuple[int, int]], temperature: float = 1.0
) -> dict[arithmetic.Reason, Tensor]:
    """Exact probability of each verdict of the contract's verifier, "ok" included.

    Args:
        model: the network.
        tasks: of the contract.
        temperature: of the policy.

    Returns:
        For each reason that occurs, shape (P,). At each task they sum to 1.

    >>> from mathrl.decoder import DecoderConfig
    >>> sorted(failures(Decoder(DecoderConfig()), arithmetic.TEST))
    ['final', 'intermediate', 'ok']
    """
    problem = arithmetic_problem(tasks).to(_device(model))
    joint = _enumerate(model, problem, temperature).joint.exp()
    said = reasons(tasks)
    occurring = sorted({reason for row in said for reason in row})
    given = torch.tensor([[[r == one for r in row] for row in said] for one in occurring])
    shares = (joint * given.to(joint.device)).sum(2)  # one row for each reason, (…, P)
    return dict(zip(occurring, shares, strict=True))


@torch.no_grad()
def greedy(model: Decoder, problem: Problem) -> Tensor:
    """The response that always takes the most likely token, which need not be the likeliest one.

    Returns:
        Its number among the N, int64, (P,).

    >>> from mathrl.decoder import DecoderConfig
    >>> greedy(Decoder(DecoderConfig()), arithmetic_problem(arithmetic.TEST)).shape
    torch.Size([5])
    """
    everything = _enumerate(model, problem)
    open_ = torch.ones_like(everything.joint, dtype=torch.bool)  # (P, N)
    for t in range(everything.tokens.shape[1]):
        best = everything.log_probs[:, :, t].masked_fill(~open_, -math.inf).argmax(1)  # (P,)
        open_ &= everything.tokens[:, t] == everything.tokens[best, t, None]
    return open_.long().argmax(1)


@torch.no_grad()
def summary(
    model: Decoder,
    tasks: Sequence[tuple[int, int]],
    reference: Decoder | None = None,
) -> dict[str, float]:
    """Exact means over tasks of the contract, as plain numbers.

    Args:
        model: the network.
        tasks: one split, for example `arithmetic.TEST`; splits are never mixed.
        reference: for the divergence.

    Returns:
        `success`, `worst` (success of the worst task), `greedy` (share of tasks that greedy
        decoding solves), `intermediate` and `final` (probability of each failure), `entropy` of
        the responses, and `kl`, the divergence from the reference, in nats.

    >>> from mathrl.decoder import DecoderConfig
    >>> list(summary(Decoder(DecoderConfig()), arithmetic.TEST))
    ['success', 'worst', 'greedy', 'intermediate', 'final', 'entropy']
    """
    problem = arithmetic_problem(tasks).to(_device(model))
    joint = _enumerate(model, problem).joint
    verdicts = failures(model, tasks)
    right = problem.rewards.gather(1, greedy(model, problem)[:, None])
    result = {
        "success": verdicts["ok"].mean(),
        "worst": verdicts["ok"].min(),
        "greedy": right.mean(),
        "intermediate": verdicts["intermediate"].mean(),
        "final": verdicts["final"].mean(),
        "entropy": policy.entropy(joint).mean(),
    }
    if reference is not None:
        result["kl"] = kl.divergence(joint, _enumerate(reference, problem).joint).mean()
    return {name: number.item() for name, number in result.items()}


def pass_at_k(p: float, k: int) -> float:
    """Probability that at least one of k independent samples succeeds, `1 - (1-p)^k`.

    With a verifier this is also the success of best-of-k. A mean over tasks is taken after, not
    before: `pass_at_k` of a mean is not the mean of `pass_at_k`.

    Args:
        p: success probability of one sample, in [0, 1].
        k: at least 1.

    Raises:
        ValueError: an argument is outside its range.

    >>> round(pass_at_k(0.01, 8), 4)
    0.0773
    """
    if not 0 <= p <= 1:
        raise ValueError(f"`p` must lie in [0, 1], got {p}")
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}")
    return 1.0 if p == 1 else -math.expm1(k * math.log1p(-p))


def pass_at_k_estimate(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k from c successes among n samples, `1 - C(n-c, k)/C(n, k)`.

    It is the share of the k-subsets of the samples that hold a success. `1 - (1 - c/n)^k`, the
    plug-in, is too low: at n = k = 4, c = 1 it says 0.6836 of a set that does hold a success.

    Args:
        n: samples, at least k: no estimate from fewer samples is unbiased.
        c: successes, 0 to n.
        k: at least 1.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is outside its range.

    Source: Chen and others (2021), arXiv:2107.03374, equation 1.

    >>> pass_at_k_estimate(4, 1, 4), pass_at_k_estimate(10, 1, 5)
    (1.0, 0.5)
    """
    for name, number in (("n", n), ("c", c), ("k", k)):
        if type(number) is not int:
            raise TypeError(f"`{name}` must be an int, got {number!r}")
    if not 1 <= k <= n:
        raise ValueError(f"`k` must lie in [1, n = {n}], got {k}")
    if not 0 <= c <= n:
        raise ValueError(f"`c` must lie in [0, n = {n}], got {c}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Budget:
    """What was spent, so that two ways to the same success can be compared.

    Args:
        samples: responses drawn.
        sampled_tokens: their tokens, each up to and with its stop token.
        trained_tokens: target tokens that a loss was taken of, in every epoch anew.
        positions: positions that the network computed, in forward passes of any kind.
        optimizer_steps: updates of the parameters.

    >>> Budget(samples=160) + Budget(samples=160, optimizer_steps=1)
    Budget(samples=320, sampled_tokens=0, trained_tokens=0, positions=0, optimizer_steps=1)
    """

    samples: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    positions: int = 0
    optimizer_steps: int = 0

    def __add__(self, other: "Budget") -> "Budget":
        """Spend both."""
        names = [field.name for field in fields(self)]
        return Budget(**{name: getattr(self, name) + getattr(other, name) for name in names})


def _enumerate(model: Decoder, problem: Problem, temperature: float = 1.0) -> Enumeration:
    return enumerate_all(model, problem.prompts, problem.grammar, temperature)


def _device(model: Decoder) -> torch.device:
    return next(model.parameters()).device
