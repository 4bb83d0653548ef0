"""Checks on plain values, without numpy or torch: each error names the argument and what came."""

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any


def listed(name: str, values: Any) -> list[Any]:
    """A list, tuple, array or tensor as a list.

    Raises:
        TypeError: it is text, a mapping, or no sequence.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"`{name}` must be a sequence, got {type(values).__name__}")
    return values.tolist() if hasattr(values, "tolist") else list(values)


def ids(name: str, values: Any) -> tuple[int, ...]:
    """Token ids: integers that are not negative.

    Raises:
        TypeError: an entry is not an integer; booleans are not.
        ValueError: an entry is negative.
    """
    found = listed(name, values)
    if not all(type(i) is int for i in found):
        for at, i in enumerate(found):
            if isinstance(i, bool) or not isinstance(i, numbers.Integral):
                raise TypeError(f"`{name}` must hold integers, got {i!r} at index {at}")
        found = [int(i) for i in found]
    if found and min(found) < 0:
        at = next(at for at, i in enumerate(found) if i < 0)
        raise ValueError(f"`{name}` must not be negative, got {found[at]} at index {at}")
    return tuple(found)


def number(name: str, value: Any) -> float:
    """A finite real number.

    Raises:
        TypeError: it is no real number; booleans are not.
        ValueError: it is NaN or infinite.
    """
    is_real = type(value) is float or isinstance(value, numbers.Real)
    if not is_real or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}")
    return float(value)
