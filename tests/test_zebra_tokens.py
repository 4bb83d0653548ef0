"""Tokens, arrays, files and the verifier."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from mathrl.zebra import dataset, puzzles, tokens, verifier
from mathrl.zebra.clues import KINDS, Clue, Size, holds
from mathrl.zebra.dataset import build, from_puzzles, read, relabel
from mathrl.zebra.generator import generate
from mathrl.zebra.solver import canonical_order, solve
from mathrl.zebra.tokens import Codec
from mathrl.zebra.verifier import verify
from tests.mutants import assert_caught
from tests.oracles import fails, refuses
from tests.test_arithmetic import hostile_objects

SIZES = [Size(2, 2), Size(3, 3), Size(2, 6), Size(6, 2), Size(5, 4)]

# ---------------------------------------------------------------- tokens


def check_codec(module):
    for size in SIZES:
        codec = module.Codec(size, 120)
        n, cells = size.houses, size.houses * size.attributes
        assert (codec.cells, codec.vocabulary, codec.length) == (cells, 1 + cells * n, cells + 1)
        assert codec.arguments == 1 + cells + n
        for index in range(5):
            puzzle = generate(size, 0, index)
            rows = codec.clues(puzzle)
            assert (rows.dtype, rows.shape) == (np.int64, (120, 4))
            for clue, row in zip(puzzle.clues, rows.tolist(), strict=False):
                assert KINDS[row[0] - 1] == clue.kind
                expected = [1 + a * n + v for a, v in clue.items]
                expected += [1 + cells + clue.house] if clue.house is not None else []
                assert row[1:] == expected + [0] * (3 - len(expected))
            assert not rows[len(puzzle.clues) :].any()
            assert codec.parse_clues(rows) == puzzle.clues
            order = random.Random(index).sample(range(cells), cells)
            actions = codec.actions(puzzle, [divmod(cell, n) for cell in order]).tolist()
            assert actions.pop() == 0
            right = [puzzle.solution[c // n][c % n] for c in order]
            assert [divmod(token - 1, n) for token in actions] == list(
                zip(order, right, strict=True)
            )
            assert codec.parse([*actions, 0, 1]) == list(zip(order, right, strict=True))
            assert codec.parse([actions[0], codec.vocabulary, 1]) == [(order[0], right[0])]
            assert codec.parse([-1, 1]) == []


def test_codec_round_trip():
    check_codec(tokens)


def test_codec_refuses():
    puzzle, codec = generate(Size(3, 3), 0, 0), Codec(Size(3, 3), 40)
    cells = list(canonical_order(solve(puzzle.size, puzzle.clues).waves))
    refuses(ValueError, "`puzzle.size` must be", Codec(Size(3, 2), 40).clues, puzzle)
    refuses(ValueError, "must be at most 1", Codec(Size(3, 3), 1).clues, puzzle)
    refuses(ValueError, "every cell of", codec.actions, puzzle, cells[1:])
    refuses(ValueError, "every cell of", codec.actions, puzzle, [*cells[1:], cells[1]])
    refuses(ValueError, "`max_clues` must be 1 or more", Codec, Size(3, 3), 0)
    for row, words in (
        ([10, 1, 2, 0], "must be 1 to 9, got 10"),
        ([1, 1, 11, 1], "must end with zeros"),
        ([1, 1, 2, 0], "house. must be 0 to 2"),
        ([4, 1, 0, 0], "items. must be items"),
        ([4, 1, 2, 0], "two attributes"),
    ):
        bad = np.array([row] + [[0] * 4] * 39)
        refuses(ValueError, words, codec.parse_clues, bad)
        refuses(ValueError, "no empty row before", codec.parse_clues, codec.clues(puzzle)[::-1])


# ---------------------------------------------------------------- verifier


def restated(solution, response):
    """The rule again, over strings: None of its code is shared."""
    n, cells = len(solution[0]), len(solution) * len(solution[0])
    legal = [str(token) for token in range(1 + cells * n)]
    if type(response) not in (list, tuple):
        return "illegal"
    words = [repr(x) if type(x) is int else "?" for x in response[: cells + 2]]
    if any(word not in legal for word in words) or "0" in words[:-1]:
        return "illegal"
    named = [legal.index(word) for word in words if word != "0"]
    which = [(token + n - 1) // n for token in named]
    if len(set(which)) < len(which):
        return "duplicate"
    if "0" not in words:
        return "truncated"
    if len(which) < cells:
        return "missing"
    flat = [value for row in solution for value in row]
    right = {1 + cell * n + value for cell, value in enumerate(flat)}
    return "ok" if set(named) == right else "wrong"


def responses(rng, right, vocabulary, houses):
    """A right response, changed in some places or not at all."""
    tokens = list(right[:-1])
    rng.shuffle(tokens)
    tokens.append(0)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        place = rng.randrange(len(tokens)) if tokens else 0
        match rng.randrange(9):
            case 0:
                tokens.insert(place, rng.randrange(-1, vocabulary + 2))
            case 1 if tokens:
                del tokens[place]
            case 2 if tokens:
                tokens[place] = rng.choice([float, str, bool, np.int64, lambda x: x + 2**64])(
                    tokens[place]
                )
            case 3 if tokens:
                tokens.append(tokens[place])
            case 4:
                tokens = tokens[:place]
            case 5 | 6 if tokens and type(tokens[place]) is int and tokens[place]:
                cell = (tokens[place] - 1) // houses
                tokens[place] = 1 + cell * houses + rng.randrange(houses)
            case _ if tokens and type(tokens[place]) is int:
                tokens[place] = rng.randrange(vocabulary)
    return tokens if rng.random() < 0.9 else rng.choice([tuple, iter, str, np.array])(tokens)


def check_verifier(module):
    rng, seen = random.Random(0), Counter()
    for index in range(3000):
        size = SIZES[index % len(SIZES)]
        rows = [rng.sample(range(size.houses), size.houses) for _ in range(size.attributes)]
        solution = tuple(map(tuple, rows))
        flat = [value for row in rows for value in row]
        right = [1 + cell * size.houses + value for cell, value in enumerate(flat)] + [0]
        response = responses(rng, right, 1 + size.cells * size.houses, size.houses)
        try:
            verdict = module.verify(solution, response)
        except Exception as problem:
            raise AssertionError(f"raised {type(problem).__name__}") from None
        expected = restated(solution, response)
        assert verdict["reason"] == expected, response
        assert verdict["solved"] is (expected == "ok")
        seen[expected] += 1
    assert len(seen) == 6
    assert min(seen.values()) > 30, seen


@pytest.mark.claim("12.6", "enumeration")
def test_verifier_on_adversarial_responses():
    check_verifier(verifier)


@pytest.mark.claim("12.6", "enumeration")
def test_verifier_never_raises():
    puzzle = generate(Size(2, 2), 0, 0)
    right = Codec(puzzle.size, 9).actions(puzzle, [(0, 0), (1, 0), (1, 1), (0, 1)]).tolist()
    assert verify(puzzle, right)["solved"]
    assert not verify(puzzle, np.array(right))["solved"]
    for thing in hostile_objects():
        for response in (thing, [thing], [*right[:-1], thing], (*right, thing)):
            try:
                verdict = verify(puzzle, response)
            except BaseException as problem:
                raise AssertionError(f"raised {type(problem).__name__}") from None
            assert verdict["reason"] == "illegal"
            assert verdict["detail"].isascii()
            assert len(verdict["detail"]) < 300
    assert verify(puzzle, [1] * 10**6)["reason"] == "duplicate"


def wrong_counts_values(solution, response):
    """Right values and enough of them: a cell may come twice and another never."""
    n = len(solution[0])
    flat = [value for row in solution for value in row]
    try:
        pairs = [divmod(token - 1, n) for token in response if token]
        good = len(pairs) == len(flat) and all(flat[c] == v for c, v in pairs)
    except Exception:
        good = False
    return {"solved": good, "reason": "ok" if good else "wrong"}


def test_counting_right_values_is_not_enough():
    class Wrong:
        verify = staticmethod(wrong_counts_values)

    fails(check_verifier, Wrong)


def check_batches(module):
    rng = np.random.default_rng(0)
    for size in SIZES:
        rows = [np.stack([rng.permutation(size.houses) for _ in range(size.attributes)])
                for _ in range(300)]  # fmt: skip
        values = np.stack([row.ravel() for row in rows])
        responses = np.zeros((300, size.cells + 3), np.int64)
        for index in range(300):
            cells = rng.permutation(size.cells)
            responses[index, : size.cells] = 1 + cells * size.houses + values[index, cells]
            if index % 2:
                place, token = rng.integers(size.cells + 1), rng.integers(size.cells * size.houses)
                responses[index, place] = token
        got = module.solved(values, responses, size.houses)
        for index in range(300):
            response = responses[index].tolist()
            cut = response[: response.index(0) + 1] if 0 in response else response
            solution = tuple(map(tuple, rows[index].tolist()))
            assert got[index] == verify(solution, cut)["solved"]
        assert 0.5 <= got.mean() < 1
        assert not module.solved(values, responses[:, : size.cells], size.houses).any()


def test_batches_get_the_same_verdict():
    check_batches(verifier)


# ---------------------------------------------------------------- arrays


def check_relabel(module):
    for size in (Size(3, 3), Size(4, 2), Size(2, 3)):
        given = [generate(size, 3, i) for i in range(40)]
        before = from_puzzles(given, 60)
        after = module.relabel(before, np.random.default_rng(1))
        moved = 0
        for i in range(40):
            new = after.puzzle(i)
            assert all(holds(clue, new.solution) for clue in new.clues)
            assert Counter(c.kind for c in new.clues) == Counter(c.kind for c in given[i].clues)
            rows = sorted(before.waves[i].reshape(size[::-1]).tolist())
            assert rows == sorted(after.waves[i].reshape(size[::-1]).tolist())
            for clue in new.clues:
                if clue.kind in ("same_house", "not_same_house", "neighbour"):
                    assert clue.items[0] < clue.items[1]
                if clue.kind == "in_between":
                    assert clue.items[1] < clue.items[2]
            moved += new.clues != given[i].clues
        assert moved > 30
        again = from_puzzles([after.puzzle(i) for i in range(40)], 60)
        assert all(np.array_equal(x, y) for x, y in zip(after[:3], again[:3], strict=True))
        orders = after.canonical()
        for i in range(40):
            waves = after.waves[i].reshape(size[::-1]).tolist()
            assert orders[i].tolist() == [a * size.houses + h for a, h in canonical_order(waves)]


@pytest.mark.claim("12.4", "enumeration")
def test_relabelled_puzzles_are_solved_anew():
    check_relabel(puzzles)


def test_random_names_are_uniform():
    one = from_puzzles([generate(Size(3, 2), 0, 0)], 30).select(np.zeros(6000, np.int64))
    after = relabel(one, np.random.default_rng(0))
    counts = Counter(map(tuple, after.values.tolist()))
    assert len(counts) == 36
    expected = 6000 / 36
    assert sum((c - expected) ** 2 / expected for c in counts.values()) < 66.6  # 35 degrees, 0.1 %


# ---------------------------------------------------------------- files


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(dataset, "SHARD", 32)


OPTIONS = {"size": Size(3, 3), "seed": 5, "count": 700, "max_clues": 12}


def test_any_number_of_processes_writes_the_same_bytes(tmp_path):
    for processes in (1, 2, 3):
        found = build(tmp_path / str(processes), **OPTIONS, processes=processes)
        for index in (0, 255, 256, 699):
            expected = generate(Size(3, 3), 5, index, max_clues=12)
            assert found.puzzle(index) == expected
            waves = solve(expected.size, expected.clues).waves
            assert found.waves[index].tolist() == [wave for row in waves for wave in row]
    one, two, three = (bytes_of(tmp_path / str(processes)) for processes in (1, 2, 3))
    assert one == two == three
    assert len(one) == 4


def test_a_killed_build_goes_on(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    build(whole, **OPTIONS)
    code = (
        "from pathlib import Path; from mathrl.zebra.clues import Size\n"
        "from mathrl.zebra.dataset import build\n"
        f"build(Path({str(killed)!r}), Size(3, 3), 5, 700, max_clues=12)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not list(killed.glob("0*.npy")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = killed / "000000.npy"
    stamp = first.stat().st_mtime_ns
    build(killed, **OPTIONS)
    assert first.stat().st_mtime_ns == stamp
    finished = bytes_of(killed)
    assert {name: data for name, data in finished.items() if name[0] != "."} == bytes_of(whole)


def test_folders_are_not_mixed_up(tmp_path, small):
    build(tmp_path / "a", Size(2, 2), 0, 40, max_clues=8)
    refuses(ValueError, "is of {'seed': 0}", build, tmp_path / "a", Size(2, 2), 1, 40, max_clues=8)
    (tmp_path / "a/000001.npy").unlink()
    refuses(ValueError, "1 shards are missing", read, tmp_path / "a")
    refuses(FileNotFoundError, "settings", read, tmp_path / "b")
    np.save(tmp_path / "a/000001.npy", np.zeros((8, 3), np.uint8))
    refuses(ValueError, r"must be uint8 of shape \(8, 40\)", read, tmp_path / "a")
    refuses(ValueError, "1 or more", build, tmp_path / "c", Size(2, 2), 0, 0, max_clues=8)


def test_puzzles_that_deduction_does_not_solve_are_refused():
    puzzle = generate(Size(3, 3), 0, 0, prune=True)
    fewer = puzzle._replace(clues=puzzle.clues[1:])
    refuses(ValueError, "what its clues determine", from_puzzles, [fewer], 30)
    false = puzzle._replace(clues=(Clue("found_at", ((0, 0),), 0),))
    refuses(ValueError, "what its clues determine", from_puzzles, [false], 30)
    refuses(ValueError, "must not be empty", from_puzzles, [], 30)


def test_progress_is_reported(tmp_path, small, capsys):
    build(tmp_path, Size(2, 2), 0, 64, max_clues=8, show=True)
    assert read(tmp_path).values.shape == (64, 4)


def test_no_torch_is_imported():
    code = "import sys, mathrl.zebra.dataset, mathrl.zebra.verifier; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False\n"


# ---------------------------------------------------------------- mutants

MUTANTS = [
    ("tokens", "[1 + a * self.size.houses + v for", "[a * self.size.houses + v for", check_codec),
    ("tokens", "else [1 + self.cells + clue.house]", "else [1 + clue.house]", check_codec),
    ("tokens", "1 + cells.astype(np.int64)", "cells.astype(np.int64)", check_codec),
    ("tokens", "0 < token < self.vocabulary", "0 <= token < self.vocabulary", check_codec),
    ("tokens", "0 < token < self.vocabulary", "0 < token <= self.vocabulary", check_codec),
    ("verifier", "if actions and actions[-1] == EOS:", "if False:", check_verifier),
    ("verifier", "if cell in filled:", "if False:", check_verifier),
    ("verifier", "if cell in filled:", "if filled.get(cell) == value:", check_verifier),
    ("verifier", "if not ended:", "if False:", check_verifier),
    ("verifier", "if len(filled) < size.cells:", "if False:", check_verifier),
    ("verifier", "if value != right:", "if False:", check_verifier),
    ("verifier", "if type(item) is not int:", "if False:", check_verifier),
    ("verifier", "0 <= item <= size.cells", "0 <= item <= 1 + size.cells", check_verifier),
    ("verifier", "& (tokens[:, cells] == EOS)", "", check_batches),
    ("verifier", ".all(1)", ".any(1)", check_batches),
    ("puzzles", "np.sort(pairs, axis=-1)", "pairs", check_relabel),
    ("puzzles", "waves[rows, attribute] = old_waves", "waves[:] = old_waves", check_relabel),
    ("puzzles", "np.take_along_axis(value, old_values, axis=2)", "old_values", check_relabel),
    ("puzzles", 'kind="stable")\n\n    def', ")[:, ::-1]\n\n    def", check_relabel),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "check"), MUTANTS)
def test_mutant_is_caught(module, old, new, check):
    assert_caught(f"mathrl.zebra.{module}", old, new, check)
