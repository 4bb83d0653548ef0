"""Rows to tensors, padded or packed, and one denominator for all of them.

A loss over rows is `Σ_t w_t ℓ_t`: a plain sum over targets, whose weights `w_t` already hold the
denominator. A sum does not change when rows are spread over micro-batches or processes, padded to
another width or packed into one sequence; a mean of means does. `weigh` puts the denominator into
the weights once, over the whole batch, and `total` sums.

`T` is the number of target positions, one less than the width of the tokens: targets were shifted
when the rows were built, and nothing here shifts again. At positions that are not trained every
value is 0, and `total` reads none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mathrl import _checks
from mathrl.trajectory import Row, Sampling


@dataclass(frozen=True, slots=True)
class Targets:
    """What padded and packed batches have in common: one entry for each target position.

    `mask` is boolean, `targets` int64, `advantages`, `weights` and `old_log_probs` floating. The
    last two properties raise where a trained target has no value.
    """

    targets: Tensor
    mask: Tensor
    weights: Tensor
    _old_log_probs: Tensor
    _advantages: Tensor

    @property
    def old_log_probs(self) -> Tensor:
        """Log-probabilities at sampling time, in nats; ValueError where one is missing."""
        return _complete("old_log_probs", self._old_log_probs, "log-probability")

    @property
    def advantages(self) -> Tensor:
        """Advantages; ValueError where one is missing."""
        return _complete("advantages", self._advantages, "advantage")


@dataclass(frozen=True, slots=True)
class Padded(Targets):
    """Rows of one width. `input_ids`, `attention_mask` and `position_ids` have shape (B, T + 1).

    The fields of `Targets` have shape (B, T): `logits[:, :-1]` predicts them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor


@dataclass(frozen=True, slots=True)
class Packed(Targets):
    """Rows laid end to end. `input_ids` and `position_ids` have shape (N,).

    `cu_seqlens` (rows + 1,) holds the bounds of the rows, for attention that keeps them apart.
    The fields of `Targets` have shape (M,), M = N - rows: `logits[predictors]` predicts them. The
    last token of a row predicts nothing, so no target crosses a boundary.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    predictors: Tensor


def pad(
    rows: Sequence[Row],
    *,
    pad_id: int,
    side: Literal["left", "right"] = "right",
    width: int | None = None,
    count: int | None = None,
    scored_as: Sampling | None = None,
    dtype: torch.dtype = torch.float32,
) -> Padded:
    """Put rows into tensors of one width.

    Padding is known by its position, never by its id, so `pad_id` may be the id of a stop token.

    Args:
        rows: at least one, of which at least one target is trained.
        pad_id: the id to fill with.
        side: where the padding goes.
        width: of the tokens; default, the longest row.
        count: number of rows to fill up to with rows of padding, for processes that need equally
            many; default, as many as there are.
        scored_as: how the trainer computes log-probabilities. A row sampled otherwise raises;
            settings that are None, here or there, are unknown and pass.
        dtype: of the floating tensors.

    Returns:
        The batch.

    Raises:
        ValueError: there is no row or nothing trained, a row is longer than `width`, there are
            more rows than `count`, `side` is neither, or a row was sampled in another way.

    Source: derived in the book, chapter 10.

    >>> from mathrl.trajectory import Call, build
    >>> [row] = build([Call(prompt_ids=[7], output_ids=[4, 13])]).rows
    >>> batch = pad([row], pad_id=13, width=5)
    >>> batch.input_ids, batch.mask
    (tensor([[ 7,  4, 13, 13, 13]]), tensor([[ True,  True, False, False]]))
    """
    _check_rows(rows, scored_as)
    longest = max(len(row.tokens) for row in rows)
    width = longest if width is None else width
    count = len(rows) if count is None else count
    if longest > width:
        raise ValueError(f"`width` is {width}, but a row has {longest} tokens")
    if len(rows) > count:
        raise ValueError(f"`count` is {count}, but there are {len(rows)} rows")
    if side not in ("left", "right"):
        raise ValueError(f'`side` must be "left" or "right", got {side!r}')

    def filled(
        columns: list[Sequence[float]], kind: torch.dtype, size: int = width - 1, fill: int = 0
    ) -> Tensor:
        tensor = torch.full((count, size), fill, dtype=kind)
        for b, values in enumerate(columns):
            start = size - len(values) if side == "left" else 0
            tensor[b, start : start + len(values)] = torch.tensor(values, dtype=kind)
        return tensor

    input_ids = filled([row.tokens for row in rows], torch.int64, width, pad_id)
    lengths = torch.tensor([len(row.tokens) for row in rows] + [0] * (count - len(rows)))
    column = torch.arange(width)
    start = (width - lengths if side == "left" else torch.zeros_like(lengths)).unsqueeze(1)
    attention_mask = (column >= start) & (column < start + lengths.unsqueeze(1))
    return Padded(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        position_ids=(column - start).clamp(min=0) * attention_mask,
        targets=input_ids[:, 1:],
        mask=filled([row.mask for row in rows], torch.bool),
        weights=filled([row.weights for row in rows], dtype),
        _old_log_probs=filled([_known(row, row.old_log_probs) for row in rows], dtype),
        _advantages=filled([_known(row, row.advantages) for row in rows], dtype),
    )


def pack(
    rows: Sequence[Row],
    *,
    scored_as: Sampling | None = None,
    dtype: torch.dtype = torch.float32,
) -> Packed:
    """Lay rows end to end in one sequence without padding.

    Args:
        rows: at least one, of which at least one target is trained.
        scored_as: as in `pad`.
        dtype: of the floating tensors.

    Returns:
        The batch.

    Raises:
        ValueError: there is no row or nothing trained, or a row was sampled in another way.

    Source: derived in the book, chapter 10.

    >>> from mathrl.trajectory import Call, build
    >>> rows = [*build([Call(prompt_ids=[1], output_ids=[2, 3])]).rows,
    ...         *build([Call(prompt_ids=[4], output_ids=[5])]).rows]
    >>> batch = pack(rows)
    >>> batch.input_ids, batch.predictors, batch.targets
    (tensor([1, 2, 3, 4, 5]), tensor([0, 1, 3]), tensor([2, 3, 5]))
    """
    _check_rows(rows, scored_as)
    lengths = torch.tensor([len(row.tokens) for row in rows])
    ends = lengths.cumsum(0)
    total_length = int(ends[-1])
    last = torch.zeros(total_length, dtype=torch.bool)
    last[ends - 1] = True

    def joined(columns: list[Sequence[float]], kind: torch.dtype) -> Tensor:
        return torch.tensor([value for column in columns for value in column], dtype=kind)

    starts = torch.repeat_interleave(ends - lengths, lengths)
    return Packed(
        input_ids=joined([row.tokens for row in rows], torch.int64),
        position_ids=torch.arange(total_length) - starts,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32),
        predictors=(~last).nonzero().squeeze(1),
        targets=joined([row.targets for row in rows], torch.int64),
        mask=joined([row.mask for row in rows], torch.bool),
        weights=joined([row.weights for row in rows], dtype),
        _old_log_probs=joined([_known(row, row.old_log_probs) for row in rows], dtype),
        _advantages=joined([_known(row, row.advantages) for row in rows], dtype),
    )


def bins(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Group rows, in order, so that each group packs into at most `max_tokens` tokens.

    Raises:
        ValueError: a row alone is longer.

    >>> from mathrl.trajectory import Call, build
    >>> rows = [build([Call(prompt_ids=[1], output_ids=[2] * n)]).rows[0] for n in (2, 3, 1)]
    >>> [[len(row.tokens) for row in group] for group in bins(rows, 7)]
    [[3, 4], [2]]
    """
    groups: list[list[Row]] = []
    room = 0
    for at, row in enumerate(rows):
        size = len(row.tokens)
        if size > max_tokens:
            raise ValueError(f"`rows[{at}]` has {size} tokens, more than `max_tokens`={max_tokens}")
        if size > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(row)
        room -= size
    return groups


def weigh(
    trajectories: Sequence[Sequence[Row]], by: Literal["token", "trajectory"]
) -> list[list[Row]]:
    """Put the denominator of a whole batch into the weights of its rows.

    `"token"` divides by the weight of all trained targets of the batch: each token counts alike,
    and a long trajectory more. `"trajectory"` divides each trajectory by its own weight and by
    the number of trajectories that train something: each counts alike, over however many rows
    splits have spread it. A mean over rows would count a split trajectory several times.

    Args:
        trajectories: for each trajectory its rows, over all processes and micro-batches of one
            optimiser step.
        by: what counts alike.

    Returns:
        The rows, their weights summing to 1 over the batch.

    Raises:
        ValueError: nothing is trained, or `by` is neither.

    Source: derived in the book, chapter 10.

    >>> from mathrl.trajectory import Call, build
    >>> long = build([Call(prompt_ids=[1], output_ids=[2, 3, 4])]).rows
    >>> short = build([Call(prompt_ids=[1], output_ids=[2])]).rows
    >>> [[row.weights for row in rows] for rows in weigh([long, short], "token")]
    [[(0.25, 0.25, 0.25)], [(0.25,)]]
    >>> [[row.weights[0] for row in rows] for rows in weigh([long, short], "trajectory")]
    [[0.16666666666666666], [0.5]]
    """
    if by not in ("token", "trajectory"):
        raise ValueError(f'`by` must be "token" or "trajectory", got {by!r}')
    sums = [
        sum(w for row in rows for w, m in zip(row.weights, row.mask, strict=True) if m)
        for rows in trajectories
    ]
    if not any(sums):
        raise ValueError("`trajectories` train nothing: every weight is 0")
    trained = sum(s > 0 for s in sums)
    scales = [sum(sums) if by == "token" else s * trained for s in sums]
    return [
        [replace(row, weights=tuple(w / scale if w else 0.0 for w in row.weights)) for row in rows]
        for rows, scale in zip(trajectories, scales, strict=True)
    ]


def total(values: Tensor, batch: Targets, processes: int = 1) -> Tensor:
    """The weighted sum of one value for each target, `Σ_t w_t ℓ_t`, over what is trained.

    Args:
        values: the shape of `batch.targets`. Entries that are not trained may hold anything, NaN
            included: neither they nor their gradients are read.
        batch: padded or packed.
        processes: how many processes average their gradients, each with rows of its own; the
            factor undoes the average, so that the result is that of one process.

    Returns:
        A scalar.

    Raises:
        TypeError: `values` is not floating.
        ValueError: the shape is another, or `processes` is not positive.

    Source: derived in the book, chapter 10.

    >>> from mathrl.trajectory import Call, build
    >>> calls = [Call(prompt_ids=[0], output_ids=[1, 2]),
    ...          Call(prompt_ids=[0, 1, 2, 8, 9], output_ids=[3])]
    >>> batch = pad(build(calls).rows, pad_id=0)
    >>> nll = torch.tensor([[0.2, 0.4, 1.2, 1.5, 0.3]])
    >>> round(total(nll, batch).item(), 6)
    0.9
    """
    _checks.floating(values=values)
    _checks.same_shape(targets=batch.targets, values=values)
    if processes < 1:
        raise ValueError(f"`processes` must be positive, got {processes}")
    # Masking comes before the product: 0 * NaN is NaN.
    return (values.masked_fill(~batch.mask, 0.0) * batch.weights).sum() * processes


def unpad(values: Tensor, batch: Padded) -> list[Tensor]:
    """The values of each row without padding, n-1 of them, on whichever side the padding is.

    Args:
        values: shape (B, T).
        batch: the batch they belong to.

    Returns:
        For each row a tensor of shape (n-1,); of a row of padding, (0,).

    Raises:
        ValueError: the shape is another.

    >>> from mathrl.trajectory import Call, build
    >>> rows = [build([Call(prompt_ids=[1], output_ids=[2] * n)]).rows[0] for n in (1, 2)]
    >>> unpad(torch.tensor([[0.0, -1.0], [-2.0, -3.0]]), pad(rows, pad_id=0, side="left"))
    [tensor([-1.]), tensor([-2., -3.])]
    """
    _checks.same_shape(targets=batch.targets, values=values)
    # A target is real where both its token and the one that predicts it are.
    real = (batch.attention_mask[:, 1:] * batch.attention_mask[:, :-1]).bool()
    return [row[keep] for row, keep in zip(values, real, strict=True)]


def _known(row: Row, column: Sequence[float | None]) -> list[float]:
    """0 where nothing is trained, NaN where a trained target lacks its value."""
    return [
        0.0 if not m else float("nan") if value is None else value
        for m, value in zip(row.mask, column, strict=True)
    ]


def _complete(name: str, values: Tensor, what: str) -> Tensor:
    missing = values.isnan()
    if missing.any():
        index = tuple(missing.nonzero()[0].tolist())
        count = int(missing.sum())
        raise ValueError(f"`{name}`: {count} trained targets have no {what}, the first at {index}")
    return values


def _check_rows(rows: Sequence[Row], scored_as: Sampling | None) -> None:
    if not rows:
        raise ValueError("`rows` must hold at least one row, got none")
    if not any(row.trained for row in rows):
        raise ValueError("`rows` train nothing: every mask is 0 everywhere")
    for at, row in enumerate(rows):
        for call, sampling in row.settings.items():
            for name, mine, theirs in zip(
                Sampling._fields, scored_as or (None,) * 3, sampling, strict=True
            ):
                if mine is not None and theirs is not None and mine != theirs:
                    raise ValueError(
                        f"`rows[{at}]`: call {call} was sampled with {name}={theirs!r}, "
                        f"and is scored with {mine!r}"
                    )
