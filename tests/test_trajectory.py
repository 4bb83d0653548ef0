"""Calls to rows: the merge, the shift, the law of conservation, and every reason for a split."""

import math
import random
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mathrl import _prefixes, evidence, splits, trajectory
from mathrl.trajectory import Call, Row, Sampling, build
from tests.call_graphs import Graph
from tests.letters import calls_of, ids, letters
from tests.mutants import assert_caught
from tests.oracles import fails, refuses

# The six tokens of the specification


def check_six_tokens(module):
    """U A₁ A₂ T₁ T₂ B: five targets, mask 1 1 0 0 1, and each value at its own target."""
    calls = calls_of("U|AB", "UABTT|C")
    [row] = module.build(calls, advantages=[0.5, 2.0]).rows
    assert letters(row) == "UABTTC"
    assert row.mask == (1, 1, 0, 0, 1)
    assert row.authors == ("policy", "policy", "context", "context", "policy")
    assert row.calls == (0, 0, None, None, 1)
    assert row.old_log_probs == (-0.1, -0.2, None, None, -0.3)
    assert row.advantages == (0.5, 0.5, None, None, 2.0)
    assert row.weights == (1.0, 1.0, 0.0, 0.0, 1.0)
    assert row.inputs == tuple(ids("UABTT"))
    assert row.targets == tuple(ids("ABTTC"))
    assert row.trained == 3


@pytest.mark.claim("9.1", "enumeration")
def test_six_tokens():
    check_six_tokens(trajectory)


def wrong_input_side_mask(calls, **_):
    """The author of the input token taken for the author of the target."""
    built = build(calls, **_)
    rows = [replace(row, mask=(0, *row.mask[:-1]), authors=("policy",) * 5, calls=(0,) * 5)
            for row in built.rows]  # fmt: skip
    return replace(built, rows=tuple(rows))


def wrong_old_log_probs_from_the_left(calls, **_):
    """The sampled log-probabilities laid from the first target on, whoever wrote it."""
    built = build(calls, **_)
    given_ = [p for call in calls for p in call.log_probs]
    rows = [replace(row, old_log_probs=(*given_, None, None)) for row in built.rows]
    return replace(built, rows=tuple(rows))


@pytest.mark.claim("9.7", "enumeration")
@pytest.mark.parametrize("wrong", [wrong_input_side_mask, wrong_old_log_probs_from_the_left])
def test_lengths_agree_and_positions_do_not(wrong):
    fails(check_six_tokens, SimpleNamespace(build=wrong))


# Merge or split


def check_exact_extension_merges(module):
    """A call continues a row if and only if its prompt extends prompt and output."""
    for texts, rows in [
        (("U|A", "UAT|B"), [("UATB", (1, 0, 1))]),
        (("U|A", "UA|B"), [("UAB", (1, 1))]),
        (("U|AE", "UAEnTS|B"), [("UAEnTSB", (1, 1, 0, 0, 0, 1))]),
        (("U|kkA", "UAT|B"), [("UkkA", (1, 1, 1)), ("UATB", (0, 0, 1))]),
        (("U|AA", "UAATT|B", "UAAS|C"),
         [("UAATTB", (1, 1, 0, 0, 1)), ("UAASC", (0, 0, 0, 1))]),
        (("U|A", "UAT|B", "UATBT|C"), [("UATBTC", (1, 0, 1, 0, 1))]),
        (("UU|A", "U|B"), [("UUA", (0, 1)), ("UB", (1,))]),
    ]:  # fmt: skip
        built = module.build(calls_of(*texts))
        assert [(letters(row), row.mask) for row in built.rows] == rows
        assert len(built.splits) == len(rows) - 1


@pytest.mark.claim("10.1", "enumeration")
def test_exact_extension_merges():
    check_exact_extension_merges(trajectory)


def check_branches_train_what_they_share_once(module):
    """A token that two branches share is a target in the first and context in the second."""
    first, second = module.build(calls_of("U|A", "UAT|B", "UAT|C"), advantages=1.0).rows
    assert (first.mask, second.mask) == ((1, 0, 1), (0, 0, 1))
    # It keeps its author and call there; only its training is elsewhere.
    assert second.authors == ("policy", "context", "policy")
    assert second.calls == (0, None, 2)
    assert second.old_log_probs == (None, None, -0.3)
    assert second.advantages == (None, None, 1.0)
    assert second.weights == (0.0, 0.0, 1.0)
    assert second.settings == {2: Sampling()}


@pytest.mark.claim("10.5", "enumeration")
def test_branches_train_what_they_share_once():
    check_branches_train_what_they_share_once(trajectory)


def wrong_every_branch_trains_its_history(calls, **_):
    """The field's fault: each branch is a row of its own, and all that was sampled is trained."""
    leaves = [build([calls[0], leaf], **_) for leaf in calls[1:]]
    return replace(leaves[0], rows=tuple(row for built in leaves for row in built.rows))


def wrong_rows_extend_whatever_came_last(calls, **_):
    """No comparison of ids: what a later prompt has more is appended to one row."""
    joined = [calls[0]]
    for call in calls[1:]:
        history = joined[-1].token_ids
        joined.append(replace(call, prompt_ids=(*history, *call.prompt_ids[len(history) :])))
    return build(joined, **_)


def test_wrong_merges_are_caught():
    wrong = SimpleNamespace(build=wrong_every_branch_trains_its_history)
    fails(check_branches_train_what_they_share_once, wrong)
    fails(check_exact_extension_merges, SimpleNamespace(build=wrong_rows_extend_whatever_came_last))


def check_authors_survive_where_the_context_is_the_same(module):
    """A prompt that stops inside an output shares sampled tokens; a copy elsewhere is context."""
    _, second = module.build(calls_of("U|AAA", "UAA|B")).rows
    assert (second.authors, second.calls) == (("policy",) * 3, (0, 0, 1))
    assert second.mask == (0, 0, 1)
    # A sampled after U k k and pasted after U is no sampled token of this history.
    _, second = module.build(calls_of("U|kkA", "UAT|B")).rows
    assert second.authors == ("context", "context", "policy")


def test_authors_survive_where_the_context_is_the_same():
    check_authors_survive_where_the_context_is_the_same(trajectory)


@pytest.mark.claim("9.5", "enumeration")
def test_author_is_who_sampled_not_a_role():
    """A few-shot answer and a prefill equal to what the policy would say are context."""
    [row] = build(calls_of("UAUBT|AB", "UAUBTABTA|C")).rows
    assert row.mask == (0, 0, 0, 0, 1, 1, 0, 0, 1)


def test_a_continuation_is_chosen_by_its_ids_not_by_its_place_in_the_list():
    """Two branches whose calls alternate are two rows, each whole."""
    built = build(calls_of("U|A", "X|B", "UAT|C", "XBT|A"))
    assert [(letters(row), row.mask) for row in built.rows] == [
        ("UATC", (1, 0, 1)), ("XBTA", (1, 0, 1)),
    ]  # fmt: skip
    assert [row.calls for row in built.rows] == [(0, None, 2), (1, None, 3)]


def test_equal_samples_are_both_trained():
    """Two calls that sampled the same ids from the same prompt are two samples."""
    built = build(calls_of("U|A", "U|A", "UAT|B", "UAT|C"))
    assert sum(row.trained for row in built.rows) == 4
    assert len(built.rows) == 2  # each of the two later calls continues one of them


# Reasons


TEXT = ["user", "he", "llo", "hello", "<end>", " tool", "\n", "think ",
        "\n\n", "<think>", "</think>", "Sum", "{", "caf", "é"]  # fmt: skip


def decode(tokens):
    return "".join(TEXT[i] for i in tokens)


R = splits
# The calls so far, the new prompt, with a decoder or not; reason, index, expected id, new id.
REASONS = {
    "retokenised": ([([0], [1, 2])], [0, 3, 5], True, (R.RETOKENISED, 1, 1, 3)),
    "retokenised without a decoder": ([([0], [1, 2])], [0, 3, 5], False, (R.REWRITE, 1, 1, 3)),
    "retokenised into what follows": ([([0], [1, 6])], [0, 1, 8, 5], True,
                                      (R.RETOKENISED, 2, 6, 8)),
    "retokenised in the context": ([([0, 1, 2, 6], [11])], [0, 3, 6, 11, 5], True,
                                   (R.RETOKENISED, 1, 1, 3)),
    "the text differs": ([([0], [1, 2])], [0, 1, 3, 5], True, (R.SEPARATOR, 2, 2, 3)),
    "reasoning at the start": ([([0], [7, 7, 3, 4])], [0, 3, 4, 5], False,
                               (R.REASONING, 1, 7, 3)),
    "reasoning in the middle": ([([0], [1, 7, 7, 2, 4])], [0, 1, 2, 4, 5], True,
                                (R.REASONING, 2, 7, 2)),
    "reasoning of two turns": ([([0], [7, 3, 4]), ([0, 7, 3, 4, 5], [7, 11, 4])],
                               [0, 3, 4, 5, 11, 4, 5], False, (R.REASONING, 1, 7, 3)),
    "reasoning that repeats itself": ([([0], [1, 7, 7, 7, 3])], [0, 7, 7, 3, 5], False,
                                      (R.REASONING, 1, 1, 7)),
    "empty reasoning block of the prompt": ([([0, 9, 8, 10], [3, 4])], [0, 3, 4, 5], True,
                                            (R.REASONING, 1, 9, 3)),
    "reasoning that the prompt opened": ([([0, 9, 8], [7, 10, 3, 4])], [0, 3, 4, 5], True,
                                         (R.REASONING, 1, 9, 3)),
    "the context changed and the next id is the stop": ([([0, 12, 13, 4], [3, 4])],
                                                        [0, 12, 4, 14], False,
                                                        (R.REWRITE, 2, 13, 4)),
    "stop token": ([([0], [1, 2, 4])], [0, 1, 2, 5], False, (R.SEPARATOR, 3, 4, 5)),
    "sampled white space": ([([0], [3, 6, 8])], [0, 3, 5, 5], True, (R.SEPARATOR, 2, 6, 5)),
    "sampled white space before the stop": ([([0], [3, 6, 4])], [0, 3, 4, 5], True,
                                            (R.SEPARATOR, 2, 6, 4)),
    "newline after the stop": ([([0], [3, 4]), ([0, 3, 4, 6, 5], [11])], [0, 3, 4, 5, 11, 5],
                               False, (R.SEPARATOR, 3, 6, 5)),
    "white space after the stop": ([([0], [3, 4]), ([0, 3, 4, 6, 8, 5], [11])],
                                   [0, 3, 4, 5, 11, 5], True, (R.SEPARATOR, 3, 6, 5)),
    "cut inside an output": ([([0], [1, 2, 11])], [0, 1, 2], False, (R.TRUNCATED, 3, 11, 14)),
    "cut inside the prompt": ([([0, 5, 5], [1])], [0, 5], False, (R.TRUNCATED, 2, 5, 14)),
    "oldest turn dropped": ([([0, 5, 12], [3]), ([0, 5, 12, 3, 5, 6], [11])],
                            [0, 5, 6, 11, 13], False, (R.TRUNCATED, 2, 12, 6)),
    "a tool result dropped": ([([0], [3]), ([0, 3, 5, 5, 12, 13], [11])],
                              [0, 3, 5, 12, 13, 11, 5], False, (R.TRUNCATED, 3, 5, 12)),
    "sampled again": ([([0], [3])], [0], False, (R.BRANCH, 1, 3, 14)),
    "sampled again later": ([([0], [3]), ([0, 3, 12], [11])], [0, 3, 12], False,
                            (R.BRANCH, 3, 11, 14)),
    "sampled again after an empty output": ([([0], []), ([0, 5], [3])], [0], False,
                                            (R.BRANCH, 1, 5, 14)),
    "another tool result": ([([0], [3]), ([0, 3, 12], [11])], [0, 3, 13], False,
                            (R.BRANCH, 2, 12, 13)),
    "summary before what was sampled": ([([0], [3]), ([0, 3, 12, 12], [11])],
                                        [0, 3, 14, 11, 5], False, (R.REWRITE, 2, 12, 14)),
    "all history in a summary": ([([0], [1, 2]), ([0, 1, 2, 5], [11])], [0, 14], False,
                                 (R.REWRITE, 1, 1, 14)),
    "edited output": ([([0], [12, 3, 11, 4])], [0, 12, 13, 5], True, (R.REWRITE, 2, 3, 13)),
    "another beginning": ([([0, 5], [3])], [14, 5], False, (R.REWRITE, 0, 0, 14)),
}  # fmt: skip


def check_reasons(module):
    for name, (earlier, prompt, decoded, expected) in REASONS.items():
        calls = [Call(prompt_ids=p, output_ids=o) for p, o in earlier]
        calls.append(Call(prompt_ids=prompt, output_ids=[14]))
        built = module.build(calls, decode=decode if decoded else None)
        [split] = built.splits
        assert (split.reason, split.index, split.expected, split.got) == expected, name
        assert split.call == len(calls) - 1, name
        texts = [None if i is None or not decoded else TEXT[i] for i in expected[2:]]
        assert [split.expected_text, split.got_text] == texts, name


@pytest.mark.claim("10.3", "enumeration")
def test_reasons():
    check_reasons(trajectory)


def check_diagnosis(module):
    """The same table against `splits.diagnose` alone, with writers counted by hand."""
    for name, (earlier, prompt, decoded, expected) in REASONS.items():
        *_, (last_prompt, last_output) = earlier
        before = [*last_prompt, *last_output]
        writers = [None] * len(before)
        for number, (p, o) in enumerate(earlier):
            writers[len(p) : len(p) + len(o)] = [number] * len(o)
        ends = [len(p) + len(o) for p, o in earlier if prompt[: len(p) + len(o)] == [*p, *o]]
        got = module.diagnose(
            before, writers, prompt, min(expected[1], len(prompt)), max(ends, default=0),
            decode if decoded else None,
        )  # fmt: skip
        assert got == expected[0], name


def test_diagnosis():
    check_diagnosis(splits)
    assert {reason for *_, (reason, *_) in REASONS.values()} == {*splits.REASONS}


def test_a_split_reads_as_a_sentence():
    calls = [Call(prompt_ids=[0], output_ids=[1, 2]), Call(prompt_ids=[0, 3], output_ids=[4])]
    [split] = build(calls, decode=decode).splits
    assert str(split) == (
        "call 1 does not extend call 0: retokenised at index 1, 1 'he' became 3 'hello'"
    )
    [split] = build(calls_of("UU|A", "U|X")).splits
    assert str(split).endswith("truncated at index 1, 0 became 14")
    [split] = build(calls_of("U|AB", "U|A")).splits
    assert str(split).endswith("branch at index 2, 2 became the end")
    [split] = build(calls_of("U|A", "U|A")).splits
    assert str(split) == "call 1 does not extend call 0: branch, no id differs"


# What is not trained


def check_untrained(module):
    calls = calls_of("U|A", "UAT|", "UATT|BC", "X|A")
    built = module.build(calls, advantages=1.0, exclude={3: "over length"})
    assert built.untrained == ((1, 0, 0, "empty output"), (3, 0, 1, "over length"))
    [row] = built.rows
    assert (letters(row), row.mask) == ("UATTBC", (1, 0, 0, 1, 1))
    # An excluded call stays in the history of a row, with its author, and is not trained.
    [row] = module.build(calls_of("U|AB", "UABT|C"), exclude={0: "parse error"}).rows
    assert (row.mask, row.authors[:2], row.calls[0]) == ((0, 0, 0, 1), ("policy",) * 2, 0)
    assert (row.old_log_probs[:2], row.settings) == ((None, None), {1: Sampling()})


def test_untrained():
    check_untrained(trajectory)


def check_cut(module):
    """What a cap takes is listed, and a row of which nothing trained is left is dropped."""
    calls = calls_of("UU|AB", "UUABT|CCC")
    for cap, tokens, mask, lost in [
        (8, "UUABTCCC", (0, 1, 1, 0, 1, 1, 1), ()),
        (7, "UUABTCC", (0, 1, 1, 0, 1, 1), ((1, 2, 3, "past max_tokens"),)),
        (5, "UUABT", (0, 1, 1, 0), ((1, 0, 3, "past max_tokens"),)),
        (3, "UUA", (0, 1), ((0, 1, 2, "past max_tokens"), (1, 0, 3, "past max_tokens"))),
    ]:
        built = module.build(calls, max_tokens=cap)
        [row] = built.rows
        assert (letters(row), row.mask, built.untrained) == (tokens, mask, lost)
        assert len(row.old_log_probs) == len(mask)
    built = module.build(calls, max_tokens=2)
    assert built.rows == ()
    assert [item.stop - item.start for item in built.untrained] == [2, 3]


def test_cut():
    check_cut(trajectory)


def check_cut_never_divides_a_run_of_placeholders(module):
    calls = calls_of("U|A", "UAPPPX|B", "UAPPPXB|C")
    kept = {3: 2, 4: 2, 5: 5, 6: 6}
    for cap, tokens in kept.items():
        [row] = module.build(calls, max_tokens=cap, placeholder_ids=ids("P")).rows
        assert len(row.tokens) == tokens
    # An image at the very start cannot be cut at all.
    assert module.build(calls_of("PPPP|A"), max_tokens=2, placeholder_ids=ids("P")).rows == ()


def test_cut_never_divides_a_run_of_placeholders():
    check_cut_never_divides_a_run_of_placeholders(trajectory)


# The law, over random call graphs


def trained_targets(rows):
    """Every trained target with the whole history that predicts it and all its values."""
    found = []
    for row in rows:
        columns = zip(
            row.mask, row.calls, row.old_log_probs, row.advantages, row.weights, strict=True
        )
        for t, (m, *values) in enumerate(columns):
            if m:
                found.append((row.tokens[: t + 1], row.tokens[t + 1], *values))
    return found


def check_law(calls, built, excluded=(), advantages=None):
    """Counted from the calls, in another way than `build` does it."""
    left = {
        (item.call, i): item.reason
        for item in built.untrained
        for i in range(item.start, item.stop)
    }
    expected = []
    for number, call in enumerate(calls):
        for i, token in enumerate(call.output_ids):
            if (number, i) not in left:
                history = (*call.prompt_ids, *call.output_ids[:i])
                log_prob = None if call.log_probs is None else call.log_probs[i]
                advantage = None if advantages is None else advantages[number]
                expected.append((history, token, number, log_prob, advantage, 1.0))
    found = trained_targets(built.rows)
    assert sorted(found, key=repr) == sorted(expected, key=repr)
    for row in built.rows:
        assert row.trained > 0
        for t, (author, call) in enumerate(zip(row.authors, row.calls, strict=True)):
            if author == "policy":  # then that call sampled this token after this history
                prompt, output = calls[call].prompt_ids, calls[call].output_ids
                k = t + 1 - len(prompt)
                assert row.tokens[: t + 2] == (*prompt, *output[: k + 1])
    if not excluded:
        assert all(call.output_ids == () for call in (calls[i.call] for i in built.untrained))


def rows_by_hand(calls):
    """How many rows there must be: each prompt compared with every open row, one by one."""
    ends = []
    for call in calls:
        prompt = call.prompt_ids
        open_ends = [end for end in ends if prompt[: len(end)] == end]
        if open_ends:
            ends.remove(max(open_ends, key=len))
        ends.append((*prompt, *call.output_ids))
    return len(ends)


@pytest.mark.claim("10.4", "enumeration")
@settings(max_examples=10_000, deadline=None, database=None)
@given(st.binary(max_size=48))
def test_conservation_over_random_call_graphs(program):
    calls = Graph(program).calls
    advantages = [float(i) for i in range(len(calls))]
    built = build(calls, advantages=advantages)
    check_law(calls, built, advantages=advantages)
    empty = len(calls) - len({c for row in built.rows for c in row.settings})
    assert empty == len(built.untrained)
    assert len(built.splits) == rows_by_hand(calls) - 1


def random_calls(seed, size=48):
    return Graph(random.Random(seed).randbytes(size)).calls


def check_law_on_some(module):
    for seed in range(300):
        calls = random_calls(seed)
        check_law(calls, module.build(calls))


def test_conservation_with_exclusions_and_a_cap():
    for seed in range(500):
        draw = random.Random(seed)
        calls = random_calls(seed)
        excluded = {i: "why" for i in range(len(calls)) if draw.random() < 0.3}
        built = build(calls, exclude=excluded, max_tokens=draw.randint(1, 9), placeholder_ids=[2])
        check_law(calls, built, excluded=True)
        assert all(len(row.tokens) <= 9 for row in built.rows)
        assert {"why"} >= {i.reason for i in built.untrained if i.call in excluded}


@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=48))
def test_building_twice_changes_nothing(program):
    calls = Graph(program).calls
    assert build(calls, advantages=1.0) == build(calls, advantages=1.0)
    assert build(Graph(program).calls, advantages=1.0) == build(calls, advantages=1.0)


@settings(max_examples=500, deadline=None, database=None)
@given(st.binary(max_size=48), st.randoms(use_true_random=False))
def test_order_of_independent_branches_changes_nothing(program, chance):
    """Any order in which a call comes after the one it extends trains the same targets."""
    calls = Graph(program).calls
    order = list(range(len(calls)))
    chance.shuffle(order)
    order.sort(key=lambda i: len(calls[i].token_ids))  # an extension is longer, or as long
    advantages = [float(i) for i in range(len(calls))]
    plain = trained_targets(build(calls, advantages=advantages).rows)
    moved = trained_targets(
        build([calls[i] for i in order], advantages=[advantages[i] for i in order]).rows
    )
    moved = [(history, token, order[call], *rest) for history, token, call, *rest in moved]
    assert sorted(plain, key=repr) == sorted(moved, key=repr)


def test_two_conversations_do_not_touch():
    """Calls of unrelated prompts, in one build or in two, give the same rows."""
    for seed in range(200):
        first, second = random_calls(seed), random_calls(seed + 1000)
        second = [
            replace(
                call,
                prompt_ids=[i + 10 for i in call.prompt_ids],
                output_ids=[i + 10 for i in call.output_ids],
            )
            for call in second
        ]
        both = build([*first, *second]).rows
        apart = build(first).rows, build(second).rows
        assert [row.tokens for row in both] == [row.tokens for part in apart for row in part]
        assert [row.mask for row in both] == [row.mask for part in apart for row in part]


# Advantages


def check_advantages(module):
    calls = calls_of("U|AB", "UABT|C", "X|B")
    for given_, expected in [
        (1.5, [[1.5, 1.5, None, 1.5], [1.5]]),
        ([1, 2, 3], [[1.0, 1.0, None, 2.0], [3.0]]),
        ([[1, 2], 3, [4]], [[1.0, 2.0, None, 3.0], [4.0]]),
        (torch.tensor([1.0, 2.0, 3.0]), [[1.0, 1.0, None, 2.0], [3.0]]),
        ([np.array([1.0, 2.0]), np.float32(3), torch.tensor([4.0])],
         [[1.0, 2.0, None, 3.0], [4.0]]),
        (None, [[None] * 4, [None]]),
    ]:  # fmt: skip
        rows = module.build(calls, advantages=given_).rows
        assert [[*row.advantages] for row in rows] == expected


def test_advantages():
    check_advantages(trajectory)


def test_build_refuses():
    calls = calls_of("U|AB", "UABT|C")
    refuses(ValueError, "at least one call", build, [])
    refuses(TypeError, r"`calls\[1\]` must be a Call, got dict", build, [calls[0], {}])
    refuses(ValueError, "`advantages` has 3 entries for 2 calls", build, calls,
            advantages=[1, 2, 3])  # fmt: skip
    refuses(ValueError, r"`advantages\[0\]` has 1 entries for 2 output ids", build, calls,
            advantages=[[1.0], 2.0])  # fmt: skip
    refuses(ValueError, "must be finite, got nan", build, calls, advantages=float("nan"))
    refuses(TypeError, r"`advantages\[1\]` must be a number, got None", build, calls,
            advantages=[1.0, [None]])  # fmt: skip
    refuses(TypeError, "`advantages` must be a sequence, got str", build, calls, advantages="12")
    refuses(ValueError, "`exclude` must name calls 0 to 1, got 2", build, calls, exclude={2: "x"})
    refuses(ValueError, "`max_tokens` must be positive, got 0", build, calls, max_tokens=0)


# Calls and rows


def test_call_keeps_what_it_was_given():
    call = Call(prompt_ids=torch.tensor([1, 2]), output_ids=np.array([3, 4]),
                log_probs=torch.tensor([-0.5, 0.0]), finish_reason="stop",
                sampling=Sampling(temperature=0.7, top_p=0.9, log_probs="raw"))  # fmt: skip
    assert (call.prompt_ids, call.output_ids, call.log_probs) == ((1, 2), (3, 4), (-0.5, 0.0))
    assert call.token_ids == (1, 2, 3, 4)
    assert not call.simulated
    with pytest.raises(FrozenInstanceError):
        call.output_ids = ()
    [row] = build([call]).rows
    assert row.settings == {0: Sampling(0.7, 0.9, "raw")}


def test_missing_log_probs_stay_missing():
    [row] = build([Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-1.0, None])]).rows
    assert row.old_log_probs == (-1.0, None)
    [row] = build([Call(prompt_ids=[0], output_ids=[1, 2])]).rows
    assert row.old_log_probs == (None, None)


def check_call_refuses(module):
    def refuses_call(kind, text, **changed):
        refuses(kind, re.escape(text), module.Call,
                **{"prompt_ids": [1], "output_ids": [2, 3], **changed})  # fmt: skip

    refuses_call(ValueError, "`prompt_ids` is empty", prompt_ids=[])
    refuses_call(TypeError, "`prompt_ids` must be a sequence, got NoneType", prompt_ids=None)
    refuses_call(TypeError, "`output_ids` must be a sequence, got str", output_ids="ab")
    refuses_call(TypeError, "must hold integers, got 2.0 at index 0", output_ids=[2.0, 3])
    refuses_call(TypeError, "must hold integers, got True at index 1", output_ids=[2, True])
    refuses_call(ValueError, "must not be negative, got -100 at index 1", output_ids=[2, -100])
    refuses_call(ValueError, "`output_ids` is empty", output_ids=[], finish_reason="stop")
    refuses_call(ValueError, "`log_probs` has 3 entries for 2 output ids", log_probs=[-1.0] * 3)
    refuses_call(ValueError, "`log_probs[1]` must not be positive, got 0.5", log_probs=[-1, 0.5])
    refuses_call(ValueError, "`log_probs[0]` must be finite", log_probs=[float("-inf"), -1])
    refuses_call(TypeError, "`log_probs[0]` must be a number", log_probs=["-1", -1])
    refuses_call(TypeError, "`log_probs[0]` must be a number, got False", log_probs=[False, -1])


def test_call_refuses():
    check_call_refuses(trajectory)


def check_capped(module):
    [call] = calls_of("U|ABC", kind=module.Call, finish_reason="stop")
    assert call.capped(3) is call
    short = call.capped(2)
    assert (short.output_ids, short.log_probs) == (tuple(ids("AB")), (-0.1, -0.2))
    assert short.finish_reason == "length"
    assert call.capped(0).output_ids == ()
    refuses(ValueError, "must not be negative, got -1", call.capped, -1)


def test_capped():
    check_capped(trajectory)
    assert replace(calls_of("U|AB")[0], log_probs=None).capped(1).log_probs is None


def check_row_refuses(module):
    [row] = build(calls_of("U|AB", "UABTT|C")).rows
    fields = {name: getattr(row, name) for name in ("tokens", *trajectory.COLUMNS)}
    for changed, text in [
        ({"mask": (*row.mask, 1)}, "`mask` has 6 entries, expected 5"),
        ({"weights": ()}, "`weights` has 0 entries, expected 5"),
        ({"old_log_probs": row.old_log_probs[1:]}, "`old_log_probs` has 4 entries, expected 5"),
        ({"mask": (1, 1, 0, 0, 2)}, "`mask` must hold only 0 and 1"),
        ({"mask": (1, 1, 1, 0, 1)}, "`mask` trains target 2, which no call sampled"),
    ]:
        refuses(ValueError, re.escape(text), module.Row, **{**fields, **changed})


def test_row_refuses():
    check_row_refuses(trajectory)
    assert isinstance(build(calls_of("U|A")).rows[0], Row)


# The tree


def check_tree(module):
    """Against sequences compared one by one."""
    for seed in range(300):
        draw = random.Random(seed)
        tree, earlier, open_ends = module.PrefixTree(), [], []
        for number in range(12):
            ids = tuple(draw.choices((0, 1), k=draw.randint(1, 7)))
            prompt = draw.randint(1, len(ids))
            agree = [
                next((i for i, (a, b) in enumerate(zip(ids, e, strict=False)) if a != b),
                     min(len(ids), len(e)))
                for e in earlier
            ]  # fmt: skip
            whole = [e for e, n in zip(earlier, agree, strict=True) if len(e) == n <= prompt]
            fits = [n for n in open_ends if len(earlier[n]) == agree[n] <= prompt]
            longest = max((len(earlier[n]) for n in fits), default=0)
            continues = max((n for n in fits if len(earlier[n]) == longest), default=None)
            most = max(agree, default=0)
            nearest = max((n for n, a in enumerate(agree) if a == most), default=None)
            expected = (continues, max(map(len, whole), default=0), nearest, most)
            assert tuple(tree.add(ids, prompt)) == expected
            if continues is not None:
                open_ends.remove(continues)
            open_ends.append(number)
            earlier.append(ids)


def test_tree():
    check_tree(_prefixes)


def test_rows_are_built_without_torch_or_numpy():
    code = (
        "import sys; from mathrl.trajectory import Call, build;"
        "build([Call(prompt_ids=[1], output_ids=[2])]);"
        "assert not {'torch', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def check_linear(seconds, tokens):
    """From 100,000 to 1,000,000 tokens the time grows by the tokens, not by their square."""
    assert math.log(seconds[2] / seconds[1]) / math.log(tokens[2] / tokens[1]) < 1.2


def test_recorded_times_are_linear():
    recorded = evidence.read_manifest(evidence.ROOT / "docs/evidence/trajectory-benchmark.json")
    assert evidence.changed_sources(recorded) == []
    parts = recorded["metrics"]["parts"]
    assert {*parts} == {"call", "build", "audit", "audit_batch"}
    for workloads in parts.values():
        for found in workloads.values():
            assert [round(math.log10(n)) for n in found["tokens"]] == [4, 5, 6]
            check_linear(found["seconds"], found["tokens"])
    fails(check_linear, [0.01, 1.0, 100.0], [10_000, 100_000, 1_000_000])


def check_drafted(module):
    """All that a row is made of, made by another draft."""
    true, trajectory.Draft = trajectory.Draft, module.Draft
    try:
        check_untrained(trajectory)
        check_cut(trajectory)
        check_cut_never_divides_a_run_of_placeholders(trajectory)
        check_branches_train_what_they_share_once(trajectory)
        assert build(calls_of("U|AB", "UAB|C")).rows[0].calls == (0, 0, 1)
        [row] = build([Call(prompt_ids=[0], output_ids=[1])], advantages=1.0).rows
        assert (row.old_log_probs, row.advantages) == ((None,), (1.0,))
        [row] = build(calls_of("U|AB", "UABT|C"), exclude={0: "why"}, advantages=1.0).rows
        assert (row.mask, row.advantages) == ((0, 0, 0, 1), (None, None, None, 1.0))
    finally:
        trajectory.Draft = true


def strictly(check, module):
    """A mutant that stumbles over another check of the package is caught too."""
    try:
        check(module)
    except (IndexError, TypeError, ValueError) as error:
        raise AssertionError(f"{check.__name__} raised {error!r}") from error


MUTANTS = [
    ("trajectory", "mask=tuple(draft.mask[1:])", "mask=tuple(draft.mask[:-1])", check_six_tokens),
    ("trajectory", "calls=tuple(draft.calls[1:])", "calls=tuple(draft.calls[:-1])",
     check_six_tokens),
    ("trajectory", "tuple(draft.old_log_probs[1:])", "tuple(draft.old_log_probs[:-1])",
     check_law_on_some),
    ("trajectory", "tuple(draft.advantages[1:])", "tuple(draft.advantages[:-1])", check_six_tokens),
    ("trajectory", "CONTEXT if call is None else POLICY", "POLICY", check_six_tokens),
    ("trajectory", "float(m) for m in draft.mask[1:]", "1.0 for m in draft.mask[1:]",
     check_six_tokens),
    ("trajectory", "if shared.continues is not None:", "if drafts:", check_exact_extension_merges),
    ("trajectory", "if shared.continues is not None:", "if False:", check_exact_extension_merges),
    ("trajectory", "draft.context(call.prompt_ids, known)", "draft.context(call.prompt_ids, [])",
     check_branches_train_what_they_share_once),
    ("trajectory", "[: min(shared.length, len(call.prompt_ids))]", "",
     check_authors_survive_where_the_context_is_the_same),
    ("trajectory", "excluded.get(number, EMPTY)", "EMPTY", check_untrained),
    ("trajectory", " or not call.output_ids\n", "\n", check_untrained),
    ("trajectory", "for draft in drafts if any(draft.mask)", "for draft in drafts", check_cut),
    ("trajectory", "[item] * count if isinstance", "[item] if isinstance", check_advantages),
    ("trajectory", "extends=shared.extends", "extends=0", check_reasons),
    ("trajectory", "if m and (author != POLICY or call is None)", "if False", check_row_refuses),
    ("trajectory", "self.output_ids[:max_output]", "self.output_ids", check_capped),
    ("trajectory", 'finish_reason="length"', "finish_reason=self.finish_reason", check_capped),
    ("trajectory", "number > 0", "number > 1", check_call_refuses),
    ("trajectory", "if len(given) != count:", "if False:", check_call_refuses),
    ("trajectory", 'if self.finish_reason == "stop" and not self.output_ids:', "if False:",
     check_call_refuses),
    ("_draft", "[int(trained)] * len(ids)", "[1] * len(ids)", check_drafted),
    ("_draft", "[None] * len(ids)", "[0.0] * len(ids)", check_drafted),
    ("_draft", "advantages if trained else", "advantages if True else", check_drafted),
    ("_draft", "known[start:]", "known", check_drafted),
    ("_draft", "call, kept[call], count", "call, 0, count", check_drafted),
    ("_draft", "length -= 1", "break", check_drafted),
    ("_draft", "self.tokens, self.calls, self.mask", "self.tokens, self.mask", check_drafted),
    ("splits", "writers[shared] != writers[shared - 1]", "False", check_diagnosis),
    ("splits", "boundary = shared == extends or", "boundary =", check_diagnosis),
    ("splits", "return REASONING if kept else REWRITE", "return REWRITE", check_diagnosis),
    ("splits", "(len(rest) == 1 and not kept)", "not kept", check_diagnosis),
    ("splits", "after_output and (len(gone) == 1", "(len(gone) == 1", check_diagnosis),
    ("splits", "REASONING if kept == len(output) else TRUNCATED", "TRUNCATED", check_diagnosis),
    ("splits", "if 1 < kept < len(output):", "if False:", check_diagnosis),
    ("splits", "if 1 < kept < len(output):", "if 0 < kept < len(output):", check_diagnosis),
    ("splits", ">= len(before) - last", "> len(before)", check_diagnosis),
    ("splits", "if extends and not (", "if not (", check_diagnosis),
    ("splits", "and not (output and _contains(new, output))", "", check_diagnosis),
    ("splits", "length = borders[length - 1]", "length = 0", check_diagnosis),
    ("_prefixes", "node.open or open_ends", "node.open", check_tree),
    ("_prefixes", "depth <= prompt and node.is_end", "node.is_end", check_tree),
    ("_prefixes", "upper.latest = child.latest", "pass", check_tree),
    ("_prefixes", "nearest, node.latest = node.latest, number\n            if",
     "nearest = node.latest\n            if", check_tree),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(module, old, new, check):
    assert_caught(f"mathrl.{module}", old, new, lambda mutant: strictly(check, mutant))
