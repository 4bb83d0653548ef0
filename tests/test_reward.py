"""The two rewards against fractions, every order of small puzzles, and the known cases."""

import itertools
import math
import time
from fractions import Fraction

import numpy as np
import pytest
import sympy

from mathrl import reward
from tests.mutants import assert_caught
from tests.oracles import fails, refuses

A, B, C, D = range(4)
ABC = [A, B, C]


@pytest.fixture(name="reward")
def true_module():
    return reward


def plain(actions, canonical, correct=None, waves=None):
    """The order reward as a fraction, summed over cells: literally the definition."""
    total = Fraction(0)
    for place, cell in enumerate(canonical):
        index = next((j for j, action in enumerate(actions) if action == cell), None)
        stop = next((j for j, action in enumerate(actions) if action is None), math.inf)
        if index is None or index > stop or (correct is not None and not correct[index]):
            continue
        places = [place]
        if waves is not None:
            places = [i for i in range(len(canonical)) if waves[i] == waves[place]]
        total += Fraction(1, 1 + min(abs(i - index) for i in places))
    return total


def both(reward, actions, canonical=ABC, **options):
    """One response by the scalar and by the vectorised function, which must agree."""
    one = reward.order_reward(actions, canonical, **options)
    arrays = {k: np.array([options[k]]) for k in ("correct", "waves") if k in options}
    if "correct" in arrays:
        arrays["correct"] = arrays["correct"].astype(bool).reshape(1, -1)
    cells = np.array([[reward.STOP if a is None else a for a in actions]], dtype=int)
    many = reward.order_rewards(cells, [canonical], **{**options, **arrays})
    assert many.shape == (1,)
    assert abs(many[0] - one) < 1e-15
    return one


def solved(reward, actions, correct=None, ended=True, canonical=ABC):
    right = [True] * len(actions) if correct is None else correct
    result = reward.solve_rewards(
        np.array([actions], dtype=int), [canonical],
        correct=np.array([right], dtype=bool), ended=[ended],
    )  # fmt: skip
    assert result.dtype == np.float64
    return float(result[0])


# The rows of the known cases: actions, order reward, solve reward

CASES = [
    ([A, B, C], Fraction(1), 1),
    ([B, A, C], Fraction(2, 3), 1),
    ([C, B, A], Fraction(5, 9), 1),
    ([B, C, A], Fraction(4, 9), 1),
    ([A, B], Fraction(2, 3), 0),
    ([], Fraction(0), 0),
    ([A, A, B, C], Fraction(2, 3), 0),
    ([A, B, C, A], Fraction(1), 0),
    ([D, A, B, C], Fraction(1, 2), 0),
]


def check_cases(reward):
    for actions, order, solve in CASES:
        assert abs(both(reward, actions) - float(order)) < 1e-15, actions
        assert solved(reward, actions) == solve, actions


def check_options(reward):
    wrong_b = [True, False, True]
    assert both(reward, ABC, correct=wrong_b) == 1
    assert abs(both(reward, ABC, correct=wrong_b, require_correct=True) - 2 / 3) < 1e-15
    assert both(reward, ABC, correct=wrong_b, require_correct=True, reduce="sum") == 2
    assert both(reward, ABC, reduce="sum") == 3
    # The first mention counts, also when a later one has the right value.
    again = both(reward, [A, A, B], correct=[False, True, True], require_correct=True)
    assert abs(again - 1 / 6) < 1e-15
    assert solved(reward, ABC, correct=wrong_b) == 0
    assert solved(reward, ABC, ended=False) == 0  # cut off before the end token
    assert both(reward, ABC) == 1


def check_illegal(reward):
    """An illegal token ends parsing: what follows earns nothing."""
    assert abs(both(reward, [A, None, B, C]) - 1 / 3) < 1e-15
    assert both(reward, [None, A, B, C]) == 0
    assert solved(reward, [A, B, reward.STOP, C]) == 0
    assert solved(reward, [A, B, C, reward.STOP, A]) == 1  # padding is not read


def check_random(reward):
    """Random responses with duplicates, unknown cells, illegal tokens, wrong values and ties."""
    rng = np.random.default_rng(0)
    size, width, count = 4, 6, 300
    canonical = np.stack([rng.permutation(6)[:size] for _ in range(count)])
    cells = np.where(rng.random((count, width)) < 0.1, -1, rng.integers(0, 6, (count, width)))
    correct, waves = rng.random(cells.shape) < 0.6, np.sort(rng.integers(0, 3, canonical.shape), 1)
    solve = reward.solve_rewards(cells, canonical, correct=correct, ended=[True] * count)
    for options, tied, right in itertools.product(
        ({}, {"reduce": "sum"}), (None, waves), (None, correct)
    ):
        many = reward.order_rewards(
            cells, canonical, waves=tied, correct=correct, require_correct=right is not None,
            **options,
        )  # fmt: skip
        for row in range(count):
            actions = [None if cell < 0 else int(cell) for cell in cells[row]]
            wave = None if tied is None else tied[row].tolist()
            ok = None if right is None else right[row].tolist()
            truth = plain(actions, canonical[row].tolist(), ok, wave) / (1 if options else size)
            one = reward.order_reward(
                actions, canonical[row].tolist(), waves=wave, correct=ok,
                require_correct=right is not None, **options,
            )  # fmt: skip
            assert abs(one - truth) < 1e-14
            assert abs(many[row] - truth) < 1e-14
            said = actions[: actions.index(None)] if None in actions else actions
            exact = sorted(said) == sorted(canonical[row].tolist())
            assert solve[row] == (exact and all(correct[row, : len(said)]))


def check_solves(reward):
    """Every response of up to four actions over four cells and two values, for a puzzle of two."""
    count = 0
    for length in range(4):
        for said in itertools.product(itertools.product(range(3), (True, False)), repeat=length):
            actions, right = [c for c, _ in said], [ok for _, ok in said]
            truth = sorted(actions) == [A, B] and all(right)
            assert solved(reward, actions, right, canonical=[B, A]) == truth
            count += truth
    assert count == 2


def check_padded(reward):
    """The values of padding are not read."""
    cells = [[A, B, C, reward.STOP]]
    right = [[True, True, True, False]]
    assert reward.solve_rewards(cells, [ABC], correct=right, ended=[True])[0] == 1


def check_ties(reward):
    """Over all orders of four cells in waves {a}, {b, c}, {d}, only those that keep the waves."""
    for order in itertools.permutations(range(4)):
        keeps = order[0] == 0 and order[3] == 3
        assert (both(reward, list(order), [0, 1, 2, 3], waves=[0, 1, 1, 2]) == 1) == keeps
        assert both(reward, list(order), [0, 1, 2, 3], waves=[7, 7, 7, 7]) == 1
    # d at index 1 stands one place before its own; b at index 3 one after its wave.
    assert (
        both(reward, [0, 3, 2, 1], [0, 1, 2, 3], waves=[0, 1, 1, 2]) == (1 + 1 / 2 + 1 + 1 / 3) / 4
    )
    # A duplicate pushes the rest behind the last place of their wave.
    assert both(reward, [0, 0, 0, 1], [0, 1], waves=[0, 0]) == (1 + 1 / 3) / 2


def check_uniform(reward):
    for size in range(1, 7):
        orders = np.array(list(itertools.permutations(range(size))))
        canonical = np.broadcast_to(np.arange(size), orders.shape)
        assert (
            abs(reward.order_rewards(orders, canonical).mean() - reward.uniform_order_reward(size))
            < 1e-12
        )


def check_last_bit(reward):
    """Orders with the same distances have rewards that are equal to the last bit."""
    rng = np.random.default_rng(1)
    size = 9
    orders = np.argsort(rng.random((2000, size)), axis=1)
    canonical = np.broadcast_to(np.arange(size), orders.shape)
    many = reward.order_rewards(orders, canonical)
    seen = {}
    for order, value in zip(orders, many, strict=True):
        index = np.argsort(order)
        key = tuple(sorted(abs(index - np.arange(size)).tolist()))
        assert seen.setdefault(key, value) == value
    assert len(seen) < 1900


@pytest.mark.claim("13.1", "enumeration")
def test_known_cases_and_no_kendall(reward):
    check_cases(reward)

    def inversions(order):
        return sum(x > y for x, y in itertools.combinations(order, 2))

    assert inversions([B, C, A]) < inversions([C, B, A])
    assert both(reward, [B, C, A]) < both(reward, [C, B, A])


@pytest.mark.claim("13.2", "enumeration")
def test_parsing(reward):
    check_cases(reward)
    check_illegal(reward)
    check_random(reward)
    check_solves(reward)


@pytest.mark.claim("13.3", "enumeration")
def test_options_on_which_descriptions_differ(reward):
    check_options(reward)


@pytest.mark.claim("13.4", "enumeration")
def test_uniform_order_by_every_permutation(reward):
    check_uniform(reward)
    assert Fraction(17, 27) == sum(plain(order, ABC) for order in itertools.permutations(ABC)) / (
        6 * 3
    )


@pytest.mark.claim("13.4", "algebra")
def test_uniform_order_by_linearity(reward):
    """A cell's index is uniform: E = Σ_ij 1/(1+|i-j|) / M², counted in fractions."""
    for size, value in ((3, 17 / 27), (9, 0.3652), (36, 0.1550)):
        total = sum(Fraction(1, 1 + abs(i - j)) for i in range(size) for j in range(size)) / size**2
        assert abs(reward.uniform_order_reward(size) - total) < 1e-14
        assert abs(value - total) < 5.1e-5
    # By induction: from M to M + 1, the sum over d = |i - j| of 2 (M - d)/(1 + d), plus M, grows by
    # 1 + 2 (1/2 + … + 1/(M + 1)), and so does the closed form.
    size, h = sympy.symbols("M h_M")  # h_M = 1 + 1/2 + … + 1/M
    following = h + 1 / (size + 1)
    grown = 2 * (size + 2) * following - 3 * (size + 1) - (2 * (size + 1) * h - 3 * size)
    assert sympy.simplify(grown - (1 + 2 * (following - 1))) == 0
    assert reward.uniform_order_reward(1) == 1


@pytest.mark.claim("13.5", "enumeration")
def test_ties(reward):
    check_ties(reward)

    def check_free_within_a_wave(function):
        assert function([B, A, C]) == function([A, B, C]) == 1

    check_free_within_a_wave(lambda actions: both(reward, actions, waves=[0, 0, 1]))
    fails(check_free_within_a_wave, lambda actions: both(reward, actions))


def responses(size):
    """Every response that names each of `size` cells once, with every choice of right and wrong."""
    for order in itertools.permutations(range(size)):
        for right in itertools.product((True, False), repeat=size):
            yield list(order), list(right)


@pytest.mark.claim("13.6", "enumeration")
def test_what_maximises_each_reward(reward):
    """Also a mixture, whatever its positive scales: right cells in canonical order, alone."""
    size = 3
    rows = [
        (order, right, solved(reward, order, right), both(reward, order), 
         both(reward, order, correct=right, require_correct=True))
        for order, right in responses(size)
    ]  # fmt: skip
    best_order = [(order, right) for order, right, _, o, _ in rows if o == 1]
    assert len(best_order) == 8  # every choice of values, also all wrong
    assert (ABC, [False] * 3) in best_order
    for scale in (0.01, 1.0, 100.0):
        value = max(s + scale * o for *_, s, o, _ in rows)
        assert [row[:2] for row in rows if row[2] + scale * row[3] == value] == [(ABC, [True] * 3)]
    assert [row[:2] for row in rows if row[4] == 1] == [(ABC, [True] * 3)]


@pytest.mark.claim("13.7", "enumeration")
def test_a_potential_based_reward_is_constant_and_the_order_reward_is_not(reward):
    """Potentials of whole histories, drawn at random, 0 once the response has ended."""
    rng = np.random.default_rng(0)
    potential = {
        history: rng.normal()
        for length in range(4)
        for history in itertools.permutations(ABC, length)
    }

    def shaped(order):
        path = [potential[tuple(order[:k])] for k in range(4)] + [0.0]
        return sum(after - before for before, after in itertools.pairwise(path))

    def check_constant(function):
        values = [function(list(order)) for order in itertools.permutations(ABC)]
        assert max(values) - min(values) < 1e-12

    check_constant(shaped)
    fails(check_constant, lambda order: both(reward, order))
    # The share of right cells is the same for every order of one grid: a potential of the grid.
    check_constant(lambda order: len(set(order)) / 3)


def wrong_sum(cells, canonical):
    """The order reward, summed cell by cell in canonical order."""
    index = np.argsort(cells, axis=1)
    terms = 1 / (1 + abs(index - np.arange(cells.shape[1])))
    total = np.zeros(len(cells))
    for column in terms.T:
        total = total + column
    return total / cells.shape[1]


@pytest.mark.claim("13.8", "enumeration")
def test_equal_distances_are_equal_to_the_last_bit(reward):
    check_last_bit(reward)

    class Wrong:
        order_rewards = staticmethod(wrong_sum)

    fails(check_last_bit, Wrong)


# Wrong versions of the definition


def wrong_monotone(actions, canonical):
    """Kendall's τ, rescaled to [0, 1]."""
    pairs = list(itertools.combinations(range(len(actions)), 2))
    return sum(actions[i] < actions[j] for i, j in pairs) / max(len(pairs), 1)


def wrong_over_emitted(actions, canonical):
    total = plain(actions, canonical)
    return float(total / max(len(actions), 1))


def wrong_from_one(actions, canonical):
    return float(plain([None if a is None else a for a in [D + 1, *actions]], canonical) / 3)


def wrong_last_mention(actions, canonical):
    keep = {cell: j for j, cell in enumerate(actions)}
    terms = [1 / (1 + abs(i - keep[c])) for i, c in enumerate(canonical) if c in keep]
    return sum(terms) / len(canonical)


def wrong_duplicates_free(actions, canonical):
    unique = list(dict.fromkeys(a for a in actions if a in canonical))
    return float(plain(unique, canonical) / len(canonical))


@pytest.mark.parametrize(
    "wrong",
    [wrong_monotone, wrong_over_emitted, wrong_from_one, wrong_last_mention, wrong_duplicates_free],
)
def test_wrong_order_reward_is_caught(wrong):
    def check_order(function):
        for actions, order, _ in CASES:
            assert abs(function(actions, ABC) - float(order)) < 1e-12, actions

    check_order(reward.order_reward)
    fails(check_order, wrong)


def test_cells_may_be_anything_hashable():
    assert reward.order_reward([("hat", 1), ("pet", 0)], [("pet", 0), ("hat", 1)]) == 0.5
    assert reward.order_reward("ba", "abc") == (0.5 + 0.5) / 3


def test_a_long_response_still_reads():
    assert reward.order_reward([D] * 100 + [A], [A]) == 1 / 101
    assert reward.order_rewards([[D] * 100 + [A]], [[A]])[0] == 1 / 101


def test_four_thousand_responses_of_a_large_puzzle_take_no_time():
    orders = np.argsort(np.random.default_rng(0).random((4096, 36)), axis=1)
    start = time.process_time()
    values = reward.order_rewards(orders, np.broadcast_to(np.arange(36), orders.shape))
    assert time.process_time() - start < 1  # measured 0.03 s
    assert abs(values.mean() - reward.uniform_order_reward(36)) < 4 * values.std() / 64


REFUSED = [
    (ValueError, "`reduce` must be", lambda r: r.order_reward("a", "a", reduce="max")),
    (ValueError, "`reduce` must be", lambda r: r.order_rewards([[0]], [[0]], reduce="max")),
    (ValueError, "`canonical` must hold distinct", lambda r: r.order_reward("a", "")),
    (ValueError, "`canonical` must hold distinct", lambda r: r.order_reward("a", "aa")),
    (ValueError, "`waves` must have 1", lambda r: r.order_reward("a", "a", waves=[0, 1])),
    (ValueError, "`waves` must not", lambda r: r.order_reward("a", "ab", waves=[1, 0])),
    (ValueError, "`correct` must have 1", lambda r: r.order_reward("a", "a", correct=[])),
    (ValueError, "`correct` must be", lambda r: r.order_reward("a", "a", require_correct=True)),
    (ValueError, "at least -1, got -2", lambda r: r.order_rewards([[-2]], [[0]])),
    (ValueError, r"`canonical` must have", lambda r: r.order_rewards([[0]], [[0]] * 2)),
    (ValueError, r"shape \(1, M\)", lambda r: r.order_rewards([[0]], np.zeros((1, 0), int))),
    (ValueError, "`canonical` must hold distinct", lambda r: r.order_rewards([[0]], [[1, 1]])),
    (ValueError, "`canonical` must hold distinct", lambda r: r.order_rewards([[0]], [[-1, 1]])),
    (ValueError, "`cells` must have two", lambda r: r.order_rewards([0], [[0]])),
    (ValueError, "`cells` must be one array", lambda r: r.order_rewards([[0], [0, 1]], [[0]] * 2)),
    (TypeError, "`cells` must hold integers", lambda r: r.order_rewards([[0.5]], [[0]])),
    (TypeError, "`cells` must hold integers", lambda r: r.order_rewards([[True]], [[0]])),
    (ValueError, "`waves` has shape", lambda r: r.order_rewards([[0]], [[0]], waves=[[0, 1]])),
    (ValueError, "`waves` must not", lambda r: r.order_rewards([[0]], [[0, 1]], waves=[[1, 0]])),
    (ValueError, "`correct` has shape", lambda r: r.order_rewards([[0]], [[0]], correct=[True])),
    (TypeError, "`correct` must hold bool", lambda r: r.order_rewards([[0]], [[0]], correct=[[1]])),
    (ValueError, "`correct` must", lambda r: r.order_rewards([[0]], [[0]], require_correct=True)),
    (ValueError, "`ended` has shape",
     lambda r: r.solve_rewards([[0]], [[0]], correct=[[True]], ended=[True] * 2)),
    (ValueError, "`cells` must be an int", lambda r: r.uniform_order_reward(0)),
    (ValueError, "`cells` must be an int", lambda r: r.uniform_order_reward(2.0)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "call"), REFUSED)
def test_malformed_argument_is_refused(error, words, call):
    refuses(error, words, call, reward)


MUTANTS = [
    ("            break\n", "            continue\n", check_illegal),
    ("named.setdefault(cell, index)", "named[cell] = index", check_cases),
    ("enumerate(actions)", "enumerate(actions, 1)", check_cases),
    ("list(range(len(canonical)))", "[0] * len(canonical)", check_cases),
    ("last = first + wave.count(wave[place]) - 1", "last = first", check_ties),
    ("first = wave.index(wave[place])", "first = place", check_ties),
    ("1 / (1 + max(0, first - named[cell], named[cell] - last))",
     "1 / (1 + max(0, named[cell] - last))", check_cases),
    ("total / len(canonical) if", "total / max(1, len(actions)) if", check_cases),
    ("not correct[named[cell]]", "not correct[place]", check_random),
    ('(require_correct and correct and', '(correct and', check_options),
    ("last = first + tied.sum(2) - 1", "last = first", check_ties),
    ("np.maximum(0, np.maximum(first - index, index - last))", "abs(place - index)", check_ties),
    ("paid &= np.take_along_axis(right, index, 1)", "pass", check_options),
    ("        if require_correct:\n            paid", "        if True:\n            paid",
     check_options),
    ("np.sort(np.where(paid, 1 / (1 + distance), 0.0), axis=1)",
     "np.where(paid, 1 / (1 + distance), 0.0)", check_last_bit),
    ("np.where(paid, 1 / (1 + distance), 0.0)", "1 / (1 + distance)", check_cases),
    ("total / known.shape[1] if", "total / max(1, named.shape[1]) if", check_cases),
    ("exact = read.sum(1) == known.shape[1]", "exact = read.sum(1) >= known.shape[1]", check_cases),
    ("(exact & every &", "(exact &", check_solves),
    ("(right | ~read)", "right", check_padded),
    (".all(1) & end)", ".all(1))", check_options),
    ("np.logical_and.accumulate(named != STOP, axis=1)", "named != STOP", check_illegal),
    ("np.where(_read(named), named, STOP)", "named", check_illegal),
    ("2 * (cells + 1) * harmonic", "2 * cells * harmonic", check_uniform),
    ("range(1, cells + 1)", "range(1, cells)", check_uniform),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_mutant_is_caught(old, new, check):
    assert_caught("mathrl.reward", old, new, check)
