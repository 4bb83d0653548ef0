"""Self-hosts KaTeX when `npm ci` has put it in node_modules; otherwise names the pinned CDN copy.

The version is the one in package.json. The hashes are checked against the real files by a test.
"""

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DIST = ROOT / "node_modules/katex/dist"
VERSION = json.loads((ROOT / "package.json").read_text("utf-8"))["dependencies"]["katex"]
CDN = f"https://cdn.jsdelivr.net/npm/katex@{VERSION}/dist"
INTEGRITY = {
    "katex.min.js": "sha384-a1WQdjRj162i159OYq041X6I4K8NenkrI09LlPmiHg0YOb7CR+wJOraXwK9abpnE",
    "katex.min.css": "sha384-WwGtaC6ywCHxA5cstpj/3+xIZvTez8dq2IcBQaXRkenHZ7FVVq1ZROtURwfbtTlG",
}


def on_config(config: Any) -> Any:
    """Tell the theme where KaTeX is."""
    local = DIST.is_dir()
    config.extra["katex"] = {
        name: {
            "local": local,
            "url": f"assets/katex/{name}" if local else f"{CDN}/{name}",
            "integrity": digest,
        }
        for name, digest in INTEGRITY.items()
    }
    return config


def on_files(files: Files, config: Any) -> Files:
    """Copy the script, the style sheet and its fonts into the site."""
    if DIST.is_dir():
        for path in [
            *(DIST / name for name in INTEGRITY),
            *sorted((DIST / "fonts").glob("*.woff2")),
        ]:
            uri = f"assets/katex/{path.relative_to(DIST).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files
