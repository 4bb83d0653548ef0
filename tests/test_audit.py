"""The audit of rows and of batches: an injector plants each fault, and each is named."""

import itertools
import math
import random
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mathrl import _loss_faults, audit
from mathrl.audit import audit_batch
from mathrl.faults import KINDS, Fault
from mathrl.trajectory import Call, build
from tests.mutants import mutated
from tests.oracles import refuses

# The table


def six_tokens(**changed):
    calls = [
        Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-0.2, -0.4]),
        Call(prompt_ids=[0, 1, 2, 3, 4], output_ids=[5], **changed),
    ]
    return build(calls, advantages=[1.0, -0.5]).rows[0]


NAMES = ["U", "A1", "A2", "T1", "<T2>", "B"]


def decode(ids):
    return "".join(NAMES[i] for i in ids)


def check_table(module):
    """Position, predicted token, author, log-probability, advantage, call, weight."""
    table = module.audit(six_tokens(log_probs=[-0.3]), decode=decode)
    assert table.columns == (
        "input position", "predicted token", "author", "old log-prob", "advantage", "call",
        "weight",
    )  # fmt: skip
    assert table.lines == (
        ("0 'U'", "1 'A1'", "policy", "-0.2", "1", "0", "1"),
        ("1 'A1'", "2 'A2'", "policy", "-0.4", "1", "0", "1"),
        ("2 'A2'", "3 'T1'", "context", "–", "–", "–", "0"),
        ("3 'T1'", "4 '<T2>'", "context", "–", "–", "–", "0"),
        ("4 '<T2>'", "5 'B'", "policy", "-0.3", "-0.5", "1", "1"),
    )
    assert table.trained == (True, True, False, False, True)
    missing = module.audit(six_tokens()).lines[4]
    assert missing == ("4", "5", "policy", "missing", "-0.5", "1", "1")


def test_table():
    check_table(audit)


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, *attributes))
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if data.strip():
            self.rows[-1].append(data)


def test_table_in_html_and_in_text_say_the_same():
    table = audit.audit(six_tokens(), decode=decode)
    cells = Cells()
    cells.feed(table.html())
    assert cells.rows == [[*table.columns], *([*line] for line in table.lines)]
    assert cells.tags.count(("tr", ("class", "trained"))) == 3
    assert cells.tags.count(("th", ("scope", "row"))) == 5
    assert ("T2",) not in cells.tags  # token text is no markup
    head, *lines = table.text().splitlines()
    assert [line[0] for line in lines] == ["*", "*", " ", " ", "*"]
    for line, expected in zip(lines, table.lines, strict=True):
        found = [line[head.index(name) :].lstrip() for name in table.columns]
        assert all(f.startswith(e) for f, e in zip(found, expected, strict=True))


def check_fold(module):
    first = Call(prompt_ids=[0] * 9, output_ids=[1])
    row = build([first, Call(prompt_ids=[*first.token_ids, 3, 3], output_ids=[5])]).rows[0]
    folded = module.audit(row, fold=2)
    assert folded.lines[0] == ("0 to 7", "8 tokens", "context", "–", "–", "–", "0")
    assert [line[0] for line in folded.lines] == ["0 to 7", "8", "9", "10", "11"]
    assert folded.trained == (False, True, False, False, True)
    assert len(module.audit(row).lines) == 12
    # Sampled history and context are folded apart.
    _, branch = build([Call(prompt_ids=[0], output_ids=[1, 1, 1]),
                       Call(prompt_ids=[0, 1, 1, 1, 4, 4], output_ids=[2]),
                       Call(prompt_ids=[0, 1, 1, 1, 4, 4], output_ids=[3])]).rows  # fmt: skip
    lines = module.audit(branch, fold=1).lines
    assert [line[:3] for line in lines] == [
        ("0 to 2", "3 tokens", "policy"), ("3 to 4", "2 tokens", "context"), ("5", "3", "policy"),
    ]  # fmt: skip
    assert lines[0][5] == "0"


def test_fold():
    check_fold(audit)
    refuses(ValueError, "`fold` must not be negative, got -1", audit.audit, six_tokens(), fold=-1)


# Correct batches, laid out here by hand, without `mathrl.collate`

BOS, EOS, PAD, HEADER, NEWLINE = 1, 2, 0, 3, 4


def conversation(rng, *, missing=0.0):
    """Calls with a header before each output, a stop token in it, and tool tokens between."""

    def words():
        return [rng.randrange(10, 99) for _ in range(rng.randint(3, 5))]

    calls, ids = [], [BOS, *words(), HEADER, HEADER]
    for _ in range(rng.randint(2, 3)):
        output = [*words(), EOS]
        log_probs = [rng.uniform(-4.0, -0.05) for _ in output]
        if rng.random() < missing:
            log_probs = None
        calls.append(Call(prompt_ids=ids, output_ids=output, log_probs=log_probs))
        ids = [*ids, *output, NEWLINE, *words(), HEADER, HEADER]
    if rng.random() < 0.3:  # another answer to the last prompt
        output = [*words(), EOS]
        log_probs = [rng.uniform(-4.0, -0.05) for _ in output]
        calls.append(Call(prompt_ids=calls[-1].prompt_ids, output_ids=output, log_probs=log_probs))
    return calls


def rows_of(rng, count, **options):
    """That many rows; each has ended somewhere else, and the first is the shortest."""
    rows = []
    while len(rows) < count:
        calls = conversation(rng, **options)
        values = [[rng.uniform(0.5, 2.0) for _ in call.output_ids] for call in calls]
        rows += build(calls, advantages=values).rows
    return sorted(rows, key=lambda row: len(row.tokens))


def batch_of(rng, rows, *, pad_id=PAD, left=None):
    """Tensors of one width, and of each row the column it starts in."""
    left = rng.random() < 0.5 if left is None else left
    width = max(len(row.tokens) for row in rows) + rng.randint(2, 4)
    shape = (len(rows), width)
    b = SimpleNamespace(
        ids=np.full(shape, pad_id), attention=np.zeros(shape, int),
        mask=np.zeros((len(rows), width - 1), int), old=np.zeros((len(rows), width - 1)),
        advantages=np.zeros((len(rows), width - 1)), rows=rows, width=width, rng=rng,
        starts=[], pad_id=pad_id, bos_id=BOS, extra={},
    )  # fmt: skip
    for i, row in enumerate(rows):
        n = len(row.tokens)
        s = width - n if left else 0
        b.starts.append(s)
        b.ids[i, s : s + n] = row.tokens
        b.attention[i, s : s + n] = 1
        at = slice(s, s + n - 1)
        b.mask[i, at] = row.mask
        b.old[i, at] = np.nan_to_num(np.array(row.old_log_probs, float)) * row.mask
        b.advantages[i, at] = np.nan_to_num(np.array(row.advantages, float))
        lacking = np.array([p is None for p in row.old_log_probs]) & (np.array(row.mask) == 1)
        b.old[i, at][lacking] = np.nan
    # The trainer's log-probabilities exist everywhere.
    noise = np.array([[rng.uniform(-5e-4, 5e-4) for _ in r] for r in b.old])
    guess = np.array([[rng.uniform(-4.0, -0.1) for _ in r] for r in b.old])
    b.new = np.where((b.mask == 1) & ~np.isnan(b.old), b.old + noise, guess)
    return b


def arguments(b, rows=False, wide=False):
    """For the audit: target-space tensors, or with an entry for each token."""

    def shaped(values):
        first = np.zeros((len(values), 1), values.dtype)
        return np.concatenate([first, values], 1) if wide else values

    return dict(
        input_ids=b.ids, attention_mask=b.attention, loss_mask=shaped(b.mask),
        old_log_probs=shaped(b.old), log_probs=shaped(b.new), advantages=shaped(b.advantages),
        rows=b.rows if rows else None, pad_id=b.pad_id, bos_id=b.bos_id, **b.extra,
    )  # fmt: skip


def audited(b, rows=True, wide=False):
    return audit_batch(**arguments(b, rows, wide))


# The injector: each plants one fault and returns where, or None where that does not matter


def one(b):
    return b.rng.randrange(len(b.rows))


def outputs(b, i):
    """For each trained output of row i its targets, as columns of the batch."""
    row, found = b.rows[i], {}
    for t, (m, call) in enumerate(zip(row.mask, row.calls, strict=True)):
        if m:
            found.setdefault(call, []).append(t + b.starts[i])
    return [*found.values()]


def gaps(b, i):
    """The stretches of context between two outputs of row i."""
    parts = outputs(b, i)
    return [range(a[-1] + 1, z[0]) for a, z in itertools.pairwise(parts)]


def window(b, i):
    return slice(b.starts[i], b.starts[i] + len(b.rows[i].tokens) - 1)


def sequences(b):
    """A row with at least two outputs, or None."""
    fit = [i for i in range(len(b.rows)) if len(outputs(b, i)) > 1]
    return b.rng.choice(fit) if fit else None


def moved(values, by):
    out = np.zeros_like(values)
    if by > 0:
        out[by:] = values[:-by]
    else:
        out[:by] = values[-by:]
    return out


def replaced(b, i, tokens):
    """Row i holds other tokens; its columns are still what they were."""
    b.ids[i], b.attention[i] = b.pad_id, 0
    s = b.width - len(tokens) if b.starts[i] else 0
    b.ids[i, s : s + len(tokens)] = tokens
    b.attention[i, s : s + len(tokens)] = 1


def set_mask(b, i, columns, value):
    b.mask[i, list(columns)] = value
    return i, tuple(columns)


def lengths(b):
    extra = np.zeros((len(b.rows), b.rng.choice((2, 3))), int)
    b.mask = np.concatenate([b.mask, extra], 1)  # longer than the tokens


def not_binary(b):
    i = one(b)
    return set_mask(b, i, [outputs(b, i)[0][0]], 2)


def hole(b):
    i = one(b)
    column = b.starts[i] + 2
    b.attention[i, column] = 0
    return i, (column - 1,)


def wrong_side(b):
    b.attention[0] = b.attention[0][::-1].copy()


def hides(b):
    i = one(b)
    last = b.starts[i] + len(b.rows[i].tokens) - 1
    b.pad_id = 7
    b.attention[i, last] = 0
    return i, (last - 1,)


def covers(b):
    b.attention[one(b)] = 1


def stop_as_padding(b):
    b.ids[b.attention == 0] = EOS
    b.pad_id = EOS
    b.attention = (b.ids != EOS).astype(int)


def first_token(b):
    b.mask = np.concatenate([np.ones((len(b.rows), 1), int), b.mask], 1)
    return "right"


def padding(b):
    i = one(b)
    outside = sorted({*range(b.width - 1)} - {*range(window(b, i).start, window(b, i).stop)})
    return set_mask(b, i, [b.rng.choice(outside)], 1)


def labels_ahead(b):
    labels = np.where(np.concatenate([b.mask[:, :1] * 0, b.mask], 1) == 1, b.ids, -100)
    b.extra["labels"] = np.concatenate([labels[:, 1:], labels[:, :1] * 0 - 100], 1)


def labels_other(b):
    labels = np.where(b.mask == 1, b.ids[:, 1:], -100)
    i = one(b)
    t = outputs(b, i)[0][1]
    labels[i, t] += 1
    b.extra["labels"] = labels
    return i, (t,)


def rows_swapped(b):
    i, j = 0, len(b.rows) - 1
    b.rows[i], b.rows[j] = b.rows[j], b.rows[i]


def second_start(b):
    i = one(b)
    replaced(b, i, [BOS, *b.rows[i].tokens])
    if not b.starts[i]:
        for values in (b.mask, b.old, b.new, b.advantages):
            values[i] = moved(values[i], 1)


def separator_dropped(b):
    i = one(b)
    tokens = [*b.rows[i].tokens]
    tokens.remove(NEWLINE)
    replaced(b, i, tokens)


def inserted(b):
    i = one(b)
    at = b.rows[i].tokens.index(EOS)
    replaced(b, i, [*b.rows[i].tokens[:at], 99, *b.rows[i].tokens[at:]])


def retokenised(b):
    i = one(b)
    at = b.rows[i].tokens.index(EOS)
    replaced(b, i, [*b.rows[i].tokens[: at - 2], 99, *b.rows[i].tokens[at:]])


def nothing(b):
    b.mask[:] = 0


def row_zero(b):
    i = one(b)
    return set_mask(b, i, [t for part in outputs(b, i) for t in part], 0)


def shift_mask(by):
    def plant(b):
        cut = b.rng.random() < 0.5  # what leaves the row is lost
        # Of a single output that ends its row, that may leave one wrong target and no sign of more.
        several = [i for i in range(len(b.rows)) if len(outputs(b, i)) > 1]
        for i in several:
            b.mask[i] = moved(b.mask[i], by)
            if cut:
                b.mask[i, : window(b, i).start] = 0
                b.mask[i, window(b, i).stop :] = 0
        return None if several else "none"

    return plant


def attention_as_mask(b):
    i = one(b)
    b.mask[i] = b.attention[i, 1:] if b.rng.random() < 0.5 else b.attention[i, :-1]


def inverted(b):
    i = one(b)
    b.mask[i, window(b, i)] ^= 1


def history(b):
    for i, row in enumerate(b.rows):
        pairs = enumerate(zip(row.mask, row.calls, strict=True), b.starts[i])
        again = [t for t, (m, call) in pairs if not m and call is not None]
        if again:
            return set_mask(b, i, again, 1)
    return "none"


def prompt_start(b, i):
    """The first output of row i that may be its history, and so what ends its prompt."""
    return next(t for t, call in enumerate(b.rows[i].calls) if call is not None)


def prompt(b):
    i = one(b)
    stop = prompt_start(b, i)
    if b.rng.random() < 0.5:
        stop -= 2
    return set_mask(b, i, range(b.starts[i], b.starts[i] + stop), 1)


def tool(b):
    if (i := sequences(b)) is None:
        return "none"
    gap = b.rng.choice(gaps(b, i))
    return set_mask(b, i, gap if b.rng.random() < 0.5 else gap[1:-2], 1)


def header(b):
    i = one(b)
    stop = outputs(b, i)[0][0]
    return set_mask(b, i, range(stop - 2, stop), 1)


def past_output(b):
    if (i := sequences(b)) is None:
        return "none"
    return set_mask(b, i, [b.rng.choice(gaps(b, i))[0]], 1)


def left_out(choose):
    def plant(b):
        i = one(b)
        return set_mask(b, i, choose(b.rng.choice(outputs(b, i))), 0)

    return plant


def call_left_out(b):
    if (i := sequences(b)) is None:
        return "none"
    return set_mask(b, i, b.rng.choice(outputs(b, i)), 0)


def not_finite(b):
    i = one(b)
    t = outputs(b, i)[0][1]
    name, value = b.rng.choice([("old", math.nan), ("old", -math.inf), ("advantages", math.inf),
                                ("new", math.nan)])  # fmt: skip
    getattr(b, name)[i, t] = value


def filler(b):
    i = one(b)
    part = b.rng.choice(outputs(b, i))
    b.old[i, part] = 0.0
    return i, tuple(part)


def lacking(b):
    """A batch of which some calls came without log-probabilities."""
    made = batch_of(b.rng, rows_of(b.rng, 3, missing=0.8), left=bool(b.starts[0]))
    vars(b).update(vars(made))
    for i, row in enumerate(b.rows):
        pairs = enumerate(zip(row.mask, row.old_log_probs, strict=True), b.starts[i])
        at = [t for t, (m, log_prob) in pairs if m and log_prob is None]
        if at:
            return i, at
    return None


def filler_for_nothing(b):
    if (found := lacking(b)) is None:
        return "none"
    b.old[found] = 0.0
    return found[0], tuple(found[1])


def invented(b):
    if (found := lacking(b)) is None:
        return "none"
    b.old[found] = b.new[found] - 0.5
    return found[0], tuple(found[1])


def shift_values(name):
    def plant(b):
        by = b.rng.choice((1, -1))
        for i in range(len(b.rows)):
            values = getattr(b, name)[i]
            values[:] = moved(values, by)
            if b.rng.random() < 0.5:  # what left the row is lost
                values[: window(b, i).start] = 0.0
                values[window(b, i).stop :] = 0.0

    return plant


def other_side(b):
    row = b.old[0]
    n = window(b, 0).stop - window(b, 0).start
    values = row[window(b, 0)].copy()
    row[:] = 0.0
    row[(slice(0, n) if b.starts[0] else slice(len(row) - n, None))] = values


def without_gaps(b):
    if (i := sequences(b)) is None:
        return "none"
    at = [t for part in outputs(b, i) for t in part]
    values = b.old[i, at]
    b.old[i] = 0.0
    start = b.rng.choice((at[0], b.starts[i], 0, b.width - 1 - len(at)))
    b.old[i, start : start + len(at)] = values


def from_another_row(name):
    def plant(b):
        getattr(b, name)[0] = getattr(b, name)[-1]

    return plant


def transformed(name, function):
    def plant(b):
        values = getattr(b, name)
        values[b.mask == 1] = function(values[b.mask == 1])

    return plant


def one_differs(name):
    def plant(b):
        i = one(b)
        t = outputs(b, i)[-1][0]
        getattr(b, name)[i, t] -= 0.37
        return i, (t,)

    return plant


def crossing(b):
    """Rows laid end to end, the first target of a row predicted by the last token of another."""
    rows = b.rows
    made = packed(b.rng, rows)
    vars(b).update(vars(made))
    at = b.rng.choice(np.cumsum([len(row.tokens) for row in rows])[:-1]) - 1
    b.mask[0, at] = 1
    return 0, (int(at),)


def packed(rng, rows):
    tokens = [i for row in rows for i in row.tokens]
    b = batch_of(rng, rows[:1])
    b.ids, b.attention = np.array([tokens]), np.ones((1, len(tokens)), int)
    b.rows, b.width, b.starts = [rows], len(tokens), [0]

    def joined(name):
        columns = [np.nan_to_num(np.array(getattr(row, name), float)) for row in rows]
        return np.concatenate([[0.0, *column] for column in columns])[None, 1:]

    b.mask, b.old, b.advantages = map(joined, ("mask", "old_log_probs", "advantages"))
    b.mask = b.mask.astype(int)
    b.new = np.where(b.mask == 1, b.old, -1.0)
    return b


PLANTS = {
    "lengths differ": [lengths],
    "mask not binary": [not_binary],
    "hole in the attention mask": [hole],
    "attention mask on the wrong side": [wrong_side],
    "attention mask hides tokens": [hides],
    "attention mask covers padding": [covers],
    "stop token taken for padding": [stop_as_padding],
    "first token trained": [first_token],
    "padding trained": [padding],
    "target crosses a boundary": [crossing],
    "labels shifted twice": [labels_ahead],
    "labels differ": [labels_other],
    "rows in another order": [rows_swapped],
    "second start token": [second_start],
    "tokens dropped": [separator_dropped],
    "tokens inserted": [inserted],
    "ids differ": [retokenised],
    "nothing trained": [nothing],
    "row not trained": [row_zero],
    "mask one late": [shift_mask(1)],
    "mask one early": [shift_mask(-1)],
    "attention mask used as loss mask": [attention_as_mask],
    "mask inverted": [inverted],
    "history trained twice": [history],
    "prompt trained": [prompt],
    "tool tokens trained": [tool],
    "header trained": [header],
    "mask runs past an output": [past_output],
    "stop token not trained": [left_out(lambda part: part[-1:])],
    "first sampled token not trained": [left_out(lambda part: part[:1])],
    "call not trained": [call_left_out],
    "sampled tokens not trained": [left_out(lambda part: part[1:-1])],
    "not finite": [not_finite],
    "filler log-prob": [filler, filler_for_nothing],
    "invented log-prob": [invented],
    "old log-probs off by one": [shift_values("old")],
    "old log-probs on the wrong side": [other_side],
    "old log-probs without gaps": [without_gaps],
    "old log-probs of another row": [from_another_row("old")],
    "old log-probs negated": [transformed("old", lambda x: -x)],
    "probabilities, not log-probs": [transformed("old", np.exp)],
    "another base of logarithm": [transformed("old", lambda x: x / math.log(2)),
                                  transformed("old", lambda x: x / math.log(10))],
    "old log-probs off by a constant": [transformed("old", lambda x: x - math.log(0.9))],
    "old log-probs differ": [one_differs("old")],
    "log-probs off by one": [shift_values("new")],
    "ratio not 1": [one_differs("new")],
    "ratio off by a constant": [transformed("new", lambda x: x + math.log(0.9))],
    "advantages off by one": [shift_values("advantages")],
    "advantages of another row": [from_another_row("advantages")],
    "advantages negated": [transformed("advantages", lambda x: -x)],
    "advantages differ": [one_differs("advantages")],
}  # fmt: skip


def planted(kind, seed):
    """A correct batch with one fault of this kind, and where it is; None if it has no place."""
    rng = random.Random(f"{kind} {seed}")
    plant = PLANTS[kind][seed % len(PLANTS[kind])]
    b = batch_of(rng, rows_of(rng, 3), left=False if plant is first_token else None)
    where = plant(b)
    return None if where == "none" else (b, where if isinstance(where, tuple) else None)


def check_kind(kind, seeds=20, run=audited):
    """Exactly this fault is named, at exactly its place, in every batch that has it."""
    tried = 0
    for seed in range(seeds):
        if (made := planted(kind, seed)) is None:
            continue
        tried += 1
        b, where = made
        found = run(b, wide=seed % 3 == 0 and kind not in ("lengths differ", "first token trained"))
        assert {fault.kind for fault in found} == {kind}, (kind, seed, [str(f) for f in found])
        if where is not None:
            assert [(fault.row, fault.targets) for fault in found] == [where], (kind, seed)
    assert tried >= seeds // 4


@pytest.mark.parametrize("kind", PLANTS)
def test_planted_fault_is_named(kind):
    check_kind(kind)


# The loss


def per_token(t):
    return -torch.exp(t["log_probs"] - t["old_log_probs"]) * t["advantages"]


def token_mean(t):
    return (per_token(t) * t["mask"]).sum() / t["mask"].sum()


def summed(parts):
    """Micro-batches of one step, each divided by the count of the step."""
    count = sum(part["mask"].sum() for part in parts)
    return sum((per_token(part) * part["mask"]).sum() for part in parts) / count


def wrong_mask_forgotten(t):
    return per_token(t).sum() / t["mask"].sum()


def wrong_advantages_whitened_over_everything(t):
    advantages = t["advantages"] - t["advantages"].mean()
    return token_mean({**t, "advantages": advantages})


def wrong_clip_hides_the_leak(t):
    return (per_token(t).clamp(-0.2, 0.2) * t["mask"].clamp(min=0.1)).sum() / t["mask"].sum()


def wrong_context_counted(t):
    return (per_token(t) * t["mask"]).sum() / t["attention_mask"].sum()


def wrong_padding_counted(t):
    return (per_token(t) * t["mask"]).mean()


def wrong_padding_rows_counted(t):
    rows = (per_token(t) * t["mask"]).sum(1) / t["mask"].sum(1).clamp(min=1)
    return rows.mean()


def wrong_mean_of_means(parts):
    return sum(token_mean(part) for part in parts) / len(parts)


def wrong_sum_of_means(parts):
    return sum(token_mean(part) for part in parts)


LOSSES = {
    "masked values leak": [(wrong_mask_forgotten, None), (wrong_clip_hides_the_leak, None),
                           (wrong_advantages_whitened_over_everything, None)],
    "denominator counts context": [(wrong_context_counted, None)],
    "denominator counts padding": [(wrong_padding_counted, None)],
    "denominator counts padding rows": [(wrong_padding_rows_counted, None)],
    "micro-batches averaged": [(token_mean, wrong_mean_of_means), (token_mean, wrong_sum_of_means)],
}  # fmt: skip


def check_losses(module):
    """The right loss raises no alarm; each wrong one is named."""
    for seed in range(5):
        rng = random.Random(seed)
        b = batch_of(rng, rows_of(rng, 3))
        tensors = {"log_probs": b.new, "old_log_probs": b.old, "advantages": b.advantages,
                   "mask": b.mask, "attention_mask": b.attention[:, 1:]}  # fmt: skip
        tensors = {name: torch.tensor(value).double() for name, value in tensors.items()}
        assert module.loss_faults(token_mean, tensors, summed) == []
        for kind, wrongs in LOSSES.items():
            for loss_fn, accumulate in wrongs:
                found = module.loss_faults(loss_fn, tensors, accumulate)
                named = {fault.kind for fault in found}
                # Whitening also changes with the number of zeros that padding brings.
                extra = {"denominator counts padding"} if "whitened" in loss_fn.__name__ else set()
                assert named == {kind} | extra, (loss_fn.__name__, seed)


def test_losses():
    check_losses(_loss_faults)


def test_batch_with_its_loss():
    rng = random.Random(0)
    b = batch_of(rng, rows_of(rng, 3))
    b.extra = {"loss_fn": token_mean, "accumulate": summed}
    assert audited(b) == []
    b.extra = {"loss_fn": wrong_context_counted}
    assert audited(b) == [Fault("denominator counts context")]
    assert audited(b, wide=True) == [Fault("denominator counts context")]


def test_every_kind_is_planted():
    assert {*PLANTS, *LOSSES} == {*KINDS}
    assert len(KINDS) >= 20


def test_silent_on_correct_batches():
    """10,000 batches that are right raise no alarm: with rows and without, padded and packed."""
    for seed in range(10_000):
        rng = random.Random(seed)
        rows = rows_of(rng, rng.randint(1, 2), missing=0.2 if seed % 2 else 0.0)
        pad_id = rng.choice((PAD, EOS))
        b = packed(rng, rows) if seed % 8 == 2 else batch_of(rng, rows, pad_id=pad_id)
        if seed % 4 == 1:
            b.extra["labels"] = np.where(b.mask == 1, b.ids[:, 1:], -100)
        found = audited(b, rows=seed % 5 != 0, wide=seed % 3 == 0)
        assert found == [], (seed, [str(fault) for fault in found])


# Without the rows


ALONE = {
    "nothing trained": nothing,
    "padding trained": padding,
    "hole in the attention mask": hole,
    "second start token": second_start,
    "labels shifted twice": labels_ahead,
    "labels differ": labels_other,
    "filler log-prob": lambda b: b.old.fill(0.0),
    "old log-probs negated": transformed("old", lambda x: -x),
    "probabilities, not log-probs": transformed("old", np.exp),
    "log-probs off by one": shift_values("new"),
    "ratio not 1": one_differs("new"),
    "ratio off by a constant": transformed("new", lambda x: x + math.log(0.9)),
    "not finite": lambda b: b.advantages.fill(math.nan),
    "stop token taken for padding": stop_as_padding,
}


def check_alone(module):
    """What contradicts itself is seen without knowing what was sampled."""
    for kind, plant in ALONE.items():
        for seed in range(5):
            rng = random.Random(f"{kind} {seed}")
            b = batch_of(rng, [r for r in rows_of(rng, 3) if r.calls[-1] is not None])
            plant(b)
            found = {fault.kind for fault in module.audit_batch(**arguments(b))}
            assert found == {kind}, (kind, seed, found)


def test_alone():
    check_alone(audit)


def check_segments(module):
    """A boundary is seen without the rows, where the segments are given."""
    rng = random.Random(0)
    rows = rows_of(rng, 3)
    b = packed(rng, rows)
    b.extra["segments"] = np.repeat(np.arange(len(rows)), [len(row.tokens) for row in rows])[None]
    assert module.audit_batch(**arguments(b)) == []
    at = len(rows[0].tokens) - 1
    b.mask[0, at] = 1
    assert module.audit_batch(**arguments(b)) == [Fault("target crosses a boundary", 0, (at,))]


def test_segments():
    check_segments(audit)


# Layouts and refusals


def check_layouts(module):
    """Entries for the last tokens, one advantage for each row, rows of padding, other types."""
    rng = random.Random(3)
    rows = [build([Call(prompt_ids=[1, 5, 6], output_ids=[7, 8, 2], log_probs=[-1.0, -2.0, -3.0])],
                  advantages=a).rows[0] for a in (0.5, -0.5)]  # fmt: skip
    b = batch_of(rng, rows, left=True)
    response = {
        "loss_mask": torch.tensor(b.mask[:, -3:]).bool(),
        "old_log_probs": torch.tensor(b.old[:, -3:], dtype=torch.bfloat16, requires_grad=True),
        "advantages": [0.5, -0.5],
    }
    ids, attention = b.ids.tolist(), b.attention.astype(bool)
    assert module.audit_batch(ids, attention, **response, rows=rows) == []
    wrong = {**response, "advantages": [0.5, 0.5]}
    [fault] = module.audit_batch(ids, attention, **wrong, rows=rows)
    assert (fault.kind, fault.row) == ("advantages negated", 1)
    wrong = {**response, "loss_mask": b.mask[:, -4:-1]}  # of a single output only this is seen
    kinds = {fault.kind for fault in module.audit_batch(ids, attention, **wrong, rows=rows)}
    assert kinds == {"first sampled token not trained"}
    ids, attention = [*ids, [0] * b.width], [*attention.tolist(), [False] * b.width]
    mask = [*b.mask.tolist(), [0] * (b.width - 1)]
    assert module.audit_batch(ids, attention, mask, rows=[*rows, None]) == []
    mask[2][3] = 1
    assert module.audit_batch(ids, attention, mask, rows=[*rows, None]) == [
        Fault("padding trained", 2, (3,))
    ]
    empty = np.zeros((3, 0), int)  # a response of no tokens at all
    assert module.audit_batch(ids, attention, empty) == [Fault("nothing trained")]


def test_layouts():
    check_layouts(audit)


def test_refusals():
    refuses(ValueError, "`rows` has 1 rows, but the batch has 2", audit_batch, [[1]] * 2,
            [[1]] * 2, [[1]] * 2, rows=[six_tokens()])  # fmt: skip
    refuses(ValueError, "`accumulate` needs `loss_fn`", audit_batch, [[1]], [[1]], [[1]],
            accumulate=summed)  # fmt: skip
    refuses(ValueError, "`kind` must be one of `KINDS`, got 'odd'", Fault, "odd")


def test_a_fault_reads_as_a_sentence():
    assert str(Fault("nothing trained")) == (
        "nothing trained: no target of the whole batch is trained"
    )
    start = "tool tokens trained, row 1, targets 2 to 3, 7: tokens between two outputs"
    assert str(Fault("tool tokens trained", 1, (2, 3, 7), "why")).startswith(start)
    many = str(Fault("tool tokens trained", 1, tuple(range(0, 40, 2))))
    assert "0, 2, 4, 6, 8, 10, 12, 14 and 12 runs more" in many


# Mutants


def with_part(name, mutant):
    """`audited` with one module of the audit, and what imports it, made again."""
    batch = mutated("mathrl._batch_faults", *KEEP) if name != "_batch_faults" else mutant
    for member, value in vars(mutant).items():
        if member in vars(batch) and not member.startswith("__"):
            setattr(batch, member, value)

    def run(b, rows=True, wide=False):
        true, audit.Batch = audit.Batch, batch.Batch
        true_shapes, audit.shape_faults = audit.shape_faults, batch.shape_faults
        try:
            return audited(b, rows, wide)
        finally:
            audit.Batch, audit.shape_faults = true, true_shapes

    return run


KEEP = ("class Batch:", "class Batch: ")  # a fresh copy of the module, as it is

MUTANTS = [
    ("_mask_faults", '(1, "mask one late"), (-1,', '(-1, "mask one late"), (1,', "mask one late"),
    ("_mask_faults", "(moved, moved & inside)", "(moved,)", "mask one late"),
    ("_mask_faults", "(attended[1:], attended[:-1], inside)", "(inside,)",
     "attention mask used as loss mask"),
    ("_mask_faults", '"prompt trained" if before', '"prompt trained" if after', "prompt trained"),
    ("_mask_faults", "range(start, start + head)", "range(start, start)",
     "mask runs past an output"),
    ("_mask_faults", "range(stop - tail, stop)", "range(stop, stop)", "header trained"),
    ("_mask_faults", "if got.all() or after:", "if True:", "header trained"),
    ("_mask_faults", "wrong[0] == start + len(got) - 1", "wrong[0] == start + len(got)",
     "stop token not trained"),
    ("_mask_faults", "elif right.any():", "elif True:", "history trained twice"),
    ("_mask_faults", "if writer == BOUNDARY:", "if False:", "target crosses a boundary"),
    ("_mask_faults", "append(truth.start + t)", "append(t)", "tool tokens trained"),
    ("_id_faults", "(ids[hidden] == pad_id).all()", "False", "stop token taken for padding"),
    ("_id_faults", "elif _has_hole(attended):", "elif True:", "attention mask hides tokens"),
    ("_id_faults", "if hidden.any() else", "if True else", "attention mask covers padding"),
    ("_id_faults", "got[::-1], want[::-1]", "got, want", "tokens dropped"),
    ("_id_faults", "return [Fault(\"rows in another order\", row)]", "pass",
     "rows in another order"),
    ("_value_faults", "if not np.isfinite(new).all():", "if False:", "not finite"),
    ("_value_faults", "or _matches(values, at[:-1] + 1, want[:-1], tolerance)", "",
     "old log-probs off by one"),
    ("_value_faults", "for places in (first, last)", "for places in (first,)",
     "old log-probs on the wrong side"),
    ("_value_faults", "for start in (at[0], 0, truth.start,", "for start in (0, truth.start,",
     "old log-probs without gaps"),
    ("_value_faults", "(got[bad] == 0.0).all()", "False", "filler log-prob"),
    ("_value_faults", "missing & (got != 0.0)", "missing & (got == 1.0)", "invented log-prob"),
    ("_value_faults", "lambda x: -x", "lambda x: x", "old log-probs negated"),
    ("_value_faults", "math.log(10)", "math.log(9)", "another base of logarithm"),
    ("_value_faults", "_is_constant(got - want, tolerance)", "False",
     "old log-probs off by a constant"),
    ("_value_faults", "_is_constant(new - old, tolerance)", "False", "ratio off by a constant"),
    ("_value_faults", "_close(got, -want, tolerance).all()", "False", "advantages negated"),
    ("_batch_faults", "return value[:, 1:]", "return value[:, :-1]", "mask inverted"),
    ("_batch_faults", "(twice and not starts_twice(truth.tokens, self.bos_id))", "False",
     "second start token"),
    ("_batch_faults", "(labels[:-1] == targets[1:])", "(labels[1:] == targets[:-1])",
     "labels shifted twice"),
    ("_batch_faults", "value.shape[1] <= ids.shape[1]", "True", "lengths differ"),
    ("_batch_faults", "if self.first[row] and attended[0] and not found:", "if False:",
     "first token trained"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "kind"), MUTANTS)
def test_every_mutant_is_caught(name, old, new, kind):
    """The fault that the line is there for is no longer named, or others are named with it."""
    check_kind(kind, seeds=40)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_kind(kind, seeds=40, run=with_part(name, mutated(f"mathrl.{name}", old, new)))
