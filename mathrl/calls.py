"""One sampled call: what the sampler saw and what it returned, as ids.

A log-probability belongs to one id after one history of ids, not to a text that looks alike, so
that a call keeps both exactly as they were. What the sampler did not report stays None.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from mathrl import _values


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

    Source: derived in the book, conversations, chapter 1.

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
