"""The built book in Chromium: math, search, copying, the figures, dark mode, phones, axe."""

import os
import re
import subprocess
import sys
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from fences import fences
from mathrl import arithmetic
from tests.plugin.snippets import same_output
from tests.small_book import build_strictly

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHAPTER_1 = "bench/01-contract/"


def page_address(path: Path) -> str:
    """The address of a page of the book, relative to the book's."""
    parts = path.relative_to(DOCS).with_suffix("").parts
    return "".join(f"{part}/" for part in (parts[:-1] if parts[-1] == "index" else parts))


PAGES = [page_address(path) for path in sorted([*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")])]
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 812}
SCHEMES = {"light": "default", "dark": "slate"}


def go(page, address: str, scheme: str = "light") -> None:
    """Open an address in a colour scheme and wait until its figures are ready."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.goto(address)
    assert page.locator("body").get_attribute("data-md-color-scheme") == SCHEMES[scheme]
    for name in set(re.findall(r"<(mathrl-[\w-]+)", page.content())):
        page.wait_for_function(
            "name => [...document.querySelectorAll(name)].every(e => e.hasAttribute('ready'))",
            arg=name,
        )


# ---------------------------------------------------------------- every page

# The rules whose answer changes with colours or widths; the others ask about the same text again.
SEEN = ["color-contrast", "scrollable-region-focusable"]
AXE = ROOT / "node_modules/axe-core/axe.min.js"


# The colour of a token depends on its class and its block: of each kind, one is looked at.
ONE_TOKEN_OF_A_KIND = """() => {
    const seen = new Set();
    for (const token of document.querySelectorAll("article .highlight code span[class]")) {
        const kind = `${token.className} in ${token.closest(".highlight").className}`;
        if (token.childElementCount || !seen.has(kind)) seen.add(kind);
        else token.replaceWith(token.textContent);
    }
}"""


def violations(page, rules: list[str] | None = None) -> list[str]:
    """What axe finds in the page's article, by all its rules or by some, one line each."""
    if not page.evaluate("typeof axe === 'object'"):
        page.add_script_tag(path=AXE)
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    found = page.evaluate("options => axe.run('article', options)", options)["violations"]
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


STICKING_OUT = """() => {
    const edge = document.documentElement.clientWidth + 1;
    const scrolls = element => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
    const boxed = element => {
        for (let e = element.parentElement; e && e.tagName !== "ARTICLE"; e = e.parentElement)
            if (scrolls(e)) return true;
        return false;
    };
    const found = [...document.querySelectorAll("article *:not(svg *, .katex-mathml *)")]
        .filter(e => e.getBoundingClientRect().right > edge && e.checkVisibility() && !boxed(e))
        .map(e => e.outerHTML.slice(0, 150));
    if (document.documentElement.scrollWidth > edge) found.push("the page scrolls sideways");
    return found.slice(0, 5);
}"""


def wide(page) -> list[str]:
    """What sticks out of the window to the right and is not in a box that scrolls."""
    return page.evaluate(STICKING_OUT)


@pytest.fixture(scope="module")
def watched(tab):
    """The shared page and the errors that its pages log."""
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    return tab, errors


@pytest.mark.parametrize("address", PAGES)
def test_page_is_readable(watched, address):
    """Math renders, nothing overflows on a desk or a phone, axe is content, no request leaves."""
    page, errors = watched
    errors.clear()
    page.set_viewport_size(DESK)
    go(page, address)
    assert page.locator(".katex-error").all_inner_texts() == []
    formulas = page.locator(".arithmatex").count()
    assert page.locator(".arithmatex > :is(.katex, .katex-display)").count() == formulas
    assert wide(page) == []
    page.evaluate(ONE_TOKEN_OF_A_KIND)
    assert violations(page) == []
    page.set_viewport_size(PHONE)
    assert wide(page) == []
    page.emulate_media(color_scheme="dark")
    page.locator("body[data-md-color-scheme=slate]").wait_for()
    page.evaluate("new Promise(requestAnimationFrame)")
    assert violations(page, SEEN) == []
    assert wide(page) == []
    page.set_viewport_size(DESK)
    assert wide(page) == []
    assert errors == []
    assert page.left_the_site == []


def test_every_page_is_looked_at(site):
    found = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    assert found == {address.rstrip("/") or "." for address in PAGES}


@pytest.fixture
def faulty(page, tmp_path):
    """A page of the book's make with a fault of each kind."""
    text = (
        "# Page\n\nGood $x$, broken $\\frac{1$.\n\nUnknown:\n\n$$\n\\nosuch\n$$\n\n"
        '<img src="x.svg">\n\n<div style="width: 3000px">wide</div>\n\n'
        '<p style="color: #aaa; background: #fff">pale</p>\n'
    )
    site = build_strictly(tmp_path, {"index.md": text, "x.svg": "<svg/>"})
    katex = ROOT / "node_modules/katex/dist"
    page.route(
        re.compile("cdn.jsdelivr.net.*/dist/(.*)"),
        lambda route: route.fulfill(path=katex / route.request.url.split("/dist/")[1]),
    )
    page.goto((site / "index.html").as_uri())
    yield page
    page.left_the_site.clear()


def test_faults_of_a_page_are_found(faulty):
    marked = "e => e.matches('.katex-error') || e.querySelector('.katex-error') !== null"
    formulas = [(f.inner_text(), f.evaluate(marked)) for f in faulty.locator(".arithmatex").all()]
    assert [wrong for _, wrong in formulas] == [False, True, True], formulas
    assert [line[:4] for line in wide(faulty)] == ["<div", "the "]
    assert {line.split(":")[0] for line in violations(faulty)} == {"image-alt", "color-contrast"}
    assert any("cdn.jsdelivr.net" in request for request in faulty.left_the_site)


# ---------------------------------------------------------------- search and copying


def test_search_finds_a_word_of_chapter_1(page):
    go(page, "")
    page.keyboard.press("/")
    page.keyboard.type("extrapolation")
    result = page.locator(".md-search-result__link").first
    result.wait_for()
    assert CHAPTER_1 in result.get_attribute("href")
    result.click()
    page.wait_for_url(f"**/{CHAPTER_1}**")


def fresh(code: str, directory: Path) -> str:
    """What pasted code prints in a fresh interpreter elsewhere."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
    result = subprocess.run([sys.executable, "-"], input=code, cwd=directory, env=environment,
                            capture_output=True, text=True)  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.rstrip()


@pytest.mark.parametrize("path", [DOCS / "index.md", *sorted(DOCS.glob("*/0*.md"))], ids=str)
def test_copying_gives_exactly_the_snippet(page, path, tmp_path):
    go(page, page_address(path))
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    snippets = [fence for fence in fences(path) if fence.is_python]
    copied = page.evaluate(
        """async () => {
            const texts = [];
            for (const block of document.querySelectorAll(".language-python.highlight")) {
                await navigator.clipboard.writeText("");
                block.querySelector("[data-clipboard-target]").click();
                texts.push(await navigator.clipboard.readText());
            }
            return texts;
        }"""
    )
    assert copied == [snippet.text.rstrip() for snippet in snippets]
    assert page.locator(".output [data-clipboard-target]:visible").count() == 0


def test_pasted_snippet_prints_in_a_fresh_interpreter_what_the_page_shows(page, tmp_path):
    go(page, CHAPTER_1)
    snippet = next(fence for fence in fences(DOCS / "bench/01-contract.md") if fence.is_python)
    block = page.locator(".language-python.highlight").first
    block.hover()
    block.locator("[data-clipboard-target]").click()
    pasted = page.evaluate("navigator.clipboard.readText()")
    assert same_output(fresh(pasted, tmp_path), snippet.output.text.rstrip())


def test_copying_an_example_of_the_reference_leaves_prompt_and_output_out(page):
    go(page, "reference/arithmetic/")
    block = page.locator(".language-pycon").first
    block.hover()
    block.locator("[data-clipboard-target]").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    shown = [line for line in block.inner_text().splitlines() if line.startswith((">>> ", "... "))]
    assert [line for line in copied.splitlines() if line] == [line[4:] for line in shown]


# ---------------------------------------------------------------- the figure of chapter 1

RESPONSES = arithmetic.responses()
LABELS = {"ok": "reward 1", "intermediate": "wrong intermediate", "final": "wrong final"}


@pytest.fixture
def figure(page):
    go(page, CHAPTER_1)
    return page.locator("mathrl-responses")


def verdicts(task):
    return [arithmetic.verify(task, response) for response in RESPONSES]


def test_grid_shows_the_verdicts_of_the_package_on_every_task(page, figure):
    menu = figure.get_by_label("Task")
    for task in arithmetic.TASKS:
        menu.select_option(f"{task[0]},{task[1]}")
        reasons = [verdict["reason"] for verdict in verdicts(task)]
        cells = figure.locator("td").evaluate_all(
            "cells => cells.map(e => [e.dataset.reason, e.getAttribute('aria-label'), e.innerText])"
        )
        assert cells == [
            [reason, f"{' '.join(map(str, y))}: {LABELS[reason]}", f"{y[0]}\N{HAIR SPACE}{y[1]}"]
            for y, reason in zip(RESPONSES, reasons, strict=True)
        ]
        counts = Counter(LABELS[reason] for reason in reasons)
        legend = figure.locator(".legend li").all_inner_texts()
        assert legend == [f"{counts[label]} {label}" for label in LABELS.values()]
        caption = figure.locator("caption").inner_text()
        assert caption.startswith(f"The 100 responses to {task[0]} + {task[1]}.")
        assert f"probability {1 / len(RESPONSES):.2f}" in caption


def test_grid_works_by_keyboard(page, figure):
    figure.get_by_label("Task").focus()
    before = figure.get_by_label("Task").input_value()
    page.keyboard.press("ArrowUp")
    task = tuple(int(part) for part in figure.get_by_label("Task").input_value().split(","))
    assert (
        arithmetic.TASKS.index(task)
        == arithmetic.TASKS.index(tuple(map(int, before.split(",")))) - 1
    )
    page.keyboard.press("Tab")
    visited = []
    for row in range(10):  # every cell, there and back again like an ox at the plough
        for column in range(10):
            u, v = row, column if row % 2 == 0 else 9 - column
            verdict = arithmetic.verify(task, [u, v, 13])
            assert figure.locator("[role=status]").inner_text() == (
                f"Response [{u}, {v}, 13]: reward {verdict['reward']}, "
                f"reason “{verdict['reason']}”. {verdict['detail']}"
            )
            visited.append(page.evaluate("document.activeElement.innerText"))
            if column < 9:
                page.keyboard.press("ArrowRight" if row % 2 == 0 else "ArrowLeft")
        page.keyboard.press("ArrowDown")
    assert len(set(visited)) == 100
    page.keyboard.press("Tab")
    assert not figure.evaluate("figure => figure.contains(document.activeElement)")


def test_grid_reads_without_javascript(browser, book_url):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(book_url + CHAPTER_1)
    cells = page.locator("mathrl-responses td")
    reasons = cells.evaluate_all("cells => cells.map(cell => cell.dataset.reason)")
    assert reasons == [verdict["reason"] for verdict in verdicts((3, 4))]
    assert "The 100 responses to 3 + 4." in page.locator("mathrl-responses caption").inner_text()
    context.close()


# ---------------------------------------------------------------- the lab in the dark


def luminance(colour: tuple[int, int, int]) -> float:
    """WCAG's relative luminance."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
              for c in (part / 255 for part in colour)]  # fmt: skip
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(picture: bytes) -> float:
    """The contrast between a picture's commonest colour and the one furthest from it."""
    image = Image.open(BytesIO(picture)).convert("RGB")
    pixels = {colour: count for count, colour in image.getcolors(image.width * image.height)}
    ground = luminance(max(pixels, key=pixels.get))
    return max((max(ground, x) + 0.05) / (min(ground, x) + 0.05) for x in map(luminance, pixels))


def axis_label(page) -> bytes:
    """A picture of the strip at the foot of the lab's plot, where only black ink stands."""
    box = page.locator(".jp-RenderedSVG img").bounding_box()
    strip = {**box, "y": box["y"] + box["height"] * 0.88, "height": box["height"] * 0.12}
    return page.screenshot(clip=strip, full_page=True)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_plot_of_the_lab_is_readable(page, scheme):
    go(page, "labs/uniform-policy/", scheme)
    assert contrast(axis_label(page)) > 7
    if scheme == "dark":
        page.add_style_tag(content=".jp-RenderedSVG img { filter: none !important }")
        assert contrast(axis_label(page)) < 3
