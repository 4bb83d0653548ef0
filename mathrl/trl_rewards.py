"""The two rewards as functions that TRL's `GRPOTrainer` calls.

A trainer calls `function(prompts=…, completions=…, completion_ids=…, **columns)` with lists of
equal length, one entry a sample and one list for each column of the data set, and adds what comes
back with `reward_weights`. `GRPOConfig(reward_weights=list(scales))`, with the `scales` of
`bootstrap_scales`, and `GRPOTrainer(reward_funcs=[solve_function(read), order_function(read)])`
are together the mixture of `mathrl.mixture`; functions and scales have the same order.

`read` says what a completion means; it is called once a sample and reward.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from mathrl.reward import Reduce, order_reward


class Reading(NamedTuple):
    """What one completion says: see `order_reward` for `cells` and `correct`.

    `ended` is whether the end token came right after the last action.
    """

    cells: Sequence[Hashable | None]
    correct: Sequence[bool]
    ended: bool


Read = Callable[[Sequence[int], dict[str, Any]], Reading]
RewardFunction = Callable[..., list[float]]


def order_function(
    read: Read, *, require_correct: bool = False, reduce: Reduce = "mean"
) -> RewardFunction:
    """The order reward; the data set needs a column `canonical`, each sample's cells in order.

    Args:
        read: from the ids of a completion and its row, a dictionary of the data set's columns, to
            a `Reading`.
        require_correct: as in `order_reward`.
        reduce: as in `order_reward`.

    Returns:
        A function of TRL's signature, named `order`.

    >>> def read(ids, row):
    ...     return Reading(ids, [True] * len(ids), ended=True)
    >>> function = order_function(read)
    >>> function(completion_ids=[[5, 6], [6, 5]], canonical=[[5, 6], [5, 6]])
    [1.0, 0.5]
    """

    def order(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        rewards = []
        for ids, row in zip(completion_ids, _rows(len(completion_ids), columns), strict=True):
            cells, correct, _ = read(ids, row)
            rewards.append(
                order_reward(
                    cells,
                    row["canonical"],
                    correct=correct,
                    require_correct=require_correct,
                    reduce=reduce,
                )
            )
        return rewards

    return order


def solve_function(read: Read) -> RewardFunction:
    """The solve reward, with the same `read` and column as `order_function`; named `solve`.

    >>> def read(ids, row):
    ...     return Reading(ids, [True] * len(ids), ended=True)
    >>> solve_function(read)(completion_ids=[[6, 5], [5, 5]], canonical=[[5, 6], [5, 6]])
    [1.0, 0.0]
    """

    def solve(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
        rewards = []
        for ids, row in zip(completion_ids, _rows(len(completion_ids), columns), strict=True):
            cells, correct, ended = read(ids, row)
            once = len(cells) == len(row["canonical"]) and set(cells) == set(row["canonical"])
            rewards.append(float(ended and once and all(correct)))
        return rewards

    return solve


def _rows(count: int, columns: dict[str, Any]) -> list[dict[str, Any]]:
    """The columns of each sample; TRL also passes things that are no columns, which are not lists.

    Raises:
        ValueError: there is no column `canonical`, or a list has another length.
    """
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    if "canonical" not in lists:
        raise ValueError("the data set must have a column `canonical`: the cells in order")
    for name, values in lists.items():
        if len(values) != count:
            raise ValueError(f"`{name}` must have {count} entries, got {len(values)}")
    return [{name: values[i] for name, values in lists.items()} for i in range(count)]
