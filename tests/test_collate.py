"""Padded, packed, in micro-batches or on several processes: one loss, one gradient."""

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mathrl import collate
from mathrl.collate import pack, pad, total, unpad
from mathrl.trajectory import Call, Sampling, build
from tests.call_graphs import Graph
from tests.mutants import assert_caught
from tests.oracles import fails, refuses

VOCABULARY = 12


def trajectory(rng):
    """Calls of one conversation: some merge, some split, some branch."""
    calls, ids = [], [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
    for _ in range(rng.randint(1, 4)):
        output = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
        log_probs = [rng.uniform(-3.0, -0.1) for _ in output]
        calls.append(Call(prompt_ids=ids, output_ids=output, log_probs=log_probs))
        if rng.random() < 0.7:
            ids = [*ids, *output]
        ids = [*ids, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3)))]
    return build(calls, advantages=[rng.uniform(-1, 1) for _ in calls]).rows


def trajectories(seed, count=4):
    rng = random.Random(seed)
    return [trajectory(rng) for _ in range(count)]


def flat(groups):
    return [row for rows in groups for row in rows]


def model(dtype=torch.float64):
    """A bigram table: the logits at a position are those of its token, in any layout."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=dtype)
    return table.requires_grad_()


def loss(log_probs, batch):
    """Importance-weighted policy gradient, per target."""
    ratio = (log_probs - batch.old_log_probs).exp()
    return -ratio * batch.advantages


def padded_loss(table, rows, module=collate, **options):
    batch = module.pad(rows, dtype=torch.float64, **{"pad_id": 0, **options})
    log_probs = table[batch.input_ids[:, :-1]].log_softmax(-1)
    log_probs = log_probs.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    return module.total(loss(log_probs, batch), batch)


def packed_loss(table, rows, module=collate):
    batch = module.pack(rows, dtype=torch.float64)
    log_probs = table[batch.input_ids][batch.predictors].log_softmax(-1)
    log_probs = log_probs.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    return module.total(loss(log_probs, batch), batch)


def by_hand(groups, by):
    """The loss from the definition, one target after the other, in numpy."""
    table = model().detach().numpy()
    log_table = table - np.log(np.exp(table).sum(1, keepdims=True))
    sums, counts = [], []
    for rows in groups:
        terms = []
        for row in rows:
            for t, m in enumerate(row.mask):
                if m:
                    log_prob = log_table[row.tokens[t], row.tokens[t + 1]]
                    terms.append(-row.advantages[t] * math.exp(log_prob - row.old_log_probs[t]))
        sums.append(sum(terms))
        counts.append(len(terms))
    if by == "token":
        return sum(sums) / sum(counts)
    return float(np.mean([s / n for s, n in zip(sums, counts, strict=True)]))


# Layout


def strictly(check, module):
    try:
        check(module)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise AssertionError(f"{check.__name__} raised {error!r}") from error


def check_pad(module):
    """Each value is where its token is; padding is 0 and not attended to."""
    calls = [Call(prompt_ids=[7], output_ids=[4, 11], log_probs=[-0.1, -0.2]),
             Call(prompt_ids=[7, 4, 11, 5], output_ids=[6, 11], log_probs=[-0.3, -0.4]),
             ]  # fmt: skip
    rows = [build(calls, advantages=2.0).rows[0], build(calls[:1], advantages=3.0).rows[0]]
    right = module.pad(rows, pad_id=11, width=7, count=3)
    assert right.input_ids.tolist() == [
        [7, 4, 11, 5, 6, 11, 11], [7, 4, 11, 11, 11, 11, 11], [11] * 7,
    ]  # fmt: skip
    assert right.attention_mask.tolist() == [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0], [0] * 7]
    assert right.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 0, 0, 0, 0], [0] * 7]
    assert right.mask.int().tolist() == [[1, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0], [0] * 6]
    assert right.targets.tolist() == [row[1:] for row in right.input_ids.tolist()]
    left = module.pad(rows, pad_id=11, width=7, side="left")
    assert left.input_ids.tolist() == [[11, 7, 4, 11, 5, 6, 11], [11, 11, 11, 11, 7, 4, 11]]
    assert left.attention_mask.tolist() == [[0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]]
    assert left.position_ids.tolist() == [[0, 0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1, 2]]
    assert left.mask.int().tolist() == [[0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1]]
    expected = torch.tensor([[0.0, -0.1, -0.2, 0.0, -0.3, -0.4], [0.0, 0.0, 0.0, 0.0, -0.1, -0.2]])
    assert torch.equal(left.old_log_probs, expected)
    assert left.advantages.tolist() == [[0, 2, 2, 0, 2, 2], [0, 0, 0, 0, 3, 3]]
    assert left.weights.tolist() == [[0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert module.pad(rows, pad_id=0).input_ids.shape == (2, 6)
    for batch in (left, right):
        parts = module.unpad(batch.targets, batch)
        assert [part.tolist() for part in parts[:2]] == [[*row.targets] for row in rows]
        assert all(len(part) == 0 for part in parts[2:])


def test_pad():
    check_pad(collate)


def check_pack(module):
    """Every target is predicted by the token before it in its own row."""
    for seed in range(20):
        rows = flat(trajectories(seed))
        batch = module.pack(rows, dtype=torch.float64)
        bounds = batch.cu_seqlens.tolist()
        assert bounds == [0, *itertools.accumulate(len(row.tokens) for row in rows)]
        expected = []
        for row, start, stop in zip(rows, bounds[:-1], bounds[1:], strict=True):
            assert batch.input_ids[start:stop].tolist() == [*row.tokens]
            assert batch.position_ids[start:stop].tolist() == [*range(len(row.tokens))]
            columns = (row.mask, row.weights, row.old_log_probs, row.advantages)
            for t, (m, weight, *values) in enumerate(zip(*columns, strict=True)):
                values = [v if m else 0.0 for v in values]
                expected.append((start + t, row.tokens[t + 1], m, weight, *values))
        columns = (batch.predictors, batch.targets, batch.mask, batch.weights,
                   batch.old_log_probs, batch.advantages)  # fmt: skip
        found = zip(*(column.tolist() for column in columns), strict=True)
        assert [*found] == expected


def test_pack():
    check_pack(collate)


def wrong_pack_rolls(rows, **options):
    """The field's fault: the targets are the whole sequence rolled by one."""
    batch = collate.pack(rows, **options)
    everything = torch.arange(len(batch.input_ids))
    return collate.replace(batch, predictors=everything[:-1], targets=batch.input_ids[1:])


def test_rolling_over_a_boundary_is_caught():
    fails(strictly, check_pack, SimpleNamespace(pack=wrong_pack_rolls))


def check_bins(module):
    for seed in range(20):
        rows = flat(trajectories(seed))
        groups = module.bins(rows, 30)
        assert flat(groups) == rows
        sizes = [sum(len(row.tokens) for row in group) for group in groups]
        assert max(sizes) <= 30
        for size, after in zip(sizes, groups[1:], strict=False):
            assert size + len(after[0].tokens) > 30
    refuses(ValueError, r"`rows\[0\]` has \d+ tokens, more than", module.bins, rows, 2)


def test_bins():
    check_bins(collate)


# One denominator


def check_one_loss(module):
    """The definition, the gradient and every layout agree, for either weighting."""
    for seed, by in itertools.product(range(3), ("token", "trajectory")):
        groups = trajectories(seed)
        expected = by_hand(groups, by)
        rows = flat(module.weigh(groups, by))
        assert math.isclose(sum(sum(row.weights) for row in rows), 1.0)
        rng = random.Random(seed)
        shuffled = rng.sample(rows, len(rows))
        cuts = sorted(rng.sample(range(1, len(rows)), min(2, len(rows) - 1)))
        micro = [rows[a:z] for a, z in itertools.pairwise((0, *cuts, len(rows)))]

        def over(parts, function=padded_loss, **options):
            return lambda weights: sum(function(weights, rows, module, **options) for rows in parts)

        ways = {
            "right": over([rows]),
            "left": over([rows], side="left"),
            "wider": over([rows], width=40, pad_id=3),
            "more rows": over([rows], count=len(rows) + 5),
            "shuffled": over([shuffled]),
            "packed": over([rows], packed_loss),
            "bins": over(module.bins(rows, 40), packed_loss),
            "micro-batches": over(micro),
        }
        first = None
        for name, way in ways.items():
            table = model()
            value = way(table)
            value.backward()
            assert math.isclose(value.item(), expected, rel_tol=1e-12), (name, by, seed)
            first = table.grad if first is None else first
            assert torch.allclose(table.grad, first, rtol=1e-12, atol=1e-14), (name, by, seed)


def test_one_loss():
    check_one_loss(collate)


def wrong_mean_of_micro_batch_means(table, micro):
    parts = [flat(collate.weigh([part], "token")) for part in micro]
    return sum(padded_loss(table, part) for part in parts) / len(micro)


def wrong_mean_over_rows(table, groups):
    """Each row counts alike, so that a trajectory counts once for each of its splits."""
    return padded_loss(table, flat(collate.weigh([[row] for row in flat(groups)], "trajectory")))


def wrong_denominator_counts_the_grid(table, groups):
    batch = pad(flat(groups), pad_id=0)
    return padded_loss(table, flat(groups)) / batch.mask.numel()


def test_wrong_denominators_give_other_losses():
    """And those differ by how the batch was laid out, which nothing may depend on."""
    table = model().detach()
    for seed in range(6):
        groups = trajectories(seed)
        right = by_hand(groups, "token")
        for wrong in (
            wrong_mean_of_micro_batch_means(table, groups),
            wrong_mean_of_micro_batch_means(table, [[row] for row in flat(groups)]),
            wrong_denominator_counts_the_grid(table, groups),
        ):
            assert not math.isclose(wrong.item(), right, rel_tol=1e-6)
        if any(len(rows) > 1 for rows in groups):
            by_rows = wrong_mean_over_rows(table, groups).item()
            assert not math.isclose(by_rows, by_hand(groups, "trajectory"), rel_tol=1e-6)


def check_processes(module):
    """The average of the gradients of two processes is the gradient of one on all rows."""
    for seed in range(4):
        rows = flat(module.weigh(trajectories(seed), "token"))
        whole = model()
        padded_loss(whole, rows, module).backward()
        gradients = []
        for rank in range(2):
            table = model()
            mine = rows[rank::2]
            batch = module.pad(mine, pad_id=0, dtype=torch.float64)
            log_probs = table[batch.input_ids[:, :-1]].log_softmax(-1)
            log_probs = log_probs.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
            module.total(loss(log_probs, batch), batch, processes=2).backward()
            gradients.append(table.grad)
        assert torch.allclose(sum(gradients) / 2, whole.grad, rtol=1e-12, atol=1e-14)


def test_processes():
    check_processes(collate)


def check_nothing_under_the_mask_is_read(module):
    """Values and gradients are those of the trained targets, whatever stands elsewhere."""
    for seed in range(6):
        rows = flat(module.weigh(trajectories(seed), "token"))
        batch = module.pad(rows, pad_id=0, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(batch.mask.shape, generator=generator, dtype=torch.float64)
        results = []
        for fill in (0.0, 1e6, math.nan, math.inf):
            leaf = values.masked_fill(~batch.mask, fill).requires_grad_()
            result = module.total(leaf, batch)
            result.backward()
            results.append((result.item(), leaf.grad))
        first, gradient = results[0]
        assert torch.equal(gradient, batch.weights)
        assert all(r == first and torch.equal(g, gradient) for r, g in results)


def test_nothing_under_the_mask_is_read():
    check_nothing_under_the_mask_is_read(collate)


def wrong_total_multiplies_with_the_mask(values, batch):
    return (values * batch.mask * batch.weights).sum()


def test_multiplying_with_the_mask_leaks():
    wrong = {**vars(collate), "total": wrong_total_multiplies_with_the_mask}
    fails(check_nothing_under_the_mask_is_read, SimpleNamespace(**wrong))


def check_weigh(module):
    """By hand: two trajectories of 3 and 1 trained tokens, the first in two rows."""
    long = build([Call(prompt_ids=[0], output_ids=[8, 1]),
                  Call(prompt_ids=[0, 1, 4], output_ids=[2])]).rows  # fmt: skip
    short = build([Call(prompt_ids=[0], output_ids=[3])]).rows
    quarter, sixth = 1 / 4, 1 / 6
    assert [[row.weights for row in rows] for rows in module.weigh([long, short], "token")] == [
        [(quarter, quarter), (0.0, 0.0, quarter)], [(quarter,)],
    ]  # fmt: skip
    found = [[row.weights for row in rows] for rows in module.weigh([long, short], "trajectory")]
    expected = [[(sixth, sixth), (0.0, 0.0, sixth)], [(0.5,)]]
    assert np.allclose(np.concatenate(flat(found)), np.concatenate(flat(expected)))
    # A trajectory that trains nothing takes no share.
    assert module.weigh([short, ()], "trajectory")[0][0].weights == (1.0,)
    # Weighing again changes nothing: what counts is relative.
    again = module.weigh(module.weigh([long, short], "token"), "token")
    assert again == module.weigh([long, short], "token")


def test_weigh():
    check_weigh(collate)
    refuses(ValueError, '`by` must be "token" or "trajectory", got \'row\'', collate.weigh,
            [[]], "row")  # fmt: skip
    refuses(ValueError, "`trajectories` train nothing", collate.weigh, [(), ()], "token")


# Refusals


def check_missing(module):
    """What is missing raises when it is asked for, and only then."""
    calls = [Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-0.5, None])]
    [row] = build(calls).rows
    for batch, index in (
        (module.pad([row], pad_id=0, side="left", width=4), (0, 2)),
        (module.pack([row]), (1,)),
    ):
        text = r"`old_log_probs`: 1 trained targets have no log-probability, the first at "
        try:
            _ = batch.old_log_probs
        except ValueError as error:
            refuses(ValueError, text + "\\" + str(index)[:-1], _raise, error)
        else:
            raise AssertionError("a missing log-probability was given out")
        try:
            _ = batch.advantages
        except ValueError as error:
            refuses(ValueError, "`advantages`: 2 trained targets have no advantage", _raise, error)
        else:
            raise AssertionError("a missing advantage was given out")
        assert module.total(torch.ones(batch.mask.shape), batch).item() == 2.0


def _raise(error):
    raise error


def test_missing():
    check_missing(collate)


def check_refusals(module):
    rows = flat(trajectories(0))
    longest = max(len(row.tokens) for row in rows)
    refuses(ValueError, "`rows` must hold at least one row", module.pad, [], pad_id=0)
    refuses(ValueError, f"`width` is 3, but a row has {longest} tokens", module.pad, rows,
            pad_id=0, width=3)  # fmt: skip
    refuses(ValueError, "`count` is 1, but there are", module.pad, rows, pad_id=0, count=1)
    refuses(ValueError, '`side` must be "left" or "right", got \'both\'', module.pad, rows,
            pad_id=0, side="both")  # fmt: skip
    nothing = collate.replace(rows[0], mask=(0,) * len(rows[0].mask))
    for function in (lambda r: module.pad(r, pad_id=0), module.pack):
        refuses(ValueError, "`rows` train nothing", function, [nothing])
    batch = module.pad(rows, pad_id=0)
    refuses(ValueError, "`values` has shape", module.total, torch.zeros(2, 3), batch)
    refuses(TypeError, "floating", module.total, batch.targets, batch)
    refuses(ValueError, "`processes` must be positive, got 0", module.total,
            torch.zeros(batch.mask.shape), batch, processes=0)  # fmt: skip
    refuses(ValueError, "`values` has shape", module.unpad, torch.zeros(2, 3), batch)


def test_refusals():
    check_refusals(collate)


def check_settings(module):
    """Scores of another distribution than the one sampled from are refused, where it is known."""

    def row(*settings):
        return build([Call(prompt_ids=[0], output_ids=[1], sampling=Sampling(*settings))]).rows

    trainer = Sampling(1.0, 1.0, "raw")
    for module_call in (lambda r, s: module.pad(r, pad_id=0, scored_as=s),
                        lambda r, s: module.pack(r, scored_as=s)):  # fmt: skip
        module_call(row(1.0, 1.0, "raw"), trainer)
        module_call(row(), trainer)
        module_call(row(0.6, 0.9, "processed"), None)
        module_call(row(0.6, 1.0, "raw"), Sampling(log_probs="raw"))
        for known, name in [((0.6, 1.0, "raw"), "temperature=0.6"), ((1.0, 0.9, None), "top_p"),
                               ((1.0, 1.0, "processed"), "log_probs='processed'")]:  # fmt: skip
            refuses(ValueError, f"call 0 was sampled with {name}", module_call, row(*known),
                    trainer)  # fmt: skip


def test_settings():
    check_settings(collate)


MUTANTS = [
    ('start = size - len(values) if side == "left" else 0', "start = 0", check_pad),
    ("size: int = width - 1", "size: int = width", check_pad),
    ("attention_mask = (column >= start) &", "attention_mask = (input_ids != pad_id) &", check_pad),
    ("(column - start).clamp(min=0) * attention_mask", "column * attention_mask", check_pad),
    ("[0] * (count - len(rows))", "[1] * (count - len(rows))", check_pad),
    ("targets=input_ids[:, 1:]", "targets=input_ids[:, :-1]", check_pad),
    ("predictors=(~last).nonzero().squeeze(1)", "predictors=torch.arange(total_length)[:-1]",
     check_pack),
    ("last[ends - 1] = True", "last[ends - lengths] = True", check_pack),
    ("- starts,", "- 0 * starts,", check_pack),
    ("torch.zeros(1, dtype=torch.int64), ends]", "ends]", check_pack),
    ("room -= size", "room -= 0", check_bins),
    ("room = max_tokens", "room = size", check_bins),
    ("if size > max_tokens:", "if False:", check_bins),
    ("s * trained for s in sums", "s * len(sums) for s in sums", check_weigh),
    ("s * trained for s in sums", "sum(sums) for s in sums", check_weigh),
    ('sum(sums) if by == "token" else', "", check_weigh),
    ("sum(w for row in rows for w, m in", "sum(m for row in rows for w, m in", check_weigh),
    ("values.masked_fill(~batch.mask, 0.0) * batch.weights", "values * batch.weights",
     check_nothing_under_the_mask_is_read),
    ("values.masked_fill(~batch.mask, 0.0) * batch.weights", "values.masked_fill(~batch.mask, 0.0)",
     check_one_loss),
    (".sum() * processes", ".sum()", check_processes),
    (".sum() * processes", ".mean() * processes", check_one_loss),
    ('float("nan") if value is None else value', "0.0 if value is None else value",
     check_missing),
    ("batch.attention_mask[:, 1:] * batch.attention_mask[:, :-1]", "batch.attention_mask[:, 1:]",
     check_pad),
    ("if not any(row.trained for row in rows):", "if False:", check_refusals),
    ("mine is not None and theirs is not None and mine != theirs", "mine != theirs",
     check_settings),
    ("mine is not None and theirs is not None and mine != theirs", "False", check_settings),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.collate", old, new, lambda mutant: strictly(check, mutant))


@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(min_size=8, max_size=64), st.randoms(use_true_random=False))
def test_layout_changes_nothing(program, chance):
    """Micro-batches, padding, packing and what stands under the mask, over random call graphs.

    Every target has a value of its own, a small integer, so that sums are exact.
    """
    rows = [row for half in (program[::2], program[1::2]) for row in build(Graph(half).calls).rows]
    if not rows:
        return
    values = [[chance.randint(-9, 9) for _ in row.mask] for row in rows]
    pairs = zip(values, (row.mask for row in rows), strict=True)
    expected = sum(v for own, mask in pairs for v, m in zip(own, mask, strict=True) if m)
    order = list(range(len(rows)))
    chance.shuffle(order)
    cut = chance.randint(0, len(rows))
    side = chance.choice(("left", "right"))
    found = 0.0
    for part in filter(None, (order[:cut], order[cut:])):
        mine = [rows[i] for i in part]
        longest = max(len(row.tokens) for row in mine)
        batch = pad(mine, pad_id=2, side=side, width=longest + chance.randint(0, 3),
                    count=len(mine) + chance.randint(0, 2))  # fmt: skip
        grid = torch.full(batch.mask.shape, chance.choice((0.0, 1e9, math.nan)))
        real = (batch.attention_mask[:, 1:] * batch.attention_mask[:, :-1]).bool()
        for b, i in enumerate(part):
            grid[b, real[b]] = torch.tensor(values[i], dtype=torch.float32)
        hidden = torch.where(batch.mask, grid, chance.choice((0.0, -7.0, math.inf)))
        assert total(grid, batch).item() == total(hidden, batch).item()
        found += total(grid, batch).item()
        assert [v.tolist() for v in unpad(grid, batch)][: len(part)] == [values[i] for i in part]
    assert found == expected
    joined = torch.tensor([float(v) for own in values for v in own])
    assert total(joined, pack(rows)).item() == expected
