"""The snippet runner, held to pages with one fault each."""

import ast
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fences import fences, parse
from tests.plugin import sandbox
from tests.plugin.snippets import same_output

ROOT = Path(__file__).parents[1]
FAULTS = ("failure", "error")


def snippet(code: str, output: str | None = None, options: str = "") -> str:
    """A page's Markdown for one snippet and the output that it claims."""
    text = f"```{{.python{options}}}\n{code}\n```\n"
    return text + (f"\n```{{.text .output}}\n{output}\n```\n" if output is not None else "")


def inside(head: str, body: str) -> str:
    return f"{head}\n" + textwrap.indent(body, "    ")


RIGHT = snippet("print(6 * 7)", "42")
WRONG = snippet("print(6 * 7)", "41")

WITHIN_ONE = snippet("print(f'{2 / 3:.4f}')", "0.6666")  # one unit of the last digit


def note_between(printed: str, noted: str) -> str:
    """A snippet, one in a note, and one that is right to within the last digit."""
    first, second = snippet("print(6)\nprint(7)", printed), inside("??? note", noted)
    return f"{first}\n{second}\n{WITHIN_ONE}"


STALE, REWRITTEN = note_between("41", WRONG), note_between("6\n7", RIGHT)

PASS = {
    "right": RIGHT,
    "rewritten": REWRITTEN,
    "silent": snippet("answer = 6 * 7"),
    "last-digit": WITHIN_ONE,
    "clean-process": snippet("import mathrl\nmathrl.spoilt = 1\nprint('spoilt')", "spoilt")
    + "\nThe next one starts afresh.\n\n"
    + snippet("import mathrl\nprint(hasattr(mathrl, 'spoilt'))", "False"),
    "seeded": snippet(
        "import torch\ntorch.manual_seed(0)\nprint(f'{torch.rand(1).item():.4f}')", "0.4963"
    ),
    "autograd": snippet(
        "import torch\nx = torch.ones(2, requires_grad=True)\n(x * x).sum().backward()"
        "\nprint(x.grad.tolist())",
        "[2.0, 2.0]",
    ),
    "in-note": inside("!!! note", RIGHT),
}
FAIL = {
    "wrong-output": (WRONG, "the page shows:\n41\nthe snippet prints:\n42"),
    "missing-output": (snippet("print(6 * 7)"), "prints, but no"),
    "silent-output": (snippet("answer = 6 * 7", "42"), "prints nothing"),
    "detached-output": (
        snippet("print(6 * 7)") + "\nprose\n\n```{.text .output}\n42\n```\n",
        "prints, but no",
    ),
    "unseeded": (
        snippet("import torch\nprint(f'{torch.rand(1).item():.6f}')", "0.496257"),
        "the snippet prints",
    ),
    "unseeded-numpy": (
        snippet("import numpy\nprint(f'{numpy.random.rand():.6f}')", "0.548814"),
        "the snippet prints",
    ),
    "in-admonition": (inside("!!! note", WRONG), "the snippet prints:\n42"),
    "in-details": (inside("??? note", WRONG), "the snippet prints:\n42"),
    "in-tab": (inside('=== "tab"', WRONG), "the snippet prints:\n42"),
    "bare-fence": (WRONG.replace("{.python}", "python"), "the snippet prints:\n42"),
    "type-error": (snippet("print(6 * 7)\nlen(42)", "42"), "TypeError"),
    "type-error-once": (
        snippet(
            "import pathlib\nmark = pathlib.Path('mathrl-type-error')\n"
            "seen = mark.exists()\nmark.touch()\nif not seen:\n    len(42)\nmark.unlink()"
        ),
        "TypeError",
    ),
    "leans-on-the-one-above": (snippet("a = 1") + "\n" + snippet("print(a)", "1"), "NameError"),
    "ends-its-process": (
        snippet("import os\nprint(42, flush=True)\nos._exit(0)", "42"),
        "ended its process",
    ),
    "needs-the-repository": (snippet("import tests.mutants"), "tests"),
    "another-runner": (snippet("print(6 * 7)", "41", " runner:DefaultRunner"), "takes no option"),
    "retried": (snippet("print(6 * 7)", "42", " retry:3"), "takes no option"),
    "continued": (
        snippet("a = 1") + "\n" + snippet("print(a)", "1", " continuation"),
        "takes no option",
    ),
}


def run_pages(directory: Path, pages: dict[str, str], *options: str) -> dict[str, str]:
    """Run pytest on pages in a process of its own; return what failed on each page, or ""."""
    for name, text in pages.items():
        (directory / name).write_text(f"# {name}\n\n{text}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        f"--rootdir={directory}",
        "-p",
        "tests.plugin.snippets",
        "-p",
        "no:cacheprovider",
        "--junitxml=report.xml",
        *options,
        *sorted(pages),
    ]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "docs/hooks")])
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(directory)}
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, env=environment)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    cases = list(ElementTree.parse(directory / "report.xml").iter("testcase"))
    reports = {}
    for name in pages:
        own = [case for case in cases if case.get("classname") == name]
        assert own, f"{name} was not collected:\n{result.stdout}"
        faults = [fault.text or "" for case in own for fault in case if fault.tag in FAULTS]
        reports[name] = "\n".join(faults)
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pages = {f"{name}.md": text for name, text in PASS.items()}
    pages |= {f"{name}.md": text for name, (text, _) in FAIL.items()}
    pages["README.md"] = WRONG
    return run_pages(tmp_path_factory.mktemp("pages"), pages)


@pytest.mark.parametrize("name", PASS)
def test_right_page_passes(reports, name):
    assert reports[f"{name}.md"] == ""


@pytest.mark.parametrize("name", FAIL)
def test_page_with_a_fault_fails(reports, name):
    assert FAIL[name][1] in reports[f"{name}.md"]


def test_readme_is_verified_like_a_page(reports, request):
    assert "the snippet prints:\n42" in reports["README.md"]
    assert "README.md" in request.config.getini("testpaths")
    assert any(fence.is_python for fence in fences(ROOT / "README.md"))


def test_failure_shows_the_lines_of_the_page(reports):
    assert re.search(r"^ +4  print\(6 \* 7\)$", reports["wrong-output.md"], re.M)


def test_update_output_rewrites_the_page(tmp_path):
    broken = snippet("print(1)\nlen(42)", "1")
    pages = {"stale.md": STALE, "broken.md": broken}
    reports = run_pages(tmp_path, pages, "--update-output")
    assert (tmp_path / "stale.md").read_text() == f"# stale.md\n\n{REWRITTEN}"
    assert "TypeError" in reports["broken.md"]
    assert (tmp_path / "broken.md").read_text() == f"# broken.md\n\n{broken}"


def test_endless_snippet_is_stopped():
    start = time.monotonic()
    result = sandbox.run("while True: pass", "page.md", time_limit=1)
    assert result.error == "no result within 1 s"
    assert time.monotonic() - start < 30


def test_long_output_arrives_whole():
    assert len(sandbox.run("print('x' * 3_000_000)", "page.md").printed) == 3_000_001


@pytest.mark.parametrize(
    ("printed", "shown", "same"),
    [
        ("0.1234", "0.1234", True),
        ("0.1235", "0.1234", True),
        ("0.1236", "0.1234", False),
        ("0.12345", "0.1234", False),
        ("-0.0001", "0.0000", True),
        ("-0.1234", "0.1234", False),
        ("8", "7", False),
        ("a 0.5 b", "a 0.5 c", False),
        ("1.5 2.5", "1.5", False),
        ("1.5e-05", "1.5e-06", False),
        ("0.5\n", "0.5", False),
    ],
)
def test_decimals_agree_within_one_unit_of_the_last_digit(printed, shown, same):
    assert same_output(printed, shown) is same


def test_fences_know_what_follows_them():
    first, second, output = parse(snippet("a = 1") + "\n" + RIGHT)
    assert (first.output, second.output) == (None, output)
    assert (second.line, second.text, output.text) == (5, "print(6 * 7)\n", "42\n")


def imports(code: str) -> set[str]:
    """The top-level names of the modules that a snippet imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_snippets_import_only_what_mathrl_installs():
    installed = {"mathrl", "numpy", "torch", *sys.stdlib_module_names}
    assert imports("import scipy.stats as s\nfrom sympy import Symbol") - installed == {
        "scipy",
        "sympy",
    }
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for fence in fences(path):
            if fence.is_python:
                assert imports(fence.text) <= installed, f"{path}:{fence.line}"
