"""Puzzles drawn at random: an assignment, and true clues until deduction finds it.

Every puzzle is a function of size, seed and index, whatever else is generated, where, in which
order and by how many processes. The randomness comes from `random.Random.random`, the one method
of which Python promises that it gives the same numbers in every version.
"""

import hashlib
import random
from collections.abc import Callable
from itertools import accumulate

from mathrl.zebra.clues import Clue, Item, Kind, Puzzle, Size, Solution, check_size
from mathrl.zebra.solver import Board

WEIGHTS: dict[Kind, int] = {
    "found_at": 13, "not_at": 3, "same_house": 27, "not_same_house": 7, "neighbour": 20,
    "ends": 20, "immediate_left": 20, "left_of": 20, "in_between": 10,
}  # fmt: skip
"""How often each kind of clue is drawn, relative to the others."""

VERSION = 1
"""Version of the generator; any change of what it draws raises it."""

ATTEMPTS = 10_000
"""How many puzzles are drawn before `generate` gives up on `max_clues`."""

_Below = Callable[[int], int]


def generate(
    size: Size, seed: int, index: int, *, prune: bool = False, max_clues: int | None = None
) -> Puzzle:
    """Draw a puzzle with exactly one solution.

    An assignment is drawn uniformly. Then kinds of clues are drawn by `WEIGHTS`, and for each a
    true clue of that kind, uniformly over the houses and attributes that it can be about. Clues
    are added, none twice, until propagation knows every cell; that it does proves that the
    solution is unique.

    Args:
        size: of the puzzle.
        seed: of a set of puzzles, 0 or more.
        index: of the puzzle in the set, 0 or more.
        prune: drop clues, tried in random order, without which the solver still finishes. Then no
            clue can be left out. The puzzle is that of `prune=False` with fewer clues.
        max_clues: draw again until there are at most so many clues.

    Returns:
        The puzzle. Its clues are in random order, so that their order says nothing.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is negative, or `max_clues` is so small that `ATTEMPTS` puzzles all
            had more clues.

    >>> puzzle = generate(Size(houses=3, attributes=3), seed=0, index=0, prune=True)
    >>> puzzle == generate(Size(houses=3, attributes=3), seed=0, index=0, prune=True)
    True
    """
    check_size(size)
    check_numbers(seed=seed, index=index, max_clues=0 if max_clues is None else max_clues)
    for attempt in range(ATTEMPTS):
        below = _randomness(size, seed, index, attempt)
        solution = tuple(_shuffled(size.houses, below) for _ in range(size.attributes))
        clues = _clues(size, solution, below, prune=prune)
        if max_clues is None or len(clues) <= max_clues:
            return Puzzle(size, clues, solution)
    raise ValueError(f"`max_clues` must be larger for {size}, got {max_clues}")


def _clues(size: Size, solution: Solution, below: _Below, *, prune: bool) -> tuple[Clue, ...]:
    board, rules = Board(size), dict[Clue, int]()
    kinds = [k for k in WEIGHTS if size.houses > 2 or k not in ("ends", "in_between")]
    bounds = list(accumulate(WEIGHTS[kind] for kind in kinds))
    solved = False
    while not solved:
        point = below(bounds[-1])
        kind = next(kind for kind, bound in zip(kinds, bounds, strict=True) if point < bound)
        clue = _true_clue(kind, solution, below)
        if clue not in rules:
            rules[clue] = board.add(clue)
            solved = board.close([rules[clue]])
    clues = _pruned(board, rules, below) if prune else tuple(rules)
    return tuple(clues[place] for place in _shuffled(len(clues), below))


def _pruned(board: Board, rules: dict[Clue, int], below: _Below) -> tuple[Clue, ...]:
    clues, everything = list(rules), set(range(len(board.rules)))
    for position in _shuffled(len(clues), below):
        rule = rules[clues[position]]
        board.dropped.add(rule)
        board.clear()
        if not board.close(everything - board.dropped):
            board.dropped.remove(rule)
    return tuple(clue for clue in clues if rules[clue] not in board.dropped)


def _true_clue(kind: Kind, solution: Solution, below: _Below) -> Clue:
    """A true clue of a kind, uniformly over the houses and attributes that it can be about."""
    attributes, houses = len(solution), len(solution[0])

    def item(house: int, attribute: int | None = None) -> Item:
        attribute = below(attributes) if attribute is None else attribute
        return attribute, solution[attribute][house]

    def pair(one: Item, two: Item) -> tuple[Item, Item]:
        return (one, two) if one < two else (two, one)

    match kind:
        case "found_at":
            house = below(houses)
            return Clue(kind, (item(house),), house)
        case "not_at":
            house, other = _distinct(2, houses, below)
            return Clue(kind, (item(house),), other)
        case "same_house":
            house, (one, two) = below(houses), _distinct(2, attributes, below)
            return Clue(kind, pair(item(house, one), item(house, two)))
        case "not_same_house":
            (house, other), (one, two) = (
                _distinct(2, houses, below),
                _distinct(2, attributes, below),
            )
            return Clue(kind, pair(item(house, one), item(other, two)))
        case "neighbour":
            house = below(houses - 1)
            if houses > 2:
                return Clue(kind, pair(item(house), item(house + 1)))
            one, two = _distinct(2, attributes, below)  # of one attribute, it would say nothing
            return Clue(kind, pair(item(0, one), item(1, two)))
        case "ends":
            return Clue(kind, (item(below(2) * (houses - 1)),))
        case "immediate_left":
            house = below(houses - 1)
            return Clue(kind, (item(house), item(house + 1)))
        case "left_of":
            first, last = sorted(_distinct(2, houses, below))
            return Clue(kind, (item(first), item(last)))
        case "in_between":
            first, middle, last = sorted(_distinct(3, houses, below))
            return Clue(kind, (item(middle), *pair(item(first), item(last))))


def _randomness(size: Size, seed: int, index: int, attempt: int) -> _Below:
    """A function that draws an int from 0 to below its argument, uniformly to 1 in 2^50."""
    name = f"zebra {size.houses} {size.attributes} {seed} {index} {attempt}"
    uniform = random.Random(int.from_bytes(hashlib.sha256(name.encode()).digest())).random
    return lambda bound: int(uniform() * bound)


def _shuffled(count: int, below: _Below) -> tuple[int, ...]:
    return _distinct(count, count, below)


def _distinct(count: int, bound: int, below: _Below) -> tuple[int, ...]:
    """Different ints below a bound, in random order: the first places of a shuffle."""
    places = list(range(bound))
    for place in range(count):
        other = place + below(bound - place)
        places[place], places[other] = places[other], places[place]
    return tuple(places[:count])


def check_numbers(**numbers: object) -> None:
    """Refuse what is not an int, or is negative.

    Raises:
        TypeError: a number is not exactly an int.
        ValueError: a number is negative.

    >>> check_numbers(seed=0)
    """
    for name, number in numbers.items():
        if type(number) is not int:
            raise TypeError(f"`{name}` must be an int, got {type(number).__name__}")
        if number < 0:
            raise ValueError(f"`{name}` must be 0 or more, got {number}")
