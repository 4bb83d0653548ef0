"""Writes the table inside each figure at build, so that the page reads without JavaScript.

A figure is a custom element whose script enhances the table that stands in it. Every number and
every verdict comes from `mathrl`; the scripts hold no rule of their own.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from mkdocs.structure.files import File, Files

from mathrl import arithmetic

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


TABLES: dict[str, Callable[..., str]] = {"mathrl-responses": responses}
DATA: dict[str, Callable[[], str]] = {"responses": responses_data}


def on_files(files: Files, config: Any) -> Files:
    """Add the data that the scripts read."""
    for name, make in DATA.items():
        files.append(File.generated(config, f"assets/data/{name}.json", content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in every figure element of a page."""

    def filled(match: re.Match[str]) -> str:
        name, attributes = match.groups()
        inner = TABLES[name](**dict(_ATTRIBUTE.findall(attributes)))
        return f"<{name}{attributes}>{inner}</{name}>"

    return _ELEMENT.sub(filled, markdown)
