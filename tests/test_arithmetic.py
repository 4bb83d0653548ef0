import copy
import hashlib
import json
import marshal
import random
import re
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mathrl import arithmetic
from mathrl.arithmetic import TASKS, TEST, TRAIN, digest, encode, probes, responses, target, verify
from tests.mutants import assert_caught, mutated
from tests.oracles import fails, refuses

EOS = 13


# The rule again, as a table of bytes: marshal writes exact builtin types only, so that
# True, 1.0 and 1 differ, and it refuses subclasses and everything with code of its own.

ANSWERS = {0: "00", 1: "12", 2: "24", 3: "36", 4: "48", 5: "50", 6: "62", 7: "74", 8: "86"}


def written(value):
    try:
        return marshal.dumps(value, 2)
    except ValueError:
        return None


TASK_BYTES = {
    written(kind((a, b))): a + b for kind in (list, tuple) for a in range(5) for b in range(5)
}
RESPONSE_BYTES = {
    written(kind((u, v, EOS))): f"{u}{v}"
    for kind in (list, tuple)
    for u in range(10)
    for v in range(10)
}


def restated(task, response):
    total = TASK_BYTES.get(written(task))
    if total is None:
        return "task"
    digits = RESPONSE_BYTES.get(written(response))
    if digits is None:
        return "format"
    right = ANSWERS[total]
    if digits == right:
        return "ok"
    return "final" if digits[0] == right[0] else "intermediate"


class Int(int):
    pass


class List(list):
    pass


class Tuple(tuple):
    __slots__ = ()


Pair = namedtuple("Pair", "a b")

LOOKALIKES = [
    float, str, bool, complex, Int, Fraction, Decimal, np.int64, np.int8, np.uint8, np.float64,
    torch.tensor, lambda x: [x], lambda x: (x,), lambda x: None, lambda x: -x, lambda x: x + 10,
    lambda x: x + 1, lambda x: x - 1, lambda x: x + 2**64, lambda x: ~x, lambda x: f"{x}\n",
    lambda x: chr(0xFF10 + x % 10), lambda x: bytes([x % 256]) if x >= 0 else b"",
    lambda x: (x + 5) % 10, lambda x: 12, lambda x: 13, lambda x: object(),
]  # fmt: skip

CONTAINERS = [
    list, tuple, List, Tuple, set, frozenset, deque, iter, np.array, str, repr, bytes, bytearray,
    dict.fromkeys, lambda x: [x], lambda x: (y for y in x), lambda x: map(int, x),
    lambda x: " ".join(map(str, x)), lambda x: {"response": x}, lambda x: range(len(x)),
]  # fmt: skip


def mutate(rng, items):
    """Change a list in one to three places, or not at all, and put it in some container."""
    items = list(items)
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 3))):
        place = rng.randrange(len(items)) if items else 0
        change = rng.randrange(8)
        if change == 0:
            items.insert(place, rng.randrange(-1, 15))
        elif not items:
            continue
        elif change == 1:
            del items[place]
        elif change == 2:
            items.append(items[place])
        elif change == 3:
            rng.shuffle(items)
        elif change == 4 and type(items[place]) is int:
            try:
                items[place] = rng.choice(LOOKALIKES)(items[place])
            except OverflowError:  # -1 as an unsigned byte
                items[place] = None
        else:
            items[place] = rng.randrange(10)
    if rng.random() < 0.7:
        return rng.choice((list, tuple))(items)
    try:
        return rng.choice(CONTAINERS)(items)
    except (TypeError, ValueError):  # the container cannot hold these items
        return items


def adversarial(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        task = rng.choice(TASKS)
        right = [sum(task), 2 * sum(task) % 10, EOS]
        if rng.random() < 0.9:
            yield task if rng.random() < 0.5 else list(task), mutate(rng, right)
        else:
            yield mutate(rng, task), right


def check_agreement(verifier, pairs):
    seen = Counter()
    for task, response in pairs:
        expected = restated(task, response)
        got = verifier(task, response)
        assert (got["reason"], got["reward"]) == (expected, int(expected == "ok")), (
            type(task),
            type(response),
        )
        seen[expected] += 1
    return seen


def test_200_000_adversarial_responses():
    seen = check_agreement(verify, adversarial(200_000, seed=1))
    assert sum(seen.values()) == 200_000
    assert set(seen) == {"task", "format", "intermediate", "final", "ok"}
    assert min(seen.values()) > 5_000, seen


ITEMS = st.one_of(
    st.integers(-2, 16), st.integers(), st.booleans(), st.floats(), st.text(max_size=3), st.none()
)
ANYTHING = st.recursive(
    ITEMS, lambda inner: st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple)
)


@settings(max_examples=500, derandomize=True, deadline=None, database=None)
@given(task=ANYTHING | st.sampled_from(TASKS), response=ANYTHING)
def test_anything_at_all(task, response):
    check_agreement(verify, [(task, response)])


@settings(max_examples=1000, derandomize=True, deadline=None, database=None)
@given(
    task=st.lists(st.integers(-1, 5), min_size=2, max_size=2),
    response=st.lists(st.integers(-1, 14) | st.booleans(), min_size=2, max_size=4),
)
def test_near_the_border(task, response):
    check_agreement(verify, [(task, response), (tuple(task), [*response[:2], EOS])])


# Constants, encoding, targets


@pytest.mark.claim("1.1", "enumeration")
def test_every_task_pays_exactly_its_target():
    paid = [(task, y) for task in TASKS for y in responses() if verify(task, y)["reward"]]
    assert len(TASKS) * len(responses()) == 2500
    assert paid == [(task, target(task)) for task in TASKS]
    for a, b in TASKS:
        assert target((a, b)) == [*map(int, ANSWERS[a + b]), EOS]


def test_tasks_and_split():
    assert sorted(TASKS) == sorted({(a, b) for a in (0, 1, 2, 3, 4) for b in (0, 1, 2, 3, 4)})
    assert set(TEST) == {(0, 4), (1, 3), (2, 2), (3, 1), (4, 0)}
    assert len(TEST) == 5
    assert len(TRAIN) == 20
    assert set(TRAIN) == set(TASKS) - set(TEST)


def test_responses_are_the_grammar():
    assert [f"{u}{v}" for u, v, _ in responses()] == [f"{n:02}" for n in range(100)]
    assert {end for _, _, end in responses()} == {EOS}
    responses()[0][0] = 9
    assert responses()[0] == [0, 0, EOS]


@pytest.mark.claim("1.2", "enumeration")
def test_prompts_are_distinct_and_readable():
    prompts = [encode(task) for task in TASKS]
    assert len({tuple(prompt) for prompt in prompts}) == 25
    for (a, b), prompt in zip(TASKS, prompts, strict=True):
        assert "".join(arithmetic.VOCAB[i] for i in prompt) == f"<bos>{a}+{b}="
        assert prompt == [12, a, 10, b, 11]
    assert len(arithmetic.VOCAB) == 14
    assert [arithmetic.VOCAB[i] for i in range(10)] == [f"{i}" for i in range(10)]


@pytest.mark.parametrize("function", [encode, target, probes])
@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        ((5, 0), ValueError, r"`task` must be one of TASKS, got \(5, 0\)"),
        ((-1, 0), ValueError, "must be one of TASKS"),
        ((1, 2, 3), ValueError, "`task` must have 2 items, got more"),
        ((1,), ValueError, "`task` must have 2 items, got 1"),
        ((True, 0), TypeError, r"`task\[0\]` must be an int, got bool"),
        ((0, 1.0), TypeError, r"`task\[1\]` must be an int, got float"),
        ("12", TypeError, "`task` must be a list or tuple, got str"),
        (Pair(1, 2), TypeError, "`task` must be a list or tuple, got Pair"),
        (None, TypeError, "`task` must be a list or tuple, got NoneType"),
    ],
)
def test_bad_tasks_are_named(function, task, error, words):
    refuses(error, words, function, task)
    assert verify(task, [0, 0, EOS])["reason"] == "task"


# The order of the checks

IN_ORDER = [
    ((5, 5), [9, 9, 13, True], "task", "one of TASKS"),
    ((3, 4), "7 4 13", "format", "list or tuple, got str"),
    ((3, 4), [True, 14, 0, 0], "format", "3 items, got more"),
    ((3, 4), [7, 4], "format", "3 items, got 2"),
    ((3, 4), [99, 4, True], "format", r"response\[2\]. must be an int, got bool"),
    ((3, 4), [7, 14, 0], "format", r"response\[1\]. must be a digit 0 to 9, got 14"),
    ((3, 4), [4, 9, 12], "format", r"response\[2\]. must be EOS = 13, got 12"),
    ((3, 4), [4, 9, 13], "intermediate", r"expected 3 \+ 4 = 7, got 4"),
    ((3, 4), [7, 9, 13], "final", r"expected 2 \* 7 mod 10 = 4, got 9"),
    ((3, 4), [7, 4, 13], "ok", "3 \\+ 4 = 7 and 2 \\* 7 mod 10 = 4"),
]


def check_order(module):
    for task, response, reason, words in IN_ORDER:
        verdict = module.verify(task, response)
        assert set(verdict) == {"reward", "reason", "detail"}
        assert type(verdict["reward"]) is int
        assert (verdict["reason"], verdict["reward"]) == (reason, int(reason == "ok"))
        assert re.search(words, verdict["detail"]), verdict["detail"]


@pytest.mark.claim("1.9", "enumeration")
def test_the_first_fault_names_the_reason():
    check_order(arithmetic)


@pytest.mark.claim("1.9", "enumeration")
def test_reasons_of_all_legal_responses():
    for task in TASKS:
        counted = Counter(verify(task, y)["reason"] for y in responses())
        assert counted == {"ok": 1, "final": 9, "intermediate": 90}


# Hostile objects


class Bomb(BaseException):
    """What hostile objects throw: `except Exception` does not stop it."""


def explode(*args, **kwargs):
    raise Bomb


HOOKS = [
    "__eq__", "__ne__", "__lt__", "__gt__", "__le__", "__ge__", "__hash__", "__len__", "__iter__",
    "__getitem__", "__contains__", "__bool__", "__int__", "__index__", "__float__", "__repr__",
    "__str__", "__format__", "__getattr__", "__getattribute__", "__instancecheck__",
    "__subclasscheck__", "__length_hint__", "__reduce_ex__", "__call__", "__next__",
]  # fmt: skip
MINES = dict.fromkeys(HOOKS, explode)


class HostileMeta(type):
    __eq__ = __hash__ = __repr__ = __instancecheck__ = __getattribute__ = explode
    __name__ = property(explode)
    __module__ = property(explode)


class AgreeableMeta(type):
    """Every class of this kind says that it equals `list` and `int`."""

    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return hash(int)


class HostileText(str):
    __getitem__ = __str__ = __repr__ = __format__ = encode = explode


def disguised(claimed):
    return type("Disguised", (), {"__class__": property(lambda self: claimed)})()


def hostile_objects():
    yield from (None, True, ..., NotImplemented, object, type, sys, len, b"", 3 + 4j, lambda: 0)
    yield type("Hostile", (), MINES)()
    for base in (list, tuple, dict, str, int, float):
        yield type(f"Hostile{base.__name__}", (base,), MINES)()
    yield HostileMeta("Hostile", (), {})()
    yield HostileMeta("Hostile", (list,), {})([7, 4, EOS])
    yield AgreeableMeta("Agreeable", (), {})()
    yield type(HostileText("A" * 10), (), {})()
    yield type("long" * 100_000, (), {})()
    yield type("é\n\x1b[31m", (), {})()
    yield from map(disguised, (list, tuple, int))
    yield (x for x in [7, 4, EOS])
    yield iter([7, 4, EOS])
    yield weakref.proxy(Int)
    yield np.array([7, 4, EOS])
    yield torch.tensor([7, 4, EOS])
    yield OrderedDict.fromkeys([7, 4, EOS])
    endless = []
    endless.append(endless)
    yield endless
    deep = []
    for _ in range(100_000):
        deep = [deep]
    yield deep
    yield 10**4000
    yield 10**5000
    yield -(10**5000)


def check_never_raises(verifier):
    for thing in hostile_objects():
        for task, response, reason in [
            (thing, [7, 4, EOS], "task"),
            ((thing, 4), [7, 4, EOS], "task"),
            ((3, thing), [7, 4, EOS], "task"),
            ((3, 4), thing, "format"),
            ((3, 4), [thing, 4, EOS], "format"),
            ((3, 4), (7, thing, EOS), "format"),
            ((3, 4), [7, 4, thing], "format"),
            ((3, 4), [7, 4, EOS, thing], "format"),
        ]:
            try:
                verdict = verifier(task, response)
            except BaseException as problem:
                raise AssertionError(f"raised {type(problem).__name__}") from None
            assert (verdict["reason"], verdict["reward"]) == (reason, 0)
            detail = verdict["detail"]
            assert type(detail) is str
            assert detail.isascii()
            assert detail.isprintable()
            assert len(detail) < 500


@pytest.mark.claim("1.7", "enumeration")
def test_never_raises():
    check_never_raises(verify)


def wrong_catches_exceptions(task, response):
    """The usual guard: whatever goes wrong is a format failure."""
    try:
        right = list(response) == [sum(task), 2 * sum(task) % 10, EOS]
    except Exception:
        right = False
    return {"reward": int(right), "reason": "ok" if right else "format", "detail": ""}


def test_catching_exceptions_is_not_enough():
    fails(check_never_raises, wrong_catches_exceptions)


def check_leaves_arguments_alone(verifier):
    for task, response in adversarial(2000, seed=2):
        if not {type(task), type(response)} <= {list, tuple}:
            continue
        items, pair = list(response), copy.copy(task)
        first = verifier(task, response)
        assert len(items) == len(response)
        assert all(old is new for old, new in zip(items, response, strict=True))
        assert type(task) is type(pair)
        assert verifier(task, response) == first
    generator = (x for x in [7, 4, EOS])
    for _ in range(2):
        assert verifier((3, 4), generator)["reason"] == "format"
    assert list(generator) == [7, 4, EOS]


def wrong_drains(task, response):
    if not hasattr(response, "__len__"):
        response = list(response)
    return verify(task, response)


def wrong_pops(task, response):
    verdict = verify(task, response)
    if type(response) is list and verdict["reason"] == "format" and response:
        response.pop()
    return verdict


@pytest.mark.claim("1.7", "enumeration")
def test_leaves_its_arguments_alone():
    check_leaves_arguments_alone(verify)
    fails(check_leaves_arguments_alone, wrong_drains)
    fails(check_leaves_arguments_alone, wrong_pops)


def test_a_list_that_changes_meanwhile():
    response, done = [7, 4, EOS], threading.Event()

    def change():
        while not done.is_set():
            response[:] = []
            response[:] = [7, 4, EOS]
            response.append(EOS)
            response.pop()

    thread = threading.Thread(target=change)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20_000):
            assert verify((3, 4), response)["reason"] in ("ok", "format")
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


# Constant work, counted and not timed


class Tattle:
    """Counts every touch of an item: comparison, hash, truth, length, attribute."""

    touched = 0

    def touch(self, *args):
        Tattle.touched += 1
        return NotImplemented

    __eq__ = touch

    def __hash__(self):
        Tattle.touched += 1
        return 0

    def __getattribute__(self, name):
        Tattle.touched += 1
        return object.__getattribute__(self, name)


def work(verifier, response):
    """Bytecode instructions executed, items touched, bytes allocated by one call."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    Tattle.touched = 0
    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        verifier((3, 4), response)
    finally:
        sys.settrace(previous)
    touched = Tattle.touched
    tracemalloc.start()
    try:
        verifier((3, 4), response)
        allocated = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return count, touched, allocated


def check_constant_work(verifier, size=1_000_000):
    for container in (list, tuple):
        short, long = container([Tattle()] * 4), container([Tattle()] * size)
        steps, touched, allocated = work(verifier, long)
        assert touched == 0
        assert steps == work(verifier, short)[0]
        assert allocated < 20_000
    for small, large in [
        ("7 4 13", "7" * size),
        (range(4), range(size)),
        ([10**3, 4, EOS], [10 ** (size // 100), 4, EOS]),
        ([[], 4, EOS], [[0] * size, 4, EOS]),
    ]:
        steps, _, allocated = work(verifier, large)
        assert steps == work(verifier, small)[0]
        assert allocated < 20_000


def wrong_walks(task, response):
    if not all(type(item) is int for item in response):
        return verify(task, None)
    return verify(task, response)


def wrong_compares(task, response):
    if type(response) in (list, tuple) and response.count(EOS) != 1:
        return verify(task, None)
    return verify(task, response)


def wrong_copies(task, response):
    return verify(task, tuple(response) if type(response) is list else response)


def wrong_prints(task, response):
    return {**verify(task, response), "detail": f"got {response!r}"}


@pytest.mark.claim("1.7", "enumeration")
def test_work_does_not_grow_with_the_response():
    check_constant_work(verify)


@pytest.mark.parametrize("wrong", [wrong_compares, wrong_copies, wrong_prints])
def test_growing_work_is_seen(wrong):
    fails(check_constant_work, wrong)


def test_a_walk_is_seen():
    fails(lambda: check_constant_work_of_ints(wrong_walks))
    check_constant_work_of_ints(verify)


def check_constant_work_of_ints(verifier):
    assert work(verifier, [7] * 4)[0] == work(verifier, [7] * 400)[0]


# Exact types


@pytest.mark.claim("1.8", "enumeration")
@pytest.mark.parametrize(
    "kind", [float, str, bool, complex, Int, Fraction, Decimal, np.int64, np.float64, torch.tensor]
)
def test_lookalikes_are_refused(kind):
    for task in TASKS:
        right = target(task)
        for place in range(3):
            response = [*right[:place], kind(right[place]), *right[place + 1 :]]
            assert verify(task, response)["reason"] == "format"
            assert verify(task, tuple(response))["reason"] == "format"
        for kind_of_list in (List, Tuple, np.array, deque):
            assert verify(task, kind_of_list(right))["reason"] == "format"


def test_python_takes_them_for_equal():
    """Each line is true in Python, which is why the contract compares types."""
    assert [4, 8, True] == [4, 8, 1]
    assert 4.0 == 4
    assert re.match(r"^\d+$", "4\n")
    assert int("４") == 4
    for response in ([4.0, 8, EOS], ["4\n", 8, EOS], ["４", 8, EOS], [4, 8, True], "4 8 13"):
        assert verify((2, 2), response)["reason"] == "format"


# Wrong verifiers, and the controls that tell them from the right one


def judged(right):
    return {"reward": int(right), "reason": "ok" if right else "wrong", "detail": ""}


def wrong_isinstance(task, response):
    """Too wide: `bool` is a subclass of `int`."""
    return judged(
        isinstance(response, list | tuple)
        and len(response) == 3
        and all(isinstance(item, int) for item in response)
        and list(response) == target(task)
    )


def wrong_equality(task, response):
    """Too wide: `==` ignores types."""
    return judged(
        response == target(task) or (isinstance(response, tuple) and response == (*target(task),))
    )


def wrong_final_only(task, response):
    """Too wide: the intermediate digit is free."""
    legal = verify(task, response)["reason"] in ("ok", "final", "intermediate")
    return judged(legal and response[1] == target(task)[1])


def wrong_consistent(task, response):
    """Too wide: asks whether the final digit fits the intermediate one, not whether it is right."""
    legal = verify(task, response)["reason"] in ("ok", "final", "intermediate")
    return judged(legal and response[1] == 2 * response[0] % 10)


def wrong_repairs(task, response):
    """Too wide: drops what is too much, adds the stop token, reduces modulo 10."""
    try:
        u, v, *_ = response
        return verify(task, [u % 10, v % 10, EOS])
    except (TypeError, ValueError):
        return judged(False)


def wrong_text(task, response):
    """Too wide: reads digits with `\\d` and `$`, then `int`."""
    parts = response if type(response) in (list, tuple) else str(response).split()
    texts = [str(part) for part in parts]
    return judged(
        all(re.match(r"^\d+$", text) for text in texts) and [*map(int, texts)] == target(task)
    )


def wrong_rejects_tuple(task, response):
    """Too narrow: JSON has only lists, somebody thought."""
    return judged(type(response) is list and verify(task, response)["reward"])


def wrong_rejects_carries(task, response):
    """Too narrow: doubles without reducing, so that no sum from 5 on can be right."""
    return judged(verify(task, response)["reward"] and 2 * sum(task) < 10)


ATTACKS = [
    lambda u, v, e: [u, v],
    lambda u, v, e: [u, v, e, e],
    lambda u, v, e: [u, v + 10, e],
    lambda u, v, e: [u + 10, v, e],
    lambda u, v, e: [u, v, 12],
    lambda u, v, e: [float(u), v, e],
    lambda u, v, e: [u == 1, v, e] if u < 2 else [Int(u), v, e],
    lambda u, v, e: [str(u), v, e],
    lambda u, v, e: [u, f"{v}\n", e],
    lambda u, v, e: [u, chr(0xFF10 + v), e],
    lambda u, v, e: f"{u} {v} {e}",
    lambda u, v, e: List((u, v, e)),
]


def failed_controls(verifier):
    """Positive: the oracle is always paid. Uniform: 1 of 100 is. Attacks: none is."""
    failed = set()
    for task in TASKS:
        right = target(task)
        if not (verifier(task, right)["reward"] and verifier(task, tuple(right))["reward"]):
            failed.add("positive")
        if sum(verifier(task, y)["reward"] for y in responses()) != 1:
            failed.add("uniform")
        if any(verifier(task, attack(*right))["reward"] for attack in ATTACKS):
            failed.add("attacks")
    return failed


@pytest.mark.claim("1.17", "enumeration")
def test_the_verifier_passes_all_controls():
    assert failed_controls(verify) == set()


@pytest.mark.claim("1.17", "enumeration")
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (wrong_isinstance, {"attacks"}),
        (wrong_equality, {"attacks"}),
        (wrong_repairs, {"attacks"}),
        (wrong_text, {"attacks"}),
        (wrong_final_only, {"uniform"}),
        (wrong_consistent, {"uniform"}),
        (wrong_rejects_tuple, {"positive"}),
        (wrong_rejects_carries, {"positive", "uniform"}),
        (lambda task, response: judged(True), {"uniform", "attacks"}),
        (lambda task, response: judged(False), {"positive", "uniform"}),
    ],
)
def test_each_wrong_verifier_fails_its_control(wrong, expected):
    assert failed_controls(wrong) == expected  # and no control is in every `expected`


@pytest.mark.claim("1.8", "enumeration")
def test_where_a_boolean_is_paid_by_isinstance():
    """Only digits 0 and 1 have a boolean twin: 7 of 25 tasks show the fault, (2, 2) does not."""
    shown = {
        task
        for task in TASKS
        for place in range(3)
        for twin in (False, True)
        if wrong_isinstance(
            task, [twin if i == place else item for i, item in enumerate(target(task))]
        )["reward"]
    }
    assert len(shown) == 7
    assert {sum(task) for task in shown} == {0, 1, 5}
    assert not wrong_isinstance((2, 2), [4, 8, True])["reward"]


# Mutants of the source: each one breaks a line of the module


def check_rule(module):
    check_agreement(module.verify, adversarial(3000, seed=3))


def check_hostile(module):
    check_never_raises(module.verify)


def check_bounded(module):
    check_constant_work(module.verify)


EXACT = "if not (type(value) is list or type(value) is tuple):"
MUTANTS = [
    (EXACT, "if not isinstance(value, list | tuple):", check_rule),
    (EXACT, "if type(value) not in (list, tuple):", check_hostile),
    (EXACT, "if type(value) is not list:", check_rule),
    ("if type(item) is not int:", "if not isinstance(item, int):", check_rule),
    ("if type(item) is not int:", "if type(item) not in (int,):", check_hostile),
    ("value[: length + 1]", "value", check_bounded),
    ("value[: length + 1]", "value[:length]", check_rule),
    ("if digit not in DIGITS:", "if digit > 9:", check_rule),
    ("enumerate((u, v))", "enumerate((u,))", check_order),
    ("if end != EOS:", "if end < BOS:", check_rule),
    ("if u != right_u:", "if u < right_u:", check_rule),
    ("if v != right_v:", "if False:", check_rule),
    ("if (a, b) not in TASKS:", "if a + b > 8:", check_rule),
    ("    return ascii(", "    return str(", check_hostile),
    ("slice(40)", "slice(None)", check_hostile),
    ('type.__dict__["__name__"].__get__(type(value))', "type(value).__name__", check_hostile),
    ("str.__getitem__(name, slice(40))", "name[:40]", check_hostile),
    ("return str(number) if small else", "return str(number) if True else", check_hostile),
]


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_mutant_is_caught(old, new, check):
    assert_caught("mathrl.arithmetic", old, new, check)


# The digest

NAMES = ["PLUS", "EQUALS", "BOS", "EOS"]


def recomputed_digest():
    """The digest from this file's own statement of the contract."""
    tasks = [[a, b] for a in range(5) for b in range(5)]
    legal = [[u, v, 13] for u in range(10) for v in range(10)]
    right = [[*map(int, ANSWERS[a + b]), 13] for a, b in tasks]
    verdicts = [
        [[int(reason == "ok"), reason] for y in legal for reason in [restated((a, b), y)]]
        + [[1, "ok"]]
        + [[0, "format"]] * 7
        for a, b in tasks
    ]
    contract = {
        "encodings": [[12, a, 10, b, 11] for a, b in tasks],
        "responses": legal,
        "targets": right,
        "tasks": tasks,
        "test": [[a, b] for a, b in tasks if a + b == 4],
        "tokens": {"BOS": 12, "EOS": 13, "EQUALS": 11, "PLUS": 10},
        "train": [[a, b] for a, b in tasks if a + b != 4],
        "verdicts": verdicts,
        "version": 1,
        "vocabulary": [*"0123456789+=", "<bos>", "<eos>"],
    }
    text = json.dumps(contract, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.claim("1.16", "enumeration")
def test_digest_is_that_of_the_contract_stated_here():
    assert digest() == recomputed_digest()


INGREDIENTS = [
    ("TASKS", (*TASKS[1:], TASKS[0])),
    ("TRAIN", TRAIN[::-1]),
    ("TEST", TEST[:4]),
    ("VOCAB", (*arithmetic.VOCAB[:13], "</s>")),
    ("PLUS", 11),
    ("EQUALS", 10),
    ("BOS", 13),
    ("VERSION", 2),
    ("encode", lambda task: encode(task)[1:]),
    ("target", lambda task: [*target(task)[:2], 12]),
    ("responses", lambda: responses()[::-1]),
    ("verify", lambda task, y: judged(verify(task, y)["reason"] != "format")),
    ("verify", lambda task, y: {**verify(task, y), "reason": "wrong"}),
    ("verify", wrong_isinstance),
    ("verify", wrong_rejects_tuple),
]  # fmt: skip


@pytest.mark.claim("1.16", "enumeration")
@pytest.mark.parametrize(("name", "value"), INGREDIENTS)
def test_every_ingredient_moves_the_digest(monkeypatch, name, value):
    before = digest()
    monkeypatch.setattr(arithmetic, name, value)
    assert digest() != before


def test_one_verdict_of_2500_moves_the_digest(monkeypatch):
    before = digest()
    for task, lucky in [((0, 0), [5, 0, EOS]), ((4, 4), [3, 6, EOS])]:

        def wrong(asked, response, task=task, lucky=lucky):
            return judged(1) if (asked, response) == (task, lucky) else verify(asked, response)

        monkeypatch.setattr(arithmetic, "verify", wrong)
        assert digest() != before
        monkeypatch.undo()
    assert digest() == before


@pytest.mark.parametrize(("old", "new"), [
    ("2 * u % 10, EOS]", "3 * u % 10, EOS]"),
    ("EOS = 10, 11, 12, 13", "EOS = 10, 11, 13, 12"),
    ("if a + b == 4)", "if a + b == 5)"),
    ("if type(item) is not int:", "if not isinstance(item, int):"),
    ("if v != right_v:", "if False:"),
])  # fmt: skip
def test_mutant_moves_the_digest(old, new):
    mutant = mutated("mathrl.arithmetic", old, new)
    try:
        changed = mutant.digest()
    except ValueError:  # a rule so broken that it cannot serialise itself
        return
    assert changed != digest()


def test_wording_is_not_part_of_the_contract():
    mutant = mutated("mathrl.arithmetic", "expected {a} + {b} = {right_u}", "wanted {right_u}")
    assert mutant.verify((3, 4), [4, 8, EOS])["detail"] == "wanted 7, got 4"
    assert mutant.digest() == digest()


def wrong_digest():
    """Covers the constants and forgets the rule."""
    return hashlib.sha256(repr((arithmetic.VOCAB, TASKS, TRAIN, TEST)).encode()).hexdigest()


def test_a_digest_of_constants_does_not_see_the_rule(monkeypatch):
    before = wrong_digest()
    monkeypatch.setattr(arithmetic, "verify", wrong_final_only)
    assert wrong_digest() == before


# A light import

LOADED = """
import sys
before = set(sys.modules)
import mathrl.arithmetic
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_imports_the_standard_library_only():
    command = [sys.executable, "-c", LOADED]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "mathrl" in loaded
    assert [m for m in loaded if m != "mathrl" and m not in sys.stdlib_module_names] == []
