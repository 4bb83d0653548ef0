"""A book of a page or two, built elsewhere by the real settings, hooks and theme."""

import re
import shutil
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[1]


def build_strictly(directory: Path, pages: dict[str, str]) -> Path:
    """Build pages as `mkdocs build --strict` does and return the site.

    Raises `mkdocs.exceptions.Abort` where the command would fail. There is no node_modules here.
    """
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    without_nav = re.sub(r"^nav:\n(?: .*\n)+", "", settings, flags=re.M)
    assert without_nav != settings
    (directory / "mkdocs.yml").write_text(without_nav, "utf-8")
    for part in ("hooks", "overrides", "assets"):
        shutil.copytree(ROOT / "docs" / part, directory / "docs" / part)
    shutil.copy(ROOT / "package.json", directory)
    for name, text in pages.items():
        path = directory / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    site = directory / "site"
    build(load_config(str(directory / "mkdocs.yml"), site_dir=str(site), strict=True))
    return site
