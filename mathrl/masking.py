"""One training run under the right mask, and the same run under each of the wrong ones.

`tensors` makes the batch of an update from sampled conversations. The right one is what
`trajectory.build` and `collate.pad` make. A fault alters it the way trainers do, after the rows
were built, because neither of the two would make it. Everything else is equal in every arm: the
warm start, the budget, the seeds, the loss.

Axes: R tasks, G conversations of each, N = R G rows, T targets of a row.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mathrl import _sources, arithmetic, baseline, collate, compare, evidence, multiturn, objective
from mathrl.collate import Padded, pad
from mathrl.config import Config, ReinforceConfig, SupervisedConfig
from mathrl.decoder import Decoder, DecoderConfig
from mathrl.multiturn import Conversation, Task
from mathrl.progress import progress
from mathrl.trajectory import Row, build

Fault = Literal["right", "late", "early", "tool", "history", "filler"]

FAULTS: tuple[Fault, ...] = get_args(Fault)
"""The arms of the experiment, the right one first."""

SEEDS = tuple(range(8))

MEASURES = ("success", "ece", "brier")

RECORDING = ("mathrl/evidence.py", "mathrl/progress.py", "mathrl/_sources.py")
"""Imported here to record and to report: no result depends on them."""


@dataclass(frozen=True)
class MaskingConfig:
    """Settings of every arm; they were fixed before the recorded run.

    Args:
        model: sizes.
        supervised: the warm start on the training tasks' own conversations.
        reinforced: of the updates; `objective` is PPO's clip and the baseline leave-one-out.
        every: steps between two measurements.
    """

    model: DecoderConfig = multiturn.CONFIG
    supervised: SupervisedConfig = field(default_factory=lambda: SupervisedConfig(steps=10))
    reinforced: ReinforceConfig = field(
        default_factory=lambda: ReinforceConfig(steps=60, epochs=2, objective="ppo_clip")
    )
    every: int = 10


def settings(recorded: Mapping[str, Any]) -> MaskingConfig:
    """The settings of a recorded run, which need not be those of today's.

    Args:
        recorded: `config` of its manifest.

    Raises:
        TypeError: a setting is unknown or of another type.
        KeyError: a setting is missing.
        ValueError: a setting is out of range.

    >>> settings(asdict(MaskingConfig())) == MaskingConfig()
    True
    """
    return MaskingConfig(
        model=DecoderConfig(**recorded["model"]),
        supervised=SupervisedConfig(**recorded["supervised"]),
        reinforced=ReinforceConfig(**recorded["reinforced"]),
        every=recorded["every"],
    )


def rows(talk: Conversation, advantage: float, fault: Fault = "right") -> list[Row]:
    """One row; with the fault "history" one for each call, which trains all it shows.

    >>> talk = multiturn.demonstration((3, 4))
    >>> [[row.trained for row in rows(talk, 1.0, fault)] for fault in ("right", "history")]
    [[4], [2, 4]]
    """
    calls = talk.calls
    parts = [calls[: k + 1] for k in range(len(calls))] if fault == "history" else [calls]
    return [row for part in parts for row in build(part, advantages=advantage).rows]


def tensors(
    model: Decoder, talks: Sequence[Conversation], advantages: Sequence[float], fault: Fault
) -> Padded:
    """The batch of an update, right or with one fault.

    | fault | what is wrong |
    |---|---|
    | `right` | nothing |
    | `late` | the mask stands one position late, as a mask of inputs does |
    | `early` | the mask stands one position early, as one that is shifted twice does |
    | `tool` | the tool's tokens are targets too |
    | `history` | each call is a row, and trains all sampled tokens that it shows |
    | `filler` | old log-probabilities are 0.0 |

    Args:
        model: the policy that sampled, for the old log-probability of a target that no call
            sampled.
        talks: sampled conversations, N.
        advantages: one for each.
        fault: one of `FAULTS`.

    Returns:
        The batch; its weights are its mask, so that `collate.total` sums over targets.
    """
    like = model.head.weight.dtype
    made = [
        (row, advantage)
        for talk, advantage in zip(talks, advantages, strict=True)
        for row in rows(talk, advantage, fault)
    ]
    batch = pad([row for row, _ in made], pad_id=0, dtype=like)
    if fault == "filler":
        return replace(batch, _old_log_probs=torch.zeros_like(batch.weights))
    mask = masked(batch.mask, fault) & batch.attention_mask[:, 1:].bool()
    if torch.equal(mask, batch.mask):
        return batch
    with torch.no_grad():
        now = multiturn.log_probs(model, batch.input_ids)
    of_row = torch.tensor([advantage for _, advantage in made], dtype=like)[:, None]
    return replace(
        batch,
        mask=mask,
        weights=mask.to(like),
        _old_log_probs=torch.where(batch.mask, batch.old_log_probs, now),
        _advantages=of_row * mask,
    )


def masked(mask: Tensor, fault: Fault) -> Tensor:
    """The mask that a fault makes of the right one, boolean (N, T).

    >>> right = torch.tensor([[0, 1, 1, 0, 0, 1, 1]]).bool()
    >>> [masked(right, fault).int().tolist()[0] for fault in ("late", "early", "tool")]
    [[0, 0, 1, 1, 0, 0, 1], [1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]]
    """
    edge = torch.zeros_like(mask[:, :1])
    if fault == "late":
        return torch.cat([edge, mask[:, :-1]], 1)
    if fault == "early":
        return torch.cat([mask[:, 1:], edge], 1)
    if fault == "tool":  # all that follows the first sampled token
        return mask.cumsum(1) > 0
    return mask


def loss(model: Decoder, batch: Padded, conversations: int) -> Tensor:
    """PPO's clipped loss, summed over targets and divided by the number of conversations."""
    log_probs = multiturn.log_probs(model, batch.input_ids)
    each = objective.ppo_clip(log_probs, batch.old_log_probs, batch.advantages)
    return collate.total(each, batch) / conversations


def train(
    fault: Fault,
    seed: int,
    config: MaskingConfig | None = None,
    *,
    show: bool = True,
) -> tuple[Decoder, dict[str, Any]]:
    """One training of an arm.

    Args:
        fault: the arm.
        seed: of the network and of every sample; equal seeds start from equal networks.
        config: settings.
        show: report progress.

    Returns:
        The model, and exact numbers: success and calibration on the training and the held-out
        tasks, after the warm start and at the end, and a curve.
    """
    config = MaskingConfig() if config is None else config
    reinforced, tasks = config.reinforced, arithmetic.TRAIN
    model = Decoder(config.model, seed=seed)
    _warm_start(model, tasks, config.supervised)
    result: dict[str, Any] = {"seed": seed, "supervised": _measured(model)}
    curve = [{"step": 0, "train_success": _success(model, tasks)}]
    draws = torch.Generator().manual_seed(seed)
    optimizer = _optimizer(model, reinforced)
    asked = [task for task in tasks for _ in range(reinforced.group_size)]  # N
    with progress(f"{fault}, seed {seed}", reinforced.steps, show=show) as advance:
        for step in range(1, reinforced.steps + 1):
            uniforms = torch.rand(len(asked), multiturn.DRAWS, dtype=torch.float64, generator=draws)
            talks = multiturn.converse(model, asked, uniforms)
            paid = torch.tensor([float(talk.reward) for talk in talks]).view(len(tasks), -1)
            advantages = baseline.leave_one_out(paid).flatten().tolist()  # (R, G)
            batch = tensors(model, talks, advantages, fault)
            for _ in range(reinforced.epochs):
                _update(model, optimizer, loss(model, batch, len(talks)), reinforced)
            if step % config.every == 0 or step == reinforced.steps:
                curve.append({"step": step, "train_success": _success(model, tasks)})
            advance(f"reward {paid.mean():.3f}")
    return model, result | {"curve": curve, "end": _measured(model)}


def run(
    name: str = "masks",
    seeds: Sequence[int] = SEEDS,
    *,
    config: MaskingConfig | None = None,
    tell: Callable[[str, int, Mapping[str, Any]], None] | None = None,
    show: bool = True,
) -> evidence.Manifest:
    """Train every arm with every seed, on one thread; return the manifest of the run.

    Args:
        name: of the run.
        seeds: of each arm.
        config: settings.
        tell: called with arm, seed and result as each training ends.
        show: report progress.
    """
    config = MaskingConfig() if config is None else config
    hashes = _sources.hashes(Path(__file__))  # before anything runs
    sources = {file: digest for file, digest in hashes.items() if file not in RECORDING}
    torch.set_num_threads(1)
    start = time.perf_counter()
    results: dict[str, list[dict[str, Any]]] = {fault: [] for fault in FAULTS}
    checkpoints = {}
    for fault in FAULTS:
        for seed in seeds:
            model, result = train(fault, seed, config, show=show)
            data = evidence.checkpoint_bytes(model)
            checkpoints[f"{fault}-{seed}.safetensors"] = evidence.sha256(data)
            results[fault].append(result)
            if tell is not None:
                tell(fault, seed, result)
    metrics = {
        "arms": {fault: _summarise(rows, results["right"]) for fault, rows in results.items()},
        "summary": {
            fault: {key: median(row["end"]["train"][key] for row in rows) for key in MEASURES}
            for fault, rows in results.items()
        },
        "runs": results,
    }
    taken = time.perf_counter() - start
    return evidence.manifest(
        name, asdict(config), list(seeds), metrics, checkpoints, taken, sources
    )


def _warm_start(model: Decoder, tasks: Sequence[Task], config: SupervisedConfig) -> None:
    talks = [multiturn.demonstration(task) for task in tasks]
    batch = pad([row for talk in talks for row in rows(talk, 1.0)], pad_id=0)
    optimizer = _optimizer(model, config)
    for _ in range(config.steps):
        log_probs = multiturn.log_probs(model, batch.input_ids)
        _update(model, optimizer, collate.total(-log_probs, batch) / len(talks), config)


def _optimizer(model: Decoder, config: Config) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _update(
    model: Decoder, optimizer: torch.optim.Optimizer, value: Tensor, config: Config
) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(value)
    longest = math.inf if config.max_grad_norm is None else config.max_grad_norm
    nn.utils.clip_grad_norm_(model.parameters(), longest, error_if_nonfinite=True)
    optimizer.step()


def _measured(model: Decoder) -> dict[str, dict[str, float]]:
    found = {}
    for split, tasks in (("train", arithmetic.TRAIN), ("test", arithmetic.TEST)):
        calibration = multiturn.calibration(model, tasks)
        found[split] = {
            "success": _success(model, tasks), "ece": calibration.ece, "brier": calibration.brier
        }  # fmt: skip
    return found


def _success(model: Decoder, tasks: Sequence[Task]) -> float:
    with torch.no_grad():
        return multiturn.value(model, tasks).mean().item()


def _summarise(
    rows: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Each measure at the end over the seeds, and its difference to the right arm, in pairs."""
    found: dict[str, Any] = {}
    for split in ("train", "test"):
        found[split] = {}
        for key in MEASURES:
            values, others = ([row["end"][split][key] for row in arm] for arm in (rows, right))
            spread = {"median": median(values), "low": min(values), "high": max(values)}
            if rows is not right and len(rows) > 1:
                spread["difference"] = compare.paired(values, others)._asdict()
            found[split][key] = spread
    return found
