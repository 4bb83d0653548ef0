"""The contract in two turns: the policy asks a tool for the sum, then answers.

A conversation of task `(a, b)` is one sequence of eleven tokens: the prompt `BOS a + b =`, a
request of two digits `x y` that the policy samples in a first call, two digits of the tool, which
are those of `x + y`, and a final digit `v` with `EOS`, sampled in a second call. The sum that the
tool returned and the final digit are the response that the contract's verifier judges, so every
request with the right sum can be paid.

As on the bench, the policy chooses among the ten digits where a digit stands and has no choice
elsewhere: those log-probabilities are exactly 0. A task has 1,000 conversations, and success and
calibration are sums over all of them.

Axes: R tasks, N sequences, T = 10 targets of a conversation.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mathrl import _checks, arithmetic, compare, policy
from mathrl.arithmetic import EOS
from mathrl.decoder import Decoder, DecoderConfig
from mathrl.responses import draw
from mathrl.trajectory import Call, Sampling

Task = tuple[int, int]

PROMPT, REQUEST, ANSWER, LENGTH = 5, 2, 2, 11
"""Tokens of the prompt, of a request, of the tool's answer, of a conversation."""

CHOICES = torch.tensor([1, 0, 1, 0, 1, 1, 1, 1, 1, 0], dtype=torch.bool)
"""(T,): at which targets a digit stands: a, b, x, y, both of the tool's, v."""

DRAWS = 3
"""Random choices of a conversation: x, y, v."""

CONFIG = DecoderConfig(context_length=LENGTH)
"""The bench's network, with room for a conversation."""

SAMPLING = Sampling(temperature=1.0, top_p=1.0, log_probs="processed")


class Conversation(NamedTuple):
    """Two sampled calls, and 1 if they are paid, else 0."""

    calls: tuple[Call, Call]
    reward: int


def tool(request: Sequence[int]) -> list[int]:
    """Answer a request with the two digits of its sum.

    Args:
        request: two digits.

    Raises:
        ValueError: it is not.

    >>> tool([3, 4]), tool([8, 7])
    ([0, 7], [1, 5])
    """
    if len(request) != REQUEST or any(digit not in arithmetic.DIGITS for digit in request):
        raise ValueError(f"`request` must be two digits, got {list(request)}")
    return [*divmod(sum(request), 10)]


def reward(task: Task, request: Sequence[int], answer: Sequence[int]) -> int:
    """Pay what the contract's verifier pays for the tool's sum and the policy's answer.

    Args:
        task: `(a, b)`.
        request: two digits.
        answer: what the second call sampled: right is the final digit and `EOS`.

    >>> reward((3, 4), [3, 4], [4, 13]), reward((3, 4), [7, 0], [4, 13])
    (1, 1)
    >>> reward((3, 4), [3, 3], [4, 13]), reward((3, 4), [3, 4], [7, 13])
    (0, 0)
    """
    tens, ones = tool(request)
    return arithmetic.verify(task, [10 * tens + ones, *answer])["reward"]


def log_probs(model: Decoder, tokens: Tensor) -> Tensor:
    """Log-probability of each target of whole or begun conversations.

    Args:
        model: the policy.
        tokens: int64, (N, L + 1), L at most T.

    Returns:
        Shape (N, L), with gradients, in nats: of a digit among the ten digits, and 0 where there
        is no choice.

    Raises:
        TypeError: `tokens` is not int64.
        ValueError: a digit is missing where one stands.

    >>> tokens = torch.tensor([[12, 3, 10, 4, 11, 3, 4, 0, 7, 4, 13]])
    >>> log_probs(Decoder(CONFIG), tokens).detach().exp().round(decimals=1)
    tensor([[0.1000, 1.0000, 0.1000, 1.0000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000,
             1.0000]])
    """
    logits = model(tokens[:, :-1])[..., : len(arithmetic.DIGITS)]  # (N, L, 10)
    choices = CHOICES[: tokens.shape[1] - 1]
    targets = tokens[:, 1:].masked_fill(~choices, 0)  # (N, L)
    _checks.reject(targets > 9, targets, "`tokens` must hold a digit where one stands")
    return policy.log_probs(logits, targets).masked_fill(~choices, 0.0)


@torch.no_grad()
def converse(model: Decoder, tasks: Sequence[Task], uniforms: Tensor) -> list[Conversation]:
    """Sample one conversation for each task, call by call.

    Args:
        model: the policy.
        tasks: one for each conversation; a group is a task that is repeated.
        uniforms: float64, (N, 3), each in [0, 1): the randomness of x, y and v.

    Returns:
        Conversations. Their calls hold what was seen, what was sampled, and the log-probability
        of each sampled token when it was sampled.

    Raises:
        TypeError: `uniforms` is not float64.
        ValueError: `uniforms` has another shape or lies outside [0, 1).

    >>> uniforms = torch.full((1, 3), 0.5, dtype=torch.float64)
    >>> [talk] = converse(Decoder(CONFIG), [(3, 4)], uniforms)
    >>> [call.output_ids for call in talk.calls], talk.reward
    ([(5, 5), (5, 13)], 0)
    """
    if uniforms.shape != (len(tasks), DRAWS):
        expected = (len(tasks), DRAWS)
        raise ValueError(f"`uniforms` has shape {tuple(uniforms.shape)}, expected {expected}")
    history = torch.tensor([arithmetic.encode(task) for task in tasks])  # (N, 5)
    chosen = []
    for number in range(DRAWS):
        if number == REQUEST:
            answers = [tool(request) for request in history[:, PROMPT:].tolist()]
            history = torch.cat([history, torch.tensor(answers)], 1)
        logits = model(history)[:, -1, : len(arithmetic.DIGITS)]
        step = policy.restricted_log_softmax(logits, torch.ones_like(logits, dtype=torch.bool))
        picked = draw(step, uniforms[:, number, None])  # (N, 1)
        chosen.append(step.gather(1, picked))
        history = torch.cat([history, picked], 1)
    requests, digits = history[:, PROMPT : PROMPT + REQUEST].tolist(), history[:, -1].tolist()
    return [
        conversation(*written)
        for written in zip(tasks, requests, digits, torch.cat(chosen, 1).tolist(), strict=True)
    ]


def conversation(
    task: Task, request: Sequence[int], digit: int, log_probs: Sequence[float] | None = None
) -> Conversation:
    """The calls that sampled a request and a final digit, as a sampler returns them.

    Args:
        task: `(a, b)`.
        request: two digits.
        digit: the final one.
        log_probs: of x, y and v; None if they were not recorded.

    >>> conversation((3, 4), [3, 4], 4).calls[1].token_ids
    (12, 3, 10, 4, 11, 3, 4, 0, 7, 4, 13)
    """
    prompt, answer = arithmetic.encode(task), [digit, EOS]
    asked, told = (None, None) if log_probs is None else (log_probs[:REQUEST], log_probs[REQUEST:])
    first = Call(
        prompt_ids=prompt,
        output_ids=request,
        log_probs=asked,
        finish_reason="tool",
        sampling=SAMPLING,
    )
    second = Call(
        prompt_ids=[*prompt, *request, *tool(request)],
        output_ids=answer,
        log_probs=told and [*told, 0.0],  # the stop token is certain: a true 0, no filler
        finish_reason="stop",
        sampling=SAMPLING,
    )
    return Conversation((first, second), reward(task, request, answer))


def demonstration(task: Task) -> Conversation:
    """The conversation that asks for the task's own digits; nobody sampled it.

    >>> demonstration((3, 4)).calls[1].output_ids
    (4, 13)
    """
    return conversation(task, task, arithmetic.target(task)[1])


def enumerate_all(model: Decoder, tasks: Sequence[Task]) -> Tensor:
    """Log-probability of every conversation of every task.

    Args:
        model: the policy.
        tasks: R of them.

    Returns:
        Shape (R, 10, 10, 10), by x, y and v, with gradients. The exponentials of a task sum to 1.

    >>> enumerate_all(Decoder(CONFIG), [(3, 4)]).exp().sum().round(decimals=4).item()
    1.0
    """
    requests = [[x, y] for x in arithmetic.DIGITS for y in arithmetic.DIGITS]
    seen = torch.tensor(
        [[*arithmetic.encode(task), *asked, *tool(asked)] for task in tasks for asked in requests]
    )  # (100 R, 9)
    every = torch.ones(len(seen), 10, dtype=torch.bool)
    last = policy.restricted_log_softmax(model(seen)[:, -1, :10], every)  # (100 R, 10)
    asked = log_probs(model, seen)[:, PROMPT - 1 : PROMPT + 1].sum(-1)  # (100 R,)
    return (asked[:, None] + last).view(-1, 10, 10, 10)


def rewards(tasks: Sequence[Task]) -> Tensor:
    """What every conversation of every task is paid: float64, (R, 10, 10, 10).

    >>> rewards([(3, 4), (0, 0)]).sum((1, 2, 3))
    tensor([8., 1.], dtype=torch.float64)
    """
    digits = arithmetic.DIGITS
    paid = [
        reward(task, [x, y], [v, EOS])
        for task, x, y, v in itertools.product(tasks, digits, digits, digits)
    ]
    return torch.tensor(paid, dtype=torch.float64).view(-1, 10, 10, 10)


def value(model: Decoder, tasks: Sequence[Task]) -> Tensor:
    """Exact success of each task, with gradients: shape (R,).

    >>> value(Decoder(CONFIG), [(3, 4), (0, 0)]).detach().round(decimals=3)
    tensor([0.0080, 0.0010], dtype=torch.float64)
    """
    return (enumerate_all(model, tasks).double().exp() * rewards(tasks)).sum((1, 2, 3))


@torch.no_grad()
def calibration(model: Decoder, tasks: Sequence[Task]) -> compare.Calibration:
    """How confident the policy is in its responses, and how often they are right.

    A response is the sum that the tool returned with the final digit. Its confidence is the
    probability that the policy gives it, over all requests that lead to it, and its weight is
    that probability again: an expectation over sampled conversations, without sampling error.

    >>> round(calibration(Decoder(CONFIG), [(3, 4)]).ece, 2)
    0.0
    """
    chance = enumerate_all(model, tasks).double().exp()
    digits = torch.arange(10)
    sums = (digits[:, None] + digits).flatten()  # (100,)
    shape = (len(tasks), 19, 10)
    stated = torch.zeros(shape, dtype=torch.float64)
    stated.index_add_(1, sums, chance.view(-1, 100, 10))
    right = torch.zeros(shape, dtype=torch.float64)
    right[:, sums] = rewards(tasks).view(-1, 100, 10)  # equal for requests of one sum
    confidence = np.minimum(stated.numpy(), 1.0)  # which rounding may exceed
    return compare.calibration(confidence, right.numpy(), confidence)
