"""Executes the labs: `python docs/hooks/labs.py` runs each stale one and writes its notebook.

A notebook keeps the key of what it was made from: the lab, the modules of mathrl that it imports,
directly or not, and the version of torch. A test compares the keys.
"""

import ast
import hashlib
import os
from importlib.metadata import version
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
LABS = ROOT / "docs/labs"


def imported(path: Path) -> set[Path]:
    """Return the files of mathrl that a Python file imports, directly or not."""
    found: set[Path] = set()
    queue = [path]
    while queue:
        for node in ast.walk(ast.parse(queue.pop().read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                base = ROOT / name.replace(".", "/")
                for file in (base.with_suffix(".py"), base / "__init__.py"):
                    if name.startswith("mathrl") and file.is_file() and file not in found:
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
    return book.metadata.get("mathrl_key")  # type: ignore[no-any-return]


def stale(labs: Path = LABS) -> list[Path]:
    """Return the labs whose notebook does not show what they would print now."""
    return [
        lab
        for lab in sorted(labs.glob("*.py"))
        if stored_key(lab.with_suffix(".ipynb")) != key(lab)
    ]


def execute(lab: Path) -> None:
    """Run a lab from nothing and write its notebook beside it, whole or not at all."""
    book = jupytext.read(lab)
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


if __name__ == "__main__":
    for path in stale():
        print(f"executing {path.name}", flush=True)
        execute(path)
