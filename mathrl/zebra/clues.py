"""What a puzzle is: a size, clues of nine kinds, and the assignment that they describe.

There are `houses` houses in a row and `attributes` attributes. Each attribute has as many values
as there are houses, and each value is in one house. An **item** is a pair `(attribute, value)`; a
**cell** is a pair `(attribute, house)`, and solving means to say which value is in each cell.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal[
    "found_at", "not_at", "same_house", "not_same_house", "neighbour",
    "ends", "immediate_left", "left_of", "in_between",
]  # fmt: skip
"""The name of a relation between items, or between an item and a house."""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The nine kinds; the position in this tuple, plus one, is the kind's token."""

SIZES = range(2, 7)
"""How many houses, and how many attributes, a puzzle may have."""

ITEMS: dict[Kind, int] = dict.fromkeys(KINDS, 2) | {
    "found_at": 1, "not_at": 1, "ends": 1, "in_between": 3
}  # fmt: skip
"""How many items a clue of each kind names."""

HOUSED: tuple[Kind, ...] = ("found_at", "not_at")
"""The kinds that name a house."""

APART: tuple[Kind, ...] = ("same_house", "not_same_house")
"""The kinds whose two items must be of two attributes: within one, the clue says nothing new."""

Item = tuple[int, int]
"""`(attribute, value)`."""

Cell = tuple[int, int]
"""`(attribute, house)`."""

Solution = tuple[tuple[int, ...], ...]
"""`solution[attribute][house]` is a value."""


class Size(NamedTuple):
    """Number of houses and of attributes, each 2 to 6."""

    houses: int
    attributes: int

    @property
    def cells(self) -> int:
        """How many cells there are, which is also how many items there are.

        >>> Size(houses=3, attributes=4).cells
        12
        """
        return self.houses * self.attributes


class Clue(NamedTuple):
    """One statement about where items are.

    | kind | says |
    |---|---|
    | `found_at` | the item is in `house` |
    | `not_at` | the item is not in `house` |
    | `same_house` | the two items, of two attributes, are in one house |
    | `not_same_house` | they are not |
    | `neighbour` | the two items are in houses next to each other |
    | `ends` | the item is in the first or in the last house |
    | `immediate_left` | the first item is in the house just left of the second's |
    | `left_of` | the first item is in some house left of the second's |
    | `in_between` | the first item is somewhere between the other two |
    """

    kind: Kind
    items: tuple[Item, ...]
    house: int | None = None


class Puzzle(NamedTuple):
    """Clues and the one assignment that they allow; `solution[attribute][house]` is a value."""

    size: Size
    clues: tuple[Clue, ...]
    solution: Solution


def holds(clue: Clue, solution: Solution) -> bool:
    """Whether a clue is true of an assignment.

    Args:
        clue: a valid clue for the size of the assignment.
        solution: `solution[attribute][house]` is a value.

    Returns:
        True or False.

    >>> solution = ((0, 1, 2), (2, 0, 1))
    >>> holds(Clue("same_house", ((0, 1), (1, 0))), solution)
    True
    >>> holds(Clue("left_of", ((1, 0), (0, 1))), solution)
    False
    """
    at = [solution[attribute].index(value) for attribute, value in clue.items]
    last = len(solution[0]) - 1
    match clue.kind:
        case "found_at":
            return at[0] == clue.house
        case "not_at":
            return at[0] != clue.house
        case "same_house":
            return at[0] == at[1]
        case "not_same_house":
            return at[0] != at[1]
        case "neighbour":
            return abs(at[0] - at[1]) == 1
        case "ends":
            return at[0] in (0, last)
        case "immediate_left":
            return at[0] + 1 == at[1]
        case "left_of":
            return at[0] < at[1]
        case "in_between":
            return min(at[1:]) < at[0] < max(at[1:])


def check_size(size: Any) -> None:
    """Refuse what is not a size.

    Raises:
        TypeError: it is not a `Size` of two ints.
        ValueError: a number is not one of `SIZES`.

    >>> check_size(Size(houses=2, attributes=6))
    """
    if type(size) is not Size:
        raise TypeError(f"`size` must be a Size, got {type(size).__name__}")
    for name, number in zip(size._fields, size, strict=True):
        if type(number) is not int:
            raise TypeError(f"`size.{name}` must be an int, got {type(number).__name__}")
        if number not in SIZES:
            raise ValueError(f"`size.{name}` must be 2 to 6, got {number}")


def check_clues(size: Size, clues: Iterable[Any]) -> None:
    """Refuse clues that do not fit a size: nothing is repaired.

    Raises:
        TypeError: something is not a `Clue`, or not made of exact ints and tuples.
        ValueError: an unknown kind, a wrong number of items, an item twice, a number out of range,
            a house where none belongs or none where one does, or one attribute where the kind
            needs two.

    >>> check_clues(Size(2, 2), [Clue("found_at", ((0, 1),), 2)])
    Traceback (most recent call last):
    ...
    ValueError: `clues[0].house` must be 0 to 1, got 2
    """
    check_size(size)
    for index, clue in enumerate(clues):
        _check_clue(f"`clues[{index}]", size, clue)


def check_solution(solution: Any) -> Size:
    """Refuse what is not an assignment; return its size.

    Raises:
        TypeError: it is not a tuple of tuples of ints.
        ValueError: it has no allowed size, or a row is not a permutation of the values.

    >>> check_solution(((0, 1, 2), (2, 0, 1)))
    Size(houses=3, attributes=2)
    """
    if type(solution) is not tuple or any(type(row) is not tuple for row in solution):
        raise TypeError("`solution` must be a tuple of tuples of ints")
    if any(type(value) is not int for row in solution for value in row):
        raise TypeError("`solution` must be a tuple of tuples of ints")
    attributes, houses = len(solution), len(solution[0]) if solution else 0
    if attributes not in SIZES or houses not in SIZES:
        raise ValueError(f"`solution` must be 2 to 6 rows of 2 to 6, got {attributes} of {houses}")
    for attribute, row in enumerate(solution):
        if sorted(row) != list(range(houses)):
            values = f"the values 0 to {houses - 1}, each once"
            raise ValueError(f"`solution[{attribute}]` must hold {values}, got {row}")
    return Size(houses, attributes)


def _check_clue(name: str, size: Size, clue: Any) -> None:
    if type(clue) is not Clue:
        raise TypeError(f"{name}` must be a Clue, got {type(clue).__name__}")
    kind, items, house = clue
    if type(kind) is not str or kind not in KINDS:
        raise ValueError(f"{name}.kind` must be one of {', '.join(KINDS)}, got {kind!r}")
    if type(items) is not tuple or any(type(item) is not tuple for item in items):
        raise TypeError(f"{name}.items` must be a tuple of tuples, got {items!r}")
    if len(items) != ITEMS[kind] or len(set(items)) != len(items):
        raise ValueError(f"{name}.items` must be {ITEMS[kind]} different items, got {items!r}")
    for item in items:
        if len(item) != 2 or any(type(number) is not int for number in item):
            raise TypeError(f"{name}.items` must be pairs of ints, got {item!r}")
        if not (0 <= item[0] < size.attributes and 0 <= item[1] < size.houses):
            raise ValueError(f"{name}.items` must be items of {size}, got {item}")
    if kind in APART and items[0][0] == items[1][0]:
        raise ValueError(f"{name}.items` must be of two attributes, got {items}")
    if kind in HOUSED:
        if type(house) is not int:
            raise TypeError(f"{name}.house` must be an int, got {type(house).__name__}")
        if not 0 <= house < size.houses:
            raise ValueError(f"{name}.house` must be 0 to {size.houses - 1}, got {house}")
    elif house is not None:
        raise ValueError(f"{name}.house` must be None for {kind}, got {house!r}")
