"""Numbers on pages come from manifests; one that is missing, stale or mistyped fails the build."""

import hashlib
import json

import pytest

import evidence

SOURCE = "mathrl/arithmetic.py"


@pytest.fixture
def folder(tmp_path):
    digest = hashlib.sha256((evidence.ROOT / SOURCE).read_bytes()).hexdigest()
    manifest = {"sources": {SOURCE: digest}, "rows": [{"ratio": 2.345}], "name": "run"}
    write(tmp_path / "trial.json", manifest)
    evidence.manifest.cache_clear()
    return tmp_path


def write(path, manifest):
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(manifest | {"digest": digest}))


def test_a_number_is_read_from_its_manifest(folder):
    text, problems = evidence.filled("{{ trial: rows.0.ratio | .1f }}x, {{ trial: name }}", folder)
    assert (text, problems) == ("2.3x, run", [])


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("{{ other: rows.0.ratio }}", "no manifest other.json"),
        ("{{ trial: rows.1.ratio }}", "no '1' on the path"),
        ("{{ trial: rows.0.speed }}", "no 'speed' on the path"),
        ("{{ trial: name.first }}", "no 'first' on the path"),
        ("{{ trial: name | .2f }}", "format code 'f'"),
    ],
)
def test_a_number_that_is_not_there_is_a_problem(folder, marker, words):
    text, problems = evidence.filled(marker, folder)
    assert text == marker
    assert len(problems) == 1
    assert words in problems[0]


def test_a_changed_source_makes_a_manifest_stale(folder):
    path = folder / "trial.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    write(path, manifest | {"sources": {"README.md": "0"}})
    _, problems = evidence.filled("{{ trial: name }}", folder)
    assert "stale: README.md has changed" in problems[0]


def test_an_edited_manifest_is_refused(folder):
    path = folder / "trial.json"
    path.write_text(path.read_text().replace("2.345", "2.5"))
    _, problems = evidence.filled("{{ trial: rows.0.ratio }}", folder)
    assert "its digest differs" in problems[0]
