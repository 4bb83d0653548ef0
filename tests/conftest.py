"""One strict build of the book, served and opened in Chromium, for every test that looks at it."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from filelock import FileLock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch comes: the workers share the cores

ROOT = Path(__file__).parents[1]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def shared_directory(factory: pytest.TempPathFactory) -> Path:
    """A directory of this run that all pytest-xdist workers see."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole book, built once with --strict; a warning of the build fails every test here."""
    shared = shared_directory(tmp_path_factory)
    built, done = shared / "site", shared / "site.done"
    with FileLock(shared / "site.lock"):
        if not done.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(built)]
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            done.write_text("" if result.returncode == 0 else result.stdout + result.stderr)
    if problem := done.read_text():
        pytest.fail(f"mkdocs build --strict failed:\n{problem}", pytrace=False)
    return built


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def serve(directory: Path) -> Iterator[str]:
    """Serve a directory on this machine; yield its address."""
    handler = functools.partial(_Quiet, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def book_url(site: Path) -> Iterator[str]:
    """The address of the book, below a path, as a project's pages are hosted."""
    for root in serve(site.parent):
        yield f"{root}/{site.name}/"


def absent(what: str) -> None:
    """Skip a test whose tools this machine lacks; under CI=true their absence is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, and CI=true requires it", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium through Playwright."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if found is None:
        absent("no chromium on the PATH (on Debian: apt-get install chromium)")
    if not (ROOT / "node_modules/axe-core").is_dir():
        absent("no node_modules (run `npm ci`), so neither KaTeX nor axe is here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def opened(browser, book_url: str):
    """An empty page whose addresses are relative to the book's; requests leaving it are kept."""
    context = browser.new_context(
        base_url=book_url,
        permissions=["clipboard-read", "clipboard-write"],
        viewport={"width": 1280, "height": 900},
    )
    page = context.new_page()
    page.left_the_site = []
    context.on(
        "request",
        lambda request: (
            request.url.startswith((book_url, "data:", "blob:"))
            or page.left_the_site.append(request.url)
        ),
    )
    yield page
    context.close()
    assert page.left_the_site == []


@pytest.fixture
def page(browser, book_url: str):
    """A page of its own for one test."""
    with opened(browser, book_url) as page:
        yield page


@pytest.fixture(scope="module")
def tab(browser, book_url: str):
    """A page for many tests that only look, with an empty index where nobody searches."""
    index = {"config": {"lang": ["en"], "separator": "-", "pipeline": [], "fields": {}}, "docs": []}
    with opened(browser, book_url) as page:
        page.route("**/search_index.json", lambda route: route.fulfill(json=index))
        yield page
