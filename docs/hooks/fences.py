"""Code fences of a page: one parser for the snippet runner, the parity test and the notebooks."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

_CLASS = re.compile(r"\.([\w-]+)")
_PYTHON = {"python", "py", "python3", "pycon"}


class Fence(NamedTuple):
    """One fence: its first content line (1-based), its classes, its text, the fence that follows."""

    line: int
    span: tuple[int, int]
    classes: tuple[str, ...]
    text: str
    output: "Fence | None"

    @property
    def is_python(self) -> bool:
        """Whether the page renders this fence as Python."""
        return bool(_PYTHON.intersection(self.classes))

    @property
    def is_output(self) -> bool:
        """Whether this fence shows what the snippet above it prints."""
        return "output" in self.classes


def parser() -> MarkdownIt:
    """Reach fences indented under `!!!`, `???` and `===`: to CommonMark they are code blocks."""
    return MarkdownIt("commonmark").disable("code")


def classes(info: str) -> tuple[str, ...]:
    """Return the classes of a fence's info string, in the brace form or the bare one."""
    if info.strip().startswith("{"):
        return tuple(_CLASS.findall(re.sub(r'"[^"]*"', "", info)))
    return tuple(info.split()[:1])


def parse(text: str) -> list[Fence]:
    """Return the fences of a Markdown text, each with the output fence directly below it."""
    found: list[Fence] = []
    follower: Fence | None = None
    for token in reversed(parser().parse(text)):
        if token.type != "fence" or token.map is None:
            follower = None
            continue
        fence = Fence(token.map[0] + 1, (token.map[0], token.map[1]), classes(token.info),
                      token.content, follower if follower and follower.is_output else None)
        found.append(fence)
        follower = fence
    return found[::-1]


@functools.lru_cache
def fences(path: Path) -> tuple[Fence, ...]:
    """Return the fences of a file."""
    return tuple(parse(path.read_text("utf-8")))
