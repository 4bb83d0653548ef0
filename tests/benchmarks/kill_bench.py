"""Kill `mathrl bench` at random moments and look at what is left on the disk.

    python tests/benchmarks/kill_bench.py --kills 50 --seeds 2

One run is left alone and timed. Then each of the others is killed with SIGKILL at a moment drawn
uniformly from that time, in the same folder as the one before. After each kill every file must be
whole and equal to the one of the undisturbed run, and every file that was reported as written must
be there. At the end a run is left alone again: it must succeed and leave the same checkpoints.
`--small` trains a small network for a few steps, which is what the tests do.
"""

import contextlib
import json
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import click
import torch

from mathrl import evidence, experiments
from mathrl.__main__ import main as command

# A child starts with everything imported, so that it is killed at work. This process never runs
# autograd, whose threads a fork would lose.
SMALL = experiments.Arm(
    model=experiments.DecoderConfig(width=8, heads=2, depth=1),
    supervised=experiments.SupervisedConfig(steps=2),
    reinforced=experiments.ReinforceConfig(steps=2),
)
FORK = multiprocessing.get_context("fork")


def bench(folder: Path, seeds: int, output: Path) -> None:
    with output.open("w", buffering=1) as file, contextlib.redirect_stdout(file):
        command(["bench", "--seeds", str(seeds), "--out", str(folder)])


def start(folder: Path, seeds: int) -> tuple[multiprocessing.Process, Path]:
    output = folder.with_suffix(".txt")
    run = FORK.Process(target=bench, args=(folder, seeds, output))
    run.start()
    return run, output


def finished(folder: Path, seeds: int) -> float:
    """Seconds of a run that is left alone."""
    begin = time.monotonic()
    run, output = start(folder, seeds)
    run.join()
    assert run.exitcode == 0, output.read_text()
    return time.monotonic() - begin


def partial(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".partial")


def inspect(folder: Path, whole: Path, output: str) -> int:
    """Assert that what a killed run left is right; return the number of files it left whole."""
    for line in output.splitlines(keepends=True):
        if line.startswith("written: ") and line.endswith("\n"):
            assert Path(line.removeprefix("written: ").rstrip()).is_file(), line
    files = [path for path in folder.iterdir() if not partial(path)] if folder.is_dir() else []
    for path in files:
        if path.suffix == ".json":
            check_manifest(path, whole)
        else:
            evidence.load_checkpoint(path)
            assert path.read_bytes() == (whole / path.name).read_bytes(), path
    return len(files)


def check_manifest(path: Path, whole: Path) -> None:
    recorded, undisturbed = (evidence.read_manifest(p) for p in (path, whole / path.name))
    assert evidence.differences(undisturbed, recorded) == []
    for name, digest in recorded["checkpoints"].items():
        evidence.load_checkpoint(path.parent / name, digest)


@click.command()
@click.option("--kills", default=50, show_default=True)
@click.option("--seeds", default=2, show_default=True)
@click.option("--small", is_flag=True)
def main(kills: int, seeds: int, small: bool) -> None:
    """Kill the bench and report, as JSON, what was found."""
    torch.set_num_threads(1)
    if small:
        experiments.EXPERIMENTS["bench"] = ({"bench": SMALL}, (0, 1))
    moments, reached, most = random.Random(0), 0, 0
    with tempfile.TemporaryDirectory() as place:
        whole, folder = Path(place) / "whole", Path(place) / "killed"
        seconds = finished(whole, seeds)
        for number in range(kills):
            run, output = start(folder, seeds)
            moment = moments.uniform(0, seconds)
            time.sleep(moment)
            run.kill()
            run.join()
            reached += run.exitcode == -signal.SIGKILL
            most = max(most, inspect(folder, whole, output.read_text() if output.exists() else ""))
            print(f"kill {number + 1} of {kills}, after {moment:.2f} s", file=sys.stderr)
        left = sum(partial(path) for path in folder.iterdir()) if folder.is_dir() else 0
        finished(folder, seeds)
        assert inspect(folder, whole, "") == seeds + 1
    print(json.dumps({
        "kills": kills, "while running": reached, "corrupt": 0, "most files": most,
        "partial files left": left, "seconds of a whole run": round(seconds, 2),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
