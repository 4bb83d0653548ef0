"""The named runs of chapters 6 and 7: what is trained, on what, with which seeds.

An experiment is a few arms that differ in one choice, each repeated over the same seeds. Budgets,
demonstrations and seeds are fixed here; nothing is chosen by a held-out result. A run returns
plain numbers and the trained models, and `mathrl.evidence` records both.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mathrl import _sources, arithmetic, compare, evaluate, evidence
from mathrl.config import ReinforceConfig, SupervisedConfig
from mathrl.decoder import Decoder, DecoderConfig, attention_maps
from mathrl.problem import SHAPED, STRICT, arithmetic_problem
from mathrl.responses import enumerate_all
from mathrl.rollout import TreeRollouts
from mathrl.train import History, reinforce, supervise

Tasks = tuple[tuple[int, int], ...]

ONE_PER_SUM: Tasks = tuple(
    next(task for task in arithmetic.TRAIN if sum(task) == total)
    for total in (0, 1, 2, 3, 5, 6, 7, 8)
)
"""Eight demonstrations: for each sum of the training tasks the first task that has it."""

PORTRAIT = (3, 4)
"""The task whose responses and attention are recorded, for seed 0."""

PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Arm:
    """One way to train: demonstrations, then rewards.

    Args:
        demonstrations: "train", "one per sum" or "none".
        split: "contract", or "contrast": five random tasks are held out, every sum stays in
            training, and the seed decides which.
        reward: "strict" or "shaped".
        model: sizes.
        supervised: settings of the first loop; its seed is replaced.
        reinforced: settings of the second loop; its seed is replaced. None: there is none.
    """

    demonstrations: str = "train"
    split: str = "contract"
    reward: str = "strict"
    model: DecoderConfig = field(default_factory=DecoderConfig)
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    reinforced: ReinforceConfig | None = field(default_factory=ReinforceConfig)


def _steps(count: int, **settings: Any) -> ReinforceConfig:
    return ReinforceConfig(steps=count, **settings)


RECORDING = ("mathrl/evidence.py", "mathrl/progress.py", "mathrl/_sources.py")
"""Imported here to record and to report: no result depends on them."""

FIVE = (0, 1, 2, 3, 4)

EXPERIMENTS: Mapping[str, tuple[Mapping[str, Arm], tuple[int, ...]]] = {
    "bench": ({"bench": Arm()}, FIVE),
    "baselines": (
        {
            name: Arm(reinforced=_steps(200, baseline=name))
            for name in ("none", "group_mean", "leave_one_out", "standardized")
        },
        FIVE,
    ),
    "divergence": (
        {
            "no_kl": Arm(reinforced=_steps(200)),
            "exact_002": Arm(reinforced=_steps(200, beta=0.02)),
            "exact_01": Arm(reinforced=_steps(200, beta=0.1)),
            "k1_reward": Arm(reinforced=_steps(200, beta=0.1, kl="k1", kl_placement="reward")),
            "k1_loss": Arm(reinforced=_steps(200, beta=0.1, kl="k1")),
            "k3_loss": Arm(reinforced=_steps(200, beta=0.1, kl="k3")),
        },
        FIVE,
    ),
    "demonstrations": (
        {
            "eight": Arm("one per sum", reinforced=_steps(400)),
            "eight_entropy": Arm(
                "one per sum", reinforced=_steps(400, entropy=0.2, entropy_anneal=True)
            ),
            "eight_supervised": Arm(
                "one per sum", supervised=SupervisedConfig(steps=620), reinforced=None
            ),
            "none": Arm("none", reinforced=_steps(400)),
            "none_entropy": Arm("none", reinforced=_steps(400, entropy=0.1, entropy_anneal=True)),
        },
        FIVE,
    ),
    "splits": (
        {"contract": Arm(), "contrast": Arm(split="contrast")},
        (0, 1, 2, 3, 4, 5, 6, 7),
    ),
    "shaped": (
        {
            "strict": Arm("one per sum", reinforced=_steps(200)),
            "shaped": Arm("one per sum", reward="shaped", reinforced=_steps(200)),
        },
        FIVE,
    ),
    "budgets": (
        {
            "supervision": Arm(supervised=SupervisedConfig(steps=320), reinforced=None),
            "reinforcement": Arm(),
        },
        FIVE,
    ),
}
"""For each name its arms, by name, and its seeds."""


def run(
    name: str,
    seeds: Sequence[int] | None = None,
    *,
    folder: Path | None = None,
    tell: Callable[[str, int, Mapping[str, Any]], None] | None = None,
    arms: Mapping[str, Arm] | None = None,
    show: bool = True,
) -> evidence.Manifest:
    """Train every arm with every seed, on one thread; return the manifest of the run.

    Args:
        name: of the experiment.
        seeds: other seeds than those of the experiment.
        folder: where each checkpoint is written as soon as its training ends.
        tell: called with arm, seed and result as each training ends.
        arms: other arms than those of the experiment.
        show: report progress.

    Raises:
        ValueError: there is no such experiment.
    """
    if arms is None:
        if name not in EXPERIMENTS:
            raise ValueError(f"`name` must be one of {list(EXPERIMENTS)}, got {name!r}")
        arms = EXPERIMENTS[name][0]
    seeds = list(EXPERIMENTS[name][1] if seeds is None else seeds)
    # Before anything runs: a file that is edited meanwhile is not the one that ran.
    hashes = _sources.hashes(Path(__file__))
    sources = {name: digest for name, digest in hashes.items() if name not in RECORDING}
    torch.set_num_threads(1)
    start = time.perf_counter()
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    checkpoints: dict[str, str] = {}
    for label, arm in arms.items():
        for seed in seeds:
            model, result = train(arm, seed, show=show)
            file = f"{label}-{seed}.safetensors"
            data = evidence.checkpoint_bytes(model)
            checkpoints[file] = evidence.sha256(data)
            if folder is not None:
                evidence.write_atomically(folder / file, data)
            results[label].append(result)
            if tell is not None:
                tell(label, seed, result)
    return evidence.manifest(
        name,
        {label: asdict(arm) for label, arm in arms.items()},
        seeds,
        {
            "arms": {label: _summarise(rows) for label, rows in results.items()},
            "summary": {label: _summarise(rows)["median"] for label, rows in results.items()},
            "runs": results,
        },
        checkpoints,
        time.perf_counter() - start,
        sources,
    )


def train(arm: Arm, seed: int, *, show: bool = True) -> tuple[Decoder, dict[str, Any]]:
    """One training of an arm: the model, and exact numbers before, between and after."""
    training, held_out = tasks(arm.split, seed)
    model = Decoder(arm.model, seed=seed)

    def measured() -> dict[str, dict[str, float]]:
        return {
            "train": evaluate.summary(model, training),
            "test": evaluate.summary(model, held_out),
        }

    def success() -> dict[str, float]:
        return {
            "train_success": evaluate.summary(model, training)["success"],
            "test_success": evaluate.summary(model, held_out)["success"],
        }

    result: dict[str, Any] = {"seed": seed, "held_out": [list(task) for task in held_out]}
    result["start"] = measured()
    portraits = {"start": _portrait(model)}
    shown = {"train": training, "one per sum": ONE_PER_SUM, "none": ()}[arm.demonstrations]
    supervision: History | None = None
    if shown:
        problem = arithmetic_problem(shown)
        settings = replace(arm.supervised, seed=seed)
        supervision = supervise(
            model, problem.prompts, problem.targets, problem.grammar, settings, show=show
        )
    result["supervised"] = measured() | {"pass_at": _pass_at(model, training, held_out)}
    portraits["supervised"] = _portrait(model)
    result["supervised_budget"] = asdict(supervision.budget) if supervision else {}
    if arm.reinforced is not None:
        rewards = SHAPED if arm.reward == "shaped" else STRICT
        rollouts = TreeRollouts(arithmetic_problem(training, rewards))
        reference = Decoder(arm.model)
        reference.load_state_dict(model.state_dict())
        history = reinforce(
            model,
            rollouts,
            replace(arm.reinforced, seed=seed),
            reference=reference if arm.reinforced.beta else None,
            measure=success,
            show=show,
        )
        result["curve"] = [
            _point(record) for record in history.records if "train_success" in record
        ]
        result["zero_groups"] = [record["zero_groups"] for record in history.records]
        result["first_above_0_95"] = next(
            (int(p["step"]) for p in result["curve"] if p["train_success"] > 0.95), None
        )
        result["reinforced_budget"] = asdict(history.budget)
        result["kl"] = evaluate.summary(model, training, reference)["kl"]
    result["end"] = measured() | {"pass_at": _pass_at(model, training, held_out)}
    result["calibration"] = _calibration(model, training, held_out)
    if seed == 0:
        result["portraits"] = portraits | {"end": _portrait(model)}
    return model, result


def tasks(split: str, seed: int) -> tuple[Tasks, Tasks]:
    """Training and held-out tasks of a split.

    >>> training, held_out = tasks("contrast", 0)
    >>> len(training), len(held_out), {sum(task) for task in training} == set(range(9))
    (20, 5, True)
    """
    if split == "contract":
        return arithmetic.TRAIN, arithmetic.TEST
    if split != "contrast":
        raise ValueError(f'`split` must be "contract" or "contrast", got {split!r}')
    rng = random.Random(seed)
    while True:
        held_out = sorted(rng.sample(arithmetic.TASKS, 5))
        training = tuple(task for task in arithmetic.TASKS if task not in held_out)
        if {sum(task) for task in training} == set(range(9)):
            return training, tuple(held_out)


def _point(record: Mapping[str, float]) -> dict[str, float]:
    names = ("step", "train_success", "test_success", "entropy", "kl", "samples")
    return {name: record[name] for name in names if name in record}


def _pass_at(model: Decoder, training: Tasks, held_out: Tasks) -> dict[str, list[float]]:
    """Exact pass@k, the mean over tasks, at each k of `PASS_AT`."""
    success = {
        name: evaluate.value(model, arithmetic_problem(chosen)).tolist()
        for name, chosen in (("train", training), ("test", held_out))
    }
    return {
        name: [sum(evaluate.pass_at_k(min(p, 1.0), k) for p in ps) / len(ps) for k in PASS_AT]
        for name, ps in success.items()
    }


def _portrait(model: Decoder) -> dict[str, Any]:
    """What the policy says to one task, and where it looks, for the figures."""
    problem = arithmetic_problem([PORTRAIT])
    with torch.no_grad():
        joint = enumerate_all(model, problem.prompts, problem.grammar).joint[0]
    written = torch.cat([problem.prompts, problem.targets[:, :1]], 1)  # the prompt and 7
    return {
        "responses": [round(chance, 6) for chance in joint.exp().tolist()],
        "attention": _rounded(attention_maps(model, written)[:, 0].tolist()),
    }


def _rounded(nested: Any) -> Any:
    return [_rounded(x) for x in nested] if isinstance(nested, list) else round(nested, 3)


def _calibration(model: Decoder, training: Tasks, held_out: Tasks) -> dict[str, dict[str, float]]:
    """How confident the policy is in what it samples, and how often that is right."""
    result = {}
    for name, chosen in (("train", training), ("test", held_out)):
        problem = arithmetic_problem(chosen)
        with torch.no_grad():
            joint = enumerate_all(model, problem.prompts, problem.grammar).joint
        chance = joint.double().exp().clamp(max=1.0).numpy()
        measured = compare.calibration(chance, problem.rewards.numpy(), chance)
        result[name] = {"ece": measured.ece, "brier": measured.brier}
    return result


def _summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median, least and greatest over the seeds, of what a page reports."""

    def over(pick: Callable[[Mapping[str, Any]], float]) -> dict[str, float]:
        values = [pick(row) for row in rows]
        return {"median": median(values), "low": min(values), "high": max(values)}

    numbers = {
        f"{stage}_{split}": over(lambda row, s=stage, p=split: row[s][p]["success"])  # type: ignore[misc]
        for stage in ("start", "supervised", "end")
        for split in ("train", "test")
    }
    if all("kl" in row for row in rows):
        numbers["kl"] = over(lambda row: row["kl"])
    return {
        **numbers,
        "median": {name: spread["median"] for name, spread in numbers.items()},
        "seeds": len(rows),
        "solved": sum(row["end"]["train"]["success"] >= 0.99 for row in rows),
        "above_0_95": sum(row["end"]["train"]["success"] > 0.95 for row in rows),
    }
