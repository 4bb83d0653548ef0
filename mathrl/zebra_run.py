"""The experiment on Zebra puzzles: its stages, its arms, its sizes, and where their files are.

- `train`, `validation` and `test` are folders of puzzles;
- `random`, `solver` and `sampled` with the ending `.safetensors`: supervised models, and the states
  of their training;
- `bootstrap.json`: mean rewards of the supervised model on the validation set;
- `ARM-SEED.safetensors`: reinforced models, all from `random`;
- `evaluate-NAME.json`: each model on the test set.

Every stage goes on where it was killed and skips what is finished. Validation puzzles serve to
bootstrap and for learning curves. Test puzzles are looked at by `evaluate` alone: no choice depends
on them.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mathrl import parallel, resume
from mathrl.evidence import write_atomically
from mathrl.mixture import Norm, bootstrap_scales
from mathrl.puzzle_train import (
    PuzzleReinforced,
    PuzzleSupervised,
    Second,
    measure,
    reinforce,
    supervise,
)
from mathrl.puzzler import Puzzler, PuzzlerConfig
from mathrl.resume import Record
from mathrl.zebra.clues import Size
from mathrl.zebra.dataset import build, read
from mathrl.zebra.puzzles import Puzzles

SPLITS = ("train", "validation", "test")
"""The sets of puzzles; a set's seed is its place here."""

ALPHAS = (1.0, 0.99, 0.95, 0.9, 0.75)
"""The nominal shares of the solve reward in the paper."""


SUPERVISED: Mapping[str, Mapping[str, Any]] = {
    "random": {"order": "random", "targets": "expected"},
    "solver": {"order": "solver", "orders": 1},
    "sampled": {"order": "random", "targets": "sampled"},
}
"""What differs between the supervised models. Rewards start from `random`; the other two are the
gate: with targets of one kind, solver order against random order."""


@dataclass(frozen=True)
class Arm:
    """One way to reinforce the supervised model.

    Args:
        alpha: nominal share of the solve reward.
        norm: of the mixture.
        second: the reward that is mixed with solving.
        shuffled: the order paid is a random one, drawn once for each puzzle.
    """

    alpha: float
    norm: Norm = "group"
    second: Second = "order"
    shuffled: bool = False


ARMS: Mapping[str, Arm] = {
    **{f"alpha-{alpha:g}": Arm(alpha) for alpha in ALPHAS},
    "batch": Arm(0.9, norm="batch"),
    "none": Arm(0.9, norm="none"),
    "decoupled": Arm(0.9, norm="decoupled"),
    "shuffled": Arm(0.9, shuffled=True),
    "correct-order": Arm(0.9, second="correct_order"),
    "cells": Arm(0.9, second="cells"),
}
"""The mixtures of the paper, then the controls, which change one thing in `alpha-0.9`."""


@dataclass(frozen=True)
class Plan:
    """Sizes and settings of an experiment.

    Args:
        model: sizes of the model, and of the puzzles.
        counts: how many puzzles for training, validation and test.
        prune: whether the clues are a minimal set.
        supervised: settings; order, targets and seed are replaced.
        reinforced: settings; alpha, second, norm and seed are replaced.
        seeds: of each arm.
        curve: validation puzzles measured for a learning curve.
    """

    model: PuzzlerConfig
    counts: tuple[int, int, int]
    prune: bool = False
    supervised: PuzzleSupervised = field(default_factory=PuzzleSupervised)
    reinforced: PuzzleReinforced = field(default_factory=PuzzleReinforced)
    seeds: tuple[int, ...] = (0, 1, 2)
    curve: int = 500

    @property
    def size(self) -> Size:
        """Of the puzzles."""
        return Size(self.model.houses, self.model.attributes)


PLANS: Mapping[str, Plan] = {
    "tiny": Plan(
        PuzzlerConfig(2, 2, max_clues=8, width=16, depth=2, heads=2),
        counts=(256, 128, 128),
        supervised=PuzzleSupervised(
            steps=60, batch_size=32, orders=2, learning_rate=1e-2, warmup=10, every=20
        ),
        reinforced=PuzzleReinforced(steps=6, prompts_per_step=8, group_size=4, every=2),
        seeds=(0,),
        curve=64,
    ),
    "small": Plan(
        PuzzlerConfig(3, 3, max_clues=14, width=64, depth=4, heads=4),
        counts=(20_000, 1_000, 4_000),
        supervised=PuzzleSupervised(
            steps=1800, batch_size=128, orders=2, learning_rate=4e-3, every=100
        ),
        reinforced=PuzzleReinforced(
            steps=200, prompts_per_step=32, group_size=16, learning_rate=1e-4, every=20
        ),
    ),
    "paper": Plan(
        PuzzlerConfig(4, 4, max_clues=40, width=256, depth=4, heads=4),
        counts=(200_000, 2_000, 10_000),
        prune=True,
        supervised=PuzzleSupervised(
            steps=40_000, batch_size=512, orders=2, learning_rate=1e-3, warmup=1000, every=500
        ),
        reinforced=PuzzleReinforced(
            steps=1000, prompts_per_step=128, group_size=16, learning_rate=1e-4, every=20
        ),
        curve=2000,
    ),
}
"""By name. `paper` has the model of the paper; its puzzles are of one size, and it needs a GPU."""


class Experiment:
    """The stages of a plan in a folder."""

    def __init__(self, plan: Plan, folder: Path, *, show: bool = True) -> None:
        """Keep where things are; nothing is computed."""
        self.plan, self.folder, self.show = plan, folder, show

    def generate(self, processes: int = 1) -> None:
        """Make the puzzles; under `torchrun` the first process does."""
        if parallel.rank() == 0:
            for seed, (split, count) in enumerate(zip(SPLITS, self.plan.counts, strict=True)):
                build(
                    self.folder / split, self.plan.size, seed, count, prune=self.plan.prune,
                    max_clues=self.plan.model.max_clues, processes=processes, show=self.show,
                )  # fmt: skip
        resume.barrier()

    def puzzles(self, split: str) -> Puzzles:
        """A set of puzzles.

        Raises:
            FileNotFoundError: it has not been generated.
        """
        return read(self.folder / split)

    def supervise(self, name: str = "random") -> Puzzler:
        """Train a model of `SUPERVISED` on solutions."""
        model, data = self._model(0), self.puzzles("train")
        config = replace(self.plan.supervised, **SUPERVISED[name])
        supervise(
            self._state(name), model, data, config, measure=self._curve(model), show=self.show
        )
        return model

    def bootstrap(self) -> dict[str, dict[str, float]]:
        """Mean rewards of the frozen supervised model, for each kind of second reward."""
        path = self.folder / "bootstrap.json"
        if not path.exists():
            model, data = self.trained("random"), self.puzzles("validation")
            means = {}
            for arm in ARMS.values():
                kind = _kind(arm)
                if kind not in means:
                    found = measure(model, _paid(arm, data), seed=0, second=arm.second)
                    means[kind] = {k: float(found[k].mean()) for k in ("solve", "second")}
            self._write(path, means)
        return json.loads(path.read_text("ascii"))

    def reinforce(self, name: str, seed: int) -> Puzzler:
        """Train an arm with a seed, from the supervised model."""
        arm, means = ARMS[name], self.bootstrap()[_kind(ARMS[name])]
        scales = bootstrap_scales(arm.alpha, means["solve"], means["second"])
        config = replace(
            self.plan.reinforced, alpha=arm.alpha, norm=arm.norm, second=arm.second, seed=seed
        )
        model, data = self.trained("random"), _paid(arm, self.puzzles("train"))
        reinforce(
            self._state(f"{name}-{seed}"), model, data, config, scales,
            measure=self._curve(model), show=self.show,
        )  # fmt: skip
        return model

    def evaluate(self, name: str) -> dict[str, Any]:
        """What a finished model does with the test puzzles."""
        path = self.folder / f"evaluate-{name}.json"
        if not path.exists():
            found = measure(self.trained(name), self.puzzles("test"), seed=1)
            means = {key: float(values.mean()) for key, values in found.items()}
            self._write(path, {**means, "count": self.plan.counts[2]})
        return json.loads(path.read_text("ascii"))

    def trained(self, name: str) -> Puzzler:
        """A model as its training left it."""
        model = self._model(0)
        resume.load(self._state(name), model)
        return model

    def records(self, name: str) -> list[Record]:
        """The records of a training."""
        return resume.load(self._state(name), self._model(0))["records"]

    def jobs(self) -> list[tuple[str, int]]:
        """Arms and seeds, seed by seed."""
        return [(name, seed) for seed in self.plan.seeds for name in ARMS]

    def run(self, part: int = 0, parts: int = 1) -> None:
        """All stages. With several parts, each in its own process, every part does its share.

        A part waits for what another is making; no two write the same file.
        """
        if part == 0:
            self.generate()
        self._wait(*(self.folder / split for split in SPLITS))
        for name in SUPERVISED:
            if part == (0 if name == "random" else parts - 1):
                self.supervise(name)
                self.evaluate(name)
        if part == 0:
            self.bootstrap()
        self._wait(self.folder / "bootstrap.json")
        for number, (name, seed) in enumerate(self.jobs()):
            if number % parts == part:
                self.reinforce(name, seed)
                self.evaluate(f"{name}-{seed}")

    def _wait(self, *paths: Path) -> None:
        for path in paths:
            while not _finished(path):
                time.sleep(1.0)

    def _model(self, seed: int) -> Puzzler:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
        return Puzzler(self.plan.model, seed=seed).to(device)

    def _state(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _curve(self, model: Puzzler) -> Any:
        few = self.puzzles("validation").select(slice(0, self.plan.curve))

        def measured() -> Record:
            found = measure(model, few, seed=2)
            return {f"validation_{key}": float(values.mean()) for key, values in found.items()}

        return measured

    def _write(self, path: Path, value: Any) -> None:
        if parallel.rank() == 0:
            write_atomically(path, (json.dumps(value, indent=1) + "\n").encode("ascii"))
        resume.barrier()


def _finished(path: Path) -> bool:
    if path.suffix == ".json":
        return path.exists()
    try:
        read(path)
    except (OSError, ValueError):
        return False
    return True


def _kind(arm: Arm) -> str:
    return "shuffled" if arm.shuffled else arm.second


def _paid(arm: Arm, puzzles: Puzzles) -> Puzzles:
    """The puzzles with the order that the arm pays for: each its own random one, if shuffled."""
    if not arm.shuffled:
        return puzzles
    places = np.tile(np.arange(puzzles.waves.shape[1]), (len(puzzles.waves), 1))
    return puzzles._replace(waves=np.random.default_rng(0).permuted(places, axis=1))
