"""How far long work has come: a bar in a terminal, plain lines elsewhere, nothing when brief."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from mathrl import parallel

SECONDS = 10.0
"""Time between two lines when the output is not a terminal."""


@contextlib.contextmanager
def progress(label: str, total: int, *, show: bool = True) -> Iterator[Callable[[str], None]]:
    """Report work of `total` steps on the standard error; call what is yielded after each step.

    Args:
        label: what is being done.
        total: the number of steps.
        show: False, or a process other than the first, reports nothing.

    Yields:
        A function that takes a short note, for example the last loss, and counts one step.

    >>> with progress("counting", 3) as advance:
    ...     for step in range(3):
    ...         advance(f"at {step}")
    """
    if not show or parallel.rank() > 0:
        yield lambda note: None
    elif sys.stderr.isatty():
        yield from _bar(label, total)
    else:
        yield _lines(label, total)


def _bar(label: str, total: int) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    note = TextColumn("{task.fields[note]}")
    with Progress(*columns, note, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, note="")
        yield lambda text: bar.update(task, advance=1, note=text)


def _lines(label: str, total: int) -> Callable[[str], None]:
    done, last = 0, time.monotonic()

    def advance(note: str) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= SECONDS:
            last = time.monotonic()
            print(f"{label}: {done} of {total}, {note}", file=sys.stderr, flush=True)

    return advance
