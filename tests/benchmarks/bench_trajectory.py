"""Time to build rows from calls and to audit them, for 10,000, 100,000 and 1,000,000 tokens.

Tokens are counted over all calls, prompts and outputs. Five workloads, each as one trajectory:

- `merged`: 16 calls, each prompt an extension of the one before, one row;
- `stripped`: the same, but every prompt drops the reasoning of earlier answers, one row a call;
- `edited`: the same, but each prompt changes one id early in the history, with a decoder given;
- `branches`: 16 answers to one prompt;
- `short`: calls of about 100 tokens, as many as it takes, of which each second extends the first.

`audit` writes the table of every row as text; `audit_batch` compares tensors made of the rows with
the rows. Rounds are interleaved over workloads and sizes. Run it as README.md says.
"""

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mathrl import evidence
from mathrl.audit import audit, audit_batch
from mathrl.trajectory import Call, Row, build

ROOT = Path(__file__).parents[2]
SIZES = (10_000, 100_000, 1_000_000)
SEED = 0
SOURCES = [
    *("mathrl/" + name for name in (
        "_batch_faults.py", "_draft.py", "_id_faults.py", "_mask_faults.py", "_prefixes.py",
        "_truth.py", "_value_faults.py", "_values.py", "audit.py", "faults.py", "splits.py",
        "trajectory.py",
    )),
    "tests/benchmarks/bench_trajectory.py",
]  # fmt: skip


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(count)]


def call(rng: random.Random, prompt: list[int], output: list[int]) -> Call:
    log_probs = [-5 * rng.random() for _ in output]
    return Call(prompt_ids=prompt, output_ids=output, log_probs=log_probs)


def merged(rng: random.Random, tokens: int) -> list[Call]:
    return conversation(rng, tokens, lambda history: history)


def edited(rng: random.Random, tokens: int) -> list[Call]:
    def change(history: list[int]) -> list[int]:
        return [*history[:3], rng.randrange(50_000), *history[4:]]

    return conversation(rng, tokens, change)


def conversation(
    rng: random.Random, tokens: int, between: Callable[[list[int]], list[int]]
) -> list[Call]:
    """16 calls; a turn of `size` tokens, half of them sampled, makes 16 * 17 / 2 turns in all."""
    size = tokens // 136
    calls, history = [], words(rng, size - size // 2)
    for _ in range(16):
        output = words(rng, size // 2)
        calls.append(call(rng, history, output))
        history = between([*history, *output, *words(rng, size - size // 2)])
    return calls


def stripped(rng: random.Random, tokens: int) -> list[Call]:
    """Half of each output is reasoning, which no later prompt holds."""
    size = tokens // 120
    calls, history = [], words(rng, size // 2)
    for _ in range(16):
        reasoning, answer = words(rng, size // 2), words(rng, size // 2)
        calls.append(call(rng, history, [*reasoning, *answer]))
        history = [*history, *answer, *words(rng, size // 2)]
    return calls


def branches(rng: random.Random, tokens: int) -> list[Call]:
    prompt = words(rng, tokens // 32)
    return [call(rng, prompt, words(rng, tokens // 32)) for _ in range(16)]


def short(rng: random.Random, tokens: int) -> list[Call]:
    calls: list[Call] = []
    for _ in range(tokens // 150):
        first = call(rng, words(rng, 30), words(rng, 20))
        prompt = [*first.token_ids, *words(rng, 30)]
        calls += [first, call(rng, prompt, words(rng, 20))]
    return calls


WORKLOADS = {f.__name__: f for f in (merged, stripped, edited, branches, short)}


def decode(ids: object) -> str:
    return " ".join(map(str, ids))  # type: ignore[call-overload]


def batch_of(rows: tuple[Row, ...]) -> dict[str, np.ndarray]:
    """Rows of similar length, padded on the right."""
    width = max(len(row.tokens) for row in rows)
    columns = {
        "input_ids": np.zeros((len(rows), width), int),
        "attention_mask": np.zeros((len(rows), width), int),
        "loss_mask": np.zeros((len(rows), width - 1), int),
        "old_log_probs": np.zeros((len(rows), width - 1)),
        "advantages": np.zeros((len(rows), width - 1)),
    }
    for i, row in enumerate(rows):
        n, trained = len(row.tokens), np.array(row.mask)
        columns["input_ids"][i, :n] = row.tokens
        columns["attention_mask"][i, :n] = 1
        columns["loss_mask"][i, : n - 1] = trained
        for name in ("old_log_probs", "advantages"):
            values = np.array(getattr(row, name), float)
            columns[name][i, : n - 1] = np.where(trained == 1, values, 0.0)
    return columns


def timed(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def measure(rounds: int) -> dict[str, Any]:
    made = {
        (name, tokens): workload(random.Random(SEED), tokens)
        for name, workload in WORKLOADS.items()
        for tokens in SIZES
    }
    counts = {key: sum(len(c.token_ids) for c in calls) for key, calls in made.items()}
    seconds: dict[str, dict[tuple[str, int], list[float]]] = {
        part: {key: [] for key in made} for part in ("call", "build", "audit", "audit_batch")
    }
    for turn in range(rounds):
        for key, calls in made.items():
            decoder = decode if key[0] == "edited" else None
            rows = build(calls, advantages=1.0, decode=decoder).rows
            batch = batch_of(rows)
            assert audit_batch(**batch, rows=rows) == []
            parts = {
                "call": lambda calls=calls: [again(c) for c in calls],
                "build": lambda calls=calls, d=decoder: build(calls, advantages=1.0, decode=d),
                "audit": lambda rows=rows: [audit(row).text() for row in rows],
                "audit_batch": lambda batch=batch, rows=rows: audit_batch(**batch, rows=rows),
            }
            for part, function in parts.items():
                seconds[part][key].append(timed(function))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    rows_of = {key: len(build(calls).rows) for key, calls in made.items()}
    parts = {
        part: {name: summary(name, times, counts, rows_of) for name in WORKLOADS}
        for part, times in seconds.items()
    }
    slopes = [found["exponent"] for workloads in parts.values() for found in workloads.values()]
    return {"parts": parts, "largest_exponent": max(slopes)}


def summary(
    name: str,
    times: dict[tuple[str, int], list[float]],
    counts: dict[tuple[str, int], int],
    rows_of: dict[tuple[str, int], int],
) -> dict[str, Any]:
    tokens = [counts[name, n] for n in SIZES]
    medians = [statistics.median(times[name, n]) for n in SIZES]
    return {
        "tokens": tokens,
        "rows": [rows_of[name, n] for n in SIZES],
        "seconds": medians,
        "microseconds_per_token": [1e6 * s / n for s, n in zip(medians, tokens, strict=True)],
        "exponent": exponent(tokens[-2:], medians[-2:]),
        "all": [times[name, n] for n in SIZES],
    }


def again(c: Call) -> Call:
    return Call(prompt_ids=c.prompt_ids, output_ids=c.output_ids, log_probs=c.log_probs)


def exponent(tokens: list[int], seconds: list[float]) -> float:
    """The slope of log seconds over log tokens, from 100,000 to 1,000,000; 1 is linear."""
    return math.log(seconds[1] / seconds[0]) / math.log(tokens[1] / tokens[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="time to build and audit rows")
    parser.add_argument("--rounds", type=int, default=5)
    output = ROOT / "docs/evidence/trajectory-benchmark.json"
    parser.add_argument("--output", type=Path, default=output)
    options = parser.parse_args()
    start = time.perf_counter()
    metrics = measure(options.rounds)
    config = {"sizes": list(SIZES), "rounds": options.rounds, "clock": "processor seconds"}
    sources = {name: evidence.sha256((ROOT / name).read_bytes()) for name in SOURCES}
    taken = time.perf_counter() - start
    recorded = evidence.manifest(
        "trajectory-benchmark", config, [SEED], metrics, {}, taken, sources
    )
    evidence.write_manifest(options.output, recorded)
    for part, found in metrics["parts"].items():
        for name, workload in found.items():
            seconds = "  ".join(f"{s:8.4f}" for s in workload["seconds"])
            print(f"{part:12} {name:9} {seconds} s, exponent {workload['exponent']:.2f}")


if __name__ == "__main__":
    main()
