"""Puts recorded numbers on the pages: no result of an experiment is typed by hand.

A page writes `{{ head-benchmark: ratios.naive | .2f }}`: the value at that path of the manifest
`docs/evidence/head-benchmark.json`, in that format. A manifest lists its `sources`, files of this
repository with their SHA-256; when one has changed since, what it recorded is stale. Its `digest`
is that of everything else in it. A number that is missing, stale or edited is a warning, and so an
error of the strict build.
"""

import functools
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs/evidence"
_MARKER = re.compile(r"\{\{ ([\w-]+): ([\w.-]+)(?: \| ([^}]+?))? \}\}")

log = logging.getLogger("mkdocs.plugins.evidence")


class EvidenceError(Exception):
    """A number that no valid manifest holds."""


@functools.lru_cache(maxsize=64)
def manifest(name: str, folder: Path = EVIDENCE) -> Any:
    """Read one manifest that is what was written and whose sources are unchanged."""
    path = folder / f"{name}.json"
    if not path.is_file():
        raise EvidenceError(f"no manifest {path.name}")
    recorded = json.loads(path.read_text("utf-8"))
    body = {key: value for key, value in recorded.items() if key != "digest"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    if recorded.get("digest") != hashlib.sha256(canonical.encode()).hexdigest():
        raise EvidenceError(f"{path.name} is not what was written: its digest differs")
    for source, digest in recorded["sources"].items():
        file = ROOT / source
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise EvidenceError(f"{path.name} is stale: {source} has changed since it was recorded")
    return recorded


def look_up(recorded: Any, path: str) -> Any:
    """Follow a dotted path of keys and list indices."""
    value = recorded
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise EvidenceError(f"no {part!r} on the path {path!r}") from None
    return value


def filled(markdown: str, folder: Path = EVIDENCE) -> tuple[str, list[str]]:
    """Return the text with every marker replaced, and what is wrong with the others."""
    problems: list[str] = []

    def number(match: re.Match[str]) -> str:
        name, path, spec = match.groups()
        try:
            value = look_up(manifest(name, folder), path)
            return format(value, spec or "")
        except (EvidenceError, ValueError, TypeError) as error:
            problems.append(f"{match.group()}: {error}")
            return match.group()

    return _MARKER.sub(number, markdown), problems


def on_pre_build(config: Any) -> None:
    """Read the manifests anew at every build."""
    manifest.cache_clear()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in the numbers of a page."""
    text, problems = filled(markdown)
    for problem in problems:
        log.warning("%s: %s", page.file.src_path, problem)
    return text
