import itertools
import math

import numpy as np
import pytest
import torch
from torch.autograd import grad, gradcheck

from mathrl import exact, objective
from tests.mutants import assert_caught
from tests.oracles import fails, gradient, refuses, softmax

THETA, OLD = np.array([0.9, -0.4, 0.1]), np.array([-0.3, 0.5, 0.1])
ADVANTAGES = np.array([1.0, -2.0, 0.7])
SIGNS = [np.array([1.0, -2.0, 0.7]), np.array([-1.0, 0.5, -3.0])]
LOW, HIGH = 0.2, 0.3


@pytest.fixture(name="objective")
def true_module():
    return objective


def close(got, expected, tolerance=1e-10):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else got
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def expected_gradient(loss, theta, old=OLD, advantages=ADVANTAGES):
    """Gradient of the expected loss over one action drawn from `old`, each action by autograd."""
    slope = np.zeros(3)
    for action, chance in enumerate(softmax(old)):
        logits = torch.tensor(theta, requires_grad=True)
        log_prob = logits.log_softmax(-1)[action].reshape(1, 1)
        old_log_prob = torch.tensor(old).log_softmax(-1)[action].reshape(1, 1)
        advantage = torch.tensor([[advantages[action]]])
        slope += chance * grad(loss(log_prob, old_log_prob, advantage).sum(), logits)[0].numpy()
    return slope


def weighted_scores(weights, theta, old=OLD, advantages=ADVANTAGES):
    """`-Σ_a old(a) weight(ρ_a, A_a) A_a ∇log π(a)`, by the definition."""
    pi, drawn = softmax(theta), softmax(old)
    factor = [weights(r, a) for r, a in zip(pi / drawn, advantages, strict=True)]
    return -(drawn * factor * advantages) @ (np.eye(3) - pi)


def kept_by_ppo(ratio, advantage):
    gone = ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW
    return 0.0 if gone else ratio


def kept_by_dual(ratio, advantage, ceiling=1.5):
    return 0.0 if advantage < 0 and ratio > ceiling else kept_by_ppo(ratio, advantage)


SPREAD = [
    THETA,
    OLD,
    OLD + np.array([0.3, 0.0, 0.0]),
    np.array([2.0, -1.0, 0.3]),
    np.array([-2.0, 2.5, 0.0]),
]


def test_ratio(objective):
    pi, old = softmax(THETA), softmax(OLD)
    log_probs, old_log_probs = torch.tensor(np.log(pi)), torch.tensor(np.log(old))
    ratios = objective.ratio(log_probs, old_log_probs)
    close(ratios, pi / old)
    close(old @ (ratios.numpy() * ADVANTAGES), pi @ ADVANTAGES)
    assert (objective.ratio(log_probs, log_probs) == 1).all()


def test_reinforce_on_policy_descends_the_exact_gradient(objective):
    for theta in SPREAD:
        slope = expected_gradient(lambda lp, _, a: objective.reinforce(lp, a), theta, old=theta)
        close(slope, -exact.gradient(theta, ADVANTAGES))


def check_ppo(objective):
    assert sum(kept_by_ppo(*pair) == 0 for pair in every_pair()) > 4
    for theta, advantages in itertools.product(SPREAD, SIGNS):
        slope = expected_gradient(
            lambda *x: objective.ppo_clip(*x, clip_low=LOW, clip_high=HIGH),
            theta,
            advantages=advantages,
        )
        close(slope, weighted_scores(kept_by_ppo, theta, advantages=advantages))


def every_pair():
    for theta, advantages in itertools.product(SPREAD, SIGNS):
        yield from zip(softmax(theta) / softmax(OLD), advantages, strict=True)


def wrong_clip_before_the_advantage(lp, old_lp, a):
    return -(lp - old_lp).exp().clamp(1 - LOW, 1 + HIGH) * a


@pytest.mark.claim("2.11", "autograd")
def test_expected_gradient_of_ppo_clip(objective):
    check_ppo(objective)
    value = wrong_clip_before_the_advantage(torch.tensor(3.0).log(), torch.tensor(0.0), -1.0)
    close(value, 1.3, 1e-6)

    def check(loss):
        for theta, advantages in itertools.product(SPREAD, SIGNS):
            slope = expected_gradient(loss, theta, advantages=advantages)
            close(slope, weighted_scores(kept_by_ppo, theta, advantages=advantages))

    fails(check, wrong_clip_before_the_advantage)


@pytest.mark.claim("2.12", "algebra")
def test_ratio_3_and_advantage_minus_1(objective):
    """Right: the objective is -3. Clipped before multiplying it is -1.2."""
    three, zero, down = torch.tensor([[3.0]]).log(), torch.zeros(1, 1), -torch.ones(1, 1)
    close(-objective.ppo_clip(three, zero, down), [[-3.0]], 1e-6)
    close(three.exp().clamp(0.8, 1.2) * down, [[-1.2]], 1e-6)


@pytest.mark.claim("2.11", "autograd")
def test_at_ratio_1_every_objective_is_reinforce(objective):
    mask = torch.ones(1, 1)
    for name in ("ppo_clip", "dual_clip", "cispo", "gspo"):
        extra = (mask,) if name == "gspo" else ()
        slope = expected_gradient(
            lambda *x, n=name, e=extra: getattr(objective, n)(*x, *e), THETA, old=THETA
        )
        close(slope, -exact.gradient(THETA, ADVANTAGES))


@pytest.mark.claim("2.13", "autograd")
def test_expected_gradient_of_dual_clip(objective):
    assert any(kept_by_dual(*pair) != kept_by_ppo(*pair) for pair in every_pair())
    for theta, advantages in itertools.product(SPREAD, SIGNS):
        slope = expected_gradient(
            lambda *x: objective.dual_clip(*x, clip_low=LOW, clip_high=HIGH, ceiling=1.5),
            theta,
            advantages=advantages,
        )
        close(slope, weighted_scores(kept_by_dual, theta, advantages=advantages))
    five, zero = torch.tensor([[5.0]]).log(), torch.zeros(1, 1)
    close(objective.dual_clip(five, zero, -torch.ones(1, 1)), [[3.0]], 1e-6)
    close(objective.dual_clip(five, zero, torch.ones(1, 1)), [[-1.2]], 1e-6)


@pytest.mark.claim("2.14", "autograd")
def test_expected_gradient_of_cispo(objective):
    for theta, advantages in itertools.product(SPREAD, SIGNS):
        slope = expected_gradient(
            lambda *x: objective.cispo(*x, clip_low=LOW, clip_high=HIGH),
            theta,
            advantages=advantages,
        )
        expected = weighted_scores(
            lambda r, _: np.clip(r, 1 - LOW, 1 + HIGH), theta, advantages=advantages
        )
        close(slope, expected)
    far = torch.tensor([[9.0]]).log().requires_grad_()
    (slope,) = grad(objective.cispo(far, torch.zeros(1, 1), torch.ones(1, 1)).sum(), far)
    close(slope, [[-1.2]], 1e-6)


# Two tokens of one policy: nine sequences

PAIRS = list(itertools.product(range(3), repeat=2))
SEQUENCE_ADVANTAGES = np.random.default_rng(0).normal(size=9)


def sequence_gradient(loss, theta, mask=(1.0, 1.0)):
    slope = np.zeros(3)
    keep = torch.tensor([mask])
    for (a, b), advantage in zip(PAIRS, SEQUENCE_ADVANTAGES, strict=True):
        logits = torch.tensor(theta, requires_grad=True)
        log_probs = logits.log_softmax(-1)[[a, b]].reshape(1, 2)
        old = torch.tensor(OLD).log_softmax(-1)[[a, b]].reshape(1, 2)
        per_token = loss(log_probs, old, torch.full((1, 2), advantage, dtype=torch.float64), keep)
        total = objective.aggregate(per_token, keep, "sequence_mean_token_mean", 1)
        chance = softmax(OLD)[a] * softmax(OLD)[b]
        slope += chance * grad(total, logits)[0].numpy()
    return slope


def sequence_objective(theta, low, high):
    """The paper's objective over the nine sequences, negated; branches on real parts."""
    total = 0
    for (a, b), advantage in zip(PAIRS, SEQUENCE_ADVANTAGES, strict=True):
        pi, old = softmax(theta), softmax(OLD)
        mean = (pi[a] * pi[b] / old[a] / old[b]) ** 0.5
        gone = mean.real > 1 + high if advantage > 0 else mean.real < 1 - low
        if not gone:
            total -= old[a] * old[b] * mean * advantage
    return total


@pytest.mark.claim("2.15", "autograd")
def test_expected_gradient_of_gspo(objective):
    for theta, low, high in itertools.product(SPREAD, (0.1, 1.0), (0.1, 50.0)):
        slope = sequence_gradient(
            lambda *x, lo=low, hi=high: objective.gspo(*x, clip_low=lo, clip_high=hi), theta
        )
        close(slope, gradient(lambda t, lo=low, hi=high: sequence_objective(t, lo, hi), theta))


def test_gspo_averages_over_trained_tokens_only(objective):
    """With the second token masked, a sequence is its first token."""
    first = sequence_gradient(
        lambda *x: objective.gspo(*x, clip_low=LOW, clip_high=HIGH), THETA, (1.0, 0.0)
    )
    second = sequence_gradient(
        lambda lp, old, a, m: objective.ppo_clip(lp, old, a, clip_low=LOW, clip_high=HIGH),
        THETA,
        (1.0, 0.0),
    )
    close(first, second)


def test_each_token_of_gspo_carries_its_own_gradient(objective):
    log_probs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.5, -2.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -3.0]], dtype=torch.float64)
    loss = objective.gspo(log_probs, old, advantages, torch.ones(1, 2), clip_high=1.0)
    shared = math.exp(0.5)
    close(grad(loss[0, 0], log_probs, retain_graph=True)[0], [[-shared, 0.0]])
    close(grad(loss[0, 1], log_probs)[0], [[0.0, 3 * shared]])


@pytest.mark.claim("2.15", "enumeration")
def test_a_geometric_mean_is_no_importance_weight(objective):
    """old .5/.5, new .8/.2, reward for 00 only: .40 by the geometric mean, .64 by the product."""
    old, new = np.array([0.5, 0.5]), np.array([0.8, 0.2])
    rewards = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 0.0}

    def check(weight):
        value = sum(
            old[a] * old[b] * weight(new[a] / old[a] * new[b] / old[b]) * reward
            for (a, b), reward in rewards.items()
        )
        close(value, new[0] ** 2)

    check(lambda product: product)
    fails(check, math.sqrt)
    close(old[0] ** 2 * math.sqrt((new[0] / old[0]) ** 2), 0.40)
    log_probs, old_log_probs = torch.tensor([[0.8, 0.8]]).log(), torch.tensor([[0.5, 0.5]]).log()
    one = torch.ones(1, 2)
    close(-objective.gspo(log_probs, old_log_probs, one, one, clip_high=9.0), 1.6 * one, 1e-6)


@pytest.mark.claim("2.12", "enumeration")
def test_clip_fraction_knows_the_sign_of_the_advantage(objective):
    """Ratios (1.5,1.5,.5,.5), advantages (1,-1,1,-1): .5. Without the sign 1.0."""
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    zero, mask = torch.zeros_like(ratios), torch.ones_like(ratios)

    def check(fraction):
        close(fraction(ratios.log(), zero, advantages, mask), 0.5)

    def wrong(log_probs, old, advantages, mask):
        return ((log_probs - old).exp() - 1).abs().gt(0.2).double().mean()

    check(objective.clip_fraction)
    fails(check, wrong)
    close(wrong(ratios.log(), zero, advantages, mask), 1.0)
    half = torch.tensor([[1, 1, 0, 0]])
    close(objective.clip_fraction(ratios.log(), zero, advantages, half), 0.5)
    close(objective.clip_fraction(ratios.log(), zero, advantages, 1 - half), 0.5)
    close(objective.clip_fraction(ratios.log(), zero, advantages * 0, mask), 0.0)
    close(objective.clip_fraction(ratios.log(), zero, -advantages, half), 0.5)
    tight = {"clip_low": 0.6, "clip_high": 0.6}
    close(objective.clip_fraction(ratios.log(), zero, advantages, mask, **tight), 0.0)


def test_clip_fraction_counts_the_gradients_that_ppo_clip_removes(objective):
    generator = torch.Generator().manual_seed(0)
    log_probs, old, advantages = (
        torch.randn(4, 50, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mask = torch.rand(4, 50, generator=generator) < 0.7
    log_probs.requires_grad_()
    (slope,) = grad(objective.ppo_clip(log_probs, old, advantages).sum(), log_probs)
    close(
        objective.clip_fraction(log_probs, old, advantages, mask),
        (slope[mask] == 0).double().mean(),
    )


@pytest.mark.claim("2.16", "autograd")
def test_a_loss_of_zero_is_not_a_gradient_of_zero(objective):
    """Two actions, advantages 1 and -1, ratio 1: loss 0, gradient (-.5, .5)."""
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1).reshape(1, 2)
    advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    per_token = objective.ppo_clip(log_probs, log_probs.detach(), advantages)
    loss = objective.aggregate(per_token, torch.ones(1, 2), "token_mean", 2)
    assert loss.item() == 0.0
    (slope,) = grad(loss, logits)
    close(slope, [-0.5, 0.5])

    def wrong_check_of_the_value():  # "loss 0 means no learning"
        close(slope, [0.0, 0.0])

    fails(wrong_check_of_the_value)


def test_dropout_makes_the_first_ratio_differ_from_1(objective):
    """Sampled without dropout and scored with it: two policies. In evaluation it is exactly 1."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1))
    states, actions = torch.randn(5, 4), torch.arange(5)[:, None]

    def log_probs(training):
        return network.train(training)(states).log_softmax(-1).gather(-1, actions)

    def check_first_ratio(training):
        assert (objective.ratio(log_probs(training), log_probs(False).detach()) == 1).all()

    check_first_ratio(False)
    fails(check_first_ratio, True)


def test_clipping_at_the_edge_keeps_the_first_gradient(objective):
    """Bounds of 0: at ratio 1 nothing is outside, and the whole gradient is there."""
    log_probs = torch.full((1, 2), -1.0, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0, -3.0]], dtype=torch.float64)
    bounds, mask = {"clip_low": 0.0, "clip_high": 0.0}, torch.ones(1, 2)
    for loss in (objective.ppo_clip, objective.dual_clip):
        (slope,) = grad(loss(log_probs, log_probs.detach(), advantages, **bounds).sum(), log_probs)
        close(slope, -advantages)
    close(objective.clip_fraction(log_probs, log_probs.detach(), advantages, mask, **bounds), 0.0)


# Sequences of one or two tokens: the first action may end them

STEPS = [np.array([0.3, -0.2, 0.6]), np.array([[0.5, 0.1], [-0.3, 0.8], [0.0, -np.inf]])]
OLD_STEPS = [np.array([0.1, 0.4, 0.2]), np.array([[-0.2, 0.3], [0.6, 0.0], [0.0, -np.inf]])]
PAYS = np.array([[1.0, -0.5], [0.3, 2.0], [0.7, 0.0]])
ENDS = 2  # the first action after which nothing is chosen


def sequences(loss, mode, denominator, steps, old_steps, filler=0.0):
    """Expected gradient over whole sequences drawn from `old_steps`, in the logits of `steps`."""
    slopes = [np.zeros(3), np.zeros((3, 2))]
    for a, b in itertools.product(range(3), range(2)):
        chance = softmax(old_steps[0])[a] * softmax(old_steps[1][a])[b]
        if chance == 0:
            continue
        logits = [torch.tensor(step, requires_grad=True) for step in steps]
        both = logits[0].log_softmax(-1)[a], logits[1][a].log_softmax(-1)[b]
        old = [np.log(softmax(old_steps[0])[a]), np.log(softmax(old_steps[1][a])[b])]
        mask = torch.tensor([[1, int(a != ENDS)]])
        log_probs = torch.stack(both).reshape(1, 2).masked_fill(mask == 0, filler)
        old_log_probs = torch.tensor([old]).masked_fill(mask == 0, filler)
        advantages = torch.full((1, 2), PAYS[a, b], dtype=torch.float64)
        per_token = loss(log_probs, old_log_probs, advantages, mask)
        total = objective.aggregate(per_token, mask, mode, denominator)
        for slope, part in zip(slopes, grad(total, logits), strict=True):
            slope += chance * part.numpy()
    return slopes


def check_sequences(objective, mode, denominator, filler=0.0):
    """At ratio 1 every objective descends the gradient of a whole sequence's expected reward."""
    expected = exact.tree_gradient(STEPS, PAYS)
    for loss in (
        lambda lp, old, a, m: objective.reinforce(lp, a, mask=m),
        lambda lp, old, a, m: objective.ppo_clip(lp, old, a, mask=m),
        lambda lp, old, a, m: objective.dual_clip(lp, old, a, mask=m),
        lambda lp, old, a, m: objective.cispo(lp, old, a, mask=m),
        lambda lp, old, a, m: objective.gspo(lp, old, a, m),
    ):
        got = sequences(loss, mode, denominator, STEPS, STEPS, filler)
        for own, other in zip(got, expected, strict=True):
            close(own * denominator, -other)


def check_padded_sequences(objective):
    for filler in (0.0, math.nan, math.inf, -math.inf):
        check_sequences(objective, "sequence_mean_token_sum", 1, filler)


def test_expected_gradient_over_sequences_of_unequal_length(objective):
    """Sums over tokens are the policy gradient; a mean per sequence is another direction."""
    check_padded_sequences(objective)
    check_sequences(objective, "constant", 7)
    fails(check_sequences, objective, "sequence_mean_token_mean", 1)


def test_off_policy_sequences(objective):
    """Per-token ratios drop the ratios of the other tokens: not importance sampling either."""

    def per_sequence(lp, old, advantages, mask):
        log_ratio = (lp - old).masked_fill(mask == 0, 0.0)
        # one ratio for the whole sequence, counted once
        return -log_ratio.sum().exp() * advantages * torch.tensor([[1.0, 0.0]])

    def check_importance_sampling(loss):
        got = sequences(loss, "sequence_mean_token_sum", 1, STEPS, OLD_STEPS)
        for own, other in zip(got, exact.tree_gradient(STEPS, PAYS), strict=True):
            close(own, -other)

    check_importance_sampling(per_sequence)
    wide = {"clip_low": 1.0, "clip_high": 99.0}
    fails(check_importance_sampling, lambda *x: objective.ppo_clip(*x[:3], mask=x[3], **wide))
    fails(check_importance_sampling, lambda *x: objective.gspo(*x, **wide))


def wrong_mask_after_the_product(lp, advantages, mask):
    return -advantages * lp * mask


def check_masked(loss, names=3):
    """Whatever is masked, the rest is what it was, and the masked gradient is exactly 0."""
    generator = torch.Generator().manual_seed(4)
    true = [0.3 * torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(names)]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])

    def result(filler):
        inputs = [x.masked_fill(mask == 0, filler) for x in true]
        inputs[0].requires_grad_()
        value = loss(*inputs, mask)
        return value, grad(value.sum(), inputs[0])[0]

    expected, slope = result(0.0)
    for filler in (5.0, -1e4, math.nan, math.inf, -math.inf):
        value, other = result(filler)
        assert (value == expected).all(), (value, expected)
        assert (other == slope).all()
        assert (value[mask == 0] == 0).all()
        assert (other[mask == 0] == 0).all()


def check_every_mask(objective):
    check_masked(lambda lp, a, m: objective.reinforce(lp, a, mask=m), 2)
    for name in ("ppo_clip", "dual_clip", "cispo"):
        check_masked(lambda *x, n=name: getattr(objective, n)(*x[:3], mask=x[3]))
    check_masked(lambda *x: objective.gspo(*x, clip_low=0.5, clip_high=0.5))


def test_masked_positions_enter_neither_value_nor_gradient(objective):
    check_every_mask(objective)
    fails(check_masked, wrong_mask_after_the_product, 2)
    lp, mask = torch.tensor([[0.0, math.nan]]), torch.tensor([[1, 0]])
    fraction = objective.clip_fraction(lp, lp, -torch.ones(1, 2), mask)
    assert fraction.item() == 0.0
    ratios = torch.tensor([[0.5, math.inf]]).log()
    assert objective.clip_fraction(ratios, 0 * mask.float(), -torch.ones(1, 2), mask).item() == 1.0


# Aggregation

MODES = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")


def batch():
    generator = torch.Generator().manual_seed(1)
    loss = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([2, 9, 1, 5, 8, 3])
    return loss, torch.arange(9) < lengths[:, None]


def by_hand(loss, mask, mode):
    rows = [
        [float(x) for x, m in zip(*pair, strict=True) if m] for pair in zip(loss, mask, strict=True)
    ]
    tokens = sum(map(len, rows))
    if mode == "token_mean":
        return sum(map(sum, rows)) / tokens
    if mode == "sequence_mean_token_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / (len(rows) if mode == "sequence_mean_token_sum" else 54)


def whole(objective, mask, mode):
    return 54 if mode == "constant" else objective.denominator(mask, mode)


def check_modes(objective):
    loss, mask = batch()
    for mode in MODES:
        got = objective.aggregate(loss, mask, mode, whole(objective, mask, mode))
        close(got, by_hand(loss, mask, mode))


def test_each_mode_is_its_definition(objective):
    check_modes(objective)


def check_micro_batches(objective, split=None):
    loss, mask = batch()
    for mode in MODES:
        logits = loss.clone().requires_grad_()
        over = whole(objective, mask, mode)
        (expected,) = grad(objective.aggregate(logits.exp(), mask, mode, over), logits)
        for sizes in ([6], [1, 5], [2, 2, 2], [1] * 6):
            parts = zip(logits.split(sizes), mask.split(sizes), strict=True)
            if split is None:
                total = sum(objective.aggregate(x.exp(), m, mode, over) for x, m in parts)
            else:
                total = split(objective, [(x.exp(), m) for x, m in parts], mode)
            close(grad(total, logits)[0], expected)


def wrong_mean_of_means(objective, parts, mode):
    means = [objective.aggregate(x, m, mode, whole(objective, m, mode)) for x, m in parts]
    return sum(means) / len(means)


@pytest.mark.claim("2.18", "autograd")
def test_micro_batches_change_nothing(objective):
    check_micro_batches(objective)
    fails(check_micro_batches, objective, wrong_mean_of_means)


@pytest.mark.claim("2.18", "algebra")
def test_mean_of_micro_batch_means(objective):
    """Lengths 2 and 8, losses 1 and 2: right 1.8, the mean of the means is 1.5."""
    mask = torch.arange(8) < torch.tensor([[2], [8]])
    loss = torch.tensor([[1.0], [2.0]], dtype=torch.float64).expand(2, 8)
    parts = list(zip(loss.split(1), mask.split(1), strict=True))
    over = objective.denominator(mask, "token_mean")
    assert over == 10
    close(sum(objective.aggregate(x, m, "token_mean", over) for x, m in parts), 1.8)
    close(wrong_mean_of_means(objective, parts, "token_mean"), 1.5)


@pytest.mark.claim("2.17", "autograd")
def test_the_weight_of_a_token_in_a_long_answer(objective):
    """Mean per sequence: tokens of answers of length 10 and 100 weigh .05 and .005."""
    mask = torch.arange(100) < torch.tensor([[10], [100]])
    for mode, weights in [
        ("sequence_mean_token_mean", (0.05, 0.005)),
        ("token_mean", (1 / 110, 1 / 110)),
        ("sequence_mean_token_sum", (0.5, 0.5)),
    ]:
        loss = torch.zeros(2, 100, dtype=torch.float64, requires_grad=True)
        (slope,) = grad(
            objective.aggregate(loss, mask, mode, objective.denominator(mask, mode)), loss
        )
        close(slope[[0, 1], [0, 0]], weights)
        assert (slope[~mask] == 0).all()


def test_padding_changes_nothing(objective):
    loss, mask = batch()
    for filler in (0.0, 1e9, math.nan, math.inf):
        padded = torch.cat([loss.masked_fill(~mask, filler), torch.full((6, 3), filler)], dim=1)
        wider = torch.cat([mask, torch.zeros(6, 3, dtype=torch.bool)], dim=1)
        for mode in MODES:
            over = whole(objective, wider, mode)
            close(objective.aggregate(padded, wider, mode, over), by_hand(loss, mask, mode))


# Numerics, refusals, mutants


def test_autograd_agrees_with_finite_differences(objective):
    generator = torch.Generator().manual_seed(2)
    log_probs, old, advantages = (
        torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    log_probs.requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    for loss in (
        lambda x: objective.reinforce(x, advantages),
        lambda x: objective.ppo_clip(x, old, advantages),
        lambda x: objective.dual_clip(x, old, advantages),
    ):
        assert gradcheck(loss, log_probs)
    for mode in MODES:
        assert gradcheck(lambda x, m=mode: objective.aggregate(x, mask, m, 7), log_probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_type_is_kept(dtype, objective):
    log_probs, one = torch.full((2, 3), -1.0, dtype=dtype), torch.ones(2, 3, dtype=dtype)
    assert objective.reinforce(log_probs, one).dtype == dtype
    for name in ("ppo_clip", "dual_clip", "cispo"):
        assert getattr(objective, name)(log_probs, log_probs, one).dtype == dtype
    assert objective.gspo(log_probs, log_probs, one, one).dtype == dtype


def test_bad_input_is_refused(objective):
    lp, one = torch.zeros(2, 3), torch.ones(2, 3)
    for loss in (objective.ppo_clip, objective.dual_clip, objective.cispo):
        refuses(ValueError, r"`old_log_probs` has shape \(2, 1\), expected \(2, 3\)",
                loss, lp, lp[:, :1], one)  # fmt: skip
        refuses(ValueError, r"`advantages` has shape \(2,\), expected", loss, lp, lp, one[:, 0])
        refuses(ValueError, "`advantages` must not require a gradient",
                loss, lp, lp, one.clone().requires_grad_())  # fmt: skip
        refuses(ValueError, "`log_probs` must be finite, got -inf", loss, lp - math.inf, lp, one)
        refuses(TypeError, "`log_probs` must be float32 or float64, got torch.bfloat16",
                loss, lp.bfloat16(), lp, one)  # fmt: skip
        refuses(ValueError, r"`clip_low` must lie in \[0, 1\], got 1.5",
                loss, lp, lp, one, clip_low=1.5)  # fmt: skip
        refuses(ValueError, "`clip_high` must be finite and at least 0, got -0.1",
                loss, lp, lp, one, clip_high=-0.1)  # fmt: skip
        refuses(ValueError, "`ratio` must be finite, got inf", loss, lp, lp - 1e4, one)
        refuses(ValueError, r"`mask` has shape \(1, 3\), expected \(2, 3\), the shape of `log_prob",
                loss, lp, lp, one, mask=one[:1])  # fmt: skip
        refuses(ValueError, "`mask` must hold only 0 and 1", loss, lp, lp, one, mask=one * 0.5)
        refuses(ValueError, "`old_log_probs` must be finite, got nan",
                loss, lp, lp * math.nan, one, mask=one)  # fmt: skip
    refuses(ValueError, "`ceiling` must be finite and greater than 1, got 1.0",
            objective.dual_clip, lp, lp, one, ceiling=1.0)  # fmt: skip
    refuses(ValueError, "`advantages` has shape", objective.reinforce, lp, one[:1])
    refuses(ValueError, "`mask` must hold only 0 and 1", objective.reinforce, lp, one, mask=2 * one)
    for call in (objective.gspo, objective.clip_fraction):
        refuses(ValueError, "`mask` has shape .* the shape of `log_probs`",
                call, lp, lp, one, one[:1])  # fmt: skip
        refuses(ValueError, "`log_probs` must be finite", call, lp - math.inf, lp, one, one)
        refuses(ValueError, "`advantages` must not require a gradient",
                call, lp, lp, one.clone().requires_grad_(), one)  # fmt: skip
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        refuses(TypeError, "`loss` must be float32 or float64",
                objective.aggregate, one.to(dtype), one, "token_mean", 6)  # fmt: skip
    for call in (
        lambda mask: objective.gspo(lp, lp, one, mask),
        lambda mask: objective.clip_fraction(lp, lp, one, mask),
        lambda mask: objective.aggregate(lp, mask, "token_mean", 3),
        lambda mask: objective.denominator(mask, "token_mean"),
    ):
        refuses(ValueError, r"at least one token in each row, got 0 at index \(1,\)",
                call, torch.tensor([[1, 1, 1], [0, 0, 0]]))  # fmt: skip
        refuses(ValueError, "`mask` must hold only 0 and 1", call, one * 0.5)
    refuses(ValueError, "`mask` has shape .* the shape of `loss`",
            objective.aggregate, lp, one[:1], "token_mean", 3)  # fmt: skip
    refuses(ValueError, r"`mask` must have shape \(B, T\), got \(3,\)",
            objective.aggregate, lp[0], one[0], "token_mean", 3)  # fmt: skip
    refuses(ValueError, "`mode` must be one of", objective.aggregate, lp, one, "mean", 3)
    refuses(ValueError, "`denominator` must be positive and finite, got 0",
            objective.aggregate, lp, one, "constant", 0)  # fmt: skip
    refuses(ValueError, "no denominator to count", objective.denominator, one, "constant")


MUTANTS = [
    ("return -advantages * log_probs\n", "return advantages * log_probs\n",
     test_reinforce_on_policy_descends_the_exact_gradient),
    ("value = (log_probs - old_log_probs).exp()", "value = (old_log_probs - log_probs).exp()",
     test_ratio),
    ("return torch.minimum(", "return torch.maximum(", check_ppo),
    ("value.clamp(1 - low, 1 + high) * advantages)", "value.clamp(1 - high, 1 + low) * advantages)",
     check_ppo),
    ("torch.minimum(value * advantages, value.clamp(1 - low, 1 + high) * advantages)",
     "value.clamp(1 - low, 1 + high) * advantages", check_ppo),
    ("torch.minimum(value * advantages, value.clamp(1 - low, 1 + high) * advantages)",
     "value * advantages", check_ppo),
    ("torch.maximum(clipped, ceiling", "torch.minimum(clipped, ceiling",
     test_expected_gradient_of_dual_clip),
    ("torch.where(advantages < 0, bounded", "torch.where(advantages > 0, bounded",
     test_expected_gradient_of_dual_clip),
    (".detach().clamp(1 - clip_low, 1 + clip_high)\n", ".clamp(1 - clip_low, 1 + clip_high)\n",
     test_expected_gradient_of_cispo),
    (".detach().clamp(1 - clip_low, 1 + clip_high)\n", ".detach()\n",
     test_expected_gradient_of_cispo),
    ("/ keep.sum(-1, keepdim=True)\n    # The value", "/ keep.shape[-1]\n    # The value",
     test_gspo_averages_over_trained_tokens_only),
    ("mean.detach() + log_ratio - log_ratio.detach()", "mean.expand_as(log_ratio)",
     test_each_token_of_gspo_carries_its_own_gradient),
    ("mean.detach() + log_ratio - log_ratio.detach()", "log_ratio", test_expected_gradient_of_gspo),
    ("torch.where(advantages > 0, value > 1 + clip_high, value < 1 - clip_low)",
     "(value > 1 + clip_high) | (value < 1 - clip_low)",
     test_clip_fraction_knows_the_sign_of_the_advantage),
    ("far & (advantages != 0)", "far", test_clip_fraction_knows_the_sign_of_the_advantage),
    ("clipped[keep].to", "clipped.to",
     test_clip_fraction_counts_the_gradients_that_ppo_clip_removes),
    ("kept = loss.masked_fill(~keep, 0.0)", "kept = loss * keep", test_padding_changes_nothing),
    ("kept = kept / keep.sum(-1, keepdim=True)", "kept = kept / keep.shape[-1]", check_modes),
    ("return kept.sum() / denominator", "return kept.sum() / keep.sum()", check_micro_batches),
    ('int(keep.sum()) if mode == "token_mean"', 'keep.numel() if mode == "token_mean"',
     check_modes),
    ('    _checks.reject(count == 0, count, "`mask` must', '    (count == 0, count, "`mask` must',
     test_bad_input_is_refused),
    ("value.masked_fill(mask == 0, 0.0) for name", "value for name", check_every_mask),
    ("value.masked_fill(mask == 0, 0.0) for name", "value.masked_fill(mask == 1, 0.0) for name",
     check_padded_sequences),
    ("clipped = far & (advantages != 0)\n    return clipped[keep]",
     "clipped = far & (advantages != 0)\n    return clipped",
     test_clip_fraction_counts_the_gradients_that_ppo_clip_removes),
    ("    _checks.full_precision(loss=loss)", "    _checks.floating(loss=loss)",
     test_bad_input_is_refused),
    ('["advantages"].requires_grad:', '["advantages"] is None:', test_bad_input_is_refused),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.objective", old, new, check)
