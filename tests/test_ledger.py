"""The ledger of claims: every claim has a test, every marker a claim, and the page says so."""

import re
import textwrap

import pytest

import claims
from claims import Claim, LedgerError, Proof, problems

PAGE = '# Title\n\n!!! claim "3.1"\n    One, by [`k1`][mathrl.kl.k1].\n\n    More.\n\nprose\n'
TEST = '@pytest.mark.claim("3.1", "algebra")\ndef test_one():\n    assert True\n'


def ledger(tmp_path, page=PAGE, test=TEST):
    """A ledger of one page and one test file."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text(page)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(f"import pytest\n\n{test}")
    return claims.stated(tmp_path / "docs"), claims.established(tmp_path / "tests")


def test_ledger_balances():
    stated = claims.stated()
    assert stated
    assert problems(stated, claims.established()) == []


def test_claims_of_a_page_belong_to_one_chapter_and_stand_in_order():
    numbers: dict[str, list[tuple[int, int]]] = {}
    for claim in claims.stated().values():
        chapter, number = claim.id.split(".")
        numbers.setdefault(claim.page, []).append((int(chapter), int(number)))
    for page, ids in numbers.items():
        assert len({chapter for chapter, _ in ids}) == 1, page
        assert ids == sorted(ids), page


def test_claim_and_its_test_balance(tmp_path):
    stated, established = ledger(tmp_path)
    text = "One, by [`k1`][mathrl.kl.k1].\n\nMore."
    assert stated == {"3.1": Claim("3.1", "page.md", "Title", text)}
    assert stated["3.1"].functions == ["[`k1`][mathrl.kl.k1]"]
    assert established == [Proof("3.1", "algebra", "tests/test_it.py::test_one")]
    assert problems(stated, established) == []


def test_claim_without_test_is_found(tmp_path):
    assert problems(*ledger(tmp_path, test="")) == ["claim 3.1 (page.md) has no test"]


def test_test_that_names_no_claim_is_found(tmp_path):
    assert problems(*ledger(tmp_path, page="# Title\n")) == [
        "tests/test_it.py::test_one names claim 3.1, which no page states"
    ]


def test_last_line_of_a_page_may_be_a_claim(tmp_path):
    assert list(ledger(tmp_path, page='# T\n\n!!! claim "3.1"\n    One.')[0]) == ["3.1"]


@pytest.mark.parametrize(
    ("page", "test", "message"),
    [
        (PAGE + PAGE, TEST, "claim 3.1 stands in page.md and page.md"),
        (PAGE.replace("3.1", "three"), TEST, 'expected an id such as "3.2"'),
        (PAGE.replace('"3.1"', ""), TEST, "at the margin"),
        (PAGE.replace("!!! claim", "??? note\n\n    !!! claim"), TEST, "at the margin"),
        (PAGE.replace("!!! claim", "??? claim"), TEST, "at the margin"),
        (PAGE.replace("    One", "One"), TEST, "at the margin"),
        (PAGE, TEST.replace("algebra", "hearsay"), "kind"),
        (PAGE, TEST.replace(', "algebra"', ""), "kind"),
        (PAGE, TEST.replace('"3.1"', "ID"), "kind"),
        (PAGE, "@pytest.mark.skip\n" + TEST, "establishes nothing"),
        (PAGE, "@pytest.mark.xfail(strict=True)\n" + TEST, "establishes nothing"),
    ],
)
def test_malformed_entry_is_an_error(tmp_path, page, test, message):
    with pytest.raises(LedgerError, match=re.escape(message)):
        ledger(tmp_path, page, test)


def test_marker_counts_in_a_class_and_only_on_a_test(tmp_path):
    stated, established = ledger(tmp_path, test="class TestIt:\n" + textwrap.indent(TEST, "    "))
    assert problems(stated, established) == []
    path = tmp_path / "tests/test_it.py"
    path.write_text(path.read_text().replace("test_one", "check_one"))
    assert problems(stated, claims.established(tmp_path / "tests")) != []


def test_page_of_claims_lists_every_claim_with_its_test(site):
    html = (site / "reference/claims/index.html").read_text("utf-8")
    for claim in claims.stated().values():
        assert f">Claim {claim.id}</a>" in html
    for proof in claims.established():
        assert proof.test in html
