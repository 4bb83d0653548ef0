"""The record of the experiment on Zebra puzzles, and the claims that rest on it."""

import dataclasses
from statistics import fmean

import pytest

from mathrl import compare, evidence, zebra_run
from mathrl._sources import ROOT
from tests.benchmarks import record_zebra

MIXED = ("alpha-99", "alpha-95", "alpha-90", "alpha-75")


def recorded():
    found = evidence.read_manifest(ROOT / "docs/evidence/zebra.json")
    assert evidence.changed_sources(found) == []
    return found


def test_a_small_plan_is_recorded_and_repeats():
    plan = zebra_run.PLANS["tiny"]
    plan = dataclasses.replace(
        plan,
        counts=(128, 128, 40),
        reinforced=dataclasses.replace(plan.reinforced, steps=1),
        seeds=(0, 5),
    )
    told = []
    first = record_zebra.run(plan=plan, tell=lambda *row: told.append(row[:2]), show=False)
    assert len(told) == 2 * len(zebra_run.ARMS)
    assert set(first["metrics"]["runs"]) == {record_zebra.key(arm) for arm in zebra_run.ARMS}
    assert len(first["checkpoints"]) == 3 + 2 * len(zebra_run.ARMS)
    assert len(set(first["checkpoints"].values())) > 3
    assert record_zebra.settings(first["config"]) == plan
    assert evidence.differences(first, record_zebra.run(plan=plan, show=False)) == []
    row = first["metrics"]["runs"]["batch"][1]
    assert row["seed"] == 5
    assert row["end"]["test"]["count"] == 40


def test_summaries_are_those_of_the_runs():
    metrics, count = recorded()["metrics"], 0
    alone = [row["end"]["test"] for row in metrics["runs"]["alpha-100"]]
    for arm, rows in metrics["runs"].items():
        ends = [row["end"]["test"] for row in rows]
        assert len(ends) == 3
        for key in ("greedy_solve", "solve", "second"):
            values = [end[key] for end in ends]
            assert metrics["arms"][arm][key]["mean"] == fmean(values)
            count += 1
            if arm != "alpha-100":
                pair = compare.paired(values, [end[key] for end in alone])
                assert metrics["arms"][arm][key]["difference"] == pair._asdict()
        for end in ends:
            solved = round(end["greedy_solve"] * end["count"])
            assert (end["low"], end["high"]) == compare.wilson(solved, end["count"])
    assert count == 3 * len(zebra_run.ARMS)


def test_means_of_the_scales_are_those_of_the_supervised_model():
    metrics = recorded()["metrics"]
    means = metrics["bootstrap"]["order"]
    for arm in MIXED:
        alpha = float(arm.removeprefix("alpha-")) / 100
        solve, order = metrics["scales"][arm]
        assert solve == pytest.approx(alpha / means["solve"], abs=1e-12)
        assert order == pytest.approx((1 - alpha) / means["second"], abs=1e-12)
    assert metrics["scales"]["alpha-100"][1] == 0


@pytest.mark.claim("14.5", "experiment")
def test_recorded_gate():
    """The size of the supervised models, and solver order beside random order."""
    models = {k: row["end"]["test"] for k, row in recorded()["metrics"]["supervised"].items()}
    assert models["random"]["greedy_solve"] > 0.25
    assert models["solver"]["greedy_solve"] < models["sampled"]["greedy_solve"]
    assert abs(models["solver"]["solve"] - models["sampled"]["solve"]) < 0.02
    assert models["random"]["low"] > models["sampled"]["high"]


@pytest.mark.claim("14.6", "experiment")
def test_recorded_gain_of_each_arm():
    metrics = recorded()["metrics"]
    start = metrics["supervised"]["random"]["end"]["test"]
    for arm in ("alpha-100", *MIXED):
        found = metrics["arms"][arm]
        assert found["solve"]["mean"] > start["solve"], arm
        assert abs(found["greedy_solve"]["mean"] - start["greedy_solve"]) < 0.02, arm
    for arm in MIXED:
        assert metrics["arms"][arm]["greedy_solve"]["difference"]["low"] <= 0, arm
        assert (
            metrics["arms"][arm]["second"]["mean"] > metrics["arms"]["alpha-100"]["second"]["mean"]
        )


@pytest.mark.claim("14.7", "experiment")
def test_recorded_shares():
    arms = recorded()["metrics"]["arms"]
    shares = [arms[arm]["first"]["share_order"] for arm in MIXED]
    assert max(shares) - min(shares) < 0.05
    assert min(shares) > 0.2
    for arm in ("batch", "none"):
        assert arms[arm]["first"]["share_order"] < 0.1
