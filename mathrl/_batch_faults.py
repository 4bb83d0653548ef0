"""The checks of one batch, row by row: ids, attention mask, loss mask, labels, values, loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mathrl._id_faults import attention_faults, hole_faults, id_faults, place, starts_twice
from mathrl._mask_faults import mask_faults
from mathrl._truth import Truth
from mathrl._value_faults import (
    advantage_faults,
    old_log_prob_faults,
    ratio_faults,
    unexplained_faults,
)
from mathrl.faults import Fault

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]
LossFunction = Callable[[Mapping[str, "Tensor"]], "Tensor | float"]
Accumulator = Callable[[Sequence[Mapping[str, "Tensor"]]], "Tensor | float"]


class Batch:
    """The tensors of a batch, every column right-aligned to the targets."""

    def __init__(
        self,
        ids: Array,
        attended: Array,
        columns: Mapping[str, Array],
        truths: list[Truth | None],
        pad_id: int | None,
        bos_id: int | None,
        tolerance: float,
    ) -> None:
        self.ids, self.attended = ids, attended
        # All rows are placed before any is judged: values may be those of another row.
        self.starts = [
            None if truth is None else place(ids[row], attended[row], truth)
            for row, truth in enumerate(truths)
        ]
        self.truths = [
            truth if truth is None or start is None else replace(truth, start=start)
            for truth, start in zip(truths, self.starts, strict=True)
        ]
        self.pad_id, self.bos_id, self.tolerance = pad_id, bos_id, tolerance
        width = ids.shape[1]
        mask = columns["loss_mask"]
        self.first = mask[:, 0] != 0 if mask.shape[1] == width else np.zeros(len(ids), bool)
        self.columns = {name: _aligned(value, width) for name, value in columns.items()}
        self.mask = self.columns["loss_mask"] != 0

    def row_faults(self, row: int, filler: bool) -> list[Fault]:
        """Faults of one row: its ids, then its mask, then its values."""
        ids, attended = self.ids[row], self.attended[row]
        truth = self.truths[row]
        if truth is None:
            found = hole_faults(row, ids, attended, self.pad_id)
            found += self._mask_alone(row, filler, has_hole=bool(found))
            if starts_twice(ids[attended], self.bos_id):
                found.append(Fault("second start token", row))
        else:
            twice = starts_twice(ids[attended], self.bos_id)
            if self.starts[row] is None or (twice and not starts_twice(truth.tokens, self.bos_id)):
                return id_faults(row, ids, attended, self.truths, self.bos_id)
            found = attention_faults(row, ids, attended, truth, self.pad_id)
            if self.mask.any():
                found += mask_faults(row, self.mask[row], attended, truth)
        if self.first[row] and attended[0] and not found:
            found.append(Fault("first token trained", row))
        return found + self._label_faults(row) + self._value_faults(row)

    def _mask_alone(self, row: int, filler: bool, has_hole: bool) -> list[Fault]:
        """What can be said of a loss mask without the row it should have come from."""
        mask, attended = self.mask[row], self.attended[row]
        found = []
        padding = mask & ~(attended[1:] & attended[:-1]) if not filler else mask
        if padding.any() and not has_hole:
            found.append(Fault("padding trained", row, _listed(padding)))
        crosses = mask & self._boundaries(row)
        if crosses.any():
            found.append(Fault("target crosses a boundary", row, _listed(crosses)))
        return found

    def _boundaries(self, row: int) -> Array:
        """Targets that belong to another packed sequence than the token that predicts them."""
        boundaries = np.zeros(len(self.mask[row]), bool)
        if "segments" in self.columns:
            segments = self.columns["segments"][row]
            boundaries[1:] = segments[1:] != segments[:-1]
        return boundaries

    def _label_faults(self, row: int) -> list[Fault]:
        if "labels" not in self.columns:
            return []
        labels, targets = self.columns["labels"][row], self.ids[row, 1:]
        used = labels >= 0
        wrong = used & (labels != targets)
        if not wrong.any():
            return []
        ahead = used[:-1].any() and (labels[:-1] == targets[1:])[used[:-1]].all()
        kind = "labels shifted twice" if ahead else "labels differ"
        return [Fault(kind, row, _listed(wrong))]

    def _value_faults(self, row: int) -> list[Fault]:
        truth, tolerance = self.truths[row], self.tolerance
        old, new = (self.columns.get(name) for name in ("old_log_probs", "log_probs"))
        advantages = self.columns.get("advantages")
        attended = self.attended[row]
        real = attended[1:] & attended[:-1] & ~self._boundaries(row)
        at = np.flatnonzero(self.mask[row] & real)
        found: list[Fault] = []
        if truth is not None:
            at = np.flatnonzero(truth.mask) + truth.start
        if old is not None:
            if truth is not None:
                found += old_log_prob_faults(row, old[row], self.truths, tolerance)
            elif new is None or (np.abs(new[row][at]) > tolerance).any():
                found += unexplained_faults(row, old[row], at)
            if new is not None and not found:
                found += ratio_faults(row, new[row], old[row], at, tolerance)
        if advantages is not None:
            if truth is not None:
                found += advantage_faults(row, advantages[row], self.truths, tolerance)
            elif not np.isfinite(advantages[row][at]).all():
                bad = at[~np.isfinite(advantages[row][at])]
                found.append(Fault("not finite", row, tuple(bad.tolist()), "advantages"))
        return found

    def loss_faults(self, loss_fn: LossFunction, accumulate: Accumulator | None) -> list[Fault]:
        """Faults of the loss, which is called with torch tensors."""
        import torch

        from mathrl._loss_faults import VALUES, loss_faults

        tensors = {
            name: torch.from_numpy(self.columns[name]).double()
            for name in VALUES
            if name in self.columns
        }
        tensors["mask"] = torch.from_numpy(self.mask).double()
        tensors["attention_mask"] = torch.from_numpy(self.attended[:, 1:]).double()
        return loss_faults(loss_fn, tensors, accumulate)


def as_array(value: Any) -> Array:
    """A tensor, an array or nested lists as an array; other floating types as float64."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
    array = np.asarray(value)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def shape_faults(ids: Array, attended: Array, columns: Mapping[str, Array]) -> list[Fault]:
    found = []
    size = f"{tuple(ids.shape)} ids"
    if attended.shape != ids.shape:
        found.append(Fault("lengths differ", detail=f"`attention_mask` {attended.shape}, {size}"))
    for name, value in columns.items():
        fits = value.ndim == 2 and len(value) == len(ids) and value.shape[1] <= ids.shape[1]
        if not fits and not (name == "advantages" and value.shape == (len(ids),)):
            found.append(Fault("lengths differ", detail=f"`{name}` {value.shape}, {size}"))
    if not found:
        for name, value in (("attention_mask", attended), ("loss_mask", columns["loss_mask"])):
            before = ids.shape[1] - 1 - value.shape[1]
            for row, at in enumerate((value != 0) & (value != 1)):
                if at.any():
                    targets = tuple(max(t + before, 0) for t in _listed(at))
                    found.append(Fault("mask not binary", row, targets, f"`{name}`"))
    return found


def _aligned(value: Array, width: int) -> Array:
    """A column of the last W tokens as a column of the width - 1 targets: both end together."""
    if value.ndim == 1:  # one for the row
        value = np.repeat(value[:, None], width, 1)
    missing = width - 1 - value.shape[1]
    if missing < 0:
        return value[:, 1:]
    # Copied, because what is given may not be written to and torch asks for that.
    return np.concatenate([np.zeros((len(value), missing), value.dtype), value], 1)


def _listed(at: Array) -> tuple[int, ...]:
    return tuple(np.flatnonzero(at).tolist())
