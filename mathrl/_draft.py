"""A row while it grows."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Draft:
    """Columns in token space: entry i of each is about token i. A row shifts them, once."""

    tokens: list[int] = field(default_factory=list)
    calls: list[int | None] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    old_log_probs: list[float | None] = field(default_factory=list)
    advantages: list[float | None] = field(default_factory=list)

    def context(self, prompt: Sequence[int], known: Sequence[int | None]) -> None:
        """Grow to the whole of a prompt; `known` names the calls that sampled its first tokens."""
        start = len(self.tokens)
        more = len(prompt) - start
        self.tokens += prompt[start:]
        self.calls += known[start:]
        self.calls += [None] * (len(prompt) - len(self.calls))
        self.mask += [0] * more
        self.old_log_probs += [None] * more
        self.advantages += [None] * more

    def output(
        self,
        call: int,
        ids: Sequence[int],
        log_probs: Sequence[float | None] | None,
        advantages: Sequence[float | None],
        trained: bool,
    ) -> None:
        """Append what a call sampled."""
        nothing: list[float | None] = [None] * len(ids)
        self.tokens += ids
        self.calls += [call] * len(ids)
        self.mask += [int(trained)] * len(ids)
        self.old_log_probs += log_probs if trained and log_probs is not None else nothing
        self.advantages += advantages if trained else nothing

    def cut(
        self, length: int | None, placeholder_ids: Collection[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Drop what follows the first `length` tokens; yield lost targets as call, start, stop."""
        if length is None or len(self.tokens) <= length:
            return
        whole = {*placeholder_ids}
        while length and self.tokens[length - 1] in whole and self.tokens[length] in whole:
            length -= 1
        trained = [c for c, m in zip(self.calls, self.mask, strict=True) if m and c is not None]
        kept = Counter(trained[: sum(self.mask[:length])])
        for call, count in Counter(trained).items():
            if kept[call] < count:
                yield call, kept[call], count
        columns = (self.tokens, self.calls, self.mask, self.old_log_probs, self.advantages)
        for column in columns:
            del column[length:]
