"""The faults that `mathrl.audit_batch` names, each with what it means."""

from collections.abc import Iterable
from dataclasses import dataclass

KINDS = {
    # Shapes and padding
    "lengths differ": "a tensor has another number of rows, or more columns than there are tokens",
    "mask not binary": "a mask holds other values than 0 and 1",
    "hole in the attention mask": "the attention mask hides tokens between others",
    "attention mask on the wrong side": "the attention mask covers the padding of its row",
    "attention mask hides tokens": "tokens of the row are taken for padding",
    "attention mask covers padding": "padding is taken for tokens of the row",
    "stop token taken for padding": "a token is hidden because its id is that of the padding",
    "first token trained": "the first token is trained, which nothing predicts",
    "padding trained": "a target is trained that is padding, or that padding predicts",
    "target crosses a boundary": "the last token of one packed sequence predicts the next one",
    "labels shifted twice": "the labels are ahead of the tokens they are compared with",
    "labels differ": "a label is another id than the token it stands for",
    # Ids
    "rows in another order": "the tokens are those of another row",
    "second start token": "the start token stands twice, by template and by tokenizer",
    "tokens dropped": "a run of tokens that was there when sampling is missing",
    "tokens inserted": "a run of tokens stands there that was not there when sampling",
    "ids differ": "other ids than those that were sampled, as after decoding and encoding",
    # Mask
    "nothing trained": "no target of the whole batch is trained",
    "row not trained": "no target of a row is trained",
    "mask one late": "the mask of the inputs is used for the targets: off by one",
    "mask one early": "the mask was shifted twice",
    "attention mask used as loss mask": "every token is trained, whoever wrote it",
    "mask inverted": "what is trained should not be, and the reverse",
    "history trained twice": "a sampled token is trained in a row where it is history",
    "prompt trained": "tokens before the first output are trained",
    "tool tokens trained": "tokens between two outputs are trained",
    "header trained": "template tokens just before an output are trained",
    "mask runs past an output": "tokens just after an output are trained",
    "stop token not trained": "the last token of an output is left out",
    "first sampled token not trained": "the first token of an output is left out",
    "call not trained": "a whole output is left out",
    "sampled tokens not trained": "tokens inside an output are left out",
    # Values
    "not finite": "a trained target has a NaN or infinite value",
    "filler log-prob": "a log-probability of exactly 0 stands where the recorded one should",
    "invented log-prob": "a log-probability stands where none was recorded",
    "old log-probs off by one": "each is at the target next to its own",
    "old log-probs on the wrong side": "they are aligned to the other side of the padding",
    "old log-probs without gaps": "they are laid end to end, although context lies between them",
    "old log-probs of another row": "they belong to another row",
    "old log-probs negated": "negative log-likelihoods are used as log-probabilities",
    "probabilities, not log-probs": "the logarithm was not taken",
    "another base of logarithm": "the logarithm is of base 2 or 10, not natural",
    "old log-probs off by a constant": "they are of a distribution normalised over other tokens",
    "old log-probs differ": "they are not those that were recorded",
    "log-probs off by one": "the trainer's are at the target next to the old ones",
    "ratio not 1": "the policy has not changed, and the ratio to the old one is not 1",
    "ratio off by a constant": "it is not 1, by one factor everywhere: see the sampling settings",
    "advantages off by one": "each is at the target next to its own",
    "advantages of another row": "they belong to another row",
    "advantages negated": "their sign is wrong",
    "advantages differ": "they are not those that were given",
    # Loss
    "masked values leak": "the loss changes with a value that is not trained",
    "denominator counts context": "the loss changes with what is attended to but not trained",
    "denominator counts padding": "the loss changes with the width of the padding",
    "denominator counts padding rows": "the loss changes with rows of padding",
    "micro-batches averaged": "the loss of micro-batches is not the loss of their batch",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its name, the row of the batch, and the positions of the targets it is at.

    `row` is None where the whole batch is meant. Position t is the target `input_ids[row, t + 1]`.

    >>> print(Fault("padding trained", 0, (5, 6)))
    padding trained, row 0, targets 5 to 6: a target is trained that is padding, or that padding predicts
    """  # noqa: E501

    kind: str
    row: int | None = None
    targets: tuple[int, ...] = ()
    detail: str = ""

    def __post_init__(self) -> None:
        """Only faults that have a name."""
        if self.kind not in KINDS:
            raise ValueError(f"`kind` must be one of `KINDS`, got {self.kind!r}")

    def __str__(self) -> str:
        """One line for a reader."""
        where = "" if self.row is None else f", row {self.row}"
        if self.targets:
            where += f", {_spans(self.targets)}"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.kind}{where}: {KINDS[self.kind]}{detail}"


def _spans(targets: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for t in sorted(targets):
        if spans and t == spans[-1][1] + 1:
            spans[-1][1] = t
        else:
            spans.append([t, t])
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:8]]
    more = f" and {len(spans) - 8} runs more" if len(spans) > 8 else ""
    return f"target{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} " + (
        ", ".join(shown) + more
    )
