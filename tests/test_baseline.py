"""Advantages against loops over fractions, their gradients against every group of `exact`."""

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch.autograd import grad, gradcheck

from mathrl import baseline, exact
from tests.mutants import assert_caught
from tests.oracles import fails, refuses, softmax

INF, NAN = math.inf, math.nan
PI = np.array([0.5, 0.3, 0.2])
BASE = np.log(PI), np.array([1.0, 0.0, 0.0])  # the base case of the field's reports
BINARY = [BASE, (np.array([0.3, -1.0, 0.8, 0.1]), np.array([2.0, -1.0, 2.0, -1.0]))]
CASES = [
    *BINARY,
    (np.array([0.2, -0.1, 0.4]), np.array([1.0, 0.0, 0.5])),
    (np.array([0.4, -1.0, 2.0]), np.array([-2.0, 0.7, 3.0])),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(name="baseline")
def true_module():
    return baseline


def close(got, expected, tolerance=1e-10):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    expected = np.asarray(expected, dtype=float)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def rows(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).normal(size=shape))


def all_baselines(baseline):
    return {
        "group_mean": baseline.group_mean,
        "leave_one_out": baseline.leave_one_out,
        "standardized": baseline.standardized,
        "standardized, ddof 1": functools.partial(baseline.standardized, ddof=1, eps=1e-8),
        "batch_standardized": baseline.batch_standardized,
        "optimal": lambda r, **k: baseline.optimal(r, torch.ones_like(r), **k),
    }


# Values, by loops over one group of fractions


def plain_group_mean(group):
    return [r - sum(group) / len(group) for r in group]


def plain_leave_one_out(group):
    others = [group[:i] + group[i + 1 :] for i in range(len(group))]
    return [r - sum(rest) / len(rest) for r, rest in zip(group, others, strict=True)]


def plain_standardized(group, ddof=0, eps=0.0):
    centered = plain_group_mean(group)
    if not any(centered):
        return [0.0] * len(group)
    deviation = math.sqrt(sum(c * c for c in centered) / (len(group) - ddof))
    return [float(c) / (deviation + eps) for c in centered]


def plain_optimal(group, weights):
    found = []
    for i, r in enumerate(group):
        others = [j for j in range(len(group)) if j != i]
        total = sum(weights[j] for j in others)
        found.append(r - sum(weights[j] * group[j] for j in others) / total)
    return found


def each(rewards, plain):
    """`plain` on every row, in fractions of what the tensor holds."""
    table = rewards.reshape(-1, rewards.shape[-1]).tolist()
    found = [[float(x) for x in plain([Fraction(r) for r in row])] for row in table]
    return np.array(found).reshape(rewards.shape)


def check_values(baseline):
    for shape in ((5,), (3, 2), (2, 3, 4)):
        rewards = rows(*shape) * 3 + 1
        close(baseline.group_mean(rewards), each(rewards, plain_group_mean))
        close(baseline.leave_one_out(rewards), each(rewards, plain_leave_one_out))
        for ddof, eps in ((0, 0.0), (1, 0.0), (0, 0.3), (1, 1e-4)):
            plain = functools.partial(plain_standardized, ddof=ddof, eps=eps)
            close(baseline.standardized(rewards, ddof=ddof, eps=eps), each(rewards, plain))
            flat = each(rewards.flatten(), plain).reshape(shape)
            close(baseline.batch_standardized(rewards, ddof=ddof, eps=eps), flat)
        weights = rows(*shape, seed=1).abs()
        pairs = zip(
            rewards.reshape(-1, shape[-1]).tolist(),
            weights.reshape(-1, shape[-1]).tolist(),
            strict=True,
        )
        expected = np.array([plain_optimal(*pair) for pair in pairs]).reshape(shape)
        close(baseline.optimal(rewards, weights), expected)


def test_values(baseline):
    check_values(baseline)


# Expected gradients, by visiting every group


def as_numpy(advantages):
    return lambda rewards: advantages(torch.tensor(rewards)).numpy()


def check_expected(advantages, factor, sizes=(2, 3, 4, 5), cases=CASES):
    for theta, rewards in cases:
        for size in sizes:
            got = exact.group_moments(theta, rewards, as_numpy(advantages), size).mean
            close(got, factor(theta, rewards, size) * exact.gradient(theta, rewards))


def one(theta, rewards, size):
    return 1.0


def shrunk(theta, rewards, size):
    return 1 - 1 / size


def test_leave_one_out_is_unbiased(baseline):
    check_expected(baseline.leave_one_out, one)
    fails(check_expected, baseline.group_mean, one)
    fails(check_expected, baseline.standardized, one)


def test_the_mean_with_self_shortens_the_gradient(baseline):
    """The field's numbers: first component .125 for n = 2, .1875 for n = 4; leave-one-out .25."""
    check_expected(baseline.group_mean, shrunk)
    fails(check_expected, baseline.leave_one_out, shrunk)
    for size, component in ((2, 0.125), (4, 0.1875)):
        wrong = exact.group_moments(*BASE, as_numpy(baseline.group_mean), size).mean
        close(wrong[0], component)
        right = exact.group_moments(*BASE, as_numpy(baseline.leave_one_out), size).mean
        close(right[0], 0.25)


def success(theta, rewards):
    return softmax(theta)[rewards == rewards.max()].sum()


def check_factor_of_the_deviation(baseline):
    """`E[ĝ] = c ∇p` for two values of the reward, whichever two; 2.313 at p = .05, 1.736 at .5."""
    for ddof in (0, 1):
        for theta, rewards in BINARY:
            for size in (2, 3, 6, 16):
                factor = exact.std_factor(success(theta, rewards), size, ddof)
                advantages = as_numpy(functools.partial(baseline.standardized, ddof=ddof))
                got = exact.binary_moments(theta, rewards, advantages, size).mean
                won = (rewards == rewards.max()).astype(float)
                close(got, factor * exact.gradient(theta, won))
    for p, shown in ((0.05, 2.313), (0.5, 1.736)):
        theta, rewards = np.log([p, 1 - p]), np.array([1.0, 0.0])
        slope = exact.gradient(theta, rewards)
        for advantages, factor in (
            (functools.partial(baseline.standardized, ddof=1), shown),
            (baseline.leave_one_out, 1.0),
        ):
            got = exact.group_moments(theta, rewards, as_numpy(advantages), 8).mean
            close(got / slope, [factor, factor], 5e-4)


def test_dividing_by_the_deviation_reweights_tasks(baseline):
    check_factor_of_the_deviation(baseline)


def by_loops(theta, rewards, advantages, size):
    """Mean of ĝ over all groups, with advantages of one list at a time."""
    pi, total = softmax(theta), np.zeros(len(theta))
    for group in itertools.product(range(len(theta)), repeat=size):
        weights = advantages([Fraction(rewards[a]) for a in group])
        drawn = sum(
            float(w) * (np.eye(len(pi))[a] - pi) for w, a in zip(weights, group, strict=True)
        )
        total += pi[list(group)].prod() * drawn / size
    return total


def test_standardised_advantages_of_more_than_two_rewards(baseline):
    """There the direction turns too: no factor makes it the gradient."""
    for theta, rewards in CASES[2:]:
        for size, ddof in ((2, 0), (3, 1), (4, 0)):
            advantages = functools.partial(baseline.standardized, ddof=ddof)
            got = exact.group_moments(theta, rewards, as_numpy(advantages), size).mean
            plain = functools.partial(plain_standardized, ddof=ddof)
            close(got, by_loops(theta, rewards, plain, size))
        slope = exact.gradient(theta, rewards)
        assert got @ slope / np.linalg.norm(got) / np.linalg.norm(slope) < 1 - 1e-4


def check_batch_of_two_tasks(baseline):
    """Three samples of a hard task and three of an easy one: what the first task's gradient is."""
    (theta, rewards), other = CASES[2], CASES[3]
    pi, other_pi = softmax(theta), softmax(other[0])
    scores, groups = np.eye(3) - pi, list(itertools.product(range(3), repeat=3))
    batch = [
        (a, b, np.stack([rewards[list(a)], other[1][list(b)]])) for a in groups for b in groups
    ]
    expected, got = np.zeros(3), np.zeros(3)
    for a, b, table in batch:
        chance = pi[list(a)].prod() * other_pi[list(b)].prod()
        weights = plain_standardized([Fraction(r) for r in table.ravel()])[:3]
        expected += chance * np.array(weights) @ scores[list(a)] / 3
        advantages = baseline.batch_standardized(torch.tensor(table)).numpy()
        got += chance * advantages[0] @ scores[list(a)] / 3
    close(got, expected)
    return got


def test_expected_gradient_over_a_batch(baseline):
    """With a factor that depends on the policies of all tasks; the wrong axis is another one."""
    check_batch_of_two_tasks(baseline)

    class Wrong:  # each task by its own deviation
        batch_standardized = staticmethod(baseline.standardized)

    fails(check_batch_of_two_tasks, Wrong)


def check_optimal(baseline):
    """Unbiased whatever the weights, here functions of the action that was drawn."""
    for theta, rewards in CASES:
        pi = softmax(theta)
        norms = ((np.eye(len(pi)) - pi) ** 2).sum(1)
        for weights in (norms, np.arange(1.0, len(pi) + 1)):

            def estimator(actions, rewards=rewards, weights=weights, pi=pi):
                advantages = baseline.optimal(
                    torch.tensor(rewards[actions]), torch.tensor(weights[actions])
                ).numpy()
                scores = np.eye(len(pi))[actions] - pi
                return (advantages[..., None] * scores).mean(1)

            for size in (2, 3, 4):
                got = exact.moments(theta, estimator, size).mean
                close(got, exact.gradient(theta, rewards))


def test_a_weighted_mean_of_the_others_is_unbiased(baseline):
    check_optimal(baseline)

    class Wrong:  # the sample's own reward is in its baseline
        @staticmethod
        def optimal(rewards, weights):
            mean = (weights * rewards).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
            return rewards - mean

    fails(check_optimal, Wrong)
    rewards = rows(4, 5)
    equal = torch.full((4, 5), 0.3, dtype=torch.float64)
    close(baseline.optimal(rewards, equal), baseline.leave_one_out(rewards))


def test_its_estimate_tends_to_the_constant_of_least_variance(baseline):
    theta, rewards = CASES[2]
    pi = softmax(theta)
    norms = ((np.eye(3) - pi) ** 2).sum(1)
    best = (pi @ (norms * rewards)) / (pi @ norms)
    counts = (1e4 * pi).astype(int)
    drawn = torch.tensor(np.repeat(np.arange(3), counts))
    values = torch.tensor(rewards)[drawn]
    got = values - baseline.optimal(values, torch.tensor(norms)[drawn])
    assert (got - best).abs().max() < 1e-3
    assert abs(best - pi @ rewards) > 1e-2


def test_a_baseline_need_not_reduce_the_variance(baseline):
    """Trace variance without baseline and with leave-one-out: less, as good, and more."""
    for size, bare, left in ((4, 0.02375, 0.03583), (8, 0.01188, 0.01196), (16, 0.00594, 0.00479)):
        got = [
            exact.binary_moments(*BASE, advantages, size).variance
            for advantages in (lambda r: r, as_numpy(baseline.leave_one_out))
        ]
        close(got, [bare, left], 6e-6)


# The numbers of the field's reports


def check_deviations(advantages):
    """(1,0,0,0): 1.7321 with ddof 0 and 1.5 with ddof 1. Rewards near 1000: deviation .1291."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    close(advantages(rewards), [math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)
    close(advantages(rewards, ddof=1), [1.5, -0.5, -0.5, -0.5])
    # float32 holds 1000.1 to 3e-5, a part in 4000 of the deviation.
    high = torch.tensor([1000.1, 1000.2, 1000.3, 1000.4])
    got = advantages(high, ddof=1)
    close((high[3] - high[0]) / (got[3] - got[0]), 0.1291, 1e-4)
    close(advantages(torch.arange(1.0, 5.0), ddof=1)[0], -1.1619, 5e-5)


def wrong_ddof(rewards, ddof=0):
    return baseline.standardized(rewards, ddof=1 - ddof)


def wrong_one_pass_variance(rewards, ddof=0):
    size = rewards.shape[-1]
    variance = rewards.square().mean() - rewards.mean().square()
    deviation = (variance.clamp(min=1e-6) * size / (size - ddof)).sqrt()
    return (rewards - rewards.mean()) / deviation


def wrong_precedence(rewards, ddof=0):
    return rewards - rewards.mean() / rewards.std(correction=ddof)


def test_what_standardising_means(baseline):
    check_deviations(baseline.standardized)
    for wrong in (wrong_ddof, wrong_one_pass_variance, wrong_precedence):
        fails(check_deviations, wrong)
    close(wrong_precedence(torch.arange(1.0, 5.0), ddof=1)[0], -0.9365, 5e-5)
    high = torch.tensor([1000.1, 1000.2, 1000.3, 1000.4])
    got = wrong_one_pass_variance(high)
    assert abs((high[3] - high[0]) / (got[3] - got[0]) - 0.1291) > 0.1


def check_equal_rewards(advantages):
    for dtype in DTYPES:
        for value in (0.0, 0.7, -1e-3, 1e4, 1 / 3, 6e4):
            for size in (2, 3, 7, 8, 64):
                rewards = torch.full((2, size), value, dtype=dtype)
                assert (advantages(rewards) == 0).all(), (dtype, value, size)


def wrong_naive(rewards, eps=1e-8):
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + eps)


def test_equal_rewards_give_exactly_zero(baseline):
    """.7 eight times in float32: advantage .809 at eps 1e-8, .056 at 1e-6, .0006 at 1e-4."""
    for advantages in all_baselines(baseline).values():
        check_equal_rewards(advantages)
    fails(check_equal_rewards, wrong_naive)
    rewards = torch.full((8,), 0.7)
    for eps, shown, digits in ((1e-8, 0.809, 1e-3), (1e-6, 0.056, 1e-3), (1e-4, 0.0006, 1e-4)):
        close(wrong_naive(rewards, eps).abs().max(), shown, digits)


def check_padding_whitened(advantages):
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    got = advantages(rewards, mask=mask)
    close(got[mask.bool()], [0.7071, 0.7071, -1.4142], 5e-5)


def wrong_padding_counted(rewards, mask):
    centered = rewards - (rewards * mask).mean()
    return centered / ((centered.square() * mask).sum() / mask.sum()).sqrt() * mask


def test_padding_enters_no_statistic_of_the_batch(baseline):
    """.707/-1.414 over valid entries; with padding in the mean .906/-1.165."""
    check_padding_whitened(baseline.batch_standardized)
    fails(check_padding_whitened, wrong_padding_counted)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    close(wrong_padding_counted(rewards, mask)[[0, 1], [0, 0]], [0.906, -1.165], 1e-3)


# Groups of unequal size, extreme rewards, types


def check_padding(baseline):
    """Whatever the padding holds, a group is what it would be alone; the padding gets 0."""
    lengths, true = (2, 5, 3), rows(3, 5)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    weights = rows(3, 5, seed=1).abs()
    for filler in (0.0, 9.0, NAN, INF, -INF):
        rewards = true.masked_fill(~mask, filler)
        for advantages in (
            baseline.group_mean,
            baseline.leave_one_out,
            baseline.standardized,
            functools.partial(baseline.standardized, ddof=1),
        ):
            got = advantages(rewards, mask=mask)
            assert (got[~mask] == 0).all()
            for row, length in enumerate(lengths):
                close(got[row, :length], advantages(true[row, :length]))
            close(advantages(rewards, mask=mask.to(torch.int64)), got)
        got = baseline.optimal(rewards, weights.masked_fill(~mask, filler), mask=mask)
        assert (got[~mask] == 0).all()
        for row, length in enumerate(lengths):
            close(got[row, :length], baseline.optimal(true[row, :length], weights[row, :length]))
        got = baseline.batch_standardized(rewards, mask=mask)
        assert (got[~mask] == 0).all()
        close(got[mask], baseline.standardized(true[mask]))


def test_padding(baseline):
    check_padding(baseline)


def test_an_equal_group_beside_others(baseline):
    rewards = torch.tensor([[0.7] * 4, [0.7, 0.7, 0.7, 0.8], [0.0] * 4])
    for name, advantages in all_baselines(baseline).items():
        if name != "batch_standardized":
            got = advantages(rewards)
            assert (got[[0, 2]] == 0).all()
            assert (got[1] != 0).all()


def check_extremes(baseline):
    """The smallest and the largest deviations: the same advantages at every scale."""
    for dtype, scales in (
        (torch.float32, (1e-38, 1e-30, 1.0, 1e30, 1e37)),
        (torch.float64, (1e-300, 1e-160, 1.0, 1e200)),
    ):
        for scale in scales:
            rewards = torch.tensor([scale, 0.0, 0.0, 0.0], dtype=dtype)
            close(baseline.standardized(rewards)[0], math.sqrt(3), 1e-5)
            assert torch.isfinite(baseline.leave_one_out(rewards)).all()


def test_standardised_advantages_do_not_depend_on_the_scale(baseline):
    check_extremes(baseline)
    rewards = rows(3, 6)
    close(baseline.standardized(rewards * 3.7 + 11), baseline.standardized(rewards), 1e-9)
    refuses(ValueError, "`rewards` of a group must not lie so far apart",
            baseline.standardized, torch.tensor([3e38, -3e38]))  # fmt: skip


def test_the_order_of_a_group_does_not_matter(baseline):
    rewards, order = rows(4, 6), torch.tensor([3, 0, 5, 1, 4, 2])
    for advantages in all_baselines(baseline).values():
        close(advantages(rewards[:, order]), advantages(rewards)[:, order])
        close(advantages(rewards).sum(), 0.0)


def test_a_group_of_one(baseline):
    alone = torch.tensor([[0.7], [3.0]])
    for advantages in (baseline.group_mean, baseline.standardized):
        assert (advantages(alone) == 0).all()
    assert (baseline.standardized(alone, ddof=1) == 0).all()
    words = r"each group needs at least 2 rewards, got 1 at index \(0, 0\)"
    refuses(ValueError, words, baseline.leave_one_out, alone)
    refuses(ValueError, words, baseline.optimal, alone, torch.ones(2, 1))
    refuses(ValueError, r"at least 2 rewards, got 1 at index \(1, 0\)", baseline.leave_one_out,
            torch.ones(2, 3), mask=torch.tensor([[1, 1, 0], [0, 1, 0]]))  # fmt: skip


def test_types(baseline):
    for advantages in all_baselines(baseline).values():
        for dtype in DTYPES:
            rewards = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=dtype)
            expected = dtype if dtype == torch.float64 else torch.float32
            assert advantages(rewards).dtype == expected
            close(advantages(rewards).double(), advantages(rewards.double()), 1e-6)


def test_a_mask_costs_no_digits(baseline):
    """A quotient of two integer tensors is float32, which 1/3 in float64 would not survive."""
    rewards = rows(2, 4)
    for advantages in all_baselines(baseline).values():
        close(advantages(rewards, mask=torch.ones(2, 4)), advantages(rewards), 1e-15)
    close(baseline.leave_one_out(rewards), each(rewards, plain_leave_one_out), 1e-15)


def test_gradients_in_the_rewards(baseline):
    rewards = rows(2, 4).requires_grad_()
    for advantages in all_baselines(baseline).values():
        assert gradcheck(advantages, rewards)
    equal = torch.full((2, 4), 0.7, requires_grad=True)
    for advantages in all_baselines(baseline).values():
        (slope,) = grad(advantages(equal).square().sum() + advantages(equal)[0, 0], equal)
        assert torch.isfinite(slope).all()


# A critic


STEPS = [np.array([0.3, -0.2]), np.array([[0.5, 0.1, -0.4], [-0.3, 0.8, 0.2]])]
PAYS = np.random.default_rng(3).normal(size=(2, 3))
EARLY = np.array([0.4, -0.7])  # a reward for the first choice
TOTAL = EARLY[:, None] + PAYS
AFTER = (softmax(STEPS[1][0]) @ PAYS[0], softmax(STEPS[1][1]) @ PAYS[1])
TRUE_VALUES = softmax(STEPS[0]) @ (EARLY + np.array(AFTER)), *AFTER


def expected_gradient(advantages, values, **shares):
    """Gradient of the two steps: `E Σ_t A_t ∇log π(a_t)` over the six trajectories."""
    first, second = softmax(STEPS[0]), [softmax(row) for row in STEPS[1]]
    slopes = [np.zeros(2), np.zeros((2, 3))]
    for a, b in itertools.product(range(2), range(3)):
        critic = torch.tensor([values[0], values[1 + a], 0.0], dtype=torch.float64)
        rewards = torch.tensor([EARLY[a], PAYS[a, b]])
        early, late = advantages(rewards, critic, **shares).tolist()
        chance = first[a] * second[a][b]
        slopes[0] += chance * early * (np.eye(2)[a] - first)
        slopes[1][a] += chance * late * (np.eye(3)[b] - second[a])
    return slopes


def check_critic(advantages, values, **shares):
    slopes = expected_gradient(advantages, values, **shares)
    for got, expected in zip(slopes, exact.tree_gradient(STEPS, TOTAL), strict=True):
        close(got, expected)


def wrong_gae_without_gamma_in_delta(rewards, values, gamma=1.0, lam=1.0):
    delta = rewards + values[1:] - values[:-1]
    length = range(len(delta))
    return torch.stack(
        [sum((gamma * lam) ** (k - t) * delta[k] for k in length if k >= t) for t in length]
    )


def check_definition(advantages):
    """The double sum of the paper, term by term."""
    for length in (1, 2, 6):
        rewards, values = rows(2, length), rows(2, length + 1, seed=1)
        for gamma, lam in ((1.0, 1.0), (0.9, 1.0), (0.9, 0.0), (0.7, 0.8), (0.0, 0.5)):
            expected = np.zeros((2, length))
            for row, t in itertools.product(range(2), range(length)):
                for k in range(length - t):
                    v, now = values[row], t + k
                    delta = rewards[row, now] + gamma * v[now + 1] - v[now]
                    expected[row, t] += (gamma * lam) ** k * float(delta)
            got = torch.stack(
                [
                    advantages(r, v, gamma=gamma, lam=lam)
                    for r, v in zip(rewards, values, strict=True)
                ]
            )
            close(got, expected)


def check_gae(baseline):
    check_definition(baseline.gae)
    rewards, values = rows(2, 3, 5), rows(2, 3, 6, seed=1)
    got = baseline.gae(rewards, values, gamma=0.9, lam=0.5)
    close(got[1, 2], baseline.gae(rewards[1, 2], values[1, 2], gamma=0.9, lam=0.5))
    assert baseline.gae(rewards.float(), values.float()).dtype == torch.float32


def test_generalised_advantages(baseline):
    """γ = .9, r = 1,2,3, V = 5,4,3,0: .23, and .90 if γ is left out of δ."""
    check_gae(baseline)
    fails(check_definition, wrong_gae_without_gamma_in_delta)
    rewards, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 4.0, 3.0, 0.0])
    close(baseline.gae(rewards, values, gamma=0.9)[0], 0.23, 1e-6)
    close(wrong_gae_without_gamma_in_delta(rewards, values, gamma=0.9)[0], 0.90, 1e-6)


def test_an_episode_cut_off_is_not_ended(baseline):
    """V = 10 before and after, r = 1, γ = .99: δ = .9; as if it had ended, -9."""
    reward = torch.ones(1)

    def check_cut_off(after):
        close(baseline.gae(reward, torch.tensor([10.0, after]), gamma=0.99), [0.9], 1e-6)

    check_cut_off(10.0)
    fails(check_cut_off, 0.0)
    close(baseline.gae(reward, torch.tensor([10.0, 0.0]), gamma=0.99), [-9.0], 1e-6)


def test_expected_gradient_with_a_critic(baseline):
    """At λ = 1 any critic is unbiased, at λ = 0 the true values are and others are not."""
    poor = (0.3, -2.0, 5.0)
    check_critic(baseline.gae, poor, lam=1.0)
    for lam in (0.0, 0.5, 1.0):
        check_critic(baseline.gae, TRUE_VALUES, lam=lam)
    fails(lambda: check_critic(baseline.gae, poor, lam=0.0))


def test_long_episodes(baseline):
    """A sequence of 20,000 tokens, whose matrix of decays would hold 3 GB."""
    rewards, values = torch.zeros(20_000, dtype=torch.float64), torch.zeros(20_001)
    rewards[-1] = 1.0
    got = baseline.gae(rewards, values.double(), gamma=1.0, lam=0.999)
    close(got[0], 0.999**19_999, 1e-12)
    close(got[-1], 1.0)


# Refusals


def test_bad_rewards_are_refused(baseline):
    for name, advantages in all_baselines(baseline).items():
        for bad in (NAN, INF, -INF):
            refuses(ValueError, r"`rewards` must be finite, got .* at index \(1",
                    advantages, torch.tensor([1.0, bad]))  # fmt: skip
        refuses(TypeError, "`rewards` must have a floating-point type, got torch.int64",
                advantages, torch.tensor([1, 0]))  # fmt: skip
        refuses(TypeError, "`rewards` must have a floating-point type, got torch.bool",
                advantages, torch.tensor([True, False]))  # fmt: skip
        refuses(ValueError, r"`rewards` must have shape \(..., G\), got \(\)",
                advantages, torch.tensor(1.0))  # fmt: skip
        refuses(ValueError, r"`mask` has shape \(2,\), expected \(2, 2\), the shape of `rewards`",
                advantages, torch.ones(2, 2), mask=torch.ones(2))  # fmt: skip
        refuses(ValueError, "`mask` must hold only 0 and 1, got 0.5",
                advantages, torch.ones(2), mask=torch.full((2,), 0.5))  # fmt: skip
        refuses(ValueError, "each group needs at least", advantages, torch.ones(2, 0))
        if name != "batch_standardized":
            refuses(ValueError, r"each group needs at least . rewards, got 0 at index \(1, 0\)",
                    advantages, torch.ones(2, 2), mask=torch.tensor([[1, 1], [0, 0]]))  # fmt: skip
    refuses(ValueError, "at least 1 rewards, got 0", baseline.batch_standardized,
            torch.ones(2, 2), mask=torch.zeros(2, 2))  # fmt: skip
    refuses(TypeError, "must be a torch.Tensor, got list", baseline.batch_standardized, [1.0, 0.0])
    refuses(TypeError, "must be a torch.Tensor, got list", baseline.group_mean, [1.0, 0.0])


def test_bad_settings_are_refused(baseline):
    rewards = torch.tensor([1.0, 0.0, 0.5])
    for advantages in (baseline.standardized, baseline.batch_standardized):
        refuses(ValueError, "`ddof` must be 0 or 1, got 2", advantages, rewards, ddof=2)
        for eps in (-1e-8, INF, NAN):
            refuses(ValueError, "`eps` must be finite and not neg", advantages, rewards, eps=eps)
    refuses(ValueError, r"`squared_norms` has shape \(2,\)", baseline.optimal, rewards, rewards[:2])
    refuses(TypeError, "`squared_norms` must have a floating-point type",
            baseline.optimal, rewards, torch.ones(3, dtype=torch.int64))  # fmt: skip
    refuses(ValueError, r"`squared_norms` must not be negative, got -1.0 at index \(1,\)",
            baseline.optimal, rewards, torch.tensor([1.0, -1.0, 1.0]))  # fmt: skip
    refuses(ValueError, "`squared_norms` must be finite",
            baseline.optimal, rewards, torch.tensor([1.0, NAN, 1.0]))  # fmt: skip
    refuses(ValueError, "`squared_norms` must give the others of a sample weight",
            baseline.optimal, rewards, torch.tensor([1.0, 0.0, 0.0]))  # fmt: skip


def test_bad_trajectories_are_refused(baseline):
    rewards, values = torch.zeros(2, 3), torch.zeros(2, 4)
    refuses(ValueError, r"`values` has shape \(2, 3\), expected .* \(2, 3\), with one more step",
            baseline.gae, rewards, rewards)  # fmt: skip
    refuses(ValueError, "`values` has shape", baseline.gae, rewards, values[:1])
    refuses(ValueError, r"`rewards` must have shape \(..., T\), T at least 1, got \(2, 0\)",
            baseline.gae, rewards[:, :0], values[:, :1])  # fmt: skip
    refuses(ValueError, "T at least 1", baseline.gae, rewards[0, 0], values[0, :2])
    refuses(TypeError, "`rewards` must be float32 or float64, got torch.bfloat16",
            baseline.gae, rewards.bfloat16(), values)  # fmt: skip
    refuses(ValueError, "`values` must be finite", baseline.gae, rewards, values * NAN)
    for name, share in itertools.product(("gamma", "lam"), (-0.1, 1.1, NAN)):
        refuses(ValueError, rf"`{name}` must lie in \[0, 1\]",
                baseline.gae, rewards, values, **{name: share})  # fmt: skip


# Mutants


def check_equal(baseline):
    for advantages in all_baselines(baseline).values():
        check_equal_rewards(advantages)


def check_leave_one_out(baseline):
    check_expected(baseline.leave_one_out, one, (2, 3))


def check_standardized(baseline):
    check_deviations(baseline.standardized)


MUTANTS = [
    ("return centered * count / (count - 1)", "return centered * (count - 1) / count",
     check_leave_one_out),
    ("return centered * count / (count - 1)", "return centered", check_leave_one_out),
    ("return centered * count / (count - 1)", "return centered * (count / (count - 1))",
     test_a_mask_costs_no_digits),
    ("mean = total / count", "mean = total / rewards.shape[-1]", check_padding),
    ("mean = total / count", "mean = shifted.amax(-1, keepdim=True)",
     test_the_mean_with_self_shortens_the_gradient),
    ("mean = total / count", "mean = total.mean() / count", check_values),
    ("shifted = (rewards - lowest).masked_fill(~keep, 0.0)",
     "shifted = rewards.masked_fill(~keep, 0.0)", check_equal),
    ("return (shifted - mean).masked_fill(~keep, 0.0), count", "return shifted - mean, count",
     check_padding),
    ("return (shifted - mean).masked_fill(~keep, 0.0), count",
     "return (mean - shifted).masked_fill(~keep, 0.0), count", check_values),
    ("rewards = rewards.float()", "pass", test_types),
    ('    _checks.reject(total == math.inf, total, "`rewards`', '    (total, "`rewards`',
     test_standardised_advantages_do_not_depend_on_the_scale),
    ("_checks.finite(rewards=rewards.masked_fill(~keep, 0.0))", "pass",
     test_bad_rewards_are_refused),
    ("/ (count - ddof).clamp(min=1)", "/ count", check_standardized),
    ("/ (count - ddof).clamp(min=1)", "/ (rewards.shape[-1] - ddof)", check_padding),
    ("variance = (centered / unit).square()", "variance = (centered / unit).abs()",
     check_standardized),
    ("deviation = unit * torch.where", "deviation = torch.where", check_standardized),
    ("unit = torch.where(width > 0, width, 1.0)", "unit = torch.ones_like(width)", check_extremes),
    ("return centered / (deviation + eps)", "return centered / deviation", check_values),
    ("return centered / (deviation + eps)", "return centered / (deviation**2 + eps)",
     check_factor_of_the_deviation),
    ("torch.where(width > 0, variance, 1.0).sqrt()", "variance.sqrt()",
     test_gradients_in_the_rewards),
    ("flat = standardized(rewards.flatten(), ddof=ddof, eps=eps, mask=mask)",
     "flat = group_mean(rewards.flatten(), mask=mask)", check_batch_of_two_tasks),
    ("ddof=ddof, eps=eps, mask=mask)\n    return flat", "eps=eps, mask=mask)\n    return flat",
     check_values),
    ("others = 1.0 - torch.eye(rewards", "others = 1.0 + 0.0 * torch.eye(rewards",
     check_optimal),
    ("(centered - (weights * centered) @ others / total)",
     "(centered - centered @ others / total)", check_optimal),
    ("(centered - (weights * centered) @ others / total)",
     "(centered - (weights * centered).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True))",
     check_optimal),
    ("weights = squared_norms.to(centered.dtype).masked_fill(~keep, 0.0)",
     "weights = squared_norms.to(centered.dtype).masked_fill(~keep, 1.0)", check_padding),
    ("delta = rewards + gamma * values[..., 1:]", "delta = rewards + values[..., 1:]", check_gae),
    ("delta = rewards + gamma * values[..., 1:] - values[..., :-1]",
     "delta = rewards + gamma * values[..., 1:] + values[..., :-1]", check_gae),
    ("step + gamma * lam * advantages[-1]", "step + gamma * advantages[-1]", check_gae),
    ("torch.stack(advantages[::-1], dim=-1)", "torch.stack(advantages, dim=-1)", check_gae),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.baseline", old, new, check)
