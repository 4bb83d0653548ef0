"""The commands `mathrl zebra …`: the stages of the experiment on Zebra puzzles."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mathrl.zebra_run import Experiment

_size = click.option(
    "--size", type=click.Choice(["tiny", "small", "paper"]), default="small", show_default=True,
    help="Of puzzles, model and training.",
)  # fmt: skip
_out = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default="runs/zebra",
    show_default=True, metavar="FOLDER", help="Where all files of the experiment are.",
)  # fmt: skip


@click.group()
def zebra() -> None:
    """Puzzles, a model that learns them, and mixed rewards.

    The stages in their order: generate, supervise, bootstrap, reinforce, evaluate; `run` does all.
    A stage that was killed goes on where it was. The stages that train run under torchrun too:
    `torchrun --nproc-per-node=2 -m mathrl zebra supervise`. Exit status as for mathrl.
    """


@zebra.command()
@_size
@_out
@click.option(
    "--processes", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="How many work at once; the puzzles are the same.",
)  # fmt: skip
def generate(size: str, out: Path, processes: int) -> None:
    """Make the puzzles for training, validation and test."""
    with _started(size, out) as experiment:
        experiment.generate(processes)
        _say(f"written: {out}")


@zebra.command()
@_size
@_out
@click.option(
    "--order", type=click.Choice(["random", "solver", "sampled"]), default="random",
    show_default=True,
    help="Of the actions; in `sampled` it is random too, but only the next one is a target.",
)  # fmt: skip
def supervise(size: str, out: Path, order: str) -> None:
    """Train a model on solutions."""
    with _started(size, out) as experiment:
        experiment.supervise(order)
        _show(experiment.records(order)[-1])


@zebra.command()
@_size
@_out
def bootstrap(size: str, out: Path) -> None:
    """Measure the mean rewards of the supervised model on the validation puzzles."""
    from mathrl.mixture import bootstrap_scales
    from mathrl.zebra_run import ALPHAS

    with _started(size, out) as experiment:
        means = experiment.bootstrap()["order"]
        _say(f"mean rewards: solve {means['solve']:.4f}, order {means['second']:.4f}")
        for alpha in ALPHAS:
            scales = bootstrap_scales(alpha, means["solve"], means["second"])
            _say(f"alpha {alpha:g}: scales {scales.solve:.4f} and {scales.order:.4f}")


@zebra.command()
@click.argument("arm")
@click.argument("seed", type=click.IntRange(min=0))
@_size
@_out
def reinforce(arm: str, seed: int, size: str, out: Path) -> None:
    """Train the supervised model with rewards.

    ARM is alpha-1, alpha-0.99, alpha-0.95, alpha-0.9, alpha-0.75, or a control: batch, none,
    decoupled, shuffled, correct-order, cells.
    """
    from mathrl.zebra_run import ARMS

    if arm not in ARMS:
        raise click.BadParameter(f"{arm!r} is not one of {', '.join(ARMS)}", param_hint="ARM")
    with _started(size, out) as experiment:
        experiment.reinforce(arm, seed)
        _show(experiment.records(f"{arm}-{seed}")[-1])


@zebra.command()
@click.argument("name")
@_size
@_out
def evaluate(name: str, size: str, out: Path) -> None:
    """Let a trained model solve the test puzzles.

    NAME is random, solver, or ARM-SEED.
    """
    with _started(size, out) as experiment:
        _show(experiment.evaluate(name))


@zebra.command()
@_size
@_out
@click.option(
    "--part", type=click.IntRange(min=0), default=0, show_default=True, metavar="I",
    help="Which part of the work this process does.",
)  # fmt: skip
@click.option(
    "--parts", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
    help="In how many parts, one process each.",
)  # fmt: skip
def run(size: str, out: Path, part: int, parts: int) -> None:
    """Do all stages: three supervised models, every arm with every seed.

    \b
    Example, one process for each of two cores:
      OMP_NUM_THREADS=1 mathrl zebra run --part 0 --parts 2 &
      OMP_NUM_THREADS=1 mathrl zebra run --part 1 --parts 2
    """
    if part >= parts:
        raise click.BadParameter(f"must be below {parts}, got {part}", param_hint="--part")
    with _started(size, out) as experiment:
        experiment.run(part, parts)
        _say(f"written: {out}")


@zebra.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def solve(file: Path) -> None:
    """Solve a puzzle and print why, wave by wave.

    FILE is JSON, for example `{"houses": 2, "attributes": 2, "clues": [["found_at", [[0, 1]], 0],
    ["same_house", [[0, 1], [1, 1]]]]}`: for each clue its kind, its items as attribute and value,
    and its house where the kind has one; all count from 0.
    """
    from mathrl.zebra.clues import Clue, Puzzle, Size
    from mathrl.zebra.text import trace_text

    try:
        given = json.loads(file.read_text("utf-8"))
        clues = tuple(
            Clue(kind, tuple(map(tuple, items)), *house) for kind, items, *house in given["clues"]
        )
        text = trace_text(Puzzle(Size(given["houses"], given["attributes"]), clues, ()))
    except (ValueError, TypeError, KeyError, UnicodeError) as error:
        raise click.ClickException(f"{file}: is no puzzle: {error}") from None
    click.echo(text)


@contextlib.contextmanager
def _started(size: str, out: Path) -> Iterator["Experiment"]:
    """An experiment in a process that may be one of several."""
    import torch

    from mathrl import parallel
    from mathrl.resume import ResumeError, barrier
    from mathrl.zebra_run import PLANS, Experiment

    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # results are then a function of the settings alone
    try:
        with parallel.connected():
            yield Experiment(PLANS[size], out)
            barrier()  # no process leaves while another still writes
    except (ResumeError, FileNotFoundError) as error:
        raise click.ClickException(str(error)) from None


def _say(text: str) -> None:
    from mathrl import parallel

    if parallel.rank() == 0:
        click.echo(text)


def _show(numbers: Any) -> None:
    for name, value in numbers.items():
        _say(f"{name}: {value:.4f}" if value % 1 else f"{name}: {value:.0f}")
