"""Rows in the layouts of verl, TRL and Tinker: each value at its own token."""

import pytest
import torch

from mathrl import adapters, collate
from mathrl.trajectory import Call, build
from tests.mutants import assert_caught
from tests.oracles import refuses

FIRST = [
    Call(prompt_ids=[5, 6, 7], output_ids=[1, 2], log_probs=[-0.1, -0.2]),
    Call(prompt_ids=[5, 6, 7, 1, 2, 8, 8], output_ids=[3], log_probs=[-0.3]),
]
SECOND = [Call(prompt_ids=[5], output_ids=[4, 9], log_probs=[-0.4, -0.5])]


def rows():
    built = build(FIRST, advantages=[1.0, [2.0]]), build(SECOND, advantages=-1.0)
    return [row for b in built for row in b.rows]


def close(found, expected):
    return torch.allclose(found, torch.tensor(expected), atol=1e-7)


def check_verl(module):
    """By hand, from verl's own drawing: prompts end where responses begin."""
    batch = module.to_verl(rows(), pad_id=0, scores=[10.0, 20.0])
    assert batch["prompts"].tolist() == [[5, 6, 7], [0, 0, 5]]
    assert batch["responses"].tolist() == [[1, 2, 8, 8, 3], [4, 9, 0, 0, 0]]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1, 2, 8, 8, 3], [0, 0, 5, 4, 9, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 8, [0, 0, 1, 1, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[*range(8)], [0, 0, 0, 1, 2, 2, 2, 2]]
    assert batch["response_mask"].tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]
    for name in ("old_log_probs", "rollout_log_probs"):
        assert close(batch[name], [[-0.1, -0.2, 0.0, 0.0, -0.3], [-0.4, -0.5, 0.0, 0.0, 0.0]])
    assert batch["advantages"].tolist() == [[1, 1, 0, 0, 2], [-1, -1, 0, 0, 0]]
    # The outcome is on the last token that is trained, not on the last column.
    assert batch["token_level_scores"].tolist() == [[0, 0, 0, 0, 10], [0, 20, 0, 0, 0]]


def test_verl():
    check_verl(adapters)


def check_score_of_an_empty_response(module):
    """A row that trains nothing has a response of no tokens and gets no score."""
    row = rows()[1]
    idle = collate.replace(row, mask=(0, 0))
    batch = module.to_verl([row, idle], pad_id=0, scores=[1.0, 10.0])
    assert batch["responses"].tolist() == [[4, 9], [0, 0]]
    assert batch["prompts"].tolist() == [[0, 0, 5], [5, 4, 9]]
    assert batch["token_level_scores"].tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_score_of_an_empty_response():
    check_score_of_an_empty_response(adapters)


def wrong_score_at_length_minus_one(batch, scores):
    """The field's fault: an empty response has length 0, and number -1 is the last column."""
    placed = torch.zeros(batch["response_mask"].shape)
    for b, score in enumerate(scores):
        placed[b, int(batch["response_mask"][b].sum()) - 1] = score
    return placed


def test_a_score_at_minus_one_is_another_score():
    idle = collate.replace(rows()[1], mask=(0, 0))
    batch = adapters.to_verl([rows()[1], idle], pad_id=0)
    assert wrong_score_at_length_minus_one(batch, [1.0, 10.0]).tolist() == [[0, 1], [0, 10]]


def check_trl(module):
    inputs = module.to_trl(rows(), pad_id=0)
    assert inputs["prompt_ids"].tolist() == [[5, 6, 7], [0, 0, 5]]
    assert inputs["prompt_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert inputs["completion_ids"].tolist() == [[1, 2, 8, 8, 3], [4, 9, 0, 0, 0]]
    assert inputs["completion_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    # TRL pads its tool mask with 1; the completion mask is what leaves padding out.
    assert inputs["tool_mask"].tolist() == [[1, 1, 0, 0, 1], [1] * 5]
    assert close(
        inputs["old_per_token_logps"], [[-0.1, -0.2, 0.0, 0.0, -0.3], [-0.4, -0.5, 0.0, 0.0, 0.0]]
    )
    assert inputs["advantages"].tolist() == [[1, 1, 0, 0, 2], [-1, -1, 0, 0, 0]]
    assert inputs["num_items_in_batch"].item() == 5


def test_trl():
    check_trl(adapters)


def check_tinker(module):
    first, second = map(module.to_tinker, rows())
    assert first.model_input == (5, 6, 7, 1, 2, 8, 8)
    assert first.loss_fn_inputs == {
        "target_tokens": [6, 7, 1, 2, 8, 8, 3],
        "logprobs": [0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3],
        "advantages": [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 2.0],
    }
    assert second.model_input == (5, 4)  # a one-token prompt leaves an input of one token and more
    # A weight is a factor of the advantage.
    [[weighed], _] = collate.weigh([[rows()[0]], [rows()[1]]], "token")
    expected = [0.0, 0.0, 0.2, 0.2, 0.0, 0.0, 0.4]
    assert module.to_tinker(weighed).loss_fn_inputs["advantages"] == pytest.approx(expected)


def test_tinker():
    check_tinker(adapters)


def test_one_token_completion():
    [row] = build([Call(prompt_ids=[0], output_ids=[4], log_probs=[-0.5])], advantages=1.0).rows
    datum = adapters.to_tinker(row)
    assert (datum.model_input, datum.loss_fn_inputs["target_tokens"]) == ((0,), [4])
    assert adapters.to_verl([row], pad_id=0)["responses"].tolist() == [[4]]


def check_branch_history_is_prompt(module):
    """What another row trains is context here, and so belongs to the prompt."""
    calls = [*FIRST, Call(prompt_ids=FIRST[1].prompt_ids, output_ids=[4], log_probs=[-0.9])]
    branch = build(calls, advantages=1.0).rows[1]
    batch = module.to_verl([branch], pad_id=0)
    assert batch["prompts"].tolist() == [[5, 6, 7, 1, 2, 8, 8]]
    assert batch["responses"].tolist() == [[4]]


def test_branch_history_is_prompt():
    check_branch_history_is_prompt(adapters)


def check_missing(module):
    """Nothing is filled in: each consumer that needs a log-probability raises."""
    [row] = build([Call(prompt_ids=[1], output_ids=[2], log_probs=[None])], advantages=1.0).rows
    for consume in (module.to_tinker, lambda r: module.to_verl([r], pad_id=0),
                    lambda r: module.to_trl([r], pad_id=0)):  # fmt: skip
        refuses(ValueError, "`old_log_probs`: 1 trained targets have no log-probability", consume,
                row)  # fmt: skip
        [bare] = build(SECOND).rows
        refuses(ValueError, "`advantages`: 2 trained targets have no advantage", consume, bare)
    refuses(ValueError, "`scores` has 1 entries for 2 rows", module.to_verl, rows(), pad_id=0,
            scores=[1.0])  # fmt: skip


def test_missing():
    check_missing(adapters)


def strictly(check, module):
    try:
        check(module)
    except (IndexError, RuntimeError, ValueError) as error:
        raise AssertionError(f"{check.__name__} raised {error!r}") from error


MUTANTS = [
    ("targets = slice(cut - 1, cut - 1 + count)", "targets = slice(cut, cut + count)", check_verl),
    ("row.mask.index(1) + 1 if", "row.mask.index(1) if", check_verl),
    ("row.mask.index(1) + 1 if row.trained", "1 if row.trained", check_branch_history_is_prompt),
    ("parts.prompts[b, before - cut :]", "parts.prompts[b, :cut]", check_verl),
    ("parts.prompt_mask[b, before - cut :] = 1", "parts.prompt_mask[b, :cut] = 1", check_trl),
    ("parts.response_attention[b, :count] = 1", "parts.response_attention[b, :] = 1", check_trl),
    ("(attention_mask.cumsum(1) - 1)", "attention_mask.cumsum(1)", check_verl),
    ("if mask.any():", "if True:", check_score_of_an_empty_response),
    ("mask.nonzero()[-1]", "mask.nonzero()[0]", check_verl),
    ("mask.nonzero()[-1]", "-1", check_verl),
    ("parts.response_attention == 1, parts.trained, 1", "parts.response_attention == 1, 1, 1",
     check_trl),
    ('"num_items_in_batch": parts.trained.sum()',
     '"num_items_in_batch": parts.response_attention.sum()', check_trl),
    ("(batch.advantages * batch.weights)", "batch.advantages", check_tinker),
    ("list(row.targets)", "list(row.inputs)", check_tinker),
    ("if len(scores) != len(rows):", "if False:", check_missing),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.adapters", old, new, lambda mutant: strictly(check, mutant))
