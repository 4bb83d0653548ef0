"""Settings of the training loops: plain values that go into a JSON file and come back."""

import math
from dataclasses import asdict, dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mathrl.objective import Mode


@dataclass(frozen=True)
class Config:
    """What both loops need: AdamW, clipping, aggregation, a seed.

    Args:
        steps: the number of batches.
        learning_rate: of AdamW.
        betas: of AdamW.
        weight_decay: of AdamW.
        max_grad_norm: a longer gradient is scaled down to this norm; None leaves it.
        aggregation: how losses per token become one number, a mode of `objective.aggregate`.
        seed: of all that is random.

    Raises:
        TypeError: a setting is of another type than stated, NaN or infinite.
        ValueError: a setting is unknown or out of range, or two contradict each other.
    """

    steps: int = 20
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    aggregation: Mode = "sequence_mean_token_sum"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every setting."""
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON makes a list of it
        for name, kind in get_type_hints(type(self)).items():
            value, choice = getattr(self, name), get_origin(kind) is Literal
            if not _fits(value, kind):
                expected = f"one of {get_args(kind)}" if choice else getattr(kind, "__name__", kind)
                error = ValueError if choice else TypeError
                raise error(f"`{name}` must be {expected}, got {value!r}")
        for name in ("steps", "learning_rate", "weight_decay"):
            self._refuse(getattr(self, name) < 0, f"`{name}` must not be negative")
        self._refuse(not all(0 <= b < 1 for b in self.betas), "`betas` must lie in [0, 1)")
        self._positive("max_grad_norm")

    def to_dict(self) -> dict[str, Any]:
        """All settings, ready for JSON; `type(config)(**config.to_dict())` gives them back."""
        return asdict(self)

    def _positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            self._refuse(value is not None and value <= 0, f"`{name}` must be positive")

    def _refuse(self, wrong: bool, words: str) -> None:
        if wrong:
            raise ValueError(f"{words}, got {self}")


@dataclass(frozen=True)
class SupervisedConfig(Config):
    """Settings of `train.supervise`; the defaults are those of the bench.

    Args:
        batch_size: demonstrations of an update, every one once before any twice; None takes all.

    >>> SupervisedConfig(steps=5).to_dict()["steps"]
    5
    """

    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Check every setting."""
        super().__post_init__()
        self._positive("batch_size")
        self._refuse(self.aggregation == "constant", '`aggregation` must not be "constant" here')


@dataclass(frozen=True)
class ReinforceConfig(Config):
    """Settings of `train.reinforce`; the defaults are those of the bench.

    Args:
        group_size: G, samples of each prompt.
        prompts_per_step: prompts of a batch, drawn without repetition; None takes all.
        epochs: updates on one batch. From the second on, the policy is not the one that sampled,
            and an objective with a ratio is needed to account for that.
        temperature: of the policy that samples and is trained.
        baseline: a function of `mathrl.baseline`, or "none".
        ddof: of the standardised baselines.
        eps: of the standardised baselines.
        objective: a function of `mathrl.objective`.
        clip_low: of the objective; None takes the default of the objective.
        clip_high: of the objective; None takes the default of the objective.
        ceiling: of "dual_clip"; None takes its default.
        constant: the denominator of aggregation "constant", for the whole batch.
        beta: coefficient of the divergence from the reference.
        kl: "k1", "k2" or "k3", estimates from the sampled tokens; "exact", the divergence between
            the distributions over whole responses, which needs a tree.
        kl_placement: "loss": per token, aggregated with it. "reward": summed over a response and
            subtracted from its reward.
        kl_weighted: multiply an estimate in the loss with the importance ratio.
        entropy: coefficient of a bonus, the exact entropy of whole responses, which needs a tree.
        entropy_anneal: let that coefficient fall linearly, to 0 after the last step.

    >>> ReinforceConfig(objective="gspo", aggregation="sequence_mean_token_mean").group_size
    8
    """

    steps: int = 300
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    max_grad_norm: float | None = 1.0
    group_size: int = 8
    prompts_per_step: int | None = None
    epochs: int = 1
    temperature: float = 1.0
    baseline: Literal[
        "none", "group_mean", "leave_one_out", "standardized", "batch_standardized", "optimal"
    ] = "leave_one_out"
    ddof: int = 0
    eps: float = 0.0
    objective: Literal["reinforce", "ppo_clip", "dual_clip", "cispo", "gspo"] = "reinforce"
    clip_low: float | None = None
    clip_high: float | None = None
    ceiling: float | None = None
    constant: float | None = None
    beta: float = 0.0
    kl: Literal["exact", "k1", "k2", "k3"] = "exact"
    kl_placement: Literal["loss", "reward"] = "loss"
    kl_weighted: bool = False
    entropy: float = 0.0
    entropy_anneal: bool = False

    def __post_init__(self) -> None:
        """Check every setting."""
        super().__post_init__()
        self._positive("group_size", "epochs", "prompts_per_step", "temperature", "constant")
        scaled = self.baseline.endswith("standardized")
        self._refuse((self.ddof, self.eps) != (0, 0) and not scaled, "`ddof` and `eps` need a std")
        clipped = (self.clip_low, self.clip_high) != (None, None)
        self._refuse(clipped and self.objective == "reinforce", "nothing is clipped by `objective`")
        ceiling = self.ceiling is not None
        self._refuse(ceiling and self.objective != "dual_clip", "`ceiling` needs dual_clip")
        constant = self.aggregation == "constant"
        self._refuse(constant == (self.constant is None), '`constant` goes with "constant"')
        sampled = self.kl != "exact"
        self._refuse(self.kl_placement == "reward" and not sampled, '`kl` "exact" is for the loss')
        weighted = sampled and self.kl_placement == "loss"
        self._refuse(self.kl_weighted and not weighted, "`kl_weighted` needs estimates in the loss")


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of an annotated type; True is no int, and NaN no float."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in inner
    if origin is UnionType:
        return any(_fits(value, option) for option in inner)
    if origin is tuple:
        return (
            isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
        )
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return value is None if kind is NoneType else type(value) is kind
