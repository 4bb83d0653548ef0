"""Which files of the package a file depends on, and their hashes."""

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).parent.parent


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


def _executed(name: str) -> list[Path]:
    """Return the files of mathrl that run when a dotted name is imported: its packages and it."""
    parts = name.split(".")
    if parts[0] != "mathrl":
        return []
    bases = [ROOT.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    files = [file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")]
    return [file for file in files if file.is_file()]


def hashes(path: Path) -> dict[str, str]:
    """SHA-256 of a file of the package and of all that it imports, by path from the root."""
    files = sorted({path, *imported(path)})
    return {
        file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
