"""Is a response the solution: every cell exactly once, each right, then `EOS`.

As in chapter 1, the verifier runs no code of the object that it judges, repairs nothing, and looks
at no more of it than a right response could have, and one item.
"""

from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from mathrl.zebra.clues import Puzzle, Size, Solution, check_solution
from mathrl.zebra.tokens import EOS

VERSION = 1
"""Version of the verifier; any change of what it accepts raises it."""

Reason = Literal["illegal", "duplicate", "truncated", "missing", "wrong", "ok"]


class Verdict(TypedDict):
    """What `verify` returns.

    `solved` is true exactly when `reason` is `"ok"`; `detail` says for a reader what was seen, in
    at most a few hundred ASCII characters.
    """

    solved: bool
    reason: Reason
    detail: str


def verify(puzzle: Puzzle | Solution, tokens: object) -> Verdict:
    """Accept the solution as actions in any order, nothing else, and say why.

    The checks run in a fixed order and the first that fails gives the reason.

    | reason | the response |
    |---|---|
    | `illegal` | is no list or tuple of exact ints, has a token out of range, or one after `EOS` |
    | `duplicate` | fills a cell twice, with whatever value |
    | `truncated` | has no `EOS` |
    | `missing` | ends before every cell is filled |
    | `wrong` | has a value that is not the solution's |
    | `ok` | is accepted |

    Only the first `cells + 2` items are looked at; a response with more is refused in any case.

    Args:
        puzzle: or its solution, `solution[attribute][house]`.
        tokens: any object; it is not changed, iterated or compared.

    Returns:
        A new dict with `solved`, `reason` and `detail`. No response makes it raise.

    Raises:
        TypeError: the solution is of another type.
        ValueError: the solution is none.

    >>> solution = ((0, 1), (1, 0))
    >>> verify(solution, [6, 7, 1, 4, 0])["solved"]
    True
    >>> verify(solution, [6, 7, 1, 3, 0])
    {'solved': False, 'reason': 'wrong', 'detail': 'cell 1 must have value 1, got 0'}
    """
    solution: Solution = puzzle.solution if isinstance(puzzle, Puzzle) else puzzle
    size = check_solution(solution)
    if not (type(tokens) is list or type(tokens) is tuple):
        return _fail("illegal", f"a response must be a list or tuple, got {_type_name(tokens)}")
    items = tuple(tokens[: size.cells + 2])  # all later checks see this copy
    actions: list[int] = []
    for index, item in enumerate(items):
        if type(item) is not int:
            return _fail("illegal", f"token {index} must be an int, got {_type_name(item)}")
        if not 0 <= item <= size.cells * size.houses:
            return _fail("illegal", f"token {index} must be an action, got {_shown(item)}")
        if actions and actions[-1] == EOS:
            return _fail("illegal", f"token {index} comes after EOS")
        actions.append(item)
    return _judge(size, solution, actions)


def solved(
    values: NDArray[np.integer], tokens: NDArray[np.integer], houses: int
) -> NDArray[np.bool_]:
    """For many responses at once: whether each is the solution.

    Args:
        values: the right value of each cell, shape (B, cells).
        tokens: the responses, shape (B, T); what comes after the first `EOS` is not looked at, it
            is the padding of a batch.
        houses: how many there are, which is how many values a cell has.

    Returns:
        Shape (B,). The same as `verify` on each response cut after its first `EOS`.

    Raises:
        ValueError: the shapes do not fit.

    >>> solved(np.array([[0, 1, 1, 0]]), np.array([[6, 7, 1, 4, 0, 0]]), houses=2)
    array([ True])
    """
    if values.ndim != 2 or tokens.ndim != 2 or len(values) != len(tokens):
        raise ValueError(
            f"`values` and `tokens` must have shapes (B, cells) and (B, T), "
            f"got {values.shape} and {tokens.shape}"
        )
    cells = values.shape[1]
    if tokens.shape[1] <= cells:
        return np.zeros(len(tokens), np.bool_)
    right = 1 + np.arange(cells) * houses + values
    # Sorted, a right response is the right actions by cell: each once, and nothing else.
    return (np.sort(tokens[:, :cells], 1) == right).all(1) & (tokens[:, cells] == EOS)


def _judge(size: Size, solution: Solution, actions: list[int]) -> Verdict:
    ended = actions[-1:] == [EOS]
    filled: dict[int, int] = {}
    for action in actions[: len(actions) - ended]:
        cell, value = divmod(action - 1, size.houses)
        if cell in filled:
            return _fail("duplicate", f"cell {cell} is filled twice")
        filled[cell] = value
    if not ended:
        return _fail("truncated", f"there is no EOS after {len(actions)} tokens")
    if len(filled) < size.cells:
        cell = next(cell for cell in range(size.cells) if cell not in filled)
        return _fail("missing", f"cell {cell} is not filled, {len(filled)} of {size.cells} are")
    for cell, value in filled.items():
        right = solution[cell // size.houses][cell % size.houses]
        if value != right:
            return _fail("wrong", f"cell {cell} must have value {right}, got {value}")
    return {"solved": True, "reason": "ok", "detail": f"all {size.cells} cells are right"}


def _fail(reason: Reason, detail: str) -> Verdict:
    return {"solved": False, "reason": reason, "detail": detail}


def _type_name(value: object) -> str:
    # `.__name__` could be redefined by a metaclass, and be of any length or a subclass of str.
    name = type.__dict__["__name__"].__get__(type(value))
    return ascii(str.__getitem__(name, slice(40)))[1:-1]


def _shown(number: int) -> str:
    # Long ints are slow to print, and past 4300 digits Python refuses.
    small = -1000 < number < 1000
    return str(number) if small else f"an int of {number.bit_length()} bits"
