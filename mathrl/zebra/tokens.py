"""Puzzles and solutions as small ints: one token for each clue, one for each action.

A clue is four ints, its kind and three arguments, whose embeddings a model adds up; a solution is
a sequence of actions, each "this value is in this cell", and `EOS`. Nothing is spelled out, so a
model need not learn to read before it can learn to solve.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from mathrl.zebra.clues import (
    HOUSED,
    ITEMS,
    KINDS,
    Cell,
    Clue,
    Puzzle,
    Size,
    check_clues,
    check_size,
    check_solution,
)

Ints = NDArray[np.int64]

EOS = 0
"""The action that ends a solution."""


class Codec:
    """The tokens of puzzles of one size.

    Args:
        size: of the puzzles.
        max_clues: how many clues there is room for, 1 or more.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of range.

    >>> codec = Codec(Size(houses=3, attributes=2), max_clues=8)
    >>> codec.cells, codec.vocabulary, codec.length, codec.arguments
    (6, 19, 7, 10)
    """

    def __init__(self, size: Size, max_clues: int) -> None:
        """Count what there is to encode."""
        check_size(size)
        if type(max_clues) is not int:
            raise TypeError(f"`max_clues` must be an int, got {type(max_clues).__name__}")
        if max_clues < 1:
            raise ValueError(f"`max_clues` must be 1 or more, got {max_clues}")
        self.size = size
        self.max_clues = max_clues
        self.cells = size.cells
        """How many cells there are; a cell's index is `attribute * houses + house`."""
        self.vocabulary = 1 + self.cells * size.houses
        """How many actions there are: `EOS`, and each value in each cell."""
        self.length = self.cells + 1
        """How many actions a solution has."""
        self.arguments = 1 + self.cells + size.houses
        """How many values an argument of a clue can take: none, each item, each house."""

    def clues(self, puzzle: Puzzle) -> Ints:
        """The clues of a puzzle in their order, and zeros up to `max_clues`.

        Args:
            puzzle: of this size, with at most `max_clues` clues.

        Returns:
            Shape (K, 4): the kind, 1 to 9, and three arguments. The item `(attribute, value)` is
            `1 + attribute * houses + value`, the house `h` is `1 + cells + h`, no argument is 0.

        Raises:
            TypeError: a clue is of another type.
            ValueError: the puzzle has another size or too many clues, or a clue does not fit.

        >>> puzzle = Puzzle(Size(2, 2), (Clue("found_at", ((1, 0),), 1),), ((0, 1), (1, 0)))
        >>> Codec(Size(2, 2), max_clues=2).clues(puzzle)
        array([[1, 3, 6, 0],
               [0, 0, 0, 0]])
        """
        if puzzle.size != self.size:
            raise ValueError(f"`puzzle.size` must be {self.size}, got {puzzle.size}")
        if len(puzzle.clues) > self.max_clues:
            count = len(puzzle.clues)
            raise ValueError(f"`puzzle.clues` must be at most {self.max_clues}, got {count}")
        check_clues(self.size, puzzle.clues)
        tokens = np.zeros((self.max_clues, 4), np.int64)
        for row, clue in zip(tokens, puzzle.clues, strict=False):
            arguments = [1 + a * self.size.houses + v for a, v in clue.items]
            arguments += [] if clue.house is None else [1 + self.cells + clue.house]
            row[: 1 + len(arguments)] = [1 + KINDS.index(clue.kind), *arguments]
        return tokens

    def parse_clues(self, tokens: NDArray[np.integer]) -> tuple[Clue, ...]:
        """The clues that `clues` turned into tokens.

        Args:
            tokens: shape (K, 4).

        Returns:
            The clues, in their order.

        Raises:
            ValueError: the shape is another, or these are not the tokens of clues of this size.

        >>> Codec(Size(2, 2), max_clues=2).parse_clues(np.array([[1, 3, 6, 0], [0, 0, 0, 0]]))
        (Clue(kind='found_at', items=((1, 0),), house=1),)
        """
        if tokens.shape != (self.max_clues, 4):
            raise ValueError(f"`tokens` must have shape ({self.max_clues}, 4), got {tokens.shape}")
        rows: list[list[int]] = tokens.tolist()
        clues = tuple(self._clue(index, row) for index, row in enumerate(rows) if any(row))
        if any(map(any, rows[len(clues) :])):
            raise ValueError("`tokens` must have no empty row before a clue")
        check_clues(self.size, clues)
        return clues

    def actions(self, puzzle: Puzzle, order: Sequence[Cell]) -> Ints:
        """The solution of a puzzle as actions.

        Args:
            puzzle: of this size.
            order: every cell once, in the order in which they are filled.

        Returns:
            Shape (cells + 1,): `1 + cell * houses + value` for each cell in this order, then
            `EOS`.

        Raises:
            TypeError: the solution is of another type.
            ValueError: the size is another, or `order` does not have every cell once.

        >>> puzzle = Puzzle(Size(2, 2), (), ((0, 1), (1, 0)))
        >>> Codec(Size(2, 2), 1).actions(puzzle, [(1, 0), (1, 1), (0, 0), (0, 1)])
        array([6, 7, 1, 4, 0])
        """
        size = check_solution(puzzle.solution)
        if size != self.size:
            raise ValueError(f"`puzzle` must have {self.size}, got {size}")
        every = [(a, h) for a in range(size.attributes) for h in range(size.houses)]
        if sorted(order) != every:
            raise ValueError(f"`order` must have every cell of {size} once, got {order}")
        cells = [a * size.houses + h for a, h in order]
        values = [puzzle.solution[a][h] for a, h in order]
        return self.join(np.array(cells), np.array(values))

    def join(self, cells: NDArray[np.integer], values: NDArray[np.integer]) -> Ints:
        """Cells and values as actions, and `EOS`, for many solutions at once.

        Args:
            cells: indices of cells, shape (..., cells).
            values: of these cells, in the same order and of the same shape.

        Returns:
            Shape (..., cells + 1).

        Raises:
            ValueError: the shapes differ, the last axis is not that long, or a number is out of
                range.

        >>> Codec(Size(2, 2), 1).join(np.array([[2, 3, 0, 1]]), np.array([[1, 0, 0, 1]]))
        array([[6, 7, 1, 4, 0]])
        """
        if cells.shape != values.shape or cells.shape[-1:] != (self.cells,):
            raise ValueError(
                f"`cells` and `values` must both have shape (..., {self.cells}), "
                f"got {cells.shape} and {values.shape}"
            )
        for name, numbers, bound in (
            ("cells", cells, self.cells),
            ("values", values, self.size.houses),
        ):
            if ((numbers < 0) | (numbers >= bound)).any():
                raise ValueError(f"`{name}` must be 0 to {bound - 1}")
        actions = np.full((*cells.shape[:-1], self.length), EOS, np.int64)
        actions[..., :-1] = 1 + cells.astype(np.int64) * self.size.houses + values
        return actions

    def parse(self, tokens: Iterable[int]) -> list[tuple[int, int]]:
        """Read actions up to the first token that is none: `EOS`, or one that is out of range.

        Args:
            tokens: any ints.

        Returns:
            Pairs of a cell's index and a value; cells may be missing or come twice.

        >>> Codec(Size(2, 2), 1).parse([6, 7, 1, 1, 0, 4])
        [(2, 1), (3, 0), (0, 0), (0, 0)]
        """
        pairs = []
        for token in tokens:
            if not 0 < token < self.vocabulary:
                break
            pairs.append(divmod(token - 1, self.size.houses))
        return pairs

    def _clue(self, index: int, row: list[int]) -> Clue:
        if not 1 <= row[0] <= len(KINDS):
            raise ValueError(f"`tokens[{index}, 0]` must be 1 to {len(KINDS)}, got {row[0]}")
        kind = KINDS[row[0] - 1]
        count = ITEMS[kind]
        items = tuple(divmod(argument - 1, self.size.houses) for argument in row[1 : 1 + count])
        house = row[1 + count] - 1 - self.cells if kind in HOUSED else None
        used = 1 + count + (house is not None)
        if any(row[used:]):
            raise ValueError(f"`tokens[{index}]` must end with zeros after {used} ints, got {row}")
        return Clue(kind, items, house)
