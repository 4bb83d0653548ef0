"""Checks on tensor arguments: each error names the argument, what came and what was expected."""

from typing import Any

import torch
from torch import Tensor


def tensor(**values: Any) -> None:
    """Every value is a `torch.Tensor`.

    Raises:
        TypeError: a value is something else.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"`{name}` must be a torch.Tensor, got {type(value).__name__}")


def floating(**values: Any) -> None:
    """Every value is a tensor of a floating-point type.

    Raises:
        TypeError: a value is not a tensor, or its type is not floating.
    """
    tensor(**values)
    for name, value in values.items():
        if not value.is_floating_point():
            raise TypeError(f"`{name}` must have a floating-point type, got {value.dtype}")


def full_precision(**values: Any) -> None:
    """Every value is a float32 or float64 tensor.

    Raises:
        TypeError: a value is not a tensor, or has another type.
    """
    tensor(**values)
    for name, value in values.items():
        if value.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"`{name}` must be float32 or float64, got {value.dtype}")


def same_shape(**tensors: Tensor) -> None:
    """Every tensor has exactly the shape of the first; nothing is broadcast.

    Raises:
        TypeError: a value is not a tensor.
        ValueError: a shape differs.
    """
    tensor(**tensors)
    (first, reference), *others = tensors.items()
    for name, value in others:
        if value.shape != reference.shape:
            raise ValueError(
                f"`{name}` has shape {tuple(value.shape)}, "
                f"expected {tuple(reference.shape)}, the shape of `{first}`"
            )


def finite(**tensors: Tensor) -> None:
    """No entry is NaN or infinite.

    Raises:
        TypeError: a value is not a tensor.
        ValueError: an entry is not finite; the message gives the first one and its index.
    """
    tensor(**tensors)
    for name, value in tensors.items():
        reject(~torch.isfinite(value), value, f"`{name}` must be finite")


def normalized(**log_probs: Tensor) -> None:
    """Every row of the last dimension holds the log-probabilities of a whole distribution.

    Logits, a truncated softmax and rows with NaN all fail: their probabilities do not sum to 1.

    Raises:
        TypeError: a value is not a float32 or float64 tensor.
        ValueError: a value has no last dimension, or the probabilities of a row do not sum to 1
            within 1e-3; the message gives the first such row and its sum.
    """
    full_precision(**log_probs)
    for name, value in log_probs.items():
        if value.dim() == 0:
            raise ValueError(f"`{name}` must have shape (..., V), got ()")
        total = value.detach().logsumexp(-1).exp()
        off = ~((total - 1).abs() <= 1e-3)  # also true where the sum is NaN
        reject(
            off, total, f"`{name}` must have probabilities that sum to 1 over the last dimension"
        )


def binary(**masks: Tensor) -> None:
    """Every mask is boolean, or holds only exact zeros and ones.

    Raises:
        TypeError: a value is not a tensor.
        ValueError: an entry is neither 0 nor 1; the message gives the first one and its index.
    """
    tensor(**masks)
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            reject((mask != 0) & (mask != 1), mask, f"`{name}` must hold only 0 and 1")


def reject(bad: Tensor, values: Tensor, expected: str) -> None:
    """Raise a ValueError if any entry is bad, with the first bad value and its index."""
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{expected}, got {values[index].item()} at index {index}")
