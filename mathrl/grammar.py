"""Which tokens may come at each step of a response, and the tree that all responses form.

A grammar is a finite set of responses, stated as the tokens allowed at step 0, 1, …. A response
ends with the token `end`, or after the last step. Responses that begin alike share a prefix, so
together they are a tree: a policy over them needs one distribution for each prefix at which there
is a choice, and none where a single token is allowed, whose log-probability is 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mathrl import arithmetic

MOST_RESPONSES = 10_000
"""The largest grammar whose responses are listed."""


@dataclass(frozen=True, init=False)
class Grammar:
    """The tokens allowed at each step, and the token that ends a response before the last step.

    >>> Grammar([range(2), (7, 8)]).responses()
    [[0, 7], [0, 8], [1, 7], [1, 8]]
    >>> Grammar([(5, 9), (5, 9)], end=9).responses()
    [[5, 5], [5, 9], [9]]
    """

    steps: tuple[tuple[int, ...], ...]
    end: int | None

    def __init__(self, steps: Iterable[Iterable[int]], end: int | None = None) -> None:
        """Copy and check the steps.

        Args:
            steps: for each step, the distinct token ids that are allowed; kept as tuples.
            end: the token that ends a response wherever it comes, or None if every response goes
                through all steps.

        Raises:
            TypeError: a token is not an int.
            ValueError: there is no step, a step allows nothing, a token is negative or repeated,
                `end` is allowed nowhere, or a step is never reached because the one before ends.
        """
        object.__setattr__(self, "steps", tuple(tuple(step) for step in steps))
        object.__setattr__(self, "end", end)
        _check(self)

    @property
    def length(self) -> int:
        """The number of tokens of the longest response."""
        return len(self.steps)

    @property
    def size(self) -> int:
        """The number of responses.

        >>> Grammar([range(10), range(10), (13,)], end=13).size
        100
        """
        ended, live = 0, 1
        for step in self.steps:
            ended, live = ended + live * (self.end in step), live * len(self._lasting(step))
        return ended + live

    @property
    def last_choice(self) -> int:
        """The last step at which more than one token is allowed; 0 if there is none."""
        return max((t for t, step in enumerate(self.steps) if len(step) > 1), default=0)

    def responses(self) -> list[list[int]]:
        """Every response, as long as it is, in the order of the steps.

        Raises:
            ValueError: there are more than `MOST_RESPONSES`.
        """
        self._check_size()
        return [list(response) for response in self._below(())]

    def prefixes(self) -> list[tuple[int, ...]]:
        """The beginnings of responses after which there is still a choice, shorter ones first.

        These are the nodes of the tree that a policy has to be evaluated at.

        Raises:
            ValueError: there are more than `MOST_RESPONSES` responses.

        >>> Grammar([range(3), range(10), (13,)], end=13).prefixes()
        [(), (0,), (1,), (2,)]
        """
        self._check_size()
        level: list[tuple[int, ...]] = [()]
        nodes = list(level)
        for step in self.steps[: self.last_choice]:
            level = [(*prefix, token) for prefix in level for token in self._lasting(step)]
            nodes += level
        return nodes

    def _lasting(self, step: tuple[int, ...]) -> list[int]:
        return [token for token in step if token != self.end]

    def _below(self, prefix: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        if len(prefix) == self.length or (prefix and prefix[-1] == self.end):
            yield prefix
            return
        for token in self.steps[len(prefix)]:
            yield from self._below((*prefix, token))

    def _check_size(self) -> None:
        if self.size > MOST_RESPONSES:
            raise ValueError(f"{self.size} responses are too many, the most is {MOST_RESPONSES}")


def _check(grammar: Grammar) -> None:
    steps, end = grammar.steps, grammar.end
    if not steps:
        raise ValueError("`steps` must hold at least one step")
    if end is not None and type(end) is not int:
        raise TypeError(f"`end` must be an int or None, got {end!r}")
    for t, step in enumerate(steps):
        if not step:
            raise ValueError(f"`steps[{t}]` must allow at least one token")
        for token in step:
            if type(token) is not int:
                raise TypeError(f"`steps[{t}]` must hold ints, got {token!r}")
        if min(step) < 0 or len(set(step)) < len(step):
            raise ValueError(f"`steps[{t}]` must hold distinct tokens from 0, got {step}")
        if step == (end,) and t < len(steps) - 1:
            raise ValueError(f"`steps[{t + 1}]` cannot be reached: `steps[{t}]` always ends")
    if end is not None and not any(end in step for step in steps):
        raise ValueError(f"`end` must be allowed at some step, got {end}")


ARITHMETIC = Grammar([arithmetic.DIGITS, arithmetic.DIGITS, (arithmetic.EOS,)], arithmetic.EOS)
"""The grammar of the contract: two digits, then the stop token; 100 responses."""
