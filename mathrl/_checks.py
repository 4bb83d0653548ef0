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
        _reject(~torch.isfinite(value), value, f"`{name}` must be finite")


def binary(**masks: Tensor) -> None:
    """Every mask is boolean, or holds only exact zeros and ones.

    Raises:
        TypeError: a value is not a tensor.
        ValueError: an entry is neither 0 nor 1; the message gives the first one and its index.
    """
    tensor(**masks)
    for name, mask in masks.items():
        if mask.dtype != torch.bool:
            _reject((mask != 0) & (mask != 1), mask, f"`{name}` must hold only 0 and 1")


def _reject(bad: Tensor, values: Tensor, expected: str) -> None:
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{expected}, got {values[index].item()} at index {index}")
