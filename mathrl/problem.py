"""A problem: prompts, what may be answered, what each answer is paid, and which is right.

Where all responses can be listed, so can their rewards, and success, its gradient and every
estimator's mean have exact values. The bench is such a problem: 25 prompts, 100 responses.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from mathrl import arithmetic
from mathrl.grammar import ARITHMETIC, Grammar

STRICT: Mapping[arithmetic.Reason, float] = {"ok": 1.0}
"""The contract's reward: 1 for the right response, 0 for any other."""

SHAPED: Mapping[arithmetic.Reason, float] = {"ok": 1.0, "final": 0.5, "intermediate": 0.2}
"""A control that changes the objective: 0.2 for the format, 0.3 more for a right first digit."""


class Problem(NamedTuple):
    """P prompts, the grammar of their N responses of at most T tokens, rewards and targets.

    `prompts` int64 (P, L); `rewards` floating (P, N), in the order of `grammar.responses()`;
    `targets` int64 (P, T), the response that a demonstration shows.
    """

    prompts: Tensor
    grammar: Grammar
    rewards: Tensor
    targets: Tensor

    def to(self, device: torch.device | str) -> "Problem":
        """The same problem on another device."""
        prompts, grammar, rewards, targets = self
        return Problem(prompts.to(device), grammar, rewards.to(device), targets.to(device))


def arithmetic_problem(
    tasks: Sequence[tuple[int, int]], pay: Mapping[arithmetic.Reason, float] = STRICT
) -> Problem:
    """Tasks of the contract as tensors, paid by what the verifier says.

    Args:
        tasks: for example `arithmetic.TRAIN`.
        pay: the reward of each reason that `arithmetic.verify` gives; 0 where there is none.

    Returns:
        The problem, with rewards in float32.

    Raises:
        TypeError: a task is not a list or tuple of two ints.
        ValueError: there is no task, one is not in the contract, or `pay` names no such reason.

    >>> problem = arithmetic_problem([(3, 4), (2, 2)])
    >>> problem.prompts.tolist(), problem.targets.tolist()
    ([[12, 3, 10, 4, 11], [12, 2, 10, 2, 11]], [[7, 4, 13], [4, 8, 13]])
    >>> problem.rewards.nonzero().tolist()
    [[0, 74], [1, 48]]
    """
    if not tasks:
        raise ValueError("`tasks` must hold at least one task")
    known = get_args(arithmetic.Reason)
    for reason in pay:
        if reason not in known:
            raise ValueError(f"`pay` must name reasons among {known}, got {reason!r}")
    return Problem(
        torch.tensor([arithmetic.encode(task) for task in tasks]),
        ARITHMETIC,
        torch.tensor([[float(pay.get(reason, 0.0)) for reason in row] for row in reasons(tasks)]),
        torch.tensor([arithmetic.target(task) for task in tasks]),
    )


def reasons(tasks: Sequence[tuple[int, int]]) -> list[list[arithmetic.Reason]]:
    """What the verifier says to each of the 100 responses to each task, in their order.

    >>> [row.count("intermediate") for row in reasons([(3, 4), (2, 2)])]
    [90, 90]
    """
    listed = arithmetic.responses()
    return [[arithmetic.verify(task, response)["reason"] for response in listed] for task in tasks]
