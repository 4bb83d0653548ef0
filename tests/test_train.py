"""The loops against a second implementation in numpy, and what their losses do in expectation."""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.autograd import grad

from mathrl import (
    baseline,
    by_hand,
    config,
    evaluate,
    exact,
    loss,
    parallel,
    policy,
    problem,
    progress,
    rollout,
    train,
)
from mathrl.arithmetic import TASKS, TRAIN, verify
from mathrl.config import ReinforceConfig, SupervisedConfig
from mathrl.decoder import Decoder, DecoderConfig
from mathrl.grammar import ARITHMETIC, Grammar
from mathrl.problem import Problem, arithmetic_problem
from mathrl.responses import enumerate_all
from mathrl.rollout import Batch, Reading, TokenRollouts, TreeRollouts
from mathrl.train import reinforce, supervise
from tests.mutants import assert_caught
from tests.oracles import fails, refuses

ROOT = Path(__file__).parents[1]
SMALL = DecoderConfig(width=8, heads=2, depth=1)
UNEVEN = Grammar([(1, 4, 9), (2, 9)], end=9)


def network(sizes=SMALL, seed=0, dtype=torch.float64):
    model = Decoder(sizes, seed=seed).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise)
    return model


def arrays(model):
    return {name: tensor.double().numpy().copy() for name, tensor in model.state_dict().items()}


def close(got, expected, tolerance=1e-10):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    expected = np.asarray(expected)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert np.allclose(got, expected, rtol=0, atol=tolerance), np.abs(got - expected).max()


def same_parameters(model, expected, tolerance=1e-10):
    for name, array in arrays(model).items():
        close(array, expected[name], tolerance)


def paid(tasks, seed=None):
    """Tasks with float64 rewards, of the contract or random ones."""
    made = arithmetic_problem(tasks)
    if seed is None:
        return made._replace(rewards=made.rewards.double())
    rewards = torch.rand(made.rewards.shape, generator=torch.Generator().manual_seed(seed))
    return made._replace(rewards=rewards.double())


# A second implementation: numpy, the twin of the network, and the oracle's gradients

TREE_TOKENS, TREE_POSITIONS = np.arange(10), np.array([0, 1, 2, 3, 4, *[5] * 10])
TREE_SEES = np.tril(np.ones((15, 15), dtype=bool))
TREE_SEES[5:, 5:] = np.eye(10, dtype=bool)


def tree(parameters, prompts, heads, temperature=1.0):
    """Logits of both choices over the temperature, and the pull-back of gradients in them."""
    tokens = np.concatenate([prompts, np.tile(TREE_TOKENS, (len(prompts), 1))], 1)
    logits, saved = by_hand.forward(parameters, tokens, heads, TREE_POSITIONS, TREE_SEES)

    def pull_back(slopes):
        d_logits = np.zeros_like(logits)
        for row, (first, second) in enumerate(slopes):
            d_logits[row, 4, :10], d_logits[row, 5:, :10] = first, second
        return by_hand.backward(parameters, saved, d_logits / temperature)

    return [[x[4, :10] / temperature, x[5:, :10] / temperature] for x in logits], pull_back


def adamw(parameters, settings):
    """A function that applies gradients: Loshchilov and Hutter (2019), algorithm 2."""
    first = {name: np.zeros_like(array) for name, array in parameters.items()}
    second = {name: np.zeros_like(array) for name, array in parameters.items()}
    one, two = settings.betas
    count = itertools.count(1)

    def apply(gradients):
        t = next(count)
        norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        scale = 1.0
        if settings.max_grad_norm is not None:
            scale = min(1.0, settings.max_grad_norm / (norm + 1e-6))
        for name, array in parameters.items():
            g = scale * gradients[name]
            first[name] = one * first[name] + (1 - one) * g
            second[name] = two * second[name] + (1 - two) * g**2
            array *= 1 - settings.learning_rate * settings.weight_decay
            slope = first[name] / (1 - one**t)
            array -= settings.learning_rate * slope / (np.sqrt(second[name] / (1 - two**t)) + 1e-8)

    return apply


def chosen(steps, u, v, first, second):
    """Gradient in the logits of `first · log π(u) + second · log π(v|u)`."""
    slopes = [np.zeros(10), np.zeros((10, 10))]
    slopes[0] += first * exact.score(steps[0])[u]
    slopes[1][u] += second * exact.score(steps[1][u])[v]
    return slopes


def add(*lists):
    return [sum(arrays) for arrays in zip(*lists, strict=True)]


def numpy_supervise(model, made, settings):
    """The loop over demonstrations once more, full batches only."""
    parameters, heads = arrays(model), model.config.heads
    apply, losses = adamw(parameters, settings), []
    prompts, targets = made.prompts.numpy(), made.targets.numpy()
    for _ in range(settings.steps):
        logits, pull_back = tree(parameters, prompts, heads)
        own = [
            exact.log_softmax(s[0])[y[0]] + exact.log_softmax(s[1][y[0]])[y[1]]
            for s, y in zip(logits, targets, strict=True)
        ]
        losses.append(-np.mean(own))
        weight = -1 / len(prompts)
        apply(
            pull_back(
                [chosen(s, *y[:2], weight, weight) for s, y in zip(logits, targets, strict=True)]
            )
        )
    return parameters, losses


def numpy_reinforce(model, made, settings, ref=None):
    """The loop over samples once more: tree, leave-one-out, PPO's clip, exact KL and entropy."""
    parameters, heads = arrays(model), model.config.heads
    apply = adamw(parameters, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    prompts, table = made.prompts.numpy(), made.rewards.numpy()
    R, G, heat = len(prompts), settings.group_size, settings.temperature
    if ref is not None:
        ref_steps, _ = tree(arrays(ref), prompts, heads, heat)
    values = []
    for step in range(settings.steps):
        uniforms = torch.rand(R, G, generator=generator, dtype=torch.float64).numpy()
        steps, _ = tree(parameters, prompts, heads, heat)
        joints = [
            np.exp((exact.log_softmax(f)[:, None] + exact.log_softmax(s)).ravel()) for f, s in steps
        ]
        values.append(np.mean([joint @ row for joint, row in zip(joints, table, strict=True)]))
        drawn = [
            [int((np.cumsum(joint) <= u).sum()) for u in row]
            for joint, row in zip(joints, uniforms, strict=True)
        ]
        rewards = np.array([[table[r, y] for y in row] for r, row in enumerate(drawn)])
        advantages = np.array(
            [[x - np.delete(row, i).mean() for i, x in enumerate(row)] for row in rewards]
        )
        bonus = settings.entropy * (1 - step / settings.steps if settings.entropy_anneal else 1)
        old = [[(exact.log_softmax(f), exact.log_softmax(s)) for _ in range(G)] for f, s in steps]
        for _ in range(settings.epochs):
            now, pull_back = tree(parameters, prompts, heads, heat)
            slopes = []
            for r, (f, s) in enumerate(now):
                total = [np.zeros(10), np.zeros((10, 10))]
                for g, y in enumerate(drawn[r]):
                    u, v = divmod(y, 10)
                    weights = []
                    for new, before in (
                        (exact.log_softmax(f)[u], old[r][g][0][u]),
                        (exact.log_softmax(s)[u, v], old[r][g][1][u, v]),
                    ):
                        ratio, A = math.exp(new - before), advantages[r, g]
                        gone = (A > 0 and ratio > 1.2) or (A < 0 and ratio < 0.8)
                        weight = 0.0 if gone else ratio * A
                        weights.append(
                            -(A if settings.objective == "reinforce" else weight) / (R * G)
                        )
                    total = add(total, chosen((f, s), u, v, *weights))
                if ref is not None:
                    pull = exact.tree_kl_gradient((f, s), ref_steps[r])
                    total = add(total, [settings.beta * x / R for x in pull])
                if bonus:
                    flat = [np.zeros(10), np.zeros((10, 10))]
                    total = add(
                        total, [bonus * x / R for x in exact.tree_kl_gradient((f, s), flat)]
                    )
                slopes.append(total)
            apply(pull_back(slopes))
    return parameters, values


def check_supervise(train=train):
    for settings in (
        SupervisedConfig(steps=4),
        SupervisedConfig(steps=3, weight_decay=0.1, max_grad_norm=0.5, betas=(0.8, 0.9)),
    ):
        model, made = network(), paid(TASKS[:6])
        expected, losses = numpy_supervise(model, made, settings)
        history = train.supervise(model, made.prompts, made.targets, made.grammar, settings)
        same_parameters(model, expected)
        close([record["loss"] for record in history.records], losses)


def check_reinforce(train=train, loss=loss, rollout=rollout):
    variants = [
        ReinforceConfig(steps=2, learning_rate=0.03),
        ReinforceConfig(steps=2, entropy=0.3, entropy_anneal=True, beta=0.2, max_grad_norm=0.1),
        ReinforceConfig(steps=2, entropy=0.3, weight_decay=0.1, max_grad_norm=None, seed=1),
        ReinforceConfig(
            steps=2, epochs=3, objective="ppo_clip", learning_rate=0.1, betas=(0.5, 0.7)
        ),
        ReinforceConfig(steps=2, epochs=2, group_size=3, learning_rate=0.1, temperature=0.6),
    ]
    for settings in variants:
        model, made = network(), paid(TASKS[:3], seed=2)
        ref = network(seed=5) if settings.beta else None
        expected, values = numpy_reinforce(model, made, settings, ref)
        with patch.object(train, "loss", loss):
            history = train.reinforce(model, rollout.TreeRollouts(made), settings, reference=ref)
        same_parameters(model, expected, 1e-8)
        close([record["value"] for record in history.records], values, 1e-8)


@pytest.mark.claim("6.4", "autograd")
def test_supervised_loop_agrees_with_the_one_in_numpy():
    check_supervise()


@pytest.mark.claim("6.4", "autograd")
def test_policy_gradient_loop_agrees_with_the_one_in_numpy():
    check_reinforce()


# What a loss does in expectation, on the parameters of a real network

PAIRS = Grammar([(0, 1, 2), (3, 4), (13,)], end=13)
WON = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)


def tiny(grammar=PAIRS, rewards=WON):
    prompts = torch.tensor([[12, 3, 10, 4, 11]])
    return Problem(prompts, grammar, rewards, torch.tensor([grammar.responses()[0]]))


def mean_gradient(loss, settings, made, model, ref=None, old=None):
    """`E ∇loss` over all groups of responses that `old`, by default the model, can draw."""
    everything = enumerate_all(model, made.prompts, made.grammar)
    drawn_from = enumerate_all(old or model, made.prompts, made.grammar)
    joint, N = drawn_from.joint[0].detach(), len(everything.tokens)
    groups = torch.tensor(list(itertools.product(range(N), repeat=settings.group_size)))
    K = len(groups)
    leaf = everything.log_probs[0].detach()[groups].requires_grad_()  # (K, G, T)
    batch = Batch(
        rows=torch.zeros(K, dtype=torch.int64),
        tokens=everything.tokens[groups],
        mask=everything.mask[groups],
        log_probs=drawn_from.log_probs[0].detach()[groups],
        reading=Reading(leaf),
        rewards=made.rewards[0][groups],
        choice=groups,
        joint=joint.expand(K, N),
    )
    reading = None
    if ref is not None:
        ref_table = enumerate_all(ref, made.prompts, made.grammar).log_probs[0].detach()
        reading = Reading(ref_table[groups])
    advantages = loss.advantages(settings, batch, reading, slice(0, K), K)
    whole = loss.count(settings, batch, K)
    value = loss.policy_loss(settings, Reading(leaf), batch, advantages, whole, reading)
    (slope,) = grad(value, leaf)
    chance = joint[groups].sum(1).exp()[:, None, None]  # of each group
    weight = torch.zeros_like(everything.log_probs[0])
    weight.index_add_(0, groups.flatten(), (K * chance * slope).flatten(0, 1))
    return flat(grad((weight * everything.log_probs[0]).sum(), model.parameters()))


def flat(gradients):
    return torch.cat([g.flatten() for g in gradients]).numpy()


def ascent(model, made):
    return flat(evaluate.gradient(model, made).values())


def kl_gradients(model, ref, made):
    """∇KL of whole responses, and per step with the reach held fixed: reverse and forward."""
    steps = []
    for network_ in (model, ref):
        table = enumerate_all(network_, made.prompts, made.grammar).log_probs[0]
        table = table if network_ is model else table.detach()
        steps.append((table[::2, 0], table[:, 1].view(3, 2)))
    (one, two), (ref_one, ref_two) = steps

    def divergence(left, right):
        return (left.exp() * (left - right)).sum(-1)

    whole = divergence(one, ref_one) + one.exp() @ divergence(two, ref_two)
    reach = one.detach().exp()
    reverse = divergence(one, ref_one) + reach @ divergence(two, ref_two)
    forward = divergence(ref_one, one) + reach @ divergence(ref_two, two)
    numbers = (whole, reverse, forward)
    return [flat(grad(x, model.parameters(), retain_graph=True)) for x in numbers]


def check_unbiased(loss=loss):
    """Every objective starts with -∇J, for every baseline that leaves it unbiased."""
    model, made = network(), tiny()
    expected = -ascent(model, made)
    assert np.abs(expected).max() > 0.01
    for objective in ("reinforce", "ppo_clip", "dual_clip", "cispo"):
        settings = ReinforceConfig(group_size=3, objective=objective)
        close(mean_gradient(loss, settings, made, model), expected)
    for name in ("none", "leave_one_out", "optimal"):
        settings = ReinforceConfig(group_size=3, baseline=name)
        close(mean_gradient(loss, settings, made, model), expected)


def check_known_factors(loss=loss):
    """What is not -∇J is -∇J times a known factor; tokens are three, of which one is forced."""
    model, made = network(), tiny()
    expected, p = -ascent(model, made), evaluate.value(model, made).item()
    for factor, settings in (
        (2 / 3, {"baseline": "group_mean"}),
        (exact.std_factor(p, 3), {"baseline": "standardized"}),
        (exact.std_factor(p, 3, ddof=1), {"baseline": "standardized", "ddof": 1}),
        (1 / 3, {"aggregation": "token_mean"}),
        (1 / 3, {"aggregation": "sequence_mean_token_mean"}),
        (1 / 3, {"aggregation": "sequence_mean_token_mean", "objective": "gspo"}),
        (3 * 6**3 / 500, {"aggregation": "constant", "constant": 500}),
    ):
        found = mean_gradient(loss, ReinforceConfig(group_size=3, **settings), made, model)
        close(found, factor * expected)


@pytest.mark.claim("6.6", "enumeration")
def check_advantages(loss=loss):
    """Each baseline is the function of its name, on the rewards of the batch."""
    made, model = paid(TASKS[:5], seed=0), network()
    tree, uniforms = TreeRollouts(made), torch.rand(5, 8, dtype=torch.float64)
    batch = tree.sample(model, torch.arange(5), uniforms)
    norms = policy.score(batch.joint[:, None].expand(-1, 8, -1), batch.choice).square().sum(-1)
    scaled = {"ddof": 1, "eps": 0.1}
    for name, settings, expected in (
        ("none", {}, batch.rewards),
        ("group_mean", {}, baseline.group_mean(batch.rewards)),
        ("leave_one_out", {}, baseline.leave_one_out(batch.rewards)),
        ("optimal", {}, baseline.optimal(batch.rewards, norms)),
        ("standardized", scaled, baseline.standardized(batch.rewards, **scaled)),
        ("batch_standardized", scaled, baseline.batch_standardized(batch.rewards, **scaled)),
    ):
        chosen = ReinforceConfig(baseline=name, **settings)
        close(loss.advantages(chosen, batch, None, slice(0, 5), 5), expected.numpy())


def test_each_baseline_is_the_function_of_its_name():
    check_advantages()


def test_objectives_and_baselines_are_unbiased_on_a_real_network():
    check_unbiased()


@pytest.mark.claim("6.6", "enumeration")
def test_biased_choices_have_their_known_factors():
    check_known_factors()


def test_dividing_by_the_deviation_is_not_the_policy_gradient():
    model, made = network(), tiny()

    def check_it_is(baseline):
        settings = ReinforceConfig(group_size=3, baseline=baseline)
        close(mean_gradient(loss, settings, made, model), -ascent(model, made))

    check_it_is("leave_one_out")
    fails(check_it_is, "group_mean")
    fails(check_it_is, "standardized")


def check_divergence_terms(loss=loss):
    """In the reward k1 pulls along ∇KL; in the loss an estimate pulls along each step's own KL."""
    model, ref, made, beta = network(), network(seed=3), tiny(), 0.7
    whole, reverse, forward = kl_gradients(model, ref, made)
    base = {"group_size": 2, "beta": beta}

    def pull(**settings):
        found = mean_gradient(loss, ReinforceConfig(**base, **settings), made, model, ref)
        return (found + ascent(model, made)) / beta

    close(pull(kl="k1", kl_placement="reward"), whole)
    close(pull(kl="k1"), np.zeros_like(whole))
    close(pull(kl="k2"), reverse)
    close(pull(kl="k3"), forward)
    close(pull(kl="k1", kl_weighted=True), reverse)
    close(pull(kl="k3", kl_weighted=True), reverse)
    assert np.abs(whole - reverse).max() > 1e-3


@pytest.mark.claim("6.6", "enumeration")
def test_divergence_estimates_pull_where_the_chapter_says():
    check_divergence_terms()


def check_exact_terms(loss=loss):
    """The exact divergence and the entropy bonus alone: equal rewards leave nothing else."""
    model, ref, made = network(), network(seed=3), tiny(rewards=torch.ones_like(WON))
    tree = TreeRollouts(made)
    batch = tree.sample(model, torch.tensor([0]), torch.rand(1, 4, dtype=torch.float64))
    now, refer = tree.read(model, batch), tree.reader(ref)
    settings = ReinforceConfig(beta=0.7, group_size=4)
    advantages = loss.advantages(settings, batch, None, slice(0, 1), 1)
    whole = loss.count(settings, batch, 1)
    value = loss.policy_loss(settings, now, batch, advantages, whole, refer(batch), entropy=0.2)
    found = flat(grad(value, model.parameters()))
    everything = enumerate_all(model, made.prompts, made.grammar)
    spread = -(everything.joint.exp() * everything.joint).sum()
    bonus = flat(grad(spread, model.parameters()))
    close(found, 0.7 * kl_gradients(model, ref, made)[0] - 0.2 * bonus)


def test_exact_divergence_and_entropy_bonus():
    check_exact_terms()


def check_off_policy(loss=loss):
    """After an update the ratio corrects for the policy that sampled; without it there is bias."""
    rewards = torch.tensor([[0.3, 1.0, -0.5, 0.0, 0.7]], dtype=torch.float64)
    made = tiny(Grammar([range(5)]), rewards)
    model, old, ref = network(), network(seed=4), network(seed=5)
    expected = -ascent(model, made)
    open_clip = {"clip_low": 1.0, "clip_high": 1e6, "baseline": "none", "group_size": 2}

    def check_corrected(**settings):
        found = mean_gradient(loss, ReinforceConfig(**settings), made, model, old=old)
        close(found, expected)

    check_corrected(objective="ppo_clip", **open_clip)
    check_corrected(objective="cispo", **open_clip)
    check_corrected(objective="dual_clip", ceiling=1e6, **open_clip)
    check_corrected(objective="gspo", **open_clip)  # one token: the sequence's ratio is its own
    fails(lambda: check_corrected(baseline="none", group_size=2))
    settings = {"objective": "ppo_clip", **open_clip, "beta": 0.7, "kl": "k3"}
    found = mean_gradient(
        loss, ReinforceConfig(**settings, kl_weighted=True), made, model, ref=ref, old=old
    )
    mine, theirs = (enumerate_all(m, made.prompts, made.grammar).joint[0] for m in (model, ref))
    divergence = (mine.exp() * (mine - theirs.detach())).sum()
    close(found - expected, 0.7 * flat(grad(divergence, model.parameters())))


def test_ratio_corrects_for_the_policy_that_sampled():
    check_off_policy()


def check_shares(loss=loss):
    """Losses of uneven shares of a batch add up, in value and gradient, for every aggregation."""
    torch.manual_seed(0)
    made = tiny(UNEVEN, torch.rand(1, 5, dtype=torch.float64))
    made = made._replace(prompts=made.prompts.repeat(5, 1), rewards=made.rewards.repeat(5, 1))
    model, ref, tree = network(), network(seed=1), TreeRollouts(made)
    uniforms = torch.rand(5, 3, dtype=torch.float64)
    for aggregation in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"):
        settings = ReinforceConfig(aggregation=aggregation, beta=0.3, group_size=3)

        def piece(rows, whole=None, settings=settings):
            batch = tree.sample(model, rows, uniforms[rows])
            advantages = loss.advantages(settings, batch, None, slice(0, 5), 5)
            whole = whole or loss.count(settings, batch, len(rows))
            now, away = tree.read(model, batch), tree.reader(ref)(batch)
            value = loss.policy_loss(settings, now, batch, advantages, whole, away, 0.2)
            shown = loss.parts(settings, now, batch, advantages, whole, away)
            numbers = torch.stack([value.detach(), *shown.values()]).numpy()
            return np.concatenate([numbers, flat(grad(value, model.parameters()))]), whole

        together, whole = piece(torch.arange(5))
        apart = sum(piece(rows, whole)[0] for rows in torch.arange(5).split([1, 4]))
        close(apart, together)
        own = sum(piece(rows)[0] for rows in torch.arange(5).split([1, 4])) / 2
        assert not np.allclose(own, together)


def test_losses_of_shares_add_up():
    check_shares()


# Rollouts


class Dropping(Decoder):
    def forward(self, *args, **kwargs):
        return torch.nn.functional.dropout(super().forward(*args, **kwargs), 0.1, self.training)


class OtherTemperature(TreeRollouts):
    def read(self, model, batch, temperature=1.0):
        return super().read(model, batch, 1.0)


def by_token(made, kind=TokenRollouts):
    def reward(rows, tokens, mask):
        return (tokens == made.targets[rows][:, None]).all(-1).double()

    return kind(made.prompts, made.grammar, reward)


def check_ratio_is_checked(train=train):
    made, settings = paid(TRAIN), ReinforceConfig(steps=1, temperature=0.6)
    dropping = Dropping(SMALL)
    for rollouts in (TreeRollouts(made), by_token(made)):
        words = "exactly 1 at the first epoch|nats apart"
        refuses(RuntimeError, words, train.reinforce, dropping, rollouts, settings)
        train.reinforce(Dropping(SMALL).eval(), rollouts, settings)
    refuses(RuntimeError, "exactly 1", train.reinforce, network(), OtherTemperature(made), settings)


def test_first_ratio_is_one_to_the_last_bit_or_training_stops():
    check_ratio_is_checked()


def check_tokens_are_read_as_sampled(rollout=rollout):
    class Wrong(rollout.TokenRollouts):
        def _read(self, model, rows, tokens, temperature):
            return super()._read(model, rows, tokens, 1.0)

    made, settings = paid(TRAIN), ReinforceConfig(steps=1, temperature=0.6)
    refuses(RuntimeError, "sampled and read", reinforce, network(), by_token(made, Wrong), settings)


def test_sampling_and_reading_at_different_temperatures_stops_training():
    check_tokens_are_read_as_sampled()


def check_tree_and_tokens_agree(rollout=rollout):
    """Given the same samples, both ways of reading lead to the same parameters."""

    class Borrowing(rollout.TokenRollouts):
        def uniforms(self, *args):
            return tree.uniforms(*args)

        def sample(self, model, rows, uniforms, temperature=1.0):
            batch = tree.sample(model, rows, uniforms, temperature)
            reading = self.read(model, batch, temperature)
            log_probs = reading.log_probs.detach()
            close(log_probs, batch.log_probs.numpy())
            batch = batch._replace(log_probs=log_probs, reading=reading)
            return batch._replace(choice=None, joint=None, values=None)

    made = paid(TRAIN)
    tree, tokens = rollout.TreeRollouts(made), by_token(made, Borrowing)
    settings = ReinforceConfig(
        steps=3,
        epochs=2,
        objective="ppo_clip",
        beta=0.1,
        kl="k2",
        temperature=0.8,
        prompts_per_step=7,
    )
    models = [network(DecoderConfig(width=12, heads=3)) for _ in range(2)]
    for model, rollouts in zip(models, (tree, tokens), strict=True):
        reinforce(model, rollouts, settings, reference=network(DecoderConfig(), seed=8))
    same_parameters(models[0], arrays(models[1]))


def test_tree_and_token_rollouts_train_alike():
    check_tree_and_tokens_agree()


def check_batches(rollout=rollout):
    """Samples, rewards, log-probabilities and values belong together."""
    made, model = paid(TASKS), network()
    rows = torch.tensor([3, 19, 7])
    everything = enumerate_all(model, made.prompts[rows], made.grammar, 0.7)
    by_tokens = by_token(made, rollout.TokenRollouts)
    by_tokens.tolerance = math.inf  # this check is to find what the check within would
    for rollouts in (rollout.TreeRollouts(made), by_tokens):
        uniforms = rollouts.uniforms(3, 200, torch.Generator().manual_seed(0))
        assert uniforms.dtype == torch.float64
        batch = rollouts.sample(model, rows, uniforms, 0.7)
        assert batch.tokens.shape == batch.mask.shape == batch.log_probs.shape == (3, 200, 3)
        number = 10 * batch.tokens[:, :, 0] + batch.tokens[:, :, 1]
        for r, row in enumerate(rows.tolist()):
            paid_now = [verify(TASKS[row], y)["reward"] for y in batch.tokens[r].tolist()]
            assert batch.rewards[r].tolist() == paid_now
            close(batch.log_probs[r], everything.log_probs[r][number[r]].detach().numpy())
        close(rollouts.read(model, batch, 0.7).log_probs, batch.log_probs.numpy())
        close(rollouts.reader(model, 0.7)(batch).log_probs, batch.log_probs.numpy())
        assert rollouts.read(model, batch, 0.7).log_probs.requires_grad
        assert not batch.log_probs.requires_grad
        assert not rollouts.reader(model, 0.7)(batch).log_probs.requires_grad
    tree = rollout.TreeRollouts(made).sample(model, rows, uniforms[:, :, 0], 0.7)
    close(tree.joint, everything.joint.detach().numpy())
    close(tree.values, (everything.joint.exp() * made.rewards[rows]).sum(1).detach().numpy())


def test_a_batch_holds_what_was_sampled():
    check_batches()


def test_a_reward_of_another_shape_is_refused():
    made = paid(TRAIN)
    rollouts = TokenRollouts(made.prompts, made.grammar, lambda rows, tokens, mask: mask.float())
    words = r"`reward` returned \(20, 8, 3\), expected \(20, 8\)"
    refuses(ValueError, words, reinforce, network(), rollouts, ReinforceConfig(steps=1))


# The loops


@pytest.mark.claim("6.4", "enumeration")
def test_training_is_a_function_of_its_arguments():
    def run(seed=0):
        model, made = Decoder(DecoderConfig()), arithmetic_problem(TRAIN)
        data = made.prompts, made.targets, made.grammar
        supervise(model, *data, SupervisedConfig(steps=3, batch_size=7, seed=seed))
        history = reinforce(model, TreeRollouts(made), ReinforceConfig(steps=3, seed=seed))
        return arrays(model), history

    torch.manual_seed(0)
    first, one = run()
    torch.manual_seed(1)
    second, two = run()
    other, three = run(seed=1)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert one == two
    assert not any(np.array_equal(first[name], other[name]) for name in first)
    assert one != three
    assert json.loads(json.dumps(one.records)) == one.records


def test_from_nothing_to_solved():
    """Supervision gives an exploring start, reinforcement the rest; the two gains apart."""
    model, made = Decoder(DecoderConfig()), arithmetic_problem(TRAIN)
    before = evaluate.summary(model, TRAIN)["success"]
    supervise(model, made.prompts, made.targets, made.grammar, SupervisedConfig())
    between = evaluate.summary(model, TRAIN)["success"]
    history = reinforce(model, TreeRollouts(made), ReinforceConfig(steps=100))
    after = evaluate.summary(model, TRAIN)["success"]
    assert before < 0.02
    assert 0.2 < between < 0.5
    assert after > 0.9
    assert history.records[0]["value"] == pytest.approx(between, abs=1e-6)
    assert history.records[0]["zero_groups"] < history.records[0]["equal_groups"] + 1e-9


def check_spending(train=train):
    made = paid(TRAIN)
    settings = ReinforceConfig(steps=3, epochs=2, objective="ppo_clip", group_size=4, beta=0.1)
    tree = train.reinforce(network(), TreeRollouts(made), settings, reference=network(seed=1))
    budget = dataclasses.asdict(tree.budget)
    assert budget == {
        "samples": 3 * 80,
        "sampled_tokens": 3 * 240,
        "trained_tokens": 3 * 480,
        "positions": 3 * 2 * 300 + 2 * 300,  # once the reference, and once the check of the ratio
        "optimizer_steps": 6,
    }
    assert {name: tree.records[-1][name] for name in budget} == budget
    assert [record["step"] for record in tree.records] == [1, 2, 3]
    settings = ReinforceConfig(steps=1, group_size=4)
    tokens = train.reinforce(network(), by_token(made), settings)
    assert tokens.budget.positions == 20 * 5 + 80 + 2 * 80 * 6
    history = train.supervise(
        network(), made.prompts, made.targets, made.grammar, SupervisedConfig(steps=4, batch_size=8)
    )
    assert history.budget == evaluate.Budget(
        trained_tokens=3 * (8 + 8 + 4 + 8), positions=6 * (8 + 8 + 4 + 8), optimizer_steps=4
    )


def test_what_is_spent_is_counted():
    check_spending()


def test_records_say_what_happened():
    made = paid(TRAIN)
    model, ref = network(), network(seed=1)
    value, away = evaluate.value(model, made).mean().item(), evaluate.summary(model, TRAIN, ref)
    settings = ReinforceConfig(steps=2, beta=0.1, objective="ppo_clip", epochs=2, learning_rate=0.3)
    first, second = reinforce(model, TreeRollouts(made), settings, reference=ref).records
    assert first["value"] == pytest.approx(value)
    assert first["kl"] == pytest.approx(away["kl"])
    assert first["entropy"] == pytest.approx(away["entropy"])
    assert 0 < first["clip_fraction"] < 1
    assert set(first) == {
        "step",
        "loss",
        "reward",
        "equal_groups",
        "zero_groups",
        "value",
        "entropy",
        "kl",
        "clip_fraction",
        "gradient_norm",
        *dataclasses.asdict(evaluate.Budget()),
    }
    assert second["value"] != first["value"]


def check_every_row_once(train=train):
    drawn = train._batches(10, 4, torch.Generator().manual_seed(0))
    rows = [next(drawn).tolist() for _ in range(6)]
    assert [len(row) for row in rows] == [4, 4, 2] * 2
    for first in (0, 3):
        assert sorted(itertools.chain(*rows[first : first + 3])) == list(range(10))
    assert rows[:3] != rows[3:]
    assert next(train._batches(3, None, torch.Generator())).tolist() == [0, 1, 2]
    refuses(
        ValueError,
        "a batch of 4 is larger than the data, 3",
        next,
        train._batches(3, 4, torch.Generator()),
    )


def check_fraction(loss=loss):
    """Shares of the clip fraction add up to the fraction of the whole batch."""
    made, model = paid(TASKS[:5], seed=0), network()
    tree, uniforms = TreeRollouts(made), torch.rand(5, 8, dtype=torch.float64)
    settings = ReinforceConfig(objective="ppo_clip", clip_low=0.01, clip_high=0.02)
    whole = loss.count(settings, tree.sample(network(seed=1), torch.arange(5), uniforms), 5)

    def piece(rows):
        batch = tree.sample(network(seed=1), rows, uniforms[rows])
        advantages = loss.advantages(settings, batch, None, slice(0, 5), 5)
        return loss.parts(settings, tree.read(model, batch), batch, advantages, whole)

    together = piece(torch.arange(5))["clip_fraction"]
    shares = [piece(rows)["clip_fraction"] for rows in torch.arange(5).split([1, 4])]
    close(sum(shares), together.numpy())
    assert 0.1 < together < 0.9


def test_clip_fractions_of_shares_add_up():
    check_fraction()


def test_a_pass_visits_every_row_once():
    check_every_row_once()


def test_measurements_are_taken_when_asked():
    made, calls = paid(TRAIN), []

    def measure():
        calls.append(1)
        return {"measured": float(len(calls))}

    history = reinforce(
        network(), TreeRollouts(made), ReinforceConfig(steps=5), measure=measure, measure_every=2
    )
    assert [record.get("measured") for record in history.records] == [None, 1, None, 2, 3]


def test_what_the_settings_need_must_be_there():
    made, model, ref = paid(TRAIN), network(), network(seed=1)
    tree, tokens, needs = TreeRollouts(made), by_token(made), ReinforceConfig(beta=0.1)
    refuses(ValueError, "`reference` must be given", reinforce, model, tree, needs)
    refuses(
        ValueError, "`reference` must be another", reinforce, model, tree, needs, reference=model
    )
    refuses(
        ValueError, "`measure_every` must be at", reinforce, model, tree, needs,
        reference=ref, measure_every=0,
    )  # fmt: skip
    for settings in ({"entropy": 0.1}, {"beta": 0.1}, {"baseline": "optimal"}):
        needs = ReinforceConfig(**settings)
        words = "the settings need a tree"
        refuses(ValueError, words, reinforce, model, tokens, needs, reference=ref)


def test_hooks_are_removed_whatever_happens():
    model = network()
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    refuses(
        ValueError, "must be finite", reinforce, model, TreeRollouts(paid(TRAIN)), ReinforceConfig()
    )
    assert not model._forward_pre_hooks


def test_an_infinite_gradient_stops_training():
    made = paid(TRAIN)
    made = made._replace(rewards=made.rewards * 1e308)
    settings = ReinforceConfig(steps=1, baseline="none", max_grad_norm=None)
    model = network()
    before = arrays(model)
    refuses(RuntimeError, "non-finite", reinforce, model, TreeRollouts(made), settings)
    same_parameters(model, before, 0.0)


# Settings


def test_settings_survive_json():
    for settings in (ReinforceConfig(betas=(0.5, 0.6), clip_low=None), SupervisedConfig(seed=3)):
        text = json.dumps(settings.to_dict())
        assert type(settings)(**json.loads(text)) == settings


def check_settings(config=config):
    good = {"objective": "dual_clip", "ceiling": 4.0, "clip_low": 0.1, "max_grad_norm": 2}
    config.ReinforceConfig(**good)
    for error, words, wrong in (
        (TypeError, "`steps` must be int, got 1.0", {"steps": 1.0}),
        (TypeError, "`steps` must be int, got True", {"steps": True}),
        (TypeError, "`learning_rate` must be float, got nan", {"learning_rate": math.nan}),
        (TypeError, "`betas` must be", {"betas": (0.9,)}),
        (TypeError, "`kl_weighted` must be bool", {"kl_weighted": 1}),
        (ValueError, "`baseline` must be one of .*'none'.*, got 'mean'", {"baseline": "mean"}),
        (ValueError, "`steps` must not be negative", {"steps": -1}),
        (ValueError, "`betas` must lie in", {"betas": (0.9, 1.0)}),
        (ValueError, "`max_grad_norm` must be positive", {"max_grad_norm": -1.0}),
        (ValueError, "`group_size` must be positive", {"group_size": 0}),
        (ValueError, "`prompts_per_step` must be positive", {"prompts_per_step": 0}),
        (ValueError, "`temperature` must be positive", {"temperature": 0.0}),
        (ValueError, "need a std", {"eps": 0.1}),
        (ValueError, "nothing is clipped", {"clip_high": 0.1}),
        (ValueError, "`ceiling` needs dual_clip", {"objective": "ppo_clip", "ceiling": 3.0}),
        (ValueError, "`constant` goes with", {"aggregation": "constant"}),
        (ValueError, "`constant` goes with", {"constant": 3.0}),
        (ValueError, "`constant` must be positive", {"aggregation": "constant", "constant": 0.0}),
        (ValueError, '"exact" is for the loss', {"kl_placement": "reward"}),
        (ValueError, "`kl_weighted` needs", {"kl_weighted": True}),
    ):
        refuses(error, words, config.ReinforceConfig, **wrong)
    refuses(ValueError, "`batch_size` must be positive", config.SupervisedConfig, batch_size=0)
    refuses(ValueError, 'not be "constant"', config.SupervisedConfig, aggregation="constant")


def test_settings_that_make_no_sense_are_refused():
    check_settings()


# Problems


def check_problem(problem=problem):
    made = problem.arithmetic_problem(TASKS)
    shaped = problem.arithmetic_problem(TASKS, problem.SHAPED)
    said = problem.reasons(TASKS)
    for row, task in enumerate(TASKS):
        assert verify(task, made.targets[row].tolist())["reward"] == 1
        for number, response in enumerate(ARITHMETIC.responses()):
            verdict = verify(task, response)
            assert made.rewards[row, number] == verdict["reward"]
            assert said[row][number] == verdict["reason"]
            first, right = response[0] == sum(task), verdict["reward"] == 1
            parts = 0.2 + 0.3 * first + 0.5 * right
            assert shaped.rewards[row, number].item() == pytest.approx(parts)
    refuses(ValueError, "at least one task", problem.arithmetic_problem, [])
    refuses(ValueError, "got 'right'", problem.arithmetic_problem, TASKS, {"right": 1.0})


def test_problem_pays_what_the_verifier_says():
    check_problem()


# Progress


class Terminal:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_and_anything_else_plain_lines(capsys, monkeypatch):
    def work(**options):
        with progress.progress("counting", 3, **options) as advance:
            for step in range(3):
                advance(f"at {step}")

    work()
    assert capsys.readouterr() == ("", "")  # brief work says nothing
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    work()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"counting: {done} of 3, at {done - 1}" for done in (1, 2, 3)]
    work(show=False)
    monkeypatch.setattr(parallel, "rank", lambda: 1)
    work()
    assert capsys.readouterr() == ("", "")
    monkeypatch.undo()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    work()
    assert "counting" in terminal.text
    assert "3/3" in terminal.text


# Two processes


def scenarios():
    """Runs whose batches two processes share unevenly; parameters and records by name."""
    made, uneven = paid(TRAIN), tiny(UNEVEN)
    uneven = uneven._replace(prompts=made.prompts[:7])
    rows = TokenRollouts(
        uneven.prompts,
        UNEVEN,
        lambda rows, tokens, mask: (tokens == 4).any(-1).double() + rows[:, None] / 7,
    )
    data = made.prompts, made.targets, made.grammar
    tree, results = TreeRollouts(made), {}
    runs = {
        "supervised": lambda m: supervise(m, *data, SupervisedConfig(steps=3, batch_size=7)),
        "batch": lambda m: reinforce(m, tree, ReinforceConfig(
            steps=3, baseline="batch_standardized", aggregation="token_mean", entropy=0.1)),
        "ppo": lambda m: reinforce(m, tree, ReinforceConfig(
            steps=3, prompts_per_step=7, objective="ppo_clip", epochs=2, beta=0.1,
        ), reference=network(seed=9)),
        "tokens": lambda m: reinforce(m, rows, ReinforceConfig(steps=3, aggregation="token_mean")),
    }  # fmt: skip
    for name, run in runs.items():
        model = network(seed=100 * parallel.rank())  # process 0 decides where all start
        records = run(model).records
        results |= {f"{name}/{key}": array for key, array in arrays(model).items()}
        for record in records:
            del record["positions"]  # each process enumerates the reference for itself
        results[f"{name}/records"] = np.array([list(record.values()) for record in records])
    return results


def one_of_two(path):
    """What each of two processes does: run, agree with the other, let the first write."""
    with parallel.connected("gloo"):
        assert parallel.size() == 2
        results = scenarios()
        for array in results.values():
            own = torch.tensor(array)
            assert torch.equal(parallel.total(own), 2 * own)
        refuses(ValueError, "1 rows cannot be shared by 2", parallel.share, 1)
        if parallel.rank() == 0:
            np.savez(path, **results)
        parallel.total(torch.zeros(1))  # or one leaves while the other still writes


@pytest.mark.claim("6.5", "enumeration")
def test_two_processes_give_the_parameters_of_one(tmp_path):
    job, written = tmp_path / "job.py", tmp_path / "two.npz"
    job.write_text(f"from tests.test_train import one_of_two\none_of_two({str(written)!r})\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *torchrun, str(job)]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    two, one = np.load(written), scenarios()
    assert set(two.files) == set(one)
    for name, array in one.items():
        close(two[name], array, 1e-9)


def test_alone_nothing_is_shared():
    assert (parallel.rank(), parallel.size(), parallel.share(5)) == (0, 1, slice(0, 5))
    with parallel.connected():
        assert parallel.size() == 1
    rows = torch.ones(2, 3)
    assert torch.equal(parallel.gather(rows, slice(0, 2), 2), rows)


# Mutants


def in_loop(module):
    check_reinforce(loss=module)


MUTANTS = [
    ("loss", "return 1 - 2 * drawn", "return 1 + 2 * drawn", check_advantages),
    ("loss", "probs.square().sum(1, keepdim=True)", "probs.square().sum()", check_advantages),
    (
        "loss",
        "return baseline.batch_standardized(whole,",
        "return baseline.standardized(whole,",
        check_advantages,
    ),
    (
        "train",
        "1 - step / config.steps if config.entropy_anneal",
        "1 if config.entropy_anneal",
        check_reinforce,
    ),
    ("train", "if step == 0:", "if step == -1:", check_ratio_is_checked),
    (
        "train",
        "rollouts.read(model, batch, config.temperature) if again",
        "rollouts.read(model, batch) if again",
        check_reinforce,
    ),
    ("train", "optimizer.zero_grad()", "pass", check_reinforce),
    ("train", "weight_decay=config.weight_decay", "weight_decay=0.0", check_supervise),
    ("train", "betas=config.betas", "betas=(0.9, 0.999)", check_supervise),
    (
        "train",
        "math.inf if config.max_grad_norm is None",
        "1e-3 if config.max_grad_norm is None",
        check_supervise,
    ),
    ("train", "aggregate(-log_probs", "aggregate(log_probs", check_supervise),
    (
        "train",
        "trained_tokens=whole.tokens * config.epochs",
        "trained_tokens=whole.tokens",
        check_spending,
    ),
    (
        "train",
        "self.positions += inputs[0].numel()",
        "self.positions += len(inputs[0])",
        check_spending,
    ),
    (
        "train",
        "torch.randperm(count, generator=generator)",
        "torch.arange(count)",
        check_every_row_once,
    ),
    (
        "train",
        "torch.split(order, size or count)",
        "(order[: size or count],)",
        check_every_row_once,
    ),
    (
        "loss",
        "return baseline.leave_one_out(rewards)",
        "return baseline.group_mean(rewards)",
        check_unbiased,
    ),
    (
        "loss",
        "rewards = rewards - config.beta * away.sum(-1)",
        "rewards = rewards + config.beta * away.sum(-1)",
        check_divergence_terms,
    ),
    (
        "loss",
        "rewards = rewards - config.beta * away.sum(-1)",
        "rewards = rewards - config.beta * away.mean(-1)",
        check_divergence_terms,
    ),
    (
        "loss",
        "losses = losses + beta * away",
        "losses = losses - beta * away",
        check_divergence_terms,
    ),
    (
        "loss",
        "away = kl.importance_weighted(away, log_probs, old_log_probs)",
        "away = kl.importance_weighted(away, log_probs.detach(), old_log_probs)",
        check_divergence_terms,
    ),
    (
        "loss",
        "loss = loss + beta * away.sum() / whole.prompts",
        "loss = loss - beta * away.sum() / whole.prompts",
        check_exact_terms,
    ),
    (
        "loss",
        "loss = loss + beta * away.sum() / whole.prompts",
        "loss = loss + beta * away.mean()",
        check_shares,
    ),
    (
        "loss",
        'kl.divergence(_needed("a tree", now.joint), ref_joint)',
        'kl.divergence(ref_joint, _needed("a tree", now.joint))',
        check_exact_terms,
    ),
    (
        "loss",
        "loss = loss - entropy * spread.sum() / whole.prompts",
        "loss = loss + entropy * spread.sum() / whole.prompts",
        in_loop,
    ),
    (
        "loss",
        "loss = loss - entropy * spread.sum() / whole.prompts",
        "loss = loss - entropy * spread.sum() / len(spread)",
        check_shares,
    ),
    (
        "loss",
        "config.aggregation, whole.denominator)",
        "config.aggregation, len(mask))",
        check_known_factors,
    ),
    (
        "loss",
        "batch.log_probs, spread, batch.mask)",
        "now.log_probs.detach(), spread, batch.mask)",
        check_off_policy,
    ),
    (
        "loss",
        "fraction.double() * batch.mask.sum() / whole.tokens",
        "fraction.double()",
        check_fraction,
    ),
    (
        "loss",
        "baseline.standardized(rewards, ddof=config.ddof",
        "baseline.standardized(rewards, ddof=0",
        check_known_factors,
    ),
    (
        "rollout",
        "rewards=table.gather(1, choice)",
        "rewards=self.problem.rewards[: len(rows)].gather(1, choice)",
        check_batches,
    ),
    (
        "rollout",
        "values=(joint.exp() * table).sum(1)",
        "values=table.gather(1, choice).mean(1)",
        check_batches,
    ),
    (
        "rollout",
        "self.problem.prompts[rows], self.problem.grammar, temperature)",
        "self.problem.prompts[rows], self.problem.grammar)",
        check_batches,
    ),
    (
        "rollout",
        "mine = log_probs[batch.rows]",
        "mine = log_probs[: len(batch.rows)]",
        check_batches,
    ),
    (
        "rollout",
        "log_probs=reading.log_probs.detach(),",
        "log_probs=reading.log_probs.detach() * 1.0001,",
        check_batches,
    ),
    (
        "rollout",
        "self.prompts[rows].repeat_interleave(tokens.shape[1], 0)",
        "self.prompts[rows].repeat(tokens.shape[1], 1)",
        check_batches,
    ),
    (
        "rollout",
        "if not apart <= self.tolerance:",
        "if apart < 0:",
        check_tokens_are_read_as_sampled,
    ),
    ("problem", '"final": 0.5', '"final": 0.3', check_problem),
    ("problem", "pay.get(reason, 0.0)", "pay.get(reason, 0.1)", check_problem),
    (
        "config",
        "value is not None and value <= 0",
        "value is not None and value < 0",
        check_settings,
    ),
    ("config", "math.isfinite(value)", "True", check_settings),
    ("config", "type(value) is kind", "isinstance(value, kind)", check_settings),
    (
        "config",
        "constant == (self.constant is None)",
        "constant and self.constant is None",
        check_settings,
    ),
]


@pytest.mark.parametrize(("module", "old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(module, old, new, check):
    assert_caught(f"mathrl.{module}", old, new, check)
