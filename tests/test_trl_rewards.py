"""The rewards as TRL calls them: by the same call, and by TRL's own code where it is installed.

TRL is no dependency; with `pip install trl==1.16.0` beside this package, all of these tests run.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mathrl import trl_rewards
from mathrl.mixture import MixedReward, bootstrap_scales
from mathrl.reward import order_rewards, solve_rewards
from mathrl.trl_rewards import Reading, order_function, solve_function
from tests.mutants import assert_caught
from tests.oracles import refuses

EOS, VALUES = 0, 3  # a token is 1 + cell * VALUES + value; 100 is illegal


def read(ids, row):
    """The tokens of a small puzzle with VALUES values a cell."""
    said = list(ids[: list(ids).index(EOS)]) if EOS in ids else list(ids)
    cells = [None if token >= 100 else (token - 1) // VALUES for token in said]
    right = [
        token < 100 and row["values"].get((token - 1) // VALUES) == (token - 1) % VALUES
        for token in said
    ]
    ended = EOS in ids
    return Reading(cells, right, ended)


def samples(seed=0, prompts=6, size=4, cells=3):
    """Completions and their columns; some solve, some are cut off, illegal or out of order."""
    rng = np.random.default_rng(seed)
    ids, columns = [], {"prompts": [], "completions": [], "canonical": [], "values": []}
    for prompt in range(prompts):
        canonical = rng.permutation(cells).tolist()
        values = {cell: int(rng.integers(VALUES)) for cell in range(cells)}
        for _ in range(size):
            order = rng.permutation(cells).tolist()
            tokens = [1 + c * VALUES + values[c] for c in order] + [EOS]
            change = rng.integers(6)
            if change == 0:
                tokens[1] = 100
            elif change == 1:
                tokens = tokens[:-1]
            elif change == 2:
                tokens[0] = 1 + order[0] * VALUES + (values[order[0]] + 1) % VALUES
            elif change == 3:
                tokens = [tokens[0], *tokens]
            ids.append(tokens)
            columns["prompts"].append(f"p{prompt}")
            columns["completions"].append("")
            columns["canonical"].append(canonical)
            columns["values"].append(values)
    return ids, columns


def vectorised(ids, columns, **options):
    """The same by `mathrl.reward`'s functions for many responses."""
    readings = [read(i, {"values": v}) for i, v in zip(ids, columns["values"], strict=True)]
    width = max(len(reading.cells) for reading in readings)
    cells, correct = np.full((len(ids), width), -1), np.zeros((len(ids), width), dtype=bool)
    for k, reading in enumerate(readings):
        cells[k, : len(reading.cells)] = [-1 if c is None else c for c in reading.cells]
        correct[k, : len(reading.correct)] = reading.correct
    ended = [reading.ended and None not in reading.cells for reading in readings]
    order = order_rewards(cells, columns["canonical"], correct=correct, **options)
    return order, solve_rewards(cells, columns["canonical"], correct=correct, ended=ended)


def check_functions(module):
    module_order, module_solve = module.order_function, module.solve_function
    for seed in range(4):
        ids, columns = samples(seed)
        for options in ({}, {"require_correct": True}, {"reduce": "sum"}):
            order, solve = vectorised(ids, columns, **options)
            call = {"completion_ids": ids, **columns, "trainer_state": None, "log_metric": print}
            got = module_order(read, **options)(**call)
            np.testing.assert_allclose(got, order, rtol=0, atol=1e-12)
            assert module_solve(read)(**call) == solve.tolist()
            assert 0 < solve.mean() < 1
    assert module_order(read).__name__ == "order"
    assert module_solve(read).__name__ == "solve"


def test_functions_give_the_rewards_of_the_package():
    check_functions(trl_rewards)


def test_columns_are_checked():
    function = order_function(read)
    refuses(ValueError, "must have a column `canonical`", function, completion_ids=[[1]])
    refuses(
        ValueError, "`canonical` must have 1 entries, got 2", function,
        completion_ids=[[1]], canonical=[[0]] * 2,
    )  # fmt: skip


MUTANTS = [
    ("                    cells,\n", "                    cells[::-1],\n"),
    ("require_correct=require_correct", "require_correct=False"),
    ("reduce=reduce", 'reduce="mean"'),
    ("ended and once and all(correct)", "once and all(correct)"),
    ("ended and once and all(correct)", "ended and once"),
    ("len(cells) == len(row[\"canonical\"]) and set", "set"),
    ("range(count)]", "reversed(range(count))]"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), MUTANTS)
def test_mutant_is_caught(old, new):
    assert_caught("mathrl.trl_rewards", old, new, check_functions)


def test_trl_calls_them_and_mixes_as_the_package_does():
    """`GRPOTrainer._calculate_rewards`, then its weighting and `scale_rewards`, on a stub."""
    trl = pytest.importorskip("trl", reason="trl is not installed", exc_type=ImportError)
    ids, columns = samples(seed=1, prompts=8, size=4)
    functions = [solve_function(read), order_function(read)]
    stub = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False), reward_funcs=functions,
        reward_processing_classes=[None, None], reward_func_names=["solve", "order"],
        state=SimpleNamespace(global_step=0),
        _log_completion_extra=None, _log_metric=None, environments=None, args=SimpleNamespace(
        report_to=[]),
    )  # fmt: skip
    inputs = [
        {"prompt": p, "canonical": c, "values": v}
        for p, c, v in zip(*(columns[k] for k in ("prompts", "canonical", "values")), strict=True)
    ]
    per_function = trl.GRPOTrainer._calculate_rewards(
        stub, inputs, columns["prompts"], columns["completions"], ids
    )
    order, solve = vectorised(ids, columns)
    np.testing.assert_allclose(per_function.numpy(), np.stack([solve, order], 1), atol=1e-6)
    scale = bootstrap_scales(0.9, solve.mean(), order.mean())
    total = (per_function * torch.tensor(list(scale))).sum(1).view(-1, 4)
    centered = total - total.mean(1, keepdim=True)
    for norm, std in (("group", total.std(1, keepdim=True)), ("batch", total.std())):
        got = MixedReward(0.9, scale, norm, eps=1e-4)(solve.reshape(-1, 4), order.reshape(-1, 4))
        # Equal rewards: TRL's float32 leaves a little, the package exactly nothing.
        np.testing.assert_allclose(got.advantages, (centered / (std + 1e-4)).numpy(), atol=5e-3)
