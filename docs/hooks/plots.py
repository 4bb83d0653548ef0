"""Draws recorded runs at build: learning curves, responses before and after, attention.

Each plot is an SVG inside the page, coloured by the page's style sheet, with its numbers in a
folded table below; there is no script. `<mathrl-curves run="baselines"></mathrl-curves>` draws all
arms of `docs/evidence/baselines.json`: the median over the seeds, and the range as a band.
"""

import re
from collections.abc import Callable
from html import escape
from statistics import median
from typing import Any

from evidence import EvidenceError, log, manifest

_ELEMENT = re.compile(r"<(mathrl-(?:curves|before-after|attention))((?: [\w-]+=\"[^\"]*\")*)></\1>")
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 44, 150, 14, 40
COLOURS = 6


def curves(
    run: str,
    of: str = "train_success",
    label: str = "exact success on the training tasks",
    arms: str = "",
) -> str:
    """One line for each arm of a run: median over the seeds, and a band from least to greatest.

    `arms` names those to draw, with spaces between; all if there are none.
    """
    runs = manifest(run)["metrics"]["runs"]
    if arms:
        runs = {arm: runs[arm] for arm in arms.split()}
    series = {}
    for arm, rows in runs.items():
        points = [row["curve"] for row in rows if "curve" in row]
        if points:
            steps = [point["step"] for point in points[0]]
            values = list(zip(*[[p[of] for p in curve] for curve in points], strict=True))
            series[arm] = [
                (s, min(v), median(v), max(v)) for s, v in zip(steps, values, strict=True)
            ]
    last = max(rows[-1][0] for rows in series.values())

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value

    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in (0, 0.25, 0.5, 0.75, 1)
    ]
    parts += [
        f'<text x="{x(s):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{s:.0f}</text>'
        for s in (0, last / 2, last)
    ]
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        "updates by policy gradient</text>"
    )
    for number, rows in enumerate(series.values()):
        kind = f"c{number % COLOURS}"
        upper = " ".join(f"{x(s):.1f},{y(high):.1f}" for s, _, _, high in rows)
        lower = " ".join(f"{x(s):.1f},{y(low):.1f}" for s, low, _, _ in reversed(rows))
        line = " ".join(f"{x(s):.1f},{y(mid):.1f}" for s, _, mid, _ in rows)
        parts.append(f'<polygon class="band {kind}" points="{upper} {lower}"/>')
        parts.append(f'<polyline class="line {kind}" points="{line}"/>')
    for number, (arm, place) in enumerate(_spread({a: y(r[-1][2]) for a, r in series.items()})):
        index = list(series).index(arm)
        parts.append(
            f'<text class="name c{index % COLOURS}" x="{WIDTH - RIGHT + 8}" y="{place + 4:.1f}">'
            f"{escape(arm.replace('_', ' '))}</text>"
        )
        assert number < len(series)
    seeds = max(len(rows) for rows in runs.values())
    caption = f"{label}, median and range over {seeds} seeds"
    picked = sorted({0, len(next(iter(series.values()))) // 2, -1})
    heads = [f"{next(iter(series.values()))[i][0]:.0f}" for i in picked]
    body = [
        (
            arm.replace("_", " "),
            *(f"{rows[i][2]:.3f} ({rows[i][1]:.3f} to {rows[i][3]:.3f})" for i in picked),
        )
        for arm, rows in series.items()
    ]
    return _figure(parts, caption, ("arm", *(f"step {head}" for head in heads)), body)


def before_after(run: str) -> str:
    """The hundred responses to one task: probabilities at the start, supervised, at the end."""
    recorded = manifest(run)
    first = next(iter(recorded["metrics"]["runs"].values()))[0]
    side, parts, body = 15, [], []
    for number, stage in enumerate(("start", "supervised", "end")):
        chances = first["portraits"][stage]["responses"]
        left = 24 + number * (10 * side + 34)
        title = {"start": "untrained", "supervised": "after demonstrations", "end": "after rewards"}
        parts.append(f'<text class="name" x="{left}" y="14">{title[stage]}</text>')
        for index, chance in enumerate(chances):
            u, v = divmod(index, 10)
            shade = min(1.0, chance**0.5)  # the eye sees differences among small numbers
            parts.append(
                f'<rect class="cell" x="{left + v * side}" y="{34 + u * side}" width="{side - 1}" '
                f'height="{side - 1}" fill-opacity="{shade:.3f}"/>'
            )
        for digit in range(10):
            if number == 0:
                parts.append(
                    f'<text x="{left - 5}" y="{45 + digit * side}" text-anchor="end">{digit}</text>'
                )
            parts.append(
                f'<text x="{left + digit * side + 7}" y="29" text-anchor="middle">{digit}</text>'
            )
        best = sorted(range(100), key=lambda i: -chances[i])[:3]
        body.append((title[stage], *(f"{i // 10} {i % 10}: {chances[i]:.3f}" for i in best)))
    caption = (
        "Probability of each response to 3 + 4, seed 0: rows are intermediate digits, columns "
        "final digits; darker is likelier"
    )
    return _figure(parts, caption, ("policy", "likeliest", "second", "third"), body, height=200)


def attention(run: str) -> str:
    """Attention weights of the trained network on a prompt and its first digit."""
    recorded = manifest(run)
    first = next(iter(recorded["metrics"]["runs"].values()))[0]
    layers = first["portraits"]["end"]["attention"]
    glyphs, side, parts = ("bos", "3", "+", "4", "=", "7"), 19, []
    for block, heads in enumerate(layers):
        for head, weights in enumerate(heads):
            left, top = 40 + head * (6 * side + 30), 36 + block * (6 * side + 44)
            parts.append(
                f'<text class="name" x="{left}" y="{top - 20}">block {block + 1}, '
                f"head {head + 1}</text>"
            )
            for row, line in enumerate(weights):
                if head == 0:
                    parts.append(
                        f'<text x="{left - 6}" y="{top + row * side + 13}" text-anchor="end">'
                        f"{glyphs[row]}</text>"
                    )
                parts.append(
                    f'<text x="{left + row * side + 9}" y="{top - 5}" text-anchor="middle">'
                    f"{glyphs[row]}</text>"
                )
                for column, weight in enumerate(line[: row + 1]):
                    parts.append(
                        f'<rect class="cell" x="{left + column * side}" y="{top + row * side}" '
                        f'width="{side - 1}" height="{side - 1}" fill-opacity="{weight:.3f}"/>'
                    )
    body = [
        (f"block {block + 1}, head {head + 1}", *(f"{w:.2f}" for w in weights[4]))
        for block, heads in enumerate(layers)
        for head, weights in enumerate(heads)
    ]
    caption = (
        "Attention of the trained network, seed 0, on 3 + 4 = 7: each row shows where a position "
        "looks; the table gives the row of ="
    )
    return _figure(parts, caption, ("head", *glyphs[:5]), body, height=330)


PLOTS: dict[str, Callable[..., str]] = {
    "mathrl-curves": curves,
    "mathrl-before-after": before_after,
    "mathrl-attention": attention,
}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Draw every plot of a page."""

    def drawn(match: re.Match[str]) -> str:
        name, attributes = match.groups()
        try:
            return PLOTS[name](**dict(_ATTRIBUTE.findall(attributes)))
        except EvidenceError as error:
            log.warning("%s: %s: %s", page.file.src_path, match.group(), error)
            return match.group()

    return _ELEMENT.sub(drawn, markdown)


def _spread(places: dict[str, float], gap: float = 15) -> list[tuple[str, float]]:
    """Move labels apart that would overlap, from the top."""
    moved: list[tuple[str, float]] = []
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        moved.append((name, max(place, moved[-1][1] + gap) if moved else place))
    return moved


def _figure(
    parts: list[str],
    caption: str,
    head: tuple[str, ...],
    body: list[tuple[str, ...]],
    height: int = HEIGHT,
) -> str:
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    rows = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in body
    )
    return (
        f'<figure class="plot"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(caption)}">{"".join(parts)}</svg>'
        f"<figcaption>{escape(caption)}.</figcaption>"
        f"<details><summary>The numbers</summary><table><thead><tr>{columns}</tr></thead>"
        f"<tbody>{rows}</tbody></table></details></figure>"
    )
