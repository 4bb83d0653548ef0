import itertools
import math

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.autograd import grad, gradcheck

from mathrl import exact, kl
from tests.mutants import assert_caught
from tests.oracles import fails, gradient, refuses, softmax

PI = np.array([0.5, 0.3, 0.2])
REF = np.array([0.2, 0.5, 0.3])
OLD = np.array([0.4, 0.4, 0.2])
THETA = np.log(PI)


def reverse(theta, ref=REF):
    return (softmax(theta) * np.log(softmax(theta) / ref)).sum()


def forward(theta, ref=REF):
    return (ref * np.log(ref / softmax(theta))).sum()


REVERSE_GRADIENT = gradient(reverse, THETA)
FORWARD_GRADIENT = gradient(forward, THETA)
NUMPY = {
    "k1": lambda pi, ref: np.log(pi / ref),
    "k2": lambda pi, ref: np.log(pi / ref) ** 2 / 2,
    "k3": lambda pi, ref: ref / pi - 1 - np.log(ref / pi),
}


@pytest.fixture(name="kl")
def true_module():
    return kl


def logs(probabilities, dtype=torch.float64):
    return torch.tensor(np.asarray(probabilities), dtype=dtype).log()


def close(got, expected, tolerance=1e-12):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    expected = np.asarray(expected)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert np.allclose(got, expected, rtol=0, atol=tolerance), (got, expected)


def as_loss(estimator, draws=PI, theta=THETA, ref=REF):
    """Expected value and gradient of `estimator(log π(a), log ref(a), log draws(a))`, a ~ draws."""
    value, slope = 0.0, np.zeros(len(theta))
    for action, probability in enumerate(draws):
        logits = torch.tensor(theta, requires_grad=True)
        log_prob = torch.log_softmax(logits, dim=-1)[action]
        estimate = estimator(log_prob, logs(ref)[action], logs(draws)[action])
        value += probability * estimate.item()
        slope += probability * grad(estimate, logits)[0].numpy()
    return value, slope


def in_reward(estimator, theta=THETA, ref=REF):
    """Expected gradient of the detached estimate times the log-probability, a ~ π."""

    def surrogate(log_prob, ref_log_prob, _):
        return estimator(log_prob, ref_log_prob).detach() * log_prob

    return as_loss(surrogate, softmax(theta), theta, ref)[1]


def random_pairs(count=5, size=4):
    rng = np.random.default_rng(0)
    return [(rng.normal(size=size), softmax(rng.normal(size=size))) for _ in range(count)]


# The exact divergence


def wrong_direction(log_probs, ref_log_probs):
    return kl.divergence(ref_log_probs, log_probs)


def wrong_unmasked(log_probs, ref_log_probs):
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)


def wrong_masked_after_the_product(log_probs, ref_log_probs):
    terms = log_probs.exp() * (log_probs - ref_log_probs)
    return terms.masked_fill(log_probs == -math.inf, 0.0).sum(-1)


def wrong_kl_div_without_log_target(log_probs, ref_log_probs):
    return F.kl_div(ref_log_probs, log_probs, reduction="sum")


def wrong_kl_div_in_argument_order(log_probs, ref_log_probs):
    return F.kl_div(log_probs, ref_log_probs, reduction="sum", log_target=True)


def check_base_case(divergence):
    close(divergence(logs(PI), logs(REF)), 0.223805, 5e-7)
    close(divergence(logs(REF), logs(PI)), 0.193794, 5e-7)


def check_divergence_gradient(divergence):
    logits = torch.tensor(THETA, requires_grad=True)
    log_probs = torch.log_softmax(logits, dim=-1)
    close(grad(divergence(log_probs, logs(REF)), logits)[0], REVERSE_GRADIENT)


def check_unequal_supports(divergence):
    """π = (.5,.5,0,0) by a masked softmax; ref has mass on one of π's zeros."""
    logits = torch.tensor([0.4, 0.1, 7.0, 3.0], dtype=torch.float64, requires_grad=True)
    outside = torch.tensor([False, False, True, True])
    log_probs = torch.log_softmax(logits.masked_fill(outside, -math.inf), dim=-1)
    ref = np.array([0.2, 0.5, 0.3, 0.0])
    value = divergence(log_probs, logs(ref))
    kept = logits.detach().numpy()[:2]
    close(value, reverse(kept, ref[:2]))
    (slope,) = grad(value, logits)
    assert (slope[2:] == 0).all()
    close(slope[:2], gradient(lambda t: reverse(t, ref[:2]), kept))


@pytest.mark.claim("4.1", "enumeration")
def test_reverse_and_forward_divergence_on_the_base_case(kl):
    check_base_case(kl.divergence)
    close([reverse(THETA), forward(THETA)], [0.223805, 0.193794], 5e-7)
    fails(check_base_case, wrong_direction)
    fails(check_base_case, wrong_kl_div_in_argument_order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_divergence_sums_over_the_last_dimension_only(dtype, kl):
    rng = np.random.default_rng(1)
    theta, phi = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3, 5))
    expected = [[reverse(theta[b, t], softmax(phi[b, t])) for t in range(3)] for b in range(2)]
    got = kl.divergence(
        torch.log_softmax(torch.tensor(theta, dtype=dtype), dim=-1),
        torch.log_softmax(torch.tensor(phi, dtype=dtype), dim=-1),
    )
    assert got.dtype == dtype
    close(got, expected, 1e-6 if dtype == torch.float32 else 1e-13)


@pytest.mark.claim("4.2", "autograd")
def test_gradients_of_the_divergence_in_both_arguments(kl):
    check_divergence_gradient(kl.divergence)
    fails(check_divergence_gradient, wrong_direction)
    close(REVERSE_GRADIENT, [0.346243, -0.220389, -0.125854], 1e-6)
    close(REVERSE_GRADIENT, PI * (np.log(PI / REF) - reverse(THETA)))
    logits = torch.tensor(THETA, requires_grad=True)
    log_probs = torch.log_softmax(logits, dim=-1)
    close(grad(kl.divergence(logs(REF), log_probs), logits)[0], FORWARD_GRADIENT)
    close(FORWARD_GRADIENT, PI - REF)


def test_divergence_agrees_with_finite_differences(kl):
    generator = torch.Generator().manual_seed(2)
    pair = [
        torch.randn(2, 5, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    ]

    def value(*logits):
        return kl.divergence(*(torch.log_softmax(z, dim=-1) for z in logits))

    assert gradcheck(value, pair)


@pytest.mark.claim("4.3", "autograd")
def test_actions_the_policy_never_takes_contribute_exactly_zero(kl):
    check_unequal_supports(kl.divergence)
    fails(check_unequal_supports, wrong_unmasked)
    fails(check_unequal_supports, wrong_masked_after_the_product)


@pytest.mark.claim("4.3", "enumeration")
def test_an_action_the_reference_never_takes_makes_the_divergence_infinite(kl):
    ref = logs([1.0, 0.0])
    assert kl.divergence(logs([0.5, 0.5]), ref).item() == math.inf
    underflown = torch.tensor([0.0, -200.0])
    assert underflown.exp()[1] == 0
    assert kl.divergence(underflown, ref.float()).item() == math.inf
    assert torch.isnan(wrong_unmasked(underflown, ref.float()))
    close(kl.divergence(logs([1.0, 0.0]), ref), 0.0)


@pytest.mark.claim("4.20", "enumeration")
def test_kl_div_needs_log_target_and_takes_the_reference_first(kl):
    """Right: F.kl_div(log ref, log π, log_target=True) = .223805; without log_target NaN."""
    right = F.kl_div(logs(REF), logs(PI), reduction="sum", log_target=True)
    close(kl.divergence(logs(PI), logs(REF)), right.item())
    fails(check_base_case, wrong_kl_div_without_log_target)
    assert torch.isnan(wrong_kl_div_without_log_target(logs(PI), logs(REF)))


@pytest.mark.claim("4.20", "enumeration")
def test_batchmean_on_sequences_is_T_times_the_mean_divergence(kl):
    steps = 3

    def wrong_batchmean(log_probs, ref_log_probs):
        return F.kl_div(ref_log_probs, log_probs, reduction="batchmean", log_target=True)

    def check_mean(mean_divergence):
        pi, ref = logs(PI).expand(2, steps, 3), logs(REF).expand(2, steps, 3)
        close(mean_divergence(pi, ref), reverse(THETA))

    check_mean(lambda pi, ref: kl.divergence(pi, ref).mean())
    fails(check_mean, wrong_batchmean)
    pi, ref = logs(PI).expand(2, steps, 3), logs(REF).expand(2, steps, 3)
    close(wrong_batchmean(pi, ref), steps * reverse(THETA))


@pytest.mark.claim("4.5", "algebra")
def test_the_optimum_of_reward_minus_kl_is_the_tilted_reference(kl):
    """J - β·KL(π‖ref) is highest at π ∝ ref·e^{r/β}, with value β·log Σ ref·e^{r/β}."""
    rewards, beta = np.array([1.0, 0.0, 0.5]), 0.4
    tilted = REF * np.exp(rewards / beta)

    def objective(log_probs):
        penalty = kl.divergence(log_probs, logs(REF))
        return log_probs.exp() @ torch.tensor(rewards) - beta * penalty

    logits = torch.tensor(np.log(tilted), requires_grad=True)
    best = objective(torch.log_softmax(logits, dim=-1))
    close(best, beta * math.log(tilted.sum()))
    close(grad(best, logits)[0], np.zeros(3))
    for theta, _ in random_pairs(20, 3):
        assert objective(torch.log_softmax(torch.tensor(theta), dim=-1)) < best


@pytest.mark.claim("4.1", "algebra")
def test_neither_divergence_is_negative(kl):
    """Gibbs' inequality: ln x <= x - 1, so that -KL <= Σ π (ref/π - 1) = 0."""
    for theta, ref in random_pairs(200, 4):
        log_probs = torch.log_softmax(torch.tensor(theta), dim=-1)
        assert kl.divergence(log_probs, logs(ref)) > 0
        assert kl.divergence(logs(ref), log_probs) > 0
        assert kl.divergence(log_probs, log_probs) == 0


def regularised(theta, rewards, beta):
    return softmax(theta) @ rewards - beta * reverse(theta)


@pytest.mark.claim("4.4", "autograd")
def test_the_penalty_is_a_reward_with_the_log_ratio_held_fixed():
    beta = 0.7
    for theta, _ in random_pairs(10, 3):
        for rewards in (np.array([1.0, 0.0, 0.5]), np.array([-2.0, 3.0, 0.1])):
            slope = gradient(lambda t, r=rewards: regularised(t, r, beta), theta)
            modified = rewards - beta * np.log(softmax(theta) / REF)
            close(exact.gradient(theta, modified), slope)
            close(
                exact.gradient(theta, rewards) - beta * exact.kl_gradient(theta, np.log(REF)), slope
            )


@pytest.mark.claim("4.6", "enumeration")
def test_with_equal_rewards_only_the_pull_remains():
    for constant in (0.0, 1.0):
        slope = gradient(lambda t, c=constant: regularised(t, np.full(3, c), 0.3), THETA)
        close(slope, -0.3 * REVERSE_GRADIENT)
        close(exact.gradient(THETA, np.full(3, constant)), np.zeros(3))


# Estimators: values


def check_estimator_values(kl):
    for name, expected in NUMPY.items():
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
            got = getattr(kl, name)(logs(PI, dtype), logs(REF, dtype))
            assert got.dtype == dtype
            close(got, expected(PI, REF), tolerance)


def test_per_token_values(kl):
    check_estimator_values(kl)


@pytest.mark.claim("4.7", "enumeration")
def test_expected_values_of_the_estimators(kl):
    """E k1 = E k3 = KL for every pair; E k2 is biased, .265479 against .223805."""
    for theta, ref in [(THETA, REF), *random_pairs()]:
        pi = softmax(theta)
        expected = reverse(theta, ref)
        close(pi @ kl.k1(logs(pi), logs(ref)).numpy(), expected)
        close(pi @ kl.k3(logs(pi), logs(ref)).numpy(), expected)
    close(PI @ kl.k2(logs(PI), logs(REF)).numpy(), 0.265479, 5e-7)


@pytest.mark.claim("4.8", "enumeration")
def test_k2_and_k3_are_never_negative_and_k1_is(kl):
    ratios = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    zero = torch.zeros_like(ratios)
    assert (kl.k2(zero, ratios) >= 0).all()
    assert (kl.k3(zero, ratios) >= 0).all()
    assert kl.k1(zero, ratios).min() == -5


@pytest.mark.claim("4.7", "enumeration")
def test_k2_is_biased_at_third_order(kl):
    """E k2 - KL = E ℓ³/6 + O(ℓ⁴): halving the distance divides the bias by about 8."""
    direction = np.array([1.0, -0.5, 0.2])

    def bias(scale):
        pi = softmax(np.log(REF) + scale * direction)
        exact = (pi * np.log(pi / REF)).sum()
        return pi @ kl.k2(logs(pi), logs(REF)).numpy() - exact

    assert bias(0.02) / bias(0.01) == pytest.approx(8, rel=0.02)


@pytest.mark.claim("4.9", "enumeration")
def test_the_variance_of_k3_can_exceed_that_of_k1(kl):
    def deviation(estimator, pi, ref):
        values = estimator(logs(pi), logs(ref)).numpy()
        return np.sqrt(pi @ (values - pi @ values) ** 2)

    even = np.array([0.5, 0.5])
    rare = np.array([0.99, 0.01])
    close([deviation(k, rare, even) for k in (kl.k3, kl.k1)], [4.47, 0.46], 5e-3)
    assert deviation(kl.k3, PI, REF) < deviation(kl.k1, PI, REF)
    factors = [
        deviation(kl.k3, pi, even) / deviation(kl.k1, pi, even)
        for pi in (np.array([1 - e, e]) for e in (1e-2, 1e-4, 1e-6, 1e-8))
    ]
    assert all(later > 5 * earlier for earlier, later in itertools.pairwise(factors))


@pytest.mark.claim("4.10", "enumeration")
def test_k3_misses_the_reference_mass_that_the_policy_never_samples(kl):
    """π = (.6,.4,0), ref = (.2,.5,.3): E k3 = KL - .3, E k1 = KL."""
    pi, ref = np.array([0.6, 0.4]), REF[:2]
    exact = (pi * np.log(pi / ref)).sum()
    close(kl.divergence(logs([0.6, 0.4, 0.0]), logs(REF)), exact)
    close(pi @ kl.k1(logs(pi), logs(ref)).numpy(), exact)
    close(pi @ kl.k3(logs(pi), logs(ref)).numpy(), exact - 0.3)


def wrong_naive_k3(log_probs, ref_log_probs):
    return torch.exp(ref_log_probs - log_probs) - 1 - (ref_log_probs - log_probs)


def check_k3_near_zero(k3):
    """float32 at a log-ratio of 1e-4: x²/2 + x³/6 = 5.0e-9."""
    value = k3(torch.zeros(1), torch.tensor([1e-4])).item()
    assert value == pytest.approx(1e-8 / 2 + 1e-12 / 6, rel=2e-3)


@pytest.mark.claim("4.11", "algebra")
def test_k3_keeps_its_precision_near_zero(kl):
    check_k3_near_zero(kl.k3)
    fails(check_k3_near_zero, wrong_naive_k3)
    naive = wrong_naive_k3(torch.zeros(1), torch.tensor([1e-4])).item()
    assert naive == pytest.approx(1.66e-8, abs=5e-11)


# Estimators: gradients


@pytest.mark.claim("4.12", "autograd")
def test_k1_as_a_loss_has_expected_gradient_zero(kl):
    for theta, ref in [(THETA, REF), *random_pairs()]:
        _, slope = as_loss(lambda lp, ref_lp, _: kl.k1(lp, ref_lp), softmax(theta), theta, ref)
        close(slope, np.zeros(len(theta)))


@pytest.mark.claim("4.13", "autograd")
def test_k2_as_a_loss_has_the_gradient_of_the_reverse_divergence(kl):
    for theta, ref in [(THETA, REF), *random_pairs()]:
        _, slope = as_loss(lambda lp, ref_lp, _: kl.k2(lp, ref_lp), softmax(theta), theta, ref)
        close(slope, gradient(lambda t, ref=ref: reverse(t, ref), theta))


@pytest.mark.claim("4.14", "autograd")
def test_k3_as_a_loss_has_the_gradient_of_the_forward_divergence(kl):
    for theta, ref in [(THETA, REF), *random_pairs()]:
        _, slope = as_loss(lambda lp, ref_lp, _: kl.k3(lp, ref_lp), softmax(theta), theta, ref)
        close(slope, softmax(theta) - ref)
        close(slope, gradient(lambda t, ref=ref: forward(t, ref), theta))
    close(as_loss(lambda lp, ref_lp, _: kl.k3(lp, ref_lp))[1], [0.3, -0.2, -0.1])


def test_an_unbiased_value_is_not_an_unbiased_gradient(kl):
    """The check on the gradient of a loss: only k2 passes it, though only k1, k3 are unbiased."""

    def check_reverse_gradient(estimator):
        close(as_loss(lambda lp, ref_lp, _: estimator(lp, ref_lp))[1], REVERSE_GRADIENT)

    check_reverse_gradient(kl.k2)
    fails(check_reverse_gradient, kl.k1)
    fails(check_reverse_gradient, kl.k3)


@pytest.mark.claim("4.15", "autograd")
def test_in_the_reward_k1_has_the_gradient_of_the_reverse_divergence(kl):
    for theta, ref in [(THETA, REF), *random_pairs()]:
        exact = gradient(lambda t, ref=ref: reverse(t, ref), theta)
        close(in_reward(kl.k1, theta, ref), exact)


@pytest.mark.claim("4.15", "autograd")
def test_in_the_reward_k2_and_k3_are_biased(kl):
    """k2: ∇E[k2] - ∇KL. k3: ∇KL(π‖ref) - ∇KL(ref‖π), here (.046243,-.020389,-.025854)."""

    def check_reverse_gradient(estimator):
        close(in_reward(estimator), REVERSE_GRADIENT)

    check_reverse_gradient(kl.k1)
    fails(check_reverse_gradient, kl.k2)
    fails(check_reverse_gradient, kl.k3)
    mean_k2 = gradient(lambda t: softmax(t) @ NUMPY["k2"](softmax(t), REF), THETA)
    close(in_reward(kl.k2), mean_k2 - REVERSE_GRADIENT)
    close(in_reward(kl.k3), REVERSE_GRADIENT - FORWARD_GRADIENT)


def test_estimators_agree_with_finite_differences(kl):
    generator = torch.Generator().manual_seed(4)
    triple = [
        torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]
    for estimator in (kl.k1, kl.k2, kl.k3):
        assert gradcheck(estimator, triple[:2])
    assert gradcheck(kl.importance_weighted, triple)


# Off-policy


@pytest.mark.claim("4.16", "enumeration")
def test_off_policy_estimates_need_the_importance_weight(kl):
    """Drawn from old=(.4,.4,.2): the plain mean of k3 is .20776, the weighted one .223805."""

    def plain(lp, ref_lp, _):
        return kl.k3(lp, ref_lp)

    def weighted(lp, ref_lp, old_lp):
        return kl.importance_weighted(kl.k3(lp, ref_lp), lp, old_lp)

    def check_value(estimator):
        close(as_loss(estimator, OLD)[0], reverse(THETA))

    check_value(weighted)
    fails(check_value, plain)
    close(as_loss(plain, OLD)[0], 0.20776, 5e-6)


@pytest.mark.claim("4.17", "autograd")
@pytest.mark.parametrize("draws", [OLD, PI], ids=["off-policy", "on-policy"])
def test_a_differentiable_weight_gives_k1_and_k3_the_reverse_gradient(draws, kl):
    def check(weight):
        for estimator in (kl.k1, kl.k3):
            value, slope = as_loss(
                lambda lp, ref_lp, old, k=estimator: kl.importance_weighted(
                    k(lp, ref_lp), weight(lp), old
                ),
                draws,
            )
            close(value, reverse(THETA))
            close(slope, REVERSE_GRADIENT)

    check(lambda lp: lp)
    fails(check, torch.Tensor.detach)


def test_differentiable_weight_on_both_estimators(kl):
    for draws in (OLD, PI):
        test_a_differentiable_weight_gives_k1_and_k3_the_reverse_gradient(draws, kl)


@pytest.mark.claim("4.17", "autograd")
def test_a_detached_weight_keeps_the_on_policy_gradients(kl):
    """Off-policy with a detached weight: k2 gives ∇KL, k1 gives 0, k3 gives (.3,-.2,-.1)."""
    expected = {"k1": np.zeros(3), "k2": REVERSE_GRADIENT, "k3": np.array([0.3, -0.2, -0.1])}
    for name, slope in expected.items():
        estimator = getattr(kl, name)

        def detached(lp, ref_lp, old_lp, k=estimator):
            return kl.importance_weighted(k(lp, ref_lp), lp.detach(), old_lp)

        close(as_loss(detached, OLD)[1], slope)


@pytest.mark.claim("4.17", "autograd")
def test_a_differentiable_weight_is_wrong_for_k2(kl):
    def weighted(lp, ref_lp, old_lp):
        return kl.importance_weighted(kl.k2(lp, ref_lp), lp, old_lp)

    mean_k2 = gradient(lambda t: softmax(t) @ NUMPY["k2"](softmax(t), REF), THETA)
    slope = as_loss(weighted, OLD)[1]
    close(slope, mean_k2)
    assert np.abs(slope - REVERSE_GRADIENT).max() > 0.01


# Sequences: two steps, the second distribution depends on the first action


FIRST, FIRST_REF = np.array([0.3, -0.2]), np.array([0.6, 0.4])
SECOND = np.array([[0.5, 0.1, -0.4], [-0.3, 0.8, 0.2]])
SECOND_REF = np.array([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])


def sequence_divergence(flat):
    """Brute force over the six sequences, as one distribution."""
    first, second = softmax(flat[:2]), [softmax(flat[2:5]), softmax(flat[5:])]
    total = 0
    for a in range(2):
        for b in range(3):
            probability = first[a] * second[a][b]
            total += probability * np.log(probability / (FIRST_REF[a] * SECOND_REF[a, b]))
    return total


def tree_gradient(surrogate):
    """Exact expected gradient of a per-sequence surrogate of two log-probs and two ref ones."""
    flat = np.concatenate([FIRST, SECOND.ravel()])
    slope = np.zeros(8)
    for a in range(2):
        for b in range(3):
            logits = torch.tensor(flat, requires_grad=True)
            first = torch.log_softmax(logits[:2], dim=-1)[a]
            second = torch.log_softmax(logits[2:].view(2, 3)[a], dim=-1)[b]
            log_probs = torch.stack([first, second])
            ref = torch.stack([logs(FIRST_REF)[a], logs(SECOND_REF)[a, b]])
            probability = log_probs.sum().exp().item()
            slope += probability * grad(surrogate(log_probs, ref), logits)[0].numpy()
    return slope


@pytest.mark.claim("4.18", "enumeration")
def test_sequence_divergence_is_the_expected_sum_of_step_divergences(kl):
    """Reported in trl#3104 as a bug, and right: sampled per-token estimates have this mean."""
    flat = np.concatenate([FIRST, SECOND.ravel()])
    exact = sequence_divergence(flat)
    first = torch.log_softmax(torch.tensor(FIRST), dim=-1)
    second = torch.log_softmax(torch.tensor(SECOND), dim=-1)
    steps = kl.divergence(second, logs(SECOND_REF))
    chain = kl.divergence(first, logs(FIRST_REF)) + first.exp() @ steps
    close(chain, exact)
    for estimator in (kl.k1, kl.k3):
        mean = 0.0
        for a in range(2):
            for b in range(3):
                log_probs = torch.stack([first[a], second[a, b]])
                ref = torch.stack([logs(FIRST_REF)[a], logs(SECOND_REF)[a, b]])
                mean += (log_probs.sum().exp() * estimator(log_probs, ref).sum()).item()
        close(mean, exact)


@pytest.mark.claim("4.19", "autograd")
def test_a_per_token_loss_drops_the_future_term(kl):
    flat = np.concatenate([FIRST, SECOND.ravel()])
    exact = gradient(sequence_divergence, flat)

    def check_sequence_gradient(surrogate):
        close(tree_gradient(surrogate), exact)

    def wrong_per_token_loss(log_probs, ref):
        return kl.k2(log_probs, ref).sum()

    def sum_in_every_reward(log_probs, ref):
        return kl.k1(log_probs, ref).sum().detach() * log_probs.sum()

    check_sequence_gradient(sum_in_every_reward)
    fails(check_sequence_gradient, wrong_per_token_loss)

    # What is missing is the first token's influence on where the second one is drawn.
    def future(theta):
        steps = [reverse(SECOND[a], SECOND_REF[a]) for a in range(2)]
        return softmax(theta) @ np.array(steps)

    missing = exact - tree_gradient(wrong_per_token_loss)
    close(missing, np.concatenate([gradient(future, FIRST), np.zeros(6)]))


# Lines the field asks about


def test_the_line_in_trl_is_k3(kl):
    """trl#2854, #2914, #3104: a sampled estimate with the reverse divergence as its mean."""
    per_token = wrong_naive_k3(logs(PI), logs(REF))  # wrong in its precision only
    close(kl.k3(logs(PI), logs(REF)), per_token.numpy())
    close(PI @ per_token.numpy(), reverse(THETA))
    assert abs(PI @ per_token.numpy() - forward(THETA)) > 0.02


# Refusals


def test_divergence_refuses_bad_input(kl):
    pi = logs(PI).expand(2, 3)
    refuses(ValueError, r"`ref_log_probs` has shape \(1, 3\), expected \(2, 3\)",
            kl.divergence, pi, pi[:1])  # fmt: skip
    refuses(ValueError, r"`log_probs` must have probabilities that sum to 1 .* got 3\.0",
            kl.divergence, torch.zeros(2, 3), pi)  # fmt: skip
    refuses(ValueError, "`ref_log_probs` must have probabilities", kl.divergence, pi, pi - 0.1)
    refuses(ValueError, "sum to 1", kl.divergence, torch.full((3,), math.nan), pi[0])
    refuses(TypeError, "`ref_log_probs` must be float32 or float64, got torch.bfloat16",
            kl.divergence, pi, pi.bfloat16())  # fmt: skip
    refuses(TypeError, "`log_probs` must be a torch.Tensor, got list", kl.divergence, [0.0], pi)


def test_estimators_refuse_bad_input(kl):
    pi = logs(PI)
    for estimator in (kl.k1, kl.k2, kl.k3):
        refuses(ValueError, r"`ref_log_probs` has shape \(1,\), expected \(3,\)",
                estimator, pi, pi[:1])  # fmt: skip
        refuses(ValueError, r"`log_probs` must be finite, got -inf at index \(0,\)",
                estimator, logs([0.0, 0.6, 0.4]), pi)  # fmt: skip
        refuses(TypeError, "float32 or float64, got torch.float16", estimator, pi.half(), pi)
    refuses(ValueError, r"`old_log_probs` has shape \(2,\)",
            kl.importance_weighted, pi, pi, pi[:2])  # fmt: skip
    refuses(ValueError, "`estimate` must be finite, got nan",
            kl.importance_weighted, pi * math.nan, pi, pi)  # fmt: skip


# Algebra


X = sympy.symbols("x1:4", positive=True)  # e^θ of the policy
Y = sympy.symbols("y1:4", positive=True)  # e^θ of the reference
SYM_PI = [x / sum(X) for x in X]
SYM_REF = [y / sum(Y) for y in Y]
SYM_LOG_RATIO = [sympy.log(p) - sympy.log(q) for p, q in zip(SYM_PI, SYM_REF, strict=True)]
SYM_REVERSE = sum(p * r for p, r in zip(SYM_PI, SYM_LOG_RATIO, strict=True))
SYM_FORWARD = -sum(q * r for q, r in zip(SYM_REF, SYM_LOG_RATIO, strict=True))


def slope(expression, k):
    return X[k] * sympy.diff(expression, X[k])  # ∂/∂θ_k with x = e^θ


def is_zero(expression):
    return sympy.simplify(sympy.expand_log(expression, force=True)) == 0


def mean_slope(estimates, k):
    return sum(p * slope(e, k) for p, e in zip(SYM_PI, estimates, strict=True))


@pytest.mark.claim("4.14", "algebra")
@pytest.mark.claim("4.13", "algebra")
@pytest.mark.claim("4.12", "algebra")
def test_expected_gradients_as_a_loss_symbolically():
    """For any three-action policy and reference: E∇k1 = 0, E∇k2 = ∇KL, E∇k3 = π - ref."""
    k1 = SYM_LOG_RATIO
    k2 = [r**2 / 2 for r in SYM_LOG_RATIO]
    k3 = [q / p - 1 + r for p, q, r in zip(SYM_PI, SYM_REF, SYM_LOG_RATIO, strict=True)]
    for k in range(3):
        assert is_zero(mean_slope(k1, k))
        assert is_zero(mean_slope(k2, k) - slope(SYM_REVERSE, k))
        assert is_zero(mean_slope(k3, k) - (SYM_PI[k] - SYM_REF[k]))
        assert not is_zero(mean_slope(k3, k) - slope(SYM_REVERSE, k))


@pytest.mark.claim("4.2", "algebra")
def test_divergence_gradients_symbolically():
    """∂KL(π‖ref)/∂θ_k = π_k (ℓ_k - KL), and ∂KL(ref‖π)/∂θ_k = π_k - ref_k."""
    for k in range(3):
        claimed = SYM_PI[k] * (SYM_LOG_RATIO[k] - SYM_REVERSE)
        assert is_zero(slope(SYM_REVERSE, k) - claimed)
        assert is_zero(slope(SYM_FORWARD, k) - (SYM_PI[k] - SYM_REF[k]))


@pytest.mark.claim("4.15", "algebra")
@pytest.mark.claim("4.7", "algebra")
def test_expected_values_and_rewards_symbolically():
    """E k1 = E k3 = KL; with the score, E k1 gives ∇KL and E k3 gives ∇KL(π‖ref) - ∇KL(ref‖π)."""
    k3 = [q / p - 1 + r for p, q, r in zip(SYM_PI, SYM_REF, SYM_LOG_RATIO, strict=True)]
    assert is_zero(sum(p * e for p, e in zip(SYM_PI, k3, strict=True)) - SYM_REVERSE)
    for k in range(3):
        scores = [int(a == k) - SYM_PI[k] for a in range(3)]

        def rewarded(estimates, scores=scores):
            terms = zip(SYM_PI, estimates, scores, strict=True)
            return sum(p * e * s for p, e, s in terms)

        assert is_zero(rewarded(SYM_LOG_RATIO) - slope(SYM_REVERSE, k))
        claimed = slope(SYM_REVERSE, k) - slope(SYM_FORWARD, k)
        assert is_zero(rewarded(k3) - claimed)


MUTANTS = [
    (
        "(log_probs - ref_log_probs).masked_fill(",
        "(ref_log_probs - log_probs).masked_fill(",
        test_reverse_and_forward_divergence_on_the_base_case,
    ),
    (
        "(log_probs - ref_log_probs).masked_fill(log_probs == -math.inf, 0.0)",
        "(log_probs - ref_log_probs)",
        test_actions_the_policy_never_takes_contribute_exactly_zero,
    ),
    (
        "(log_probs - ref_log_probs).masked_fill(log_probs == -math.inf, 0.0)",
        "(log_probs - ref_log_probs).masked_fill(ref_log_probs == -math.inf, 0.0)",
        test_an_action_the_reference_never_takes_makes_the_divergence_infinite,
    ),
    (
        "terms = log_probs.exp() * log_ratio",
        "terms = ref_log_probs.exp() * log_ratio",
        test_reverse_and_forward_divergence_on_the_base_case,
    ),
    (
        "terms = log_probs.exp() * log_ratio",
        "terms = log_probs.detach().exp() * log_ratio",
        test_gradients_of_the_divergence_in_both_arguments,
    ),
    (
        "terms.masked_fill(log_ratio == math.inf, math.inf).sum(-1)",
        "terms.sum(-1)",
        test_an_action_the_reference_never_takes_makes_the_divergence_infinite,
    ),
    (
        "math.inf).sum(-1)",
        "math.inf).mean(-1)",
        test_reverse_and_forward_divergence_on_the_base_case,
    ),
    (
        "_checks.normalized(log_probs=log_probs, ref_log_probs=ref_log_probs)",
        "_checks.normalized(log_probs=log_probs)",
        test_divergence_refuses_bad_input,
    ),
    ("return log_probs - ref_log_probs", "return ref_log_probs - log_probs", test_per_token_values),
    (
        "return 0.5 * (log_probs - ref_log_probs).square()",
        "return (log_probs - ref_log_probs).square()",
        test_k2_as_a_loss_has_the_gradient_of_the_reverse_divergence,
    ),
    (
        "return 0.5 * (log_probs - ref_log_probs).square()",
        "return 0.5 * (log_probs - ref_log_probs).abs()",
        test_per_token_values,
    ),
    (
        "return 0.5 * (log_probs - ref_log_probs).square()",
        "return 0.5 * (log_probs - ref_log_probs) * (log_probs - ref_log_probs).detach()",
        test_k2_as_a_loss_has_the_gradient_of_the_reverse_divergence,
    ),
    (
        "log_ratio = ref_log_probs - log_probs",
        "log_ratio = log_probs - ref_log_probs",
        test_expected_values_of_the_estimators,
    ),
    (
        "torch.expm1(log_ratio) - log_ratio",
        "torch.exp(log_ratio) - 1 - log_ratio",
        test_k3_keeps_its_precision_near_zero,
    ),
    (
        "torch.expm1(log_ratio) - log_ratio",
        "torch.expm1(log_ratio).detach() - log_ratio",
        test_k3_as_a_loss_has_the_gradient_of_the_forward_divergence,
    ),
    (
        "torch.expm1(log_ratio) - log_ratio",
        "torch.expm1(log_ratio) + log_ratio",
        test_k2_and_k3_are_never_negative_and_k1_is,
    ),
    (
        "(log_probs - old_log_probs).exp() * estimate",
        "(log_probs - old_log_probs).detach().exp() * estimate",
        test_differentiable_weight_on_both_estimators,
    ),
    (
        "(log_probs - old_log_probs).exp() * estimate",
        "(old_log_probs - log_probs).exp() * estimate",
        test_off_policy_estimates_need_the_importance_weight,
    ),
    (
        "(log_probs - old_log_probs).exp() * estimate",
        "(log_probs - old_log_probs).exp().clamp(max=1.0) * estimate",
        test_off_policy_estimates_need_the_importance_weight,
    ),
    (
        "(log_probs - old_log_probs).exp() * estimate",
        "(log_probs - old_log_probs).exp() * estimate.detach()",
        test_differentiable_weight_on_both_estimators,
    ),
    ("    _checks.same_shape(**tensors)\n", "", test_estimators_refuse_bad_input),
    ("    _checks.finite(**tensors)\n", "", test_estimators_refuse_bad_input),
]


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.kl", old, new, check)
