"""The oracle against plain loops: 50 digits of mpmath, fractions, no numpy and no line of it."""

import functools
import itertools
import math
import subprocess
import sys
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from mathrl import exact
from tests.mutants import assert_caught
from tests.oracles import fails, refuses

THETA, REWARDS = [0.2, -0.1, 0.4], [1, 0, 0.5]
PI, REF = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
INF, NAN = math.inf, math.nan


@pytest.fixture(name="exact")
def true_module():
    return exact


@pytest.fixture(autouse=True)
def fifty_digits():
    with mpmath.workdps(50):
        yield


def close(got, expected, tolerance=1e-12):
    got, expected = np.asarray(got), np.array(expected, dtype=object).astype(float)
    assert got.shape == expected.shape, f"{got.shape} is not {expected.shape}"
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def cases():
    """Logits and rewards; some logits large, some actions forbidden."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 5):
        for scale in (0.3, 1, 6):
            yield list(rng.normal(size=size) * scale), list(rng.normal(size=size))
    yield THETA, REWARDS
    yield [0.3, -INF, 1.2, -0.4], [1.0, 2.0, -1.0, 0.5]
    yield [1000.0, 999.0, -1000.0], [0.0, 1.0, 5.0]


# The second computation: lists of mpmath numbers, a loop for every sum


def weights(theta):
    top = max(theta)
    powers = [mpmath.exp(mpf(x) - mpf(top)) if x != -INF else mpf(0) for x in theta]
    return [power / sum(powers) for power in powers]


def mean(theta, values):
    return sum((p * v for p, v in zip(weights(theta), values, strict=True) if p), mpf(0))


def surprisal(theta):
    return sum((-p * mpmath.log(p) for p in weights(theta) if p), mpf(0))


def distance(theta, ref):
    pairs = zip(weights(theta), weights(ref), strict=True)
    return sum((p * mpmath.log(p / q) for p, q in pairs if p), mpf(0))


def slope(function, theta):
    """Central differences with a step of 1e-15 in 50 digits: right to about 1e-30."""
    step, found = mpf(10) ** -15, []
    for k, center in enumerate(theta):
        if center == -INF:
            found.append(mpf(0))
            continue
        sides = [[*theta[:k], mpf(center) + h, *theta[k + 1 :]] for h in (step, -step)]
        found.append((function(sides[0]) - function(sides[1])) / (2 * step))
    return found


def test_the_oracle_does_not_load_torch():
    code = "import sys, mathrl.exact; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# One choice


def test_probabilities(exact):
    for theta, _ in cases():
        close(exact.softmax(theta), weights(theta))
        assert exact.softmax(theta).sum() == pytest.approx(1, abs=1e-15)
        logs = [mpmath.log(p) if p else -INF for p in weights(theta)]
        close(exact.log_softmax(theta), logs, 1e-12)
    table = [[0.0, 1.0, -INF], [5.0, 5.0, 5.0], [-2000.0, -2001.0, -1999.0]]
    close(exact.softmax(table), [weights(row) for row in table])
    close(exact.softmax(THETA), [0.337585, 0.250089, 0.412327], 5e-7)


def test_value_and_expectation(exact):
    for theta, rewards in cases():
        close(exact.value(theta, rewards), mean(theta, rewards))
        close(exact.expectation(theta, rewards), mean(theta, rewards))
        table = np.random.default_rng(1).normal(size=(len(theta), 2, 3))
        expected = [[mean(theta, table[:, i, j]) for j in range(3)] for i in range(2)]
        close(exact.expectation(theta, table), expected)
    assert isinstance(exact.value(THETA, REWARDS), float)
    close(exact.value(THETA, REWARDS), 0.543748, 5e-7)


def check_gradient(gradient):
    for theta, rewards in cases():
        close(gradient(theta, rewards), slope(lambda t, r=rewards: mean(t, r), theta))


def wrong_gradient_of_the_mean_score(theta, rewards):
    return np.array(weights(theta), dtype=float) * np.array(rewards)


def wrong_gradient_in_the_probabilities(theta, rewards):
    return np.array(rewards) - float(mean(theta, rewards))


def test_gradient(exact):
    check_gradient(exact.gradient)
    fails(check_gradient, wrong_gradient_of_the_mean_score)
    fails(check_gradient, wrong_gradient_in_the_probabilities)
    close(exact.gradient(THETA, REWARDS), [0.154024, -0.135985, -0.018038], 5e-7)
    close(exact.gradient(np.log(PI), [1, 0, 0]), [0.25, -0.15, -0.10])


def check_hessian(hessian):
    for theta, rewards in cases():
        rows = [
            slope(lambda t, r=rewards, j=j: slope(lambda s: mean(s, r), t)[j], theta)
            for j in range(len(theta))
        ]
        close(hessian(theta, rewards), rows)


def wrong_hessian_without_its_mirror(theta, rewards):
    gradient = exact.gradient(theta, rewards)
    return np.diag(gradient) - np.outer(exact.softmax(theta), gradient)


def test_hessian(exact):
    check_hessian(exact.hessian)
    fails(check_hessian, wrong_hessian_without_its_mirror)


def test_score(exact):
    for theta, _ in cases():
        rows = []
        for action, logit in enumerate(theta):
            if logit == -INF:
                rows.append([mpf(0)] * len(theta))
            else:
                rows.append(slope(lambda t, a=action: mpmath.log(weights(t)[a]), theta))
        close(exact.score(theta), rows)
        close(exact.expectation(theta, exact.score(theta)), [0] * len(theta))


def check_entropy_gradient(gradient):
    for theta, _ in cases():
        close(gradient(theta), slope(surprisal, theta))


def wrong_entropy_gradient(theta):
    log_probs = exact.log_softmax(theta)
    return -np.exp(log_probs) * np.where(log_probs == -INF, 0.0, log_probs)


def test_entropy(exact):
    for theta, _ in cases():
        close(exact.entropy(theta), surprisal(theta))
    check_entropy_gradient(exact.entropy_gradient)
    fails(check_entropy_gradient, wrong_entropy_gradient)


def pairs():
    rng = np.random.default_rng(2)
    for size in (1, 2, 4):
        yield list(rng.normal(size=size) * 2), list(rng.normal(size=size))
    yield list(np.log(PI)), list(np.log(REF))
    yield [0.3, -INF, 1.2], [0.5, 0.1, -0.2]  # the policy forbids what the reference allows
    yield [0.3, -INF, 1.2], [0.5, -INF, -0.2]


def test_divergences(exact):
    for theta, ref in pairs():
        close(exact.kl(theta, ref), distance(theta, ref))
        close(exact.kl_gradient(theta, ref), slope(lambda t, q=ref: distance(t, q), theta))
        if (np.array(theta) > -INF).all():
            expected = slope(lambda t, q=ref: distance(q, t), theta)
            close(exact.forward_kl_gradient(theta, ref), expected)
            assert np.abs(exact.kl_gradient(theta, ref) - expected).max() > 1e-3 or len(ref) == 1
    pi, ref = np.log(PI), np.log(REF)
    close(exact.kl(pi, ref), 0.223805, 5e-7)
    close(exact.kl(ref, pi), 0.193794, 5e-7)
    close(exact.kl_gradient(pi, ref), [0.346243, -0.220389, -0.125854], 5e-7)
    close(exact.forward_kl_gradient(pi, ref), [0.3, -0.2, -0.1])


def test_a_reference_that_forbids_what_the_policy_allows(exact):
    """Also where the probability underflows to 0, which is not the same as a forbidden action."""
    for theta in ([0.0, 0.0], [0.0, -800.0]):
        assert exact.kl(theta, [0.0, -INF]) == INF
        refuses(ValueError, "`ref_logits` must allow every action that `logits` allows",
                exact.kl_gradient, theta, [0.0, -INF])  # fmt: skip
    assert exact.kl([0.0, -INF], [0.0, -INF]) == 0.0
    refuses(ValueError, "`logits` must allow every action that `ref_logits` allows",
            exact.forward_kl_gradient, [0.0, -INF], [0.0, 0.0])  # fmt: skip


def test_a_forbidden_action_contributes_exactly_zero_whatever_is_there(exact):
    theta = [0.5, -INF, -1.0]
    reference = exact.gradient(theta, [1.0, 0.0, 3.0])
    for filler in (7.0, INF, -INF, NAN):
        rewards = [1.0, filler, 3.0]
        assert exact.value(theta, rewards) == exact.value(theta, [1.0, 0.0, 3.0])
        got = exact.gradient(theta, rewards)
        assert (got == reference).all()
        assert got[1] == 0.0
        assert not np.signbit(got[1])
        assert (exact.hessian(theta, rewards)[1] == 0).all()
        assert np.isfinite(exact.group_moments(theta, rewards, lambda r: r, 2).covariance).all()
    assert exact.entropy_gradient(theta)[1] == 0.0
    assert exact.kl_gradient(theta, [0.1, 0.2, 0.3])[1] == 0.0
    assert (exact.score(theta)[1] == 0).all()
    assert (exact.score(theta)[:, 1] == 0).all()


# Groups: every member's action in a loop. Each baseline twice, for numpy and for lists


def none(rewards):
    return rewards


def group_mean(rewards):
    return rewards - rewards.mean(1, keepdims=True)


def leave_one_out(rewards):
    others = rewards.sum(1, keepdims=True) - rewards
    return rewards - others / max(1, rewards.shape[1] - 1)


def standardized(rewards):
    deviation = rewards.std(1, keepdims=True)
    return group_mean(rewards) / np.where(deviation > 1e-12, deviation, 1)


def best_of_group(rewards):
    return rewards - rewards.max(1, keepdims=True)


def none_of(rewards):
    return rewards


def group_mean_of(rewards):
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def leave_one_out_of(rewards):
    total = sum(rewards)
    return [r - (total - r) / max(1, len(rewards) - 1) for r in rewards]


def standardized_of(rewards):
    centered = group_mean_of(rewards)
    if all(c == 0 for c in centered):
        return centered
    deviation = mpmath.sqrt(sum(c * c for c in centered) / len(centered))
    return [c / deviation for c in centered]


def best_of_group_of(rewards):
    best = max(rewards)
    return [r - best for r in rewards]


ADVANTAGES = [
    (none, none_of),
    (group_mean, group_mean_of),
    (leave_one_out, leave_one_out_of),
    (standardized, standardized_of),
    (best_of_group, best_of_group_of),
]


def by_counting(probs, rewards, advantages, size):
    """Mean and covariance of ĝ over all groups, in the numbers of `probs`: fractions or mpmath."""
    count = len(probs)
    allowed = [a for a in range(count) if probs[a] > 0]
    scores = [[int(a == k) - probs[k] for k in range(count)] for a in range(count)]
    first = [0 * probs[0]] * count
    second = [[0 * probs[0]] * count for _ in range(count)]
    for group in itertools.product(allowed, repeat=size):
        chance = math.prod(probs[a] for a in group)
        weight = advantages([rewards[a] for a in group])
        drawn = [
            sum(w * scores[a][k] for w, a in zip(weight, group, strict=True)) / size
            for k in range(count)
        ]
        for i in range(count):
            first[i] += chance * drawn[i]
            for j in range(count):
                second[i][j] += chance * drawn[i] * drawn[j]
    covariance = [[second[i][j] - first[i] * first[j] for j in range(count)] for i in range(count)]
    return first, covariance


HALVES = [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]


def check_group_moments(moments):
    """In fractions, which have no rounding, and in 50 digits where there is a square root."""
    rewards = [Fraction(1), Fraction(0), Fraction(1, 2)]
    for advantages, plain in ADVANTAGES[:3] + ADVANTAGES[4:]:
        for size in (1, 2, 3, 4):
            first, covariance = by_counting(HALVES, rewards, plain, size)
            got = moments(np.log(PI), [1, 0, 0.5], advantages, size)
            close(got.mean, first, 1e-15)
            close(got.covariance, covariance, 1e-15)
            close(got.variance, sum(covariance[k][k] for k in range(3)), 1e-15)
    for theta, rewards in (THETA, [2.0, -1.0, 0.3]), ([0.1, -INF, 1.0, -2.0], [1.0, NAN, 0.2, -3]):
        for advantages, plain in ADVANTAGES:
            first, covariance = by_counting(weights(theta), [mpf(r) for r in rewards], plain, 3)
            got = moments(theta, rewards, advantages, 3)
            close(got.mean, first)
            close(got.covariance, covariance)


def test_group_moments(exact):
    check_group_moments(exact.group_moments)


def wrong_moments_with_every_group_alike(theta, rewards, advantages, size):
    """The moments of a uniform policy: groups counted and not weighted."""
    return exact.group_moments(np.zeros(len(theta)), rewards, advantages, size)


def wrong_moments_from_the_second_moment(theta, rewards, advantages, size):
    true = exact.group_moments(theta, rewards, advantages, size)
    return exact.Moments(true.mean, true.covariance + np.outer(true.mean, true.mean))


def test_wrong_moments_are_caught():
    fails(check_group_moments, wrong_moments_with_every_group_alike)
    fails(check_group_moments, wrong_moments_from_the_second_moment)


def test_moments_of_any_estimator(exact):
    """The largest action of a group, and how often the first action comes: two numbers."""

    def both(actions):
        return np.stack([actions.max(1), (actions == 0).sum(1)], axis=1)

    for size in (1, 2, 5):
        first, second = [Fraction(0)] * 2, [[Fraction(0)] * 2 for _ in range(2)]
        for group in itertools.product(range(3), repeat=size):
            chance, drawn = math.prod(HALVES[a] for a in group), (max(group), group.count(0))
            first = [f + chance * x for f, x in zip(first, drawn, strict=True)]
            second = [
                [second[i][j] + chance * drawn[i] * drawn[j] for j in range(2)] for i in range(2)
            ]
        got = exact.moments(np.log(PI), both, size)
        close(got.mean, first)
        close(
            got.covariance,
            [[second[i][j] - first[i] * first[j] for j in range(2)] for i in range(2)],
        )


def test_chunks_change_nothing(exact):
    """243 groups, in one piece, in pieces of 20 and one by one."""
    whole = exact.group_moments(THETA, REWARDS, standardized, 5)
    size, seen = exact._ENTRIES, []
    try:
        for entries in (300, 1):
            exact._ENTRIES = entries
            got = exact.group_moments(THETA, REWARDS, standardized, 5)
            close(got.mean, whole.mean, 1e-15)
            close(got.covariance, whole.covariance, 1e-15)
            exact.moments(THETA, lambda a: seen.append(len(a)) or 0.0 * a[:, :1], 5)
    finally:
        exact._ENTRIES = size
    assert seen == ([20] * 12 + [3]) * 2 + [1] * 486  # each enumeration runs twice


# Two values of the reward: sizes that cannot be enumerated


def by_conditioning(theta, rewards, advantages, size):
    """Mean and covariance by the other members' successes: Binomial(G-1) and Binomial(G-2).

    Not the way of `binary_moments`, which conditions on the successes of the whole group.
    """
    probs, high = weights(theta), max(rewards)
    count, wins = len(probs), [r == high for r in rewards]
    p = sum(q for q, won in zip(probs, wins, strict=True) if won)
    low = min(rewards)
    scores = [[int(a == k) - probs[k] for k in range(count)] for a in range(count)]

    @functools.cache
    def weight(won, successes):
        group = [mpf(high)] * successes + [mpf(low)] * (size - successes)
        return advantages(group)[0 if won else -1]

    def binomial(trials):
        return [math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(trials + 1)]

    others = binomial(size - 1)
    own = {won: sum(c * weight(won, k + won) for k, c in enumerate(others)) for won in (0, 1)}
    square = {
        won: sum(c * weight(won, k + won) ** 2 for k, c in enumerate(others)) for won in (0, 1)
    }
    pair = {
        (a, b): sum(
            c * weight(a, k + a + b) * weight(b, k + a + b)
            for k, c in enumerate(binomial(size - 2))
        )
        for a in (0, 1)
        for b in (0, 1)
    }
    # Σ over actions of one outcome of π(a) ∇log π(a): its components, for success and failure
    chances = {
        won: [
            sum(probs[a] * scores[a][k] for a in range(count) if wins[a] == won)
            for k in range(count)
        ]
        for won in (0, 1)
    }
    first = [own[0] * chances[0][k] + own[1] * chances[1][k] for k in range(count)]
    covariance = []
    for i in range(count):
        row = []
        for j in range(count):
            alone = sum(
                probs[a] * square[int(wins[a])] * scores[a][i] * scores[a][j] for a in range(count)
            )
            both = sum(pair[a, b] * chances[a][i] * chances[b][j] for a in (0, 1) for b in (0, 1))
            row.append((alone + (size - 1) * both) / size - first[i] * first[j])
        covariance.append(row)
    return first, covariance


BINARY = [
    ([math.log(p) for p in PI], [1, 0, 0]),
    ([0.3, -1.0, 0.8, 0.1], [2.5, -1.0, 2.5, -1.0]),
    ([-5.0, 1.0], [1, 0]),
]


def check_binary_moments(moments, sizes=(2, 3, 8, 64)):
    for theta, rewards in BINARY:
        for advantages, plain in ADVANTAGES:
            for size in sizes:
                first, covariance = by_conditioning(theta, rewards, plain, size)
                got = moments(theta, rewards, advantages, size)
                close(got.mean, first)
                close(got.covariance, covariance)


def test_binary_moments_at_sizes_up_to_64(exact):
    check_binary_moments(exact.binary_moments)


def test_both_ways_to_condition_agree_with_counting(exact):
    for theta, rewards in BINARY:
        for advantages, plain in ADVANTAGES:
            for size in (2, 3, 5):
                whole = exact.group_moments(theta, rewards, advantages, size)
                short = exact.binary_moments(theta, rewards, advantages, size)
                np.testing.assert_allclose(short.mean, whole.mean, rtol=0, atol=1e-12)
                np.testing.assert_allclose(short.covariance, whole.covariance, rtol=0, atol=1e-12)
            first, covariance = by_counting(weights(theta), [mpf(r) for r in rewards], plain, 3)
            other = by_conditioning(theta, rewards, plain, 3)
            close(np.array(other[0], dtype=float), first)
            close(np.array(other[1], dtype=float), covariance)


def wrong_conditioning_without_spread_inside_an_outcome(theta, rewards, advantages, size):
    """As if all successes were one action and all failures another."""
    won = np.array(rewards) == max(rewards)
    probs = exact.softmax(theta)
    given = np.stack([probs * outcome / probs[outcome].sum() for outcome in (won, ~won)])
    table = np.where(np.arange(size) < np.arange(size + 1)[:, None], max(rewards), min(rewards))
    drawn = np.empty((size + 1, len(probs)))
    for successes, weight in enumerate(advantages(1.0 * table)):
        parts = weight[:successes].sum(), weight[successes:].sum()
        drawn[successes] = sum(w * (q - probs) for w, q in zip(parts, given, strict=True)) / size
    chance = exact.binomial(size, probs[won].sum())
    centered = drawn - chance @ drawn
    return exact.Moments(chance @ drawn, (chance * centered.T) @ centered)


def wrong_variance_of_independent_members(theta, rewards, advantages, size):
    """The variance of one member's term over G, as if a shared baseline tied no two of them."""
    scores, table = exact.score(theta), np.array(rewards, dtype=float)

    def one(actions):
        return advantages(table[actions])[:, :1] * scores[actions[:, 0]]

    first, covariance = exact.moments(theta, one, size)
    return exact.Moments(first, covariance / size)


def test_wrong_conditioning_is_caught():
    for wrong in (
        wrong_conditioning_without_spread_inside_an_outcome,
        wrong_variance_of_independent_members,
    ):
        fails(check_binary_moments, wrong, (2, 3))
    # Without a baseline the members are independent.
    alone = wrong_variance_of_independent_members(THETA, REWARDS, none, 3)
    close(alone.covariance, exact.group_moments(THETA, REWARDS, none, 3).covariance)


def test_binary_moments_where_rounding_carries_the_chance_of_success_past_one(exact):
    """Probabilities of seven successes sum to 1.0000000000000002 in float64."""
    theta = [*np.random.default_rng(7).normal(size=7), -60.0]
    assert exact.softmax(theta)[:7].sum() > 1
    got = exact.binary_moments(theta, [1] * 7 + [0], none, 2)
    close(got.mean, slope(lambda t: mean(t, [1] * 7 + [0]), theta))


def test_the_field_s_numbers_on_the_base_case(exact):
    """(n-1)/n of the gradient, and a baseline that raises the variance."""
    theta, rewards = np.log(PI), [1, 0, 0]
    for size, component in ((2, 0.125), (4, 0.1875)):
        close(exact.group_moments(theta, rewards, group_mean, size).mean[0], component)
        close(exact.group_moments(theta, rewards, leave_one_out, size).mean[0], 0.25)
    for size, bare, left in ((4, 0.02375, 0.03583), (8, 0.01188, 0.01196), (16, 0.00594, 0.00479)):
        close(exact.binary_moments(theta, rewards, none, size).variance, bare, 6e-6)
        close(exact.binary_moments(theta, rewards, leave_one_out, size).variance, left, 6e-6)


def test_binomial(exact):
    for size in (0, 1, 2, 7, 64, 1024):
        for p in (0.0, 1e-9, 0.01, 0.5, 0.97, 1.0):
            q = Fraction(p)
            if size <= 64 or p in (0.0, 0.5, 1.0):
                expected = [
                    math.comb(size, k) * q**k * (1 - q) ** (size - k) for k in range(size + 1)
                ]
            else:
                expected = [
                    math.comb(size, k) * mpf(p) ** k * (1 - mpf(p)) ** (size - k)
                    for k in range(size + 1)
                ]
            close(exact.binomial(size, p), expected)
            close(exact.binomial(size, p).sum(), 1)


def deviation_factor(p, size, ddof):
    """`E[(r - mean)/std · score]` over `∇p`, from the definition of the advantage of one member."""
    total = mpf(0)
    for k in range(size):  # the others' successes
        chance = math.comb(size - 1, k) * mpf(p) ** k * (1 - mpf(p)) ** (size - 1 - k)
        for won, sign in ((1, 1), (0, -1)):
            share = mpf(k + won) / size
            variance = share * (1 - share) * size / (size - ddof)
            if variance > 0:
                total += sign * chance * (won - share) / mpmath.sqrt(variance)
    return total


def check_factor(factor, sizes=(2, 3, 8, 64, 1024)):
    for size in sizes:
        for p in (0.001, 0.01, 0.05, 0.5, 0.9):
            for ddof in (0, 1):
                expected = float(deviation_factor(p, size, ddof))
                assert factor(p, size, ddof) == pytest.approx(expected, rel=1e-11)


def wrong_factor_with_the_deviation_of_one_draw(p, size, ddof=0):
    return math.sqrt((size - ddof) / size) / math.sqrt(p * (1 - p))


def wrong_factor_with_the_other_ddof(p, size, ddof=0):
    return exact.std_factor(p, size, 1 - ddof)


def test_factor_of_the_deviation(exact):
    check_factor(exact.std_factor)
    fails(check_factor, wrong_factor_with_the_deviation_of_one_draw)
    fails(check_factor, wrong_factor_with_the_other_ddof)
    for p in (1e-6, 0.01, 0.3, 0.5, 0.99):
        close(exact.std_factor(p, 2), 1)
    for p, size, ddof, shown in (
        (0.01, 8, 0, 2.6089),
        (0.05, 8, 1, 2.313),
        (0.5, 8, 1, 1.736),
    ):
        close(exact.std_factor(p, size, ddof), shown, 5e-4)
    assert exact.std_factor(0.5, 1) == exact.std_factor(0.5, 1, 1) == 0.0
    for size in (2, 8, 64):
        got = exact.binary_moments([0.0, 1.0, -1.0], [0, 1, 1], standardized, size).mean
        p = exact.value([0.0, 1.0, -1.0], [0, 1, 1])
        close(got, exact.std_factor(p, size) * exact.gradient([0.0, 1.0, -1.0], [0, 1, 1]))


# Trees: every trajectory in a loop, every logit moved by hand


def random_tree(shape, seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape[: t + 1]).tolist() for t in range(len(shape))]


def at(step, path):
    for choice in path:
        step = step[choice]
    return step


def trajectories(steps):
    """Path, chance, and chances of every choice on the way."""
    lengths = np.shape(steps[-1])
    for path in itertools.product(*map(range, lengths)):
        chances = [weights(at(step, path[:t]))[path[t]] for t, step in enumerate(steps)]
        yield path, math.prod(chances), chances


def tree_mean(steps, rewards):
    return sum((p * mpf(at(rewards, path)) for path, p, _ in trajectories(steps) if p), mpf(0))


def step_distances(steps, ref):
    totals = [mpf(0)] * len(steps)
    for (_, chance, own), (_, _, other) in zip(trajectories(steps), trajectories(ref), strict=True):
        if chance:
            logs = [mpmath.log(p / q) for p, q in zip(own, other, strict=True)]
            totals = [total + chance * log for total, log in zip(totals, logs, strict=True)]
    return totals


def tree_distance(steps, ref):
    """Between the distributions of whole trajectories, with no steps in it."""
    both = zip(trajectories(steps), trajectories(ref), strict=True)
    return sum((p * mpmath.log(p / q) for (_, p, _), (_, q, _) in both if p), mpf(0))


def tree_slope(function, steps):
    """Central differences in every finite logit, in the shapes of `steps`."""
    shapes = [np.shape(step) for step in steps]
    flat = [x for step in steps for x in np.array(step, dtype=object).ravel()]

    def build(values):
        values, built = list(values), []
        for shape in shapes:
            size = math.prod(shape)
            built.append(np.array(values[:size], dtype=object).reshape(shape).tolist())
            values = values[size:]
        return built

    return build(slope(lambda values: function(build(values)), flat))


UNEVEN = [[0.2, 0.7], [[0.5, -0.3, -INF], [-INF, 0.4, -INF]]]
UNREACHED = [[0.2, -INF], [[0.5, -0.3], [0.1, 0.4]]]


def trees():
    yield random_tree((3,), 0), random_tree((3,), 1)
    yield random_tree((2, 3), 2), random_tree((2, 3), 3)
    yield random_tree((2, 2, 3), 4), random_tree((2, 2, 3), 5)
    yield UNEVEN, random_tree((2, 3), 6)
    yield UNREACHED, random_tree((2, 2), 7)


def close_steps(got, expected):
    assert len(got) == len(expected)
    for own, other in zip(got, expected, strict=True):
        close(own, other)


def check_tree_gradient(gradient):
    for steps, _ in trees():
        rewards = np.random.default_rng(8).normal(size=np.shape(steps[-1])).tolist()
        expected = tree_slope(lambda s, r=rewards: tree_mean(s, r), steps)
        close_steps(gradient(steps, rewards), expected)


def wrong_tree_gradient_without_reach(steps, rewards):
    """Each choice as if the policy always came there."""
    found, reach = [], np.ones(())
    for step, true in zip(steps, exact.tree_gradient(steps, rewards), strict=True):
        found.append(true / np.where(reach > 0, reach, 1)[..., None])
        reach = reach[..., None] * exact.softmax(step)
    return found


def test_tree_value_and_gradient(exact):
    for steps, _ in trees():
        rewards = np.random.default_rng(8).normal(size=np.shape(steps[-1])).tolist()
        close(exact.tree_value(steps, rewards), tree_mean(steps, rewards))
    check_tree_gradient(exact.tree_gradient)
    fails(check_tree_gradient, wrong_tree_gradient_without_reach)
    close(exact.tree_gradient([THETA], REWARDS)[0], exact.gradient(THETA, REWARDS), 1e-15)


def check_tree_kl_gradient(gradient):
    for steps, ref in trees():
        expected = tree_slope(lambda s, q=ref: tree_distance(s, q), steps)
        close_steps(gradient(steps, ref), expected)


def wrong_tree_kl_gradient_without_the_future(steps, ref):
    """Each choice answers for the divergence of its own step only."""
    alone = exact.kl_gradient(steps[0], ref[0])
    return [alone, *exact.tree_kl_gradient(steps, ref)[1:]]


def test_tree_divergence(exact):
    for steps, ref in trees():
        close(exact.tree_kl(steps, ref), step_distances(steps, ref))
        close(exact.tree_kl(steps, ref).sum(), tree_distance(steps, ref))
    check_tree_kl_gradient(exact.tree_kl_gradient)
    fails(check_tree_kl_gradient, wrong_tree_kl_gradient_without_the_future)


def test_what_a_tree_never_does_counts_for_nothing(exact):
    rewards = [[1.0, 2.0], [NAN, INF]]
    assert exact.tree_value(UNREACHED, rewards) == exact.value(UNREACHED[1][0], [1.0, 2.0])
    slopes = exact.tree_gradient(UNREACHED, rewards)
    assert (slopes[0] == 0).all()
    assert (slopes[1][1] == 0).all()
    # A reference that forbids a choice where the policy never comes makes nothing infinite.
    ref = [[0.0, 0.0], [[0.3, 0.1], [0.0, -INF]]]
    close(exact.tree_kl(UNREACHED, ref), step_distances(UNREACHED, [ref[0], [ref[1][0]] * 2]))
    assert (exact.tree_kl_gradient(UNREACHED, ref)[1][1] == 0).all()
    # Where it does come, rarely enough to underflow, it does.
    rare = [[0.0, -800.0], UNREACHED[1]]
    assert exact.tree_kl(rare, ref)[1] == INF
    assert math.isfinite(exact.tree_kl(rare, ref)[0])
    refuses(ValueError, "`ref_steps` must allow every choice that `steps` allow",
            exact.tree_kl_gradient, rare, ref)  # fmt: skip


# Refusals


def test_bad_policies_and_values_are_refused(exact):
    for call in (
        lambda theta: exact.value(theta, [1, 0]),
        lambda theta: exact.gradient(theta, [1, 0]),
        lambda theta: exact.hessian(theta, [1, 0]),
        lambda theta: exact.expectation(theta, [1, 0]),
        lambda theta: exact.kl(theta, [0, 0]),
        lambda theta: exact.kl_gradient(theta, [0, 0]),
        lambda theta: exact.forward_kl_gradient(theta, [0, 0]),
        lambda theta: exact.group_moments(theta, [1, 0], none, 2),
        lambda theta: exact.binary_moments(theta, [1, 0], none, 2),
        exact.score,
        exact.entropy,
        exact.entropy_gradient,
    ):
        refuses(ValueError, "`logits` must be finite, or -inf where forbidden, got .*nan",
                call, [0.0, NAN])  # fmt: skip
        refuses(ValueError, "`logits` must be finite, or -inf", call, [0.0, INF])
        refuses(ValueError, "`logits` must allow at least one action", call, [-INF, -INF])
        refuses(ValueError, r"`logits` must have shape \(A,\), got \(1, 2\)", call, [[0.0, 0.0]])
        refuses(TypeError, "`logits` must hold real numbers", call, ["a", "b"])
        refuses(TypeError, "`logits` must hold real numbers", call, [1j, 0])
    refuses(ValueError, "`logits` must be one array of numbers", exact.softmax, [[0, 1], [0]])
    refuses(ValueError, r"`logits` must have shape \(..., A\), got \(\)", exact.softmax, 1.0)
    refuses(ValueError, "at least one action", exact.softmax, [])
    for function in (exact.value, exact.gradient, exact.hessian):
        refuses(
            ValueError, r"`rewards` has shape \(3,\), expected \(2,\)", function, [0, 0], REWARDS
        )
        refuses(ValueError, r"`rewards` has shape \(1,\), expected \(2,\)", function, [0, 0], [1])
        refuses(ValueError, "`rewards` must be finite at allowed", function, [0, 0], [1, NAN])
        refuses(ValueError, "`rewards` must be finite at allowed", function, [0, 0], [1, -INF])
    refuses(ValueError, r"`values` has shape \(3, 2\), expected \(2, 2\)",
            exact.expectation, [0, 0], np.ones((3, 2)))  # fmt: skip
    for function in (exact.kl, exact.kl_gradient, exact.forward_kl_gradient):
        refuses(ValueError, r"`ref_logits` has shape \(3,\), expected \(2,\)",
                function, [0, 0], [0, 0, 0])  # fmt: skip
        refuses(ValueError, "`ref_logits` must be finite", function, [0, 0], [0, NAN])


def test_bad_groups_are_refused(exact):
    for function in (exact.group_moments, exact.binary_moments):
        refuses(ValueError, "`size` must be at least 1, got 0", function, [0, 0], [1, 0], none, 0)
        refuses(TypeError, "`size` must be an integer, got float",
                function, [0, 0], [1, 0], none, 2.0)  # fmt: skip
        refuses(ValueError, r"`advantages` returned \(\d, 1\), expected \(\d, 2\)",
                function, [0, 0], [1, 0], lambda r: r[:, :1], 2)  # fmt: skip
        refuses(ValueError, "`advantages` must return finite numbers",
                function, [0, 0], [1, 0], lambda r: r * NAN, 2)  # fmt: skip
        refuses(ValueError, "`advantages` must judge each group alone",
                function, [0, 0], [1, 0], lambda r: r - r.mean(), 2)  # fmt: skip
    refuses(ValueError, "`size` makes 14348907 groups, expected at most 10000000",
            exact.group_moments, THETA, REWARDS, none, 15)  # fmt: skip
    refuses(ValueError, r"`estimator` returned \(4,\), expected \(4, D\)",
            exact.moments, [0, 0], lambda a: a[:, 0], 2)  # fmt: skip
    refuses(ValueError, "`estimator` must return finite numbers",
            exact.moments, [0, 0], lambda a: a * NAN, 2)  # fmt: skip
    for rewards in ([1, 1, 1], REWARDS):
        refuses(ValueError, "`rewards` must take two values at allowed actions",
                exact.binary_moments, THETA, rewards, none, 2)  # fmt: skip
    exact.binary_moments([0, 0, -INF], [1, 0, 7], none, 2)
    for order in (lambda r: np.cumsum(r, axis=1), lambda r: r * np.arange(r.shape[1])):
        refuses(ValueError, "`advantages` must depend on the own reward and the number of succ",
                exact.binary_moments, THETA, [1, 0, 0], order, 3)  # fmt: skip
    refuses(ValueError, "`size` must be at least 0, got -1", exact.binomial, -1, 0.5)
    refuses(TypeError, "`size` must be an integer, got float", exact.binomial, 2.0, 0.5)
    for p in (-0.1, 1.1, NAN):
        refuses(ValueError, r"`p` must lie in \[0, 1\]", exact.binomial, 2, p)
    for p in (0, 1, NAN):
        refuses(ValueError, r"`p` must lie in \(0, 1\)", exact.std_factor, p, 2)
    refuses(ValueError, "`ddof` must be 0 or 1, got 2", exact.std_factor, 0.5, 2, 2)
    refuses(ValueError, "`size` must be at least 1", exact.std_factor, 0.5, 0)


def test_bad_trees_are_refused(exact):
    steps, rewards = random_tree((2, 3), 0), np.zeros((2, 3))
    for call in (
        lambda s: exact.tree_value(s, rewards),
        lambda s: exact.tree_gradient(s, rewards),
        lambda s: exact.tree_kl(s, steps),
        lambda s: exact.tree_kl_gradient(s, steps),
    ):
        refuses(ValueError, "`steps` must hold at least one step", call, [])
        refuses(ValueError, r"`steps\[1\]` has shape \(3, 2\), expected \(2, A\)",
                call, [steps[0], np.zeros((3, 2))])  # fmt: skip
        refuses(ValueError, r"`steps\[0\]` has shape \(1, 2\), expected \(A,\)", call, [[[0, 0]]])
        refuses(ValueError, r"`steps\[1\]` must be finite", call, [steps[0], np.full((2, 3), NAN)])
        refuses(ValueError, r"`steps\[1\]` must allow at least one action",
                call, [steps[0], [[0, 0, 0], [-INF] * 3]])  # fmt: skip
    refuses(ValueError, r"`rewards` has shape \(3, 2\)", exact.tree_value, steps, rewards.T)
    for function in (exact.tree_kl, exact.tree_kl_gradient):
        refuses(ValueError, r"`ref_steps\[1\]` has shape \(2, 2\), expected \(2, 3\)",
                function, steps, random_tree((2, 2), 0))  # fmt: skip
        refuses(ValueError, "`ref_steps` has 1 steps, expected 2", function, steps, steps[:1])


# Mutants


def check_values(exact):
    test_value_and_expectation(exact)


def check_gradients(exact):
    check_gradient(exact.gradient)


def check_hessians(exact):
    check_hessian(exact.hessian)


def check_groups(exact):
    check_group_moments(exact.group_moments)


def check_binary(exact):
    check_binary_moments(exact.binary_moments, (2, 3))


def check_factors(exact):
    check_factor(exact.std_factor, (2, 8))


def check_tree_gradients(exact):
    check_tree_gradient(exact.tree_gradient)


def check_tree_kl_gradients(exact):
    check_tree_kl_gradient(exact.tree_kl_gradient)


MUTANTS = [
    ("shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))",
     "shifted - np.log(np.exp(shifted).mean(-1, keepdims=True))", test_probabilities),
    ("shifted = logits - logits.max(-1, keepdims=True)", "shifted = logits - logits.max()",
     test_probabilities),
    ("return np.tensordot(np.exp(log_probs), expected, axes=1)[()]", "return expected.mean(0)",
     check_values),
    ("return probs * (values - (probs * values).sum(-1, keepdims=True)) + 0.0",
     "return probs * (values - values.mean(-1, keepdims=True)) + 0.0", check_gradients),
    ("return probs * (values - (probs * values).sum(-1, keepdims=True)) + 0.0",
     "return probs * values + 0.0", check_gradients),
    ("(probs * values).sum(-1, keepdims=True)) + 0.0", "(probs * values).sum(-1, keepdims=True))",
     test_a_forbidden_action_contributes_exactly_zero_whatever_is_there),
    ("np.outer(probs, slope) - np.outer(slope, probs)",
     "np.outer(probs, slope) + np.outer(slope, probs)", check_hessians),
    ("return np.diag(slope) - np.outer", "return np.diag(probs) - np.outer", check_hessians),
    ("rows = np.eye(len(log_probs)) - np.exp(log_probs)",
     "rows = np.eye(len(log_probs)) - np.exp(log_probs)[:, None]", test_score),
    ("return value(logits, -_policy", "return value(logits, _policy", test_entropy),
    ("return gradient(logits, -_policy", "return gradient(logits, _policy", test_entropy),
    ("return np.exp(own) - np.exp(ref)", "return np.exp(ref) - np.exp(own)", test_divergences),
    ("kept = np.where(forbidden, 0.0, array)", "kept = np.nan_to_num(array)",
     test_bad_policies_and_values_are_refused),
    ("centered = ((w, x - mean) for w, x", "centered = ((w, x) for w, x", check_groups),
    ("return float(np.trace(self.covariance))", "return float(np.sum(self.covariance))",
     check_groups),
    ("scores[actions]) / actions.shape[1]", "scores[actions])", check_groups),
    ("yield np.exp(log_probs[actions].sum(1)), estimates",
     "yield np.exp(log_probs[actions].mean(1)), estimates", check_groups),
    ("chunk = max(1, _ENTRIES // (size * len(log_probs)))",
     "chunk = max(2, _ENTRIES // (size * len(log_probs)))", test_chunks_change_nothing),
    ("for start in range(0, count, chunk):", "for start in range(0, count - chunk + 1, chunk):",
     test_chunks_change_nothing),
    ("actions = allowed[digits % len(allowed)]", "actions = digits % len(allowed)",
     check_groups),
    ("(counts * weights**2).T / size", "(counts * weights**2).T",
     check_binary),
    ("within = chance @ (counts * weights**2).T / size",
     "within = chance @ (counts * weights).T ** 2 / size", check_binary),
    ("spread = sum(w * (np.diag(q) - np.outer(q, q))", "spread = sum(w * (np.diag(q))",
     check_binary),
    ("@ (np.stack(given) - probs)", "@ np.stack(given)", check_binary),
    ("centered = conditional_mean - mean", "centered = conditional_mean", check_binary),
    ("(size - successes) * math.log1p(-p)", "size * math.log1p(-p)", test_binomial),
    ("return np.eye(size + 1)[round(p) * size]", "return np.eye(size + 1)[0]", test_binomial),
    ("math.sqrt((size - ddof) / size)", "math.sqrt(size / (size - ddof))", check_factors),
    ("np.sqrt(share * (1 - share))", "(share * (1 - share))", check_factors),
    ("float(deviation) / (p * (1 - p))", "float(deviation) / math.sqrt(p * (1 - p))",
     check_factors),
    ("slopes.append(reach[..., None] * _centered", "slopes.append(_centered",
     check_tree_gradients),
    ("later = (np.exp(own) * total).sum(-1)", "later = total.sum(-1)", check_tree_gradients),
    ("total = np.where(own == -np.inf, 0.0, gain + later)",
     "total = np.where(own == -np.inf, 0.0, gain)", check_tree_kl_gradients),
    ("taken = _path(log_probs[: t + 1]) > -np.inf", "taken = own > -np.inf",
     test_what_a_tree_never_does_counts_for_nothing),
    ("math.inf if (ratio == math.inf).any() else (chance * ratio).sum()",
     "(chance * np.where(chance > 0, ratio, 0)).sum()",
     test_what_a_tree_never_does_counts_for_nothing),
    ("np.where(taken, np.where(taken, own, 0.0) - ref, 0.0)",
     "np.where(taken, ref - np.where(taken, own, 0.0), 0.0)", test_divergences),
    ("if not np.allclose(alone, weights[-1:]):", "if False:", test_bad_groups_are_refused),
    ("if not (np.allclose(weights, expected) and np.allclose(reverse, expected)):", "if False:",
     test_bad_groups_are_refused),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.exact", old, new, check)
