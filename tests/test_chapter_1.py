"""Claims of chapter 1 that are about the contract as a whole, counted with a rule stated here."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from mathrl import arithmetic, baseline, policy
from mathrl.arithmetic import TASKS, TEST, TRAIN, verify
from tests.oracles import fails

EOS = 13
PATHS = [(u, v) for u in range(10) for v in range(10)]


def is_right(task, path):
    return path[0] - task[0] == task[1] and (path[1] - 2 * path[0]) % 10 == 0


def success(respond, tasks):
    return Fraction(sum(verify(task, respond(task))["reward"] for task in tasks), len(tasks))


def lookup(task):
    return arithmetic.target(task) if task in TRAIN else [0, 0, EOS]


@pytest.mark.claim("1.3", "enumeration")
def test_a_success_rate_depends_on_the_distribution_of_tasks():
    rates = [success(lookup, tasks) for tasks in (TRAIN, TEST, TASKS)]
    assert rates == [1, 0, Fraction(4, 5)]
    assert {(a, b) for a, b in TASKS if a + b != 4} == set(TRAIN)


@pytest.mark.claim("1.4", "algebra")
def test_a_uniform_response_costs_two_choices_and_the_forced_step_nothing():
    assert len(arithmetic.responses()) == 100
    assert math.log(1 / 10) * 2 + math.log(1) == pytest.approx(-math.log(100), abs=1e-15)
    assert round(-2 * math.log(10), 4) == -4.6052
    forced = policy.restricted_log_softmax(torch.randn(14), torch.arange(14) == EOS)
    assert forced[EOS].item() == 0.0


def ten_logits(logits):
    """Softmax of the first ten, by the definition, in numpy."""
    weights = np.exp(logits[:10])
    return weights / weights.sum()


def check_restricted(log_softmax):
    rng = np.random.default_rng(0)
    allowed = torch.arange(14) < 10
    for _ in range(20):
        logits = rng.normal(size=14) * 3
        probs = log_softmax(torch.tensor(logits), allowed).exp().numpy()
        np.testing.assert_allclose(probs[:10], ten_logits(logits), rtol=1e-12)
        assert (probs[10:] == 0).all()
        assert probs.sum() == pytest.approx(1, abs=1e-12)
        logits[10:] = rng.normal(size=4) * 100
        changed = log_softmax(torch.tensor(logits), allowed).exp().numpy()
        np.testing.assert_allclose(changed, probs, rtol=1e-12)


def wrong_truncated(logits, allowed):
    return torch.log_softmax(logits, -1).masked_fill(~allowed, -math.inf)


@pytest.mark.claim("1.5", "enumeration")
def test_restricted_softmax_is_the_softmax_of_ten_logits():
    check_restricted(policy.restricted_log_softmax)
    fails(check_restricted, wrong_truncated)


@pytest.mark.claim("1.6", "algebra")
def test_truncation_loses_the_log_of_the_kept_mass_at_each_step():
    allowed = torch.arange(14) < 10
    rng = np.random.default_rng(1)
    for logits in (np.zeros(14), rng.normal(size=14)):
        kept = (np.exp(logits[:10]) / np.exp(logits).sum()).sum()
        theta = torch.tensor(logits)
        lost = policy.restricted_log_softmax(theta, allowed) - wrong_truncated(theta, allowed)
        np.testing.assert_allclose(lost[:10].numpy(), -math.log(kept), rtol=1e-12)
    assert round(10 / 14, 3) == 0.714
    assert round(-math.log(10 / 14), 4) == 0.3365


SHAPED = {"format": 0.0, "intermediate": 0.2, "final": 0.5, "ok": 1.0}


@pytest.mark.claim("1.10", "enumeration")
def test_shaping_reverses_the_order_of_two_policies():
    def values(mixture):
        verdicts = [(p, verify((3, 4), [*path, EOS])) for path, p in mixture.items()]
        return (
            sum(p * verdict["reward"] for p, verdict in verdicts),
            sum(p * SHAPED[verdict["reason"]] for p, verdict in verdicts),
        )

    often, never = values({(7, 4): 0.3, (0, 0): 0.7}), values({(7, 0): 1.0})
    assert often == pytest.approx((0.3, 0.3 * 1 + 0.7 * 0.2))
    assert never == pytest.approx((0.0, 0.2 + 0.3))
    assert often[0] > never[0]
    assert often[1] < never[1]


@pytest.mark.claim("1.11", "enumeration")
def test_the_five_responses_of_the_worked_example():
    reasons = [
        verify((3, 4), response)["reason"]
        for response in ([7, 4, 13], [7, 14, 13], [4, 8, 13], [7, 4], [7, 4, 13, 13])
    ]
    assert reasons == ["ok", "format", "intermediate", "format", "format"]


@pytest.mark.claim("1.12", "enumeration")
def test_the_uniform_policy_succeeds_once_in_a_hundred():
    for task in TASKS:
        counted = sum(is_right(task, path) for path in PATHS)
        paid = sum(verify(task, y)["reward"] for y in arithmetic.responses())
        assert Fraction(paid, 100) == Fraction(counted, 100) == Fraction(1, 10) * Fraction(1, 10)


@pytest.mark.claim("1.13", "enumeration")
def test_silent_groups():
    silent = sum(
        math.prod([0.01 if won else 0.99 for won in group])
        for group in itertools.product((False, True), repeat=8)
        if not any(group)
    )
    assert round(silent, 4) == 0.9227
    assert round(1 - silent, 4) == 0.0773
    for value in (0.0, 1.0, 0.7):
        for advantages in (baseline.group_mean, baseline.leave_one_out, baseline.standardized):
            assert (advantages(torch.full((8,), value)) == 0).all()
    some = baseline.group_mean(torch.tensor([1.0] + [0.0] * 7))
    assert (some != 0).all()  # one success is enough for every sample to be weighted


@pytest.mark.claim("1.14", "enumeration")
def test_lucky_and_consistent_responses():
    for task in TASKS:
        wrong = [path for path in PATHS if not is_right(task, path)]
        right = next(path for path in PATHS if is_right(task, path))
        lucky = {path for path in wrong if path[1] == right[1]}
        consistent = {(u, v) for u, v in wrong if v == 2 * u % 10}
        assert (len(lucky), len(consistent)) == (9, 9)
        assert lucky & consistent == {((right[0] + 5) % 10, right[1])}
        for path in lucky | consistent:
            assert verify(task, [*path, EOS])["reward"] == 0


@pytest.mark.claim("1.15", "enumeration")
def test_the_held_out_split_is_an_extrapolation():
    digits = {
        name: [{(a + b), 2 * (a + b) % 10} for a, b in tasks]
        for name, tasks in (("train", TRAIN), ("test", TEST))
    }
    assert all(pair == {4, 8} for pair in digits["test"])
    assert all(a + b != 4 and 2 * (a + b) % 10 != 8 for a, b in TRAIN)
    same_sum = [s for s in itertools.combinations(TASKS, 5) if len({a + b for a, b in s}) == 1]
    assert math.comb(25, 5) == 53130
    assert [set(split) for split in same_sum] == [set(TEST)]
