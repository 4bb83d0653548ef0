"""Claims that rest on recorded runs, read from the manifests and from nowhere else."""

import json
import math
from statistics import median

import pytest

from mathrl import evidence, experiments
from mathrl._sources import ROOT
from mathrl.config import ReinforceConfig, SupervisedConfig
from tests.oracles import fails

FOLDER = ROOT / "docs/evidence"


def runs(name):
    return evidence.read_manifest(FOLDER / f"{name}.json")["metrics"]["runs"]


def success(rows, stage="end", split="train"):
    return [row[stage][split]["success"] for row in rows]


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_named_run_is_recorded_whole_and_of_these_sources(name):
    recorded = evidence.read_manifest(FOLDER / f"{name}.json")
    arms, seeds = experiments.EXPERIMENTS[name]
    assert evidence.changed_sources(recorded) == []
    assert recorded["seeds"] == list(seeds)
    assert recorded["config"].keys() == arms.keys()
    assert all(len(rows) == len(seeds) for rows in recorded["metrics"]["runs"].values())
    assert len(recorded["checkpoints"]) == len(arms) * len(seeds)
    assert recorded["environment"]["threads"] == 1


def check_silent(shares, expected=0.99**8, groups=100):
    error = math.sqrt(expected * (1 - expected) / groups)
    assert abs(sum(shares) / len(shares) - expected) < 3 * error


@pytest.mark.claim("6.1", "experiment")
def test_an_untrained_network_leaves_groups_silent_as_often_as_chance():
    first = [row["zero_groups"][0] for row in runs("demonstrations")["none"]]
    assert len(first) * 20 == 100
    check_silent(first)
    fails(check_silent, [0.9**8] * 5)


@pytest.mark.claim("6.2", "experiment")
def test_demonstrations_and_then_rewards():
    rows = runs("bench")["bench"]
    start, supervised, end = (success(rows, stage) for stage in ("start", "supervised", "end"))
    assert max(start) < 0.02
    assert all(s > 10 * b for b, s in zip(start, supervised, strict=True))
    assert all(e > s for s, e in zip(supervised, end, strict=True))
    assert sum(e >= 0.99 for e in end) >= 4


@pytest.mark.claim("6.3", "experiment")
def test_the_held_out_tasks_got_worse():
    rows = runs("bench")["bench"]
    after, end = (success(rows, stage, "test") for stage in ("supervised", "end"))
    assert median(end) < median(after)


@pytest.mark.claim("6.7", "experiment")
def test_k1_in_the_loss_holds_nothing_back():
    recorded = runs("divergence")
    free, exact, k1 = (
        [row["kl"] for row in recorded[arm]] for arm in ("no_kl", "exact_01", "k1_loss")
    )
    assert min(free) <= median(k1) <= max(free)
    assert all(held < loose for held, loose in zip(exact, free, strict=True))
    assert all(row["kl"] < held for row, held in zip(recorded["k3_loss"], exact, strict=True))
    least = {arm: max(success(rows)) for arm, rows in recorded.items()}
    assert min(least, key=least.get) == "k3_loss"


@pytest.mark.claim("6.8", "experiment")
def test_rewards_reach_further_than_more_supervision_on_the_same_eight():
    recorded = runs("demonstrations")
    pairs = zip(success(recorded["eight"]), success(recorded["eight_supervised"]), strict=True)
    assert all(rewards > control for rewards, control in pairs)


@pytest.mark.claim("6.9", "experiment")
def test_without_any_demonstration():
    recorded = runs("demonstrations")
    assert min(success(recorded["none_entropy"])) > 0.9
    assert max(success(recorded["none"])) < 0.9


@pytest.mark.claim("7.3", "experiment")
def test_supervision_on_every_task_needs_no_rewards():
    assert min(success(runs("budgets")["supervision"])) > 0.99


@pytest.mark.claim("7.4", "experiment")
def test_pass_at_256_on_both_splits():
    at = experiments.PASS_AT.index(256)
    for row in runs("bench")["bench"]:
        before, after = row["supervised"]["pass_at"], row["end"]["pass_at"]
        assert after["test"][at] < before["test"][at]
        assert before["train"][at] > 0.9
        assert after["train"][0] > 0.9


@pytest.mark.claim("7.5", "experiment")
def test_the_zero_belongs_to_the_split():
    recorded = runs("splits")
    assert max(success(recorded["contract"], split="test")) < 0.01
    assert median(success(recorded["contrast"], split="test")) > 0.3


@pytest.mark.claim("7.8", "experiment")
def test_confident_and_wrong_on_held_out_tasks():
    assert all(row["calibration"]["test"]["ece"] > 0.3 for row in runs("bench")["bench"])


def test_a_manifest_is_no_place_for_a_number_by_hand(tmp_path):
    """The check that reads manifests refuses one that was edited to say more."""
    recorded = json.loads((FOLDER / "bench.json").read_text())
    recorded["metrics"]["runs"]["bench"][0]["end"]["train"]["success"] = 1.0
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    with pytest.raises(evidence.EvidenceError, match="not what was written"):
        evidence.read_manifest(path)


@pytest.mark.claim("8.4", "experiment")
def test_a_run_that_is_repeated_is_the_same_to_the_last_bit():
    small = {
        "small": experiments.Arm(
            supervised=SupervisedConfig(steps=3), reinforced=ReinforceConfig(steps=3)
        )
    }
    first, second = (experiments.run("small", [1], arms=small, show=False) for _ in range(2))
    assert evidence.differences(first, second) == []
    other = experiments.run("small", [2], arms=small, show=False)
    assert (
        other["checkpoints"]["small-2.safetensors"] != first["checkpoints"]["small-1.safetensors"]
    )


@pytest.mark.claim("2.21", "experiment")
def test_the_loss_from_hidden_states_was_faster_and_smaller():
    recorded = evidence.read_manifest(FOLDER / "head-benchmark.json")
    metrics = recorded["metrics"]
    assert evidence.changed_sources(recorded) == []
    assert metrics["times_faster"]["naive"]["wall"]["median"] > 1
    assert metrics["times_faster"]["trl_fused"]["wall"]["median"] > 1
    assert metrics["times_smaller"]["naive"] > 1
    assert metrics["worst_difference"] < 1e-5


@pytest.mark.claim("6.10", "experiment")
def test_a_step_was_faster_than_the_peer():
    recorded = evidence.read_manifest(FOLDER / "step-benchmark.json")
    metrics = recorded["metrics"]
    assert evidence.changed_sources(recorded) == []
    peer = metrics["seconds"]["trl"]["cpu"]["all"]
    for way in ("tree", "tokens"):
        own = metrics["seconds"][way]["cpu"]["all"]
        ratios = [theirs / ours for theirs, ours in zip(peer, own, strict=True)]
        assert len(ratios) == recorded["config"]["rounds"]
        assert metrics["times_faster_than_trl"][way]["cpu"]["median"] == median(ratios)
        assert min(ratios) > 1
