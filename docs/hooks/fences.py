"""Code fences of a page: one parser for the snippet runner, the parity test and the notebooks."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock

_CLASS = re.compile(r"\.([\w-]+)")
_ATTRIBUTE = re.compile(r'[\w-]+="[^"]*"')
_PYTHON = {"python", "py", "python3", "pycon"}


class Fence(NamedTuple):
    """One fence: the line it opens on (1-based), its info string, its text, the output below it."""

    line: int
    span: tuple[int, int]
    info: str
    text: str
    output: "Fence | None"

    @property
    def is_python(self) -> bool:
        """Whether the page renders this fence as Python."""
        return bool(_PYTHON.intersection(classes(self.info)))

    @property
    def is_output(self) -> bool:
        """Whether this fence shows what the snippet above it prints."""
        return "output" in classes(self.info)


def _one_line(state: StateBlock, line: int, end: int, silent: bool) -> bool:
    state.line = line + 1
    state.push("line", "", 0)
    return True


def parser() -> MarkdownIt:
    """Return a parser that sees a fence wherever the page shows one.

    The page's Markdown opens a fence on any line, however deep it is indented under `!!!`, `???` or
    `===` and whether or not a blank line comes before it. CommonMark takes such a line for indented
    code or for more of the paragraph above, so here there are only fences and lines.
    """
    only_fences = MarkdownIt("zero").enable("fence")
    only_fences.block.ruler.at("paragraph", _one_line)
    return only_fences


def classes(info: str) -> tuple[str, ...]:
    """Return the classes of a fence's info string, in the brace form or the bare one."""
    if info.strip().startswith("{"):
        return tuple(_CLASS.findall(_ATTRIBUTE.sub("", info)))
    return tuple(info.split()[:1])


def options(info: str) -> list[str]:
    """Return the words of an info string that are neither a class nor an attribute."""
    words = _ATTRIBUTE.sub("", info.strip().strip("{}")).split()
    return [word for word in words if not word.startswith(".") and word not in _PYTHON]


def parse(text: str) -> list[Fence]:
    """Return the fences of a Markdown text, each with the output fence directly below it."""
    found: list[Fence] = []
    follower: Fence | None = None
    for token in reversed(parser().parse(text)):
        if token.type != "fence" or token.map is None:
            follower = None
            continue
        fence = Fence(
            token.map[0] + 1,
            (token.map[0], token.map[1]),
            token.info,
            token.content,
            follower if follower and follower.is_output else None,
        )
        found.append(fence)
        follower = fence
    return found[::-1]


@functools.lru_cache
def fences(path: Path) -> tuple[Fence, ...]:
    """Return the fences of a file."""
    return tuple(parse(path.read_text("utf-8")))
