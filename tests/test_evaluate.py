"""Exact success, pass@k, intervals and paired comparisons against enumeration and known values."""

import itertools
import json
import math
from statistics import NormalDist

import mpmath
import numpy as np
import pytest
import torch

from mathrl import by_hand, compare, evaluate, exact
from mathrl.arithmetic import TASKS, TEST, TRAIN, encode, responses, verify
from mathrl.decoder import Decoder, DecoderConfig
from mathrl.evaluate import Budget, pass_at_k, pass_at_k_estimate
from mathrl.grammar import Grammar
from mathrl.problem import SHAPED, Problem, arithmetic_problem
from tests.mutants import assert_caught
from tests.oracles import fails, refuses


def network(seed=0):
    model = Decoder(DecoderConfig(width=8, heads=2), seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise)
    return model


def close(got, expected, tolerance=1e-12):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    expected = np.asarray(expected)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert np.allclose(got, expected, rtol=0, atol=tolerance), (got, expected)


def table(model, task, temperature=1.0):
    """Both distributions after a task, by numpy from whole sequences."""
    parameters = {name: x.double().numpy() for name, x in model.state_dict().items()}
    rows = np.array([[*encode(task), u] for u in range(10)])
    logits, _ = by_hand.forward(parameters, rows, model.config.heads)
    first, second = logits[0, 4, :10], logits[:, 5, :10]
    return [exact.log_softmax(first / temperature), exact.log_softmax(second / temperature)]


def probabilities(model, task, temperature=1.0):
    first, second = table(model, task, temperature)
    return np.exp(first[:, None] + second).ravel()


# Exact evaluation


def check_value(evaluate=evaluate):
    model = network()
    for temperature in (1.0, 0.5):
        for pay in ({"ok": 1.0}, SHAPED):
            expected = [
                probabilities(model, task, temperature)
                @ [pay.get(verify(task, y)["reason"], 0.0) for y in responses()]
                for task in TASKS
            ]
            found = evaluate.value(model, arithmetic_problem(TASKS, pay), temperature)
            close(found, expected, 1e-7)


def check_failures(evaluate=evaluate):
    model = network()
    found = evaluate.failures(model, TASKS, 0.7)
    assert set(found) == {"ok", "intermediate", "final"}
    for row, task in enumerate(TASKS):
        joint = probabilities(model, task, 0.7)
        for reason, numbers in found.items():
            said = [verify(task, y)["reason"] == reason for y in responses()]
            close(numbers[row], joint @ said)
    close(sum(found.values()), np.ones(25))


def check_summary(evaluate=evaluate):
    model, ref = network(), network(1)
    found = evaluate.summary(model, TEST, ref)
    assert json.loads(json.dumps(found)) == found
    joints = [probabilities(model, task) for task in TEST]
    right = [[y == verify_target(task) for y in responses()] for task in TEST]
    success = [joint @ row for joint, row in zip(joints, right, strict=True)]
    assert found["success"] == pytest.approx(np.mean(success))
    assert found["worst"] == pytest.approx(np.min(success))
    assert found["entropy"] == pytest.approx(np.mean([-(q * np.log(q)).sum() for q in joints]))
    away = [exact.tree_kl(table(model, t), table(ref, t)).sum() for t in TEST]
    assert found["kl"] == pytest.approx(np.mean(away))
    assert found["success"] + found["intermediate"] + found["final"] == pytest.approx(1)
    greedy = []
    for task in TEST:
        first, second = table(model, task)
        u = first.argmax()
        greedy.append([u, second[u].argmax()] == verify_target(task)[:2])
    assert found["greedy"] == np.mean(greedy)
    assert "kl" not in evaluate.summary(model, TEST)


def verify_target(task):
    return next(y for y in responses() if verify(task, y)["reward"])


@pytest.mark.claim("7.1", "enumeration")
def test_value_is_the_reward_of_every_response_weighed():
    check_value()


@pytest.mark.claim("7.1", "enumeration")
def test_failures_are_the_probabilities_of_the_verdicts():
    check_failures()


def test_summary_of_a_split():
    check_summary()


def test_the_gradient_is_that_of_the_mean_value():
    model, problem = network(), arithmetic_problem(TRAIN)
    slopes = evaluate.gradient(model, problem)
    torch.manual_seed(0)
    direction = {name: torch.randn_like(slope) for name, slope in slopes.items()}

    def moved(step):
        other = network()
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                parameter += step * direction[name]
        return evaluate.value(other, problem).mean().item()

    expected = sum((slopes[name] * direction[name]).sum().item() for name in slopes)
    assert (moved(1e-5) - moved(-1e-5)) / 2e-5 == pytest.approx(expected, rel=1e-5)


def check_greedy(evaluate=evaluate):
    """Greedy decoding need not find the likeliest response: .4 · .5 > .6 · .3."""
    grammar = Grammar([(0, 1), (2, 3, 4, 5)])
    prompts = torch.tensor([[12], [11]])

    class Fixed(torch.nn.Module):
        config = DecoderConfig()

        def forward(self, tokens, positions, mask):
            logits = torch.zeros(2, 3, 14)
            logits[:, 0, :2] = torch.tensor([[0.6, 0.4], [0.2, 0.8]]).log()
            logits[:, 1, 2:6] = torch.tensor([0.3, 0.25, 0.25, 0.2]).log()
            logits[:, 2, 2:6] = torch.tensor([0.2, 0.5, 0.2, 0.1]).log()
            return logits

    problem = Problem(prompts, grammar, torch.zeros(2, 8), torch.zeros(2, 2, dtype=torch.int64))
    assert evaluate.greedy(Fixed(), problem).tolist() == [0, 5]


def test_greedy_takes_the_likeliest_token_each_time():
    check_greedy()


# pass@k


def wrong_plug_in(n, c, k):
    return 1 - (1 - c / n) ** k


def wrong_whatever_the_domain(n, c, k):
    return 1.0 if n - c < k else 1 - math.comb(n - c, k) / math.comb(n, k)


def check_unbiased(estimate):
    for n, k, p in ((4, 4, 0.3), (10, 5, 0.1), (10, 1, 0.7), (7, 3, 0.02)):
        chance = exact.binomial(n, p)
        mean = sum(chance[c] * estimate(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def check_subsets(estimate):
    for n, c, k in ((5, 2, 3), (4, 1, 4), (6, 0, 2), (6, 6, 2), (5, 4, 1)):
        won = [True] * c + [False] * (n - c)
        groups = list(itertools.combinations(won, k))
        assert estimate(n, c, k) == pytest.approx(sum(map(any, groups)) / len(groups))


def check_domain(estimate):
    refuses(ValueError, r"`k` must lie in \[1, n = 2\], got 5", estimate, 2, 0, 5)
    refuses(ValueError, "`k` must lie", estimate, 2, 0, 0)
    refuses(ValueError, r"`c` must lie in \[0, n = 2\], got 3", estimate, 2, 3, 1)
    refuses(ValueError, "`c` must lie", estimate, 2, -1, 1)
    refuses(TypeError, "`n` must be an int, got 2.0", estimate, 2.0, 0, 1)
    refuses(TypeError, "`c` must be an int, got True", estimate, 2, True, 1)


@pytest.mark.claim("7.2", "enumeration")
def test_estimate_of_pass_at_k_is_unbiased():
    """Plug-in at n = 4, c = 1, k = 4: .6836; its mean at p = .1, n = 10, k = 5: .3485 of .4095."""
    check_unbiased(pass_at_k_estimate)
    check_subsets(pass_at_k_estimate)
    fails(check_unbiased, wrong_plug_in)
    fails(check_subsets, wrong_plug_in)
    assert round(wrong_plug_in(4, 1, 4), 4) == 0.6836
    assert pass_at_k_estimate(4, 1, 4) == 1
    chance = exact.binomial(10, 0.1)
    mean = sum(chance[c] * wrong_plug_in(10, c, 5) for c in range(11))
    assert (round(mean, 4), round(pass_at_k(0.1, 5), 4)) == (0.3485, 0.4095)


@pytest.mark.claim("7.2", "enumeration")
def test_no_estimate_from_fewer_samples_than_k():
    """n = 2, c = 0, k = 5 must raise; a known harness returns 1.0 (openai/human-eval#35)."""
    check_domain(pass_at_k_estimate)
    fails(check_domain, wrong_whatever_the_domain)
    assert wrong_whatever_the_domain(2, 0, 5) == 1.0


def check_pass_at_k(evaluate=evaluate):
    assert evaluate.pass_at_k(0.01, 8) == pytest.approx(1 - 0.99**8)
    assert round(1 - evaluate.pass_at_k(0.01, 8), 5) == 0.92274
    assert (evaluate.pass_at_k(0.0, 3), evaluate.pass_at_k(1.0, 3)) == (0.0, 1.0)
    assert evaluate.pass_at_k(1e-18, 5) == pytest.approx(5e-18, abs=0)
    for wrong in (-0.1, 1.1, math.nan):
        refuses(ValueError, r"`p` must lie in \[0, 1\]", evaluate.pass_at_k, wrong, 1)
    refuses(ValueError, "`k` must be at least 1", evaluate.pass_at_k, 0.5, 0)


def test_pass_at_k_is_that_of_independent_samples():
    check_pass_at_k()


def test_budgets_add_up():
    one = Budget(samples=1, sampled_tokens=2, trained_tokens=3, positions=4, optimizer_steps=5)
    two = Budget(samples=10, sampled_tokens=20, trained_tokens=30, positions=40, optimizer_steps=50)
    assert one + two == Budget(11, 22, 33, 44, 55)


# Intervals


def wald(successes, n, confidence=0.95):
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / n
    margin = z * math.sqrt(p * (1 - p) / n)
    return max(0.0, p - margin), min(1.0, p + margin)


def coverage(interval, n, p):
    chance = exact.binomial(n, p)
    ends = [interval(c, n) for c in range(n + 1)]
    return sum(chance[c] for c, (low, high) in enumerate(ends) if low <= p <= high)


def check_wilson(interval):
    """The ends are where a test with the deviation of p itself just rejects."""
    cases = [(c, n, 0.9 + n / 500) for n in (1, 5, 8, 13, 21, 40) for c in range(n + 1)]
    for successes, n, confidence in cases:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        low, high = interval(successes, n, confidence)
        assert 0 <= low < high <= 1
        for end in {low, high} - {0.0, 1.0}:
            distance = abs(successes / n - end) / math.sqrt(end * (1 - end) / n)
            assert distance == pytest.approx(z)
        assert (low == 0) == (successes == 0)
        assert (high == 1) == (successes == n)


@pytest.mark.claim("7.6", "enumeration")
def test_wilson_interval():
    """At n = 5, p = .9 Wald covers .401 and Wilson .919; 5 of 5 is [1, 1] against [.566, 1]."""
    check_wilson(compare.wilson)
    fails(check_wilson, wald)
    covered = [round(float(coverage(interval, 5, 0.9)), 3) for interval in (wald, compare.wilson)]
    assert covered == [0.401, 0.919]
    assert wald(5, 5) == (1.0, 1.0)
    assert [round(end, 3) for end in compare.wilson(5, 5)] == [0.566, 1.0]
    refuses(ValueError, "`n` must be at least 1", compare.wilson, 0, 0)
    refuses(ValueError, "`successes` must lie", compare.wilson, 6, 5)
    refuses(ValueError, "`confidence` must lie", compare.wilson, 3, 5, 1.0)


def check_student(compare=compare):
    """The distribution function at the quantile, by mpmath's incomplete beta function."""
    for degrees, probability in itertools.product((1, 2, 3, 4, 7, 30), (0.6, 0.975, 0.9995, 0.1)):
        t = compare.student_quantile(probability, degrees)
        x = degrees / (degrees + t * t)
        inside = 1 - mpmath.betainc(degrees / 2, 0.5, 0, x, regularized=True)
        below = float((1 + math.copysign(1, t) * inside) / 2)
        assert below == pytest.approx(probability, abs=1e-10)
    assert compare.student_quantile(0.5, 3) == pytest.approx(0, abs=1e-12)
    refuses(ValueError, "`probability` must lie", compare.student_quantile, 1.0, 3)
    refuses(ValueError, "`degrees` must be at least 1", compare.student_quantile, 0.9, 0)


def test_student_quantiles():
    check_student()


# Paired comparison


def check_paired(compare=compare):
    rng = np.random.default_rng(0)
    for n in (2, 5, 9):
        first, second = rng.normal(size=n).round(1), rng.normal(size=n).round(1)
        result, difference = compare.paired(first, second), first - second
        mean, spread = difference.mean(), difference.std(ddof=1) / math.sqrt(n)
        assert result.n == n
        assert result.mean == pytest.approx(mean)
        t = compare.student_quantile(0.975, n - 1)
        assert (result.low, result.high) == pytest.approx((mean - t * spread, mean + t * spread))
        signs = list(itertools.product((1, -1), repeat=n))
        sums = np.array(signs) @ difference
        far = np.abs(sums) >= abs(difference.sum()) - 1e-9
        assert result.permutation_p == pytest.approx(far.mean())
        kept = np.sign(difference[np.abs(difference) > 1e-12])
        tallies = np.abs(np.array(list(itertools.product((1, -1), repeat=len(kept)))).sum(1))
        assert result.sign_p == pytest.approx((tallies >= abs(kept.sum())).mean())


@pytest.mark.claim("7.7", "enumeration")
def test_paired_comparison():
    check_paired()
    equal = compare.paired([1.0, 2.0], [1.0, 2.0])
    assert equal == (2, 0.0, 0.0, 0.0, 1.0, 1.0)
    best = compare.paired([1.0] * 5, [0.0, 0.1, 0.2, 0.3, 0.4])
    assert (best.sign_p, best.permutation_p) == (0.0625, 0.0625)


def test_pairing_sees_what_two_separate_means_hide():
    """A gain of .01 on seeds that differ by .1: it is inside the margin of each mean alone."""
    seeds = np.array([0.5, 0.6, 0.7, 0.8, 0.9])
    gain = np.array([0.010, 0.012, 0.009, 0.011, 0.008])
    result = compare.paired(seeds + gain, seeds)
    assert 0 < result.low < 0.01 < result.high < 0.02
    margin = compare.student_quantile(0.975, 4) * seeds.std(ddof=1) / math.sqrt(5)
    assert margin > 0.1


def test_student_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(1)
    differences = rng.normal(0.3, 1.0, size=(4000, 5))
    t = compare.student_quantile(0.975, 4)
    margins = t * differences.std(1, ddof=1) / math.sqrt(5)
    covered = (np.abs(differences.mean(1) - 0.3) <= margins).mean()
    assert covered == pytest.approx(0.95, abs=0.015)


def check_paired_refusals(compare=compare):
    call, two = compare.paired, [1.0, 2.0]
    for n in (1, 21):
        refuses(ValueError, r"`first` must have shape \(n,\)", call, [1.0] * n, [1.0] * n)
    refuses(ValueError, r"`second` has shape \(3,\), expected \(2,\)", call, two, [1.0] * 3)
    refuses(ValueError, "`second` must be finite", call, two, [1.0, math.nan])
    refuses(TypeError, "`first` must hold real numbers", call, ["a", "b"], two)


def test_paired_comparison_refuses_bad_input():
    check_paired_refusals()


# Calibration


def check_calibration(compare=compare):
    rng = np.random.default_rng(0)
    stated = rng.random(200)
    came = (rng.random(200) < 0.5).astype(float)
    weight = rng.random(200)
    stated[:2] = 0.0, 1.0
    result = compare.calibration(stated, came, weight, bins=4)
    weight = weight / weight.sum()
    error = 0.0
    for index in range(4):
        low, high = index / 4, (index + 1) / 4
        inside = (stated >= low) & ((stated < high) | (index == 3))
        share = weight[inside].sum()
        assert result.share[index] == pytest.approx(share)
        assert result.confidence[index] == pytest.approx((weight * stated)[inside].sum() / share)
        assert result.accuracy[index] == pytest.approx((weight * came)[inside].sum() / share)
        error += share * abs(result.confidence[index] - result.accuracy[index])
    assert result.ece == pytest.approx(error)
    assert result.brier == pytest.approx((weight * (stated - came) ** 2).sum())


def test_calibration():
    check_calibration()
    perfect = compare.calibration([0.25] * 4, [1, 0, 0, 0])
    assert perfect.ece == pytest.approx(0)
    assert perfect.share.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert np.isnan(perfect.accuracy[0])


def test_calibration_of_enumerated_responses_is_the_limit_of_sampled_ones():
    model, problem = network(), arithmetic_problem(TRAIN)
    joint = np.array([probabilities(model, task) for task in TRAIN])
    right = problem.rewards.numpy()
    limit = compare.calibration(joint, right, joint, bins=5)
    drawn = np.random.default_rng(0).choice(joint.size, 100_000, p=joint.ravel() / joint.sum())
    sampled = compare.calibration(joint.ravel()[drawn], right.ravel()[drawn], bins=5)
    assert sampled.ece == pytest.approx(limit.ece, abs=0.01)
    assert sampled.brier == pytest.approx(limit.brier, abs=0.01)


def check_calibration_refusals(compare=compare):
    call = compare.calibration
    refuses(ValueError, r"`confidence` must lie in \[0, 1\]", call, [1.1], [1])
    refuses(ValueError, "`outcome` must be 0 or 1", call, [0.5], [0.5])
    refuses(ValueError, "`weight` must not be negative", call, [0.5], [1], [-1.0])
    refuses(ValueError, "`weight` must not be 0 everywhere", call, [0.5], [1], [0.0])
    refuses(ValueError, r"`outcome` has shape \(2,\), expected \(1,\)", call, [0.5], [1, 0])
    refuses(ValueError, "`bins` must be at least 1", call, [0.5], [1], bins=0)
    refuses(ValueError, "`confidence` must be finite", call, [math.nan], [1])


def test_calibration_refuses_bad_input():
    check_calibration_refusals()


def estimate_of(module):
    for check in (check_unbiased, check_subsets, check_domain):
        check(module.pass_at_k_estimate)


def wilson_of(module):
    check_wilson(module.wilson)


MUTANTS = [
    (
        "evaluate",
        "(joint.exp() * problem.rewards.to(joint.dtype)).sum(1)",
        "(joint.exp() * problem.rewards.to(joint.dtype)).mean(1)",
        check_value,
    ),
    (
        "evaluate",
        "problem.prompts, problem.grammar, temperature).joint\n    return",
        "problem.prompts, problem.grammar).joint\n    return",
        check_value,
    ),
    (
        "evaluate",
        "_enumerate(model, problem, temperature).joint.exp()",
        "_enumerate(model, problem).joint.exp()",
        check_failures,
    ),
    (
        "evaluate",
        "(joint * given.to(joint.device)).sum(2)",
        "(joint * given.to(joint.device)).sum(2).flip(0)",
        check_failures,
    ),
    ("evaluate", 'verdicts["ok"].min()', 'verdicts["ok"].max()', check_summary),
    ("evaluate", "policy.entropy(joint).mean()", "policy.entropy(joint).sum()", check_summary),
    (
        "evaluate",
        "kl.divergence(joint, _enumerate(reference, problem).joint)",
        "kl.divergence(_enumerate(reference, problem).joint, joint)",
        check_summary,
    ),
    ("evaluate", ".masked_fill(~open_, -math.inf).argmax(1)", ".argmax(1)", check_greedy),
    ("evaluate", "for t in range(everything.tokens.shape[1]):", "for t in range(1):", check_greedy),
    ("evaluate", "-math.expm1(k * math.log1p(-p))", "1 - (1 - p) ** k", check_pass_at_k),
    ("evaluate", "-math.expm1(k * math.log1p(-p))", "k * p", check_pass_at_k),
    ("evaluate", "math.comb(n - c, k) / math.comb(n, k)", "(1 - c / n) ** k", estimate_of),
    ("evaluate", "if not 1 <= k <= n:", "if not 1 <= k:", estimate_of),
    ("evaluate", "if type(number) is not int:", "if not isinstance(number, int):", estimate_of),
    ("compare", "(successes + z * z / 2)", "(successes + z / 2)", wilson_of),
    ("compare", "+ z * z / 4)", "+ z * z)", wilson_of),
    ("compare", "1.0 if successes == n else", "1.0 if False else", wilson_of),
    ("compare", "difference.std(ddof=1)", "difference.std()", check_paired),
    ("compare", "_tail(confidence), n - 1)", "_tail(confidence), n)", check_paired),
    ("compare", "return min(1.0, 2 * tail)", "return tail", check_paired),
    ("compare", "(np.abs(sums) >= observed)", "(sums >= observed)", check_paired),
    (
        "compare",
        " - 1e-12 * np.abs(difference).sum()",
        " + 1e-12 * np.abs(difference).sum()",
        check_paired,
    ),
    ("compare", "(power - 1) / power", "power / (power + 1)", check_student),
    ("compare", "term = cosine if odd else 1.0", "term = 1.0", check_student),
    ("compare", "2 * probability - 1", "probability", check_student),
    ("compare", "np.abs(said - held).sum()", "abs((said - held).sum())", check_calibration),
    (
        "compare",
        "weights = weights / weights.sum()",
        "weights = weights / weights.size",
        check_calibration,
    ),
]


@pytest.mark.parametrize(("module", "old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(module, old, new, check):
    assert_caught(f"mathrl.{module}", old, new, check)
