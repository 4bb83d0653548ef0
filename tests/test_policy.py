import math

import numpy as np
import pytest
import sympy
import torch
from torch.autograd import grad, gradcheck

from mathrl import policy
from tests.mutants import assert_caught
from tests.oracles import fails, gradient, refuses, softmax

THETA = np.array([0.2, -0.1, 0.4])
REWARDS = np.array([1.0, 0.0, 0.5])
PI = softmax(THETA)
ALLOWED = torch.tensor([True, False, True, True, False])
LOGITS = np.array([1.5, 9.0, -0.5, 0.3, 4.0])
KEPT = np.flatnonzero(ALLOWED.numpy())
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.fixture(name="policy")
def true_module():
    return policy


def leaf(values, dtype=torch.float64):
    return torch.tensor(np.asarray(values), dtype=dtype, requires_grad=True)


def close(got, expected, tolerance=1e-12):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    expected = np.asarray(expected)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert np.allclose(got, expected, rtol=0, atol=tolerance), (got, expected)


# Restricted log-softmax


def wrong_truncated(logits, allowed):
    return torch.log_softmax(logits, dim=-1).masked_fill(~allowed, -math.inf)


def wrong_single_fill(logits, allowed):
    return torch.log_softmax(logits.masked_fill(~allowed, -math.inf), dim=-1)


def wrong_large_negative(logits, allowed):
    return torch.log_softmax(logits.masked_fill(~allowed, -1e9), dim=-1)


def check_restricted_values(restricted):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        expected = np.full(5, -np.inf)
        expected[KEPT] = np.log(softmax(LOGITS[KEPT]))
        got = restricted(leaf(LOGITS, dtype), ALLOWED)
        assert got.dtype == dtype
        close(got[KEPT], expected[KEPT], tolerance)
        assert (got[~ALLOWED] == -math.inf).all()


def check_nothing_passes_a_forbidden_action(restricted):
    """The plain -Σ π log π is NaN on a restricted policy; its gradient must still be right."""
    logits = leaf(LOGITS)
    log_probs = restricted(logits, ALLOWED)
    (slope,) = grad((log_probs.exp() * log_probs).sum(), logits)
    expected = np.zeros(5)
    expected[KEPT] = gradient(lambda t: (softmax(t) * np.log(softmax(t))).sum(), LOGITS[KEPT])
    assert (slope[~ALLOWED] == 0).all()
    close(slope, expected)


def test_restricted_softmax_is_the_softmax_of_the_kept_logits(policy):
    check_restricted_values(policy.restricted_log_softmax)
    fails(check_restricted_values, wrong_truncated)
    fails(check_restricted_values, wrong_large_negative)


def test_restricted_gradient_is_zero_at_forbidden_actions_and_never_nan(policy):
    check_nothing_passes_a_forbidden_action(policy.restricted_log_softmax)
    fails(check_nothing_passes_a_forbidden_action, wrong_single_fill)


def test_what_a_forbidden_logit_holds_does_not_matter(policy):
    for junk in (math.nan, math.inf, -math.inf, 1e30):
        values = LOGITS.copy()
        values[~ALLOWED.numpy()] = junk
        logits = leaf(values)
        log_probs = policy.restricted_log_softmax(logits, ALLOWED)
        close(log_probs[KEPT], np.log(softmax(LOGITS[KEPT])))
        (slope,) = grad(log_probs[0], logits)
        assert (slope[~ALLOWED] == 0).all()
        assert torch.isfinite(slope).all()


def test_one_set_for_all_rows_equals_the_same_set_in_each_row(policy):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    shared = policy.restricted_log_softmax(logits, ALLOWED)
    own = policy.restricted_log_softmax(logits, ALLOWED.expand(2, 3, 5))
    assert torch.equal(shared, own)


def test_softmax_over_14_then_keeping_10_loses_mass(policy):
    """Uniform logits: the ten kept tokens hold 10/14 = .7143, -.3365 nats a step."""
    logits, allowed = torch.zeros(14, dtype=torch.float64), torch.arange(14) < 10

    def check_mass(restricted):
        log_probs = restricted(logits, allowed)
        close(log_probs.exp().sum(), 1.0)
        close(log_probs[0], -math.log(10))

    check_mass(policy.restricted_log_softmax)
    fails(check_mass, wrong_truncated)
    wrong = wrong_truncated(logits, allowed)
    close(wrong.exp().sum(), 0.7143, 5e-5)
    close(wrong[0] + math.log(10), -0.3365, 5e-5)


def test_truncated_log_probs_are_refused_where_a_whole_distribution_is_expected(policy):
    truncated = wrong_truncated(torch.zeros(14), torch.arange(14) < 10)
    refuses(ValueError, r"`log_probs` .* sum to 1 .* got 0\.714", policy.entropy, truncated)
    refuses(ValueError, "sum to 1", policy.score, truncated, torch.tensor(0))


def test_top_p_sampling_needs_log_probs_restricted_to_the_nucleus(policy):
    """top-p .8 on (.5,.3,.15,.05) draws from (.625,.375); full log-probs give ratio .8 a token."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    nucleus = torch.tensor([True, True, False, False])
    sampler = np.log([0.625, 0.375])

    def check_ratio(restricted):
        close((restricted(logits, nucleus)[:2] - torch.tensor(sampler)).exp(), [1.0, 1.0])

    check_ratio(policy.restricted_log_softmax)
    fails(check_ratio, wrong_truncated)
    ratio = (wrong_truncated(logits, nucleus)[0] - sampler[0]).exp().item()
    assert ratio == pytest.approx(0.8)
    assert ratio**10 == pytest.approx(0.107, abs=5e-4)


def test_restricted_softmax_refuses_bad_input(policy):
    restricted, logits = policy.restricted_log_softmax, torch.zeros(2, 3)
    allowed = torch.ones(2, 3, dtype=torch.bool)
    empty = allowed.clone()
    empty[1] = False
    refuses(ValueError, r"at least one action in each row, got 0 at index \(1,\)",
            restricted, logits, empty)  # fmt: skip
    refuses(ValueError, "at least one", restricted, logits, torch.zeros(3, dtype=torch.bool))
    refuses(ValueError, r"`allowed` has shape \(1, 3\), expected \(2, 3\)",
            restricted, logits, allowed[:1])  # fmt: skip
    refuses(ValueError, "shape", restricted, torch.zeros(3), allowed)
    refuses(TypeError, "`allowed` must be boolean", restricted, logits, allowed.int())
    refuses(TypeError, "`allowed` must be a torch.Tensor", restricted, logits, [True] * 3)
    refuses(TypeError, "`logits` must have a floating", restricted, logits.long(), allowed)
    for bad in (math.nan, math.inf, -math.inf):
        logits = torch.zeros(2, 3)
        logits[0, 2] = bad
        refuses(ValueError, r"`logits` must be finite, .* at index \(0, 2\)",
                restricted, logits, allowed)  # fmt: skip
    refuses(ValueError, r"`logits` must have shape", restricted, torch.tensor(0.0), allowed)


# Selected log-probabilities


def wrong_no_temperature(logits, targets, temperature):
    return policy.log_probs(logits, targets)


def wrong_multiplied_temperature(logits, targets, temperature):
    return policy.log_probs(logits * temperature, targets)


@BOTH
def test_selected_log_probs_equal_the_log_of_the_softmax(dtype, policy):
    rng = np.random.default_rng(1)
    logits, targets = rng.normal(size=(2, 3, 5)), rng.integers(0, 5, size=(2, 3))
    expected = [
        [math.log(softmax(logits[b, t])[targets[b, t]]) for t in range(3)] for b in range(2)
    ]
    got = policy.log_probs(leaf(logits, dtype), torch.tensor(targets))
    assert got.dtype == dtype
    close(got, expected, 1e-6 if dtype == torch.float32 else 1e-13)


def test_sampling_temperature_belongs_in_the_log_probs(policy):
    """Sampled at T=.6 and scored at T=1, an unchanged policy has ratios .815, 1.587, 3.090."""
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    sampler = torch.tensor(np.log(softmax(logits.numpy() / 0.6)))
    targets = torch.arange(3)

    def ratios(scored):
        return (scored(logits.expand(3, 3), targets, 0.6) - sampler).exp()

    def check_ratio(scored):
        close(ratios(scored), np.ones(3))

    check_ratio(policy.log_probs)
    fails(check_ratio, wrong_no_temperature)
    fails(check_ratio, wrong_multiplied_temperature)
    close(ratios(wrong_no_temperature), [0.815, 1.587, 3.090], 5e-4)


def test_gradient_of_log_probs_is_the_score_over_the_temperature(policy):
    for temperature in (0.6, 1.0):
        logits = leaf(THETA)
        for action in range(3):
            selected = policy.log_probs(logits, torch.tensor(action), temperature)
            (slope,) = grad(selected, logits)
            exact = gradient(lambda t, a=action, T=temperature: np.log(softmax(t / T)[a]), THETA)
            close(slope, exact)


def test_restricted_log_probs_may_be_scored_again(policy):
    first, second = leaf(LOGITS), leaf(LOGITS)
    gathered = policy.restricted_log_softmax(first, ALLOWED)[2]
    scored = policy.log_probs(policy.restricted_log_softmax(second, ALLOWED), torch.tensor(2))
    close(scored, gathered.item())
    (slope,) = grad(scored, second)
    close(slope, grad(gathered, first)[0].numpy())
    assert (slope[~ALLOWED] == 0).all()


def check_half_precision(log_probs):
    """Against float64 on the very same bfloat16 logits: only the computation may differ."""
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(4, 32768, generator=generator)).bfloat16()
    targets = torch.randint(0, 32768, (4,), generator=generator)
    exact = [
        math.log(softmax(row.double().numpy())[t]) for row, t in zip(logits, targets, strict=True)
    ]
    got = log_probs(logits, targets)
    assert got.dtype == torch.float32
    close(got.double(), exact, 1e-5)


def wrong_half_precision(logits, targets):
    return torch.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1).float()


@pytest.mark.claim("2.19", "enumeration")
def test_half_precision_logits_are_upcast(policy):
    """V=32768: log-softmax in bfloat16 errs by hundredths of a nat, upcast by less than 1e-5."""
    check_half_precision(policy.log_probs)
    fails(check_half_precision, wrong_half_precision)
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(4, 32768, generator=generator)).bfloat16()
    off = wrong_half_precision(logits, logits.argmin(-1)) - policy.log_probs(
        logits, logits.argmin(-1)
    )
    assert off.abs().max() > 0.03
    for dtype in (torch.float16, torch.bfloat16):
        logits = torch.tensor([1.0, 2.0, 3.0], dtype=dtype, requires_grad=True)
        restricted = policy.restricted_log_softmax(logits, torch.tensor([True, True, False]))
        assert restricted.dtype == torch.float32
        close(restricted[:2], np.log(softmax(np.array([1.0, 2.0]))), 1e-6)
        assert grad(restricted[0], logits)[0].dtype == dtype


def test_log_probs_refuses_bad_input(policy):
    logits, targets = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    refuses(ValueError, r"`targets` has shape \(2, 1\), expected \(2, 3\)",
            policy.log_probs, logits, targets[:, :1])  # fmt: skip
    for outside in (-100, -1, 5):
        bad = targets.clone()
        bad[1, 2] = outside
        refuses(ValueError, rf"`targets` must lie in \[0, 5\), got {outside} at index \(1, 2\)",
                policy.log_probs, logits, bad)  # fmt: skip
    refuses(TypeError, "`targets` must be int64", policy.log_probs, logits, targets.float())
    refuses(TypeError, "`logits` must be a torch.Tensor", policy.log_probs, [0.0], targets)
    for temperature in (0, -1.0, math.inf, math.nan):
        refuses(ValueError, "`temperature` must be positive and finite",
                policy.log_probs, logits, targets, temperature)  # fmt: skip
    for value in (math.nan, math.inf, -math.inf):
        bad = logits.clone()
        bad[0, 1, 0] = value
        refuses(ValueError, r"every target a finite log-probability, got .* at index \(0, 1\)",
                policy.log_probs, bad, targets)  # fmt: skip


# Score


def test_score_is_the_gradient_of_the_log_probability(policy):
    rows = policy.score(torch.tensor(np.log(PI)).expand(3, 3), torch.arange(3))
    for action in range(3):
        close(rows[action], gradient(lambda t, a=action: np.log(softmax(t)[a]), THETA))


def test_expected_score_is_zero_and_weighted_with_rewards_is_the_policy_gradient(policy):
    """θ=(.2,-.1,.4), r=(1,0,.5): ∇J=(.154024,-.135985,-.018038), with or without a baseline."""
    rows = policy.score(torch.tensor(np.log(PI)).expand(3, 3), torch.arange(3)).numpy()
    close(PI, [0.337585, 0.250089, 0.412327], 5e-7)
    close(PI @ rows, np.zeros(3))
    exact = gradient(lambda t: softmax(t) @ REWARDS, THETA)
    close(exact, [0.154024, -0.135985, -0.018038], 1e-6)
    for baseline in (0.0, PI @ REWARDS, 7.0):
        close((PI * (REWARDS - baseline)) @ rows, exact)


def test_score_is_exactly_zero_at_forbidden_actions(policy):
    log_probs = policy.restricted_log_softmax(torch.tensor(LOGITS), ALLOWED)
    row = policy.score(log_probs, torch.tensor(3))
    assert (row[~ALLOWED] == 0).all()
    kept = gradient(lambda t: np.log(softmax(t)[2]), LOGITS[KEPT])
    close(row[KEPT], kept)


def test_score_refuses_bad_input(policy):
    log_probs = torch.tensor([[0.5, 0.5, 0.0]]).log()
    refuses(ValueError, "`actions` must have positive probability, got 2",
            policy.score, log_probs, torch.tensor([2]))  # fmt: skip
    refuses(ValueError, r"`actions` must lie in \[0, 3\)",
            policy.score, log_probs, torch.tensor([3]))  # fmt: skip
    refuses(ValueError, r"`actions` has shape \(\), expected \(1,\)",
            policy.score, log_probs, torch.tensor(0))  # fmt: skip
    refuses(ValueError, r"sum to 1 .* at index \(0,\)",
            policy.score, torch.zeros(1, 3), torch.tensor([0]))  # fmt: skip
    refuses(TypeError, "float32 or float64", policy.score, log_probs.half(), torch.tensor([0]))


# Entropy


def numpy_entropy(theta):
    return -(softmax(theta) * np.log(softmax(theta))).sum()


def wrong_unmasked_entropy(log_probs):
    return -(log_probs.exp() * log_probs).sum(-1)


def wrong_masked_after_the_product(log_probs):
    terms = log_probs.exp() * log_probs
    return -terms.masked_fill(log_probs == -math.inf, 0.0).sum(-1)


def wrong_sampled_entropy(log_probs):
    """-log π(a) in expectation over a ~ π, with the sampling held fixed as in a loss."""
    return -(log_probs.detach().exp() * log_probs.masked_fill(log_probs == -math.inf, 0)).sum(-1)


def check_entropy_gradient(entropy):
    logits = leaf(THETA)
    (slope,) = grad(entropy(torch.log_softmax(logits, dim=-1)), logits)
    close(slope, gradient(numpy_entropy, THETA))


def check_entropy_of_a_restricted_policy(entropy):
    """Restricted by hand, without the second fill, so that only `entropy` guards the product."""
    logits = leaf(LOGITS)
    value = entropy(torch.log_softmax(logits.masked_fill(~ALLOWED, -math.inf), dim=-1))
    close(value, numpy_entropy(LOGITS[KEPT]))
    (slope,) = grad(value, logits)
    assert (slope[~ALLOWED] == 0).all()
    close(slope[KEPT], gradient(numpy_entropy, LOGITS[KEPT]))


@BOTH
def test_entropy_values(dtype, policy):
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    rows = torch.tensor([[0.25] * 4, [0.5, 0.5, 0, 0], [1, 0, 0, 0]], dtype=dtype).log()
    close(policy.entropy(rows), [math.log(4), math.log(2), 0.0], tolerance)
    got = policy.entropy(torch.tensor(np.log(PI), dtype=dtype))
    assert got.dtype == dtype
    close(got, numpy_entropy(THETA), tolerance)


def test_entropy_gradient(policy):
    check_entropy_gradient(policy.entropy)
    closed_form = -PI * (np.log(PI) + numpy_entropy(THETA))
    close(gradient(numpy_entropy, THETA), closed_form)
    fails(check_entropy_gradient, lambda log_probs: -policy.entropy(log_probs))


def test_entropy_gradient_is_zero_at_forbidden_actions(policy):
    check_entropy_of_a_restricted_policy(policy.entropy)
    fails(check_entropy_of_a_restricted_policy, wrong_unmasked_entropy)
    fails(check_entropy_of_a_restricted_policy, wrong_masked_after_the_product)
    for wrong in (wrong_unmasked_entropy, wrong_masked_after_the_product):
        logits = leaf(LOGITS)
        log_probs = torch.log_softmax(logits.masked_fill(~ALLOWED, -math.inf), dim=-1)
        assert torch.isnan(grad(wrong(log_probs), logits)[0]).any()


def test_mean_of_minus_log_prob_is_no_entropy_bonus(policy):
    """Right value, expected gradient zero: the bonus would do nothing but add noise."""
    fails(check_entropy_gradient, wrong_sampled_entropy)
    logits = leaf(THETA)
    value = wrong_sampled_entropy(torch.log_softmax(logits, dim=-1))
    close(value, numpy_entropy(THETA))
    close(grad(value, logits)[0], np.zeros(3))


def test_entropy_bonus_enters_a_loss_with_a_minus(policy):
    def after_one_step(sign):
        logits = leaf(THETA)
        loss = sign * policy.entropy(torch.log_softmax(logits, dim=-1))
        return numpy_entropy(THETA - 0.1 * grad(loss, logits)[0].numpy())

    assert after_one_step(-1) > numpy_entropy(THETA) > after_one_step(+1)


def test_entropy_refuses_logits_and_half_precision(policy):
    refuses(ValueError, "`log_probs` must have probabilities that sum to 1",
            policy.entropy, torch.tensor(LOGITS))  # fmt: skip
    refuses(ValueError, "sum to 1", policy.entropy, torch.tensor([math.nan, 0.0]))
    refuses(TypeError, "float32 or float64, got torch.bfloat16",
            policy.entropy, torch.tensor([0.5, 0.5]).log().bfloat16())  # fmt: skip


# All of it


def test_autograd_agrees_with_finite_differences(policy):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    actions = torch.tensor([[0, 2, 3], [3, 0, 2]])

    def kept(logits):
        return policy.restricted_log_softmax(logits, ALLOWED)

    assert gradcheck(lambda z: kept(z)[..., ALLOWED], logits)
    assert gradcheck(lambda z: policy.entropy(kept(z)), logits)
    assert gradcheck(lambda z: policy.score(kept(z), actions), logits)
    assert gradcheck(lambda z: policy.log_probs(z, actions, 0.7), logits)


def test_score_and_entropy_gradient_symbolically():
    """E score = 0, and ∂H/∂θ_k = -π_k (log π_k + H), for three actions and any logits."""
    theta = sympy.symbols("theta1:4", real=True)
    total = sum(sympy.exp(t) for t in theta)
    pi = [sympy.exp(t) / total for t in theta]
    log_pi = [t - sympy.log(total) for t in theta]
    entropy = -sum(p * lp for p, lp in zip(pi, log_pi, strict=True))
    for k, t in enumerate(theta):
        scores = [sympy.diff(lp, t) for lp in log_pi]
        assert sympy.simplify(sum(p * s for p, s in zip(pi, scores, strict=True))) == 0
        for action, s in enumerate(scores):
            assert sympy.simplify(s - (int(action == k) - pi[k])) == 0
        claimed = -pi[k] * (log_pi[k] + entropy)
        assert sympy.simplify(sympy.diff(entropy, t) - claimed) == 0


MUTANTS = [
    (
        "torch.log_softmax(logits.masked_fill(~allowed, -math.inf), dim=-1)",
        "torch.log_softmax(logits, dim=-1)",
        test_restricted_softmax_is_the_softmax_of_the_kept_logits,
    ),
    (
        "return inside.masked_fill(~allowed, -math.inf)",
        "return inside",
        test_restricted_gradient_is_zero_at_forbidden_actions_and_never_nan,
    ),
    (
        '_checks.reject(count == 0, count, "`allowed` must keep',
        '_checks.reject(count < 0, count, "`allowed` must keep',
        test_restricted_softmax_refuses_bad_input,
    ),
    (
        "_checks.finite(logits=logits.masked_fill(~allowed, 0.0))",
        "",
        test_restricted_softmax_refuses_bad_input,
    ),
    (
        "allowed.shape not in (logits.shape, logits.shape[-1:])",
        "allowed.shape[-1:] != logits.shape[-1:]",
        test_restricted_softmax_refuses_bad_input,
    ),
    (
        "return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits",
        "return logits",
        test_half_precision_logits_are_upcast,
    ),
    (
        "logits / temperature, dim",
        "logits, dim",
        test_sampling_temperature_belongs_in_the_log_probs,
    ),
    (
        "logits / temperature, dim",
        "logits * temperature, dim",
        test_gradient_of_log_probs_is_the_score_over_the_temperature,
    ),
    ("0 < temperature < math.inf", "0 <= temperature", test_log_probs_refuses_bad_input),
    (
        "(actions < 0) | (actions >= size)",
        "(actions < 0) | (actions > size)",
        test_log_probs_refuses_bad_input,
    ),
    (
        "_checks.reject(~torch.isfinite(selected), selected, expected)",
        "_checks.reject(torch.isnan(selected), selected, expected)",
        test_log_probs_refuses_bad_input,
    ),
    (
        "return one_hot - log_probs.exp()",
        "return log_probs.exp() - one_hot",
        test_score_is_the_gradient_of_the_log_probability,
    ),
    (
        "return one_hot - log_probs.exp()",
        "return one_hot.to(log_probs.dtype)",
        test_expected_score_is_zero_and_weighted_with_rewards_is_the_policy_gradient,
    ),
    ("chosen == -math.inf", "chosen == math.inf", test_score_refuses_bad_input),
    (
        "return -(log_probs.exp() * finite).sum(-1)",
        "return (log_probs.exp() * finite).sum(-1)",
        test_entropy_gradient,
    ),
    (
        "return -(log_probs.exp() * finite).sum(-1)",
        "return -(log_probs.exp() * log_probs).sum(-1)",
        test_entropy_gradient_is_zero_at_forbidden_actions,
    ),
    (
        "return -(log_probs.exp() * finite).sum(-1)",
        "return -(log_probs.detach().exp() * finite).sum(-1)",
        test_entropy_gradient,
    ),
    (
        "return -(log_probs.exp() * finite).sum(-1)",
        "return -(log_probs.exp() * finite).sum(-1) / math.log(2)",
        test_entropy_gradient_is_zero_at_forbidden_actions,
    ),
]


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.policy", old, new, check)
