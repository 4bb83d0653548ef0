"""Executes the labs: `python docs/hooks/labs.py` runs each stale one and writes its notebook.

As a hook of the build it gives each plot of a lab the description that the lab states.

A notebook keeps the key of what it was made from: the lab, the modules of mathrl that it imports,
directly or not, and the version of torch. A test compares the keys.
"""

import ast
import contextlib
import hashlib
import os
from collections.abc import Iterator
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from mkdocs.exceptions import PluginError
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
LABS = ROOT / "docs/labs"

_NO_ALT = 'alt="No description has been provided for this image"'


def _executed(name: str) -> list[Path]:
    """Return the files of mathrl that run when a dotted name is imported: its packages and it."""
    parts = name.split(".")
    if parts[0] != "mathrl":
        return []
    bases = [ROOT.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    files = [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")]
    return [file for file in files if file.is_file()]


def imported(path: Path) -> set[Path]:
    """Return the files of mathrl that a Python file imports, directly or not."""
    found: set[Path] = set()
    queue = [path]
    while queue:
        for node in ast.walk(ast.parse(queue.pop().read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for file in {file for name in names for file in _executed(name)} - found:
                found.add(file)
                queue.append(file)
    return found


def key(lab: Path) -> str:
    """Return the hash of everything that a lab's outputs depend on."""
    digest = hashlib.sha256(f"torch {version('torch').split('+')[0]}\n".encode())
    for path in [lab, *sorted(imported(lab))]:
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def stored_key(notebook: Path) -> str | None:
    """Return the key that an executed notebook was made with."""
    if not notebook.is_file():
        return None
    book = nbformat.read(notebook, as_version=4)
    made_from: str | None = book.metadata.get("mathrl_key")
    return made_from


def stale(labs: Path = LABS) -> list[Path]:
    """Return the labs whose notebook does not show what they would print now."""
    return [
        lab
        for lab in sorted(labs.glob("*.py"))
        if stored_key(lab.with_suffix(".ipynb")) != key(lab)
    ]


@contextlib.contextmanager
def _no_date() -> Iterator[None]:
    """Let matplotlib write no date into a plot, so that a repeated run writes the same bytes."""
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    try:
        yield
    finally:
        del os.environ["SOURCE_DATE_EPOCH"]
        if before is not None:
            os.environ["SOURCE_DATE_EPOCH"] = before


def execute(lab: Path) -> None:
    """Run a lab from nothing and write its notebook beside it, whole or not at all."""
    book = jupytext.read(lab)
    with _no_date():
        NotebookClient(book, timeout=600, record_timing=False).execute()
    book.metadata = nbformat.from_dict(
        {
            "mathrl_key": key(lab),
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(book.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata = {}
    temporary = lab.with_suffix(".ipynb.tmp")
    nbformat.write(book, temporary)
    os.replace(temporary, lab.with_suffix(".ipynb"))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Describe each plot of a lab with the `alt` of its output; refuse a plot without one."""
    if not page.file.src_uri.startswith("labs/"):
        return html
    book = nbformat.read(page.file.abs_src_path, as_version=4)
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    plots = [o for o in outputs if "image/svg+xml" in o.get("data", {})]
    for output in plots:
        if not (text := output.metadata.get("image/svg+xml", {}).get("alt")):
            raise PluginError(f"{page.file.src_uri}: a plot is displayed without its `alt`")
        html = html.replace(_NO_ALT, f'alt="{escape(text)}"', 1)
    return html


if __name__ == "__main__":
    for path in stale():
        print(f"executing {path.name}", flush=True)
        execute(path)
