"""The solver against enumeration, a SAT solver, and a second solver made of sets."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pysat.solvers import Cadical153

from mathrl.zebra import generator, propagation, solver
from mathrl.zebra.clues import ITEMS, KINDS, Clue, Puzzle, Size, holds
from mathrl.zebra.generator import generate
from mathrl.zebra.solver import canonical_order, solve
from tests.mutants import assert_caught
from tests.oracles import fails, refuses

SIZES = [Size(n, m) for n in range(2, 7) for m in range(2, 7)]

# What each kind says of positions, written again and used by all oracles below.
SAYS = {
    "found_at": lambda p, h: p[0] == h,
    "not_at": lambda p, h: p[0] != h,
    "same_house": lambda p, h: len(set(p)) == 1,
    "not_same_house": lambda p, h: len(set(p)) == 2,
    "neighbour": lambda p, h: p[0] - p[1] in (-1, 1),
    "immediate_left": lambda p, h: p[1] - p[0] == 1,
    "left_of": lambda p, h: p[1] > p[0],
    "in_between": lambda p, h: p[1] < p[0] < p[2] or p[2] < p[0] < p[1],
}


def says(kind, positions, house, houses):
    if kind == "ends":
        return positions[0] in (0, houses - 1)
    return SAYS[kind](positions, house)


def puzzles(prune, each):
    return [generate(size, 7, i, prune=prune) for size in SIZES for i in range(each)]


# ---------------------------------------------------------------- one clue


def check_narrowing(module):
    rng = random.Random(0)
    for houses in range(2, 7):
        masks = range(1, 1 << houses)
        for kind in KINDS:
            every = list(itertools.product(masks, repeat=ITEMS[kind]))
            for domains in rng.sample(every, min(250, len(every))):
                for house in range(houses) if kind in ("found_at", "not_at") else [None]:
                    support = [set() for _ in domains]
                    places = [[h for h in range(houses) if d >> h & 1] for d in domains]
                    for at in itertools.product(*places):
                        if says(kind, at, house, houses):
                            for found, place in zip(support, at, strict=True):
                                found.add(place)
                    got = module.narrow(kind, domains, houses, house)
                    expected = tuple(sum(1 << h for h in found) for found in support)
                    assert got == expected, (kind, domains, house, houses)


@pytest.mark.claim("12.2", "enumeration")
def test_a_clue_leaves_exactly_what_some_assignment_supports():
    check_narrowing(propagation)


def check_singles(module):
    rng = random.Random(1)
    for houses in range(2, 7):
        for _ in range(300):
            row = tuple(rng.choice([1 << rng.randrange(houses), rng.randrange(1, 1 << houses)])
                        for _ in range(houses))  # fmt: skip
            sets = [{h for h in range(houses) if d >> h & 1} for d in row]
            known = [s for s in sets if len(s) == 1]
            naked = [s - set().union(*(k for k in known if k is not s)) for s in sets]
            if len({min(k) for k in known}) < len(known):
                naked = [set()] * houses
            hidden = []
            for index, s in enumerate(sets):
                others = set().union(*(t for j, t in enumerate(sets) if j != index))
                alone = s - others
                hidden.append(alone or s)
            if set().union(*sets) != set(range(houses)) or any(
                len(s - set().union(*(t for j, t in enumerate(sets) if j != i))) > 1
                for i, s in enumerate(sets)
            ):
                hidden = [set()] * houses
            bits = [tuple(sum(1 << h for h in s) for s in left) for left in (naked, hidden)]
            assert [module.naked(row), module.hidden(row)] == bits, row


def test_rules_of_the_game_against_sets():
    check_singles(propagation)


def test_holds_says_what_the_oracle_says():
    for puzzle in puzzles(prune=True, each=2):
        where = [{v: h for h, v in enumerate(row)} for row in puzzle.solution]
        for clue in puzzle.clues:
            at = [where[a][v] for a, v in clue.items]
            assert says(clue.kind, at, clue.house, puzzle.size.houses)
            assert holds(clue, puzzle.solution)
            mirrored = tuple(row[::-1] for row in puzzle.solution)
            flipped = [puzzle.size.houses - 1 - h for h in at]
            assert holds(clue, mirrored) == says(clue.kind, flipped, clue.house, puzzle.size.houses)


# ---------------------------------------------------------------- all clues


def sat_solutions(puzzle, limit=2):
    """Up to `limit` assignments that satisfy the clues, by a SAT solver."""
    houses, attributes = puzzle.size
    var = lambda a, v, h: 1 + (a * houses + v) * houses + h  # noqa: E731
    found = []
    with Cadical153() as sat:
        for a, i in itertools.product(range(attributes), range(houses)):
            sat.add_clause([var(a, i, h) for h in range(houses)])
            sat.add_clause([var(a, v, i) for v in range(houses)])
            for j, k in itertools.combinations(range(houses), 2):
                sat.add_clause([-var(a, i, j), -var(a, i, k)])
                sat.add_clause([-var(a, j, i), -var(a, k, i)])
        for clue in puzzle.clues:
            for at in itertools.product(range(houses), repeat=len(clue.items)):
                if not says(clue.kind, at, clue.house, houses):
                    sat.add_clause([-var(*i, h) for i, h in zip(clue.items, at, strict=True)])
        while len(found) < limit and sat.solve():
            model = [literal for literal in sat.get_model() if literal > 0]
            solution = [[0] * houses for _ in range(attributes)]
            for literal in model:
                item, h = divmod(literal - 1, houses)
                solution[item // houses][h] = item % houses
            found.append(tuple(map(tuple, solution)))
            sat.add_clause([-literal for literal in model])
    return found


@pytest.mark.claim("12.1", "enumeration")
def test_1000_puzzles_have_one_solution():
    count = 0
    for prune in (False, True):
        for puzzle in puzzles(prune, each=20):
            assert sat_solutions(puzzle) == [puzzle.solution]
            count += 1
    assert count == 1000


def test_the_sat_solver_finds_second_solutions():
    puzzle = generate(Size(4, 4), 0, 0, prune=True)
    fewer = puzzle._replace(clues=puzzle.clues[1:])
    counts = {len(sat_solutions(puzzle._replace(clues=puzzle.clues[:k]))) for k in range(3)}
    assert counts == {2}
    assert puzzle.solution in sat_solutions(fewer, limit=10_000)


def naive_waves(size, clues):
    """Sets instead of bits, every rule in every wave, every assignment of a clue's items."""
    everywhere = set(range(size.houses))
    items = [(a, v) for a in range(size.attributes) for v in range(size.houses)]
    domains = {item: set(everywhere) for item in items}
    waves = [[0] * size.houses for _ in range(size.attributes)]
    for wave in itertools.count(1):
        left = {item: set(domain) for item, domain in domains.items()}
        for clue in clues:
            kept = [set() for _ in clue.items]
            for at in itertools.product(*(domains[item] for item in clue.items)):
                if says(clue.kind, at, clue.house, size.houses):
                    for k, h in zip(kept, at, strict=True):
                        k.add(h)
            for item, k in zip(clue.items, kept, strict=True):
                left[item] &= k
        for item in items:
            others = [domains[other] for other in items if other[0] == item[0] and other != item]
            for other in others:
                if len(other) == 1:
                    left[item] -= other
            if alone := domains[item] - set().union(*others):
                left[item] &= alone
        if left == domains:
            return tuple(map(tuple, waves))
        for (a, v), domain in left.items():
            if len(domain) == 1 and domains[a, v] != domain:
                waves[a][min(domain)] = wave
        domains = left


WAVE_CASES = [generate(size, 3, i, prune=i % 2 == 0) for size in SIZES[::3] for i in range(4)]


def check_waves(module):
    for puzzle in WAVE_CASES:
        solved = module.solve(puzzle.size, puzzle.clues)
        assert solved.complete
        assert solved.solution == puzzle.solution
        assert solved.waves == naive_waves(puzzle.size, puzzle.clues)
        for wave, cell in ((solved.waves[a][h], (a, h)) for a, h in canonical_cells(puzzle.size)):
            item = (cell[0], puzzle.solution[cell[0]][cell[1]])
            last = [s for s in solved.steps if s.item == item]
            assert last[-1].wave == wave
            left = set.intersection(*(set(s.left) for s in last if s.wave == wave))
            assert left == {cell[1]}


def canonical_cells(size):
    return [(a, h) for a in range(size.attributes) for h in range(size.houses)]


@pytest.mark.claim("12.3", "enumeration")
def test_waves_against_a_second_solver():
    check_waves(solver)


def test_a_puzzle_that_deduction_cannot_finish():
    size = Size(3, 2)
    solved = solve(size, [Clue("left_of", ((0, 0), (0, 1)))])
    assert not solved.complete
    assert solved.solution == ((-1,) * 3,) * 2
    refuses(ValueError, r"waves\[0\]\[0\]. must be 1 or more, got 0", canonical_order, solved.waves)
    contradiction = [Clue("found_at", ((0, 0),), 1), Clue("ends", ((0, 0),))]
    refuses(ValueError, "contradict each other, they do in wave 1", solve, size, contradiction)


BAD = [
    ("found_at", ((0, 1),), None, TypeError, "house` must be an int"),
    ("found_at", ((0, 1),), 3, ValueError, "house` must be 0 to 2"),
    ("found_at", ((0, 1),), True, TypeError, "house` must be an int, got bool"),
    ("ends", ((0, 1),), 0, ValueError, "house` must be None for ends"),
    ("ends", ((0, 1), (1, 1)), None, ValueError, "1 different items"),
    ("left_of", ((0, 1), (0, 1)), None, ValueError, "2 different items"),
    ("same_house", ((0, 1), (0, 2)), None, ValueError, "two attributes"),
    ("ends", ((2, 1),), None, ValueError, "items of Size"),
    ("ends", ((0, 3),), None, ValueError, "items of Size"),
    ("ends", ((-1, 0),), None, ValueError, "items of Size"),
    ("ends", ((0, 1.0),), None, TypeError, "pairs of ints"),
    ("ends", [(0, 1)], None, TypeError, "tuple of tuples"),
    ("left", ((0, 1), (1, 1)), None, ValueError, "must be one of found_at, not_at"),
]


@pytest.mark.parametrize(("kind", "items", "house", "error", "words"), BAD)
def test_bad_clues_are_named(kind, items, house, error, words):
    refuses(error, "`clues\\[0\\].*" + words, solve, Size(3, 2), [Clue(kind, items, house)])


# ---------------------------------------------------------------- the order


def renamed(puzzle, attributes, values):
    """The puzzle under new names, old to new: one attribute and one value at a time."""
    name = lambda item: (attributes[item[0]], values[item[0]][item[1]])  # noqa: E731
    clues = tuple(c._replace(items=tuple(map(name, c.items))) for c in puzzle.clues)
    solution = [()] * len(attributes)
    for a, row in enumerate(puzzle.solution):
        solution[attributes[a]] = tuple(values[a][v] for v in row)
    return Puzzle(puzzle.size, clues, tuple(solution))


def check_canonical(order_of):
    """`order_of(size, clues)` gives cells; it must ignore clue order and value names."""
    rng = random.Random(5)
    for index in range(150):
        puzzle = generate(Size(3, 3), 11, index)
        expected = order_of(puzzle.size, puzzle.clues)
        shuffled = rng.sample(puzzle.clues, len(puzzle.clues))
        assert order_of(puzzle.size, shuffled) == expected
        values = [rng.sample(range(3), 3) for _ in range(3)]
        assert order_of(puzzle.size, renamed(puzzle, [0, 1, 2], values).clues) == expected


def order_by_waves(size, clues):
    return canonical_order(solve(size, clues).waves)


def wrong_asynchronous_order(size, clues):
    """Cells as a solver finds them that applies one rule after another."""
    board = solver.Board(size)
    for clue in clues:
        board.add(clue)
    order, active = [], range(len(board.rules))
    while active:
        touched = set()
        for rule in active:
            changed = board.wave([rule])
            for index in changed:
                if (domain := board.domains[index]).bit_count() == 1:
                    cell = (index // size.houses, domain.bit_length() - 1)
                    order += [] if cell in order else [cell]
            touched |= board.touched(changed)
        active = sorted(touched)
    return tuple(order)


@pytest.mark.claim("12.4", "enumeration")
def test_order_does_not_depend_on_clue_order_or_names():
    check_canonical(order_by_waves)
    fails(check_canonical, wrong_asynchronous_order)


@pytest.mark.claim("12.4", "enumeration")
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_waves_move_along_with_names(data):
    size = Size(data.draw(st.integers(2, 5)), data.draw(st.integers(2, 5)))
    puzzle = generate(size, 1, data.draw(st.integers(0, 10_000)), prune=data.draw(st.booleans()))
    attributes = data.draw(st.permutations(range(size.attributes)))
    values = [data.draw(st.permutations(range(size.houses))) for _ in range(size.attributes)]
    other = renamed(puzzle, attributes, values)
    one = solve(size, puzzle.clues)
    two = solve(size, data.draw(st.permutations(other.clues)))
    assert two.solution == other.solution
    for a, row in enumerate(one.waves):
        assert two.waves[attributes[a]] == row
    if list(attributes) == sorted(attributes):
        assert canonical_order(one.waves) == canonical_order(two.waves)


def check_order(module):
    rng = np.random.default_rng(0)
    for _ in range(50):
        waves = rng.integers(1, 4, (4, 3))
        flat = [a * 3 + h for a, h in module.canonical_order(waves.tolist())]
        assert flat == np.argsort(waves.ravel(), kind="stable").tolist()


def test_canonical_order_is_a_stable_sort():
    check_order(solver)


@pytest.mark.claim("12.5", "enumeration")
def test_random_order_carries_no_order():
    orders = list(itertools.permutations(range(4)))
    for length in range(4):
        for before in itertools.permutations(range(4), length):
            following = [order[length] for order in orders if order[:length] == before]
            counts = {cell: following.count(cell) for cell in set(range(4)) - set(before)}
            assert sum(counts.values()) == len(following)
            assert len(set(counts.values())) == 1
    steps = [-np.log(1 / left) for left in (4, 3, 2, 1)]
    assert np.isclose(sum(steps), np.log(len(orders)))


# ---------------------------------------------------------------- the generator


def check_generator(module):
    for size in (Size(2, 2), Size(3, 3), Size(4, 3)):
        for index in range(30):
            full, pruned = (module.generate(size, 2, index, prune=p) for p in (False, True))
            assert full == module.generate(size, 2, index)
            assert full.solution == pruned.solution
            assert len(set(full.clues)) == len(full.clues)
            assert set(pruned.clues) <= set(full.clues)
            for puzzle in (full, pruned):
                assert all(holds(clue, puzzle.solution) for clue in puzzle.clues)
                assert solve(size, puzzle.clues).solution == puzzle.solution
            for clue in pruned.clues:
                rest = [c for c in pruned.clues if c != clue]
                assert not solve(size, rest).complete
    few = [module.generate(Size(3, 3), 2, index, max_clues=7) for index in range(30)]
    assert max(len(puzzle.clues) for puzzle in few) == 7
    assert len({module.generate(Size(3, 3), s, i) for s in range(5) for i in range(20)}) == 100


def test_generated_puzzles_are_true_finished_and_pruned():
    check_generator(generator)


def check_kinds(module):
    rows = []
    for index in range(400):
        puzzle = module.generate(Size(4, 3), 4, index)
        rows += [(c.kind, c.items, c.house) for c in puzzle.clues]
    seen = {kind: sum(row[0] == kind for row in rows) for kind in KINDS}
    assert min(seen.values()) > 100
    for kind in ("same_house", "not_same_house", "neighbour"):
        assert all(items[0] < items[1] for k, items, _ in rows if k == kind)
    starts = [module.generate(Size(3, 2), 5, i).solution[0] for i in range(1200)]
    counts = [starts.count(p) for p in itertools.permutations(range(3))]
    assert sum((c - 200) ** 2 / 200 for c in counts) < 20.5  # chi-squared, 5 degrees, 0.1 %


def test_kinds_and_assignments_are_spread():
    check_kinds(generator)


def test_generator_refuses():
    size = Size(3, 3)
    refuses(TypeError, "`seed` must be an int, got float", generate, size, 0.0, 0)
    refuses(ValueError, "`index` must be 0 or more, got -1", generate, size, 0, -1)
    refuses(ValueError, "`max_clues` must be larger", generate, Size(2, 2), 0, 0, max_clues=0)
    refuses(ValueError, "`size.houses` must be 2 to 6, got 7", generate, Size(7, 2), 0, 0)


# ---------------------------------------------------------------- mutants

MUTANTS = [
    ("propagation", "d[1] << 1 | d[1] >> 1", "d[1] << 1", check_narrowing),
    ("propagation", "d[0] & d[1] >> 1, d[1] & d[0] << 1", "d[0], d[1]", check_narrowing),
    ("propagation", "1 | 1 << houses - 1", "1 | 1 << houses - 2", check_narrowing),
    ("propagation", "(d[0] & ~here,)", "(d[0] & here,)", check_narrowing),
    ("propagation", "domain.bit_length() - 1) - 1", "domain.bit_length()) - 1", check_narrowing),
    ("propagation", "~(first | first - 1)", "~(first - 1)", check_narrowing),
    ("propagation", "left_to_right[0] | right_to_left[2]", "left_to_right[0]", check_narrowing),
    ("propagation", "first & _below(middle), middle", "first, middle", check_narrowing),
    ("propagation", "one & ~two if two & (two - 1) == 0 else one", "one & ~two", check_narrowing),
    ("propagation", "twice |= taken & domain", "pass", check_singles),
    ("propagation", "alone = once & ~twice", "alone = once", check_singles),
    ("propagation", "d & alone or d", "d", check_singles),
    ("propagation", "nobody = once != (1 << len(row)) - 1", "nobody = False", check_singles),
    ("solver", "left.get(index, old) & new", "new", check_waves),
    ("solver", "wave + 1, board.touched(changed)", "wave + 1, range(4)", check_waves),
    ("solver", "wave, active = 1,", "wave, active = 0,", check_waves),
    ("solver", 'itemgetter(*row), hidden)', 'itemgetter(*row), naked)', check_waves),
    ("solver", "in sorted(cells))", "in cells)", check_order),
    ("solver", "(wave, a, h) for a", "(wave, -a, h) for a", check_order),
    ("generator", "board.dropped.remove(rule)", "pass", check_generator),
    ("generator", "board.clear()", "pass", check_generator),
    ("generator", "if clue not in rules:", "if True:", check_generator),
    ("generator", "len(clues) <= max_clues", "len(clues) < max_clues", check_generator),
    ("generator", "{seed} {index}", "{index}", check_generator),
    ("generator", "below(bound - place)", "below(bound - place - 1)", check_kinds),
    ("generator", "(one, two) if one < two else (two, one)", "(two, one)", check_kinds),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "check"), MUTANTS)
def test_mutant_is_caught(module, old, new, check):
    assert_caught(f"mathrl.zebra.{module}", old, new, check)
