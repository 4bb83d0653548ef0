"""Rows in the layouts of other libraries, by the field names that those document.

verl and TRL split a row into a prompt, padded on the left, and a response, padded on the right.
Here the prompt ends before the first trained target; what follows it, tool results included, is
the response, and a mask says which of its tokens are trained. Their values are in token space:
column j of the response is about response token j, and both libraries score it with the logits of
the position before. The shift was made when the rows were built; taking the last columns of a row
does not make it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mathrl.collate import pad
from mathrl.trajectory import Row


def to_verl(
    rows: Sequence[Row], *, pad_id: int, scores: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """The tensors of a verl batch, by the keys of its `DataProto`.

    Args:
        rows: at least one, each with a log-probability and an advantage at every trained target.
        pad_id: the id of padding.
        scores: for each row an outcome score. It is placed on the row's last trained token; on a
            row that trains nothing, nowhere.

    Returns:
        `prompts`, `responses`, `input_ids`, `attention_mask`, `position_ids`, `response_mask`,
        `rollout_log_probs`, `old_log_probs` (the same: the ratio is to the sampler), `advantages`
        and, with `scores`, `token_level_scores`. The response fields have shape (B, R).

    Raises:
        ValueError: there is no row, nothing is trained, a value is missing, or there is not one
            score for each row.

    Source: the docstring of verl's `AgentLoopManager.generate_sequences`, verl 0.9.1.

    >>> from mathrl.trajectory import Call, build
    >>> calls = [Call(prompt_ids=[5, 6], output_ids=[1, 2], log_probs=[-0.2, -0.4]),
    ...          Call(prompt_ids=[5, 6, 1, 2, 7], output_ids=[3], log_probs=[-0.3])]
    >>> batch = to_verl(build(calls, advantages=1.0).rows, pad_id=0, scores=[10.0])
    >>> batch["prompts"], batch["responses"], batch["response_mask"]
    (tensor([[5, 6]]), tensor([[1, 2, 7, 3]]), tensor([[1, 1, 0, 1]]))
    >>> batch["token_level_scores"]
    tensor([[ 0.,  0.,  0., 10.]])
    """
    parts = _split(rows, pad_id)
    attention_mask = torch.cat([parts.prompt_mask, parts.response_attention], 1)
    batch = {
        "prompts": parts.prompts,
        "responses": parts.responses,
        "input_ids": torch.cat([parts.prompts, parts.responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": parts.trained,
        "rollout_log_probs": parts.old_log_probs,
        "old_log_probs": parts.old_log_probs,
        "advantages": parts.advantages,
    }
    if scores is not None:
        if len(scores) != len(rows):
            raise ValueError(f"`scores` has {len(scores)} entries for {len(rows)} rows")
        placed = torch.zeros(parts.trained.shape)
        for b, (score, mask) in enumerate(zip(scores, parts.trained, strict=True)):
            if mask.any():  # else the last trained token would be number -1
                placed[b, mask.nonzero()[-1]] = score
        batch["token_level_scores"] = placed
    return batch


def to_trl(rows: Sequence[Row], *, pad_id: int) -> dict[str, Tensor]:
    """The inputs of the loss of TRL's `GRPOTrainer`.

    Args:
        rows: at least one, each with a log-probability and an advantage at every trained target.
        pad_id: the id of padding.

    Returns:
        `prompt_ids`, `prompt_mask`, `completion_ids`, `completion_mask` (1 at every token that is
        no padding), `tool_mask` (0 at completion tokens that are not trained), `advantages` of
        shape (B, C), `old_per_token_logps` and `num_items_in_batch`.

    Raises:
        ValueError: there is no row, nothing is trained, or a value is missing.

    Source: TRL 1.16.0, `GRPOTrainer._generate_and_score_completions` and `_compute_loss`.

    >>> from mathrl.trajectory import Call, build
    >>> calls = [Call(prompt_ids=[5, 6], output_ids=[1, 2], log_probs=[-0.2, -0.4]),
    ...          Call(prompt_ids=[5, 6, 1, 2, 7], output_ids=[3], log_probs=[-0.3])]
    >>> inputs = to_trl(build(calls, advantages=1.0).rows, pad_id=0)
    >>> inputs["completion_ids"], inputs["tool_mask"], inputs["num_items_in_batch"]
    (tensor([[1, 2, 7, 3]]), tensor([[1, 1, 0, 1]]), tensor(3))
    """
    parts = _split(rows, pad_id)
    return {
        "prompt_ids": parts.prompts,
        "prompt_mask": parts.prompt_mask,
        "completion_ids": parts.responses,
        "completion_mask": parts.response_attention,
        "tool_mask": torch.where(parts.response_attention == 1, parts.trained, 1),
        "advantages": parts.advantages,
        "old_per_token_logps": parts.old_log_probs,
        "num_items_in_batch": parts.trained.sum(),
    }


@dataclass(frozen=True, slots=True)
class Datum:
    """What a `tinker.Datum` is made of: the n-1 input tokens, and columns of their n-1 targets."""

    model_input: tuple[int, ...]
    loss_fn_inputs: dict[str, list[int] | list[float]]


def to_tinker(row: Row) -> Datum:
    """One row for Tinker's policy-gradient losses, `importance_sampling` and `ppo`.

    Those sum over every target and have no mask: an advantage of 0 is what leaves a target out,
    and a weight is a factor of the advantage.

    Args:
        row: with a log-probability and an advantage at every trained target.

    Returns:
        Plain lists; `tinker.Datum(model_input=tinker.ModelInput.from_ints(list(d.model_input)),
        loss_fn_inputs=d.loss_fn_inputs)` takes them.

    Raises:
        ValueError: a trained target has no log-probability or no advantage, or none is trained.

    Source: Tinker's documentation of its loss functions; tinker 0.38.0.

    >>> from mathrl.trajectory import Call, build
    >>> [row] = build([Call(prompt_ids=[5], output_ids=[1], log_probs=[-0.2]),
    ...                Call(prompt_ids=[5, 1, 7], output_ids=[3], log_probs=[-0.3])],
    ...               advantages=2.0).rows
    >>> to_tinker(row).model_input, to_tinker(row).loss_fn_inputs["target_tokens"]
    ((5, 1, 7), [1, 7, 3])
    >>> to_tinker(row).loss_fn_inputs["advantages"]
    [2.0, 0.0, 2.0]
    """
    batch = pad([row], pad_id=0, dtype=torch.float64)
    return Datum(
        row.inputs,
        {
            "target_tokens": list(row.targets),
            "logprobs": batch.old_log_probs[0].tolist(),
            "advantages": (batch.advantages * batch.weights)[0].tolist(),
        },
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    prompts: Tensor
    prompt_mask: Tensor
    responses: Tensor
    response_attention: Tensor
    trained: Tensor
    old_log_probs: Tensor
    advantages: Tensor


def _split(rows: Sequence[Row], pad_id: int) -> _Parts:
    """Prompts on the left, responses on the right, each row divided at its first trained token."""
    batch = pad(rows, pad_id=pad_id)
    cuts = [row.mask.index(1) + 1 if row.trained else len(row.tokens) for row in rows]
    before = max(cuts)
    after = max(len(row.tokens) - cut for row, cut in zip(rows, cuts, strict=True))
    size = len(rows)
    parts = _Parts(
        prompts=torch.full((size, before), pad_id),
        prompt_mask=torch.zeros((size, before), dtype=torch.int64),
        responses=torch.full((size, after), pad_id),
        response_attention=torch.zeros((size, after), dtype=torch.int64),
        trained=torch.zeros((size, after), dtype=torch.int64),
        old_log_probs=torch.zeros((size, after)),
        advantages=torch.zeros((size, after)),
    )
    for b, (row, cut) in enumerate(zip(rows, cuts, strict=True)):
        count = len(row.tokens) - cut
        parts.prompts[b, before - cut :] = batch.input_ids[b, :cut]
        parts.prompt_mask[b, before - cut :] = 1
        parts.responses[b, :count] = batch.input_ids[b, cut : cut + count]
        parts.response_attention[b, :count] = 1
        # Token j of the response is target j + cut - 1 of the row.
        targets = slice(cut - 1, cut - 1 + count)
        parts.trained[b, :count] = batch.mask[b, targets].long()
        parts.old_log_probs[b, :count] = batch.old_log_probs[b, targets]
        parts.advantages[b, :count] = batch.advantages[b, targets]
    return parts
