"""Makes a notebook of each chapter at build and links it: prose and code, no outputs."""

import re
from collections.abc import Iterator
from typing import Any

import jupytext
from mkdocs.structure.files import File, Files

from evidence import filled, manifest
from fences import classes

PARTS = ("bench/", "conversations/", "rewards/")
_BOX = re.compile(r'^(?:!!!|\?\?\?\+?) [\w ]+"([^"]*)"$')
_REFERENCE = re.compile(r"\[([^\]]+)\]\[[\w.-]*\]")
_FIGURE = re.compile(r'^<div class="figure".*?^</div>$', re.M | re.S)


def is_chapter(uri: str) -> bool:
    """Whether a page is a chapter, rather than an index or a reference."""
    return uri.startswith(PARTS) and uri.endswith(".md") and not uri.endswith("index.md")


def _unboxed(lines: list[str]) -> Iterator[str]:
    """Turn each admonition into a bold title and its text at the margin."""
    inside = False
    for line in lines:
        if box := _BOX.match(line):
            inside = True
            yield f"**{box.group(1)}**"
            yield ""
        elif inside and line and not line.startswith("    "):
            inside = False
            yield line
        else:
            yield line[4:] if inside else line


def _plain_fences(lines: Iterator[str]) -> Iterator[str]:
    """Rewrite brace fences to the bare form that jupytext reads; leave the outputs out."""
    kind = ""
    for line in lines:
        if line.startswith("```") and not kind:
            kind = " ".join(classes(line[3:])) or "text"
            line = "```" + kind.split()[0]
        elif line.startswith("```"):
            if "output" not in kind:
                yield line
            kind = ""
            continue
        if "output" not in kind:
            yield line


def notebook(markdown: str) -> str:
    """Return a chapter's Markdown as the JSON text of a notebook."""
    text = _FIGURE.sub("", markdown)
    plain = "\n".join(_plain_fences(_unboxed(text.split("\n"))))
    book = jupytext.reads(plain, fmt="md")
    book.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    for number, cell in enumerate(book.cells):
        cell["id"] = f"cell-{number}"
        if cell.cell_type == "markdown":
            cell.source = _REFERENCE.sub(r"\1", cell.source)
    return str(jupytext.writes(book, fmt="ipynb"))


def on_files(files: Files, config: Any) -> Files:
    """Add a notebook beside every chapter, with its recorded numbers filled in."""
    manifest.cache_clear()
    for file in list(files.documentation_pages()):
        if is_chapter(file.src_uri):
            uri = file.src_uri.removesuffix(".md") + ".ipynb"
            text, _ = filled(file.content_string)  # the page itself reports what is missing
            files.append(File.generated(config, uri, content=notebook(text)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link the notebook below the chapter's title."""
    if not is_chapter(page.file.src_uri):
        return markdown
    name = page.file.src_uri.rsplit("/", 1)[-1].removesuffix(".md")
    link = f"[Download this chapter as a notebook]({name}.ipynb){{ .notebook download }}"
    return re.sub(r"^(# .+)$", rf"\1\n\n{link}", markdown, count=1, flags=re.M)
