"""Lint, format and types, with the settings of pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = {
    "lint": ["ruff", "check", "."],
    "format": ["ruff", "format", "--check", "--diff", "."],
    "types": ["mypy"],
}
FAULTS = {
    "lint": "import os\n",
    "format": "x = {'a' : 1}\n",
    "types": "def f(x: int) -> str:\n    return x\n",
}


def tool(name: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *TOOLS[name], *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


@pytest.mark.parametrize("name", TOOLS)
def test_repository_passes(name):
    result = tool(name, ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", TOOLS)
def test_fault_is_found(name, tmp_path):
    settings = str(ROOT / "pyproject.toml")
    (tmp_path / "fault.py").write_text(FAULTS[name])
    option = "--config-file" if name == "types" else "--config"
    paths = ["fault.py"] if name == "types" else []
    assert tool(name, tmp_path, option, settings, *paths).returncode == 1
