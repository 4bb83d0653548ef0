"""Seeded wrong variants of a module: a check is worth what it catches.

A test file lists its mutants in a table and runs one test over it:

    MUTANTS = [("rewards.mean(-1)", "rewards.sum(-1)", check_group_mean), ...]

    @pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
    def test_mutant_is_caught(old, new, check):
        assert_caught("mathrl.baseline", old, new, check)

A check takes the module, true or mutated, and calls its functions through it.
"""

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType

import pytest


def mutated(name: str, old: str, new: str) -> ModuleType:
    """The module `name` executed afresh with `old` replaced by `new` in its source."""
    true = importlib.import_module(name)
    source = inspect.getsource(true)
    count = source.count(old)
    assert count == 1, f"{old!r} must occur exactly once in {name}, found {count}"
    assert old != new, f"{old!r} is replaced by itself"
    mutant = ModuleType(name)
    exec(compile(source.replace(old, new), f"<mutant of {name}>", "exec"), mutant.__dict__)
    return mutant


def assert_caught(name: str, old: str, new: str, check: Callable[[ModuleType], None]) -> None:
    """`check` passes on the module and fails, with an AssertionError, on its mutant."""
    check(importlib.import_module(name))
    mutant = mutated(name, old, new)
    with pytest.raises(AssertionError):
        check(mutant)
