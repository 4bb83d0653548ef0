"""The built book: it builds strictly, what it shows was run, what it names exists."""

import base64
import doctest
import hashlib
import importlib
import inspect
import json
import pkgutil
import re
import typing
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from bs4 import BeautifulSoup
from mkdocs.exceptions import Abort
from pytest_markdown_docs.plugin import FenceSyntax, extract_fence_tests

import katex
import mathrl
from fences import parser
from notebooks import is_chapter
from tests.small_book import build_strictly

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
CHAPTERS = [page for page in PAGES if is_chapter(page)]

# ---------------------------------------------------------------- the strict build


def test_book_builds_strictly(site):
    assert [page for page in PAGES if not built(site, page).is_file()] == []


def built(site: Path, page: str) -> Path:
    """The HTML file of a page."""
    path = Path(page).with_suffix("")
    return site / (path.parent if path.name == "index" else path) / "index.html"


RIGHT = "# Page\n\n[`k1`][mathrl.kl.k1], [below](#below)\n\n## Below\n\n::: mathrl.kl\n"
BROKEN = {
    "citation": ("mathrl.kl.k1]", "mathrl.kl.k9]", "cross-reference target 'mathrl.kl.k9'"),
    "anchor": ("(#below)", "(#beneath)", "no such anchor"),
    "anchor of another page": ("(#below)", "(other.md#there)", "does not contain an anchor"),
    "link": ("(#below)", "(nowhere.md)", "not found among documentation files"),
    "module": ("::: mathrl.kl", "::: mathrl.lk", "mathrl.lk could not be found"),
}


def test_small_book_builds_strictly(tmp_path):
    site = build_strictly(tmp_path, {"index.md": RIGHT, "other.md": "# Other\n"})
    assert 'href="#mathrl.kl.k1"' in (site / "index.html").read_text()


@pytest.mark.parametrize("fault", BROKEN)
def test_strict_build_fails(fault, tmp_path, caplog):
    old, new, message = BROKEN[fault]
    with pytest.raises(Abort):
        build_strictly(tmp_path, {"index.md": RIGHT.replace(old, new), "other.md": "# Other\n"})
    assert message in caplog.text


# ---------------------------------------------------------------- parity: shown and run

OTHER_LANGUAGES = {"bash", "bibtex", "console", "json", "toml", "yaml"}


def ran(markdown: str) -> list[str]:
    """The snippets of a page that the plugin hands to the runner."""
    found = extract_fence_tests(
        parser(), markdown, 0, Path("page.md"), fence_syntax=FenceSyntax.superfences
    )
    return [test.source.strip("\n") for test in found]


SOURCE = re.compile(r'<details class="mkdocstrings-source">.*?</details>', re.S)


def article(html: str) -> BeautifulSoup:
    """What a reader sees of a page, less the package's own signatures and sources."""
    text = html[html.index("<article") : html.index("</article>")]
    soup = BeautifulSoup(SOURCE.sub("", text), "html.parser")
    for part in soup.select(".doc-signature, .linenos"):
        part.extract()
    return soup


def unlike(markdown: str, html: str) -> list[str]:
    """How the Python that a page shows differs from what was run, and what is neither."""
    problems, shown = [], []
    for block in article(html).select("pre"):
        holder = block.find_parent(class_="highlight")
        names = holder["class"] if holder else []
        language = next((name[9:] for name in names if name.startswith("language-")), "unlabelled")
        text = block.get_text().strip("\n")
        if language == "python":
            shown.append(text)
        elif language == "pycon" and block.find_parent(class_="doc-contents"):
            continue  # a docstring's example: see test_examples_of_the_reference_are_doctests
        elif not (language in OTHER_LANGUAGES or "output" in names):
            problems.append(f"neither run nor an output, in language {language}:\n{text}")
    run = ran(markdown)
    if shown == run:
        return problems
    problems += [f"shown, not run:\n{text}" for text in (Counter(shown) - Counter(run)).elements()]
    problems += [f"run, not shown:\n{text}" for text in (Counter(run) - Counter(shown)).elements()]
    return problems or ["shown in another order than run"]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_is_what_was_run(site, page):
    html = built(site, page).read_text("utf-8")
    assert unlike((DOCS / page).read_text("utf-8"), html) == []
    # Where a doctest has no heading of its own, Markdown reads `>>>` as three quotations.
    assert article(html).select(".doc-contents blockquote") == []


SNIPPET = "```{.python}\nprint(6 * 7)\n```\n\n```{.text .output}\n42\n```\n"
INDENTED = SNIPPET.replace("\n", "\n    ")
UNVERIFIED = {
    "notest": SNIPPET.replace(".python", ".python notest"),
    "pycon": "```pycon\n>>> 6 * 7\n42\n```\n",
    "another name": SNIPPET.replace(".python", ".ipython"),
    "unlabelled": "```\nprint(6 * 7)\n```\n",
    "text": "```{.text}\nprint(6 * 7)\n```\n",
    "indented": "prose\n\n    print(6 * 7)\n",
    "quoted": "> ```python\n> print(6 * 7)\n> ```\n",
    "html": "<pre><code>print(6 * 7)</code></pre>\n",
    "only in a comment": f"<!--\n{SNIPPET}-->\n",
}
VERIFIED = {
    "plain": SNIPPET,
    "note": f"!!! note\n    {INDENTED}",
    "details": f'??? note "title"\n    prose\n    {INDENTED}',
    "tabs": f'=== "one"\n    {INDENTED}\n=== "two"\n    {INDENTED}',
    "bash": "```bash\npytest\n```\n",
    "twice": SNIPPET + "\n" + SNIPPET,
}


@pytest.fixture(scope="module")
def specimens(tmp_path_factory):
    """A small book with a page for each specimen."""
    pages = {f"{name}.md": f"# Page\n\n{text}" for name, text in (UNVERIFIED | VERIFIED).items()}
    site = build_strictly(tmp_path_factory.mktemp("parity"), {"index.md": "# Index\n", **pages})
    return {
        name.removesuffix(".md"): (text, built(site, name).read_text("utf-8"))
        for name, text in pages.items()
    }


@pytest.mark.parametrize("name", UNVERIFIED)
def test_visible_code_that_was_not_run_is_found(specimens, name):
    assert unlike(*specimens[name]) != []


def test_code_that_the_page_changes_is_found(specimens):
    markdown, html = specimens["plain"]
    assert len(unlike(markdown, html.replace(">6<", ">8<"))) == 2
    assert unlike(SNIPPET + INDENTED.replace("6", "8"), html) != []


@pytest.mark.parametrize("name", VERIFIED)
def test_code_that_was_run_is_not_accused(specimens, name):
    assert unlike(*specimens[name]) == []
    assert len(ran(specimens[name][0])) == {"bash": 0, "tabs": 2, "twice": 2}.get(name, 1)


def modules() -> dict[str, ModuleType]:
    """The public modules of the package by name."""
    found = pkgutil.walk_packages(mathrl.__path__, "mathrl.")
    names = [module.name for module in found if not module.name.rsplit(".", 1)[1].startswith("_")]
    return {name: importlib.import_module(name) for name in names}


def examples(text: str) -> list[tuple[str, str]]:
    return [(e.source, e.want) for e in doctest.DocTestParser().get_examples(text + "\n")]


def test_examples_of_the_reference_are_doctests(site):
    finder = doctest.DocTestFinder(exclude_empty=True)
    run = [
        (example.source, example.want)
        for module in modules().values()
        for test in finder.find(module)
        for example in test.examples
    ]
    shown = [
        example
        for page in PAGES
        for block in article(built(site, page).read_text("utf-8")).select(".doc-contents pre")
        for example in examples(block.get_text())
    ]
    assert shown
    assert not Counter(shown) - Counter(run)
    assert Counter(examples(">>> 6 * 7\n41")) - Counter(run)


# ---------------------------------------------------------------- citations

# The reference's table names the chapter of each module. A module is excused from citation only
# while that chapter does not exist.
CHAPTER_OF = {
    module: f"{part}/{int(number):02}-"
    for module, part, number in re.findall(
        r"^\| \[`(\w+)`\]\(\1\.md\) \|.*\| \[?(bench|conversations|rewards) (\d+)\b",
        (DOCS / "reference/index.md").read_text("utf-8"),
        re.M,
    )
}


def public_functions(module: ModuleType) -> list[str]:
    """The full names of the functions and classes that a module defines for its users."""
    return [
        f"{module.__name__}.{name}"
        for name, member in inspect.getmembers(module)
        if (inspect.isfunction(member) or inspect.isclass(member))
        and not typing.is_typeddict(member)
        and member.__module__ == module.__name__
        and not name.startswith("_")
    ]


def uncited(functions: list[str], chapters: dict[str, str]) -> list[str]:
    """The functions that no chapter cites, less those whose chapter is still to come."""
    cited = {
        name for text in chapters.values() for name in re.findall(r"\]\[(mathrl[\w.]+)\]", text)
    }
    awaited = {
        module
        for module, start in CHAPTER_OF.items()
        if not any(page.startswith(start) for page in chapters)
    }
    return [f for f in functions if f not in cited and f.split(".")[1] not in awaited]


def test_every_module_has_a_page_and_a_chapter():
    names = {name.split(".")[1] for name in modules()}
    assert names == set(CHAPTER_OF)
    for name in names:
        assert f"::: mathrl.{name}\n" in (DOCS / f"reference/{name}.md").read_text("utf-8")


def test_every_public_function_is_cited_from_a_chapter():
    chapters = {page: (DOCS / page).read_text("utf-8") for page in CHAPTERS}
    functions = [name for module in modules().values() for name in public_functions(module)]
    assert uncited(functions, chapters) == []


def test_uncited_function_is_found():
    chapter = {"bench/04-kl.md": "[`k1`][mathrl.kl.k1] and [`k2`](../kl.md)"}
    assert uncited(["mathrl.kl.k1", "mathrl.kl.k2"], chapter) == ["mathrl.kl.k2"]
    assert uncited(["mathrl.unlisted.f"], chapter) == ["mathrl.unlisted.f"]
    assert uncited(["mathrl.kl.k1"], {"bench/03-x.md": ""}) == []
    assert "mathrl.kl.k1" in public_functions(modules()["mathrl.kl"])


# ---------------------------------------------------------------- KaTeX


def test_katex_hashes_are_those_of_the_npm_files():
    if not katex.DIST.is_dir():
        pytest.skip("no node_modules (run `npm ci`)")
    for name, integrity in katex.INTEGRITY.items():
        digest = hashlib.sha384((katex.DIST / name).read_bytes()).digest()
        assert integrity == f"sha384-{base64.b64encode(digest).decode()}"
    installed = json.loads((katex.DIST.parent / "package.json").read_text())
    assert installed["version"] == katex.VERSION


def test_without_node_modules_the_page_names_the_pinned_cdn_copy(tmp_path):
    site = build_strictly(tmp_path, {"index.md": "# Page\n\n$x$\n"})
    head = BeautifulSoup((site / "index.html").read_text(), "html.parser")
    tags = {tag.get("src") or tag.get("href"): tag for tag in head.select("[integrity]")}
    assert {url: tag["integrity"] for url, tag in tags.items()} == {
        f"https://cdn.jsdelivr.net/npm/katex@{katex.VERSION}/dist/{name}": integrity
        for name, integrity in katex.INTEGRITY.items()
    }
    assert all(tag["crossorigin"] == "anonymous" for tag in tags.values())
    assert not (site / "assets/katex").exists()


def test_with_node_modules_the_page_names_its_own_copy(site):
    if not katex.DIST.is_dir():
        pytest.skip("no node_modules (run `npm ci`)")
    html = built(site, "bench/01-contract.md").read_text("utf-8")
    assert "cdn.jsdelivr.net" not in html
    for name in katex.INTEGRITY:
        assert f"../../assets/katex/{name}" in html
        assert (site / "assets/katex" / name).is_file()
