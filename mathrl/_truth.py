"""What a row of a batch should hold, as arrays, and where in the width of the batch it lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mathrl.trajectory import POLICY, Row

CONTEXT, BOUNDARY = -1, -2
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Truth:
    """One row, or several packed end to end; a target at a boundary belongs to none of them.

    `tokens` has n entries; the others have n-1, one for each target. `writers` numbers the calls
    that sampled a target, with `CONTEXT` and `BOUNDARY` for the rest. Values that are missing, or
    not trained, are NaN. `start` is the column of the first token in the width of the batch.
    """

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    writers: npt.NDArray[np.int64]
    old_log_probs: Floats
    advantages: Floats
    start: int = 0

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def window(self) -> slice:
        """Where the targets lie in the width of the batch."""
        return slice(self.start, self.start + self.length - 1)


def truth_of(rows: Row | Sequence[Row]) -> Truth:
    """The arrays of a row, or of rows packed in this order.

    >>> from mathrl.trajectory import Call, build
    >>> [row] = build([Call(prompt_ids=[7, 8], output_ids=[9])]).rows
    >>> truth_of([row, row]).writers
    array([-1,  0, -2, -1,  1])
    """
    parts = [rows] if isinstance(rows, Row) else list(rows)
    tokens: list[int] = []
    mask: list[int] = []
    writers: list[int] = []
    old: list[float | None] = []
    advantages: list[float | None] = []
    numbers: dict[tuple[int, int | None], int] = {}
    for part, row in enumerate(parts):
        if part:
            mask.append(0)
            writers.append(BOUNDARY)
            old.append(None)
            advantages.append(None)
        tokens += row.tokens
        mask += row.mask
        old += row.old_log_probs
        advantages += row.advantages
        for author, call in zip(row.authors, row.calls, strict=True):
            known = author == POLICY and call is not None
            number = numbers.setdefault((part, call), len(numbers)) if known else CONTEXT
            writers.append(number)
    return Truth(
        np.array(tokens, dtype=np.int64),
        np.array(mask, dtype=bool),
        np.array(writers, dtype=np.int64),
        np.array(old, dtype=np.float64),
        np.array(advantages, dtype=np.float64),
    )
