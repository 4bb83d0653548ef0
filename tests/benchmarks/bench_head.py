"""Time, memory and agreement of four ways from hidden states to a policy-gradient loss.

One step is forward and backward of PPO's clipped loss over 8 x 128 tokens with 256 hidden
dimensions and 50,257 words, in float32 on one thread of a CPU:

- `naive`: all logits, `log_softmax`, `gather`;
- `trl_selective`: all logits, TRL's `selective_log_softmax`;
- `trl_fused`: the function behind TRL's fused head, asked for log-probabilities only;
- `mathrl`: `head.loss_from_hidden`, and `mathrl_entropy`: the same with entropies.

Steps are interleaved in one process, in an order that rotates, so that a disturbance meets all of
them. Memory is the highest resident size during one step in a process of its own, less the size
before it; the two gradients, which every way returns, are in it. Run it as README.md says.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from trl.trainer import utils as trl

from mathrl import evidence, head, objective

ROOT = Path(__file__).parents[2]
SIZES = {"sequences": 8, "tokens": 128, "width": 256, "vocabulary": 50_257}
SMALL = {"sequences": 2, "tokens": 8, "width": 16, "vocabulary": 64}
SEED = 0
TOLERANCE = 1e-5
SOURCES = ["mathrl/head.py", "tests/benchmarks/bench_head.py"]


class Task:
    """Random tokens, sampled by a policy a little different from the one that is scored."""

    def __init__(self, sequences: int, tokens: int, width: int, vocabulary: int) -> None:
        draw = torch.Generator().manual_seed(SEED)
        shape = (sequences, tokens)
        self.hidden = torch.randn(*shape, width, generator=draw).requires_grad_()
        self.weight = torch.randn(vocabulary, width, generator=draw).div_(width**0.5)
        self.weight.requires_grad_()
        self.targets = torch.randint(vocabulary, shape, generator=draw)
        self.advantages = torch.randn(shape, generator=draw)
        self.mask = torch.ones(shape)
        self.old_log_probs = torch.zeros(shape)
        with torch.no_grad():
            now = head.loss_from_hidden(
                self.hidden, self.weight, self.targets, objective.ppo_clip, **self.constants()
            ).log_probs
        self.old_log_probs = now + 0.2 * torch.randn(shape, generator=draw)

    def constants(self) -> dict[str, Tensor | float]:
        return {
            "mask": self.mask,
            "denominator": self.mask.numel(),
            "old_log_probs": self.old_log_probs,
            "advantages": self.advantages,
        }

    def logits(self) -> Tensor:
        return self.hidden @ self.weight.T

    def loss(self, log_probs: Tensor) -> Tensor:
        losses = objective.ppo_clip(log_probs, self.old_log_probs, self.advantages)
        return objective.aggregate(losses, self.mask, "token_mean", self.mask.numel())


def naive(task: Task) -> Tensor:
    log_probs = torch.log_softmax(task.logits(), dim=-1)
    return task.loss(log_probs.gather(-1, task.targets.unsqueeze(-1)).squeeze(-1))


def trl_selective(task: Task) -> Tensor:
    return task.loss(trl.selective_log_softmax(task.logits(), task.targets))


def trl_fused(task: Task) -> Tensor:
    """As `add_fused_lm_head` calls it: no bias, temperature 1, its own size of a chunk."""
    log_probs, *_ = trl._ChunkedLogProbFunction.apply(
        task.hidden.flatten(0, 1),
        task.weight,
        None,
        task.targets.flatten(),
        1.0,
        trl._CHUNKED_LOGPROB_CHUNK_SIZE,
        None,
        1.0,
        ("log_probs",),
    )
    return task.loss(log_probs.view(task.targets.shape))


def mathrl(task: Task, entropy: bool = False) -> Tensor:
    return head.loss_from_hidden(
        task.hidden,
        task.weight,
        task.targets,
        objective.ppo_clip,
        entropy=entropy,
        **task.constants(),
    ).loss


def mathrl_entropy(task: Task) -> Tensor:
    return mathrl(task, entropy=True)


WAYS: dict[str, Callable[[Task], Tensor]] = {
    way.__name__: way for way in (naive, trl_selective, trl_fused, mathrl, mathrl_entropy)
}


def step(way: Callable[[Task], Tensor], task: Task) -> float:
    """Forward and backward; the gradients are left in the leaves."""
    task.hidden.grad = task.weight.grad = None
    loss = way(task)
    loss.backward()
    return loss.item()


def agreement(task: Task) -> dict[str, dict[str, float]]:
    """Largest difference from `naive`: the loss, and each gradient in units of its largest."""
    true = step(naive, task)
    gradients = {"hidden": task.hidden.grad, "weight": task.weight.grad}
    found = {}
    for name, way in WAYS.items():
        found[name] = {"loss": abs(step(way, task) - true)}
        for leaf, gradient in gradients.items():
            gap = (getattr(task, leaf).grad - gradient).abs().max() / gradient.abs().max()
            found[name][leaf] = gap.item()
    return found


def timings(task: Task, rounds: int) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Wall and processor seconds of each step, and the load of the machine before each round."""
    names = list(WAYS)
    seconds: dict[str, dict[str, list[float]]] = {n: {"wall": [], "cpu": []} for n in names}
    loads = []
    for turn in range(rounds):
        loads.append(os.getloadavg()[0])
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            wall, cpu = time.perf_counter(), time.process_time()
            step(WAYS[name], task)
            seconds[name]["wall"].append(time.perf_counter() - wall)
            seconds[name]["cpu"].append(time.process_time() - cpu)
        print(f"round {turn + 1} of {rounds}, load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    return seconds, loads


def extra_memory(name: str) -> int:
    """Bytes by which one step raises the highest resident size of this process."""
    step(WAYS[name], Task(**SMALL))  # what libraries set up at their first call is not counted
    task = Task(**SIZES)
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is counted anew
    before = resident("VmRSS")
    step(WAYS[name], task)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory_apart(name: str) -> int:
    command = [sys.executable, __file__, "--memory-of", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def spread(values: list[float]) -> dict[str, float | list[float]]:
    low, high = min(values), max(values)
    return {"median": statistics.median(values), "low": low, "high": high, "all": values}


def measure(rounds: int) -> dict[str, object]:
    task = Task(**SIZES)
    differences = agreement(task)  # and a round to warm up
    worst = max(gap for way in differences.values() for gap in way.values())
    if not worst <= TOLERANCE:
        raise SystemExit(f"the ways differ by {worst}: {json.dumps(differences, indent=1)}")
    seconds, loads = timings(task, rounds)
    memory = {name: [memory_apart(name) / 1e6 for _ in range(3)] for name in WAYS}
    ours = seconds["mathrl"]
    return {
        "differences": differences,
        "worst_difference": worst,
        "seconds": {name: spread(taken["wall"]) for name, taken in seconds.items()},
        "cpu_seconds": {name: spread(taken["cpu"]) for name, taken in seconds.items()},
        "extra_megabytes": {name: spread(megabytes) for name, megabytes in memory.items()},
        # Of two steps of the same round, so that what slows a round down cancels.
        "times_faster": {
            name: {
                clock: spread([a / b for a, b in zip(taken[clock], ours[clock], strict=True)])
                for clock in ("wall", "cpu")
            }
            for name, taken in seconds.items()
        },
        "times_smaller": {
            name: statistics.median(megabytes) / statistics.median(memory["mathrl"])
            for name, megabytes in memory.items()
        },
        "load": spread(loads),
        "other_processes_waited_for": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of the loss from hidden states")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/evidence/head-benchmark.json")
    parser.add_argument("--memory-of", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        print(extra_memory(options.memory_of))
        return
    start = time.perf_counter()
    metrics = measure(options.rounds)
    config = SIZES | {
        "dtype": "float32",
        "device": "cpu",
        "rounds": options.rounds,
        "trl": version("trl"),
        "cores": os.cpu_count(),
    }
    sources = {name: evidence.sha256((ROOT / name).read_bytes()) for name in SOURCES}
    taken = time.perf_counter() - start
    recorded = evidence.manifest("head-benchmark", config, [SEED], metrics, {}, taken, sources)
    evidence.write_manifest(options.output, recorded)
    for name in WAYS:
        wall, cpu = metrics["seconds"][name], metrics["cpu_seconds"][name]
        megabytes = metrics["extra_megabytes"][name]["median"]
        print(
            f"{name:15} {wall['median']:6.2f} s wall ({wall['low']:.2f} to {wall['high']:.2f}), "
            f"{cpu['median']:6.2f} s cpu, {megabytes:7.1f} MB"
        )


if __name__ == "__main__":
    main()
