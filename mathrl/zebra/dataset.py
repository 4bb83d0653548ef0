"""Many puzzles as files that are whole or not there, made by any number of processes.

A data set is a folder: `settings.json` says what it holds, and each shard of `SHARD` puzzles is a
`.npy` file of bytes. A shard depends on the settings and on its number alone, so processes share
them out as they like, a run that was killed goes on with the shards that are missing, and the
files come out the same to the last byte.
"""

import contextlib
import io
import json
import multiprocessing
import os
import secrets
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mathrl.zebra.clues import Size
from mathrl.zebra.generator import VERSION, check_numbers, generate
from mathrl.zebra.puzzles import Puzzles as Puzzles
from mathrl.zebra.puzzles import from_puzzles as from_puzzles
from mathrl.zebra.puzzles import relabel as relabel
from mathrl.zebra.tokens import Codec

SHARD = 256
"""How many puzzles a file holds."""

_SETTINGS = "settings.json"


def build(
    path: Path,
    size: Size,
    seed: int,
    count: int,
    *,
    prune: bool = False,
    max_clues: int,
    processes: int = 1,
    show: bool = False,
) -> Puzzles:
    """Generate puzzles into a folder, or finish what was begun there, and read them.

    Args:
        path: of the folder; it is made if it is not there.
        size: of the puzzles.
        seed: as for `generate`; the indices are 0 to `count - 1`.
        count: how many.
        prune: as for `generate`.
        max_clues: as for `generate`; also how many clues there is room for.
        processes: how many work at once. With more than one, the program that calls must protect
            its entry point by `if __name__ == "__main__"`, as `multiprocessing` asks.
        show: report progress on the standard error.

    Returns:
        The puzzles: the same for every number of processes and however often the work stopped.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range, or the folder holds other puzzles.
        RuntimeError: a process failed.
        OSError: a file cannot be written or read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     puzzles = build(Path(folder), Size(2, 2), seed=0, count=5, max_clues=8)
    >>> puzzles.values.shape
    (5, 4)
    """
    check_numbers(seed=seed, count=count, processes=processes)
    Codec(size, max_clues)  # checks
    if count < 1 or processes < 1:
        raise ValueError(f"`count` and `processes` must be 1 or more, got {count} and {processes}")
    settings = {
        "version": VERSION, "houses": size.houses, "attributes": size.attributes, "seed": seed,
        "count": count, "prune": prune, "max_clues": max_clues,
    }  # fmt: skip
    _claim(path, settings)
    missing = _missing(path, settings)
    with _reporting(path, settings, missing, show=show):
        if processes == 1:
            _work(path, settings, missing)
        elif missing:
            _work_together(path, settings, missing, processes)
    return read(path)


def read(path: Path) -> Puzzles:
    """Read the puzzles of a folder.

    Raises:
        ValueError: it is not finished, or a file is not what `build` writes.
        OSError: it has no settings, or a file cannot be read.
    """
    settings = _settings(path)
    if missing := _missing(path, settings):
        raise ValueError(f"{path}: {len(missing)} shards are missing; `build` makes them")
    size = Size(settings["houses"], settings["attributes"])
    rows = np.concatenate([_read_shard(path, settings, shard) for shard in _shards(settings)])
    clues, values, waves = np.split(rows.astype(np.int64), _borders(settings), axis=1)
    return Puzzles(clues.reshape(len(rows), -1, 4), values, waves, size)


# ---------------------------------------------------------------- files


def _claim(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings into a folder, or see that they are those that stand there."""
    if (path / _SETTINGS).exists():
        if (standing := _settings(path)) != settings:
            other = {key: value for key, value in standing.items() if settings.get(key) != value}
            raise ValueError(f"`path` must be a folder of these puzzles, {path} is of {other}")
        return
    _write(path / _SETTINGS, (json.dumps(settings, indent=1) + "\n").encode())


def _settings(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((path / _SETTINGS).read_text("utf-8"))
    return settings


def _shards(settings: dict[str, Any]) -> range:
    return range(-(-settings["count"] // SHARD))


def _missing(path: Path, settings: dict[str, Any]) -> list[int]:
    return [shard for shard in _shards(settings) if not _file(path, shard).exists()]


def _file(path: Path, shard: int) -> Path:
    return path / f"{shard:06}.npy"


def _borders(settings: dict[str, Any]) -> list[int]:
    """The columns at which the values and the waves begin."""
    tokens = 4 * settings["max_clues"]
    return [tokens, tokens + settings["houses"] * settings["attributes"]]


def _rows(settings: dict[str, Any], shard: int) -> range:
    return range(shard * SHARD, min((shard + 1) * SHARD, settings["count"]))


def _read_shard(path: Path, settings: dict[str, Any], shard: int) -> NDArray[np.uint8]:
    file = _file(path, shard)
    rows: NDArray[np.uint8] = np.load(file, allow_pickle=False)
    tokens, before_waves = _borders(settings)
    shape = (len(_rows(settings, shard)), 2 * before_waves - tokens)
    if rows.dtype != np.uint8 or rows.shape != shape:
        raise ValueError(f"{file}: must be uint8 of shape {shape}, got {rows.dtype} {rows.shape}")
    return rows


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, like `mathrl.evidence.write_atomically`, without torch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# ---------------------------------------------------------------- work


def _work(path: Path, settings: dict[str, Any], shards: list[int], *, child: bool = False) -> None:
    size = Size(settings["houses"], settings["attributes"])
    for shard in shards:
        puzzles = []
        for index in _rows(settings, shard):
            if child and not _parent_lives():
                return
            puzzles.append(
                generate(
                    size,
                    settings["seed"],
                    index,
                    prune=settings["prune"],
                    max_clues=settings["max_clues"],
                )
            )
        clues, values, waves, _ = from_puzzles(puzzles, settings["max_clues"])
        rows = np.concatenate([clues.reshape(len(puzzles), -1), values, waves], axis=1)
        data = io.BytesIO()
        np.save(data, rows.astype(np.uint8), allow_pickle=False)  # tokens, values, waves are small
        _write(_file(path, shard), data.getvalue())


def _parent_lives() -> bool:
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def _work_together(path: Path, settings: dict[str, Any], shards: list[int], processes: int) -> None:
    """Every process makes each `processes`-th of the missing shards."""
    context = multiprocessing.get_context("spawn")
    workers: list[BaseProcess] = []
    try:
        for part in (shards[start::processes] for start in range(min(processes, len(shards)))):
            options = {"child": True}
            workers.append(
                context.Process(
                    target=_work, args=(path, settings, part), kwargs=options, daemon=True
                )
            )
            workers[-1].start()
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
                worker.join()
    if failed := [worker.exitcode for worker in workers if worker.exitcode != 0]:
        raise RuntimeError(f"{len(failed)} of {len(workers)} processes failed, status {failed[0]}")


@contextlib.contextmanager
def _reporting(
    path: Path, settings: dict[str, Any], shards: list[int], *, show: bool
) -> Iterator[None]:
    """Count the files that appear, whoever writes them, until the block ends."""
    if not show or not shards:
        yield
        return
    from mathrl.progress import progress  # it imports torch

    done = threading.Event()

    def watch() -> None:
        with progress("puzzles", len(shards)) as advance:
            waiting = list(shards)
            while waiting:
                finished = done.wait(0.2)
                for shard in [shard for shard in waiting if _file(path, shard).exists()]:
                    waiting.remove(shard)
                    advance(f"{min((shard + 1) * SHARD, settings['count'])} puzzles")
                if finished:
                    return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
