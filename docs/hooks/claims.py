"""The ledger: claims stated on the pages, the tests that establish them, and the page of both."""

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

KINDS = ("algebra", "enumeration", "autograd", "experiment")
ROOT = Path(__file__).parents[2]
MARKER = "<!-- build: claims -->"

_HEAD = re.compile(r"^[ \t]*(?:!!!|\?\?\?\+?)[ \t]+claim\b.*$", re.M)
_BOX = re.compile(r'^!!! claim "([^"]*)"\n((?:(?:[ ]{4}.*)?\n)+)', re.M)
_ID = re.compile(r"\d+\.\d+")
_FUNCTION = re.compile(r"\[(`[^`]+`)\]\[(mathrl\.[\w.]+)\]")


class Claim(NamedTuple):
    """A claim as a page states it."""

    id: str
    page: str
    title: str
    text: str

    @property
    def functions(self) -> list[str]:
        """The package's functions that the claim cites."""
        return [f"[{name}][{target}]" for name, target in _FUNCTION.findall(self.text)]


class Proof(NamedTuple):
    """A test that carries a claim's id."""

    id: str
    kind: str
    test: str


class LedgerError(Exception):
    """A claim or a marker that does not follow the ledger's form."""


def read_claims(markdown: str, page: str) -> list[Claim]:
    """Return the claims of one page, in order."""
    heading = re.search(r"^# (.+)$", markdown, re.M)
    title = heading.group(1) if heading else page
    found = []
    heads = set(_HEAD.findall(markdown))
    if loose := heads - {box.group().split("\n")[0] for box in _BOX.finditer(markdown + "\n")}:
        raise LedgerError(
            f'{page}: expected `!!! claim "3.2"` at the margin with its text indented below, '
            f"got {sorted(loose)}"
        )
    for number, body in _BOX.findall(markdown + "\n"):
        if not _ID.fullmatch(number):
            raise LedgerError(
                f'{page}: expected an id such as "3.2" after `!!! claim`, got "{number}"'
            )
        found.append(Claim(number, page, title, textwrap.dedent(body).strip()))
    return found


def stated(docs: Path = ROOT / "docs") -> dict[str, Claim]:
    """Return every claim of the book by id."""
    ledger: dict[str, Claim] = {}
    for path in sorted(docs.rglob("*.md")):
        for claim in read_claims(path.read_text("utf-8"), path.relative_to(docs).as_posix()):
            if claim.id in ledger:
                raise LedgerError(
                    f"claim {claim.id} stands in {ledger[claim.id].page} and {claim.page}"
                )
            ledger[claim.id] = claim
    return ledger


def _marks(path: Path, name: str) -> Iterator[Proof]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not (isinstance(node, ast.FunctionDef) and node.name.startswith("test")):
            continue
        skipped = any(re.search("skip|xfail", ast.unparse(mark)) for mark in node.decorator_list)
        for mark in node.decorator_list:
            if not (isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.claim"):
                continue
            arguments = [
                argument.value for argument in mark.args if isinstance(argument, ast.Constant)
            ]
            if len(arguments) != 2 or len(mark.args) != 2 or arguments[1] not in KINDS:
                raise LedgerError(
                    f"{name}::{node.name}: expected claim(id, kind) with a kind of {KINDS}, "
                    f"got {ast.unparse(mark)}"
                )
            if skipped:
                raise LedgerError(
                    f"{name}::{node.name}: a test that is skipped establishes nothing"
                )
            yield Proof(str(arguments[0]), str(arguments[1]), f"{name}::{node.name}")


def established(tests: Path = ROOT / "tests") -> list[Proof]:
    """Return every claim marker of the test files."""
    return [
        proof
        for path in sorted(tests.rglob("test_*.py"))
        for proof in _marks(path, path.relative_to(tests.parent).as_posix())
    ]


def problems(claims: dict[str, Claim], proofs: list[Proof]) -> list[str]:
    """Return what keeps the ledger from balancing: claims without test, tests without claim."""
    proved = {proof.id for proof in proofs}
    return [
        f"claim {c.id} ({c.page}) has no test" for c in claims.values() if c.id not in proved
    ] + [f"{p.test} names claim {p.id}, which no page states" for p in proofs if p.id not in claims]


def ledger_page(claims: dict[str, Claim], proofs: list[Proof]) -> str:
    """Return the ledger in Markdown: each claim with its text, functions, tests and kinds."""
    lines: list[str] = []
    title = ""
    for claim in sorted(claims.values(), key=lambda c: [int(part) for part in c.id.split(".")]):
        if claim.title != title:
            title = claim.title
            lines += [f"## {title}", ""]
        lines += [f"[Claim {claim.id}][claim-{claim.id}]", "", textwrap.indent(claim.text, "    ")]
        lines[-1] = ":   " + lines[-1].lstrip()
        for proof in proofs:
            if proof.id == claim.id:
                lines += ["", f"    *{proof.kind}* `{proof.test}`"]
        lines += [""]
    return "\n".join(lines)


@functools.cache
def _ledger() -> tuple[dict[str, Claim], list[Proof]]:
    return stated(), established()


def on_pre_build(config: Any) -> None:
    """Read the ledger anew at every build, so that `mkdocs serve` follows edits."""
    _ledger.cache_clear()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Give each claim box an anchor, a title and its kinds of proof; fill in the ledger's page."""
    claims, proofs = _ledger()

    def box(match: re.Match[str]) -> str:
        number, body = match.groups()
        kinds = [kind for kind in KINDS if any(p == (number, kind, p.test) for p in proofs)]
        title = f"Claim {number}" + (f" · {', '.join(kinds)}" if kinds else "")
        return f'[](){{ #claim-{number} }}\n\n!!! claim "{title}"\n{body}'

    if MARKER in markdown:
        return markdown.replace(MARKER, ledger_page(claims, proofs))
    return _BOX.sub(box, markdown + "\n")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Leave of each anchor only its name: with an address it would be a link without a text."""
    return html.replace('<a href="" id="claim-', '<a id="claim-')
