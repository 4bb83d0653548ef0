"""Runs one snippet in a clean process and returns what it printed.

The processes come from a forkserver that has imported numpy and torch and has never run autograd:
a process forked after autograd hangs in its first backward pass.
"""

import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import NamedTuple

TIME_LIMIT = 60.0


class Result(NamedTuple):
    """What a snippet printed, and its traceback if it raised."""

    printed: str
    error: str | None


def _scramble_random_state() -> None:
    """Seed every global generator from the system, so that an unseeded snippet cannot pass."""
    import random

    import numpy
    import torch

    random.seed()
    numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    torch.seed()


def _execute(source: str, filename: str, sender: Connection) -> None:
    os.chdir(tempfile.gettempdir())
    sys.modules["tests"] = None  # type: ignore[assignment]  # a reader has only the package
    _scramble_random_state()
    printed, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, filename, "exec", dont_inherit=True), {"__name__": "__main__"})
    except BaseException:
        text = traceback.format_exc()
        start = text.find(f'  File "{filename}"')
        error = text[start:] if start >= 0 else text
    sender.send((printed.getvalue(), error))
    sender.close()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "torch", "pytest", "tests.plugin.sandbox"])
    return context


def run(source: str, filename: str, time_limit: float = TIME_LIMIT) -> Result:
    """Run `source` as `__main__` in a fresh process; `filename` names it in tracebacks."""
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_execute, args=(source, filename, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(time_limit):
            return Result("", f"no result within {time_limit:g} s")
        return Result(*receiver.recv())
    except EOFError:
        return Result("", "the snippet ended its process before it finished")
    finally:
        process.kill()
        process.join()
