"""The reward mixer in Chromium: every number it shows is held against `mathrl.mixture`."""

import itertools
import re
import shutil

import numpy as np
import pytest

import figures
import mixer
from mathrl.mixture import MixedReward, bootstrap_scales
from tests.conftest import serve
from tests.oracles import fails, refuses
from tests.small_book import ROOT, build_strictly
from tests.test_browser import DESK, PHONE, SEEN, violations, wide
from tests.test_figures import changed, press, shown, table

SOLVE = [1, 0, 0, 1, 0, 0, 0, 0]
ORDER = [0.52, 0.34, 0.41, 0.37, 0.29, 0.46, 0.33, 0.38]
MEANS = (0.279, 0.365)
ELEMENT = (
    f'<mathrl-mixer alpha="0.9" solve="{",".join(map(str, SOLVE))}" '
    f'order="{",".join(map(str, ORDER))}" means="0.279,0.365"></mathrl-mixer>'
)
TEXT = f'<div class="figure" markdown="0">\n{ELEMENT}\n</div>'
NORMS = ("group", "none", "decoupled")


def test_the_chapter_shows_this_figure():
    assert ELEMENT in (ROOT / "docs/rewards/13-mixing.md").read_text("utf-8")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The address of a page with the figure and without the theme."""
    directory = tmp_path_factory.mktemp("mixer")
    shutil.copytree(ROOT / "docs/assets", directory / "assets")
    body = figures.on_page_markdown(TEXT, page=None, config=None, files=None)
    script = '<script type="module" src="assets/figures/mixer.js"></script>'
    html = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Mixer</title>{script}'
    (directory / "index.html").write_text(html + body, "utf-8")
    yield from serve(directory)


@pytest.fixture(scope="module")
def tab(browser):
    context = browser.new_context(reduced_motion="reduce")
    yield context.new_page()
    context.close()


def load(page, address):
    page.goto(address)
    page.locator("mathrl-mixer[ready]").wait_for()


@pytest.fixture
def page(tab, alone):
    load(tab, alone)
    return tab


def dashed(value):
    return "–" if value is None else shown(value, 4)


def truth(alpha, norm, solve, order):
    """Rows of both tables, below the cells that a reader sets."""
    scale = bootstrap_scales(alpha, *MEANS)
    mix = MixedReward(alpha, scale, norm)
    solve, order = np.array([solve], dtype=float), np.array([order])
    rewards, advantages, found = mix(solve, order)
    scales = [
        [dashed(alpha), dashed(scale.solve), dashed(found.std_solve), dashed(found.share_solve)],
        [dashed(1 - alpha), dashed(scale.order), dashed(found.std_order),
         dashed(found.share_order)],
    ]  # fmt: skip
    columns = [rewards, *mix.parts(solve, order), advantages]
    samples = [[shown(float(value[0, i]), 3) for value in columns] for i in range(8)]
    return scales, samples


def check(page, alpha, norm, solve, order):
    figure = page.locator("mathrl-mixer")
    scales, samples = truth(alpha, norm, solve, order)
    assert [row[2:] for row in table(figure)] == scales
    assert [row[3:] for row in table(figure, 1)] == samples
    pressed = figure.locator("button").evaluate_all("all => all.map(e => e.ariaPressed)")
    assert pressed == ["true" if reward else "false" for reward in solve]
    said = figure.get_by_role("status").inner_text()
    assert said.startswith(f"{sum(solve)} of 8 solve.")
    assert ("does not vary" in said) == (sum(solve) in (0, 8))


def choose(page, alpha=None, norm=None):
    if norm:
        page.locator("mathrl-mixer select").select_option(norm)
    if alpha is not None:
        page.get_by_role("slider").fill(f"{alpha}")


def set_order(page, index, value):
    page.get_by_role("spinbutton").nth(index).fill(value)


def test_mixer_opens_on_what_the_build_wrote(page):
    check(page, 0.9, "group", SOLVE, ORDER)


def test_mixer_follows_the_slider_and_the_normalisation(page):
    for alpha, norm in itertools.product((0, 0.01, 0.5, 0.75, 0.99, 1), NORMS):
        choose(page, alpha, norm)
        check(page, alpha, norm, SOLVE, ORDER)
    press(page, page.get_by_role("slider"), "ArrowLeft*3")
    check(page, 0.97, "decoupled", SOLVE, ORDER)


def test_mixer_follows_the_outcomes(page):
    solve, order = list(SOLVE), list(ORDER)
    for i in (0, 3):  # nobody solves
        press(page, page.locator("mathrl-mixer button").nth(i), "Space")
        solve[i] = 1 - solve[i]
        check(page, 0.9, "group", solve, order)
    for alpha, norm in itertools.product((0.5, 0.99, 1), NORMS):
        choose(page, alpha, norm)
        check(page, alpha, norm, solve, order)
    for i in range(8):  # all orders are equal as well
        set_order(page, i, "0.7")
        order[i] = 0.7
    for norm in NORMS:
        choose(page, 0.5, norm)
        check(page, 0.5, norm, solve, order)
    press(page, page.locator("mathrl-mixer button").nth(5), "Enter")
    solve[5] = 1
    for norm in NORMS:
        choose(page, 0.5, norm)
        check(page, 0.5, norm, solve, order)


def test_half_typed_numbers_change_nothing(page):
    for text in ("", "2", "-1"):
        set_order(page, 2, text)
        check(page, 0.9, "group", SOLVE, ORDER)
    set_order(page, 2, "0.06")
    check(page, 0.9, "group", SOLVE, [*ORDER[:2], 0.06, *ORDER[3:]])


def test_mixer_reads_without_javascript(browser, alone):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(alone)
    figure = page.locator("mathrl-mixer")
    scales, samples = truth(0.9, "group", SOLVE, ORDER)
    assert [row[1] for row in table(figure)] == ["0.279", "0.365"]
    assert [row[2:] for row in table(figure)] == scales
    assert [row[1:3] for row in table(figure, 1)] == [
        [f"{s:g}", f"{o:g}"] for s, o in zip(SOLVE, ORDER, strict=True)
    ]
    assert [row[3:] for row in table(figure, 1)] == samples
    context.close()


def test_every_control_is_reached_by_tab_and_has_a_name(page):
    page.get_by_role("slider").focus()
    reached = []
    for _ in range(18):
        reached.append(page.locator(":focus").aria_snapshot().replace("'", ""))
        page.keyboard.press("Tab")
    assert reached[0].startswith('- slider "Nominal share α"')
    assert reached[1].startswith('- combobox "Normalisation"')
    for i, (button, number) in enumerate(zip(reached[2::2], reached[3::2], strict=True)):
        assert button.startswith(f'- button "Solve reward of sample {i + 1}: {SOLVE[i]}"')
        assert number.startswith(f'- spinbutton "Order reward of sample {i + 1}"')


def test_mixer_is_readable_in_both_schemes_and_nothing_sticks_out(browser, tmp_path_factory):
    pages = {"index.md": f"# Mixer\n\n{TEXT}\n"}
    for address in serve(build_strictly(tmp_path_factory.mktemp("book"), pages)):
        context = browser.new_context(color_scheme="light", reduced_motion="reduce", viewport=DESK)
        page = context.new_page()
        page.route(re.compile("^(?!http://127)"), lambda route: route.abort())
        load(page, address)
        press(page, page.get_by_role("slider"), "Home")
        assert violations(page) == []
        assert wide(page) == []
        page.set_viewport_size(PHONE)
        assert wide(page) == []
        page.emulate_media(color_scheme="dark")
        page.locator("body[data-md-color-scheme=slate]").wait_for()
        page.evaluate("new Promise(requestAnimationFrame)")
        assert violations(page, SEEN) == []
        assert wide(page) == []
        context.close()


def try_mixer(page):
    for alpha, norm in ((0.9, "group"), (0.5, "decoupled"), (0.99, "none")):
        choose(page, alpha, norm)
        check(page, alpha, norm, SOLVE, ORDER)
    for i in (0, 3):
        press(page, page.locator("mathrl-mixer button").nth(i), "Enter")
    for norm in NORMS:
        choose(page, 0.99, norm)
        check(page, 0.99, norm, [0] * 8, ORDER)
    for i in range(8):
        set_order(page, i, "0.7")
    check(page, 0.99, "decoupled", [0] * 8, [0.7] * 8)


MUTANTS = [
    ("share / means[k] : 0", "share * means[k] : 0"),
    ("Math.sqrt(centered.length - 1)", "Math.sqrt(centered.length)"),
    ("Infinity : std(centered)", "1 : std(centered) + 0.01"),
    ('norm === "decoupled" ? nominal : scales', "scales"),
    ("value - sum(shifted) / shifted.length", "value"),
    ("sum(sizes) ? part / sum(sizes) : null", "sum(sizes) ? part / sum(sizes) : 0"),
    ("divisor(add(...scaled), reach)", "divisor(scaled[0], reach)"),
    ("scales[0] * value + scales[1] * order[i]", "scales[0] * value + order[i]"),
    ("this.solve[index] = 1 - this.solve[index];", ""),
    ("this.order[index] = Number(input.value);", ""),
    ("mixed.parts[0][i], mixed.parts[1][i]", "mixed.parts[1][i], mixed.parts[0][i]"),
]


def test_right_script_passes(page):
    try_mixer(page)


@pytest.mark.parametrize(("old", "new"), MUTANTS)
def test_wrong_script_is_caught(tab, alone, old, new):
    with changed(tab, "mixer.js", old, new):
        load(tab, alone)
        fails(try_mixer, tab)


def test_wrong_attributes_stop_the_build():
    eight = ",".join(["0.5"] * 8)
    refuses(ValueError, "`alpha` must list 1 number", mixer.mixer, "1.5", eight, eight, "1,1")
    refuses(ValueError, "`solve` must list 8", mixer.mixer, "0.5", "1,0", eight, "1,1")
    refuses(ValueError, "`order` must list 8", mixer.mixer, "0.5", eight, "1,0", "1,1")
    refuses(ValueError, "`means` must list 2", mixer.mixer, "0.5", eight, eight, "1")
    refuses(ValueError, "`mean_solve` must be positive", mixer.mixer, "0.5", eight, eight, "0,1")
