"""Claims of chapter 2, each against a second computation that shares no code with the first."""

import math

import numpy as np
import pytest
import sympy
import torch

from mathrl import exact, policy
from tests.oracles import fails, gradient, softmax

THETA = np.array([0.2, -0.1, 0.4])
REWARDS = np.array([1, 0, 0.5])


def close(got, expected, tolerance=1e-10):
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


def random_cases(count, rewards=lambda rng, size: rng.normal(size=size)):
    rng = np.random.default_rng(0)
    for _ in range(count):
        size = int(rng.integers(2, 7))
        yield rng.normal(size=size) * rng.choice([0.3, 1, 4]), rewards(rng, size)


def sampled(theta, function):
    """Autograd's gradient of `Σ_a π(a) function(log π(a), a)` with the sampling weights fixed."""
    logits = torch.tensor(theta, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    loss = sum(softmax(theta)[a] * function(log_probs[a], a) for a in range(len(theta)))
    return torch.autograd.grad(loss, logits)[0].numpy()


@pytest.mark.claim("2.1", "autograd")
def test_the_exact_gradient():
    close(exact.softmax(THETA), [0.337585, 0.250089, 0.412327], 5e-7)
    close(exact.value(THETA, REWARDS), 0.543748, 5e-7)
    close(exact.gradient(THETA, REWARDS), [0.154024, -0.135985, -0.018038], 5e-7)
    for theta, rewards in random_cases(20):
        pi = softmax(theta)
        slope = exact.gradient(theta, rewards)
        close(slope, gradient(lambda t, r=rewards: softmax(t) @ r, theta))
        close(slope, sampled(theta, lambda lp, a, r=rewards: r[a] * lp))
        close(slope, pi * (rewards - pi @ rewards))


def wrong_gradient(theta, rewards):
    return softmax(theta) * rewards


@pytest.mark.claim("2.2", "algebra")
def test_the_score_has_mean_zero():
    x = sympy.symbols("x1:4", positive=True)  # e^θ
    pi = [value / sum(x) for value in x]
    for k in range(3):
        mean = sum(p * x[k] * sympy.diff(sympy.log(p), x[k]) for p in pi)
        assert sympy.simplify(mean) == 0

    def check_components_sum_to_zero(slope):
        for theta, rewards in random_cases(10):
            close(slope(theta, rewards).sum(), 0)
            close(slope(theta, rewards), slope(theta, rewards + 3))

    check_components_sum_to_zero(exact.gradient)
    fails(check_components_sum_to_zero, wrong_gradient)


@pytest.mark.claim("2.3", "enumeration")
def test_mean_and_variance_of_the_sampled_estimator():
    for theta, rewards in random_cases(6):
        pi = softmax(theta)
        draws = [rewards[a] * (np.eye(len(pi))[a] - pi) for a in range(len(pi))]
        mean = sum(p * draw for p, draw in zip(pi, draws, strict=True))
        variance = sum(p * draw @ draw for p, draw in zip(pi, draws, strict=True)) - mean @ mean
        close(mean, gradient(lambda t, r=rewards: softmax(t) @ r, theta))
        for size in (1, 3):
            moments = exact.group_moments(theta, rewards, lambda r: r, size)
            close(moments.mean, mean)
            close(moments.variance, variance / size)


@pytest.mark.claim("2.4", "algebra")
def test_signal_and_noise_of_one_draw():
    for p in (0.01, 0.2, 0.5, 0.97):
        theta = np.log([p, 1 - p])
        noise = exact.group_moments(theta, [1, 0], lambda r: r, 1).variance ** 0.5
        signal = np.linalg.norm(exact.gradient(theta, [1, 0]))
        close(signal, math.sqrt(2) * p * (1 - p))
        close(noise, math.sqrt(2 * p * (1 - p) ** 3))
        close(noise / signal, math.sqrt((1 - p) / p))
    assert math.sqrt(0.99 / 0.01) == pytest.approx(10, rel=0.01)


def extreme_rewards(rng, size):
    return rng.integers(0, 2, size=size) if rng.random() < 0.5 else rng.random(size)


def numerical_hessian(theta, rewards):
    step = 1e-5
    shifts = step * np.eye(len(theta))

    def slope(t):
        return gradient(lambda x: softmax(x) @ rewards, t)

    return np.array([(slope(theta + h) - slope(theta - h)) / (2 * step) for h in shifts])


@pytest.mark.claim("2.5", "enumeration")
def test_a_step_of_at_most_one_improves():
    bound = 1 / 4 + math.sqrt(2) / 2
    assert bound < 1
    largest = 0.0
    for theta, rewards in random_cases(400, extreme_rewards):
        curvature = exact.hessian(theta, rewards)
        largest = max(largest, np.linalg.norm(curvature, 2))
        slope = exact.gradient(theta, rewards)
        for step in (0.01, 0.5, 1.0):
            gain = softmax(theta + step * slope) @ rewards - softmax(theta) @ rewards
            assert gain >= step / 2 * slope @ slope - 1e-15
    assert 0.1 < largest <= bound
    for theta, rewards in random_cases(5):
        close(exact.hessian(theta, rewards), numerical_hessian(theta, rewards), 1e-8)


def test_the_guarantee_is_for_steps_of_at_most_one():
    """A wrong reading of it: any step along the gradient gains that much."""
    slope = exact.gradient(THETA, REWARDS)
    gain = softmax(THETA + 50 * slope) @ REWARDS - softmax(THETA) @ REWARDS
    assert gain < 50 / 2 * slope @ slope


@pytest.mark.claim("2.6", "enumeration")
def test_the_plateau():
    def steps(p):
        theta, count = np.log([p, (1 - p) / 2, (1 - p) / 2]), 0
        while softmax(theta)[0] < 0.5:
            pi = softmax(theta)
            slope = pi * (np.eye(3)[0] - pi[0])
            assert np.linalg.norm(slope) <= math.sqrt(2) * pi[0] * (1 - pi[0]) + 1e-12
            theta, count = theta + slope, count + 1
        return count

    assert 8 < steps(0.001) / steps(0.01) < 12


@pytest.mark.claim("2.7", "autograd")
def test_the_gradient_of_entropy():
    for theta, _ in random_cases(10):
        slope = gradient(lambda t: -softmax(t) @ np.log(softmax(t)), theta)
        close(exact.entropy_gradient(theta), slope)
        logits = torch.tensor(theta, requires_grad=True)
        value = policy.entropy(logits.log_softmax(-1))
        close(torch.autograd.grad(value, logits)[0].numpy(), slope)
    logits = torch.tensor([1.0, 0.0, -math.inf], requires_grad=True)
    slope = torch.autograd.grad(policy.entropy(logits.log_softmax(-1)), logits)[0]
    assert slope[2].item() == 0.0
    assert torch.isfinite(slope).all()


@pytest.mark.claim("2.8", "autograd")
def test_sampled_surprisal_is_no_entropy_bonus():
    exact_slope = gradient(lambda t: -softmax(t) @ np.log(softmax(t)), THETA)

    def check_bonus(loss):
        """A loss that is minimised must have minus the gradient of entropy."""
        close(sampled(THETA, loss), -exact_slope)

    def score_form(log_prob, _):  # reward -log π with its own score: the right sampled form
        return log_prob.detach() * log_prob

    check_bonus(score_form)
    fails(check_bonus, lambda log_prob, _: log_prob)
    fails(check_bonus, lambda log_prob, _: -log_prob.detach() * log_prob)
    close(sampled(THETA, lambda log_prob, _: -log_prob), np.zeros(3))


OLD = np.array([-0.3, 0.5, 0.1])


@pytest.mark.claim("2.9", "enumeration")
def test_importance_ratios():
    old = softmax(OLD)

    def surrogate(theta):
        return old @ (softmax(theta) / old * REWARDS)

    close(surrogate(THETA), softmax(THETA) @ REWARDS)
    close(gradient(surrogate, THETA), exact.gradient(THETA, REWARDS))
    on_policy = sampled(THETA, lambda lp, a: (lp - lp.detach()).exp() * REWARDS[a])
    close(on_policy, exact.gradient(THETA, REWARDS))

    def check_corrected(weights):
        close(weights @ REWARDS, softmax(THETA) @ REWARDS)

    check_corrected(old * softmax(THETA) / old)
    fails(check_corrected, old)


@pytest.mark.claim("2.10", "enumeration")
def test_ratios_of_an_unchanged_policy():
    logits = np.array([2.0, 1.0, 0.0])
    close(softmax(logits) / softmax(logits / 0.6), [0.815, 1.587, 3.090], 5e-4)
    every = torch.tensor(logits).expand(3, 3)
    actions = torch.arange(3)
    close(policy.log_probs(every, actions, 0.6).exp().numpy(), softmax(logits / 0.6))
    close((0.5 + 0.3) ** 10, 0.107, 5e-4)
    nucleus = torch.tensor([True, True, False, False])
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    kept = policy.restricted_log_softmax(probs.log(), nucleus)[:2].exp()
    close((probs[:2] / kept).numpy(), [0.8, 0.8])
