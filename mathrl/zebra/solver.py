"""A solver by propagation in synchronous waves, and the order that it defines.

All domains start full. In each **wave** every clue and the two rules of the game (naked and hidden
singles) look at the domains as they were when the wave began; what any of them excludes is removed
at the end of the wave. It stops when a wave removes nothing. A cell is **known** from the wave on
in which the domain of one of its attribute's items becomes this house alone.

The outcome of a wave does not depend on the order in which clues are looked at, so the wave of a
cell is a property of the puzzle. Only rules of which some domain changed in the last wave are
looked at: the others would find again what they found before.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

from mathrl.zebra.clues import KINDS, Cell, Clue, Item, Size, Solution, check_clues
from mathrl.zebra.propagation import Domains, hidden, naked, narrowing

UNKNOWN = -1
"""Stands for the value of a cell that deduction does not find; its wave is 0."""


class Step(NamedTuple):
    """In a wave, a reason excluded an item from some houses.

    `rule` is `"clue"`, and `clue` says which; or one of the rules of the game. `left` is what the
    reason alone leaves of the item's domain, as houses.
    """

    wave: int
    item: Item
    rule: Literal["clue", "naked single", "hidden single"]
    clue: Clue | None
    removed: tuple[int, ...]
    left: tuple[int, ...]


class Solved(NamedTuple):
    """What deduction finds.

    `solution[attribute][house]` is a value, or `UNKNOWN`; `waves[attribute][house]` the wave in
    which it became known, from 1, or 0. `steps` has every reason of every removal, by wave, then
    item, then rule, then clue. `complete` is true when every cell is known: then the solution is
    the only one, because deduction excludes nothing that some solution has.
    """

    solution: Solution
    waves: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    complete: bool


def solve(size: Size, clues: Iterable[Clue]) -> Solved:
    """Deduce what the clues say, wave by wave.

    Args:
        size: of the puzzle.
        clues: any number, in any order.

    Returns:
        Values, waves, reasons; the same for every order of the clues.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a clue does not fit the size, or the clues contradict each other.

    >>> clues = [Clue("found_at", ((0, 1),), 0), Clue("immediate_left", ((0, 1), (1, 1)))]
    >>> solved = solve(Size(houses=2, attributes=2), clues)
    >>> solved.solution, solved.waves
    (((1, 0), (0, 1)), ((1, 2), (2, 1)))
    """
    clues = tuple(clues)
    check_clues(size, clues)
    board = Board(size)
    for clue in clues:
        board.add(clue)
    steps: list[Step] = []
    waves = [[0] * size.houses for _ in range(size.attributes)]
    values = [[UNKNOWN] * size.houses for _ in range(size.attributes)]
    wave, active = 1, set(range(len(board.rules)))
    while changed := board.wave(active, steps, wave):
        for index in changed:
            domain = board.domains[index]
            if not domain:
                raise ValueError(f"`clues` must not contradict each other, they do in wave {wave}")
            if domain & (domain - 1) == 0:
                attribute, value = divmod(index, size.houses)
                house = domain.bit_length() - 1
                waves[attribute][house], values[attribute][house] = wave, value
        wave, active = wave + 1, board.touched(changed)
    return Solved(
        tuple(map(tuple, values)),
        tuple(map(tuple, waves)),
        tuple(sorted(steps, key=_place)),
        board.solved(),
    )


def canonical_order(waves: Sequence[Sequence[int]]) -> tuple[Cell, ...]:
    """All cells by wave, then attribute, then house.

    Cells of one wave are tied: the solver knows them at once, and attribute and house only break
    the tie. Renaming values leaves the order as it is. Renaming attributes moves the waves along;
    within a wave the order follows the new names.

    Args:
        waves: `waves[attribute][house]`, each 1 or more.

    Returns:
        Cells `(attribute, house)`.

    Raises:
        ValueError: a cell has no wave.

    >>> canonical_order(((1, 2), (2, 1)))
    ((0, 0), (1, 1), (0, 1), (1, 0))
    """
    cells = [(wave, a, h) for a, row in enumerate(waves) for h, wave in enumerate(row)]
    for wave, attribute, house in cells:
        if wave < 1:
            raise ValueError(
                f"`waves[{attribute}][{house}]` must be 1 or more, got {wave}: the cell is unknown"
            )
    return tuple((attribute, house) for _, attribute, house in sorted(cells))


class Rule(NamedTuple):
    """A clue or a rule of the game, ready to be applied to the domains of a board."""

    name: Literal["clue", "naked single", "hidden single"]
    clue: Clue | None
    indices: tuple[int, ...]
    look: Callable[[list[int]], Domains]
    narrow: Callable[[Domains], Domains]


class Board:
    """The domains of all items, the rules, and which rules look at which item.

    The item `(attribute, value)` has the index `attribute * houses + value`. Nothing is checked;
    `solve` checks, and the generator makes only valid clues.

    Args:
        size: of the puzzle.
    """

    def __init__(self, size: Size) -> None:
        """Put the rules of the game on the board, all domains full."""
        houses = self.houses = size.houses
        self.rules: list[Rule] = []
        self.looking: list[list[int]] = [[] for _ in range(size.cells)]
        self.domains: list[int] = []
        self.dropped: set[int] = set()  # rules that are touched in vain
        self.clear()
        for first in range(0, size.cells, houses):
            row = tuple(range(first, first + houses))
            self._append(Rule("naked single", None, row, itemgetter(*row), naked))
            self._append(Rule("hidden single", None, row, itemgetter(*row), hidden))

    def clear(self) -> None:
        """Make all domains full.

        >>> Board(Size(2, 2)).domains
        [3, 3, 3, 3]
        """
        self.domains = [(1 << self.houses) - 1] * len(self.looking)

    def add(self, clue: Clue) -> int:
        """Add a clue; return the number of its rule, without applying it.

        >>> Board(Size(2, 2)).add(Clue("ends", ((0, 1),)))
        4
        """
        indices = tuple(a * self.houses + v for a, v in clue.items)
        look = itemgetter(*indices) if len(indices) > 1 else lambda domains: (domains[indices[0]],)
        narrow = narrowing(clue.kind, self.houses, clue.house)
        return self._append(Rule("clue", clue, indices, look, narrow))

    def wave(
        self, active: Iterable[int], steps: list[Step] | None = None, number: int = 0
    ) -> list[int]:
        """Apply rules to the domains as they are now, and then remove what they exclude.

        Args:
            active: numbers of rules.
            steps: where to append the reasons, if they are wanted.
            number: of the wave, for the reasons.

        Returns:
            The items whose domains have shrunk, by index.

        >>> board = Board(Size(2, 2))
        >>> board.wave([board.add(Clue("not_at", ((0, 1),), 0))]), board.domains
        ([1], [3, 2, 3, 3])
        """
        left: dict[int, int] = {}
        for rule in map(self.rules.__getitem__, active):
            before = rule.look(self.domains)
            after = rule.narrow(before)
            if after != before:
                for index, old, new in zip(rule.indices, before, after, strict=True):
                    if new != old:
                        left[index] = left.get(index, old) & new
                        if steps is not None:
                            steps.append(self._step(number, rule, index, old, new))
        for index, domain in left.items():
            self.domains[index] = domain
        return list(left)

    def touched(self, changed: Iterable[int]) -> set[int]:
        """The rules that look at some of these items.

        >>> Board(Size(2, 2)).touched([0])
        {0, 1}
        """
        return set().union(*map(self.looking.__getitem__, changed)) - self.dropped

    def close(self, active: Iterable[int]) -> bool:
        """Apply rules, and then whatever they touch, until nothing changes; whether all is known.

        >>> board = Board(Size(2, 2))
        >>> board.close([board.add(Clue("not_at", ((0, 1),), 0))]), board.domains
        (False, [1, 2, 3, 3])
        """
        while changed := self.wave(active):
            active = self.touched(changed)
        return self.solved()

    def solved(self) -> bool:
        """Whether every domain is one house.

        >>> Board(Size(2, 2)).solved()
        False
        """
        return all(domain & (domain - 1) == 0 for domain in self.domains)

    def _append(self, rule: Rule) -> int:
        number = len(self.rules)
        self.rules.append(rule)
        if len(rule.indices) > 1:  # what a rule says of one item alone, it says in the first wave
            for index in rule.indices:
                self.looking[index].append(number)
        return number

    def _step(self, wave: int, rule: Rule, index: int, old: int, new: int) -> Step:
        removed, left = (
            tuple(house for house in range(self.houses) if mask >> house & 1)
            for mask in (old & ~new, new)
        )
        item = divmod(index, self.houses)
        return Step(wave, item, rule.name, rule.clue, removed, left)


def _place(step: Step) -> tuple[object, ...]:
    clue = step.clue
    where = () if clue is None else (KINDS.index(clue.kind), clue.items, clue.house or 0)
    return step.wave, step.item, step.rule, where
