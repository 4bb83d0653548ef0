"""The command line: what it prints, its exit status, and that a user's error is one line."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mathrl import __main__ as command_line
from mathrl import _masks, arithmetic, evidence, experiments, masking, splits
from mathrl._sources import ROOT
from mathrl.config import ReinforceConfig, SupervisedConfig
from mathrl.decoder import Decoder, DecoderConfig
from tests.mutants import mutated
from tests.oracles import fails

SMALL = experiments.Arm(
    model=DecoderConfig(width=8, heads=2, depth=1),
    supervised=SupervisedConfig(steps=3),
    reinforced=ReinforceConfig(steps=3),
)
COMMANDS = ("bench", "claims", "evaluate", "masks", "rebuild", "record", "verify", "zebra")


def run(*arguments, main=command_line.main, status=0, columns=80):
    """Standard output and standard error of a command that ends with this status."""
    arguments = [str(argument) for argument in arguments]
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, arguments, prog_name="mathrl")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == status, (result.exit_code, result.output)
    assert "Traceback" not in result.output
    return result.stdout, result.stderr


def misused(words, *arguments):
    """The command is refused as a wrong call, with these words, and prints nothing else."""
    output, errors = run(*arguments, status=2, columns=200)
    assert output == ""
    assert words in errors, errors


def refused(words, *arguments):
    """The command is refused for what it was given, in one line with these words."""
    _, errors = run(*arguments, status=1, columns=200)
    assert re.fullmatch(rf"Error: .*{words}.*\n", errors), errors


def program(*arguments, code="from mathrl.__main__ import main; main()"):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


# ---------------------------------------------------------------- help


def test_the_group_lists_its_commands():
    output, _ = run("--help", columns=100)
    assert tuple(re.findall(r"^  (\w+)  +\S", output, re.M)) == COMMANDS
    assert "..." not in output.split("Commands:")[1], "a summary is cut"
    assert run("-h", columns=100)[0] == output
    assert sorted(command_line.main.commands) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_everything(name):
    """Every argument and option is explained, and where there are arguments, so is an example."""
    output, _ = run(name, "--help", columns=100)
    command = command_line.main.commands[name]
    body = output.split("\n", 1)[1]
    for parameter in command.params:
        label = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name
        assert label in body or label.upper() in body, label
    assert not command.params or f"mathrl {name} " in body
    assert "status" in body or name in ("bench", "evaluate", "record")


def test_help_of_record_names_every_experiment():
    output, _ = run("record", "--help")
    names = f"NAME is one of {', '.join(sorted([*experiments.EXPERIMENTS, 'masks']))}."
    assert names in " ".join(output.split())


def test_it_is_installed_under_its_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mathrl": "mathrl.__main__:main"}
    assert run("--version")[0] == f"mathrl {project['version']}\n"
    module = [sys.executable, "-m", "mathrl", "verify", "3", "4", "--", "7", "4", "13"]
    assert subprocess.run(module, cwd=ROOT, capture_output=True).returncode == 0


@pytest.mark.parametrize("arguments", [["nothing"], ["--nothing"], ["bench", "--nothing"],
                                       ["claims", "more"]])  # fmt: skip
def test_what_is_not_known_is_misuse(arguments):
    misused(arguments[-1], *arguments)


# ---------------------------------------------------------------- verify

VERDICTS = [
    ([3, 4, "--", 7, 4, 13], 0, "reward 1 (ok): 3 + 4 = 7 and 2 * 7 mod 10 = 4\n"),
    ([3, 4, "--", 4, 8, 13], 1, "reward 0 (intermediate): expected 3 + 4 = 7, got 4\n"),
    ([3, 4, "--", 7, 3, 13], 1, "reward 0 (final): expected 2 * 7 mod 10 = 4, got 3\n"),
    ([3, 4, "--", 7, 4], 1, "reward 0 (format): `response` must have 3 items, got 2\n"),
    ([3, 4, "--", 7, -4, 13], 1, "reward 0 (format): "),
    ([3, 4, "--", 7, 14, 13], 1, "reward 0 (format): "),
    ([3, 5, "--", 8, 6, 13], 1, "reward 0 (task): "),
]


def check_verdicts(main):
    for arguments, status, words in VERDICTS:
        output, errors = run("verify", *arguments, main=main, status=status)
        assert output.startswith(words)
        assert errors == ""


def test_verify():
    check_verdicts(command_line.main)


def test_verify_agrees_with_the_contract():
    for response in arithmetic.responses():
        paid = arithmetic.verify((2, 1), response)["reward"]
        run("verify", 2, 1, "--", *response, status=1 - paid)


def test_misuse_of_verify_names_the_argument():
    misused("Missing argument 'A'", "verify")
    misused("Missing argument 'RESPONSE...'", "verify", 3, 4)
    misused("'A': 'x' is not a valid integer", "verify", "x", 4, 7)
    misused("'B': '4.0' is not a valid integer", "verify", 3, "4.0", 7)
    misused("'RESPONSE...': '<eos>' is not", "verify", 3, 4, 7, 4, "<eos>")


def test_verify_needs_no_torch():
    code = """
import sys
from mathrl.__main__ import main
status = main(["verify", "3", "4", "--", "7", "4", "13"], standalone_mode=False)
print({"torch", "numpy", "rich"} & set(sys.modules))
"""
    assert program(code=code).stdout.splitlines()[-1] == "set()"


# ---------------------------------------------------------------- bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The folder of a small bench of two seeds, and what was printed."""
    folder = tmp_path_factory.mktemp("bench") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(experiments.EXPERIMENTS, "bench", ({"bench": SMALL}, (0, 1)))
        return folder, *run("bench", "--seeds", 2, "--out", folder)


@pytest.fixture
def folder(bench, tmp_path):
    """A copy of the bench's folder, to be spoilt."""
    return shutil.copytree(bench[0], tmp_path / "bench")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(experiments.EXPERIMENTS, "bench", ({"bench": SMALL}, (0, 1)))


def numbers(output, title):
    """The cells of the lines of a table, below its heading."""
    lines = output[output.index(title) :].split("\n\n")[0].splitlines()
    return [line.split() for line in lines if re.match(r" (\d|supervised|reinforced|training|held)",
                                                       line)]  # fmt: skip


def test_bench_writes_what_it_reports(bench):
    folder, output, _ = bench
    written = [Path(line[9:]) for line in output.splitlines() if line.startswith("written: ")]
    names = ["bench-0.safetensors", "bench-1.safetensors", "bench.json"]
    assert written == [folder / name for name in names]
    assert sorted(path.name for path in folder.iterdir()) == names
    recorded = evidence.read_manifest(folder / "bench.json")
    assert recorded["seeds"] == [0, 1]
    assert list(recorded["checkpoints"]) == names[:2]
    for name, digest in recorded["checkpoints"].items():
        evidence.load_checkpoint(folder / name, digest)


def successes(model, tasks):
    """Probability of the right answer to each task: two restricted softmaxes, in numpy."""

    def chance(tokens, digit):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0, -1, :10].double().numpy()
        return np.exp(logits[digit]) / np.exp(logits).sum()

    result = []
    for task in tasks:
        u, v, _ = arithmetic.target(task)
        prompt = arithmetic.encode(task)
        result.append(chance(prompt, u) * chance([*prompt, u], v))
    return np.array(result)


def check_bench_tables(report, folder):
    """Start and end are those of the networks; the gains are differences of what is recorded."""
    recorded = evidence.read_manifest(folder / "bench.json")
    rows = recorded["metrics"]["runs"]["bench"]
    output = report(recorded)
    training, held_out = (numbers(output, title) for title in ("20 training", "5 held-out"))
    splits = ((arithmetic.TRAIN, training), (arithmetic.TEST, held_out))
    for seed, row in enumerate(rows):
        first = Decoder(SMALL.model, seed=seed)
        last = evidence.load_checkpoint(folder / f"bench-{seed}.safetensors")
        for tasks, table in splits:
            start, _, end = map(float, table[seed][1:4])
            assert int(table[seed][0]) == seed
            assert abs(start - successes(first, tasks).mean()) < 6e-5
            assert abs(end - successes(last, tasks).mean()) < 6e-5
        start, middle, end = (row[s]["train"]["success"] for s in ("start", "supervised", "end"))
        gains = [f"{middle - start:+.4f}", f"{end - middle:+.4f}"]
        assert training[seed][4:] == gains
        assert middle != start, "the two gains are not told apart"
        assert f"{row['supervised']['test']['success']:.4f}" == held_out[seed][2]
    spent = numbers(output, "Spent")
    assert spent[0][1:3] == ["6", "0"]
    assert spent[1][1:4] == ["6", f"{2 * 3 * 20 * 8}", f"{2 * 3 * 20 * 8 * 3:,}"]
    assert "0 of 2 seeds with at least 0.99" in output


def test_bench_tables(bench, capsys):
    def report(recorded):
        command_line._report(recorded)
        return capsys.readouterr().out

    check_bench_tables(report, bench[0])
    assert report(evidence.read_manifest(bench[0] / "bench.json")) in bench[1]

    def wrong_gain_from_the_start(recorded):
        for row in (altered := json.loads(json.dumps(recorded)))["metrics"]["runs"]["bench"]:
            row["supervised"] = row["start"]
        return report(altered)

    def wrong_splits_swapped(recorded):
        for row in (altered := json.loads(json.dumps(recorded)))["metrics"]["runs"]["bench"]:
            for stage in ("start", "supervised", "end"):
                row[stage] = {"train": row[stage]["test"], "test": row[stage]["train"]}
        return report(altered)

    fails(check_bench_tables, wrong_gain_from_the_start, bench[0])
    fails(check_bench_tables, wrong_splits_swapped, bench[0])


def test_bench_is_plain_where_there_is_no_terminal(bench):
    _, output, errors = bench
    assert "\x1b" not in output + errors
    assert "…" not in output, "a table does not fit 80 columns"
    assert max(map(len, output.splitlines())) <= max(80, len(f"written: {bench[0]}") + 25)


def test_fewer_seeds_are_the_same_runs(bench, small, tmp_path):
    """Also where a manifest of another run stands in the folder."""
    run("bench", "--seeds", 1, "--out", tmp_path)
    for _ in range(2):
        name = "bench-0.safetensors"
        assert (tmp_path / name).read_bytes() == (bench[0] / name).read_bytes()
        run("bench", "--seeds", 2, "--out", tmp_path)
    one, two = (evidence.read_manifest(path / "bench.json") for path in (tmp_path, bench[0]))
    assert evidence.differences(one, two) == []


def test_misuse_of_bench_names_the_option(tmp_path):
    (tmp_path / "file").touch()
    misused("'--seeds': 0 is not in the range x>=1", "bench", "--seeds", 0)
    misused("'--seeds': 'all' is not a valid integer", "bench", "--seeds", "all")
    misused("'--out': Directory", "bench", "--out", tmp_path / "file")
    misused("--out: [Errno 20] Not a directory", "bench", "--out", tmp_path / "file" / "below")


def test_a_full_disk_is_one_line(small, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(evidence, "write_atomically", full)
    refused("No space left on device.*bench-0.safetensors", "bench", "--out", tmp_path)


ENDLESS = """
import sys
from mathrl import experiments as e
from mathrl.__main__ import main
e.EXPERIMENTS["bench"] = ({"bench": e.Arm(
    model=e.DecoderConfig(width=8, heads=2, depth=1), supervised=e.SupervisedConfig(steps=2),
    reinforced=e.ReinforceConfig(steps=10**6))}, (0,))
main()
"""


def test_a_terminal_shows_a_bar_and_control_c_ends_it(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", ENDLESS, "bench", "--seeds", "1", "--out", str(tmp_path)]
    options = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **options)
    os.close(theirs)
    shown, deadline = "", time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                shown += os.read(ours, 4096).decode()
            except OSError:  # the other end is closed
                break
        if re.search(r"reinforce .*━.* \d+/1000000", shown) and process.returncode is None:
            os.kill(process.pid, 2)  # what a terminal sends on Ctrl-C
            process.wait(30)
    os.close(ours)
    assert process.wait(30) == 130
    assert "interrupted; every file that was reported as written is whole" in shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


def test_killed_at_random_moments_the_bench_leaves_no_corrupt_file():
    """Five kills here; the program's default is fifty, of the whole bench."""
    program = ROOT / "tests/benchmarks/kill_bench.py"
    command = [sys.executable, program, "--kills", "5", "--seeds", "1", "--small"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["kills"], found["corrupt"]) == (5, 0)
    assert found["while running"] > 0


# ---------------------------------------------------------------- evaluate


def check_evaluation(main, folder):
    """Against two restricted softmaxes and 1-(1-p)^k, on the tasks of the arm's own split."""
    path = folder / "contrast-3.safetensors"
    output, _ = run("evaluate", path, "--manifest", folder / "run.json", main=main)
    assert "whole, the one of manifest run.json" in output
    assert "split 'contrast'" in output
    model = evidence.load_checkpoint(path)
    table, passes = numbers(output, "Exact"), numbers(output, "pass@k")
    for column, tasks in enumerate(experiments.tasks("contrast", 3)):
        chances = successes(model, tasks)
        assert table[column][:2] == [("training", "held-out")[column], str(len(tasks))]
        for got, value in zip(table[column][2:4], (chances.mean(), chances.min()), strict=True):
            assert abs(float(got) - value) < 6e-5
        assert abs(sum(map(float, table[column][2:3] + table[column][5:7])) - 1) < 2e-4
        for line in passes:
            expected = (1 - (1 - chances) ** int(line[0])).mean()
            assert abs(float(line[1 + column]) - expected) < 6e-5
    assert [int(line[0]) for line in passes] == list(experiments.PASS_AT)


@pytest.fixture(scope="module")
def contrast(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contrast")
    arm = experiments.Arm(**{**vars(SMALL), "split": "contrast"})
    recorded = experiments.run("trial", [3], arms={"contrast": arm}, folder=folder, show=False)
    evidence.write_manifest(folder / "run.json", recorded)
    return folder


def test_evaluation(contrast):
    check_evaluation(command_line.main, contrast)


def test_evaluation_without_a_manifest(bench):
    output, _ = run("evaluate", bench[0] / "bench-0.safetensors")
    assert "whole, not compared with a manifest" in output
    assert "split 'contract'" in output
    model = evidence.load_checkpoint(bench[0] / "bench-0.safetensors")
    mean = successes(model, arithmetic.TEST).mean()
    assert abs(float(numbers(output, "Exact")[1][2]) - mean) < 6e-5


def test_evaluation_refuses_and_names_the_link(folder, contrast, monkeypatch):
    one, two, record = (folder / name for name in
                        ("bench-0.safetensors", "bench-1.safetensors", "bench.json"))  # fmt: skip
    refused("refused: checkpoint bench.json: cannot be read", "evaluate", record)
    refused("refused: manifest bench-0.safetensors: ", "evaluate", one, "--manifest", one)
    refused("manifest run.json: names no bench-0.safetensors", "evaluate", one,
            "--manifest", contrast / "run.json")  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(arithmetic, "VERSION", 2)
        refused("refused: contract: checkpoint bench-0", "evaluate", one)
        refused("refused: contract: manifest bench", "evaluate", one, "--manifest", record)
    other = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(other)
    refused("refused: checkpoint bench-0.* not the one of the manifest", "evaluate", one,
            "--manifest", record)  # fmt: skip
    run("evaluate", one)  # whole, but that of another seed: only a manifest shows it
    one.write_bytes(other[:-1] + bytes([other[-1] ^ 1]))
    refused("refused: checkpoint bench-0.safetensors: it is not what", "evaluate", one)
    record.write_text(record.read_text().replace("0.99", "0.98", 1))
    refused("refused: manifest bench.json: it is not what", "evaluate", two, "--manifest", record)


def test_evaluation_of_what_does_not_fit_the_tasks(tmp_path):
    model = Decoder(DecoderConfig(width=8, heads=2, depth=1, context_length=3))
    evidence.save_checkpoint(model, tmp_path / "short")
    refused("checkpoint short: `positions` must lie in .0, 3.", "evaluate", tmp_path / "short")
    with torch.no_grad():
        model = Decoder(DecoderConfig(width=8, heads=2, depth=1))
        model.norm.bias[0] = torch.nan
    evidence.save_checkpoint(model, tmp_path / "nan")
    refused("checkpoint nan: .*finite", "evaluate", tmp_path / "nan")


def test_misuse_of_evaluate_names_the_argument(bench, tmp_path):
    one = bench[0] / "bench-0.safetensors"
    misused("Missing argument 'CHECKPOINT'", "evaluate")
    misused("'CHECKPOINT': File", "evaluate", tmp_path / "nothing")
    misused("'CHECKPOINT': File", "evaluate", tmp_path)
    misused("'--manifest': File", "evaluate", one, "--manifest", tmp_path / "nothing")


# ---------------------------------------------------------------- rebuild, record


def spoilt(folder, *path, value):
    """The manifest with another value, and its digest made anew: what a forger would do."""
    recorded = evidence.read_manifest(folder / "bench.json")
    entry = recorded
    for key in path[:-1]:
        entry = entry[key]
    entry[path[-1]] = value(entry[path[-1]]) if callable(value) else value
    evidence.write_manifest(folder / "bench.json", recorded)
    return folder / "bench.json"


def check_rebuild(main, folder):
    """The same to the last bit; what a forger changed, a metric, hash or setting, is found."""
    path = folder / "bench.json"
    output, _ = run("rebuild", path, main=main)
    assert output.endswith("bench.json is confirmed: equal to the last bit\n")
    whole = path.read_bytes()
    success = ("metrics", "runs", "bench", 1, "end", "train", "success")
    for change, value, words in (
        (success, lambda x: x + 1e-9, "differs: metrics.runs.bench.1.end.train.success: "),
        (("checkpoints", "bench-1.safetensors"), "c" * 64, "differs: checkpoints.bench-1.safeten"),
        (("config", "bench", "supervised", "learning_rate"), 1e-3, "differs: metrics.arms.bench."),
    ):
        output, _ = run("rebuild", spoilt(folder, *change, value=value), main=main, status=1)
        assert words in output, output
        path.write_bytes(whole)


def test_rebuild(folder):
    check_rebuild(command_line.main, folder)


def test_record_and_rebuild_of_the_wrong_masks(tmp_path, monkeypatch):
    small = masking.MaskingConfig(
        model=DecoderConfig(width=8, heads=2, depth=1, context_length=11),
        supervised=SupervisedConfig(steps=1),
        reinforced=ReinforceConfig(steps=1, group_size=2, objective="ppo_clip"),
    )
    run_all = masking.run

    def run_few(name, seeds, *, config, tell):
        return run_all(name, seeds, config=config or small, tell=tell, show=False)

    monkeypatch.setattr(masking, "run", run_few)
    monkeypatch.setattr(masking, "FAULTS", ("right", "late"))
    monkeypatch.setattr(masking, "SEEDS", (0,))
    output, _ = run("record", "masks", "--out", tmp_path)
    assert output.count("seed 0: success") == len(masking.FAULTS)
    output, _ = run("rebuild", tmp_path / "masks.json")
    assert output.startswith("masks: 2 arms, 1 seed, ")
    assert output.endswith("masks.json is confirmed: equal to the last bit\n")
    recorded = evidence.read_manifest(tmp_path / "masks.json")
    recorded["config"]["every"] = 2
    evidence.write_manifest(tmp_path / "masks.json", recorded)
    assert run("rebuild", tmp_path / "masks.json")[0].endswith("equal to the last bit\n")
    recorded["metrics"]["summary"]["right"]["success"] += 1e-9
    evidence.write_manifest(tmp_path / "masks.json", recorded)
    output, _ = run("rebuild", tmp_path / "masks.json", status=1)
    assert "differs: metrics.summary.right.success: " in output
    del recorded["config"]["model"]
    evidence.write_manifest(tmp_path / "masks.json", recorded)
    refused("manifest masks.json: not the settings of a run", "rebuild", tmp_path / "masks.json")


def test_rebuild_elsewhere_compares_summaries(folder):
    path = spoilt(folder, "environment", "torch", value="2.4.0")
    spoilt(folder, "checkpoints", "bench-1.safetensors", value="c" * 64)
    output, _ = run("rebuild", path)
    assert f"recorded elsewhere: torch was 2.4.0, is {torch.__version__}\n" in output
    assert output.endswith("is confirmed: summaries equal within 0.05\n")
    spoilt(folder, "metrics", "summary", "bench", "end_train", value=lambda x: x + 0.06)
    output, _ = run("rebuild", path, status=1)
    assert "differs: metrics.summary.bench.end_train: " in output


def test_rebuild_names_changed_sources_and_shortens_long_lists(folder):
    path = spoilt(folder, "sources", "mathrl/kl.py", value="c" * 64)
    assert "changed since it was recorded: mathrl/kl.py\n" in run("rebuild", path)[0]
    spoilt(folder, "config", "bench", "supervised", "steps", value=9)
    output, _ = run("rebuild", path, status=1)
    assert output.count("differs: ") == command_line.SHOWN_DIFFERENCES + 1
    assert re.search(r"differs: \d+ more\n$", output)


def test_rebuild_refuses_before_it_trains(folder, tmp_path):
    path = folder / "bench.json"
    misused("NAME: no manifest", "rebuild", "nothing")
    misused("there are: ", "rebuild", "nothing")
    misused("NAME: no manifest nothing.json\n", "rebuild", "nothing.json")
    for value, words in (({"bench": 3}, "TypeError"), ([], "AttributeError"),
                         ({"bench": {**asdict(SMALL), "color": 1}}, "color")):  # fmt: skip
        spoilt(folder, "config", value=value)
        refused(f"manifest bench.json: not the settings of a run.*{words}", "rebuild", path)
    path.write_bytes(path.read_bytes() + b" ")
    refused("refused: manifest bench.json: it is not what was written", "rebuild", path)


def test_record_and_rebuild_by_name(small, folder, tmp_path, monkeypatch):
    """In a checkout, a manifest has its place."""
    (tmp_path / "mkdocs.yml").touch()
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    place = tmp_path / "docs/evidence/bench.json"
    assert run("record", "bench")[0].endswith(f"written: {place}\n")
    run("record", "bench", "--out", tmp_path / "other")
    for path in (place, tmp_path / "other/bench.json"):
        found = evidence.differences(*map(evidence.read_manifest, (folder / "bench.json", path)))
        assert found == []
    assert "is confirmed" in run("rebuild", "bench")[0]
    misused("NAME: 'benches' is not one of baselines, bench, ", "record", "benches")
    misused("there are: bench", "rebuild", "shaped")


# ---------------------------------------------------------------- claims


def test_claims_are_those_of_the_book():
    import claims as hook

    stated, proofs = hook.stated(), hook.established()
    status = 1 if hook.problems(stated, proofs) else 0
    output, errors = run("claims", status=status)
    assert set(re.findall(r"^(\d+\.\d+)  \S+\.md$", output, re.M)) == set(stated)
    assert {p.test for p in proofs if p.id in stated} == set(re.findall(r"\* \w+: (\S+)", output))
    assert output.endswith(f"{len(stated)} claims, {len(proofs)} tests\n")
    assert errors.splitlines() == hook.problems(stated, proofs)
    ids = re.findall(r"^(\d+)\.(\d+)  \S+\.md$", output, re.M)
    assert ids == sorted(ids, key=lambda pair: [*map(int, pair)])


def test_a_claim_without_a_test_is_a_failure(tmp_path, monkeypatch):
    for name in ("docs/hooks", "tests"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "docs/hooks/claims.py", tmp_path / "docs/hooks")
    page = tmp_path / "docs/page.md"
    page.write_text('# Page\n\n!!! claim "1.10"\n    Sums are sums.\n')
    (tmp_path / "mkdocs.yml").touch()
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    output, errors = run("claims", status=1)
    assert output == "1.10  page.md\n    Sums are sums.\n\n1 claims, 0 tests\n"
    assert errors == "claim 1.10 (page.md) has no test\n"
    page.write_text('!!! claim "one"\n    Sums are sums.\n')
    refused("page.md: expected an id", "claims")


def test_without_a_checkout_it_is_said_where_one_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    for arguments in (["claims"], ["record", "bench"], ["rebuild", "bench"]):
        refused("not installed from a checkout: clone it and run `pip install -e .`", *arguments)


def test_a_closed_pipe_is_no_error():
    pipe = f"{sys.executable} -m mathrl claims | head -n 1"
    result = subprocess.run(pipe, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert re.fullmatch(r"1\.1  \S+\.md\n", result.stdout)
    assert "Traceback" not in result.stderr
    assert "Error" not in result.stderr


# ---------------------------------------------------------------- masks

CALLS = [
    {"prompt_ids": [0], "output_ids": [1, 2], "log_probs": [-0.2, -0.4], "advantage": 1},
    {"prompt_ids": [0, 1, 2, 3, 3], "output_ids": [4], "log_probs": [-0.3], "advantage": 1},
]
STRIPPED = {"prompt_ids": [0, 2, 7], "output_ids": [5], "log_probs": [-0.5], "advantage": 1}
TABLE = """\
trajectory 'calls': calls 2, rows 1, splits 0, tokens sampled 3, trained 3

  row 0, 6 tokens
    input position  predicted token  author   old log-prob  advantage  call  weight
  * 0               1                policy   -0.2          1          0     1
  * 1               2                policy   -0.4          1          0     1
    2               3                context  –             –          –     0
    3               3                context  –             –          –     0
  * 4               4                policy   -0.3          1          1     1

nothing wrong
"""
TOKENIZER = """
class Letters:
    def encode(self, text):
        return [ord(letter) for letter in text]
    def decode(self, ids):
        return "".join(map(chr, ids))
tokenizer = Letters()
number = 3
"""
CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}.{% endfor %}"
HEADER = "{% if add_generation_prompt %}a:{% endif %}"
TALK = [{"role": r, "content": c} for r, c in
        (("user", "2"), ("assistant", "4"), ("user", "3"), ("assistant", "6"))]  # fmt: skip


@pytest.fixture
def calls(tmp_path):
    """Writes lines to a file and returns its path."""

    def write(*lines):
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "calls.jsonl").write_text("\n".join(texts) + "\n")
        return tmp_path / "calls.jsonl"

    return write


@pytest.fixture
def chat(tmp_path, monkeypatch):
    """Options for messages; the tokenizer is a file of the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "letters_of_a_test", raising=False)
    (tmp_path / "letters_of_a_test.py").write_text(TOKENIZER)
    (tmp_path / "chat.jinja").write_text(CHAT + HEADER)
    return ["--tokenizer", "letters_of_a_test:tokenizer", "--template", "chat.jinja", "--stop", "."]


def check_masks(main, calls):
    assert run("masks", calls(*CALLS), main=main)[0] == TABLE
    folded, _ = run("masks", calls(*CALLS), "--fold", 1, main=main)
    assert "    2 to 3          2 tokens         context" in folded
    output, _ = run("masks", calls(CALLS[0], STRIPPED), main=main, status=1)
    assert (
        "  line 2: call 1 does not extend call 0: reasoning stripped at index 1, 1 became 2\n"
        in (output)
    )
    assert output.endswith("\nwrong: split, reasoning stripped\n")
    output, _ = run("masks", calls(CALLS[0], STRIPPED), "--allow", splits.REASONING, main=main)
    assert output.endswith("\nnothing wrong\n")
    run("masks", calls(CALLS[0], STRIPPED), "--allow", splits.BRANCH, main=main, status=1)


def test_masks(calls):
    check_masks(command_line.main, calls)


def test_masks_of_several_trajectories(calls):
    """Each is built alone, and what is wrong is counted over all."""
    lines = [{**call, "trajectory": name} for name in "abc" for call in (CALLS[0], STRIPPED)]
    output, _ = run("masks", calls(*lines), status=1)
    assert re.findall(r"^trajectory '(\w)': calls 2, rows 2, splits 1, ", output, re.M) == [*"abc"]
    assert output.count("does not extend call 0") == 3
    assert output.endswith("wrong: split, reasoning stripped, 3 times\n")


@pytest.mark.parametrize(
    ("log_probs", "wrong"),
    [
        ([[-0.2, -0.4], [-0.3]], None),
        ([None, None], None),
        ([[-0.2, -0.4], None], "1 of 3 trained targets have no log-probability"),
        ([[-0.2, None], [-0.3]], "1 of 3 trained targets have no log-probability"),
        ([[0.0, 0.0], [0.0]], "filler log-prob"),
    ],
)
def test_masks_judge_log_probabilities(calls, log_probs, wrong):
    lines = [{**call, "log_probs": p} for call, p in zip(CALLS, log_probs, strict=True)]
    output, _ = run("masks", calls(*lines), status=1 if wrong else 0)
    assert output.endswith(f"\nwrong: {wrong}\n" if wrong else "\nnothing wrong\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt_ids": [0]}', "line 2, field 'output_ids': is missing"),
        ('{"prompt_ids": [], "output_ids": [1]}', "line 2, field 'prompt_ids': "),
        ('{"prompt_ids": [0], "output_ids": [1], "log_probs": [1]}', "line 2, field 'log_probs"),
        ('{"prompt_ids": [0], "output_ids": [1], "logprobs": [1]}', "line 2, field 'logprobs': is"),
        ('{"prompt_ids": [0], "output_ids": [1.5]}', "line 2, field 'output_ids"),
        ('{"prompt_ids": ', "line 2: is no JSON"),
        ("[" * 100_000, "line 2: is no JSON"),
        ("[]", "line 2: must be an object"),
        ('{"messages": []}', "line 2, field 'messages': need .*give --tokenizer, --template and"),
        ('{"prompt_ids": [0], "output_ids": [NaN]}', "line 2, field 'output_ids': must hold int"),
        ('{"prompt_ids": [0], "prompt_ids": [9]}', "line 2, field 'prompt_ids': is given twice"),
        (f'{{"prompt_ids": [{9**500}], "output_ids": [1]}}', "line 2, field 'prompt_ids': must"),
        (f'{{"prompt_ids": [{"9" * 5000}], "output_ids": [1]}}', "line 2, field 'prompt_ids': "),
        (f'{{"prompt_ids": [0], "output_ids": [1], "log_probs": [-{9**500}]}}',
         r"line 2, field 'log_probs\[0\]': must be finite, got -inf"),
        (f'{{"prompt_ids": [0], "output_ids": [1], "finish_reason": {[0] * 10**5}}}',
         r"line 2, field 'finish_reason': must be text, got \[0, .{,300} \.\.\."),
        (f'{{"{"k" * 10**5}": 1}}', r"line 2, field 'k{300} \.\.\.': is unknown"),
        (f'{{"prompt_ids": {"[" * 990}{"]" * 990}, "output_ids": [1]}}', "line 2"),
    ],
)  # fmt: skip
def test_malformed_lines_are_named(calls, line, words):
    refused(f"calls.jsonl, {words}", "masks", calls(CALLS[0], line))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"trajectory": "caf\xe9"}', "line 2: is not UTF-8"),
        (json.dumps(CALLS[1]).encode("utf-16"), "line 2: is not UTF-8"),
        (bytes(range(128, 256)), "line 2: is not UTF-8"),
        (b"\0", "line 2: is no JSON"),
    ],
)
def test_bytes_that_are_no_text_are_named(calls, data, words):
    path = calls(CALLS[0])
    path.write_bytes(path.read_bytes() + data + b"\n")
    refused(f"calls.jsonl, {words}", "masks", path)


def test_masks_from_other_systems(calls):
    """A byte order mark and carriage returns change nothing."""
    path = calls(*CALLS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert run("masks", path)[0] == TABLE


def test_masks_of_a_long_line(calls):
    """Half a million tokens on one line, read, built and folded."""
    line = {"prompt_ids": [7] * 500_000, "output_ids": [1], "log_probs": [-0.5]}
    output, _ = run("masks", calls(line))
    assert "rows 1, splits 0, tokens sampled 1, trained 1" in output
    assert len(output) < 1000


def test_masks_of_standard_input():
    def piped(text):
        result = CliRunner().invoke(command_line.main, ["masks", "-"], input=text)
        return result.exit_code, result.output

    text = "\n".join(map(json.dumps, CALLS))
    assert piped(text) == (0, TABLE)
    assert piped("") == (1, "Error: standard input: holds no call\n")
    missing = "Error: standard input, line 3, field 'prompt_ids': is missing\n"
    assert piped(text + "\n{}\n") == (1, missing)
    command = [sys.executable, "-m", "mathrl", "masks", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout) == (0, TABLE)


def test_masks_of_an_empty_file(calls):
    refused("holds no call", "masks", calls(""))


def test_masks_of_messages(calls, chat, tmp_path):
    output, _ = run("masks", calls({"messages": TALK}), *chat)
    assert "trajectory 'line 1': calls 2, rows 1, splits 0, tokens sampled 4, trained 4" in output
    assert "* 5 ':'           52 '4'           policy   missing       missing    0     1" in output
    assert output.endswith("\nnothing wrong\n")
    broken = CHAT.replace("m.content", "m.content if loop.last else m.content|upper ~ '!'")
    (tmp_path / "chat.jinja").write_text(broken + HEADER)
    output, _ = run("masks", calls({"messages": TALK}), *chat, status=1)
    assert "became 33 '!'" in output
    assert "\nwrong: split, " in output


def test_decoded_calls(calls, chat):
    output, _ = run("masks", calls({"prompt_ids": [65], "output_ids": [66]}), *chat[:2])
    assert "* 0 'A'           66 'B'           policy" in output
    refused("--tokenizer cannot decode", "masks",
            calls({"prompt_ids": [65], "output_ids": [2**40]}), *chat[:2])  # fmt: skip


MESSAGES = [
    (None, "field 'messages': must be a list, got NoneType"),
    ([], "field 'messages': hold no answer"),
    ([None], r"field 'messages\[0\]': must be an object"),
    ([{"content": "x"}], r"field 'messages\[0\].role': must be text, got None"),
    ([{"role": "user", "content": 3}], r"field 'messages\[0\].content': must be text"),
    ([TALK[0], {"role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
     r"field 'messages\[1\].tool_calls\[0\].function.arguments': is no JSON"),
    ([TALK[0], {"role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}],
     "field 'messages': cannot be rendered and encoded: RecursionError"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "words"), MESSAGES)
def test_malformed_messages_are_named(calls, chat, messages, words):
    path = calls({"messages": TALK}, {"messages": messages})
    refused(f"calls.jsonl, line 2, {words}", "masks", path, *chat)


def test_other_fields_of_a_conversation_are_named(calls, chat):
    for field, value, words in (
        ("tools", "x", "field 'tools': must be a list"),
        ("tools", [3], r"field 'tools\[0\]': must be an object, got int"),
        ("temperature", 1, "field 'temperature': is unknown"),
        ("advantage", [1], "field 'advantage': has 1 entries for 2 output ids"),
        ("trajectory", 3, "field 'trajectory': must be text"),
    ):
        refused(f"line 1, {words}", "masks", calls({"messages": TALK, field: value}), *chat)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].nothing.deep }}", "field 'messages': the template refuses"),
        ("{% for i in range(10**9) %}x{% endfor %}", "cannot be rendered and encoded: Overflow"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "encoded: RecursionError"),
        ("nothing", r"field 'messages\[1\]': is rendered without any of `stop`"),
    ],
)
def test_a_template_that_fails_is_named_with_its_line(calls, chat, tmp_path, source, words):
    (tmp_path / "chat.jinja").write_text(source)
    refused(f"calls.jsonl, line 1, .*{words}", "masks", calls({"messages": TALK}), *chat)


def test_a_tokenizer_that_fails_is_named(calls, chat, tmp_path):
    for body, words in (
        ("1 / 0", "encoded: ZeroDivisionError"),
        ("return [-1 for _ in text]", "must not be negative"),
    ):
        text = TOKENIZER.replace("return [ord(letter) for letter in text]", body)
        (tmp_path / "letters_of_a_test.py").write_text(text)
        sys.modules.pop("letters_of_a_test", None)
        refused(f"line 1, .*{words}", "masks", calls({"messages": TALK}), *chat)
    text = TOKENIZER.replace('return "".join(map(chr, ids))', "return 3")
    (tmp_path / "letters_of_a_test.py").write_text(text)
    sys.modules.pop("letters_of_a_test")
    refused("--tokenizer decodes .* to int, not to text", "masks", calls(*CALLS), *chat[:2])


def test_misuse_of_masks_names_the_option(calls, chat, tmp_path):
    path = calls(*CALLS)
    misused("Missing argument 'FILE'", "masks")
    misused("'FILE': File", "masks", tmp_path / "nothing")
    misused("'--fold': -1 is not in the range x>=0", "masks", path, "--fold", -1)
    misused("'--allow': 'boredom' is not one of 'retokenised'", "masks", path, "--allow", "boredom")
    misused("need all of --tokenizer, --template and --stop", "masks", path, "--stop", ".")
    misused("need all of --tokenizer, --template and --stop", "masks", path, *chat[:4])
    misused("'--template': File 'nothing' does not exist", "masks", path, "--template", "nothing")
    (tmp_path / "chat.jinja").write_text("{% for %}")
    misused("--template: `source` is no template", "masks", path, *chat)
    (tmp_path / "chat.jinja").write_bytes(b"\xe9")
    misused("--template: 'utf-8' codec can't decode", "masks", path, *chat)
    misused("the text of a stop token must not be empty", "masks", path, "--stop", "")
    misused("is a directory", "masks", tmp_path)
    for name, text in (("syntax", "def ("), ("division", "1 / 0"), ("end", "raise SystemExit(0)")):
        (tmp_path / f"{name}_of_a_test.py").write_text(text)
        misused(f"{name}_of_a_test cannot be imported", "masks", path, "--tokenizer",
                f"{name}_of_a_test:tokenizer")  # fmt: skip
    for value, words in (
        ("letters_of_a_test", "expected MODULE:NAME"),
        ("letters_of_a_test:nothing", "has no attribute 'nothing'"),
        ("nothing_at_all:tokenizer", "No module named 'nothing_at_all'"),
        ("letters_of_a_test:number", "has no `encode` and `decode`"),
        ("letters_of_a_test:Letters", "is a class; name an object of it"),
        (":", "expected MODULE:NAME"),
    ):
        misused(words, "masks", path, "--tokenizer", value)


# ---------------------------------------------------------------- mutants


def mutant(name, old, new):
    module = mutated(name, old, new)
    return module.main if name == "mathrl.__main__" else module.masks


def check_single(check):
    """A check of the whole command line, for one command that stands alone."""

    def with_command(masks, calls):
        import click

        group = click.Group(commands={"masks": masks})
        check(group, calls)

    return with_command


@pytest.mark.parametrize(
    ("old", "new", "check", "needs"),
    [
        ('ctx.exit(1 - verdict["reward"])', 'ctx.exit(verdict["reward"])', check_verdicts, None),
        ('ctx.exit(1 - verdict["reward"])', "pass", check_verdicts, None),
        ("    if found:\n        ctx.exit(1)\n", "", check_rebuild, "folder"),
        ('_run(recorded["name"], seeds, config)', "recorded",
         check_rebuild, "folder"),
        ("seeds, arms=config, tell", "[0], arms=config, tell", check_rebuild, "folder"),
        ("experiments.tasks(*chosen)", 'experiments.tasks("contract", 0)', check_evaluation,
         "contrast"),
        ("experiments.tasks(*chosen)", "experiments.tasks(*chosen)[::-1]", check_evaluation,
         "contrast"),
        ('("training", "held-out")', '("held-out", "training")', check_evaluation, "contrast"),
        ("exact.pass_at_k(min(p, 1.0), k)", "exact.pass_at_k(min(p, 1.0), k + 1)",
         check_evaluation, "contrast"),
    ],
)  # fmt: skip
def test_mutant_is_caught(old, new, check, needs, request):
    arguments = [] if needs is None else [request.getfixturevalue(needs)]
    fails(check, mutant("mathrl.__main__", old, new), *arguments)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if s.reason not in allowed", "if s.reason in allowed"),
        ("if s.reason not in allowed", ""),
        ("ctx.exit(1 if wrong else 0)", "ctx.exit(0)"),
        ("trajectory.lines[split.call]", "trajectory.lines[split.before]"),
        ("fold=fold", "fold=None"),
        ("advantages=trajectory.advantages", "advantages=None"),
    ],
)
def test_mutant_of_masks_is_caught(old, new, calls):
    check = check_single(check_masks)
    check(_masks.masks, calls)
    fails(check, mutant("mathrl._masks", old, new), calls)
