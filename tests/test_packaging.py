"""What a stranger installs: the wheel, the pins, the README's commands, the workflow."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from fences import fences
from tests.plugin.snippets import same_output

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
README = (ROOT / "README.md").read_text("utf-8")

# ---------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(directory.glob("*.whl"))


def foreign(names: list[str]) -> list[str]:
    """The files of a wheel that are neither the package nor its metadata."""
    ours = re.compile(r"mathrl/([\w/]+\.py|py\.typed)|mathrl-[\d.]+\.dist-info/.+")
    return [name for name in names if not ours.fullmatch(name)]


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert foreign(names) == []
    assert foreign(["tests/test_kl.py", "mathrl/notes.md", "docs/index.md"]) != []
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mathrl").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == package
    assert "mathrl/py.typed" in names
    assert wheel.stat().st_size < 200_000


@pytest.fixture(scope="module")
def stranger(wheel, tmp_path_factory) -> Path:
    """The Python of a new environment: mathrl from the wheel; numpy and torch lent by this one."""
    home = tmp_path_factory.mktemp("stranger")
    venv.create(home)
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps",
               "--no-index", "--quiet", str(wheel)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    # A path file is read, but the path files in the directory it names are not: the editable
    # install of this environment does not come along.
    own = next((home / "lib").rglob("site-packages")) if os.name != "nt" else home
    (own / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(python: Path, code: str) -> str:
    """What code prints in an environment, away from the repository."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [python, "-c", code], cwd=python.parent, env=clean, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.rstrip()


def test_stranger_has_mathrl_from_the_wheel_only(stranger):
    where = Path(run(stranger, "import mathrl; print(mathrl.__file__)"))
    assert stranger.parents[1] in where.parents
    assert run(stranger, "import importlib.util as u; print(u.find_spec('tests'))") == "None"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/bench/01-contract.md"])
def test_first_snippet_runs_for_a_stranger(stranger, page):
    snippet = next(fence for fence in fences(ROOT / page) if fence.is_python)
    assert same_output(run(stranger, snippet.text), snippet.output.text.rstrip())


def test_import_is_light(stranger):
    loaded = "import sys, mathrl.arithmetic; print({'torch', 'numpy'} & set(sys.modules))"
    assert run(stranger, loaded) == "set()"


# ---------------------------------------------------------------- the pins


def unpinned(requirements: list[str], pins: dict[str, str]) -> list[str]:
    """The requirements that no exact pin meets."""
    known = {re.sub(r"[-_.]+", "-", name).lower(): Version(pin) for name, pin in pins.items()}
    wanted = [Requirement(text) for text in requirements]
    met = {
        r.name for r in wanted if r.name.lower() in known and known[r.name.lower()] in r.specifier
    }
    return [r.name for r in wanted if r.name not in met]


def test_constraints_pin_every_dependency():
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["book"],
                    *PROJECT["optional-dependencies"]["test"]]  # fmt: skip
    assert unpinned(requirements, PINS) == []
    assert unpinned(["numpy>=99", "scipy"], {"numpy": "2.4.6"}) == ["numpy", "scipy"]
    assert "+" not in "".join(PINS.values())
    assert "mathrl" not in PINS


def test_lock_file_agrees_and_names_no_registry():
    lock = json.loads((ROOT / "package-lock.json").read_text())
    package = json.loads((ROOT / "package.json").read_text())
    for name, version in (package["dependencies"] | package["devDependencies"]).items():
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
    assert not any("resolved" in entry for entry in lock["packages"].values())


# ---------------------------------------------------------------- README, CI, workflow


def commands() -> list[str]:
    """The README's commands, in order."""
    return [f.text.strip() for f in fences(ROOT / "README.md") if f.info.strip() == "bash"]


def test_readme_has_two_commands_that_use_the_pins():
    book, tests = commands()
    assert book.endswith("/mkdocs serve")
    assert tests.endswith("/pytest -n 2")
    for command, extras in ((book, "book"), (tests, "book,test")):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
        assert f'-c constraints.txt -e ".[{extras}]"' in command


def test_ci_runs_the_command_of_the_readme(tmp_path):
    """The script runs to its end with every program replaced by one that reports its call."""
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci/run"
    script.write_bytes((ROOT / ".ci/run").read_bytes())
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("chromium", "npm", "python3"):
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $* CI=$CI"\ntest "$FAIL" != {name}\n')
        program.chmod(0o755)

    def ci(readme: str, fail: str = "") -> subprocess.CompletedProcess[str]:
        (tmp_path / "README.md").write_text(readme)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(["bash", str(script)], capture_output=True, text=True,
                              env={"PATH": path, "FAIL": fail})  # fmt: skip

    first = commands()[1].split(" && ")[0]
    result = ci(README.replace(commands()[1], first))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "npm ci --no-audit --no-fund CI=true", f"+ {first}", "python3 -m venv .venv CI=true"
    ]  # fmt: skip
    assert f"+ {commands()[1]}\n" in ci(README, fail="python3").stdout
    for fault in (ci(README, fail="python3"), ci(README, fail="npm"), ci("no command")):
        assert fault.returncode != 0
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_workflow_is_pinned_and_has_no_right_it_does_not_need():
    workflow = yaml.safe_load((ROOT / ".github/workflows/book.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert workflow["permissions"] == {}
    writes = {
        name: [right for right, level in job["permissions"].items() if level == "write"]
        for name, job in workflow["jobs"].items()
    }
    assert writes == {"verify": [], "deploy": ["pages", "id-token"]}
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", s["uses"]) for s in steps if "uses" in s)
    scripts = [step["run"] for step in steps if "run" in step]
    assert scripts == [".ci/run", ".venv/bin/mkdocs build --strict"]


def test_version_is_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert f"Version {PROJECT['version']}" in (ROOT / "docs/reference/cite.md").read_text()


def test_readme_is_short_and_its_picture_light():
    assert len(README.splitlines()) < 120
    for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README):
        assert (ROOT / picture).stat().st_size < 150_000
