"""The notebooks: every chapter's runs as downloaded, every lab shows what it would print now."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import jupytext
import nbformat
import pytest
from bs4 import BeautifulSoup
from mkdocs.exceptions import PluginError
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import labs
from fences import fences
from notebooks import is_chapter, notebook
from tests.plugin.snippets import same_output

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHAPTERS = [
    page
    for page in sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    if is_chapter(page)
]
LABS = sorted(labs.LABS.glob("*.py"))


def code(book: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell wrote to its standard output."""
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")


def execute(book: nbformat.NotebookNode) -> None:
    NotebookClient(book, timeout=120, kernel_name="python3").execute()


# ---------------------------------------------------------------- chapters


def downloaded(site: Path, page: str) -> nbformat.NotebookNode:
    """A chapter's notebook, found as a reader finds it: by the link below the title."""
    html = site / page.removesuffix(".md") / "index.html"
    title = BeautifulSoup(html.read_text("utf-8"), "html.parser").select_one("article h1")
    link = title.find_next_sibling().select_one("a.notebook[download]")
    path = (html.parent / link["href"]).resolve()
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    return book


@pytest.mark.parametrize("page", CHAPTERS)
def test_downloaded_notebook_runs_and_prints_what_the_page_shows(site, page):
    book = downloaded(site, page)
    snippets = [fence for fence in fences(DOCS / page) if fence.is_python]
    assert [cell.source for cell in code(book)] == [s.text.rstrip("\n") for s in snippets]
    assert not any(cell.outputs for cell in code(book))
    execute(book)
    for cell, snippet in zip(code(book), snippets, strict=True):
        shown = snippet.output.text.rstrip() if snippet.output else ""
        assert same_output(printed(cell).rstrip(), shown), cell.source


def test_prose_of_a_notebook_is_plain_markdown(site):
    for page in CHAPTERS:
        for cell in downloaded(site, page).cells:
            if cell.cell_type == "markdown":
                assert not any(
                    mark in cell.source for mark in ("!!!", "???", "][mathrl", "<mathrl-", "{{ ")
                )
                assert ".output}" not in cell.source


def test_notebook_with_a_fault_does_not_run():
    book = nbformat.reads(notebook("# T\n\n```{.python}\nlen(42)\n```\n"), as_version=4)
    with pytest.raises(CellExecutionError, match="TypeError"):
        execute(book)


def test_notebook_leaves_outputs_out_and_opens_boxes():
    text = (
        '# T\n\n!!! claim "1.1"\n    By [`f`][mathrl.f].\n\n'
        '??? success "Solution"\n    Do:\n\n    ```{.python title="x"}\n    a = [[1]]\n'
        "    print(a[0][0])\n    ```\n\n    ```{.text .output}\n    1\n    ```\n\nEnd.\n"
    )
    cells = nbformat.reads(notebook(text), as_version=4).cells
    assert [cell.source for cell in cells if cell.cell_type == "code"] == [
        "a = [[1]]\nprint(a[0][0])"
    ]
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert " ".join(" ".join(prose).split()) == "# T **1.1** By `f`. **Solution** Do: End."


# ---------------------------------------------------------------- labs


def test_every_lab_is_fresh():
    assert LABS
    assert labs.stale() == [], "run `python docs/hooks/labs.py`"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The labs and the package in a directory of its own, where they may be changed."""
    shutil.copytree(ROOT / "mathrl", tmp_path / "mathrl")
    shutil.copytree(labs.LABS, tmp_path / "labs")
    monkeypatch.setattr(labs, "ROOT", tmp_path)
    # The key names the lab by its path, so the copy's keys are made anew.
    for lab in (tmp_path / "labs").glob("*.py"):
        path = lab.with_suffix(".ipynb")
        book = nbformat.read(path, as_version=4)
        book.metadata["mathrl_key"] = labs.key(lab)
        nbformat.write(book, path)
    return tmp_path


def stale(root: Path) -> list[str]:
    return [lab.stem for lab in labs.stale(root / "labs")]


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text("utf-8") + text, "utf-8")


def test_change_of_a_lab_or_of_what_it_imports_makes_it_stale(copy, monkeypatch):
    name = "uniform-policy"
    assert stale(copy) == []
    append(copy / "mathrl/kl.py", "\n")  # not imported by this lab
    assert name not in stale(copy)
    for file in (f"labs/{name}.py", "mathrl/arithmetic.py", "mathrl/__init__.py"):
        before = (copy / file).read_text()
        append(copy / file, "\n")
        assert name in stale(copy), file
        (copy / file).write_text(before)
    assert stale(copy) == []
    (copy / f"labs/{name}.ipynb").rename(copy / "elsewhere")
    assert stale(copy) == [name]
    (copy / "elsewhere").rename(copy / f"labs/{name}.ipynb")
    monkeypatch.setattr(labs, "version", lambda _: "2.14.0")
    assert name in stale(copy)


def test_build_of_torch_does_not_make_a_lab_stale(copy, monkeypatch):
    keys = set()
    for version in ("2.13.0", "2.13.0+cpu", "2.13.0+cu130"):
        monkeypatch.setattr(labs, "version", lambda _, v=version: v)
        keys.add(labs.key(copy / "labs/uniform-policy.py"))
    assert len(keys) == 1


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_lab_shows_its_own_cells_and_what_they_print(site, lab):
    source = jupytext.read(lab)
    stored = nbformat.read(lab.with_suffix(".ipynb"), as_version=4)
    assert [cell.source for cell in stored.cells] == [cell.source for cell in source.cells]
    execute(source)
    assert [printed(cell) for cell in code(stored)] == [printed(cell) for cell in code(source)]
    html = site / lab.relative_to(DOCS).with_suffix("") / "index.html"
    page = BeautifulSoup(html.read_text("utf-8"), "html.parser")
    shown = [cell.get_text().strip() for cell in page.select(".jp-InputArea-editor pre")]
    assert shown == [cell.source.strip() for cell in code(source)]
    alternatives = [image["alt"] for image in page.select(".jp-RenderedSVG img")]
    assert alternatives
    assert "No description has been provided for this image" not in alternatives


def test_plot_without_its_description_fails_the_build(tmp_path):
    path = tmp_path / "lab.ipynb"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="labs/lab.ipynb", abs_src_path=path))
    image = '<img alt="No description has been provided for this image">'
    plot = nbformat.v4.new_output("display_data", {"image/svg+xml": "<svg/>"})
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[plot])])
    nbformat.write(book, path)
    with pytest.raises(PluginError, match="without its `alt`"):
        labs.on_page_content(image, page, None, None)
    plot.metadata["image/svg+xml"] = {"alt": "a < b"}
    nbformat.write(book, path)
    assert labs.on_page_content(image, page, None, None) == '<img alt="a &lt; b">'


def test_failing_lab_leaves_no_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(labs, "ROOT", tmp_path)
    lab = tmp_path / "bad.py"
    lab.write_text("# %%\nlen(42)\n")
    with pytest.raises(CellExecutionError):
        labs.execute(lab)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.py"]
    lab.write_text("# %%\nprint(42)\n")
    labs.execute(lab)
    assert labs.stale(tmp_path) == []
