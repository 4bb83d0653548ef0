"""The reward mixer of chapter 13: its tables at build, before a reader moves anything."""

import numpy as np
from numpy.typing import NDArray

from mathrl.mixture import MixedReward, bootstrap_scales

MEMBERS = 8


def shown(value: float | None, digits: int = 4) -> str:
    """A number as the script shows it, too: a true minus sign, none before zeros, a dash for None.

    >>> shown(-0.5), shown(-0.00001), shown(None)
    ('−0.5000', '0.0000', '–')
    """
    if value is None:
        return "\N{EN DASH}"
    text = f"{abs(value):.{digits}f}"
    return "\N{MINUS SIGN}" * (value < 0 and float(text) != 0) + text


def _read(name: str, text: str, count: int) -> NDArray[np.float64]:
    values = np.array([float(part) for part in text.split(",")])
    if len(values) != count or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"`{name}` must list {count} numbers from 0 to 1, got {text}")
    return values


def mixer(alpha: str, solve: str, order: str, means: str) -> str:
    """Scales, shares and advantages of eight outcomes, with group normalisation."""
    share = float(_read("alpha", alpha, 1)[0])
    solved, ordered = _read("solve", solve, MEMBERS), _read("order", order, MEMBERS)
    mean = _read("means", means, 2)
    mix = MixedReward(share, bootstrap_scales(share, *mean))
    rewards, advantages, found = mix(solved[None], ordered[None])
    parts = mix.parts(solved[None], ordered[None])
    scales = [
        ("solve <i>S</i>", mean[0], share, mix.scale.solve, found.std_solve, found.share_solve),
        ("order <i>O</i>", mean[1], 1 - share, mix.scale.order, found.std_order, found.share_order),
    ]
    first = _table(
        "The two rewards: mean of the frozen model, nominal share, scale; deviation within this "
        "group and effective share of its advantages.",
        ["reward", "mean", "nominal", "scale", "deviation", "effective"],
        [_row(name, f"{at:g}", *(shown(value) for value in rest)) for name, at, *rest in scales],
    )
    samples = zip(solved, ordered, rewards[0], parts[0][0], parts[1][0], advantages[0], strict=True)
    second = _table(
        "The samples: mixed reward <i>r</i>, the part of each reward in the advantage, and the "
        "advantage <i>A</i>.",
        ["<i>i</i>", "<i>S</i>", "<i>O</i>", "<i>r</i>", "of <i>S</i>", "of <i>O</i>", "<i>A</i>"],
        [
            _row(str(i), f"{s:g}", f"{o:g}", *(shown(float(value), 3) for value in rest))
            for i, (s, o, *rest) in enumerate(samples, 1)
        ],
    )
    return first + second


def _row(head: str, *cells: str) -> str:
    inner = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{head}</th>{inner}</tr>'


def _table(caption: str, columns: list[str], rows: list[str]) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        f'<table class="numbers"><caption>{caption}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
