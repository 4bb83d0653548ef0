"""Mixing two rewards, and what the mixture does to the advantages.

A mixture is `r = κ_S S + κ_O O`, of a solve reward S and an order reward O with two `Scales`
(κ_S, κ_O). Advantages are taken in a group of G samples of one prompt, and what the scales mean
depends on the normalisation:

| `norm` | advantage | what the scales decide |
|---|---|---|
| `"group"` | `(r - mean) / std`, both of the group | a ratio; nothing where S or O is constant |
| `"batch"` | `r - mean` of the group, over the `std` of the batch | a linear mixture |
| `"none"` | `r - mean` of the group | a linear mixture |
| `"decoupled"` | `α z(S) + (1 - α) z(O)`, each `z` as in `"group"` | nothing: α does |

numpy in float64, without torch. Rules: rewards have shape (P, G), P prompts with G samples each;
nothing is broadcast; TypeError if an argument does not hold real numbers, ValueError if shapes
disagree or a reward is NaN or infinite. Derived in the book, chapter 13. The rewards themselves
are in `mathrl.reward`.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mathrl import _values

Array = NDArray[np.float64]
Norm = Literal["group", "batch", "none", "decoupled"]
ZeroVariance = Literal["keep", "drop", "share"]

_MOST = 1e100  # rewards up to it have squares that are finite
_ROUNDING = 1e-12  # of what two parts differ by: what is left of it when they cancel


class Scales(NamedTuple):
    """The factors of a mixture `r = solve · S + order · O`: not negative, and not both 0."""

    solve: float
    order: float

    @property
    def raw_alpha(self) -> float:
        """`α' = κ_S / (κ_S + κ_O)`: with it `α' S + (1 - α') O` has the same ratio of scales."""
        return self.solve / (self.solve + self.order)


def bootstrap_scales(alpha: float, mean_solve: float, mean_order: float) -> Scales:
    """Scales that make α the share of the solve reward in the mean reward of a frozen model.

    `κ_S = α / S̄` and `κ_O = (1 - α) / O̅`, so that `κ_S S̄ + κ_O O̅ = α + (1 - α) = 1`. The means are
    measured once, with the supervised model on a validation set. At α = 1 or α = 0 the unused
    scale is exactly 0, whatever its mean.

    Args:
        alpha: the nominal share of the solve reward, in [0, 1].
        mean_solve: mean solve reward.
        mean_order: mean order reward, with the options used in training.

    Returns:
        The two scales.

    Raises:
        TypeError: an argument is not a number.
        ValueError: `alpha` is outside [0, 1], a mean is negative, or a reward with a positive
            share has mean 0, so that no factor gives it that share.

    Source: Gupta and Gupta (2026).

    >>> a, b = bootstrap_scales(0.99, mean_solve=0.279, mean_order=0.365)
    >>> round(a, 3), round(b, 4)
    (3.548, 0.0274)
    """
    alpha = _share("alpha", alpha)
    scales = []
    for name, share, given in (
        ("mean_solve", alpha, mean_solve),
        ("mean_order", 1 - alpha, mean_order),
    ):
        mean = _values.number(name, given)
        if mean < 0:
            raise ValueError(f"`{name}` must not be negative, got {mean}")
        if share and mean == 0:
            raise ValueError(
                f"`{name}` must be positive when its share is {share:g}, got 0: no scale gives a "
                "reward that was never earned a share; train the supervised model longer, measure "
                "on more samples, or set its share to 0"
            )
        scales.append(share / mean if share else 0.0)
    return Scales(*scales)


class Diagnosis(NamedTuple):
    """What a mixture did to one batch. Deviations and shares are of the rewards as given.

    `std_*`: mean over groups of the deviation within the group, before scaling. `correlation`:
    of the two within groups in which both vary, pooled; None if there is none.
    `zero_std_*`: share of groups in which the reward does not vary; `zero_std`: in which no
    sample has an advantage. `mean_share_solve`: `κ_S S̄ / (κ_S S̄ + κ_O O̅)`, which bootstrapping
    sets to α before training; None if both are 0. `share_solve`, `share_order`: the effective
    shares, root mean squares of the two parts of the advantages over their sum; None without any
    advantage. `zero_std_energy`: share of the squared advantages that comes from groups whose
    solve reward does not vary; None likewise.
    """

    std_solve: float
    std_order: float
    correlation: float | None
    zero_std_solve: float
    zero_std_order: float
    zero_std: float
    mean_share_solve: float | None
    share_solve: float | None
    share_order: float | None
    zero_std_energy: float | None


class Mixed(NamedTuple):
    """Mixed rewards and their advantages, shape (P, G) each, and the diagnosis of the batch."""

    rewards: Array
    advantages: Array
    diagnosis: Diagnosis


@dataclass(frozen=True)
class MixedReward:
    """From solve and order rewards to advantages, for one way of mixing.

    Args:
        alpha: nominal share of the solve reward, in [0, 1].
        scale: the scales of the mixture, from `bootstrap_scales`. A scale is 0 exactly
            if its share is.
        norm: `"group"`, `"batch"`, `"none"` or `"decoupled"`; see the module.
        zero_variance: what to do in a group where the solve or the order reward is constant.
            `"keep"` does what the formula says; the other reward then fills the group's whole
            deviation under `norm="group"`. `"drop"` gives advantages of 0 where the solve reward
            is constant, unless its share is 0. `"share"`, for `norm="group"` only, multiplies the
            group's advantages with the nominal share of the reward that varies.
        ddof: 0 or 1, of all standard deviations; 1 as in `torch.std`.
        eps: added to the standard deviation; 0 by default. TRL adds 1e-4.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: a value is not allowed, or a scale is 0 and its share is not, or
            the other way round.

    Source: `"group"`, `"batch"` and `"none"` are the `scale_rewards` of TRL (the means are always
    those of groups); `"decoupled"` is its `normalize_then_sum`, GDPO without its batch step
    (arXiv:2601.05242).

    >>> mix = MixedReward(0.9, Scales(1.0, 1.0))
    >>> mix([[0, 0, 0, 0]], [[0.4, 0.5, 0.4, 0.5]]).advantages.round(3)
    array([[-0.866,  0.866, -0.866,  0.866]])
    """

    alpha: float
    scale: Scales
    norm: Norm = "group"
    zero_variance: ZeroVariance = "keep"
    ddof: int = 1
    eps: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        share = _share("alpha", self.alpha)
        if not isinstance(self.scale, Scales):
            raise TypeError(f"`scale` must be a Scales, got {type(self.scale).__name__}")
        for name, part, value in zip(Scales._fields, (share, 1 - share), self.scale, strict=True):
            if _values.number(f"scale.{name}", value) < 0:
                raise ValueError(f"`scale.{name}` must not be negative, got {value}")
            if (part == 0) != (value == 0):
                expected = "0" if part == 0 else "positive"
                raise ValueError(
                    f"`scale.{name}` must be {expected} at `alpha` = {share:g}, got {value}"
                )
        _choice("norm", self.norm, Norm)
        _choice("zero_variance", self.zero_variance, ZeroVariance)
        if self.zero_variance == "share" and self.norm != "group":
            raise ValueError(
                f'`zero_variance` must be "keep" or "drop" for `norm` = "{self.norm}", got "share"'
            )
        if self.ddof not in (0, 1):
            raise ValueError(f"`ddof` must be 0 or 1, got {self.ddof}")
        if _values.number("eps", self.eps) < 0:
            raise ValueError(f"`eps` must not be negative, got {self.eps}")

    def __call__(self, solve: ArrayLike, order: ArrayLike) -> Mixed:
        """Mix the rewards of P prompts with G samples each, arrays of shape (P, G)."""
        solved, ordered = _rewards(solve, order)
        parts = self.parts(solved, ordered)
        diagnosis = self._diagnose(solved, ordered, parts)
        return Mixed(self._mix(solved, ordered), parts[0] + parts[1], diagnosis)

    def parts(self, solve: ArrayLike, order: ArrayLike) -> tuple[Array, Array]:
        """What each reward contributes to the advantages: two arrays (P, G) that add up to them."""
        solved, ordered = _rewards(solve, order)
        own = _center(solved), _center(ordered)
        weights = (self.alpha, 1 - self.alpha) if self.norm == "decoupled" else self.scale
        scaled = weights[0] * own[0], weights[1] * own[1]
        if self.norm == "decoupled":
            divisors = self._deviation(own[0]), self._deviation(own[1])
        else:
            divisors = (self._divisor(solved, ordered, *scaled),) * 2
        factor = self._factor(*own)
        return scaled[0] / divisors[0] * factor, scaled[1] / divisors[1] * factor

    def _divisor(self, solve: Array, order: Array, *scaled: Array) -> Array:
        """What the scaled and centred rewards of each group are divided by; inf for nothing."""
        if self.norm == "group":
            # Where the two parts cancel, what remains is rounding, and not to be divided by.
            reach = np.abs(scaled[0]) + np.abs(scaled[1])
            return self._deviation(scaled[0] + scaled[1], reach.max(1, keepdims=True))
        if self.norm == "batch":
            every = _center(self._mix(solve, order).reshape(1, -1))
            return np.repeat(self._deviation(every), len(solve), axis=0)
        return np.ones((len(solve), 1))

    def _deviation(self, centered: Array, reach: Array | float = 0.0) -> Array:
        """`std + eps` of each row; inf where it is constant, so that the quotient is exactly 0."""
        constant = _width(centered) <= _ROUNDING * reach
        return np.where(constant, np.inf, _std(centered, self.ddof) + self.eps)

    def _factor(self, solve: Array, order: Array) -> Array:
        """The factor of each group under `zero_variance`, from centred rewards, shape (P, 1)."""
        if self.zero_variance == "keep":
            return np.ones((len(solve), 1))
        flat_solve, flat_order = _width(solve) == 0, _width(order) == 0
        if self.zero_variance == "drop":
            return np.where(flat_solve & (self.alpha > 0), 0.0, 1.0)
        return np.where(flat_solve, 1 - self.alpha, np.where(flat_order, self.alpha, 1.0))

    def _mix(self, solve: Array, order: Array) -> Array:
        return self.scale.solve * solve + self.scale.order * order

    def _diagnose(self, solve: Array, order: Array, parts: tuple[Array, Array]) -> Diagnosis:
        own = _center(solve), _center(order)
        flat_solve, flat_order = _width(own[0])[:, 0] == 0, _width(own[1])[:, 0] == 0
        x, y = (part[~flat_solve & ~flat_order] for part in own)
        means = self.scale.solve * solve.mean(), self.scale.order * order.mean()
        advantages = parts[0] + parts[1]
        energy = np.square(advantages).sum(1)
        size_solve, size_order = (float(np.sqrt(np.square(part).mean())) for part in parts)
        return Diagnosis(
            std_solve=float(_std(own[0], self.ddof).mean()),
            std_order=float(_std(own[1], self.ddof).mean()),
            correlation=_ratio((x * y).sum(), np.sqrt(np.square(x).sum() * np.square(y).sum())),
            zero_std_solve=float(flat_solve.mean()),
            zero_std_order=float(flat_order.mean()),
            zero_std=float((advantages == 0).all(1).mean()),
            mean_share_solve=_ratio(means[0], means[0] + means[1]),
            share_solve=_ratio(size_solve, size_solve + size_order),
            share_order=_ratio(size_order, size_solve + size_order),
            zero_std_energy=_ratio(energy[flat_solve].sum(), energy.sum()),
        )


def _center(rewards: Array) -> Array:
    """Rewards minus the mean of their row; equal rewards give exactly 0."""
    shifted = rewards - rewards.min(1, keepdims=True)
    return shifted - shifted.mean(1, keepdims=True)


def _width(centered: Array) -> Array:
    return np.ptp(centered, axis=1, keepdims=True)


def _std(centered: Array, ddof: int) -> Array:
    # Measured in ranges, the squares cannot underflow.
    unit = np.where(_width(centered) > 0, _width(centered), 1.0)
    squares = np.square(centered / unit).sum(1, keepdims=True)
    return unit * np.sqrt(squares / max(centered.shape[1] - ddof, 1))


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _rewards(solve: ArrayLike, order: ArrayLike) -> tuple[Array, Array]:
    first, second = _numbers("solve", solve), _numbers("order", order)
    if first.shape != second.shape:
        raise ValueError(
            f"`order` has shape {second.shape}, expected {first.shape}, the shape of `solve`"
        )
    return first, second


def _numbers(name: str, values: ArrayLike) -> Array:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"`{name}` must be one array of numbers: {error}") from None
    if array.dtype.kind not in "iuf":
        raise TypeError(f"`{name}` must hold real numbers, got {array.dtype}")
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"`{name}` must have shape (P, G), both at least 1, got {array.shape}")
    bad = ~(np.abs(array) <= _MOST)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"`{name}` must be finite, at most {_MOST:g} in size, got {array[at]} at index {at}"
        )
    return array.astype(np.float64)


def _share(name: str, value: Any) -> float:
    share = _values.number(name, value)
    if not 0 <= share <= 1:
        raise ValueError(f"`{name}` must lie in [0, 1], got {share}")
    return share


def _choice(name: str, value: Any, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"`{name}` must be one of {', '.join(get_args(allowed))}, got {value!r}")
