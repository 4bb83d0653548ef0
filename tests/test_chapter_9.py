"""Claims of chapters 9 and 10: six tokens by hand, and batches that must not change a number."""

import math

import numpy as np
import pytest
import torch

from mathrl.collate import Packed, pack, pad, total, unpad, weigh
from mathrl.decoder import Decoder, DecoderConfig
from mathrl.trajectory import Call, build
from tests.oracles import fails

LOSSES = np.array([0.2, 0.4, 1.2, 1.5, 0.3])
AUTHORS = ["user", "policy", "policy", "tool", "tool", "policy"]


def six_tokens():
    calls = [
        Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-0.2, -0.4]),
        Call(prompt_ids=[0, 1, 2, 3, 4], output_ids=[5], log_probs=[-0.3]),
    ]
    return build(calls, advantages=1.0).rows


def check_loss(mask):
    assert len(mask) == 5  # which says nothing
    assert (np.array(mask) * LOSSES).sum() == pytest.approx(0.9)
    assert (np.array(mask) * LOSSES).sum() / sum(mask) == pytest.approx(0.3)


@pytest.mark.claim("9.2", "algebra")
def test_the_loss_of_the_policys_targets():
    check_loss([int(author == "policy") for author in AUTHORS[1:]])
    [row] = six_tokens()
    check_loss(row.mask)
    everything = [1] * 5
    fails(check_loss, everything)
    assert LOSSES.sum() == pytest.approx(3.6)
    assert LOSSES.mean() == pytest.approx(0.72)
    assert total(torch.tensor(LOSSES[None]), pad([row], pad_id=0)).item() == pytest.approx(0.9)


@pytest.mark.claim("9.3", "algebra")
def test_the_authors_of_the_inputs_are_no_mask_of_the_targets():
    wrong = [int(author == "policy") for author in AUTHORS[:-1]]
    assert wrong == [0, 1, 1, 0, 0]
    fails(check_loss, wrong)
    assert (np.array(wrong) * LOSSES).sum() == pytest.approx(1.6)


@pytest.mark.claim("9.4", "autograd")
def test_what_is_masked_is_still_in_view():
    model = Decoder(DecoderConfig(vocab_size=8), seed=1).double()
    [row] = six_tokens()
    mask = torch.tensor(row.mask)

    def reply(tokens):
        return model(torch.tensor([tokens]))[0, 4].log_softmax(-1)[5]

    assert reply([0, 1, 2, 3, 4, 5]) != reply([0, 1, 2, 6, 4, 5])
    log_probs = model(torch.tensor([row.tokens]))[0, :-1].log_softmax(-1)
    chosen = log_probs[range(5), row.targets]
    chosen.retain_grad()
    (mask * chosen).sum().backward()
    assert (chosen.grad == mask).all()  # no direct loss at 0 ...
    used = model.token_embedding.weight.grad.abs().sum(1)
    assert (used[[3, 4]] > 0).all()  # ... and a gradient through what the tool said
    assert used[6] == 0


@pytest.mark.claim("9.7", "enumeration")
def test_old_log_probs_shifted_by_one_give_ratios_other_than_one():
    [row] = six_tokens()
    now = np.array([-0.2, -0.4, np.nan, np.nan, -0.3])

    def check_first_update(old):
        ratios = [math.exp(n - o) for n, o, m in zip(now, old, row.mask, strict=True) if m]
        assert ratios == pytest.approx([1, 1, 1])

    check_first_update(row.old_log_probs)
    shifted = [0.0, -0.2, -0.4, np.nan, np.nan]
    fails(check_first_update, shifted)


@pytest.mark.claim("9.8", "algebra")
def test_a_missing_log_prob_is_not_zero():
    assert math.exp(-2.0 - -2.0) == 1
    assert round(math.exp(-2.0 - 0.0), 3) == 0.135
    rows = build([Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-2.0, None])]).rows
    assert rows[0].old_log_probs == (-2.0, None)
    with pytest.raises(ValueError, match="have no log-probability"):
        _ = pad(rows, pad_id=0).old_log_probs


# Chapter 10


def a_batch():
    """Three trajectories of several rows each, with splits."""
    rng = np.random.default_rng(0)
    trajectories = []
    for number in range(3):
        calls, history = [], [0, number]
        for turn in range(3):
            output = rng.integers(1, 9, size=int(rng.integers(1, 5))).tolist()
            calls.append(Call(prompt_ids=history, output_ids=output))
            history = [*history, *output, 9] if turn != 1 else [0, 7, turn]  # a summary
        trajectories.append(build(calls, advantages=float(number)).rows)
    return trajectories


def scores():
    """Any differentiable loss of a target that depends on what stands before it."""
    theta = torch.linspace(-1, 1, 10, dtype=torch.float64).requires_grad_()
    return theta, lambda targets, before: (theta[targets] * theta[before] + theta[targets]) ** 2


def loss_and_gradient(batches):
    theta, loss = scores()
    value = 0
    for batch in batches:
        packed = isinstance(batch, Packed)
        before = batch.input_ids[batch.predictors] if packed else batch.input_ids[:, :-1]
        value = value + total(loss(batch.targets, before), batch)
    return value.item(), torch.autograd.grad(value, theta)[0]


def wrong_roll(batch):
    """Shift the packed sequence as a whole: the last token of a row predicts the next row."""
    theta, loss = scores()
    weights = torch.zeros(len(batch.input_ids)).index_put((batch.predictors,), batch.weights)
    value = (loss(batch.input_ids.roll(-1), batch.input_ids) * weights.clamp(min=0.01)).sum()
    return value.item(), torch.autograd.grad(value, theta)[0]


def by_hand(rows):
    theta, loss = scores()
    value = 0
    for row in rows:
        for at, weight in enumerate(row.weights):
            if row.mask[at]:
                value = value + weight * loss(row.targets[at], row.tokens[at])
    return value.item(), torch.autograd.grad(value, theta)[0]


@pytest.mark.claim("10.6", "autograd")
@pytest.mark.parametrize("by", ["token", "trajectory"])
def test_batches_change_neither_the_loss_nor_its_gradient(by):
    rows = [row for rows in weigh(a_batch(), by=by) for row in rows]
    value, slope = by_hand(rows)

    def check(batches, computed=loss_and_gradient):
        got, gradient = computed(batches)
        assert got == pytest.approx(value, abs=1e-6)
        assert torch.allclose(gradient, slope, atol=1e-6)

    check([pad(rows, pad_id=0)])
    check([pad(rows, pad_id=5, side="left")])
    check([pad(rows, pad_id=0, width=32)])
    check([pad([row], pad_id=0) for row in rows])
    check([pad(rows[:2], pad_id=0), pad(rows[2:], pad_id=0)])
    check([pack(rows)])
    check([pack(rows[:3]), pack(rows[3:])])
    assert sum(w for row in rows for w in row.weights) == pytest.approx(1)
    unweighted = [row for rows in a_batch() for row in rows]
    fails(check, [pad(unweighted, pad_id=0)])
    fails(check, pack(rows), wrong_roll)


@pytest.mark.claim("10.7", "algebra")
def test_a_group_baseline_is_over_trajectories():
    rewards, rows = np.array([1.0, 0.0]), np.array([3, 1])
    baseline = rewards.mean()
    assert (rewards - baseline).tolist() == [0.5, -0.5]
    wrong = np.repeat(rewards, rows).mean()
    assert wrong == 0.75
    assert (rewards - wrong).tolist() == [0.25, -0.75]


def test_unpad_is_the_inverse_of_padding():
    rows = [row for rows in a_batch() for row in rows]
    for side in ("left", "right"):
        batch = pad(rows, pad_id=0, side=side)
        for values, row in zip(unpad(batch.targets, batch), rows, strict=True):
            assert tuple(values.tolist()) == row.targets


@pytest.mark.claim("9.6", "enumeration")
def test_a_sampled_stop_token_is_a_target():
    def check(mask):
        assert mask == (1, 1)

    [row] = build([Call(prompt_ids=[0], output_ids=[1, 7], finish_reason="stop")]).rows
    check(row.mask)
    check(tuple(pad([row], pad_id=7, width=6).mask[0].int().tolist()[:2]))  # padding is also 7
    fails(check, tuple(int(target != 7) for target in row.targets))


@pytest.mark.claim("10.2", "enumeration")
def test_equal_text_is_not_equal_tokens():
    text = {0: "U", 1: "he", 2: "llo", 3: "hello", 4: "T", 5: "B"}
    first = Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-0.7, -0.1])
    assert "".join(text[i] for i in first.token_ids) == "".join(text[i] for i in (0, 3))
    built = build([first, Call(prompt_ids=[0, 3, 4], output_ids=[5], log_probs=[-0.3])])
    assert [row.old_log_probs for row in built.rows] == [(-0.7, -0.1), (None, None, -0.3)]
    merged = build([first, Call(prompt_ids=[0, 1, 2, 4], output_ids=[5], log_probs=[-0.3])])
    assert [row.old_log_probs for row in merged.rows] == [(-0.7, -0.1, None, -0.3)]
