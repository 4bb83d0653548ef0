"""Why a prompt does not extend what came before it.

Two calls share one row only if the later prompt is a token-for-token extension of the earlier
prompt and output. Where it is not, something between the calls changed the ids. The reason is
read off the ids at the first difference, and off their text where a decoder is given:

| reason | what the ids show |
|---|---|
| `retokenised` | the text of the stretch is unchanged and its ids are not; needs a decoder |
| `reasoning stripped` | ids inside a sampled output, or of the scaffold just before it, or of both, are gone, and its end is still there |
| `separator dropped` | the last id of an output is gone, or a white-space stretch at either side of its end |
| `truncated` | the history stops inside a stretch, or a part of it is gone and what follows is unchanged |
| `branch` | the prompt is a point that an earlier call started from, or extends an earlier call that another call extends too |
| `compaction or rewrite` | none of these: other ids stand where the history stood |

A reason is a diagnosis, not a proof: without a decoder a last id that came back as another one
reads as a dropped separator, and a retokenised stretch as a rewrite. The index and the two ids
are exact.
"""  # noqa: E501

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decoder = Callable[[Sequence[int]], str]

RETOKENISED = "retokenised"
REASONING = "reasoning stripped"
SEPARATOR = "separator dropped"
TRUNCATED = "truncated"
BRANCH = "branch"
REWRITE = "compaction or rewrite"
REASONS = (RETOKENISED, REASONING, SEPARATOR, TRUNCATED, BRANCH, REWRITE)


@dataclass(frozen=True, slots=True)
class Split:
    """A call that could not continue a row, and the first token at which it differs.

    >>> print(Split(1, 0, "reasoning stripped", 1, 8, 5, "think", "Hello"))
    call 1 does not extend call 0: reasoning stripped at index 1, 8 'think' became 5 'Hello'
    """

    call: int
    """Index of the call that starts a new row."""
    before: int
    """Index of the earlier call that agrees with it longest."""
    reason: str
    """One of `REASONS`."""
    index: int
    """First position at which the two sequences, prompt and output, differ."""
    expected: int | None
    """The earlier call's id there; None if its sequence ends before."""
    got: int | None
    """The new call's id there; None if its sequence ends before."""
    expected_text: str | None = None
    """Decoded `expected`, where there is a decoder."""
    got_text: str | None = None
    """Decoded `got`, where there is a decoder."""

    def __str__(self) -> str:
        """One line for a reader."""
        start = f"call {self.call} does not extend call {self.before}: {self.reason}"
        if self.expected is None and self.got is None:
            return f"{start}, no id differs"
        old = _shown(self.expected, self.expected_text)
        new = _shown(self.got, self.got_text)
        return f"{start} at index {self.index}, {old} became {new}"


def diagnose(
    before: Sequence[int],
    writers: Sequence[int | None],
    prompt: Sequence[int],
    shared: int,
    extends: int,
    decode: Decoder | None = None,
) -> str:
    """Name the reason why `prompt` does not extend `before`.

    Args:
        before: the earlier prompt and output, n ids.
        writers: for each of them the call that sampled it, None for context; length n.
        prompt: the new prompt.
        shared: how many leading ids the two have in common.
        extends: length of the longest earlier sequence that is a prefix of `prompt`, 0 if none.
        decode: ids to text, special tokens included.

    Returns:
        One of `REASONS`.

    Source: derived in the book, chapter 10.

    >>> diagnose([0, 8, 8, 1], [None, 0, 0, 0], [0, 1, 4], shared=1, extends=0)
    'reasoning stripped'
    """
    if shared == len(prompt):
        boundary = shared == extends or writers[shared] != writers[shared - 1]
        return BRANCH if boundary else TRUNCATED
    start, stop = _stretch(writers, shared)
    new = prompt[shared:]
    if decode and decode([*prompt[start:]]).startswith(decode([*before[start:stop]])):
        return RETOKENISED
    if writers[shared] is not None:
        return _in_output(before[shared:stop], new, decode)
    return _in_context(before, writers, shared, stop, new, extends, decode)


def _in_output(rest: Sequence[int], new: Sequence[int], decode: Decoder | None) -> str:
    """The difference lies inside a sampled output, of which `rest` was to follow."""
    kept = _overlap(rest, new)
    gone = rest[: len(rest) - kept]
    if (len(rest) == 1 and not kept) or _is_space(gone, decode):
        return SEPARATOR
    return REASONING if kept else REWRITE


def _in_context(
    before: Sequence[int],
    writers: Sequence[int | None],
    shared: int,
    stop: int,
    new: Sequence[int],
    extends: int,
    decode: Decoder | None,
) -> str:
    """The difference lies in context, which ends at `stop`, where the next output starts."""
    end = _stretch(writers, stop)[1] if stop < len(before) else stop
    output = before[stop:end]
    kept = _overlap(before[shared:end], new)
    if output and kept >= len(output):
        gone = before[shared : end - kept]
        after_output = shared > 0 and writers[shared - 1] is not None
        if after_output and (len(gone) == 1 or _is_space(gone, decode)):
            return SEPARATOR
        return REASONING if kept == len(output) else TRUNCATED
    if 1 < kept < len(output):  # a block that the prompt opened and the output closed is gone
        return REASONING
    last = _stretch(writers, len(before) - 1)[0]
    if output and _overlap(before[shared:], new) >= len(before) - last:
        return TRUNCATED
    if extends and not (output and _contains(new, output)):
        return BRANCH
    return REWRITE


def _stretch(writers: Sequence[int | None], index: int) -> tuple[int, int]:
    """The bounds of the run of one writer around `index`."""
    start, stop = index, index + 1
    while start and writers[start - 1] == writers[index]:
        start -= 1
    while stop < len(writers) and writers[stop] == writers[index]:
        stop += 1
    return start, stop


def _borders(ids: Sequence[int]) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders, length = [0] * len(ids), 0
    for at in range(1, len(ids)):
        while length and ids[at] != ids[length]:
            length = borders[length - 1]
        length += ids[at] == ids[length]
        borders[at] = length
    return borders


def _overlap(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest suffix of `first` that is a prefix of `second`."""
    head = second[: len(first)]
    return _borders([*head, -1, *first])[-1] if head else 0


def _contains(ids: Sequence[int], part: Sequence[int]) -> bool:
    """Whether `part` occurs in `ids` as a run."""
    return len(part) in _borders([*part, -1, *ids])


def _is_space(ids: Sequence[int], decode: Decoder | None) -> bool:
    return bool(ids) and decode is not None and not decode([*ids]).strip()


def _shown(token: int | None, text: str | None) -> str:
    if token is None:
        return "the end"
    return str(token) if text is None else f"{token} {text!r}"
