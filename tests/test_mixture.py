"""Mixtures of two rewards against loops, torch baselines, sympy, and the known cases."""

import itertools
import json
import math
import statistics

import numpy as np
import pytest
import sympy
import torch

from mathrl import baseline, mixture, reward
from tests.mutants import assert_caught
from tests.oracles import fails, refuses

INF, NAN = math.inf, math.nan
NORMS = ("group", "batch", "none", "decoupled")
PAPER = {"mean_solve": 0.279, "mean_order": 0.365}  # 0.279 is the paper's; 0.365 is M = 9's
ALPHAS = (0.0, 0.01, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@pytest.fixture(name="mixture")
def true_module():
    return mixture


def close(got, expected, tolerance=1e-10):
    got, expected = np.asarray(got), np.asarray(expected, dtype=float)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def mixed(mixture, alpha, norm="group", scale=None, **options):
    scale = mixture.bootstrap_scales(alpha, **PAPER) if scale is None else mixture.Scales(*scale)
    return mixture.MixedReward(alpha, scale, norm, **options)


def batch(seed=0, prompts=6, size=8):
    """Outcomes with mixed groups, one that all solve, one that none does, one of equal orders."""
    rng = np.random.default_rng(seed)
    solve = rng.integers(0, 2, (prompts, size)).astype(float)
    order = rng.choice([0.3, 0.35, 0.4, 0.7], (prompts, size))
    solve[0], solve[1], order[2] = 0, 1, 0.4
    solve[2, :2] = 0, 1
    order[:2, 0] = 0.9
    return solve, order


# ---------------------------------------------------------------- the formulas, by loops


def spread(values, ddof):
    if max(values) - min(values) < 1e-12 or len(values) == 1:
        return 0.0
    return statistics.stdev(values) if ddof else statistics.pstdev(values)


def plain(solve, order, alpha, scale, norm, ddof, eps):
    """Advantages by loops over lists."""
    rows = []
    every = [scale[0] * s + scale[1] * o for s, o in zip(solve.flat, order.flat, strict=True)]
    for s_row, o_row in zip(solve.tolist(), order.tolist(), strict=True):
        total = [scale[0] * s + scale[1] * o for s, o in zip(s_row, o_row, strict=True)]
        if norm == "decoupled":
            row = [0.0] * len(total)
            for weight, values in ((alpha, s_row), (1 - alpha, o_row)):
                std, mean = spread(values, ddof), statistics.fmean(values)
                for i, value in enumerate(values):
                    row[i] += weight * (value - mean) / (std + eps) if std else 0.0
        else:
            std = {"group": spread(total, ddof), "batch": spread(every, ddof), "none": 1 - eps}[
                norm
            ]
            mean = statistics.fmean(total)
            row = [(value - mean) / (std + eps) if std else 0.0 for value in total]
        rows.append(row)
    return rows


def check_formulas(mixture):
    solve, order = batch()
    for norm, alpha, ddof, eps in itertools.product(NORMS, ALPHAS, (0, 1), (0.0, 1e-2)):
        mix = mixed(mixture, alpha, norm, ddof=ddof, eps=eps)
        got = mix(solve, order)
        close(got.rewards, mix.scale.solve * solve + mix.scale.order * order)
        close(got.advantages, plain(solve, order, alpha, mix.scale, norm, ddof, eps), 1e-9)
        close(sum(mix.parts(solve, order)), got.advantages)


def test_advantages_are_those_of_the_formulas(mixture):
    check_formulas(mixture)


def test_advantages_are_those_of_the_torch_baselines(mixture):
    solve, order = batch()
    for alpha, ddof, eps in itertools.product(ALPHAS, (0, 1), (0.0, 1e-4)):
        got = mixed(mixture, alpha, ddof=ddof, eps=eps)(solve, order)
        truth = baseline.standardized(torch.tensor(got.rewards), ddof=ddof, eps=eps)
        varies = np.ptp(got.rewards, axis=1) > 1e-9  # below, torch sees the last bits of a sum
        close(got.advantages[varies], truth.numpy()[varies])
        assert (got.advantages[~varies] == 0).all()
        close(
            mixed(mixture, alpha, "none")(solve, order).advantages,
            baseline.group_mean(torch.tensor(got.rewards)).numpy(),
        )


# ---------------------------------------------------------------- the known cases


def check_scales(mixture):
    got = mixture.bootstrap_scales(0.99, 0.279, 0.365)
    assert (round(got.solve, 3), round(got.order, 4)) == (3.548, 0.0274)
    for alpha in ALPHAS:
        scale = mixture.bootstrap_scales(alpha, **PAPER)
        assert abs(scale.solve * 0.279 - alpha) < 1e-15
        assert abs(scale.order * 0.365 - (1 - alpha)) < 1e-15
        raw = alpha / 0.279 / (alpha / 0.279 + (1 - alpha) / 0.365)
        assert abs(scale.raw_alpha - raw) < 1e-15


def check_edges(mixture):
    """At α = 1 and α = 0 the unused scale is 0, also where its mean is."""
    assert mixture.bootstrap_scales(1, 0.279, 0) == (1 / 0.279, 0)
    assert mixture.bootstrap_scales(0, 0, 0.365) == (0, 1 / 0.365)
    for alpha, means in ((0.99, (0, 0.365)), (1.0, (0.0, 0.365)), (0.99, (0.279, 0))):
        name = "mean_solve" if means[0] == 0 else "mean_order"
        refuses(ValueError, f"`{name}` must be positive", mixture.bootstrap_scales, alpha, *means)
        refuses(
            ValueError, "train the supervised model longer", mixture.bootstrap_scales, alpha, *means
        )


def check_cases(mixture):
    one, order = [[1, 0, 0, 0]], [[0.4, 0.5, 0.4, 0.5]]
    alone = mixed(mixture, 1)
    close(alone(one, order).advantages, [[1.5, -0.5, -0.5, -0.5]])
    root = math.sqrt(3)
    zero = mixed(mixture, 1, ddof=0)(one, order).advantages
    close(zero, [[root, -1 / root, -1 / root, -1 / root]])
    assert zero.round(3).tolist() == [[1.732, -0.577, -0.577, -0.577]]
    for alpha in ALPHAS[:-1]:
        got = mixed(mixture, alpha)(np.zeros((1, 4)), order).advantages
        close(got, np.array([[-1, 1, -1, 1]]) * math.sqrt(3) / 2)
    got = mixed(mixture, 0.99, eps=1e-4)(np.zeros((1, 4)), order).advantages
    assert got.round(4).tolist() == [[-0.8145, 0.8145, -0.8145, 0.8145]]
    for norm, alpha, ddof in itertools.product(NORMS, ALPHAS, (0, 1)):
        mix = mixed(mixture, alpha, norm, ddof=ddof)
        for solve, equal in ((1, 0.7), (0, 0.1), (1, 1 / 3)):
            result = mix(np.full((2, 8), solve), np.full((2, 8), equal))
            assert (result.advantages == 0).all()
        for equal in (0.1, 0.7):  # whose mean over seven rounds to something else
            assert (mix(np.ones((1, 7)), np.full((1, 7), equal)).advantages == 0).all()
        assert mix([[1]], [[0.3]]).advantages.tolist() == [[0]]


def check_scale_free(mixture):
    """Rewards times 1000, or times anything, at eps = 0: the same advantages."""
    solve, order = batch()
    for norm, factor in itertools.product(("group", "batch", "decoupled"), (1000, 1e-9, 1e-60)):
        mix = mixed(mixture, 0.9, norm)
        close(mix(solve * factor, order * factor).advantages, mix(solve, order).advantages)


def check_refuses_rewards(mixture):
    mix = mixed(mixture, 0.9)
    ones = [[1.0, 0.0]]
    for bad in (NAN, INF, -INF, 1e200):
        refuses(ValueError, r"`solve` must be finite.*at index \(0, 1\)", mix, [[1.0, bad]], ones)
        refuses(ValueError, "`order` must be finite", mix, ones, [[bad, 0.0]])
    refuses(ValueError, "`order` has shape", mix, ones, [[1.0]])
    refuses(ValueError, r"shape \(P, G\)", mix, [1.0, 0.0], [1.0, 0.0])
    refuses(ValueError, r"shape \(P, G\)", mix, np.zeros((0, 4)), np.zeros((0, 4)))
    refuses(ValueError, "one array of numbers", mix, [[1.0], [1.0, 0.0]], ones)
    refuses(TypeError, "`solve` must hold real numbers", mix, [[True]], [[1.0]])
    refuses(TypeError, "`order` must hold real numbers", mix, [[1.0]], [["a"]])


def test_known_cases(mixture):
    check_scales(mixture)
    check_edges(mixture)
    check_cases(mixture)
    check_scale_free(mixture)
    check_refuses_rewards(mixture)


def wrong_scales_with_eps(alpha, mean_solve, mean_order):
    return mixture.Scales(alpha / (mean_solve + 1e-8), (1 - alpha) / (mean_order + 1e-8))


def wrong_scales_swapped(alpha, mean_solve, mean_order):
    return mixture.Scales((1 - alpha) / mean_solve, alpha / mean_order)


def wrong_scales_multiplied(alpha, mean_solve, mean_order):
    return mixture.Scales(alpha * mean_solve, (1 - alpha) * mean_order)


@pytest.mark.claim("13.9", "algebra")
def test_bootstrapping_makes_shares_of_the_mean(mixture):
    check_scales(mixture)
    alpha, s, o = sympy.symbols("alpha S O", positive=True)
    solve, order = alpha / s, (1 - alpha) / o
    assert sympy.simplify(solve * s + order * o - 1) == 0
    assert sympy.simplify(solve * s / (solve * s + order * o) - alpha) == 0


@pytest.mark.claim("13.10", "enumeration")
def test_edges_of_bootstrapping(mixture):
    check_edges(mixture)

    class Wrong:
        bootstrap_scales = staticmethod(wrong_scales_with_eps)

    fails(check_edges, Wrong)  # a scale of 1e8 in the place of an error


@pytest.mark.parametrize("wrong", [wrong_scales_swapped, wrong_scales_multiplied])
def test_wrong_scales_are_caught(wrong):
    class Wrong:
        bootstrap_scales = staticmethod(wrong)

    fails(check_scales, Wrong)


# ---------------------------------------------------------------- what follows


def check_ratio(make):
    """`make(scale, eps)` gives advantages: the same for (κ_S, κ_O) and any multiple of it."""
    scale = np.array([3.548, 0.0274])
    for factor in (1e-3, 0.2797, 1e4):
        close(make(factor * scale, 0.0), make(scale, 0.0))


@pytest.mark.claim("13.11", "algebra")
def test_group_normalisation_sees_only_the_ratio(mixture):
    """Symbolically for three samples, then at many settings; with eps > 0 in the limit."""
    k, a, b = sympy.symbols("k a b", positive=True)
    s, o = sympy.symbols("s:3"), sympy.symbols("o:3")

    def standardised(scale_s, scale_o):
        r = [scale_s * x + scale_o * y for x, y in zip(s, o, strict=True)]
        mean = sum(r) / 3
        std = sympy.sqrt(sympy.factor(sympy.expand(sum((x - mean) ** 2 for x in r) / 2)))
        return [sympy.simplify((x - mean) / std) for x in r]

    for one, other in zip(standardised(k * a, k * b), standardised(a, b), strict=True):
        assert sympy.simplify(one - other) == 0

    solve, order = batch()

    def make(norm):
        return lambda scale, eps: (
            mixed(mixture, 0.99, norm, scale, eps=eps)(solve, order).advantages
        )

    check_ratio(make("group"))
    check_ratio(make("batch"))
    fails(check_ratio, make("none"))
    # Bootstrapped α is raw α', exactly.
    for alpha in ALPHAS:
        raw = mixture.bootstrap_scales(alpha, **PAPER).raw_alpha
        close(
            mixed(mixture, alpha)(solve, order).advantages,
            mixed(mixture, alpha, scale=(raw, 1 - raw))(solve, order).advantages,
        )
    # With eps the difference is of the order of eps over the deviation, and vanishes with it.
    scale = np.array([3.548, 0.0274])
    gaps = [
        abs(make("group")(scale * 1000, eps) - make("group")(scale, eps)).max()
        for eps in (1e-2, 1e-4, 1e-6)
    ]
    assert gaps[0] > 20 * gaps[1] > 400 * gaps[2] > 0


def check_share(share):
    """Effective share of the order reward in one group, from its coefficients of variation."""
    solve, order = batch()
    for row, alpha in itertools.product(range(3, 6), ALPHAS):
        mix = mixed(mixture, alpha)
        got = mix(solve[row : row + 1], order[row : row + 1]).diagnosis
        s, o = np.std(solve[row], ddof=1) / 0.279, np.std(order[row], ddof=1) / 0.365
        assert abs(got.share_order - share(alpha, s, o)) < 1e-12
        assert abs(got.share_order + got.share_solve - 1) < 1e-12


@pytest.mark.claim("13.12", "enumeration")
def test_effective_share_follows_the_spread():
    check_share(lambda alpha, s, o: (1 - alpha) * o / (alpha * s + (1 - alpha) * o))
    fails(check_share, lambda alpha, s, o: 1 - alpha)  # the wrong version: the nominal share


def uniform_deviation(size):
    """Standard deviation of the order reward of a uniform order, by Hoeffding's formula."""
    gaps = 1 / (1 + abs(np.subtract.outer(np.arange(size), np.arange(size))))
    centred = gaps - gaps.mean(0) - gaps.mean(1, keepdims=True) + gaps.mean()
    return math.sqrt((centred**2).sum() / (size - 1)) / size


@pytest.mark.claim("13.12", "enumeration")
def test_a_nominal_half_of_a_model_without_order():
    """The chapter's example: solves 0.279, M = 9 in uniform order, by every permutation."""
    for size in range(2, 7):
        orders = np.array(list(itertools.permutations(range(size))))
        rewards = reward.order_rewards(orders, np.broadcast_to(np.arange(size), orders.shape))
        assert abs(rewards.std() - uniform_deviation(size)) < 1e-12
    solve = math.sqrt(0.279 * 0.721) / 0.279
    order = uniform_deviation(9) / reward.uniform_order_reward(9)
    assert abs(order / (solve + order) - 0.1323) < 5e-5  # nominal: one half
    assert abs(0.01 * order / (0.99 * solve + 0.01 * order) - 0.0015) < 5e-5


def check_full_weight(advantages):
    """`advantages(α, solve, order)` in a group that no sample solves does not depend on α < 1."""
    order = np.array([[0.4, 0.5, 0.45, 0.7, 0.2], [0.1, 0.3, 0.2, 0.4, 0.3]])
    truth = (order[0] - order[0].mean()) / order[0].std(ddof=1)
    second = [1.0, 0.0, 1.0, 0.0, 0.0]  # another group of the batch
    for alpha in (0.0, 0.5, 0.99, 1 - 1e-9):
        for outcome in (0.0, 1.0):
            close(advantages(alpha, [[outcome] * 5, second], order)[0], truth, 1e-6)
    assert (advantages(1.0, [[0.0] * 5, second], order)[0] == 0).all()


@pytest.mark.claim("13.13", "enumeration")
def test_constant_solve_gives_order_the_full_weight(mixture):
    def of(norm, **options):
        return lambda alpha, s, o: mixed(mixture, alpha, norm, **options)(s, o).advantages

    check_full_weight(of("group"))
    for other in ("batch", "none", "decoupled"):
        fails(check_full_weight, of(other))
    fails(check_full_weight, of("group", zero_variance="share"))
    fails(check_full_weight, of("group", zero_variance="drop"))


@pytest.mark.claim("13.13", "algebra")
def test_eps_only_moves_the_jump(mixture):
    """With eps the length is κ_O s_O / (κ_O s_O + eps): 1 until 1 - α is of the order of eps."""
    order = np.array([[0.4, 0.5, 0.4, 0.5]])
    std = order.std(ddof=1)
    for alpha in (0.5, 0.99, 0.9999, 1 - 1e-6):
        length = (1 - alpha) / 0.365 * std
        got = mixed(mixture, alpha, eps=1e-4)(np.zeros((1, 4)), order).advantages
        close(got, math.sqrt(3) / 2 * length / (length + 1e-4) * np.array([[-1, 1, -1, 1]]))


def check_linear(advantages):
    """`advantages(κ)` is κ_S · advantages(1, 0) + κ_O · advantages(0, 1), up to one factor."""
    for scale in ((1.0, 1.0), (3.548, 0.0274), (0.1, 7.0)):
        sums = scale[0] * advantages((1.0, 0.0)) + scale[1] * advantages((0.0, 1.0))
        got = advantages(scale)
        factor = (got * sums).sum() / (sums * sums).sum()
        close(got, factor * sums, 1e-9)


@pytest.mark.claim("13.14", "enumeration")
def test_without_the_groups_deviation_the_mixture_is_linear(mixture):
    solve, order = batch()

    def of(norm, first=slice(None)):
        def advantages(scale):
            alpha = scale[0] / sum(scale)
            mix = mixed(mixture, alpha, norm, scale)
            got = mix(solve[first], order[first]).advantages
            if norm == "batch":  # its one factor, so that the two pure mixtures add up
                got = got * (scale[0] * solve + scale[1] * order)[first].std(ddof=1)
            return got

        return advantages

    check_linear(of("none"))
    check_linear(of("batch"))
    fails(check_linear, of("group"))


@pytest.mark.claim("13.15", "enumeration")
def test_decoupled_shares_are_the_nominal_ones(mixture):
    solve, order = batch()
    both = slice(3, 6)  # groups in which both rewards vary

    def check_nominal(norm):
        for alpha in ALPHAS:
            got = mixed(mixture, alpha, norm)(solve[both], order[both])
            assert abs(got.diagnosis.share_solve - alpha) < 1e-12

    check_nominal("decoupled")
    for other in ("group", "batch", "none"):
        fails(check_nominal, other)
    # Any scaling of a component, also the bootstrapped one, changes nothing.
    close(
        mixed(mixture, 0.9, "decoupled")(solve * 7, order / 3).advantages,
        mixed(mixture, 0.9, "decoupled", scale=(1.0, 1.0))(solve, order).advantages,
    )


@pytest.mark.claim("13.16", "enumeration")
def test_zero_variance_options(mixture):
    check_zero_variance(mixture)


def check_zero_variance(mixture):
    solve, order = batch()
    keep = mixed(mixture, 0.9)(solve, order).advantages
    for norm in ("group", "batch", "none", "decoupled"):
        plain_norm = mixed(mixture, 0.9, norm)(solve, order).advantages
        drop = mixed(mixture, 0.9, norm, zero_variance="drop")(solve, order).advantages
        assert (drop[:2] == 0).all()
        assert (drop[2:] == plain_norm[2:]).all()
        assert plain_norm[2:].any(1).all()
    share = mixed(mixture, 0.9, zero_variance="share")(solve, order).advantages
    close(share, keep * np.array([0.1, 0.1, 0.9, 1, 1, 1])[:, None])
    # Where the solve reward has no share, it drops nothing.
    full = mixed(mixture, 0.0)(solve, order).advantages
    assert full[:2].any(1).all()
    assert (mixed(mixture, 0.0, zero_variance="drop")(solve, order).advantages == full).all()
    # "share" has no jump at α = 1, "keep" has.

    def check_no_jump(option):
        near = mixed(mixture, 1 - 1e-9, zero_variance=option)(solve, order).advantages
        close(near, mixed(mixture, 1, zero_variance=option)(solve, order).advantages, 1e-6)

    check_no_jump("share")
    check_no_jump("drop")
    fails(check_no_jump, "keep")


def check_drift(mixture):
    """The share of the mean after both means have moved by factors x and y."""
    rng = np.random.default_rng(0)
    solve, order = rng.integers(0, 2, (40, 8)).astype(float), rng.random((40, 8))
    for alpha, x, y in itertools.product((0.25, 0.5, 0.99), (1, 1.3), (1, 2.4)):
        scale = mixture.bootstrap_scales(alpha, solve.mean(), order.mean())
        share = mixture.MixedReward(alpha, scale)(x * solve, y * order).diagnosis.mean_share_solve
        assert abs(share - alpha * x / (alpha * x + (1 - alpha) * y)) < 1e-12


@pytest.mark.claim("13.17", "enumeration")
def test_fixed_scales_drift(mixture):
    check_drift(mixture)
    scale = mixture.bootstrap_scales(0.5, **PAPER)
    assert abs(scale.solve * 0.363 / (scale.solve * 0.363 + scale.order * 0.9) - 0.345) < 1e-3


# ---------------------------------------------------------------- the diagnosis


def check_diagnosis(mixture):
    solve, order = batch()
    for norm, ddof in itertools.product(NORMS, (0, 1)):
        mix = mixed(mixture, 0.9, norm, ddof=ddof)
        got, advantages = mix(solve, order).diagnosis, mix(solve, order).advantages
        assert abs(got.std_solve - np.mean([spread(r, ddof) for r in solve.tolist()])) < 1e-12
        assert abs(got.std_order - np.mean([spread(r, ddof) for r in order.tolist()])) < 1e-12
        x, y = (np.concatenate([r - r.mean() for r in rows[3:]]) for rows in (solve, order))
        assert abs(got.correlation - np.corrcoef(x, y)[0, 1]) < 1e-12
        assert (got.zero_std_solve, got.zero_std_order, got.zero_std) == (2 / 6, 1 / 6, 0)
        means = mix.scale.solve * solve.mean(), mix.scale.order * order.mean()
        assert abs(got.mean_share_solve - means[0] / sum(means)) < 1e-12
        parts = [np.sqrt((part**2).mean()) for part in mix.parts(solve, order)]
        assert abs(got.share_solve - parts[0] / sum(parts)) < 1e-12
        assert abs(got.share_order - parts[1] / sum(parts)) < 1e-12
        energy = (advantages[:2] ** 2).sum() / (advantages**2).sum()
        assert abs(got.zero_std_energy - energy) < 1e-12
        json.dumps(got._asdict(), allow_nan=False)
    # With group normalisation every group that varies has the same energy, G - 1.
    assert abs(mixed(mixture, 0.9)(solve, order).diagnosis.zero_std_energy - 2 / 6) < 1e-12


def check_half_dropped(mixture):
    """A group counts as without advantage only if none of its samples has any."""
    got = mixed(mixture, 1)([[0, 0.5, 1], [1, 1, 1]], np.ones((2, 3)))
    assert (got.advantages == 0).mean() == 4 / 6
    assert got.diagnosis.zero_std == 1 / 2


def check_undefined(mixture):
    """Where a share has no meaning it is None, not NaN."""
    got = mixed(mixture, 0.9)(np.zeros((2, 4)), np.zeros((2, 4))).diagnosis
    none = (got.correlation, got.mean_share_solve, got.share_solve, got.share_order,
            got.zero_std_energy)  # fmt: skip
    assert none == (None,) * 5
    assert got.zero_std == 1


def check_cancel(mixture):
    """Rewards that cancel leave rounding, which must not be blown up into advantages."""
    solve = np.array([[1.0, 0.0, 0.0]])
    order = np.array([[0.3, 1.0, 1.0]])
    got = mixed(mixture, 0.5, scale=(0.7, 1.0))(solve, order)
    assert (got.advantages == 0).all()
    assert got.diagnosis.zero_std == 1
    # A spread that is small beside the rewards, or beside their spreads, is not rounding.
    near = mixed(mixture, 0.5, scale=(1.0, 1.0))([[1.0, 0.0]], [[0.0, 1 + 1e-6]])
    close(near.advantages, [[-math.sqrt(0.5), math.sqrt(0.5)]], 1e-6)
    near = mixed(mixture, 0.5, scale=(1.0, 1.0))(np.ones((1, 2)), [[0.5, 0.5 + 1e-9]])
    close(near.advantages, [[-math.sqrt(0.5), math.sqrt(0.5)]], 1e-6)


def test_diagnosis(mixture):
    check_diagnosis(mixture)
    check_undefined(mixture)
    check_cancel(mixture)
    check_half_dropped(mixture)


REFUSED = [
    (ValueError, r"`alpha` must lie in \[0, 1\]", lambda m: m.bootstrap_scales(1.01, 1, 1)),
    (ValueError, r"`alpha` must lie in \[0, 1\]", lambda m: m.bootstrap_scales(-0.1, 1, 1)),
    (ValueError, "`alpha` must be finite", lambda m: m.bootstrap_scales(NAN, 1, 1)),
    (TypeError, "`alpha` must be a number", lambda m: m.bootstrap_scales("1", 1, 1)),
    (ValueError, "`mean_solve` must not be negative", lambda m: m.bootstrap_scales(0.5, -1, 1)),
    (ValueError, "`mean_order` must not be negative", lambda m: m.bootstrap_scales(1, 1, -1)),
    (ValueError, "`mean_order` must be finite", lambda m: m.bootstrap_scales(1, 1, INF)),
    (TypeError, "`scale` must be a Scales", lambda m: m.MixedReward(0.5, (1.0, 1.0))),
    (ValueError, "`scale.order` must be 0 at", lambda m: m.MixedReward(1, m.Scales(1.0, 1.0))),
    (ValueError, "`scale.solve` must be 0 at", lambda m: m.MixedReward(0, m.Scales(1.0, 1.0))),
    (ValueError, "`scale.solve` must be positive", lambda m: m.MixedReward(1, m.Scales(0.0, 0.0))),
    (ValueError, "`scale.order` must not", lambda m: m.MixedReward(0.5, m.Scales(1.0, -1.0))),
    (ValueError, "`scale.solve` must be finite", lambda m: m.MixedReward(0.5, m.Scales(INF, 1.0))),
    (ValueError, "`norm` must be one of group, batch", lambda m: mixed(m, 0.5, "std")),
    (ValueError, "`zero_variance` must be one of", lambda m: mixed(m, 0.5, zero_variance="no")),
    (ValueError, "`zero_variance` must be .* got \"share\"",
     lambda m: mixed(m, 0.5, "batch", zero_variance="share")),
    (ValueError, "`ddof` must be 0 or 1", lambda m: mixed(m, 0.5, ddof=2)),
    (ValueError, "`eps` must not be negative", lambda m: mixed(m, 0.5, eps=-1.0)),
    (ValueError, "`eps` must be finite", lambda m: mixed(m, 0.5, eps=NAN)),
    (TypeError, "`eps` must be a number", lambda m: mixed(m, 0.5, eps="0")),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "call"), REFUSED)
def test_malformed_argument_is_refused(error, words, call):
    refuses(error, words, call, mixture)


MUTANTS = [
    ("scales.append(share / mean if share", "scales.append(1 / mean if share", check_scales),
    ("if share else 0.0", "if share else 1.0", check_edges),
    ("if share and mean == 0", "if mean == 0 and share == 2", check_edges),
    ("self.solve / (self.solve + self.order)", "self.solve / self.order", check_scales),
    ("self.scale.solve * solve + self.scale.order * order", "solve + order", check_formulas),
    ('if self.norm == "decoupled" else self.scale\n', "if False else self.scale\n", check_formulas),
    ("self._deviation(own[0]), self._deviation(own[1])",
     "(self._deviation(own[0] + own[1]),) * 2", check_formulas),
    ("_center(self._mix(solve, order).reshape(1, -1))", "_center(self._mix(solve, order))[:1]",
     check_formulas),
    ("_std(centered, self.ddof) + self.eps", "_std(centered, 1) + self.eps", check_formulas),
    ("_std(centered, self.ddof) + self.eps", "_std(centered, self.ddof)", check_formulas),
    ("constant = _width(centered) <= _ROUNDING * reach", "constant = _width(centered) < -1",
     check_undefined),
    ("<= _ROUNDING * reach", "<= 0 * reach", check_cancel),
    ("_ROUNDING = 1e-12", "_ROUNDING = 1e-3", check_cancel),
    ("return unit * np.sqrt", "return np.sqrt", check_formulas),
    ("max(centered.shape[1] - ddof, 1)", "max(centered.shape[1], 1)", check_formulas),
    ("shifted - shifted.mean(1, keepdims=True)", "shifted - shifted.mean()", check_formulas),
    ("shifted = rewards - rewards.min(1, keepdims=True)", "shifted = rewards", check_cases),
    ("np.where(flat_solve, 1 - self.alpha, np", "np.where(flat_solve, self.alpha, np",
     check_zero_variance),
    ("np.where(flat_order, self.alpha, 1.0)", "1.0", check_zero_variance),
    ("flat_solve & (self.alpha > 0)", "flat_solve", check_zero_variance),
    ("flat_solve & (self.alpha > 0)", "flat_order & (self.alpha > 0)", check_zero_variance),
    ("self.alpha > 0), 0.0, 1.0)", "self.alpha > 0), 1.0, 0.0)", check_zero_variance),
    ("part[~flat_solve & ~flat_order]", "part[~flat_solve]", check_diagnosis),
    ("energy[flat_solve].sum()", "energy[~flat_solve].sum()", check_diagnosis),
    ("(advantages == 0).all(1).mean()", "(advantages == 0).mean()", check_half_dropped),
    ("np.sqrt(np.square(part).mean())", "np.abs(part).mean()", check_diagnosis),
    ("means = self.scale.solve * solve.mean(), self", "means = solve.mean(), self", check_drift),
    ("float(part / whole) if whole else None", "float(np.divide(part, whole))", check_undefined),
    ("bad = ~(np.abs(array) <= _MOST)", "bad = np.abs(array) > _MOST", check_refuses_rewards),
    ("first.shape != second.shape", "first.size == 0", check_refuses_rewards),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_mutant_is_caught(old, new, check):
    assert_caught("mathrl.mixture", old, new, check)
