"""Training that can be killed at any moment and goes on as if it had not been.

The state of a run is one safetensors file, replaced as a whole: the parameters, the moments of
AdamW, the number of steps done, the records so far and the settings. Nothing else is needed,
because whatever is random in a step is drawn from the seed and the step's number. What was done
since the last state is done again, and comes out the same.

Under `torchrun` every process reads the state, and the first writes it.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from mathrl import parallel
from mathrl.evidence import write_atomically
from mathrl.progress import progress

Record = dict[str, float]

_KEY = "mathrl"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class ResumeError(Exception):
    """The file is of another run, or not whole."""


def train(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    update: Callable[[int], Record],
    *,
    steps: int,
    every: int,
    settings: Mapping[str, Any],
    measure: Callable[[], Record] | None = None,
    show: bool = True,
) -> list[Record]:
    """Call `update` for each step that is left, and keep the state in a file.

    Args:
        path: of the state. If it is there, model and optimizer become what it holds.
        model: changed in place.
        optimizer: of the model's parameters.
        update: does one step, given its number from 0, and returns numbers to record.
        steps: in all.
        every: after so many steps, and after the last, a record is made and the state written.
        settings: what the run is a function of, ready for JSON; a state of others is refused.
        measure: called before each record; its numbers are added.
        show: report progress.

    Returns:
        A record for each `every` steps: `step`, the number done, the means of what `update`
        returned since the record before, and what was measured.

    Raises:
        ResumeError: the file is not whole, or was written under other settings.
    """
    settings = json.loads(json.dumps(settings))
    state = _read(path, settings, model, optimizer)
    records: list[Record] = state["records"]
    start = time.perf_counter() - state["seconds"]
    numbers: list[Record] = []
    with progress(path.stem, steps - state["step"], show=show) as advance:
        for step in range(state["step"], steps):
            numbers.append(update(step))
            if (done := step + 1) % every == 0 or done == steps:
                record = {"step": float(done), **_means(numbers)}
                records.append(record | (measure() if measure else {}))
                numbers = []
                stated = {"settings": settings, "step": done, "records": records}
                _write(path, {**stated, "seconds": time.perf_counter() - start}, model, optimizer)
            advance(", ".join(f"{name} {value:.3f}" for name, value in _last(records)))
    return records


def load(path: Path, model: nn.Module) -> dict[str, Any]:
    """Give a model the parameters of a state, and return the rest of what the state says.

    Args:
        path: a file that `train` wrote.
        model: changed in place.

    Returns:
        `settings`, `step`, `records` and `seconds`, the time that all steps took.

    Raises:
        ResumeError: the file is not whole, or is of another model.
        OSError: it cannot be read.
    """
    stated, tensors = _unpacked(path)
    _fill(path, model, tensors)
    return stated


def _read(
    path: Path, settings: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.AdamW
) -> dict[str, Any]:
    if not path.exists():
        parallel.same_start(model)
        return {"step": 0, "records": [], "seconds": 0.0}
    stated, tensors = _unpacked(path)
    if stated["settings"] != settings:
        theirs = stated["settings"]
        names = sorted(
            k for k in settings.keys() | theirs.keys() if settings.get(k) != theirs.get(k)
        )
        raise ResumeError(f"{path}: was written under other settings: {', '.join(names)}")
    _fill(path, model, tensors)
    for name, parameter in model.named_parameters():
        moments = {m: tensors[f"{m}.{name}"].to(parameter.device) for m in _MOMENTS}
        step = torch.tensor(float(stated["step"]), device=parameter.device)
        optimizer.state[parameter] = {"step": step, **moments}
    return stated


def _write(
    path: Path, stated: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.AdamW
) -> None:
    if parallel.rank() == 0:
        tensors: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
        tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        text = json.dumps(stated, allow_nan=False)
        write_atomically(path, safetensors.torch.save(tensors, {_KEY: text}))
    barrier()


def barrier() -> None:
    """Wait until every process is here."""
    if parallel.size() > 1:
        torch.distributed.barrier()


def _unpacked(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    data = path.read_bytes()
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return json.loads(header["__metadata__"][_KEY]), tensors
    except Exception as error:  # whatever these bytes do to the parsers
        raise ResumeError(f"{path}: is no state of a run: {error!r}") from None


def _fill(path: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    mine = {name.removeprefix("model."): t for name, t in tensors.items() if name[:6] == "model."}
    try:
        model.load_state_dict(mine)
    except RuntimeError as error:
        raise ResumeError(f"{path}: is of another model: {error}") from None


def _means(numbers: list[Record]) -> Record:
    """The mean of each number over the steps that have it."""
    names = {name: None for record in numbers for name in record}
    return {name: fmean(r[name] for r in numbers if name in r) for name in names}


def _last(records: list[Record]) -> list[tuple[str, float]]:
    return [item for item in records[-1].items() if item[0] != "step"][:3] if records else []
