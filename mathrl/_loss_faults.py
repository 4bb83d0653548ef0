"""What a loss function gets wrong, found by changing what must not matter."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mathrl.faults import Fault

Tensors = Mapping[str, Tensor]
VALUES = ("log_probs", "old_log_probs", "advantages")


def loss_faults(
    loss_fn: Callable[[Tensors], Tensor | float],
    tensors: Tensors,
    accumulate: Callable[[Sequence[Tensors]], Tensor | float] | None,
    tolerance: float = 1e-6,
) -> list[Fault]:
    """Compare the loss of a batch with the loss of what must be the same batch to it.

    Args:
        loss_fn: from tensors to a loss.
        tensors: those of `VALUES` there are, `mask` and `attention_mask`, all of shape (B, T).
        accumulate: from the tensors of micro-batches to the loss of one optimiser step.
        tolerance: relative to a loss of at least 1.

    Returns:
        Faults.

    Source: derived in the book, chapter 10.
    """
    loss = float(loss_fn(tensors))

    def changes(other: float) -> bool:
        # Also true where a loss is NaN.
        return not abs(other - loss) <= tolerance * max(1.0, abs(loss))

    found = []
    idle = tensors["mask"] == 0
    for name in VALUES:
        if name in tensors and idle.any():
            value = tensors[name]
            # Of either sign, and far from what is there, so that clipping does not hide it.
            other = torch.where(idle, -1.5 - 0.5 * value, value)
            if changes(float(loss_fn({**tensors, name: other}))):
                found.append(Fault("masked values leak", detail=f"`{name}`"))
    hidden = tensors["attention_mask"].masked_fill(idle, 0)
    if changes(float(loss_fn({**tensors, "attention_mask": hidden}))):
        found.append(Fault("denominator counts context"))
    wider = {name: _extended(value, 0, 3) for name, value in tensors.items()}
    taller = {name: _extended(value, 2, 0) for name, value in tensors.items()}
    if changes(float(loss_fn(wider))):
        found.append(Fault("denominator counts padding"))
    elif changes(float(loss_fn(taller))):
        found.append(Fault("denominator counts padding rows"))
    if accumulate is not None:
        rows = range(len(tensors["mask"]))
        parts = [{name: value[b : b + 1] for name, value in tensors.items()} for b in rows]
        if changes(float(accumulate(parts))):
            found.append(Fault("micro-batches averaged", detail="rows one by one"))
    return found


def _extended(value: Tensor, rows: int, columns: int) -> Tensor:
    """The tensor with rows and columns of zeros after its own."""
    return torch.nn.functional.pad(value, (0, columns, 0, rows))
