"""From sampled calls to training rows: who wrote each token, and which input predicts it.

A call is what the sampler saw and what it returned, as ids. A token's author is the policy only
because a call sampled it, never because of a role name: prefilled text, few-shot answers and the
template's own tokens are context. A row is one sequence of n tokens with n-1 targets, and every
column of it is aligned to the targets: entry t belongs to `tokens[t + 1]`, which the position of
`tokens[t]` predicts. That shift is made once, in `build`.

**Conservation law.** Every sampled token is a target exactly once over all rows, or it is listed
in `untrained` with a reason. `build` checks this on what it is about to return.

What is not known stays unknown. A missing log-probability is None, never 0.0 (a probability of
1), and whatever needs it raises. This module needs neither torch nor numpy.
"""

import numbers
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mathrl import _values
from mathrl.calls import Call as Call
from mathrl.calls import Sampling as Sampling
from mathrl.prefixes import PrefixTree, Shared
from mathrl.splits import Decoder, Split, diagnose

POLICY, CONTEXT = "policy", "context"

CUT = "past max_tokens"
EMPTY = "empty output"


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence: n tokens, and six columns aligned to its n-1 targets.

    Entry t of a column belongs to target t, which is `tokens[t + 1]`, predicted at the position
    of `tokens[t]`.

    Args:
        tokens: n ids.
        mask: 1 where the target is trained in this row, else 0.
        authors: `"policy"` where a call sampled the target in this context, else `"context"`. A
            target of the policy with mask 0 is trained in another row, or not at all.
        calls: the index of the call that sampled the target, else None.
        old_log_probs: the log-probability recorded when the target was sampled, in nats; None
            where it is missing, and wherever mask is 0.
        advantages: the advantage; None where there is none, and wherever mask is 0.
        weights: what the target counts in the loss, 1.0 unless reweighted, 0.0 where mask is 0.
        settings: for each trained call how it was sampled.

    Raises:
        ValueError: a column does not hold n-1 entries, the mask holds other values than 0 and 1,
            or a target is trained that no call sampled.

    Source: derived in the book, conversations, chapter 1.

    >>> calls = [Call(prompt_ids=[0], output_ids=[1, 2]),
    ...          Call(prompt_ids=[0, 1, 2, 8, 9], output_ids=[3])]
    >>> [row] = build(calls).rows
    >>> row.tokens, row.mask, row.calls
    ((0, 1, 2, 8, 9, 3), (1, 1, 0, 0, 1), (0, 0, None, None, 1))
    """

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    authors: tuple[str, ...]
    calls: tuple[int | None, ...]
    old_log_probs: tuple[float | None, ...]
    advantages: tuple[float | None, ...]
    weights: tuple[float, ...]
    settings: Mapping[int, Sampling] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check lengths, and that what is trained was sampled."""
        for name in COLUMNS:
            if (count := len(getattr(self, name))) != len(self.tokens) - 1:
                raise ValueError(
                    f"`{name}` has {count} entries, expected {len(self.tokens) - 1}, "
                    f"one for each target of {len(self.tokens)} tokens"
                )
        if not {*self.mask} <= {0, 1}:
            raise ValueError(f"`mask` must hold only 0 and 1, got {sorted({*self.mask})}")
        for at, (m, author, call) in enumerate(
            zip(self.mask, self.authors, self.calls, strict=True)
        ):
            if m and (author != POLICY or call is None):
                raise ValueError(f"`mask` trains target {at}, which no call sampled")

    @property
    def inputs(self) -> tuple[int, ...]:
        """The n-1 tokens at whose positions the targets are predicted."""
        return self.tokens[:-1]

    @property
    def targets(self) -> tuple[int, ...]:
        """The n-1 predicted tokens."""
        return self.tokens[1:]

    @property
    def trained(self) -> int:
        """How many targets are trained: a count, not the span from the first to the last."""
        return sum(self.mask)


COLUMNS = ("mask", "authors", "calls", "old_log_probs", "advantages", "weights")


class Untrained(NamedTuple):
    """Sampled tokens `start` to `stop` of a call's output that are targets nowhere, and why."""

    call: int
    start: int
    stop: int
    reason: str


@dataclass(frozen=True, slots=True)
class Built:
    """What `build` returns: rows that train something, splits, and what is left untrained."""

    rows: tuple[Row, ...]
    splits: tuple[Split, ...]
    untrained: tuple[Untrained, ...]


def build(
    calls: Sequence[Call],
    *,
    advantages: float | Sequence[float | Sequence[float]] | None = None,
    exclude: Mapping[int, str] | None = None,
    max_tokens: int | None = None,
    placeholder_ids: Collection[int] = (),
    decode: Decoder | None = None,
) -> Built:
    """Merge the calls of one trajectory into rows, or split them where their ids differ.

    A call continues a row exactly when its prompt is a token-for-token extension of the prompt
    and output of the row's last call; of several, the longest. Otherwise it starts a row, whose
    history is context, and a `Split` says why. Branches share sampled tokens in their context;
    they are targets in the first branch only. Calls are given in the order they were made; the
    order of independent branches does not change what is trained, on what, or how much.

    Args:
        calls: the calls of one trajectory.
        advantages: one for the trajectory, or for each call one, or one for each of its output
            tokens. They belong to trajectories, not to rows: a baseline over rows would count a
            trajectory once for each split. None: rows have no advantages.
        exclude: for calls that are not to be trained, by index, the reason.
        max_tokens: rows are cut after this many tokens; a row of which nothing trained is left
            is dropped.
        placeholder_ids: ids that stand for the features of an image or the like. A cut never
            leaves a part of a run of them; it moves to the start of the run.
        decode: ids to text, special tokens included; used to name the reason of a split.

    Returns:
        `rows`, `splits` and `untrained`.

    Raises:
        TypeError: an item of `calls` is not a `Call`.
        ValueError: there is no call, the advantages do not match the calls or are not finite, or
            `exclude` or `max_tokens` is out of range.
        AssertionError: the conservation law fails: a mistake in this function.

    Source: derived in the book, conversations, chapters 1 and 2.

    >>> calls = [Call(prompt_ids=[0], output_ids=[8, 8, 1]),
    ...          Call(prompt_ids=[0, 1, 4], output_ids=[2])]
    >>> built = build(calls, advantages=1.0)
    >>> [row.mask for row in built.rows]
    [(1, 1, 1), (0, 0, 1)]
    >>> print(built.splits[0])
    call 1 does not extend call 0: reasoning stripped at index 1, 8 became 1
    """
    _check_calls(calls)
    per_call = _advantages(calls, advantages)
    excluded = dict(exclude or {})
    _check_range(len(calls), excluded, max_tokens)
    tree, splits, drafts = PrefixTree(), [], []
    home: list[_Draft] = []  # of each call, the draft that holds it
    for number, call in enumerate(calls):
        ids = call.token_ids
        shared = tree.add(ids, len(call.prompt_ids))
        nearest = None if shared.nearest is None else home[shared.nearest]
        if shared.continues is not None:
            draft = home[shared.continues]
        else:
            draft = _Draft()
            drafts.append(draft)
            if nearest is not None:
                splits.append(_split(number, call, shared, nearest, calls, decode))
        home.append(draft)
        # Tokens that were sampled in this very context keep their author; they are not trained.
        known = nearest.calls[: min(shared.length, len(call.prompt_ids))] if nearest else []
        draft.context(call.prompt_ids, known)
        draft.output(number, call, None if number in excluded else per_call[number])
    untrained = [
        Untrained(number, 0, len(call.output_ids), excluded.get(number, EMPTY))
        for number, call in enumerate(calls)
        if number in excluded or not call.output_ids
    ]
    for draft in drafts:
        untrained += draft.cut(max_tokens, placeholder_ids)
    rows = tuple(draft.row(calls) for draft in drafts if any(draft.mask))
    _assert_conserved(calls, rows, untrained)
    return Built(rows, tuple(splits), tuple(sorted(untrained)))


class _Draft:
    """A row while it grows, in token space: entry i of every column is about token i."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.calls: list[int | None] = []
        self.mask: list[int] = []
        self.old_log_probs: list[float | None] = []
        self.advantages: list[float | None] = []

    def context(self, prompt: Sequence[int], known: Sequence[int | None]) -> None:
        """Grow to the whole of a prompt; `known` names the authors of its leading tokens."""
        start = len(self.tokens)
        self.tokens += prompt[start:]
        self.calls += known[start:]
        self.calls += [None] * (len(prompt) - len(self.calls))
        self.mask += [0] * (len(prompt) - start)
        self.old_log_probs += [None] * (len(prompt) - start)
        self.advantages += [None] * (len(prompt) - start)

    def output(self, number: int, call: Call, advantages: Sequence[float | None] | None) -> None:
        """Append what a call sampled; no advantages at all: it is not trained."""
        count, trained = len(call.output_ids), advantages is not None
        known = trained and call.log_probs is not None
        self.tokens += call.output_ids
        self.calls += [number] * count
        self.mask += [int(trained)] * count
        self.old_log_probs += (call.log_probs or ()) if known else [None] * count
        self.advantages += [None] * count if advantages is None else advantages

    def cut(self, length: int | None, placeholder_ids: Collection[int]) -> Iterable[Untrained]:
        """Drop what follows the first `length` tokens; yield the targets that are lost."""
        if length is None or len(self.tokens) <= length:
            return
        last, whole = len(self.tokens), {*placeholder_ids}
        while length and self.tokens[length - 1] in whole and self.tokens[length] in whole:
            length -= 1
        kept = Counter(c for c, m in zip(self.calls[:length], self.mask, strict=False) if m)
        tail = zip(self.calls[length:last], self.mask[length:last], strict=True)
        for call, lost in Counter(c for c, m in tail if m).items():
            assert call is not None
            yield Untrained(call, kept[call], kept[call] + lost, CUT)
        columns = (self.tokens, self.calls, self.mask, self.old_log_probs, self.advantages)
        for column in columns:
            del column[length:]

    def row(self, calls: Sequence[Call]) -> Row:
        """The shift: the columns of target t are those of token t + 1."""
        trained = {c for c, m in zip(self.calls, self.mask, strict=True) if m and c is not None}
        return Row(
            tokens=tuple(self.tokens),
            mask=tuple(self.mask[1:]),
            authors=tuple(CONTEXT if call is None else POLICY for call in self.calls[1:]),
            calls=tuple(self.calls[1:]),
            old_log_probs=tuple(self.old_log_probs[1:]),
            advantages=tuple(self.advantages[1:]),
            weights=tuple(float(m) for m in self.mask[1:]),
            settings={call: calls[call].sampling for call in sorted(trained)},
        )


def _split(
    number: int,
    call: Call,
    shared: Shared,
    nearest: _Draft,
    calls: Sequence[Call],
    decode: Decoder | None,
) -> Split:
    assert shared.nearest is not None
    before, after = calls[shared.nearest].token_ids, call.token_ids
    at = shared.length
    expected = before[at] if at < len(before) else None
    got = after[at] if at < len(after) else None
    reason = diagnose(
        before,
        nearest.calls[: len(before)],
        call.prompt_ids,
        shared=min(at, len(call.prompt_ids)),
        extends=shared.extends,
        decode=decode,
    )
    texts = [None if decode is None or i is None else decode([i]) for i in (expected, got)]
    return Split(number, shared.nearest, reason, at, expected, got, *texts)


def _assert_conserved(
    calls: Sequence[Call], rows: Sequence[Row], untrained: Sequence[Untrained]
) -> None:
    """Each sampled token is a target once, at its place in its call's output, or is listed."""
    seen: list[list[int]] = [[] for _ in calls]
    for row in rows:
        for call, target, m in zip(row.calls, row.targets, row.mask, strict=True):
            if m and call is not None:
                seen[call].append(target)
    for item in untrained:
        # In a list sorted by start, what is cut off follows what is trained.
        assert item.start == len(seen[item.call]), f"conservation: {item} leaves a gap"
        seen[item.call] += calls[item.call].output_ids[item.start : item.stop]
    for number, found in enumerate(seen):
        sampled = calls[number].output_ids
        assert tuple(found) == sampled, (
            f"conservation: call {number} sampled {len(sampled)} tokens, "
            f"{len(found)} are targets or listed as untrained"
        )


def _check_calls(calls: Sequence[Call]) -> None:
    if not calls:
        raise ValueError("`calls` must hold at least one call, got none")
    for number, call in enumerate(calls):
        if not isinstance(call, Call):
            raise TypeError(f"`calls[{number}]` must be a Call, got {type(call).__name__}")


def _check_range(count: int, exclude: Mapping[int, str], max_tokens: int | None) -> None:
    for number in exclude:
        if number not in range(count):
            raise ValueError(f"`exclude` must name calls 0 to {count - 1}, got {number}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"`max_tokens` must be positive, got {max_tokens}")


def _advantages(
    calls: Sequence[Call], given: float | Sequence[float | Sequence[float]] | None
) -> list[list[float | None]]:
    """For each call one advantage for each output id."""
    if given is None:
        return [[None] * len(call.output_ids) for call in calls]
    if isinstance(given, numbers.Real):
        given = [float(given)] * len(calls)
    given = _values.listed("advantages", given)
    if len(given) != len(calls):
        raise ValueError(f"`advantages` has {len(given)} entries for {len(calls)} calls")
    result: list[list[float | None]] = []
    for number, (call, item) in enumerate(zip(calls, given, strict=True)):
        name = f"advantages[{number}]"
        count = len(call.output_ids)
        values = [item] * count if isinstance(item, numbers.Real) else _values.listed(name, item)
        if len(values) != count:
            raise ValueError(f"`{name}` has {len(values)} entries for {count} output ids")
        result.append([_values.number(name, value) for value in values])
    return result
