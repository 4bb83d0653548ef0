"""Calls and messages from a file of JSON lines; every error names its line and its field.

A line is one call,

```json
{"prompt_ids": [1, 2], "output_ids": [3], "log_probs": [-0.5], "finish_reason": "stop",
 "temperature": 1.0, "top_p": 1.0, "log_probs_kind": "raw", "trajectory": "a", "advantage": 1}
```

of which only the first two fields are required, or one whole conversation,

```json
{"messages": [], "tools": [], "trajectory": "b", "advantage": 1}
```

from which calls are simulated. `top_log_probs`, for each output id an object from candidate ids to
log-probabilities, may stand in place of `log_probs`. Calls of one trajectory are in the order in
which they were made; calls without the field `trajectory` form one.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mathrl import _values
from mathrl.trajectory import Call, Sampling

Simulator = Callable[[Sequence[Any], Sequence[Any] | None], Sequence[Call]]

CALL_FIELDS = {"prompt_ids", "output_ids", "log_probs", "top_log_probs", "finish_reason",
               "temperature", "top_p", "log_probs_kind", "trajectory", "advantage"}  # fmt: skip
MESSAGE_FIELDS = {"messages", "tools", "trajectory", "advantage"}

LONGEST = 300
"""Characters of a problem, or of the name of a field, that an error repeats."""
DIGITS = 18
"""An integer with more digits is no token id, and may be no float either."""


class RecordError(ValueError):
    """A line that is no call and no conversation.

    `line` counts from 1; `field` is None where the line as a whole is wrong.
    """

    def __init__(self, source: str, line: int, field: str | None, problem: str) -> None:
        """Say where and what."""
        self.line, self.field = line, field
        where = f"{source}, line {line}" + (f", field {_short(field)!r}" if field else "")
        super().__init__(f"{where}: {_short(problem)}")


class Trajectory(NamedTuple):
    """The calls of one trajectory, with what `build` takes as their advantages."""

    name: str
    calls: tuple[Call, ...]
    advantages: tuple[float | tuple[float, ...], ...] | None
    lines: tuple[int, ...]
    """The line of each call."""


def read(path: str | Path, *, simulate: Simulator | None = None) -> list[Trajectory]:
    """Read a file of JSON lines.

    Args:
        path: UTF-8, with or without a byte order mark; empty lines are passed over.
        simulate: makes calls of messages and tools, for example `calls_from_messages` with its
            template and tokenizer; needed where a line holds messages.

    Returns:
        Trajectories in the order of their first lines.

    Raises:
        RecordError: a line is not what this module describes.
        OSError: the file cannot be read.
    """
    return parse(Path(path).read_bytes().splitlines(), source=str(path), simulate=simulate)


def parse(
    lines: Iterable[str | bytes], *, source: str = "input", simulate: Simulator | None = None
) -> list[Trajectory]:
    """Read JSON lines from memory; arguments and errors as for `read`.

    >>> lines = ['{"prompt_ids": [0], "output_ids": [1, 2], "log_probs": [-0.2, -0.4]}',
    ...          '{"prompt_ids": [0, 1, 2, 8], "output_ids": [3], "log_probs": [-0.3]}']
    >>> [trajectory] = parse(lines)
    >>> len(trajectory.calls), trajectory.advantages
    (2, None)
    >>> parse(['{"prompt_ids": [0], "output_ids": null}'])
    Traceback (most recent call last):
    mathrl.records.RecordError: input, line 1, field 'output_ids': must be a sequence, got NoneType
    """
    found: dict[str, list[tuple[Call, Any, int]]] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            record = _object(text)
            name = record.get("trajectory", f"line {number}" if "messages" in record else "calls")
            if not isinstance(name, str):
                raise _FieldError("trajectory", f"must be text, got {name!r}")
            calls = _simulated(record, simulate) if "messages" in record else [_call(record)]
            entries = [(call, record.get("advantage"), number) for call in calls]
            found.setdefault(name, []).extend(entries)
        except _FieldError as error:
            raise RecordError(source, number, error.field, error.problem) from None
        except (TypeError, ValueError, RecursionError) as error:
            field, problem = _named(str(error))
            whole = "messages" if "messages" in record else None
            raise RecordError(source, number, field or whole, problem) from error
    return [_trajectory(source, name, entries) for name, entries in found.items()]


def sampled_log_probs(
    output_ids: Sequence[int], candidates: Sequence[Mapping[Any, float]]
) -> list[float]:
    """From the candidates at each position, the log-probability of the id that was sampled.

    A list of candidates is ordered by probability, not by what was drawn: its first entry is the
    likeliest id.

    Args:
        output_ids: the sampled ids.
        candidates: for each of them a mapping from ids, as numbers or as text, to
            log-probabilities.

    Returns:
        One log-probability for each output id.

    Raises:
        ValueError: there is not one mapping for each id, or a sampled id is not in its mapping.

    Source: derived in the book, chapter 9.

    >>> sampled_log_probs([880], [{512: -0.1, 880: -2.3}])
    [-2.3]
    """
    if len(candidates) != len(output_ids):
        raise ValueError(
            f"`top_log_probs` has {len(candidates)} entries for {len(output_ids)} output ids"
        )
    result = []
    for at, (token, options) in enumerate(zip(output_ids, candidates, strict=True)):
        if not isinstance(options, Mapping):
            raise ValueError(f"`top_log_probs[{at}]` must map ids to numbers, got {options!r}")
        by_id = {str(key): value for key, value in options.items()}
        if str(token) not in by_id:
            raise ValueError(f"`top_log_probs[{at}]` lacks the sampled id {token}")
        result.append(_values.number(f"top_log_probs[{at}]", by_id[str(token)]))
    return result


class _FieldError(Exception):
    def __init__(self, field: str | None, problem: str) -> None:
        super().__init__(problem)
        self.field, self.problem = field, problem


def _named(message: str) -> tuple[str | None, str]:
    """The field that a message of the package names, and the rest of the message."""
    match = re.match(r"`([\w.\[\]]+)` (.*)", message, re.S)
    return match.groups() if match else (None, message)  # type: ignore[return-value]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _integer(text: str) -> int | float:
    """What no token id and no float can hold becomes infinite or a float, and is refused there."""
    return int(text) if len(text) <= DIGITS else float(text)


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object. JSON may name a field twice, and most readers keep the last value in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise _FieldError(twice, "is given twice")
    return found


def _object(text: str | bytes) -> dict[str, Any]:
    try:
        line = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        record = json.loads(line, parse_int=_integer, object_pairs_hook=_distinct)
    except UnicodeDecodeError as error:
        raise _FieldError(None, f"is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _FieldError(None, f"is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise _FieldError(None, f"must be an object, got {type(record).__name__}")
    known = MESSAGE_FIELDS if "messages" in record else CALL_FIELDS
    for field in record:
        if field not in known:
            raise _FieldError(field, f"is unknown; known are {', '.join(sorted(known))}")
    return record


def _simulated(record: Mapping[str, Any], simulate: Simulator | None) -> Sequence[Call]:
    messages, tools = record["messages"], record.get("tools")
    for field, value in (("messages", messages), ("tools", tools)):
        if not isinstance(value, list) and not (field == "tools" and value is None):
            raise _FieldError(field, f"must be a list, got {type(value).__name__}")
    for at, tool in enumerate(tools or []):
        if not isinstance(tool, dict):
            raise _FieldError(f"tools[{at}]", f"must be an object, got {type(tool).__name__}")
    if simulate is None:
        raise _FieldError("messages", "need a chat template and a tokenizer to become calls")
    return simulate(messages, tools)


def _call(record: Mapping[str, Any]) -> Call:
    for field in ("prompt_ids", "output_ids"):
        if field not in record:
            raise _FieldError(field, "is missing")
    output_ids, reason = record["output_ids"], record.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise _FieldError("finish_reason", f"must be text, got {reason!r}")
    if output_ids == [] and reason is None:
        # A recorder that lost the ids looks like this; a sampler that sampled nothing says why.
        raise _FieldError("output_ids", "is empty, and no finish_reason says why")
    log_probs = record.get("log_probs")
    if (candidates := record.get("top_log_probs")) is not None:
        if log_probs is not None:
            raise _FieldError("top_log_probs", "stands beside log_probs; give one of them")
        ids = _values.ids("output_ids", output_ids)
        log_probs = sampled_log_probs(ids, _values.listed("top_log_probs", candidates))
    return Call(
        prompt_ids=record["prompt_ids"],
        output_ids=output_ids,
        log_probs=log_probs,
        finish_reason=reason,
        sampling=_sampling(record),
    )


def _sampling(record: Mapping[str, Any]) -> Sampling:
    settings = {
        field: None if record.get(field) is None else _values.number(field, record[field])
        for field in ("temperature", "top_p")
    }
    temperature, top_p = settings["temperature"], settings["top_p"]
    if temperature is not None and temperature < 0:
        raise _FieldError("temperature", f"must not be negative, got {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise _FieldError("top_p", f"must be above 0 and at most 1, got {top_p}")
    kind = record.get("log_probs_kind")
    if kind not in (None, "raw", "processed"):
        raise _FieldError("log_probs_kind", f'must be "raw" or "processed", got {kind!r}')
    return Sampling(temperature, top_p, kind)


def _trajectory(source: str, name: str, entries: Sequence[tuple[Call, Any, int]]) -> Trajectory:
    calls, values, lines = zip(*entries, strict=True)
    advantages: list[float | tuple[float, ...]] = []
    for call, value, line in entries:
        try:
            if value is None:
                if any(v is not None for v in values):
                    raise ValueError("`advantage` is missing, though other calls have one")
            elif isinstance(value, list):
                if len(value) != len(call.output_ids):
                    count = len(call.output_ids)
                    raise ValueError(f"`advantage` has {len(value)} entries for {count} output ids")
                advantages.append(tuple(_values.number("advantage", v) for v in value))
            else:
                advantages.append(_values.number("advantage", value))
        except (TypeError, ValueError) as error:
            raise RecordError(source, line, *_named(str(error))) from error
    return Trajectory(name, calls, tuple(advantages) if advantages else None, lines)
