"""Many puzzles of one size as arrays, and the same puzzles under other names."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mathrl.zebra.clues import KINDS, Kind, Puzzle, Size
from mathrl.zebra.solver import solve
from mathrl.zebra.tokens import Codec, Ints

# The arguments that may be named in either order; the smaller comes first.
_SWAPPED: dict[Kind, tuple[int, int]] = {
    "same_house": (1, 2), "not_same_house": (1, 2), "neighbour": (1, 2), "in_between": (2, 3)
}  # fmt: skip


class Puzzles(NamedTuple):
    """N puzzles of one size, with their solutions and the waves of their cells.

    `clues` has shape (N, K, 4), as `Codec.clues` makes it; `values` and `waves` have shape
    (N, cells), in the order of the cells' indices; all are int64.
    """

    clues: Ints
    values: Ints
    waves: Ints
    size: Size

    def canonical(self) -> Ints:
        """The cells of each puzzle in canonical order: by wave, then by index.

        Returns:
            Shape (N, cells), indices of cells.

        >>> from mathrl.zebra.generator import generate
        >>> puzzles = from_puzzles([generate(Size(2, 2), 0, 0)], max_clues=8)
        >>> puzzles.waves, puzzles.canonical()
        (array([[2, 1, 1, 2]]), array([[1, 2, 0, 3]]))
        """
        return np.argsort(self.waves, axis=1, kind="stable")

    def select(self, rows: NDArray[np.integer] | slice) -> "Puzzles":
        """Some of the puzzles.

        >>> from mathrl.zebra.generator import generate
        >>> three = from_puzzles([generate(Size(2, 2), 0, i) for i in range(3)], max_clues=8)
        >>> three.select(np.array([2, 0])).values.shape
        (2, 4)
        """
        return Puzzles(self.clues[rows], self.values[rows], self.waves[rows], self.size)

    def puzzle(self, row: int) -> Puzzle:
        """One puzzle with its clues as such.

        >>> from mathrl.zebra.generator import generate
        >>> puzzle = generate(Size(2, 2), 0, 0)
        >>> from_puzzles([puzzle], max_clues=8).puzzle(0) == puzzle
        True
        """
        clues = Codec(self.size, self.clues.shape[1]).parse_clues(self.clues[row])
        values = self.values[row].reshape(self.size.attributes, self.size.houses)
        return Puzzle(self.size, clues, tuple(map(tuple, values.tolist())))


def from_puzzles(puzzles: list[Puzzle], max_clues: int) -> Puzzles:
    """Solve puzzles and put them into arrays.

    Args:
        puzzles: one or more, all of one size, each solved by propagation alone.
        max_clues: K, at least the number of clues of each.

    Returns:
        The arrays, in the order of the puzzles.

    Raises:
        ValueError: there is no puzzle; sizes differ; a puzzle has too many clues, or is not solved
            by propagation, or its solution is not the one that its clues have.

    >>> from mathrl.zebra.generator import generate
    >>> from_puzzles([generate(Size(2, 2), 0, 0)], max_clues=8).clues.shape
    (1, 8, 4)
    """
    if not puzzles:
        raise ValueError("`puzzles` must not be empty")
    size = puzzles[0].size
    codec = Codec(size, max_clues)
    clues = np.stack([codec.clues(puzzle) for puzzle in puzzles])
    found = [solve(size, puzzle.clues) for puzzle in puzzles]
    for index, (puzzle, solved) in enumerate(zip(puzzles, found, strict=True)):
        if puzzle.solution != solved.solution:
            raise ValueError(f"`puzzles[{index}].solution` must be what its clues determine")
    shape = (len(puzzles), size.cells)
    values = np.array([solved.solution for solved in found], np.int64).reshape(shape)
    waves = np.array([solved.waves for solved in found], np.int64).reshape(shape)
    return Puzzles(clues, values, waves, size)


def relabel(puzzles: Puzzles, rng: np.random.Generator) -> Puzzles:
    """The same puzzles under other names, their clues in another order.

    Each puzzle gets its own permutation of the attributes, of the values of each attribute, and of
    its clues. Waves move along with their cells. A generated puzzle is as likely as any of its
    relabellings, so a model may be trained on them without leaving the distribution.

    Args:
        puzzles: any.
        rng: where the permutations come from.

    Returns:
        New arrays of the same shapes.

    >>> from mathrl.zebra.generator import generate
    >>> puzzles = from_puzzles([generate(Size(2, 2), 0, 0)], max_clues=8)
    >>> sorted(relabel(puzzles, np.random.default_rng(0)).waves[0].tolist())
    [1, 1, 2, 2]
    """
    houses, attributes = puzzles.size
    count = len(puzzles.clues)
    attribute = rng.permuted(np.tile(np.arange(attributes), (count, 1)), axis=1)  # old to new
    value = rng.permuted(np.tile(np.arange(houses), (count, attributes, 1)), axis=2)
    order = rng.permuted(np.tile(np.arange(puzzles.clues.shape[1]), (count, 1)), axis=1)
    return apply_names(puzzles, attribute, value, order)


def apply_names(puzzles: Puzzles, attribute: Ints, value: Ints, order: Ints) -> Puzzles:
    """Rename attributes and values, and reorder clues, as told; `relabel` draws these at random.

    Args:
        puzzles: N of them.
        attribute: the new number of each attribute, shape (N, attributes).
        value: the new number of each value of each old attribute, shape (N, attributes, houses).
        order: which clue comes at each place, shape (N, K); empty rows still come last.

    Returns:
        New arrays of the same shapes.

    >>> from mathrl.zebra.generator import generate
    >>> puzzles = from_puzzles([generate(Size(2, 2), 0, 0)], max_clues=2)
    >>> swapped = apply_names(
    ...     puzzles, np.array([[1, 0]]), np.array([[[0, 1], [0, 1]]]), np.array([[0, 1]])
    ... )
    >>> puzzles.values, swapped.values
    (array([[1, 0, 0, 1]]), array([[0, 1, 1, 0]]))
    """
    houses, attributes = puzzles.size
    count, cells = puzzles.values.shape
    rows = np.arange(count)[:, None]
    # Arguments of clues: none and houses keep their tokens, items get new ones.
    names = np.tile(np.arange(1 + cells + houses), (count, 1))
    items = attribute[:, :, None] * houses + value
    names[:, 1 : 1 + cells] = 1 + items.reshape(count, cells)
    clues = puzzles.clues[rows, order]
    clues[..., 1:] = names[rows[:, :, None], clues[..., 1:]]
    for kind, columns in _SWAPPED.items():
        chosen = clues[..., 0] == 1 + KINDS.index(kind)
        pairs = clues[..., columns]
        clues[..., columns] = np.where(chosen[..., None], np.sort(pairs, axis=-1), pairs)
    last = np.argsort(clues[..., 0] == 0, axis=1, kind="stable")
    shape = (count, attributes, houses)
    old_values, old_waves = puzzles.values.reshape(shape), puzzles.waves.reshape(shape)
    values, waves = np.empty_like(old_values), np.empty_like(old_waves)
    values[rows, attribute] = np.take_along_axis(value, old_values, axis=2)
    waves[rows, attribute] = old_waves
    flat = (count, cells)
    return Puzzles(clues[rows, last], values.reshape(flat), waves.reshape(flat), puzzles.size)
