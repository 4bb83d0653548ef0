"""The figures of chapters 2 to 4 in Chromium: every number they show is held against `mathrl`.

They stand on a page of their own, as the hook writes them, without the theme; and in a book of one
page with it, where colours and widths are judged.
"""

import itertools
import re
import shutil
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch

import figures
from mathrl import baseline, exact, kl
from tests.conftest import serve
from tests.oracles import fails, refuses
from tests.small_book import ROOT, build_strictly
from tests.test_browser import DESK, PHONE, SEEN, violations, wide

ELEMENTS = [
    '<mathrl-simplex logits="0.2,-0.1,0.4" rewards="1,0,0.5"></mathrl-simplex>',
    '<mathrl-group rewards="1,0,0,0,0,0,0,0"></mathrl-group>',
    '<mathrl-kl policy="0.5,0.3,0.2" reference="0.2,0.5,0.3"></mathrl-kl>',
    '<mathrl-simplex logits="-1.5,0.3,2" rewards="0,1,-2"></mathrl-simplex>',
    '<mathrl-group rewards="1,1,0,0,1,0,0,1"></mathrl-group>',
    '<mathrl-kl policy="0.07,0.9,0.03" reference="0.4,0.2,0.4"></mathrl-kl>',
]


TEXT = "\n\nText between.\n\n".join(
    f'<div class="figure" markdown="0">\n{element}\n</div>' for element in ELEMENTS
)
NAMES = ("simplex", "group", "kl")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The address of a page of figures without the theme."""
    directory = tmp_path_factory.mktemp("figures")
    shutil.copytree(ROOT / "docs/assets", directory / "assets")
    (directory / "assets/data").mkdir()
    (directory / "assets/data/group.json").write_text(figures.group_data(), "utf-8")
    scripts = "".join(f'<script type="module" src="assets/figures/{n}.js"></script>' for n in NAMES)
    body = figures.on_page_markdown(TEXT, page=None, config=None, files=None)
    html = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Figures</title>{scripts}'
    (directory / "index.html").write_text(html + body, "utf-8")
    yield from serve(directory)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The address of a book with the figures on its only page."""
    pages = {"index.md": f"# Figures\n\n{TEXT}\n"}
    yield from serve(build_strictly(tmp_path_factory.mktemp("book"), pages))


@pytest.fixture(scope="module")
def tab(browser):
    """A page for all tests: a new one for each would take longer than what is tested."""
    context = browser.new_context(reduced_motion="reduce")
    yield context.new_page()
    context.close()


def load(page, address):
    """Open the figures and wait until they are ready."""
    page.goto(address)
    ready = ", ".join(f"mathrl-{name}[ready]" for name in NAMES)
    page.wait_for_function(f"document.querySelectorAll('{ready}').length === {len(ELEMENTS)}")


@pytest.fixture
def page(tab, alone):
    load(tab, alone)
    return tab


@contextmanager
def changed(page, script, old, new):
    """While it lasts, a script arrives at the page with a change."""
    text = (ROOT / "docs/assets/figures" / script).read_text("utf-8")
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {script}"
    body = text.replace(old, new)
    page.route(f"**/{script}", lambda r: r.fulfill(body=body, content_type="text/javascript"))
    yield
    page.unroute(f"**/{script}")


# ---------------------------------------------------------------- reading and comparing


def shown(value, digits=6):
    """A number as a figure prints it."""
    text = f"{value:.{digits}f}"
    return text[1:] if not text.strip("-0.") and text[0] == "-" else text.replace("-", "−")


def exactly(value):
    return "0" if value == 0 else shown(value, 4)


def table(figure, index=0):
    """The texts of a table's rows below its head, hidden hyphens left out."""
    return (
        figure.locator("table")
        .nth(index)
        .evaluate(
            """table => [...table.querySelectorAll("tbody tr, tfoot tr")].map(
            row => [...row.cells].map(cell => cell.textContent.replaceAll("\\u00ad", "")))"""
        )
    )


def settings(figure):
    """What the sliders stand at."""
    sliders = figure.locator("input[type=range]")
    return sliders.evaluate_all("sliders => sliders.map(slider => Number(slider.value))")


def attributes(element):
    return {
        name: np.array([float(part) for part in text.split(",")])
        for name, text in re.findall(r'([\w]+)="([^"]*)"', element)
    }


def press(page, control, strokes):
    """Press a key on a focused control; "ArrowUp*3" is three strokes."""
    control.focus()
    key, _, times = strokes.partition("*")
    for _ in range(int(times or 1)):
        page.keyboard.press(key)


# ---------------------------------------------------------------- simplex

SIMPLEX = [0, 3]


def simplex_tables(logits, rewards):
    value = exact.value(logits, rewards)
    squares = (exact.score(logits) ** 2).sum(1)
    best = exact.expectation(logits, squares * rewards) / exact.expectation(logits, squares)
    draws = [
        [name, b, exact.group_moments(logits, rewards, lambda r, b=b: r - b, 1).variance]
        for name, b in (("none", 0), ("J", value), ("least variance", best))
    ]
    policy = [
        ["reward r", *(f"{r:g}" for r in rewards)],
        ["policy π", *map(shown, exact.softmax(logits))],
        ["gradient ∇J", *map(shown, exact.gradient(logits, rewards))],
        ["value J", shown(value)],
    ]
    return policy, [[name, shown(b), shown(variance)] for name, b, variance in draws]


def check_simplex(figure, logits, rewards):
    assert [table(figure, 0), table(figure, 1)] == list(simplex_tables(logits, rewards))


KEYS = [
    ["ArrowRight*3", "ArrowLeft*2", "PageUp"],
    ["Home", "End", "ArrowUp"],
    ["End", "End", "ArrowDown*2"],
    ["PageDown", "Home", "Home"],
]


@pytest.mark.parametrize("index", SIMPLEX)
def test_simplex_shows_the_numbers_of_the_oracle_wherever_the_sliders_are_keyed(page, index):
    figure = page.locator("mathrl-simplex").nth(SIMPLEX.index(index))
    given = attributes(ELEMENTS[index])
    assert settings(figure) == given["logits"].tolist()
    check_simplex(figure, given["logits"], given["rewards"])
    seen = {tuple(settings(figure))}
    for keys in KEYS:
        for k, strokes in enumerate(keys):
            press(page, figure.locator("input[type=range]").nth(k), strokes)
        readouts = figure.locator(".readout").all_inner_texts()
        assert readouts == [shown(logit, 1) for logit in settings(figure)]
        check_simplex(figure, np.array(settings(figure)), given["rewards"])
        seen.add(tuple(settings(figure)))
    assert len(seen) == 1 + len(KEYS)


def test_simplex_opens_on_the_worked_example(page):
    texts = page.locator("mathrl-simplex").first.inner_text()
    for number in ("0.337585 0.250089 0.412327", "0.154024 −0.135985 −0.018038", "0.543748"):
        assert number in " ".join(texts.split())


def drawing(figure):
    """Corners, policy point, arrow tip and the two clouds, in the drawing's coordinates."""
    found = figure.evaluate(
        """figure => {
            const centre = e => [e.cx.baseVal.value, e.cy.baseVal.value];
            const cloud = name => [...figure.querySelectorAll(`svg .sample-${name} circle`)];
            return {
                corners: [...figure.querySelector("polygon").points].map(p => [p.x, p.y]),
                policy: centre(figure.querySelector("svg .policy")),
                arrow: figure.querySelector("svg path.arrow").getAttribute("d"),
                none: cloud("none").map(centre),
                value: cloud("value").map(centre),
            };
        }"""
    )
    tail, tip = re.findall(r"[ML]([-\d.e]+ [-\d.e]+)", found.pop("arrow"))[:2]
    found |= {"tail": tail.split(), "tip": tip.split()}
    return {name: np.array(value, dtype=float) for name, value in found.items()}


def check_drawing(figure, logits, rewards):
    """Each dot is one of the 45 estimates that 8 draws can give, as often as it should be."""
    drawn, policy, scores = drawing(figure), exact.softmax(logits), exact.score(logits)
    step = 2 * policy[:, None] * scores  # ∂π_j/∂θ_k, twice

    def place(direction):
        return (policy + step @ direction) @ drawn["corners"]

    np.testing.assert_allclose(drawn["policy"], policy @ drawn["corners"], atol=1e-3)
    np.testing.assert_allclose(drawn["tail"], drawn["policy"], atol=1e-3)
    np.testing.assert_allclose(drawn["tip"], place(exact.gradient(logits, rewards)), atol=1e-3)

    counts = np.array([n for n in itertools.product(range(9), repeat=3) if sum(n) == 8])
    baselines = {"none": 0.0, "value": exact.value(logits, rewards)}
    draws = {}
    for name, b in baselines.items():
        estimates = counts / 8 @ ((rewards - b)[:, None] * scores)
        distances = np.linalg.norm(
            drawn[name][:, None] - np.array([place(g) for g in estimates])[None], axis=2
        )
        assert distances.min(1).max() < 1e-3
        draws[name] = distances.argmin(1)
        moments = exact.group_moments(logits, rewards, lambda r, b=b: r - b, 8)
        noise = drawn["corners"].T @ step @ moments.covariance @ step.T @ drawn["corners"]
        error = drawn[name].mean(0) - drawn["tip"]
        assert (np.abs(error) < 4 * np.sqrt(np.diag(noise) / len(drawn[name]))).all()
        spread = np.trace(np.cov(drawn[name].T)) / np.trace(noise)
        assert 0.6 < spread < 1.5
    assert len(drawn["none"]) == len(drawn["value"]) == 120
    # Both clouds are made of the same actions: what differs between them is the baseline.
    assert (draws["none"] == draws["value"]).all()


def test_simplex_draws_the_exact_arrow_and_honest_samples(page):
    figure, rewards = page.locator("mathrl-simplex").first, attributes(ELEMENTS[0])["rewards"]
    check_drawing(figure, np.array(settings(figure)), rewards)
    first, second, _ = figure.get_by_role("slider").all()
    press(page, first, "PageDown")
    press(page, second, "ArrowRight*4")
    check_drawing(figure, np.array(settings(figure)), rewards)
    before = drawing(figure)
    press(page, figure.get_by_role("button", name="New samples"), "Enter")
    check_drawing(figure, np.array(settings(figure)), rewards)
    assert (drawing(figure)["none"] != before["none"]).any()
    assert (drawing(figure)["tip"] == before["tip"]).all()
    for name in ("no baseline", "baseline J"):
        box = figure.get_by_role("checkbox", name=f"samples, {name}")
        key = {"no baseline": "none", "baseline J": "value"}[name]
        press(page, box, "Space")
        assert not figure.locator(f"svg .sample-{key}").is_visible()
        press(page, box, "Space")
        assert figure.locator(f"svg .sample-{key}").is_visible()
    assert "sample" in figure.locator(".note").inner_text()


def test_samples_are_the_same_for_every_reader(page):
    first = drawing(page.locator("mathrl-simplex").first)["none"]
    page.reload()
    page.locator("mathrl-simplex[ready]").first.wait_for()
    assert (drawing(page.locator("mathrl-simplex").first)["none"] == first).all()


# ---------------------------------------------------------------- group


def advantages(rewards):
    """Rows of the first table of a group."""
    group = torch.tensor(rewards, dtype=torch.float64)
    columns = [
        group,
        baseline.group_mean(group),
        baseline.leave_one_out(group),
        baseline.standardized(group, ddof=0),
        baseline.standardized(group, ddof=1),
    ]
    rows = torch.stack(columns, dim=1).tolist()
    return [
        [f"{i}", f"{r:g}", *map(exactly, row)]
        for i, (r, row) in enumerate(zip(rewards, rows, strict=True), 1)
    ]


@cache
def factors(p):
    limit = 1 / np.sqrt(p * (1 - p))
    return [f"{p:.2f}", *(shown(exact.std_factor(p, size), 4) for size in (2, 8, 64)),
            shown(limit, 4)]  # fmt: skip


def check_group(figure, rewards):
    buttons = figure.locator("button")
    pressed = buttons.evaluate_all("buttons => buttons.map(e => e.getAttribute('aria-pressed'))")
    assert pressed == ["true" if reward else "false" for reward in rewards]
    assert table(figure) == advantages(rewards)


def test_group_shows_the_advantages_of_the_package_for_every_count(page):
    figure, other = page.locator("mathrl-group").all()
    rewards, counts = attributes(ELEMENTS[1])["rewards"].tolist(), set()
    check_group(figure, rewards)
    for i in [*range(1, 8), 3, 0, 6, 1, 7, 2, 5, 4, 6]:  # to all 1, then to all 0
        button = figure.locator("button").nth(i)
        press(page, button, "Space" if i % 2 else "Enter")
        rewards[i] = 1 - rewards[i]
        check_group(figure, rewards)
        counts.add(sum(rewards))
        said = figure.get_by_role("status").inner_text()
        assert said.startswith(f"{sum(rewards):g} of 8 succeed.")
        assert ("exactly 0" in said) == (sum(rewards) in (0, 8))
        if sum(rewards) in (0, 8):
            assert {text for row in table(figure) for text in row[3:]} == {"0"}
    assert counts == set(range(9))
    check_group(other, attributes(ELEMENTS[4])["rewards"].tolist())


def check_factor(figure, p):
    static = [factors(q) for q in (0.01, 0.1, 0.25, 0.5)]
    assert table(figure, 1) == [*static, factors(p)]
    found = figure.evaluate(
        """figure => ({
            ticks: [...figure.querySelectorAll("svg path.grid")].map(
                line => Number(line.getAttribute("d").match(/ ([\\d.]+)H/)[1])),
            line: figure.querySelector("line.marker").x1.baseVal.value,
            dots: [...figure.querySelectorAll("circle.marker")].map(
                e => [e.cx.baseVal.value, e.cy.baseVal.value]),
            curves: [...figure.querySelectorAll("polyline")].map(
                e => [...e.points].map(point => [point.x, point.y])),
        })"""
    )
    one, ten = found["ticks"][0], found["ticks"][3]
    for k, (dot, curve) in enumerate(zip(found["dots"], found["curves"], strict=True)):

        def height(q, k=k):
            return one + np.log10(float(factors(q)[k + 1])) * (ten - one)

        heights = [height(k / 100) for k in range(1, 100)]
        np.testing.assert_allclose([y for _, y in curve], heights, atol=0.1)
        np.testing.assert_allclose(dot, [found["line"], height(p)], atol=0.1)


def test_curves_and_readout_show_the_exact_factor(page):
    figure = page.locator("mathrl-group").first
    slider = figure.get_by_role("slider", name="Success probability p")
    check_factor(figure, 0.05)
    for keys, p in (("Home", 0.01), ("ArrowRight*3", 0.04), ("End", 0.99), ("ArrowDown*2", 0.97)):
        press(page, slider, keys)
        assert slider.get_attribute("aria-valuetext") == f"{p:.2f}"
        check_factor(figure, p)


def test_group_opens_on_the_numbers_of_the_issue(page):
    rows = table(page.locator("mathrl-group").first, 1)
    assert rows[0] == ["0.01", "1.0000", "2.6089", "6.7362", "10.0504"]


# ---------------------------------------------------------------- divergences


def divergences(policy, reference):
    """Rows of the table of divergences, gradients by autograd in the logits."""
    ref_log_probs = torch.tensor(np.log(reference))
    logits = torch.tensor(np.log(policy), requires_grad=True)
    log_probs = logits.log_softmax(-1)

    def slope(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0].tolist()

    reverse, forward = (
        kl.divergence(log_probs, ref_log_probs), kl.divergence(ref_log_probs, log_probs)
    )  # fmt: skip
    probs = log_probs.exp()
    estimates = [(f.__name__, f(log_probs, ref_log_probs)) for f in (kl.k1, kl.k2, kl.k3)]
    loss = [
        [name, (probs * k).sum().item(), *slope((probs.detach() * k).sum())]
        for name, k in estimates
    ]
    reward = [[name, *slope((probs * k.detach()).sum())] for name, k in estimates]
    return [
        ["probabilities"],
        ["π", "", *map(shown, policy)],
        ["ref", "", *map(shown, reference)],
        ["divergences and their gradients"],
        ["KL(π‖ref)", shown(reverse.item()), *map(shown, slope(reverse))],
        ["KL(ref‖π)", shown(forward.item()), *map(shown, slope(forward))],
        ["estimators, differentiated as a loss"],
        *([name, *map(shown, row)] for name, *row in loss),
        ["estimators, detached in the reward"],
        *([name, "", *map(shown, row)] for name, *row in reward),
    ]


def check_divergences(figure):
    weights = np.array(settings(figure)).reshape(2, 3)
    policy, reference = weights / weights.sum(1, keepdims=True)
    assert table(figure) == divergences(policy, reference)
    for name, probs in (("policy", policy), ("reference", reference)):
        bars = figure.locator(f"rect.bar-{name}")
        widths = bars.evaluate_all("bars => bars.map(bar => bar.width.baseVal.value)")
        np.testing.assert_allclose(widths / np.sum(widths), probs, atol=1e-6)
    labels = figure.locator("svg text").all_text_contents()
    both = [f"{n} {shown(p, 3)}" for pair in zip(policy, reference, strict=True)
            for n, p in zip(("π", "ref"), pair, strict=True)]  # fmt: skip
    assert [text for text in labels if not text.startswith("action")] == both


WEIGHTS = [
    ["ArrowRight*3", "ArrowLeft*2", "PageUp", "ArrowUp", "PageDown", "End"],
    ["End", "Home", "Home", "Home", "PageUp", "Home"],
    ["PageDown", "End", "ArrowRight*2", "Home", "End", "PageUp"],
    ["Home", "Home", "Home", "End", "End", "End"],
]


@pytest.mark.parametrize("index", [2, 5])
def test_divergences_follow_the_sliders(page, index):
    figure = page.locator("mathrl-kl").nth([2, 5].index(index))
    given = attributes(ELEMENTS[index])
    weights = 100 * np.concatenate([given["policy"], given["reference"]])
    np.testing.assert_allclose(settings(figure), weights)
    check_divergences(figure)
    for keys in WEIGHTS:
        for k, strokes in enumerate(keys):
            press(page, figure.locator("input[type=range]").nth(k), strokes)
        check_divergences(figure)
    # Equal distributions at last: no divergence, and no minus before a zero.
    assert {text for row in table(figure)[4:] for text in row[1:]} - {""} == {"0.000000"}


def test_divergences_open_on_the_numbers_of_the_issue(page):
    rows = {row[0]: row[1:] for row in table(page.locator("mathrl-kl").first)[3:9]}
    slope = ["0.346243", "−0.220389", "−0.125854"]
    assert rows["KL(π‖ref)"] == ["0.223805", *slope]
    assert rows["KL(ref‖π)"] == ["0.193794", "0.300000", "−0.200000", "−0.100000"]
    assert rows["k2"] == ["0.265479", *slope]


# ---------------------------------------------------------------- for every reader


def test_figures_read_without_javascript(browser, alone):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(alone)
    for index, element in enumerate(ELEMENTS):
        figure, given = page.locator(".figure > :nth-child(1)").nth(index), attributes(element)
        if "logits" in given:
            expected = simplex_tables(**given)
            assert [table(figure, 0), table(figure, 1)] == list(expected)
        elif "policy" in given:
            assert table(figure) == divergences(**given)
        else:
            assert table(figure) == advantages(given["rewards"].tolist())
            assert table(figure, 1) == [factors(p) for p in (0.01, 0.1, 0.25, 0.5)]
            assert figure.locator("svg polyline").count() == 4
    context.close()


def test_every_control_is_reached_by_tab_and_has_a_name(page):
    page.locator("mathrl-simplex input").first.focus()
    reached = []
    for _ in range(21):
        reached.append(page.locator(":focus").aria_snapshot().replace("'", ""))
        page.keyboard.press("Tab")
    sliders = [f'slider "action {k}"' for k in (1, 2, 3)]
    expected = [
        *sliders,
        'checkbox "samples, no baseline" [checked]',
        'checkbox "samples, baseline J" [checked]',
        'button "New samples"',
        'button "Reward of sample 1: 1" [pressed]',
        *(f'button "Reward of sample {i}: 0"' for i in range(2, 9)),
        'slider "Success probability p"',
        *sliders,
        *sliders,
    ]
    assert len(reached) == len(expected)
    for found, name in zip(reached, expected, strict=True):
        assert found.startswith(f"- {name}")
    groups = page.get_by_role("group").evaluate_all(
        "groups => groups.slice(0, 3).map(group => group.querySelector('legend').textContent)"
    )
    assert groups == [
        "Logits θ", "Weights of π, divided by their sum", "Weights of ref, divided by their sum"
    ]  # fmt: skip


def test_figures_are_readable_in_both_schemes_and_nothing_sticks_out(browser, book):
    context = browser.new_context(color_scheme="light", reduced_motion="reduce", viewport=DESK)
    page = context.new_page()
    page.route(re.compile("^(?!http://127)"), lambda route: route.abort())
    load(page, book)
    press(page, page.locator("mathrl-simplex input").first, "End")
    press(page, page.locator("mathrl-group button").nth(1), "Enter")
    press(page, page.locator("mathrl-kl input").nth(1), "End")
    assert page.evaluate("document.getAnimations().length") == 0
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


# ---------------------------------------------------------------- what the checks catch


def try_simplex(page):
    figure, rewards = page.locator("mathrl-simplex").first, np.array([1, 0, 0.5])
    press(page, figure.get_by_role("slider").first, "ArrowRight*5")
    check_simplex(figure, np.array(settings(figure)), rewards)
    check_drawing(figure, np.array(settings(figure)), rewards)


def try_group(page):
    figure = page.locator("mathrl-group").first
    press(page, figure.get_by_role("button").nth(1), "Enter")
    check_group(figure, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    press(page, figure.get_by_role("slider"), "ArrowRight*5")
    check_factor(figure, 0.1)


def try_divergences(page):
    figure = page.locator("mathrl-kl").first
    press(page, figure.get_by_role("slider").first, "ArrowRight*5")
    check_divergences(figure)


MUTANTS = [
    (try_simplex, "shared.js", "probs.map((p, k) => p * (values[k] - average))",
     "probs.map((p, k) => p * (average - values[k]))"),
    (try_simplex, "shared.js", "`−${text}`", "`-${text}`"),
    (try_simplex, "shared.js", "    changed();\n", ""),
    (try_simplex, "simplex.js", "1 - 2 * p + square", "1 - p + square"),
    (try_simplex, "simplex.js", "p + REACH * step[k]", "p - REACH * step[k]"),
    (try_simplex, "simplex.js", "(this.rewards[action] - b)", "(this.rewards[action] + b)"),
    (try_simplex, "simplex.js", "u < policy[0] ? 0", "u < 1 / 3 ? 0"),
    (try_simplex, "simplex.js", "(state + 0x6d2b79f5)", "(state + 0x60000000)"),
    (try_group, "group.js", "[column][rewards[index]]", "[column][1 - rewards[index]]"),
    (try_group, "group.js", "this.data.advantages[successes]", "this.data.advantages[1]"),
    (try_group, "group.js", "this.data.factors[index][k]", "this.data.factors[index][0]"),
    (try_group, "group.js", "getItem(index)", "getItem(index + 9)"),
    (try_divergences, "kl.js", "(ratio) => -Math.expm1(-ratio)", "(ratio) => Math.expm1(ratio)"),
    (try_divergences, "kl.js", "const forward = -mean(reference", "const forward = -mean(policy"),
    (try_divergences, "kl.js", "Math.expm1(-ratio) + ratio", "Math.expm1(ratio) - ratio"),
    (try_divergences, "kl.js", "const length = p *", "const length = p * p *"),
    (try_divergences, "kl.js", "p - reference[k]", "reference[k] - p"),
]  # fmt: skip


@pytest.mark.parametrize("check", [try_simplex, try_group, try_divergences])
def test_right_script_passes(page, check):
    check(page)


@pytest.mark.parametrize(("check", "script", "old", "new"), MUTANTS)
def test_wrong_script_is_caught(tab, alone, check, script, old, new):
    with changed(tab, script, old, new):
        load(tab, alone)
        fails(check, tab)


def test_wrong_attributes_stop_the_build():
    refuses(ValueError, "`rewards` must list 8 numbers 0 or 1, got 1,0", figures.group, "1,0")
    refuses(ValueError, "`rewards` must list 8", figures.group, "2,0,0,0,0,0,0,0")
    refuses(ValueError, "`logits` must list three", figures.simplex, "1,2", "1,0,0")
    refuses(ValueError, "`reference` must list three", figures.divergences, "1,1,1", "1,1")
