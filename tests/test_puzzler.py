"""The puzzler against slower ways to compute the same; its training killed, and shared."""

import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mathrl import parallel, puzzle_train, puzzler, resume, zebra_run
from mathrl.mixture import MixedReward, Scales
from mathrl.puzzle_train import PuzzleReinforced, PuzzleSupervised, reinforce, supervise
from mathrl.puzzler import Puzzler, PuzzlerConfig
from mathrl.reward import order_reward
from mathrl.zebra.clues import Size
from mathrl.zebra.generator import generate
from mathrl.zebra.puzzles import from_puzzles
from mathrl.zebra.tokens import EOS
from mathrl.zebra.verifier import verify

ROOT = Path(__file__).parents[1]
SIZE, K = Size(houses=3, attributes=2), 12
CONFIG = PuzzlerConfig(3, 2, max_clues=K, width=16, depth=2, heads=2)
SMALLEST = PuzzlerConfig(2, 2, max_clues=6, width=8, depth=1, heads=2)


def puzzles(count, size=SIZE, max_clues=K, seed=0):
    drawn = [generate(size, seed, index, max_clues=max_clues) for index in range(count)]
    return from_puzzles(drawn, max_clues)


def network(config=CONFIG, seed=0, noise=0.3):
    model = Puzzler(config, seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            shape = parameter.shape
            parameter.add_(noise * torch.randn(shape, generator=generator, dtype=torch.float64))
    return model


def uniforms(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random(shape))


def tensors(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# The model


def wrong_causal(model, clues, actions):
    """A prefix that is read from left to right, as in an ordinary GPT."""
    x = model.kind_embedding(clues[..., 0])
    offsets = model.arguments * torch.arange(3)
    x = x + model.argument_embedding(clues[..., 1:] + offsets).sum(-2)
    start = model.start_embedding.weight.expand(len(x), 1, -1)
    x = torch.cat([x, start, model._embed(actions, 0)], 1)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    for block in model.blocks:
        x = block(x, mask)
    return model.head(model.norm(x))[:, clues.shape[1] :]


def plain(model, clues, actions):
    """One puzzle, one response, in one pass over clues, start and actions, without padding."""
    real = clues[clues[:, 0] > 0]
    offsets = model.arguments * torch.arange(3)
    x = model.kind_embedding(real[:, 0]) + model.argument_embedding(real[:, 1:] + offsets).sum(-2)
    x = torch.cat([x, model.start_embedding.weight, model._embed(actions[None], 0)[0]])[None]
    place, prefix = torch.arange(x.shape[1]), len(real) + 1
    mask = (place <= place[:, None]) | (place < prefix)
    for block in model.blocks:
        x = block(x, mask)
    return model.head(model.norm(x))[0, prefix - 1 :]


def test_one_prefix_for_all_responses_gives_what_a_plain_pass_gives():
    model, data = network(), puzzles(5)
    clues = torch.from_numpy(data.clues)
    actions = torch.from_numpy(np.random.default_rng(0).integers(0, 19, (5, 3, 6)))
    logits = model(clues, actions)
    assert logits.shape == (5, 3, 7, 19)
    for row, response in itertools.product(range(5), range(3)):
        expected = plain(model, clues[row], actions[row, response])
        torch.testing.assert_close(logits[row, response], expected)
    torch.testing.assert_close(model(clues, actions[..., :2]), logits[:, :, :3])
    torch.testing.assert_close(model(clues, actions[..., :0]), logits[:, :, :1])


def test_gradients_are_those_of_the_plain_pass():
    model, data = network(), puzzles(2)
    clues = torch.from_numpy(data.clues)
    actions = torch.from_numpy(np.random.default_rng(0).integers(0, 19, (2, 3, 6)))
    weights = uniforms(2, 3, 7, 19)
    shared = torch.autograd.grad((model(clues, actions) * weights).sum(), list(model.parameters()))
    value = sum(
        (plain(model, clues[r], actions[r, g]) * weights[r, g]).sum()
        for r, g in itertools.product(range(2), range(3))
    )
    apart = torch.autograd.grad(value, list(model.parameters()))
    for one, two in zip(shared, apart, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.claim("14.1", "enumeration")
def test_the_order_and_the_padding_of_clues_do_not_matter():
    model, data = network(), puzzles(4)
    clues = torch.from_numpy(data.clues)
    actions = torch.from_numpy(puzzle_train.demonstrations(
        data, CONFIG.codec, "random", 2, np.random.default_rng(0)
    ))[..., :-1]  # fmt: skip
    expected = model(clues, actions)
    shuffled = clues[:, torch.randperm(K, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(model(shuffled, actions), expected)
    wider = torch.nn.functional.pad(clues, (0, 0, 0, 3))
    torch.testing.assert_close(model(wider, actions), expected)
    one = actions[:, 0]
    difference = wrong_causal(model, shuffled, one) - wrong_causal(model, clues, one)
    assert difference.abs().max() > 1e-3


def test_generation_with_a_cache_is_generation_without_one():
    model, data = network(noise=0.1), puzzles(4)
    clues, draws = torch.from_numpy(data.clues), uniforms(4, 5, 7)
    samples = puzzler.sample(model, clues, draws, temperature=0.8)
    greedy = puzzler.sample(model, clues)
    for row in range(4):
        for number in range(5):
            response = []
            while len(response) < 7 and EOS not in response:
                logits = plain(model, clues[row], torch.tensor(response, dtype=torch.int64))[-1]
                chances = (logits / 0.8).softmax(-1)
                point = draws[row, number, len(response)]
                response.append(int((chances.cumsum(-1) <= point).sum()))
            assert samples.tokens[row, number].tolist() == response + [EOS] * (7 - len(response))
            assert samples.mask[row, number].sum() == len(response)
        response = []
        while len(response) < 7 and EOS not in response:
            logits = plain(model, clues[row], torch.tensor(response, dtype=torch.int64))[-1]
            response.append(int(logits.argmax()))
        assert greedy.tokens[row, 0].tolist() == response + [EOS] * (7 - len(response))
    assert samples.mask.sum() < samples.mask.numel()  # some stopped early
    read = puzzler.log_probs(model, clues, samples.tokens, temperature=0.8)
    torch.testing.assert_close(samples.log_probs, read.masked_fill(~samples.mask, 0.0))


def test_what_does_not_fit_is_refused():
    model, clues = network(), torch.from_numpy(puzzles(2).clues)
    none = torch.zeros(2, 1, 0, dtype=torch.int64)
    for bad, words in (
        (lambda: model(clues[0], none), "`clues` must have shape"),
        (lambda: model(clues, none[:1]), "`actions` must have shape"),
        (lambda: model(clues, none.new_zeros(2, 1, 7)), "`actions` must have shape"),
        (lambda: model(clues, none.new_full((2, 1, 1), 19)), "`actions` must lie in"),
        (lambda: model(clues + 10, none), "`clues` must lie below"),
        (lambda: puzzler.sample(model, clues, uniforms(2, 1, 6)), "`uniforms` must have shape"),
        (lambda: PuzzlerConfig(7, 2, 5), "houses"),
        (lambda: PuzzlerConfig(2, 2, 5, width=5), "multiple"),
    ):
        with pytest.raises(ValueError, match=words):
            bad()
    with pytest.raises(TypeError, match="`actions` must be int64"):
        model(clues, none.float())


# What is learned from


@pytest.mark.claim("14.2", "enumeration")
def test_expected_targets_are_the_mean_over_all_orders():
    values = [0, 1, 1, 0]
    actions = [1 + cell * 2 + value for cell, value in enumerate(values)]
    for prefix in ([], [2], [2, 0], [3, 1, 0], [3, 1, 0, 2]):
        rest = [cell for cell in range(4) if cell not in prefix]
        orders = [[*prefix, *tail] for tail in itertools.permutations(rest)]
        counts = np.zeros(9)
        for order in orders:
            counts[([actions[cell] for cell in order] + [EOS])[len(prefix)]] += 1 / len(orders)
        given = torch.tensor([actions[cell] for cell in orders[-1]] + [EOS])
        found = puzzle_train.expected_targets(given, 9)[len(prefix)]
        np.testing.assert_allclose(found.numpy(), counts, atol=1e-6)


def test_demonstrations_are_solutions_in_the_order_asked_for():
    data, codec = puzzles(6), CONFIG.codec
    for order in ("random", "solver"):
        rng = np.random.default_rng(0)
        actions = puzzle_train.demonstrations(data, codec, order, 3, rng)
        for row, response in itertools.product(range(6), range(3)):
            tokens = actions[row, response].tolist()
            assert verify(data.puzzle(row), tokens)["solved"]
            if order == "solver":
                assert [c for c, _ in codec.parse(tokens)] == data.canonical()[row].tolist()


@pytest.mark.parametrize("second", ["order", "correct_order", "cells"])
def test_rewards_are_those_of_single_responses(second):
    data, codec, rng = puzzles(8), CONFIG.codec, np.random.default_rng(0)
    tokens = puzzle_train.demonstrations(data, codec, "random", 12, rng)
    changed = rng.random(tokens.shape) < 0.15
    tokens = np.where(changed, rng.integers(0, codec.vocabulary, tokens.shape), tokens)
    ended = np.cumsum(tokens == EOS, -1) > 0
    tokens = np.where(ended, EOS, tokens)
    solve, other = puzzle_train.component_rewards(data, tokens, second)
    assert 0 < solve.sum() < solve.size
    for row, response in itertools.product(range(8), range(12)):
        answer = tokens[row, response].tolist()
        cut = answer[: answer.index(EOS) + 1] if EOS in answer else answer
        assert solve[row, response] == verify(data.puzzle(row), cut)["solved"]
        pairs = codec.parse(cut)
        right = [data.values[row][cell] == value for cell, value in pairs]
        if second == "cells":
            first = {}
            for (cell, _), good in zip(pairs, right, strict=True):
                first.setdefault(cell, good)
            expected = sum(first.values()) / codec.cells
        else:
            expected = order_reward(
                [cell for cell, _ in pairs], data.canonical()[row].tolist(),
                correct=right, require_correct=second == "correct_order",
            )  # fmt: skip
        assert other[row, response] == pytest.approx(expected, abs=1e-12)


# The policy gradient


@pytest.mark.claim("14.3", "enumeration")
def test_the_expected_update_is_the_gradient_of_the_expected_reward():
    """All groups of two responses of a policy that is restricted to seven."""
    model = network(SMALLEST, noise=0.5)
    data = puzzles(1, Size(2, 2), 6)
    clues = torch.from_numpy(data.clues)
    generator = torch.Generator().manual_seed(0)
    answers = torch.tensor(
        [[*pair, 0, 0, 0] for pair in itertools.product(range(1, 9), repeat=2)]
        + [[one, 0, 0, 0, 0] for one in range(1, 9)] + [[0] * 5]
    )  # fmt: skip
    answers = answers[[0, 17, 40, 63, 66, 70, 72]]  # the others are ruled out
    rewards = torch.rand(len(answers), generator=generator, dtype=torch.float64)
    mask = (answers == EOS).cumsum(-1) - (answers == EOS).long() == 0
    log_joint = (puzzler.log_probs(model, clues, answers[None])[0] * mask).sum(-1)
    chances = (log_joint - log_joint.logsumexp(0)).exp()
    parameters = list(model.parameters())
    true = torch.autograd.grad((chances * rewards).sum(), parameters, retain_graph=True)
    mix = MixedReward(1.0, Scales(1.0, 0.0), "none")
    logs = log_joint - log_joint.logsumexp(0)
    value = torch.zeros((), dtype=torch.float64)
    for one, two in itertools.product(range(len(answers)), repeat=2):
        group = [one, two]
        advantages = mix([[rewards[i].item() for i in group]], [[0.0, 0.0]]).advantages[0]
        probability = (chances[one] * chances[two]).item()
        value = (
            value + probability * sum(map(torch.mul, logs[group], torch.from_numpy(advantages))) / 2
        )
    found = torch.autograd.grad(value, parameters)
    for mean, exact in zip(found, true, strict=True):
        torch.testing.assert_close(2 * mean, exact)  # the group's mean costs a factor 1 - 1/G


def test_one_update_is_the_policy_gradient_of_its_batch(tmp_path):
    """The first step of plain descent, against finite differences of the surrogate."""
    data, config = puzzles(8), PuzzleReinforced(
        steps=1, prompts_per_step=4, group_size=3, alpha=0.5, max_grad_norm=None, every=1, seed=3,
        relabel=False,
    )  # fmt: skip
    model, scales = network(), Scales(1.0, 1.0)
    rng = np.random.default_rng((3, 0))
    batch = data.select(rng.permutation(8)[:4])
    clues = torch.from_numpy(batch.clues)
    drawn = puzzler.sample(model, clues, torch.from_numpy(rng.random((4, 3, 7))))
    solve, order = puzzle_train.component_rewards(batch, drawn.tokens.numpy(), "order")
    advantages = MixedReward(0.5, scales, eps=1e-6)(solve, order).advantages

    def surrogate():
        with torch.no_grad():
            logs = puzzler.log_probs(model, clues, drawn.tokens) * drawn.mask
        return -(logs.sum(-1).numpy() * advantages).mean()

    weight = model.head.weight
    differences = []
    for index in [(1, 0), (5, 3), (18, 15)]:
        with torch.no_grad():
            weight[index] += 1e-5
            up = surrogate()
            weight[index] -= 2e-5
            down = surrogate()
            weight[index] += 1e-5
        differences.append((index, (up - down) / 2e-5))
    records = reinforce(tmp_path / "r.safetensors", model, data, config, scales, show=False)
    for index, expected in differences:
        assert weight.grad[index].item() == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert records[0]["apart"] < 1e-9
    assert records[0]["second"] == pytest.approx(order.mean())


# Runs


SUPERVISED = PuzzleSupervised(
    steps=6, batch_size=7, orders=2, targets="expected", warmup=2, every=2, learning_rate=1e-2
)
REINFORCED = PuzzleReinforced(steps=4, prompts_per_step=5, group_size=4, alpha=0.9, every=1)


def both(folder, model=None, stop=None):
    """Supervise, then reinforce; `stop` is the number of updates after which the run dies."""
    model, data = network() if model is None else model, puzzles(16)
    calls = itertools.count(1)

    def die():
        if next(calls) == stop:
            raise KeyboardInterrupt
        return {}

    first = supervise(folder / "s.safetensors", model, data, SUPERVISED, measure=die, show=False)
    second = reinforce(
        folder / "r.safetensors", model, data, REINFORCED, Scales(2.0, 0.5), measure=die, show=False
    )
    return model, first + second


@pytest.mark.claim("14.4", "enumeration")
@pytest.mark.parametrize("stop", [1, 2, 4, 7])
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(tmp_path, stop):
    whole, records = both(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        both(tmp_path / "parts", stop=stop)
    again, resumed = both(tmp_path / "parts")
    assert resumed == records
    for name, value in tensors(whole).items():
        assert torch.equal(value, again.state_dict()[name])
    for name in ("s", "r"):
        one, two = (
            resume._unpacked(tmp_path / f / f"{name}.safetensors") for f in ("whole", "parts")
        )
        assert all(torch.equal(value, two[1][key]) for key, value in one[1].items())
        assert {**one[0], "seconds": 0} == {**two[0], "seconds": 0}


def test_a_finished_run_is_not_done_again(tmp_path):
    model, records = both(tmp_path)
    other, again = both(tmp_path, network(seed=5))
    assert again == records
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())


def test_a_state_of_other_settings_is_refused(tmp_path):
    both(tmp_path)
    changed = dataclasses.replace(SUPERVISED, learning_rate=1e-3)
    with pytest.raises(resume.ResumeError, match="other settings: learning_rate"):
        supervise(tmp_path / "s.safetensors", network(), puzzles(16), changed, show=False)
    with pytest.raises(resume.ResumeError, match="other settings: scales"):
        reinforce(
            tmp_path / "r.safetensors", network(), puzzles(16), REINFORCED, Scales(1.0, 0.5),
            show=False,
        )  # fmt: skip
    (tmp_path / "s.safetensors").write_bytes(b"no state")
    with pytest.raises(resume.ResumeError, match="is no state of a run"):
        supervise(tmp_path / "s.safetensors", network(), puzzles(16), SUPERVISED, show=False)


def command(*arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "mathrl", "zebra", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.claim("14.4", "enumeration")
def test_a_killed_command_goes_on_where_it_was(tmp_path):
    """SIGKILL as soon as there is a state; then compare with a run that nothing stopped."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    arguments = "supervise", "--size", "tiny", "--out", str(killed)
    for folder in (killed, whole):
        zebra_run.Experiment(zebra_run.PLANS["tiny"], folder, show=False).generate()
    process = command(*arguments)
    state = killed / "random.safetensors"
    while not state.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert resume._unpacked(state)[0]["step"] < 60
    process = command(*arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.startswith("step: 60\n")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    zebra_run.Experiment(zebra_run.PLANS["tiny"], whole, show=False).supervise()
    torch.set_num_threads(threads)
    one, two = (resume._unpacked(f / "random.safetensors") for f in (killed, whole))
    assert one[0]["records"] == two[0]["records"]
    assert all(torch.equal(value, two[1][key]) for key, value in one[1].items())


def one_of_two(folder, path):
    """What each of two processes does: run, agree with the other, let the first write."""
    with parallel.connected("gloo"):
        assert parallel.size() == 2
        model, records = both(Path(folder), network(seed=100 * parallel.rank()))
        found = puzzle_train.measure(model, puzzles(9), batch=2)
        for value in model.parameters():
            assert torch.equal(parallel.total(value), 2 * value)
        if parallel.rank() == 0:
            arrays = {name: value.numpy() for name, value in tensors(model).items()}
            lists = {name: value.tolist() for name, value in found.items()}
            np.savez(path, records=json.dumps(records), found=json.dumps(lists), **arrays)
        resume.barrier()  # or one leaves while the other still writes


@pytest.mark.claim("14.4", "enumeration")
def test_two_processes_give_what_one_gives(tmp_path):
    job, written = tmp_path / "job.py", tmp_path / "two.npz"
    call = f"one_of_two({str(tmp_path / 'two')!r}, {str(written)!r})"
    job.write_text(f"from tests.test_puzzler import one_of_two\n{call}\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *torchrun, str(job)], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    model, records = both(tmp_path / "one")
    two = np.load(written)
    for name, value in tensors(model).items():
        np.testing.assert_allclose(two[name], value.numpy(), atol=1e-9)
    for one, other in zip(records, json.loads(str(two["records"])), strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"apart"}:
            assert math.isclose(one[key], other[key], abs_tol=1e-9), key
    found = puzzle_train.measure(model, puzzles(9))
    for key, value in json.loads(str(two["found"])).items():
        np.testing.assert_allclose(found[key], value)


def test_a_tiny_model_learns(tmp_path):
    data, held_out = puzzles(300, Size(2, 2), 8), puzzles(100, Size(2, 2), 8, seed=1)
    model = Puzzler(PuzzlerConfig(2, 2, 8, width=16, depth=2, heads=2))
    before = puzzle_train.measure(model, held_out)["greedy_solve"].mean()
    config = PuzzleSupervised(
        steps=150, batch_size=32, orders=2, targets="expected", warmup=20, learning_rate=1e-2
    )
    records = supervise(tmp_path / "s.safetensors", model, data, config, show=False)
    after = puzzle_train.measure(model, held_out)["greedy_solve"].mean()
    assert records[-1]["loss"] < records[0]["loss"]
    assert before <= 0.05
    assert after >= 0.4


def test_settings_that_make_no_sense_are_refused():
    for make in (
        lambda: PuzzleSupervised(order="solver", targets="expected"),
        lambda: PuzzleSupervised(final=2.0),
        lambda: PuzzleSupervised(orders=0),
        lambda: PuzzleReinforced(alpha=1.5),
        lambda: PuzzleReinforced(group_size=0),
        lambda: PuzzleReinforced(second="colour"),
    ):
        with pytest.raises(ValueError, match=r"must|need"):
            make()


def test_a_shuffled_order_is_fixed_for_each_puzzle_and_says_nothing_else():
    data = puzzles(20)
    one, two = (zebra_run._paid(zebra_run.ARMS["shuffled"], data) for _ in range(2))
    assert np.array_equal(one.waves, two.waves)
    assert (np.sort(one.waves, 1) == np.arange(6)).all()
    assert np.array_equal(one.values, data.values)
    assert len({tuple(row) for row in one.waves.tolist()}) > 10
    assert zebra_run._paid(zebra_run.ARMS["alpha-0.9"], data) is data


def test_a_plan_runs_in_parts_to_the_same_end(tmp_path):
    plan = zebra_run.PLANS["tiny"]
    plan = dataclasses.replace(
        plan, counts=(128, 128, 48),
        supervised=dataclasses.replace(plan.supervised, steps=60),
        reinforced=dataclasses.replace(plan.reinforced, steps=2),
    )  # fmt: skip
    experiment = zebra_run.Experiment(plan, tmp_path, show=False)
    experiment.generate()
    experiment.supervise("random")
    experiment.bootstrap()
    for part in (1, 0):
        experiment.run(part, 2)
    names = ["random", "solver", *(f"{name}-{seed}" for name, seed in experiment.jobs())]
    for name in names:
        found = json.loads((tmp_path / f"evaluate-{name}.json").read_text())
        assert found["count"] == 48
    assert experiment.records("decoupled-0")[-1]["step"] == 2
