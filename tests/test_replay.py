"""The replay of chapter 9 in Chromium: what it shows at each step is what `mathrl` makes."""

import itertools
import re
import shutil
from typing import NamedTuple

import pytest

import figures
import replay
from mathrl.audit import audit_batch
from mathrl.trajectory import Call, build
from tests.conftest import serve
from tests.oracles import fails
from tests.small_book import ROOT, build_strictly
from tests.test_browser import DESK, PHONE, SEEN, violations, wide
from tests.test_figures import changed, press, table

TEXT = '<div class="figure" markdown="0">\n<mathrl-replay></mathrl-replay>\n</div>'
CASES = ("base", "compaction", "template")
STEPS = ("calls", "right shift", "authorship", "alignment")

# The trajectories, spelled again by letters: a token's id is its place here.
LETTERS = ["U", "A₁", "A₂", "T₁", "T₂", "B", "S", "V", "C", "A₁A₂"]
SAMPLED = {
    "base": [("U", "A₁ A₂", [-0.2, -0.4]), ("U A₁ A₂ T₁ T₂", "B", [-0.3])],
    "compaction": [
        ("U", "A₁ A₂", [-0.2, -0.4]),
        ("U A₁ A₂ T₁ T₂", "B", [-0.3]),
        ("U A₁ A₂ S B V", "C", [-0.5]),
    ],
    "template": [("U", "A₁ A₂", [-0.2, -0.4]), ("U A₁A₂ T₁ T₂", "B", [-0.3])],
}
# Worked by hand.
MASKS = {
    "base": ["11001"],
    "compaction": ["11001", "000001"],
    "template": ["11", "0001"],
}
REASONS = {"base": [], "compaction": ["compaction or rewrite"], "template": ["retokenised"]}
TARGETS = {"base": "5", "compaction": "11", "template": "6"}
LOSSES = {"base": "0.9", "compaction": "1.4", "template": "0.9"}


def ids(text):
    return [LETTERS.index(letter) for letter in text.split()]


def rows(case):
    """The rows of a case, from its calls."""
    calls = [
        Call(prompt_ids=ids(prompt), output_ids=ids(output), log_probs=log_probs)
        for prompt, output, log_probs in SAMPLED[case]
    ]
    return build(calls, advantages=1.0).rows


def dash(value):
    return "–" if value is None else f"{value:g}".replace("-", "−")


def lines(row, step):
    """What the table of a row holds at a step."""
    shown = []
    for t in range(len(row.mask)):
        cells = [
            f"{t} {LETTERS[row.tokens[t]]}",
            LETTERS[row.tokens[t + 1]],
            row.authors[t],
            str(row.mask[t]),
            dash(row.old_log_probs[t]),
            dash(row.advantages[t]),
            dash(row.calls[t]),
        ]
        known = 7 if step == 3 else 2 * step
        shown.append(cells[:known] + [""] * (7 - known))
    return shown


# ---------------------------------------------------------------- pages


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The address of a page with the figure, without the theme."""
    directory = tmp_path_factory.mktemp("replay")
    shutil.copytree(ROOT / "docs/assets", directory / "assets")
    (directory / "assets/data").mkdir()
    (directory / "assets/data/replay.json").write_text(replay.replay_data(), "utf-8")
    body = figures.on_page_markdown(TEXT, page=None, config=None, files=None)
    (directory / "index.html").write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Replay</title>'
        f'<script type="module" src="assets/figures/replay.js"></script>{body}',
        "utf-8",
    )
    yield from serve(directory)


@pytest.fixture(scope="module")
def tab(browser):
    context = browser.new_context(reduced_motion="reduce")
    yield context.new_page()
    context.close()


def load(page, address, view=""):
    """Open the figure anew at a view; return it when it is ready."""
    page.goto("about:blank")
    page.goto(f"{address}/{view}")
    page.locator("mathrl-replay[ready]").wait_for()
    return page.locator("mathrl-replay")


@pytest.fixture
def figure(tab, alone):
    return load(tab, alone)


class View(NamedTuple):
    case: str
    step: int


def view(figure):
    """The case and the step that are chosen."""
    chosen = figure.locator("input[type=radio]:checked").evaluate_all(
        "all => all.map(e => e.value)"
    )
    return View(chosen[0], int(chosen[1]))


def visible_tables(figure):
    return [index for index, one in enumerate(figure.locator("table").all()) if one.is_visible()]


FIRST = {"base": 0, "compaction": 1, "template": 3}  # index of a case's first table


def check(figure, case, step, proposed=False):
    """Everything that is in sight, against the rows."""
    assert view(figure) == (case, step)
    assert figure.locator("section:visible").count() == 1
    made, first = rows(case), FIRST[case]
    expected = [] if step == 0 else [*range(first, first + len(made))]
    assert visible_tables(figure) == expected
    for index, row in zip(expected, made, strict=bool(step)):
        found = table(figure, index)
        if step == 1:
            for line in found:
                assert line[3] in ("?", "0", "1")
                assert proposed or line[3] == "?"
                line[3] = ""
        assert found == lines(row, step)
        trained = figure.locator("table").nth(index).locator("tr.trained")
        assert trained.count() == (sum(row.mask) if step > 1 else 0)
    splits = figure.locator(".split:visible").all_inner_texts()
    assert len(splits) == (len(REASONS[case]) if step else 0)
    for text, reason in zip(splits, REASONS[case], strict=bool(step)):
        assert f": {reason} at index " in text
    if step == 3:
        total = figure.locator(".sum:visible").inner_text()
        assert total.startswith(f"{TARGETS[case]} targets")
        assert total.endswith(f" sum to {LOSSES[case]}.")
    else:
        assert figure.locator(".sum:visible").count() == 0


# ---------------------------------------------------------------- by keyboard


def walk(page, figure, case):
    """Key through the steps of a case, forward and back, from its first step."""
    for step in range(4):
        check(figure, case, step)
        if step < 3:
            press(page, figure.get_by_role("button", name=f"Reveal: {STEPS[step + 1]}"), "Enter")
    for step in (2, 1, 0):
        press(page, figure.get_by_role("button", name="Back"), "Space")
        check(figure, case, step)


def test_hand_worked_masks_are_those_of_the_package():
    for case in CASES:
        made = rows(case)
        assert ["".join(map(str, row.mask)) for row in made] == MASKS[case]
        assert sum(len(row.mask) for row in made) == int(TARGETS[case])
        loss = -sum(p for row in made for p in row.old_log_probs if p is not None)
        assert loss == pytest.approx(float(LOSSES[case]))


def test_every_case_is_replayed_by_keyboard(tab, figure):
    for number, case in enumerate(CASES):
        if number:
            press(tab, figure.locator("input[type=radio]:checked").first, "ArrowRight")
        walk(tab, figure, case)
    radio = figure.locator("input[type=radio]:checked").nth(1)
    for step in (1, 2, 3):
        press(tab, figure.locator("input[type=radio]:checked").nth(1), "ArrowDown")
        check(figure, "template", step)
    assert radio.is_checked()


def test_the_ends_stay_where_they_are_and_keep_the_focus(tab, figure):
    press(tab, figure.get_by_role("button", name="Back"), "Enter")
    check(figure, "base", 0)
    last = figure.locator(".predict button").last
    press(tab, last, "Enter*5")
    check(figure, "base", 3)
    assert last.evaluate("e => e === document.activeElement")


def test_everything_is_reached_by_tab(tab, figure):
    tab.keyboard.press("Tab")
    reached = []
    for _ in range(5):
        reached.append(tab.locator(":focus").aria_snapshot().replace("'", ""))
        tab.keyboard.press("Tab")
    assert [name.removeprefix("- ").split(" [")[0] for name in reached] == [
        'radio "base case"',
        'radio "calls"',
        'spinbutton "How many targets do these calls make, over all rows?"',
        'button "Back"',
        'button "Reveal: right shift"',
    ]


# ---------------------------------------------------------------- predictions


def answer(page, figure, text):
    """Type a number, reveal, and return what the figure says."""
    figure.get_by_role("spinbutton").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type(text)
    press(page, figure.locator(".predict button").last, "Enter")
    return figure.get_by_role("status").inner_text()


def test_numbers_are_predicted_then_revealed(tab, figure):
    assert answer(tab, figure, "6") == "The answer is 5, not 6."
    press(tab, figure.get_by_role("button", name="Back"), "Enter")
    assert figure.get_by_role("spinbutton").input_value() == "6"
    assert answer(tab, figure, "5") == "5 is right."
    press(tab, figure.locator(".predict button").last, "Enter")
    assert answer(tab, figure, "3.6") == "The answer is 0.9, not 3.6."
    press(tab, figure.get_by_role("button", name="Back"), "Enter")
    assert answer(tab, figure, "0.90") == "0.9 is right."


def test_without_a_prediction_the_answer_is_shown(tab, figure):
    press(tab, figure.locator(".predict button").last, "Enter")
    assert figure.get_by_role("status").inner_text() == "The answer is 5."


def propose(page, figure, mask, index=0):
    """Key a mask into the buttons of a table."""
    buttons = figure.locator("table").nth(index).locator("td button")
    for target, bit in enumerate(mask):
        if bit == "1":
            press(page, buttons.nth(target), "Space")


def verdict(figure, index=0):
    return figure.locator(".verdict").nth(index).inner_text()


def test_wrong_mask_is_named_by_the_package(tab, alone):
    figure = load(tab, alone, "#replay=base,1")
    propose(tab, figure, "01100")
    check(figure, "base", 1, proposed=True)
    pressed = figure.locator("td button").evaluate_all("all => all.map(e => e.ariaPressed)")
    assert pressed == ["false", "true", "true", "false", "false"]
    assert verdict(figure) == ""  # not before it is revealed
    press(tab, figure.locator(".predict button").last, "Enter")
    check(figure, "base", 2)
    assert verdict(figure).startswith("Proposed mask 0 1 1 0 0: mask one late, targets 0, 2, 4:")
    wrong = figure.locator("tbody tr").evaluate_all(
        "all => all.flatMap((row, t) => row.querySelector('[data-wrong]') ? [t] : [])"
    )
    assert wrong == [0, 2, 4]


def test_right_masks_are_right(tab, alone):
    for case in CASES:
        figure = load(tab, alone, f"#replay={case},1")
        for row, mask in enumerate(MASKS[case]):
            propose(tab, figure, mask, FIRST[case] + row)
        press(tab, figure.locator(".predict button").last, "Enter")
        for row, mask in enumerate(MASKS[case]):
            expected = f"Proposed mask {' '.join(mask)}: right."
            assert verdict(figure, FIRST[case] + row) == expected
        assert figure.locator("[data-wrong]").count() == 0


@pytest.mark.parametrize("case", CASES)
def test_verdicts_are_those_of_the_audit_for_every_mask(case):
    data = replay.json.loads(replay.replay_data())[case]
    for row, known in zip(rows(case), data, strict=True):
        masks = {"".join(bits) for bits in itertools.product("01", repeat=len(row.mask))}
        assert known.keys() == masks
        for mask, text in known.items():
            bits = [int(bit) for bit in mask]
            faults = audit_batch([row.tokens], [[1] * len(row.tokens)], [bits], rows=[row])
            assert [str(f).split(", row")[0].split(":")[0] for f in faults] == [
                part.split(", target")[0].split(":")[0] for part in text.split("; ") if part
            ]
            assert (text == "") == (tuple(bits) == row.mask)


# ---------------------------------------------------------------- addresses


def test_address_follows_and_restores_the_view(tab, alone, figure):
    press(tab, figure.locator("input[type=radio]:checked").first, "ArrowRight")
    press(tab, figure.locator(".predict button").last, "Enter")
    propose(tab, figure, "000011", 2)
    press(tab, figure.locator(".predict button").last, "Enter")
    check(figure, "compaction", 2)
    address = tab.evaluate("location.hash")
    assert address == "#replay=compaction,2,.000011"
    said = verdict(figure, 2)
    assert said.startswith("Proposed mask 0 0 0 0 1 1: ")
    figure = load(tab, alone, address)
    check(figure, "compaction", 2)
    assert [verdict(figure, 1), verdict(figure, 2)] == ["", said]
    tab.evaluate("location.hash = '#replay=template,3'")
    tab.wait_for_function("document.querySelector('section:not([hidden])').dataset.case[0] === 't'")
    check(figure, "template", 3)


@pytest.mark.parametrize(
    "address",
    ["", "#limits", "#replay=none,1", "#replay=base,4", "#replay=base", "#replay=toString,1", "#%",
     "#replay=%", "#replay=base,1,%E0"],
)  # fmt: skip
def test_other_addresses_open_at_the_start_and_are_left_alone(tab, alone, address):
    figure = load(tab, alone, address)
    check(figure, "base", 0)
    assert tab.evaluate("location.hash") == address


def test_malformed_mask_in_an_address_is_no_prediction(tab, alone):
    for mask in ("110", "1100111", "11001.1"):
        figure = load(tab, alone, f"#replay=base,2,{mask}")
        check(figure, "base", 2)
        assert ("Proposed" in verdict(figure)) == (mask == "11001.1")


# ---------------------------------------------------------------- for every reader


def test_replay_reads_without_javascript(browser, alone):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(alone)
    figure = page.locator("mathrl-replay")
    assert figure.locator("section:visible").count() == 3
    assert visible_tables(figure) == [*range(5)]
    for case in CASES:
        for number, row in enumerate(rows(case)):
            assert table(figure, FIRST[case] + number) == lines(row, 3)
    calls = [" ".join(text.split()) for text in figure.locator(".calls li").all_inner_texts()]
    expected = [
        f"call {number}: {prompt} → {output}, log-prob {', '.join(map(dash, log_probs))}"
        for case in CASES
        for number, (prompt, output, log_probs) in enumerate(SAMPLED[case])
    ]
    assert calls == expected
    sums = figure.locator(".sum").all_inner_texts()
    assert [re.findall(r"[\d.]*\d", text) for text in sums] == [
        [TARGETS[case], LOSSES[case]] for case in CASES
    ]
    context.close()


BROKEN_WORDS = """() => [...document.querySelectorAll("mathrl-replay :is(td, th)")].flatMap(
  (cell) => [...cell.childNodes].filter((node) => node.nodeType === 3).flatMap((node) =>
    [...node.data.matchAll(/[^\\s\\u00ad-]+/g)].filter((word) => {
      const range = document.createRange();
      // What follows a soft hyphen begins with the hyphen that ends the line before.
      range.setStart(node, word.index + (node.data[word.index - 1] === "\\u00ad"));
      range.setEnd(node, word.index + word[0].length);
      const lines = [...range.getClientRects()].map((box) => Math.round(box.top));
      return new Set(lines).size > 1;
    }).map((word) => word[0])))"""


def broken_words(page):
    """Words of the tables, or parts at a hyphen, that are written on two lines."""
    return page.evaluate(BROKEN_WORDS)


def test_replay_is_readable_in_both_schemes_and_nothing_sticks_out(browser, tmp_path):
    for address in serve(build_strictly(tmp_path, {"index.md": f"# Replay\n\n{TEXT}\n"})):
        context = browser.new_context(color_scheme="light", reduced_motion="reduce", viewport=DESK)
        page = context.new_page()
        page.route(re.compile("^(?!http://127)"), lambda route: route.abort())
        figure = load(page, address, "#replay=compaction,1,00011.110000")
        assert violations(page) == []
        assert wide(page) == []
        header = page.locator(".md-header").bounding_box()
        assert figure.bounding_box()["y"] >= header["y"] + header["height"], "the header is over it"
        press(page, figure.locator(".predict button").last, "Enter*2")
        check(figure, "compaction", 3)
        assert violations(page) == []
        page.set_viewport_size(PHONE)
        assert wide(page) == []
        assert broken_words(page) == []
        page.emulate_media(color_scheme="dark")
        page.locator("body[data-md-color-scheme=slate]").wait_for()
        page.evaluate("new Promise(requestAnimationFrame)")
        assert violations(page, SEEN) == []
        press(page, figure.get_by_role("button", name="Back"), "Enter*2")
        check(figure, "compaction", 1, proposed=True)
        assert violations(page, SEEN) == []
        assert wide(page) == []
        context.close()


# ---------------------------------------------------------------- what the checks catch


def try_walk(page, address):
    for case in CASES:
        walk(page, load(page, address, f"#replay={case},0"), case)


def try_verdict(page, address):
    test_wrong_mask_is_named_by_the_package(page, address)


def try_numbers(page, address):
    test_numbers_are_predicted_then_revealed(page, load(page, address))


def try_address(page, address):
    test_address_follows_and_restores_the_view(page, address, load(page, address))


MUTANTS = [
    (try_walk, "<= this.step ? cell.said", "<= this.step + 1 ? cell.said"),
    (try_walk, "cell.said : \"\"", "cell.said : \"0\""),
    (try_walk, "section.dataset.case !== name", "section.dataset.case === name"),
    (try_walk, 'table.truth[target] === "1"', 'table.truth[target] === "0"'),
    (try_walk, ".hidden = step < 3", ".hidden = step < 2"),
    (try_verdict, "proposed !== cell.said", "proposed === cell.said"),
    (try_verdict, "[row][mask] || ", "[row][table.truth] || "),
    (try_verdict, "this.step > 1 && mask\n", "mask\n"),
    (try_numbers, "numbers[this.step - 1]", "numbers[this.step]"),
    (try_numbers, "Number(said) - Number(right)", "Number(right)"),
    (try_address, "mask ?? \"\"", "mask ?? \"0\""),
    (try_address, "this.#show(name, Number(step))", "this.#show(name, 0)"),
    (try_address, 'addEventListener("hashchange"', 'addEventListener("popstates"'),
]  # fmt: skip


@pytest.mark.parametrize("attempt", [try_walk, try_verdict, try_numbers, try_address])
def test_right_script_passes(tab, alone, attempt):
    attempt(tab, alone)


@pytest.mark.parametrize(("attempt", "old", "new"), MUTANTS)
def test_wrong_script_is_caught(tab, alone, attempt, old, new):
    tab.set_default_timeout(2000)
    with changed(tab, "replay.js", old, new):
        caught = attempt
        fails(lambda *args: _asserting(caught, *args), tab, alone)
    tab.set_default_timeout(30000)


def _asserting(attempt, *args):
    """A control that never comes is a failed check, too."""
    from playwright.sync_api import Error

    try:
        attempt(*args)
    except Error as error:
        raise AssertionError(str(error)) from error
