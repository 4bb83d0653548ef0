"""Pytest plugin: every snippet of a page runs alone, and prints what the page shows below it."""

import re
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from pytest_markdown_docs._runners import DefaultRunner, register_runner
from pytest_markdown_docs.definitions import FenceTestDefinition
from pytest_markdown_docs.plugin import MarkdownInlinePythonItem

from fences import Fence, fences, options, parser
from tests.plugin import sandbox

_DECIMAL = re.compile(r"[-+]?\d+\.\d+")
_edits: dict[Path, list[tuple[Fence, str]]] = {}
_update = False


class SnippetFailure(Exception):
    """A snippet that raised, or that did not print what the page shows."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-output`."""
    parser.addoption(
        "--update-output",
        action="store_true",
        help="rewrite the output shown on the pages with what the snippets print",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Remember whether pages are to be rewritten."""
    global _update
    _update = config.getoption("--update-output")


@pytest.hookimpl(tryfirst=True)
def pytest_markdown_docs_markdown_it() -> MarkdownIt:
    """Use the book's own parser, which reaches fences inside admonitions and tabs."""
    return parser()


def _fence(test: FenceTestDefinition) -> Fence:
    page = Path(test.source_path)
    return next(fence for fence in fences(page) if fence.line == test.start_line)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse the options by which a fence could escape the book's runner."""
    if not isinstance(item, MarkdownInlinePythonItem):
        return
    if words := options(_fence(item.test_definition).info):
        pytest.fail(f"a fence of the book takes no option, got {words}", pytrace=False)


def same_output(printed: str, shown: str) -> bool:
    """Compare texts exactly, but decimals within one unit of the last digit shown."""
    if _DECIMAL.sub("#", printed) != _DECIMAL.sub("#", shown):
        return False
    pairs = zip(_DECIMAL.findall(printed), _DECIMAL.findall(shown), strict=True)
    return all(
        len(a.split(".")[1]) == len(b.split(".")[1])
        and abs(float(a) - float(b)) <= 1.01 * 10.0 ** -len(b.split(".")[1])
        for a, b in pairs
    )


def check(fence: Fence, result: sandbox.Result) -> str | None:
    """Return what is wrong with a snippet's result, or None."""
    if result.error:
        return f"the snippet raised\n{result.error}"
    printed = result.printed.rstrip()
    if fence.output is None:
        return f"prints, but no ```{{.text .output}} fence follows:\n{printed}" if printed else None
    if not printed:
        return "an output fence follows, but the snippet prints nothing"
    if not same_output(printed, fence.output.text.rstrip()):
        return f"the page shows:\n{fence.output.text.rstrip()}\nthe snippet prints:\n{printed}"
    return None


@register_runner(default=True)
class BookRunner(DefaultRunner):
    """Runs a fence in its own process; a page's fence is also held to its shown output."""

    def runtest(self, test: FenceTestDefinition, args: Any, *, asyncio_runner: Any = None) -> None:
        """Raise `SnippetFailure` unless the snippet runs and prints what is shown."""
        result = sandbox.run(test.source, str(test.source_path))
        fence = _fence(test)
        if _update and fence.output and result.printed and not result.error:
            if not check(fence, result):
                return
            _edits.setdefault(Path(test.source_path), []).append((fence.output, result.printed))
            return
        if problem := check(fence, result):
            raise SnippetFailure(problem)

    def repr_failure(
        self,
        test: FenceTestDefinition,
        excinfo: pytest.ExceptionInfo[BaseException],
        style: Any = None,
    ) -> str:
        """Show the snippet with the page's line numbers, then what is wrong."""
        lines = test.source.rstrip("\n").split("\n")[test.start_line :]
        numbered = "\n".join(f"{i:5}  {text}" for i, text in enumerate(lines, test.start_line + 1))
        return f"{test.source_path}\n{numbered}\n\n{excinfo.value}"


def rewrite(text: str, edits: list[tuple[Fence, str]]) -> str:
    """Return a page's text with the content of each given output fence replaced."""
    lines = text.split("\n")
    for fence, printed in sorted(edits, key=lambda edit: edit[0].line, reverse=True):
        first, last = fence.span
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        shown = [(indent + line).rstrip() for line in printed.rstrip().split("\n")]
        lines[first + 1 : last - 1] = shown
    return "\n".join(lines)


def pytest_sessionfinish() -> None:
    """Write the pages that `--update-output` changed."""
    for path, edits in _edits.items():
        path.write_text(rewrite(path.read_text("utf-8"), edits), "utf-8")
    _edits.clear()
