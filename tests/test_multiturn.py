"""The two-turn world against enumeration in numpy, and what each wrong mask ascends."""

import itertools
from statistics import median

import numpy as np
import pytest
import torch

from mathrl import compare, evidence, masking, multiturn
from mathrl._sources import ROOT
from mathrl.arithmetic import TRAIN
from mathrl.config import ReinforceConfig, SupervisedConfig
from mathrl.decoder import Decoder, DecoderConfig
from mathrl.masking import FAULTS, MaskingConfig
from tests.mutants import assert_caught
from tests.oracles import refuses

TASKS = [(3, 4), (0, 2)]
DIGITS = range(10)
SMALL = DecoderConfig(context_length=11, width=8, heads=2, depth=1)


def network(seed=0):
    """A small float64 decoder, far from uniform."""
    model = Decoder(SMALL, seed=seed).double()
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn(parameter.shape, generator=draws).double())
    return model


def every_chance(model, task):
    """Probability of each of the 1,000 conversations, by x, y and v; one sequence for each."""
    a, b = task
    written = [
        [12, a, 10, b, 11, x, y, (x + y) // 10, (x + y) % 10, v]
        for x, y, v in itertools.product(DIGITS, repeat=3)
    ]
    with torch.no_grad():
        logits = model(torch.tensor(written)).numpy()[..., :10]
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    steps = [[chances[i, t, row[t + 1]] for t in (4, 5, 8)] for i, row in enumerate(written)]
    return np.prod(steps, axis=1).reshape(10, 10, 10)


def right(task):
    """Whether a conversation is paid: the tool saw the right sum, and twice its last digit ends."""
    total = sum(task)
    x, y, v = np.ogrid[:10, :10, :10]
    return ((x + y == total) & (v == 2 * total % 10)).astype(float)


def check_enumeration(module):
    model = network()
    found = module.enumerate_all(model, TASKS).detach().exp().numpy()
    for number, task in enumerate(TASKS):
        chances = every_chance(model, task)
        np.testing.assert_allclose(found[number], chances, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(module.rewards(TASKS)[number], right(task))
        success = module.value(model, TASKS)[number].item()
        np.testing.assert_allclose(success, (chances * right(task)).sum(), rtol=0, atol=1e-12)


def check_sampling(module):
    """What is drawn is drawn from that distribution, and says how likely it was."""
    model, many = network(), 4000
    uniforms = torch.rand(many, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    talks = module.converse(model, [TASKS[0]] * many, uniforms)
    chances, counts = every_chance(model, TASKS[0]), np.zeros((10, 10, 10))
    for talk in talks:
        (x, y), (v, stop) = (call.output_ids for call in talk.calls)
        counts[x, y, v] += 1
        assert stop == 13
        assert talk.reward == right(TASKS[0])[x, y, v]
        assert talk.calls[0].prompt_ids == (12, 3, 10, 4, 11)
        assert talk.calls[1].prompt_ids == (12, 3, 10, 4, 11, x, y, (x + y) // 10, (x + y) % 10)
        one, two = (call.log_probs for call in talk.calls)
        np.testing.assert_allclose(sum(one) + sum(two), np.log(chances[x, y, v]), atol=1e-9)
        assert two[1] == 0.0
    for axis in range(3):
        others = tuple({0, 1, 2} - {axis})
        expected = chances.sum(others) * many
        assert (((counts.sum(others) - expected) ** 2 / expected).sum()) < 40  # 9 degrees


def check_calibration(module):
    model, confidence, correct = network(), [], []
    for task in TASKS:
        chances = every_chance(model, task)
        for total, v in itertools.product(range(19), DIGITS):
            pairs = [(x, total - x) for x in DIGITS if 0 <= total - x <= 9]
            confidence.append(sum(chances[x, y, v] for x, y in pairs))
            correct.append(float(total == sum(task) and v == 2 * total % 10))
    found = module.calibration(model, TASKS)
    weights, correct = np.array(confidence), np.array(correct)
    brier = (weights * (weights - correct) ** 2).sum() / weights.sum()
    np.testing.assert_allclose(found.brier, brier, rtol=0, atol=1e-12)
    expected = compare.calibration(confidence, correct, confidence)
    np.testing.assert_allclose(found.ece, expected.ece, rtol=0, atol=1e-12)


def check_errors(module):
    refuses(ValueError, "`request` must be two digits, got", module.tool, [3])
    refuses(ValueError, "`request` must be two digits, got", module.tool, [3, 12])
    uniforms = torch.zeros(1, 2, dtype=torch.float64)
    refuses(ValueError, r"`uniforms` has shape \(1, 2\)", module.converse, network(), TASKS[:1],
            uniforms)  # fmt: skip
    begun = torch.tensor([[12, 3, 10, 4, 11, 13, 4]])
    refuses(ValueError, "`tokens` must hold a digit", module.log_probs, network(), begun)


WORLD = [check_enumeration, check_sampling, check_calibration, check_errors]


@pytest.mark.parametrize("check", WORLD)
def test_two_turns(check):
    check(multiturn)


# ---------------------------------------------------------------- masks by hand

#         +  4  =  3  4  0  7  4 EOS: the targets of 3 + 4, asked and answered as it should be
BY_HAND = {
    "right": [[0, 0, 0, 0, 1, 1, 0, 0, 1, 1]],
    "late": [[0, 0, 0, 0, 0, 1, 1, 0, 0, 1]],
    "early": [[0, 0, 0, 1, 1, 0, 0, 1, 1, 0]],
    "tool": [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]],
    "history": [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0, 1, 1]],
    "filler": [[0, 0, 0, 0, 1, 1, 0, 0, 1, 1]],
}


def check_masks(module):
    model, scores = network(), [-1.0, -2.0, -3.0]
    talk = multiturn.conversation((3, 4), [3, 4], 4, scores)
    sampled = {4: -1.0, 5: -2.0, 8: -3.0, 9: 0.0}
    for fault, expected in BY_HAND.items():
        batch = module.tensors(model, [talk], [0.5], fault)
        assert batch.mask.int().tolist() == expected, fault
        assert torch.equal(batch.weights, batch.mask.double())
        now = multiturn.log_probs(model, batch.input_ids)
        for row, target in batch.mask.nonzero().tolist():
            assert batch.advantages[row, target] == 0.5
            old = 0.0 if fault == "filler" else sampled.get(target, now[row, target].item())
            assert batch.old_log_probs[row, target].item() == old, (fault, target)


@pytest.mark.claim("11.1", "enumeration")
def test_the_mask_of_each_arm_by_hand():
    check_masks(masking)


# ---------------------------------------------------------------- what an arm ascends


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients])


def gradient(model, value):
    return flat(torch.autograd.grad(value, list(model.parameters()), allow_unused=False))


def expected_update(module, model, fault, level=0.3):
    """Minus the gradient of the loss, averaged over all 2,000 conversations as they are sampled.

    The advantage of a conversation is its reward less a constant, weighted with its chance.
    """
    talks, advantages = [], []
    with torch.no_grad():
        everything = multiturn.enumerate_all(model, TASKS)
    for number, task in enumerate(TASKS):
        steps = every_step(model, task)
        for x, y, v in itertools.product(DIGITS, repeat=3):
            scores = [steps[0][x], steps[1][x, y], steps[2][x, y, v]]
            talk = multiturn.conversation(task, [x, y], v, scores)
            talks.append(talk)
            chance = everything[number, x, y, v].exp().item()
            advantages.append(chance * (talk.reward - level) / len(TASKS))
    return -gradient(model, module.loss(model, module.tensors(model, talks, advantages, fault), 1))


def every_step(model, task):
    """Log-probabilities of x, of y after x, and of v after both, as the sampler states them."""
    chances = every_chance(model, task)
    first, second = chances.sum((1, 2)), chances.sum(2)
    shares = first, second / first[:, None], chances / second[:, :, None]
    return [np.log(share) for share in shares]


def exact(model):
    return gradient(model, multiturn.value(model, TASKS).mean())


def check_expected_update(module, levels=(0.3,)):
    model = network()
    for level in levels:
        update = expected_update(module, model, "right", level)
        torch.testing.assert_close(update, exact(model), rtol=0, atol=1e-10)


@pytest.mark.claim("11.2", "enumeration")
def test_only_the_right_mask_ascends_success():
    check_expected_update(masking, levels=(0.0, 0.3, -2.0))
    model = network()
    true = exact(model)
    for fault in FAULTS[1:]:
        wrong = expected_update(masking, model, fault)
        assert (wrong - true).norm() > 0.05 * true.norm(), fault


@pytest.mark.claim("11.3", "enumeration")
def test_a_history_that_counts_again_trains_its_tokens_twice():
    """The surplus is the gradient of the request's part, and nothing else."""
    model = network()
    surplus = expected_update(masking, model, "history") - exact(model)
    asked = torch.stack([
        multiturn.log_probs(model, torch.tensor([[12, a, 10, b, 11, x, y]]))[0, 4:].sum()
        for a, b in TASKS for x, y in itertools.product(DIGITS, repeat=2)
    ])  # fmt: skip
    with torch.no_grad():
        chances = multiturn.enumerate_all(model, TASKS).exp()
    weights = (chances * (multiturn.rewards(TASKS) - 0.3)).sum(-1).flatten() / len(TASKS)
    torch.testing.assert_close(surplus, gradient(model, weights @ asked), rtol=0, atol=1e-10)


@pytest.mark.claim("11.4", "enumeration")
def test_a_filler_of_zero_never_pushes_down():
    """The ratio is the probability itself: below the clip, so a negative advantage has no part."""
    model = network()
    uniforms = torch.rand(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    talks = multiturn.converse(model, TASKS * 100, uniforms)

    def pushed(fault, advantage):
        batch = masking.tensors(model, talks, [advantage] * len(talks), fault)
        log_probs = multiturn.log_probs(model, batch.input_ids).detach().requires_grad_()
        each = masking.objective.ppo_clip(log_probs, batch.old_log_probs, batch.advantages)
        masking.collate.total(each, batch).backward()
        free = batch.mask & multiturn.CHOICES
        return log_probs.grad[free], log_probs.detach()[free].exp()

    down, chances = pushed("filler", -1.0)
    below = chances < 0.8
    assert below.float().mean() > 0.9
    assert (down[below] == 0).all()
    up, _ = pushed("filler", 1.0)
    torch.testing.assert_close(up, -chances)
    assert (pushed("right", -1.0)[0] == 1).all()


MUTANTS = [
    (check_enumeration, "[*divmod(sum(request), 10)]", "[*divmod(sum(request), 9)]"),
    (check_enumeration, "arithmetic.verify(task, [10 * tens + ones, *answer])",
     "arithmetic.verify(task, [sum(task), *answer])"),
    (check_enumeration, "[:, PROMPT - 1 : PROMPT + 1].sum(-1)", "[:, PROMPT : PROMPT + 1].sum(-1)"),
    (check_enumeration, "model(seen)[:, -1, :10]", "model(seen)[:, -2, :10]"),
    (check_sampling, "answers = [tool(request) for", "answers = [tool(request)[::-1] for"),
    (check_sampling, "uniforms[:, number, None]", "uniforms[:, 0, None]"),
    (check_sampling, "[*prompt, *request, *tool(request)]",
     "[*prompt, *request[::-1], *tool(request)]"),
    (check_sampling, "told and [*told, 0.0]", "told and [*told, -1.0]"),
    (check_calibration, "sums = (digits[:, None] + digits).flatten()",
     "sums = (digits[:, None] - digits + 9).flatten()"),
    (check_calibration, "stated.index_add_(1, sums, chance.view(-1, 100, 10))",
     "stated[:, sums] = chance.view(-1, 100, 10)"),
]  # fmt: skip
LOOP = [
    (check_masks, 'if fault == "late":', 'if fault == "early":'),
    (check_masks, "mask.cumsum(1) > 0", "mask.cumsum(1) > 1"),
    (check_masks, "torch.where(batch.mask, batch.old_log_probs, now)", "now"),
    (check_masks, "_advantages=of_row * mask", "_advantages=of_row * ~mask"),
    (check_masks, 'if fault == "history" else', 'if fault == "tool" else'),
    (check_masks, "torch.zeros_like(batch.weights)", "torch.ones_like(batch.weights)"),
    (check_expected_update, "total(each, batch) / conversations",
     "total(each, batch) / len(batch.weights)"),
    (check_expected_update, "objective.ppo_clip(log_probs, batch.old_log_probs, batch.advantages)",
     "objective.ppo_clip(log_probs, batch.old_log_probs, -batch.advantages)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "check", "old", "new"),
    [("multiturn", *mutant) for mutant in MUTANTS] + [("masking", *mutant) for mutant in LOOP],
)
def test_every_mutant_is_caught(name, check, old, new):
    assert_caught(f"mathrl.{name}", old, new, check)


# ---------------------------------------------------------------- the run

TINY = MaskingConfig(
    model=SMALL,
    supervised=SupervisedConfig(steps=40),
    reinforced=ReinforceConfig(steps=2, epochs=2, objective="ppo_clip"),
)


def test_a_run_repeats_and_starts_every_arm_from_one_network(monkeypatch):
    monkeypatch.setattr(masking, "FAULTS", ("right", "late", "filler"))
    first, second = (masking.run("tiny", [3], config=TINY, show=False) for _ in range(2))
    assert evidence.differences(first, second) == []
    runs = first["metrics"]["runs"]
    assert {str(rows[0]["supervised"]) for rows in runs.values()} == {
        str(runs["right"][0]["supervised"])
    }
    assert len(set(first["checkpoints"].values())) == 3
    assert masking.settings(first["config"]) == TINY


def recorded():
    found = evidence.read_manifest(ROOT / "docs/evidence/masks.json")
    assert evidence.changed_sources(found) == []
    return found


@pytest.mark.claim("11.5", "experiment")
def test_recorded_success_of_each_arm():
    runs = recorded()["metrics"]["runs"]
    ends = {fault: [row["end"]["train"] for row in rows] for fault, rows in runs.items()}
    success = {fault: [end["success"] for end in rows] for fault, rows in ends.items()}
    assert len(TRAIN) == 20
    assert min(success["right"]) > 0.9
    for fault in ("late", "early", "tool", "filler"):
        assert all(a < b for a, b in zip(success[fault], success["right"], strict=True)), fault
    assert max(success["late"]) < 0.5
    apart = [abs(a - b) for a, b in zip(success["history"], success["right"], strict=True)]
    assert median(apart) < 0.02


@pytest.mark.claim("11.6", "experiment")
def test_recorded_calibration_of_each_arm():
    runs = recorded()["metrics"]["runs"]
    for fault in ("late", "early", "tool", "filler"):
        for wrong, true in zip(runs[fault], runs["right"], strict=True):
            for key in ("ece", "brier"):
                assert wrong["end"]["train"][key] > true["end"]["train"][key], fault
                assert wrong["end"]["test"][key] < true["end"]["test"][key], fault
