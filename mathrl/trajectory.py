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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from mathrl import _values
from mathrl._draft import Draft
from mathrl._prefixes import PrefixTree, Shared
from mathrl.splits import Decoder, Split, diagnose

POLICY, CONTEXT = "policy", "context"

CUT = "past max_tokens"
EMPTY = "empty output"


class Sampling(NamedTuple):
    """How a call was sampled, as far as it is known; None where it is not.

    Log-probabilities are `"raw"` if they are those of the full softmax at temperature 1, and
    `"processed"` if they are those of the distribution that was sampled from, after temperature
    and truncation. The two differ: top-p that keeps a mass of 0.9 adds -log 0.9 = 0.105 to each.
    """

    temperature: float | None = None
    top_p: float | None = None
    log_probs: Literal["raw", "processed"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One sampled call, exactly as the sampler saw and returned it.

    Args:
        prompt_ids: the ids of the whole prompt, at least one. Lists, arrays and tensors of
            integers are kept as tuples.
        output_ids: the sampled ids, the stop token included if it was sampled.
        log_probs: for each output id its log-probability in nats, or None where the sampler gave
            none; None for all of them.
        finish_reason: `"stop"`, `"length"` or another word of the sampler.
        sampling: settings.
        simulated: the ids were made from text, not recorded.

    Raises:
        TypeError: ids are not integers, or log-probabilities not numbers.
        ValueError: the prompt is empty, an id is negative, a log-probability is positive, NaN or
            infinite, there is not one for each output id, or an output that ended with `"stop"`
            is empty.

    Source: derived in the book, chapter 9.

    >>> Call(prompt_ids=[1], output_ids=[2, 3], log_probs=[-0.2, -0.4]).token_ids
    (1, 2, 3)
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    log_probs: Sequence[float | None] | None = None
    finish_reason: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    simulated: bool = False

    def __post_init__(self) -> None:
        """Check, and keep tuples."""
        object.__setattr__(self, "prompt_ids", _values.ids("prompt_ids", self.prompt_ids))
        object.__setattr__(self, "output_ids", _values.ids("output_ids", self.output_ids))
        if not self.prompt_ids:
            raise ValueError("`prompt_ids` is empty, and a first output id needs one before it")
        if self.finish_reason == "stop" and not self.output_ids:
            raise ValueError(
                "`output_ids` is empty, but a call that stopped sampled its stop token"
            )
        if self.log_probs is not None:
            given = _log_probs(self.log_probs, len(self.output_ids))
            object.__setattr__(self, "log_probs", given)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output."""
        return (*self.prompt_ids, *self.output_ids)

    def capped(self, max_output: int) -> "Call":
        """The call as it would have been had sampling ended after `max_output` tokens.

        Ids, log-probabilities and finish reason change together.

        >>> call = Call(prompt_ids=[1], output_ids=[2, 3, 4, 5], finish_reason="stop")
        >>> capped = call.capped(2)
        >>> capped.output_ids, capped.finish_reason
        ((2, 3), 'length')
        """
        if max_output < 0:
            raise ValueError(f"`max_output` must not be negative, got {max_output}")
        if len(self.output_ids) <= max_output:
            return self
        log_probs = None if self.log_probs is None else self.log_probs[:max_output]
        output_ids = self.output_ids[:max_output]
        return replace(self, output_ids=output_ids, log_probs=log_probs, finish_reason="length")


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

    Source: derived in the book, chapter 9.

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

    Source: derived in the book, chapters 9 and 10.

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
    home: list[Draft] = []  # of each call, the draft that holds it
    for number, call in enumerate(calls):
        ids = call.token_ids
        shared = tree.add(ids, len(call.prompt_ids))
        nearest = None if shared.nearest is None else home[shared.nearest]
        if shared.continues is not None:
            draft = home[shared.continues]
        else:
            draft = Draft()
            drafts.append(draft)
            if nearest is not None:
                splits.append(_split(number, call, shared, nearest, calls, decode))
        home.append(draft)
        # Tokens that were sampled in this very context keep their author; they are not trained.
        known = nearest.calls[: min(shared.length, len(call.prompt_ids))] if nearest else []
        draft.context(call.prompt_ids, known)
        trained = number not in excluded
        draft.output(number, call.output_ids, call.log_probs, per_call[number], trained)
    untrained = [
        Untrained(number, 0, len(call.output_ids), excluded.get(number, EMPTY))
        for number, call in enumerate(calls)
        if number in excluded or not call.output_ids
    ]
    for draft in drafts:
        untrained += [Untrained(*lost, CUT) for lost in draft.cut(max_tokens, placeholder_ids)]
    rows = tuple(_row(draft, calls) for draft in drafts if any(draft.mask))
    _assert_conserved(calls, rows, untrained)
    return Built(rows, tuple(splits), tuple(sorted(untrained)))


def _row(draft: Draft, calls: Sequence[Call]) -> Row:
    """The shift: the columns of target t are those of token t + 1."""
    trained = {c for c, m in zip(draft.calls, draft.mask, strict=True) if m and c is not None}
    return Row(
        tokens=tuple(draft.tokens),
        mask=tuple(draft.mask[1:]),
        authors=tuple(CONTEXT if call is None else POLICY for call in draft.calls[1:]),
        calls=tuple(draft.calls[1:]),
        old_log_probs=tuple(draft.old_log_probs[1:]),
        advantages=tuple(draft.advantages[1:]),
        weights=tuple(float(m) for m in draft.mask[1:]),
        settings={call: calls[call].sampling for call in sorted(trained)},
    )


def _split(
    number: int,
    call: Call,
    shared: Shared,
    nearest: Draft,
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


def _log_probs(values: Any, count: int) -> tuple[float | None, ...]:
    given = _values.listed("log_probs", values)
    if len(given) != count:
        raise ValueError(f"`log_probs` has {len(given)} entries for {count} output ids")
    result = []
    for at, value in enumerate(given):
        name = f"log_probs[{at}]"
        number = None if value is None else _values.number(name, value)
        if number is not None and number > 0:
            raise ValueError(f"`{name}` must not be positive, got {number}")
        result.append(number)
    return tuple(result)
