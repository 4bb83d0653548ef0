"""The experiment on Zebra puzzles as one manifest: record it, or repeat it and compare.

    python tests/benchmarks/record_zebra.py [--folder FOLDER] [--rebuild]

All stages that are not done in the folder are done first; `mathrl zebra run` does them in several
processes. The whole takes about an hour of one core. With `--rebuild` the manifest in docs/evidence
is compared with what came out, and not written.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import safetensors.torch
import torch

from mathrl import _sources, compare, evidence, resume
from mathrl.mixture import bootstrap_scales
from mathrl.puzzle_train import PuzzleReinforced, PuzzleSupervised
from mathrl.puzzler import PuzzlerConfig
from mathrl.resume import Record
from mathrl.zebra_run import ARMS, PLANS, SUPERVISED, Experiment, Plan

RECORDING = ("mathrl/evidence.py", "mathrl/progress.py", "mathrl/_sources.py")
"""Imported by the experiment to record and to report: no result depends on them."""

ALONE = "alpha-1"
"""The arm that is paid for solving alone; the others are compared with it, seed by seed."""

MEASURES = ("greedy_solve", "solve", "second")

SHARES = ("share_order", "zero_std_solve", "zero_std_energy", "correlation", "std_solve",
          "std_order", "mean_share_solve")  # fmt: skip


def sources() -> dict[str, str]:
    """The hashes of all files that the experiment's results depend on."""
    found = _sources.hashes(_sources.ROOT / "mathrl/zebra_run.py")
    return {name: digest for name, digest in found.items() if name not in RECORDING}


def run(
    name: str = "zebra",
    *,
    plan: Plan | None = None,
    tell: Callable[[str, int, Mapping[str, Any]], None] | None = None,
    show: bool = True,
) -> evidence.Manifest:
    """Do the whole experiment in a folder that is thrown away; return its manifest.

    Args:
        name: of the manifest.
        plan: sizes and settings, by default those of "small".
        tell: called with arm, seed and what came out, at the end.
        show: report progress.
    """
    before = sources()
    with tempfile.TemporaryDirectory() as place:
        experiment = Experiment(PLANS["small"] if plan is None else plan, Path(place), show=show)
        experiment.run()
        recorded = collect(experiment, name, before)
    for arm, rows in recorded["metrics"]["runs"].items():
        for row in rows:
            if tell is not None:
                tell(arm, row["seed"], row)
    return recorded


def collect(
    experiment: Experiment, name: str = "zebra", made_of: Mapping[str, str] | None = None
) -> evidence.Manifest:
    """The manifest of a finished experiment.

    Args:
        experiment: whose every stage is done.
        name: of the manifest.
        made_of: the hashes of the sources that ran; by default those of today's files.

    Raises:
        FileNotFoundError: a stage is not done.
    """
    plan = experiment.plan
    runs = {key(arm): [_run(experiment, arm, seed) for seed in plan.seeds] for arm in ARMS}
    supervised = {model: _supervised(experiment, model) for model in SUPERVISED}
    seconds = sum(row.pop("seconds") for rows in runs.values() for row in rows)
    seconds += sum(row.pop("seconds") for row in supervised.values())
    means = experiment.bootstrap()
    metrics = {
        "supervised": supervised,
        "bootstrap": means,
        "scales": {
            key(name): list(bootstrap_scales(arm.alpha, *_means(means, name)))
            for name, arm in ARMS.items()
        },
        "arms": {arm: _summarise(rows, runs[key(ALONE)]) for arm, rows in runs.items()},
        "summary": {
            **{model: {"greedy_solve": row["end"]["test"]["greedy_solve"]}
               for model, row in supervised.items()},
            **{arm: {"greedy_solve": median(row["end"]["test"]["greedy_solve"] for row in rows)}
               for arm, rows in runs.items()},
        },
        "runs": runs,
    }  # fmt: skip
    names = [*SUPERVISED, *(f"{arm}-{seed}" for arm, seed in experiment.jobs())]
    checkpoints = {f"{model}.safetensors": _parameters(experiment, model) for model in names}
    return evidence.manifest(
        name, asdict(plan), list(plan.seeds), metrics, checkpoints, seconds,
        sources() if made_of is None else made_of,
    )  # fmt: skip


def settings(recorded: Mapping[str, Any]) -> Plan:
    """The plan of a recorded experiment, which need not be one of today's.

    Args:
        recorded: `config` of its manifest.

    Raises:
        TypeError: a setting is unknown or of another type.
        KeyError: a setting is missing.
        ValueError: a setting is out of range.

    >>> import json
    >>> settings(json.loads(json.dumps(asdict(PLANS["tiny"])))) == PLANS["tiny"]
    True
    """
    return Plan(**{
        **recorded,
        "model": PuzzlerConfig(**recorded["model"]),
        "counts": tuple(recorded["counts"]),
        "supervised": PuzzleSupervised(**recorded["supervised"]),
        "reinforced": PuzzleReinforced(**recorded["reinforced"]),
        "seeds": tuple(recorded["seeds"]),
    })  # fmt: skip


def key(arm: str) -> str:
    """The name of an arm in a manifest, whose paths are dotted: there, shares are in percent.

    >>> key("alpha-0.99"), key("batch")
    ('alpha-99', 'batch')
    """
    kind, _, share = arm.partition("alpha-")
    return f"alpha-{100 * float(share):.0f}" if share else kind


def _means(means: Mapping[str, Mapping[str, float]], arm: str) -> tuple[float, float]:
    kind = "shuffled" if ARMS[arm].shuffled else ARMS[arm].second
    return means[kind]["solve"], means[kind]["second"]


def _supervised(experiment: Experiment, name: str) -> dict[str, Any]:
    records = experiment.records(name)
    low, high = _wilson(experiment.evaluate(name))
    return {
        "curve": [_point(record) for record in records],
        "end": {"test": experiment.evaluate(name) | {"low": low, "high": high}},
        "seconds": _seconds(experiment, name),
    }


def _run(experiment: Experiment, arm: str, seed: int) -> dict[str, Any]:
    name = f"{arm}-{seed}"
    records, found = experiment.records(name), experiment.evaluate(name)
    low, high = _wilson(found)
    last = records[-1]
    return {
        "seed": seed,
        "curve": [_point(record) for record in records],
        "first": {key: records[0][key] for key in SHARES if key in records[0]},
        "last": {key: last[key] for key in SHARES if key in last},
        "end": {
            "train": {"success": last["validation_greedy_solve"]},
            "test": found | {"success": found["greedy_solve"], "low": low, "high": high},
        },
        "seconds": _seconds(experiment, name),
    }


def _point(record: Record) -> dict[str, float]:
    names = {"validation_greedy_solve": "train_success", "share_order": "share_order",
             "validation_second": "second", "solve": "sampled_solve"}  # fmt: skip
    shown = {new: record[old] for old, new in names.items() if old in record}
    return {"step": record["step"], **shown}


def _wilson(found: Mapping[str, Any]) -> tuple[float, float]:
    return compare.wilson(round(found["greedy_solve"] * found["count"]), found["count"])


def _summarise(rows: list[dict[str, Any]], alone: list[dict[str, Any]]) -> dict[str, Any]:
    """Over the seeds: what came out on the test puzzles, beside solving alone, and the shares."""
    found: dict[str, Any] = {}
    for measure in MEASURES:
        values, others = ([row["end"]["test"][measure] for row in arm] for arm in (rows, alone))
        found[measure] = {
            "mean": fmean(values), "median": median(values), "low": min(values), "high": max(values)
        }  # fmt: skip
        if rows is not alone and len(rows) > 1:
            found[measure]["difference"] = compare.paired(values, others)._asdict()
    for when in ("first", "last"):
        found[when] = {
            share: fmean(row[when][share] for row in rows)
            for share in SHARES
            if all(share in row[when] for row in rows)
        }
    return found


def _seconds(experiment: Experiment, name: str) -> float:
    path = experiment.folder / f"{name}.safetensors"
    seconds: float = resume.load(path, experiment.trained(name))["seconds"]
    return seconds


def _parameters(experiment: Experiment, name: str) -> str:
    model = experiment.trained(name)
    return evidence.sha256(safetensors.torch.save(dict(model.state_dict())))


@click.command()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--rebuild", is_flag=True)
def main(folder: Path | None, rebuild: bool) -> None:
    """Record the experiment of the plan "small", or repeat it and compare."""
    torch.set_num_threads(1)
    path = _sources.ROOT / "docs/evidence/zebra.json"
    plan = settings(evidence.read_manifest(path)["config"]) if rebuild else PLANS["small"]
    if folder is None:
        made = run(plan=plan)
    else:
        experiment = Experiment(plan, folder)
        experiment.run()
        made = collect(experiment)
    if not rebuild:
        evidence.write_manifest(path, made)
        click.echo(f"written: {path}")
        return
    found = evidence.differences(evidence.read_manifest(path), made)
    for line in found:
        click.echo(f"differs: {line}")
    if found:
        raise SystemExit(1)
    click.echo(f"{path.name} is confirmed")


if __name__ == "__main__":
    main()
