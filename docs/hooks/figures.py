"""Writes the table inside each figure at build, so that the page reads without JavaScript.

A figure is a custom element whose script enhances the table that stands in it. What is written here
comes from `mathrl`. Where a reader moves a slider, the script computes; `tests/test_figures.py`
holds what it shows against `mathrl`.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from mkdocs.structure.files import File, Files
from numpy.typing import NDArray

from mathrl import arithmetic, baseline, exact, kl
from mixer import mixer
from replay import replay, replay_data

_ELEMENT = re.compile(r"<(mathrl-[\w-]+)((?: [\w-]+=\"[^\"]*\")*)></\1>")
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')


def responses(task: str) -> str:
    """The hundred responses to a task: rows are intermediate digits, columns final digits."""
    a, b = (int(digit) for digit in task.split(","))
    every = arithmetic.responses()
    cells = []
    for response in every:
        verdict = arithmetic.verify((a, b), response)
        cells.append(
            f'<td data-reason="{verdict["reason"]}">{response[0]}&hairsp;{response[1]}</td>'
        )
    rows = [
        f'<tr><th scope="row">{u}</th>{"".join(cells[10 * u : 10 * u + 10])}</tr>'
        for u in range(10)
    ]
    head = "".join(f'<th scope="col">{v}</th>' for v in range(10))
    return (
        f"<table><caption>The {len(every)} responses to {a} + {b}. Rows: intermediate u; columns: "
        f"final v. Each has probability {1 / len(every):.2f} under the uniform policy.</caption>"
        f'<thead><tr><th scope="col"><span>u, v</span></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def responses_data() -> str:
    """Return every task's verdicts on every response, as the figure's script reads them."""
    every = arithmetic.responses()
    verdicts = {
        f"{a},{b}": [arithmetic.verify((a, b), response) for response in every]
        for a, b in arithmetic.TASKS
    }
    return json.dumps(
        {"responses": every, "probability": 1 / len(every), "verdicts": verdicts},
        separators=(",", ":"),
    )


def number(value: float, digits: int = 6) -> str:
    """A number as the scripts show it, too: a true minus sign, and none before zeros."""
    text = f"{value:.{digits}f}"
    negative = text.startswith("-") and text.strip("-0.") != ""
    return "\N{MINUS SIGN}" * negative + text.lstrip("-")


def _row(head: str, cells: Iterable[str]) -> str:
    return f'<tr><th scope="row">{head}</th>{"".join(cells)}</tr>'


def _table(caption: str, columns: Sequence[str], body: str) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        f'<table class="numbers"><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead>{body}</table>"
    )


def _cell(key: str, value: float, span: int = 1) -> str:
    """A number that a script finds by its key and keeps up to date."""
    wide = f' colspan="{span}"' if span > 1 else ""
    return f'<td{wide} data-value="{key}">{number(value)}</td>'


def _cells(key: str, values: Iterable[float]) -> list[str]:
    return [_cell(f"{key}.{k}", value) for k, value in enumerate(values)]


def _three(name: str, text: str) -> NDArray[np.float64]:
    values = np.array([float(part) for part in text.split(",")])
    if values.shape != (3,):
        raise ValueError(f"`{name}` must list three numbers, got {text}")
    return values


ACTIONS = ("action 1", "action 2", "action 3")


def _variance(logits: NDArray[np.float64], advantages: NDArray[np.float64]) -> float:
    """Variance of one draw, for advantages that depend on the drawn action alone."""
    return exact.group_moments(logits, advantages, lambda drawn: drawn, 1).variance


def simplex(logits: str, rewards: str) -> str:
    """A policy over three actions, its gradient, and the variance of one draw."""
    theta, r = _three("logits", logits), _three("rewards", rewards)
    value = exact.value(theta, r)
    weights = (exact.score(theta) ** 2).sum(1)
    best = exact.expectation(theta, weights * r) / exact.expectation(theta, weights)
    policy = _row("reward <i>r</i>", (f"<td>{reward:g}</td>" for reward in r))
    policy += _row("policy <i>π</i>", _cells("policy", exact.softmax(theta)))
    policy += _row("gradient ∇<i>J</i>", _cells("gradient", exact.gradient(theta, r)))
    policy += _row("value <i>J</i>", [_cell("value", value, span=3)])
    draws = ""
    for key, name, b in (
        ("none", "none", 0.0),
        ("value", "<i>J</i>", value),
        ("best", "least variance", float(best)),
    ):
        cells = [_cell(f"baseline.{key}", b), _cell(f"variance.{key}", _variance(theta, r - b))]
        draws += _row(name, cells)
    return _table(
        "The policy and its exact gradient in the logits.",
        ["quantity", *ACTIONS],
        f"<tbody>{policy}</tbody>",
    ) + _table(
        "One sampled action estimates ∇<i>J</i>. Exact variance, summed over components.",
        ["baseline", "subtracts", "variance"],
        f"<tbody>{draws}</tbody>",
    )


BASELINES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda rewards: rewards,
    "group mean": baseline.group_mean,
    "leave one out": baseline.leave_one_out,
    "standard\N{SOFT HYPHEN}ized, ddof 0": baseline.standardized,
    "standard\N{SOFT HYPHEN}ized, ddof 1": lambda rewards: baseline.standardized(rewards, ddof=1),
}
MEMBERS = 8
SIZES = (2, 8, 64)
SUCCESS = [k / 100 for k in range(1, 100)]


def _advantages(rewards: Sequence[float]) -> list[list[str]]:
    """Advantages under each baseline as they are shown; a zero without decimals is exact."""
    group = torch.tensor(rewards, dtype=torch.float64)
    columns = [make(group).tolist() for make in BASELINES.values()]
    return [["0" if a == 0 else number(a, 4) for a in column] for column in columns]


def _factors(p: float) -> list[float]:
    return [*(exact.std_factor(p, size) for size in SIZES), 1 / (p * (1 - p)) ** 0.5]


def _curves() -> str:
    """The factor against p, on a logarithmic axis; the script reads its points from here."""
    left, right, top, bottom, most = 32, 290, 12, 196, 12.0

    def x(p: float) -> float:
        return left + p * (right - left)

    def y(factor: float) -> float:
        return bottom - float(np.log(factor) / np.log(most)) * (bottom - top)

    parts = []
    for tick in (1, 2, 5, 10):
        parts.append(f'<path class="grid" d="M{left} {y(tick):.1f}H{right}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(tick) + 4:.1f}" class="end">{tick}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<text x="{x(share)}" y="{bottom + 16}" class="middle">{share:g}</text>')
    parts.append(
        f'<text x="{x(0.5)}" y="{bottom + 32}" class="middle">success probability p</text>'
    )
    names = [*(f"G = {size}" for size in SIZES), "limit"]
    curves = np.array([_factors(p) for p in SUCCESS]).T
    for k, (name, curve) in enumerate(zip(names, curves, strict=True)):
        points = [f"{x(p):.2f},{y(factor):.2f}" for p, factor in zip(SUCCESS, curve, strict=True)]
        parts.append(f'<polyline class="curve curve-{k}" points="{" ".join(points)}"/>')
        parts.append(f'<text x="{right + 4}" y="{y(curve[-1]) + 4:.1f}">{name}</text>')
    return (
        '<svg viewBox="0 0 340 232" role="img" aria-label="Four curves of the factor against p. '
        'G = 2 is flat at 1; the others rise from p = 0.5 towards 0 and 1, most at the limit.">'
        f"{''.join(parts)}</svg>"
    )


def group(rewards: str) -> str:
    """Advantages of eight rewards under every baseline, and the factor of the division."""
    values = [float(part) for part in rewards.split(",")]
    if len(values) != MEMBERS or not set(values) <= {0.0, 1.0}:
        raise ValueError(f"`rewards` must list {MEMBERS} numbers 0 or 1, got {rewards}")
    samples = "".join(
        _row(str(i + 1), [f"<td>{reward:g}</td>", *(f"<td>{a}</td>" for a in row)])
        for i, (reward, *row) in enumerate(zip(values, *_advantages(values), strict=True))
    )
    factors = "".join(
        _row(f"{p:.2f}", (f"<td>{number(factor, 4)}</td>" for factor in _factors(p)))
        for p in (0.01, 0.1, 0.25, 0.5)
    )
    return _table(
        "Advantages of the samples <i>i</i> = 1 … 8 of a group, with rewards <i>r</i>, under five "
        "baselines.",
        ["<i>i</i>", "<i>r</i>", *BASELINES],
        f"<tbody>{samples}</tbody>",
    ) + (
        _curves()
        + _table(
            "The factor E[<i>s</i>]/(<i>p</i>(1 − <i>p</i>)) that division by the standard "
            "deviation (ddof 0) puts before ∇<i>p</i>.",
            ["<i>p</i>", *(f"<i>G</i> = {size}" for size in SIZES), "limit"],
            f"<tbody>{factors}</tbody>",
        )
    )


def group_data() -> str:
    """Return the advantages of a success and of a failure by number of successes, and factors."""
    advantages = []
    for successes in range(MEMBERS + 1):
        columns = _advantages([1.0] * successes + [0.0] * (MEMBERS - successes))
        advantages.append([[column[-1], column[0]] for column in columns])
    factors = [[number(factor, 4) for factor in _factors(p)] for p in SUCCESS]
    return json.dumps(
        {"advantages": advantages, "p": SUCCESS, "factors": factors},
        separators=(",", ":"),
    )


def divergences(policy: str, reference: str) -> str:
    """Both divergences and the three estimators: expected values and expected gradients."""
    pi, ref = np.log(_three("policy", policy)), np.log(_three("reference", reference))
    reverse, forward = "KL(<i>π</i>‖ref)", "KL(ref‖<i>π</i>)"
    empty = "<td></td>"
    probs = "".join(
        _row(name, [empty, *_cells(key, exact.softmax(logits))])
        for key, name, logits in (("policy", "<i>π</i>", pi), ("reference", "ref", ref))
    )
    truth = _row(
        reverse, [_cell("kl", exact.kl(pi, ref)), *_cells("slope.kl", exact.kl_gradient(pi, ref))]
    )
    truth += _row(
        forward,
        [
            _cell("forward", exact.kl(ref, pi)),
            *_cells("slope.forward", exact.forward_kl_gradient(pi, ref)),
        ],
    )
    loss = reward = ""
    for estimator in (kl.k1, kl.k2, kl.k3):
        key = estimator.__name__
        logits = torch.tensor(pi, requires_grad=True)
        log_probs = logits.log_softmax(-1)
        values = estimator(log_probs, torch.tensor(ref))
        mean = (log_probs.detach().exp() * values).sum()
        slope = torch.autograd.grad(mean, logits)[0].tolist()
        name = f"<i>k</i><sub>{key[1]}</sub>"
        loss += _row(name, [_cell(key, mean.item()), *_cells(f"loss.{key}", slope)])
        rewarded = exact.gradient(pi, values.detach().numpy())
        reward += _row(name, [empty, *_cells(f"reward.{key}", rewarded)])
    parts = [
        ("probabilities", probs),
        ("divergences and their gradients", truth),
        ("estimators, differentiated as a loss", loss),
        ("estimators, detached in the reward", reward),
    ]
    body = "".join(
        f'<tbody><tr><th scope="rowgroup" colspan="5">{title}</th></tr>{rows}</tbody>'
        for title, rows in parts
    )
    return _table(
        "Expected values in nats (<i>k</i><sub>2</sub>: nats squared), expected gradients in the "
        "logits of <i>π</i>.",
        ["quantity", "value", *ACTIONS],
        body,
    )


TABLES: dict[str, Callable[..., str]] = {
    "mathrl-responses": responses,
    "mathrl-simplex": simplex,
    "mathrl-group": group,
    "mathrl-kl": divergences,
    "mathrl-replay": replay,
    "mathrl-mixer": mixer,
}
DATA: dict[str, Callable[[], str]] = {
    "responses": responses_data,
    "group": group_data,
    "replay": replay_data,
}


def on_files(files: Files, config: Any) -> Files:
    """Add the data that the scripts read."""
    for name, make in DATA.items():
        files.append(File.generated(config, f"assets/data/{name}.json", content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in every figure element of a page."""

    def filled(match: re.Match[str]) -> str:
        name, attributes = match.groups()
        if name not in TABLES:
            return match.group()  # a plot, which docs/hooks/plots.py draws
        inner = TABLES[name](**dict(_ATTRIBUTE.findall(attributes)))
        return f"<{name}{attributes}>{inner}</{name}>"

    return _ELEMENT.sub(filled, markdown)
