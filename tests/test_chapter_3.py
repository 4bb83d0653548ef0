"""Claims of chapter 3: the torch baselines, judged by visiting every group in plain numpy."""

import functools
import itertools
import math

import numpy as np
import pytest
import sympy
import torch

from mathrl import baseline, exact
from tests.oracles import fails, refuses, softmax

PI = np.array([0.5, 0.3, 0.2])
CASES = [
    (np.log(PI), np.array([1.0, 0.0, 0.0])),
    (np.log(PI), np.array([1.0, 0.0, 0.5])),
    (np.array([0.4, -1.0, 0.3, 2.0]), np.array([-2.0, 0.7, 3.0, 0.1])),
]


def close(got, expected, tolerance=1e-10):
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@functools.cache
def groups(actions, size):
    return np.array(list(itertools.product(range(actions), repeat=size)))


def estimates(theta, rewards, advantages, size):
    """Probability and gradient estimate of every group; `advantages` sees torch tensors."""
    pi = softmax(theta)
    chosen = groups(len(pi), size)
    weights = advantages(torch.tensor(rewards[chosen])).numpy()
    scores = np.eye(len(pi)) - pi
    return pi[chosen].prod(1), (weights[..., None] * scores[chosen]).mean(1)


def mean(theta, rewards, advantages, size):
    chance, drawn = estimates(theta, rewards, advantages, size)
    return chance @ drawn


def variance(theta, rewards, advantages, size):
    chance, drawn = estimates(theta, rewards, advantages, size)
    centered = drawn - chance @ drawn
    return float(chance @ (centered**2).sum(1))


def check_unbiased(advantages, scale=lambda size: 1.0, sizes=(2, 3, 4)):
    for theta, rewards in CASES:
        pi = softmax(theta)
        slope = pi * (rewards - pi @ rewards)
        for size in sizes:
            close(mean(theta, rewards, advantages, size), scale(size) * slope)


@pytest.mark.claim("3.1", "enumeration")
def test_leave_one_out_is_unbiased():
    check_unbiased(baseline.leave_one_out)
    fails(check_unbiased, baseline.group_mean)
    fails(check_unbiased, baseline.standardized)


@pytest.mark.claim("3.2", "enumeration")
def test_the_mean_with_self_shortens_the_gradient():
    check_unbiased(baseline.group_mean, lambda size: 1 - 1 / size)
    fails(lambda: check_unbiased(baseline.group_mean, lambda size: 1 - 1 / size**2))
    rewards = torch.tensor(np.random.default_rng(0).normal(size=(5, 7)))
    close(baseline.group_mean(rewards), baseline.leave_one_out(rewards) * 6 / 7)


@pytest.mark.claim("3.2", "algebra")
def test_the_factor_symbolically():
    """Two actions, G = 3, any p and rewards: E[ĝ] = (1 - 1/3) ∇J, in both baselines' algebra."""
    p, a, b = sympy.symbols("p a b")
    rewards, chances, scores = [a, b], [p, 1 - p], [1 - p, -p]
    own, left = sympy.Integer(0), sympy.Integer(0)
    for group in itertools.product(range(2), repeat=3):
        chance = sympy.prod([chances[i] for i in group])
        total = sum(rewards[i] for i in group)
        own += chance * sum((rewards[i] - total / 3) * scores[i] for i in group) / 3
        left += chance * sum((rewards[i] - (total - rewards[i]) / 2) * scores[i] for i in group) / 3
    slope = p * (1 - p) * (a - b)
    assert sympy.expand(own - sympy.Rational(2, 3) * slope) == 0
    assert sympy.expand(left - slope) == 0


def best_of_group(rewards):
    return rewards - rewards.amax(-1, keepdim=True)


def best_of_others(rewards):
    size = rewards.shape[-1]
    columns = [[j for j in range(size) if j != i] for i in range(size)]
    return rewards - torch.stack([rewards[..., others].amax(-1) for others in columns], dim=-1)


@pytest.mark.claim("3.3", "enumeration")
def test_a_baseline_that_sees_its_own_sample_turns_the_gradient():
    theta, rewards = CASES[1]
    slope = PI * (rewards - PI @ rewards)
    for size in range(2, 7):
        drawn = mean(theta, rewards, best_of_group, size)
        cosine = drawn @ slope / np.linalg.norm(drawn) / np.linalg.norm(slope)
        assert cosine < 1 - 1e-6
        direct = mean(theta, rewards, baseline.group_mean, size)
        assert direct @ slope / np.linalg.norm(direct) / np.linalg.norm(slope) > 1 - 1e-12
    check_unbiased(best_of_others)
    fails(check_unbiased, best_of_group)


@pytest.mark.claim("3.4", "enumeration")
def test_a_mean_over_the_batch_costs_each_task_its_own_share():
    """Two tasks with two samples each; the first task's estimate, over both tasks' samples."""
    rewards = CASES[1][1]
    slope = PI * (rewards - PI @ rewards)
    other_chance, other_rewards = np.array([0.9, 0.1]), np.array([5.0, 1.0])
    scores = np.eye(3) - PI
    total, second = np.zeros(3), 0.0
    own = np.zeros(3)
    own_second = 0.0
    for group in itertools.product(range(3), repeat=2):
        for others in itertools.product(range(2), repeat=2):
            chance = PI[list(group)].prod() * other_chance[list(others)].prod()
            batch = [*rewards[list(group)], *other_rewards[list(others)]]
            drawn = sum((rewards[a] - np.mean(batch)) * scores[a] for a in group) / 2
            alone = sum((rewards[a] - rewards[list(group)].mean()) * scores[a] for a in group) / 2
            total, second = total + chance * drawn, second + chance * drawn @ drawn
            own, own_second = own + chance * alone, own_second + chance * alone @ alone
    close(total, (1 - 1 / 4) * slope)
    close(own, (1 - 1 / 2) * slope)
    assert second - total @ total > 10 * (own_second - own @ own)  # all samples count as bad


@pytest.mark.claim("3.5", "enumeration")
def test_the_constant_of_least_variance():
    for theta, rewards in CASES:
        pi = softmax(theta)
        norms = ((np.eye(len(pi)) - pi) ** 2).sum(1)
        best = (pi @ (norms * rewards)) / (pi @ norms)

        def spread(b, theta=theta, rewards=rewards):
            return variance(theta, rewards, lambda r: r - b, 1)

        grid = best + np.linspace(-1, 1, 41)
        assert spread(best) <= min(spread(b) for b in grid) + 1e-12
        assert abs(best - pi @ rewards) > 0.01
        assert spread(best) < spread(pi @ rewards)


@pytest.mark.claim("3.5", "enumeration")
def test_its_estimate_from_the_others_is_unbiased():
    for theta, rewards in CASES:
        pi = softmax(theta)
        norms = ((np.eye(len(pi)) - pi) ** 2).sum(1)
        for size in (2, 3):
            weights = torch.tensor(norms[groups(len(pi), size)])
            drawn = mean(theta, rewards, lambda r, w=weights: baseline.optimal(r, w), size)
            close(drawn, pi * (rewards - pi @ rewards))


@pytest.mark.claim("3.6", "enumeration")
def test_a_baseline_can_raise_the_variance():
    theta, rewards = CASES[0]
    expected = {4: (0.02375, 0.03583), 8: (0.01188, 0.01196), 16: (0.00594, 0.00479)}
    for size, pair in expected.items():
        got = [
            exact.binary_moments(theta, rewards, advantages, size).variance
            for advantages in (lambda r: r, lambda r: baseline.leave_one_out(torch.tensor(r)))
        ]
        close(got, pair, 6e-6)
    close(variance(theta, rewards, lambda r: r, 4), 0.02375, 1e-10)
    close(variance(theta, rewards, baseline.leave_one_out, 4), 0.03583, 5e-6)


@pytest.mark.claim("3.7", "enumeration")
def test_binomial_conditioning_agrees_with_visiting_every_group():
    rewards = np.array([1.0, 0.0, 0.0])
    for theta in (np.log(PI), np.array([-1.0, 2.0, 0.3])):
        for advantages in (baseline.leave_one_out, baseline.standardized, lambda r: r):
            for size in (2, 5, 8):
                chance, drawn = estimates(theta, rewards, advantages, size)
                centered = drawn - chance @ drawn
                short = exact.binary_moments(
                    theta, rewards, lambda r, a=advantages: a(torch.tensor(r)).numpy(), size
                )
                close(short.mean, chance @ drawn, 1e-12)
                close(short.covariance, (chance * centered.T) @ centered, 1e-12)


def expected_factor(p, size):
    """E[s]/(p(1-p)) from the definition, summing over all outcomes of the group."""
    total = 0.0
    for outcome in itertools.product((0, 1), repeat=size):
        chance = math.prod(p if won else 1 - p for won in outcome)
        total += chance * np.std(outcome)
    return total / (p * (1 - p))


@pytest.mark.claim("3.8", "enumeration")
def test_what_dividing_by_the_deviation_does():
    for p in (0.01, 0.3, 0.5, 0.95):
        theta = np.log([p, (1 - p) * 0.7, (1 - p) * 0.3])
        rewards = np.array([1.0, 0.0, 0.0])
        slope = softmax(theta) * (rewards - p)
        assert exact.std_factor(p, 2) == pytest.approx(1, abs=1e-12)
        for size in (2, 4, 8):
            factor = exact.std_factor(p, size)
            close(factor, expected_factor(p, size))
            close(mean(theta, rewards, baseline.standardized, size), factor * slope)
        limit = 1 / math.sqrt(p * (1 - p))
        gaps = [limit - exact.std_factor(p, size) for size in (64, 256, 1024)]
        assert gaps[0] > gaps[1] > gaps[2] > 0
        assert gaps[2] < 0.014 * limit
    assert round(exact.std_factor(0.01, 8), 4) == 2.6089


@pytest.mark.claim("3.9", "algebra")
def test_the_objective_of_large_groups():
    p = sympy.symbols("p", positive=True)
    slope = sympy.diff(2 * sympy.asin(sympy.sqrt(p)), p)
    assert sympy.simplify(slope - 1 / sympy.sqrt(p * (1 - p))) == 0
    assert sympy.simplify(sympy.diff(sympy.asin(sympy.sqrt(p)), p) - slope) != 0


@pytest.mark.claim("3.10", "enumeration")
def test_standardising_reweights_tasks():
    for p, factor in ((0.05, 2.313), (0.5, 1.736)):
        theta, rewards = np.log([p, 1 - p]), np.array([1.0, 0.0])
        slope = p * (1 - p)
        sample = functools.partial(baseline.standardized, ddof=1)
        close(mean(theta, rewards, sample, 8)[0] / slope, factor, 5e-4)
        close(mean(theta, rewards, baseline.leave_one_out, 8)[0] / slope, 1)
    assert round(2.313 / 1.736, 2) == 1.33


@pytest.mark.claim("3.11", "algebra")
def test_ddof():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    close(baseline.standardized(rewards)[0], math.sqrt(3))
    close(baseline.standardized(rewards, ddof=1)[0], 1.5)
    rewards = torch.tensor(np.random.default_rng(1).normal(size=(4, 6)))
    ratio = baseline.standardized(rewards, ddof=1) / baseline.standardized(rewards)
    close(ratio, math.sqrt(5 / 6))
    close(baseline.standardized(rewards, ddof=1), (
        (rewards - rewards.mean(-1, keepdim=True)) / rewards.std(-1, keepdim=True)
    ))  # fmt: skip


BASELINES = [
    baseline.group_mean,
    baseline.leave_one_out,
    baseline.standardized,
    functools.partial(baseline.standardized, ddof=1, eps=1e-8),
    baseline.batch_standardized,
    lambda rewards: baseline.optimal(rewards, torch.ones_like(rewards)),
]


def check_equal_rewards(advantages):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for value in (0.0, 0.7, -1e-3, 1e4, 1 / 3):
            for size in (2, 7, 8, 64):
                assert (advantages(torch.full((size,), value, dtype=dtype)) == 0).all()


@pytest.mark.claim("3.12", "enumeration")
def test_equal_rewards_give_exactly_zero():
    for advantages in BASELINES:
        check_equal_rewards(advantages)

    def wrong(rewards, eps=1e-8):
        return (rewards - rewards.mean()) / (rewards.std() + eps)

    fails(check_equal_rewards, wrong)
    rewards = torch.full((8,), 0.7)
    for eps, shown, digits in ((1e-8, 0.809, 1e-3), (1e-6, 0.056, 1e-3), (1e-4, 0.0006, 1e-4)):
        close(wrong(rewards, eps).abs().max(), shown, digits)


@pytest.mark.claim("3.13", "enumeration")
def test_silent_groups():
    for p, size in ((0.01, 8), (0.4, 5)):
        silent = sum(
            math.prod(p if won else 1 - p for won in group)
            for group in itertools.product((0, 1), repeat=size)
            if len(set(group)) == 1
        )
        close(silent, (1 - p) ** size + p**size)
    outcomes = torch.tensor(list(itertools.product((0.0, 1.0), repeat=5)))
    equal = outcomes.amax(-1) == outcomes.amin(-1)
    for advantages in (*BASELINES[:4], BASELINES[5]):
        weights = advantages(outcomes)
        assert (weights[equal] == 0).all()
        assert (weights[~equal].abs().amax(-1) > 0).all()


@pytest.mark.claim("3.14", "enumeration")
def test_groups_that_cannot_be_judged_are_errors():
    refuses(ValueError, "each group needs at least 2 rewards",
            baseline.leave_one_out, torch.tensor([[1.0], [0.0]]))  # fmt: skip
    for bad in (math.nan, math.inf, -math.inf):
        for advantages in BASELINES:
            refuses(ValueError, "`rewards` must be finite", advantages, torch.tensor([1.0, bad]))


@pytest.mark.claim("3.15", "enumeration")
def test_padding_enters_no_statistic():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])

    def check_padding(advantages):
        for filler in (0.0, 7.0, math.nan):
            rewards = torch.full((2, 4), filler)
            rewards[0, :2], rewards[1, 0] = 1.0, -1.0
            got = advantages(rewards, mask=mask)
            close(got[mask.bool()], [0.7071, 0.7071, -1.4142], 1e-4)
            assert (got[~mask.bool()] == 0).all()

    def wrong(rewards, mask):
        centered = rewards - (rewards * mask).mean()
        return centered / ((centered.square() * mask).sum() / mask.sum()).sqrt() * mask

    check_padding(baseline.batch_standardized)
    fails(check_padding, wrong)
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    close(wrong(rewards, mask)[[0, 1], [0, 0]], [0.906, -1.165], 1e-3)


@pytest.mark.claim("3.16", "algebra")
def test_variances_are_of_centred_values():
    rewards = torch.tensor([1000.1, 1000.2, 1000.3, 1000.4])

    def check_deviation(advantages):
        got = advantages(rewards)
        close((got[3] - got[0]) / 0.3, 1 / 0.1291, 2e-2)

    def wrong(rewards):
        variance = (rewards.square().mean() - rewards.mean().square()) * 4 / 3
        return (rewards - rewards.mean()) / variance.clamp(min=1e-6).sqrt()

    check_deviation(functools.partial(baseline.standardized, ddof=1))
    fails(check_deviation, wrong)


def returns_minus_values(rewards, values, gamma):
    """The discounted return by its recursion, from the end, minus the value."""
    after, advantages = values[-1], []
    for reward, value in zip(rewards[::-1], values[-2::-1], strict=True):
        after = reward + gamma * after
        advantages.insert(0, after - value)
    return advantages


def check_gae(gae):
    rng = np.random.default_rng(0)
    for _ in range(5):
        rewards, values = rng.normal(size=6), rng.normal(size=7)
        arguments = torch.tensor(rewards), torch.tensor(values)
        for gamma in (0.0, 0.9, 1.0):
            close(gae(*arguments, gamma=gamma), returns_minus_values(rewards, values, gamma))
            one_step = rewards + gamma * values[1:] - values[:-1]
            close(gae(*arguments, gamma=gamma, lam=0.0), one_step)
            mixed = [0.0] * 7
            for step in reversed(range(6)):
                mixed[step] = one_step[step] + gamma * 0.5 * mixed[step + 1]
            close(gae(*arguments, gamma=gamma, lam=0.5), mixed[:6])


def wrong_gae(rewards, values, *, gamma=1.0, lam=1.0):
    delta = rewards + values[1:] - values[:-1]
    return torch.stack(
        [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))]
    )


@pytest.mark.claim("3.17", "enumeration")
def test_generalised_advantages():
    check_gae(baseline.gae)
    fails(check_gae, wrong_gae)
    rewards, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 4.0, 3.0, 0.0])
    close(baseline.gae(rewards, values, gamma=0.9)[0], 1 + 0.9 * 2 + 0.81 * 3 - 5, 1e-6)
    close(wrong_gae(rewards, values, gamma=0.9)[0], 0.90, 1e-6)
    one = torch.ones(1)
    close(baseline.gae(one, torch.tensor([10.0, 10.0]), gamma=0.99), [0.9], 1e-6)
    close(baseline.gae(one, torch.tensor([10.0, 0.0]), gamma=0.99), [-9.0], 1e-6)
    refuses(ValueError, "`values` has shape .* with one more step", baseline.gae, rewards, rewards)
    refuses(ValueError, r"`lam` must lie in \[0, 1\], got 2", baseline.gae, rewards, values, lam=2)
