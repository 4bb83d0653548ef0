"""The contract: 25 tasks, their split, their tokens, their right answers and the verifier.

A task `x = (a, b)` asks for the sum `u = a + b`, then for `v = 2u mod 10`, then for the stop token.
Digits are token ids 0 to 9, so a right response is `[u, v, EOS]`. Everything here is plain Python:
`verify` runs no code of the objects it judges and does the same small amount of work on each.
"""

import hashlib
import json
from typing import Any, Literal, TypedDict

VOCAB = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "=", "<bos>", "<eos>")
"""Glyph of each token; the position in this tuple is the token id."""

DIGITS = range(10)
"""Token ids of the digits, each equal to the number it stands for."""

PLUS, EQUALS, BOS, EOS = 10, 11, 12, 13

TASKS = tuple((a, b) for a in range(5) for b in range(5))
"""All tasks `(a, b)`, ordered by `a`, then `b`."""

TEST = tuple((a, b) for a, b in TASKS if a + b == 4)
"""The five tasks with sum 4, held out: an extrapolation, not a random sample."""

TRAIN = tuple((a, b) for a, b in TASKS if a + b != 4)
"""The other twenty tasks."""

VERSION = 1
"""Version of the verifier; any change of what it pays raises it."""

Reason = Literal["task", "format", "intermediate", "final", "ok"]


class Verdict(TypedDict):
    """What `verify` returns.

    `reward` is 1 exactly when `reason` is `"ok"`; `detail` says for a reader what was seen and what
    was expected, in at most a few hundred ASCII characters.
    """

    reward: Literal[0, 1]
    reason: Reason
    detail: str


def encode(task: tuple[int, int] | list[int]) -> list[int]:
    """Token ids of the prompt.

    Args:
        task: `(a, b)`, one of `TASKS`.

    Returns:
        `[BOS, a, PLUS, b, EQUALS]`.

    Raises:
        TypeError: the task is not a list or tuple, or an operand is not exactly an int.
        ValueError: the task has another length, or is not one of `TASKS`.

    >>> encode((2, 2))
    [12, 2, 10, 2, 11]
    """
    a, b = _read_task(task)
    return [BOS, a, PLUS, b, EQUALS]


def target(task: tuple[int, int] | list[int]) -> list[int]:
    """Return the one response that is paid.

    Args:
        task: `(a, b)`, one of `TASKS`.

    Returns:
        `[u, v, EOS]` with `u = a + b` and `v = 2u mod 10`.

    Raises:
        TypeError: the task is not a list or tuple, or an operand is not exactly an int.
        ValueError: the task has another length, or is not one of `TASKS`.

    >>> target((3, 4))
    [7, 4, 13]
    """
    a, b = _read_task(task)
    u = a + b
    return [u, 2 * u % 10, EOS]


def responses() -> list[list[int]]:
    """Every response the grammar allows, for any task: two digits, then `EOS`.

    Returns:
        100 lists `[u, v, EOS]`, ordered by `u`, then `v`.

    >>> len(responses()), responses()[74]
    (100, [7, 4, 13])
    """
    return [[u, v, EOS] for u in DIGITS for v in DIGITS]


def verify(task: object, response: object) -> Verdict:
    """Pay 1 for the right response to a task, 0 for anything else, and say why.

    The checks run in a fixed order and the first that fails gives the reason: `"task"` (a list or
    tuple of two ints that is one of `TASKS`), `"format"` (a list or tuple; three items; each
    exactly an int; two digits; `EOS`), `"intermediate"` (`u = a + b`), `"final"`
    (`v = 2u mod 10`), `"ok"`. Subclasses do not count: `True`, `7.0`, `"7"` and `numpy.int64(7)`
    fail as format. Nothing is repaired.

    Args:
        task: any object.
        response: any object; neither is changed, iterated or compared.

    Returns:
        A new dict with `reward`, `reason` and `detail`. It never raises, and does no more work for
        a response of a million items than for one of four.

    >>> verify((3, 4), [7, 4, 13])["reward"]
    1
    >>> verify((3, 4), [4, 8, 13])
    {'reward': 0, 'reason': 'intermediate', 'detail': 'expected 3 + 4 = 7, got 4'}
    """
    try:
        a, b = _read_task(task)
    except (TypeError, ValueError) as error:
        return _fail("task", str(error))
    try:
        u, v = _read_response(response)
    except (TypeError, ValueError) as error:
        return _fail("format", str(error))
    right_u, right_v, _ = target((a, b))
    if u != right_u:
        return _fail("intermediate", f"expected {a} + {b} = {right_u}, got {u}")
    if v != right_v:
        return _fail("final", f"expected 2 * {u} mod 10 = {right_v}, got {v}")
    return {"reward": 1, "reason": "ok", "detail": f"{a} + {b} = {u} and 2 * {u} mod 10 = {v}"}


def digest() -> str:
    """SHA-256 of the contract, as 64 hexadecimal digits.

    It covers the vocabulary, the tasks and their split, every encoding and every target, the
    version of the verifier, and the reward rule as behaviour: reward and reason of all 25 x 100
    legal pairs and of the malformed responses in `probes`. A change of rule that shows on none of
    these is seen only if `VERSION` is raised with it.

    The bytes are the ASCII JSON of one object, keys sorted, no spaces.

    >>> len(digest())
    64
    """
    contract = {
        "vocabulary": VOCAB,
        "tokens": {"PLUS": PLUS, "EQUALS": EQUALS, "BOS": BOS, "EOS": EOS},
        "tasks": TASKS,
        "train": TRAIN,
        "test": TEST,
        "encodings": [encode(task) for task in TASKS],
        "targets": [target(task) for task in TASKS],
        "responses": responses(),
        "verdicts": [
            [
                (verdict["reward"], verdict["reason"])
                for response in responses() + probes(task)
                for verdict in [verify(task, response)]
            ]
            for task in TASKS
        ],
        "version": VERSION,
    }
    canonical = json.dumps(contract, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def probes(task: tuple[int, int] | list[int]) -> list[Any]:
    """Responses at the border of the contract: only the first, the right one as a tuple, is paid.

    The rest are what a looser rule might pay: a part, a surplus, a number past 9, other types.

    Args:
        task: `(a, b)`, one of `TASKS`.

    Returns:
        Eight objects, in a fixed order.

    Raises:
        TypeError: the task is not a list or tuple, or an operand is not exactly an int.
        ValueError: the task has another length, or is not one of `TASKS`.

    >>> [verify((3, 4), probe)["reward"] for probe in probes((3, 4))]
    [1, 0, 0, 0, 0, 0, 0, 0]
    """
    u, v, end = target(task)
    return [
        (u, v, end),
        [u, v],
        [u, v, end, end],
        [u, v + 10, end],
        [float(u), v, end],
        [bool(u), v, end],
        [str(u), v, end],
        f"{u} {v} {end}",
    ]


def _fail(reason: Reason, detail: str) -> Verdict:
    return {"reward": 0, "reason": reason, "detail": detail}


def _read_task(task: object) -> tuple[int, int]:
    a, b = _read_ints("task", task, 2)
    if (a, b) not in TASKS:
        raise ValueError(f"`task` must be one of TASKS, got ({_shown(a)}, {_shown(b)})")
    return a, b


def _read_response(response: object) -> tuple[int, int]:
    u, v, end = _read_ints("response", response, 3)
    for index, digit in enumerate((u, v)):
        if digit not in DIGITS:
            raise ValueError(f"`response[{index}]` must be a digit 0 to 9, got {_shown(digit)}")
    if end != EOS:
        raise ValueError(f"`response[2]` must be EOS = {EOS}, got {_shown(end)}")
    return u, v


def _read_ints(name: str, value: object, length: int) -> tuple[int, ...]:
    """Copy exact ints out of an exact list or tuple without running any code of `value`.

    Types are compared with `is`, because `==` and `isinstance` ask the class, which may lie.
    """
    if not (type(value) is list or type(value) is tuple):
        raise TypeError(f"`{name}` must be a list or tuple, got {_type_name(value)}")
    items = tuple(value[: length + 1])  # all later checks see this copy, whatever a thread does
    if len(items) != length:
        count = "more" if len(items) > length else len(items)
        raise ValueError(f"`{name}` must have {length} items, got {count}")
    for index, item in enumerate(items):
        if type(item) is not int:
            raise TypeError(f"`{name}[{index}]` must be an int, got {_type_name(item)}")
    return items


def _type_name(value: object) -> str:
    # `.__name__` could be redefined by a metaclass, and be of any length or a subclass of str.
    name = type.__dict__["__name__"].__get__(type(value))
    return ascii(str.__getitem__(name, slice(40)))[1:-1]


def _shown(number: int) -> str:
    # Long ints are slow to print, and past 4300 digits Python refuses.
    small = -1000 < number < 1000
    return str(number) if small else f"an int of {number.bit_length()} bits"
