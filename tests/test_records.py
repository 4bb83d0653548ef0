"""JSON lines to trajectories; every error names its line and its field."""

import json

import pytest

from mathrl import records
from mathrl.trajectory import Call, Sampling
from tests.mutants import assert_caught
from tests.oracles import refuses


def line(**fields):
    return json.dumps({"prompt_ids": [0], "output_ids": [1, 2], **fields})


def check_calls(module):
    first, second = module.parse([
        line(log_probs=[-0.5, None], finish_reason="length", temperature=0.7, top_p=1,
             log_probs_kind="raw", trajectory="a", advantage=2),
        line(prompt_ids=[5], trajectory="b"),
        "",
        line(prompt_ids=[0, 1, 2], output_ids=[3], trajectory="a", advantage=[0.5]),
    ])  # fmt: skip
    assert (first.name, second.name) == ("a", "b")
    assert first.calls == (
        Call(prompt_ids=[0], output_ids=[1, 2], log_probs=[-0.5, None], finish_reason="length",
             sampling=Sampling(0.7, 1.0, "raw")),
        Call(prompt_ids=[0, 1, 2], output_ids=[3]),
    )  # fmt: skip
    assert first.advantages == (2.0, (0.5,))
    assert first.lines == (1, 4)
    assert second.advantages is None
    [unnamed] = module.parse([line(), line(prompt_ids=[1])])
    assert (unnamed.name, len(unnamed.calls)) == ("calls", 2)


def test_calls():
    check_calls(records)


def check_sampled_log_probs(module):
    """Not the first candidate, the sampled one."""
    assert module.sampled_log_probs([880, 7], [{512: -0.1, 880: -2.3}, {"7": -1.0}]) == [-2.3, -1.0]
    [trajectory] = module.parse([line(top_log_probs=[{"4": -0.1, "1": -2.3}, {"2": -0.7}])])
    assert trajectory.calls[0].log_probs == (-2.3, -0.7)
    refuses(ValueError, r"`top_log_probs\[0\]` lacks the sampled id 1", module.sampled_log_probs,
            [1], [{2: -0.1}])  # fmt: skip
    refuses(ValueError, "`top_log_probs` has 1 entries for 2", module.sampled_log_probs, [1, 2],
            [{1: -0.1}])  # fmt: skip


def test_sampled_log_probs():
    check_sampled_log_probs(records)


def wrong_first_candidate(output_ids, candidates):
    return [next(iter(options.values())) for options in candidates]


def test_the_first_candidate_is_another_probability():
    assert wrong_first_candidate([880], [{512: -0.1, 880: -2.3}]) == [-0.1]


def check_messages(module):
    calls = [Call(prompt_ids=[0], output_ids=[1], simulated=True)] * 2
    asked = []

    def simulate(messages, tools):
        asked.append((messages, tools))
        return calls

    content = [{"role": "user", "content": "2"}]
    text = json.dumps({"messages": content, "tools": [], "advantage": 1})
    first, second = module.parse([text, text], simulate=simulate)
    assert asked == [(content, [])] * 2
    assert first == ("line 1", tuple(calls), (1.0, 1.0), (1, 1))
    assert second.name == "line 2"


def test_messages():
    check_messages(records)


BAD = [
    ("{", None, "is no JSON"),
    ("[1]", None, "must be an object, got list"),
    (b'{"prompt_ids": "\xff"}', None, "is not UTF-8"),
    ('{"prompt_ids": [1], "output_ids": [2], "prompt_ids": [3]}', "prompt_ids", "is given twice"),
    (f'{{"prompt_ids": [1{"0" * 400}], "output_ids": [2]}}', "prompt_ids", "must hold integers"),
    (f'{{"prompt_ids": [1], "output_ids": [2], "advantage": 1{"0" * 400}}}', "advantage",
     "must be finite, got inf"),
    (line(finish_reason=[0] * 1000), "finish_reason", "must be text, got [0, 0, "),
    (line(logprobs=[]), "logprobs", "is unknown; known are advantage, finish_reason"),
    ('{"output_ids": [1]}', "prompt_ids", "is missing"),
    ('{"prompt_ids": [1]}', "output_ids", "is missing"),
    (line(prompt_ids=[]), "prompt_ids", "is empty"),
    (line(output_ids=None), "output_ids", "must be a sequence, got NoneType"),
    (line(output_ids=[]), "output_ids", "is empty, and no finish_reason says why"),
    (line(output_ids=[], finish_reason="stop"), "output_ids", "is empty"),
    (line(output_ids=[1.5, 2]), "output_ids", "must hold integers, got 1.5 at index 0"),
    (line(output_ids=["1"]), "output_ids", "must hold integers"),
    (line(log_probs=[-1]), "log_probs", "has 1 entries for 2 output ids"),
    (line(log_probs=[-1, 0.5]), "log_probs[1]", "must not be positive, got 0.5"),
    (line(log_probs=[-1, float("nan")]), "log_probs[1]", "must be finite, got nan"),
    (line(log_probs=[-1, "x"]), "log_probs[1]", "must be a number, got 'x'"),
    (line(log_probs=[-1, -1], top_log_probs=[{}, {}]), "top_log_probs", "stands beside log_probs"),
    (line(top_log_probs=[{"1": -1}, {}]), "top_log_probs[1]", "lacks the sampled id 2"),
    (line(top_log_probs=[[], {}]), "top_log_probs[0]", "must map ids to numbers"),
    (line(finish_reason=3), "finish_reason", "must be text, got 3"),
    (line(temperature="hot"), "temperature", "must be a number"),
    (line(temperature=-1), "temperature", "must not be negative, got -1.0"),
    (line(top_p=0), "top_p", "must be above 0 and at most 1, got 0.0"),
    (line(top_p=1.5), "top_p", "must be above 0 and at most 1, got 1.5"),
    (line(log_probs_kind="full"), "log_probs_kind", 'must be "raw" or "processed", got \'full\''),
    (line(trajectory=7), "trajectory", "must be text, got 7"),
    (line(advantage="1"), "advantage", "must be a number"),
    (line(advantage=[1.0]), "advantage", "has 1 entries for 2 output ids"),
    ('{"messages": 1}', "messages", "must be a list, got int"),
    ('{"messages": [], "tools": 1}', "tools", "must be a list, got int"),
    ('{"messages": [], "tools": [{}, 1]}', "tools[1]", "must be an object, got int"),
    ('{"messages": []}', "messages", "need a chat template and a tokenizer"),
    ('{"messages": [], "prompt_ids": []}', "prompt_ids", "is unknown"),
]  # fmt: skip


def error_of(module, *lines):
    try:
        module.parse(lines, source="calls.jsonl")
    except module.RecordError as error:
        return error
    raise AssertionError(f"{lines!r} was accepted")


def check_errors(module):
    for bad, field, problem in BAD:
        error = error_of(module, line(trajectory="other"), bad)
        where = "calls.jsonl, line 2" + (f", field {field!r}" if field else "")
        assert str(error).startswith(f"{where}: {problem}"), (bad, str(error))
        assert (error.line, error.field) == (2, field), bad
        assert len(str(error)) < 400, "an error repeats a whole line"


def test_errors():
    check_errors(records)


def check_advantages_of_all_or_none(module):
    lacking = line(prompt_ids=[9], trajectory="a")
    error = error_of(module, line(trajectory="a", advantage=1), lacking)
    assert (error.line, error.field) == (2, "advantage")


def test_advantages_of_all_or_none():
    check_advantages_of_all_or_none(records)


def test_errors_of_messages_name_their_field():
    def simulate(messages, tools):
        raise ValueError(messages[0])

    for problem, field in (
        ("`messages[0].role` must be text, got None", "messages[0].role"),
        ("the template refuses `messages`: no roles", "messages"),
    ):
        with pytest.raises(records.RecordError) as caught:
            records.parse([json.dumps({"messages": [problem]})], simulate=simulate)
        assert (caught.value.line, caught.value.field) == (1, field)


def test_read(tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_text(line() + "\n\n" + line(prompt_ids=[0, 1, 2]) + "\n")
    assert records.read(path) == records.parse([line(), "", line(prompt_ids=[0, 1, 2])])
    path.write_text(line() + "\n" + line(output_ids=[True, 1]) + "\n")
    refuses(records.RecordError, rf"{path}, line 2, field 'output_ids': must hold integers",
            records.read, path)  # fmt: skip
    with pytest.raises(OSError, match="No such file"):
        records.read(tmp_path / "none.jsonl")


MUTANTS = [
    ("by_id[str(token)]", "next(iter(by_id.values()))", check_sampled_log_probs),
    ("enumerate(lines, 1)", "enumerate(lines)", check_errors),
    ("if len(found) < len(pairs):", "if False:", check_errors),
    ("parse_int=_integer, ", "", check_errors),
    ("len(text) <= LONGEST", "True", check_errors),
    ("if temperature is not None and temperature < 0:", "if False:", check_errors),
    ("not 0 < top_p <= 1", "not 0 <= top_p <= 1", check_errors),
    ("if not isinstance(tool, dict):", "if False:", check_errors),
    ("if output_ids == [] and reason is None:", "if False:", check_errors),
    ("if field not in known:", "if False:", check_errors),
    ("if log_probs is not None:", "if False:", check_errors),
    ('if kind not in (None, "raw", "processed"):', "if False:", check_errors),
    ("if len(value) != len(call.output_ids):", "if False:", check_errors),
    ("if any(v is not None for v in values):", "if False:", check_advantages_of_all_or_none),
    ("found.setdefault(name, []).extend(entries)", "found[name] = entries", check_calls),
    ("Sampling(temperature, top_p, kind)", "Sampling(top_p, top_p, kind)", check_calls),
    ('f"line {number}" if "messages" in record else "calls"', '"calls"', check_messages),
]  # fmt: skip


def strictly(check, module):
    try:
        check(module)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise AssertionError(f"{check.__name__} raised {error!r}") from error


@pytest.mark.parametrize(("old", "new", "check"), MUTANTS)
def test_every_mutant_is_caught(old, new, check):
    assert_caught("mathrl.records", old, new, lambda mutant: strictly(check, mutant))
