"""What the command line prints: tables of a few columns, probabilities, counts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mathrl.evidence import Manifest


def report(recorded: "Manifest") -> None:
    """Tables of the bench, from its manifest."""
    [rows] = recorded["metrics"]["runs"].values()
    stages = ("start", "supervised", "end")

    def success(row: Mapping[str, Any], split: str) -> list[float]:
        return [row[stage][split]["success"] for stage in stages]

    training = []
    for row in rows:
        start, supervised, end = values = success(row, "train")
        gained = f"{supervised - start:+.4f}", f"{end - supervised:+.4f}"
        training.append([str(row["seed"]), *map(shown, values), *gained])
    names = ("seed", "start", "supervised", "reinforced")
    gains = ("+ supervised", "+ reinforced")
    table("Exact success on the 20 training tasks", (*names, *gains), training)
    held_out = [[str(row["seed"]), *map(shown, success(row, "test"))] for row in rows]
    table("Exact success on the 5 held-out tasks", names, held_out)
    budgets = ("supervised_budget", "reinforced_budget")
    kinds = ("optimizer_steps", "samples", "sampled_tokens", "trained_tokens", "positions")
    spent = [
        [stage.removesuffix("_budget"), *(f"{sum(row[stage][k] for row in rows):,}" for k in kinds)]
        for stage in budgets
    ]
    columns = ["stage", *(kind.replace("_", " ") for kind in kinds)]
    table(f"Spent, {count(len(rows), 'seed')} together", columns, spent)
    solved = sum(row["end"]["train"]["success"] >= 0.99 for row in rows)
    click.echo(
        f"{solved} of {count(len(rows), 'seed')} with at least 0.99 on the training tasks, "
        f"{recorded['seconds']:.1f} s in all"
    )


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for index, column in enumerate(columns):
        grid.add_column(column, justify="right" if index else "left")
    for row in rows:
        grid.add_row(*row)
    Console().print(grid, "")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shown(chance: float) -> str:
    return f"{chance:.1e}" if 0 < chance < 1e-4 else f"{chance:.4f}"
