"""The command line: `mathrl COMMAND`, or `python -m mathrl COMMAND`.

The exit status is 0 if what was asked about holds; 1 if it does not, because a response is not
paid, a file is not what was written, a run does not repeat or a row is split; 2 if the command was
called wrongly; 130 after Ctrl-C. Each command imports what it needs: `verify` runs without torch.
"""

import errno
import importlib
import importlib.util
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from mathrl import _masks, _zebra_cli, arithmetic
from mathrl._sources import ROOT

if TYPE_CHECKING:
    from mathrl.evidence import Manifest
    from mathrl.experiments import Arm

EVIDENCE = Path("docs/evidence")
MASKS = "masks"
"""The one recorded run that is not of `mathrl.experiments` but of `mathrl.masking`."""
SHOWN_DIFFERENCES = 20


class _Commands(click.Group):
    """Turns what a user may cause into one line on the standard error."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\ninterrupted; every file that was reported as written is whole", err=True)
            ctx.exit(130)
        except OSError as error:
            if error.errno == errno.EPIPE:  # `mathrl claims | head` is no error; click knows
                raise
            raise click.ClickException(str(error)) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mathrl", message="%(prog)s %(version)s")
def main() -> None:
    """The math of RL post-training, as a book that runs.

    Exit status: 0 if what was asked about holds, 1 if not, 2 for a wrong call.
    """


main.add_command(_masks.masks)
main.add_command(_zebra_cli.zebra)


# ---------------------------------------------------------------- verify


@main.command()
@click.argument("a", type=int)
@click.argument("b", type=int)
@click.argument("response", type=int, nargs=-1, required=True)
@click.pass_context
def verify(ctx: click.Context, a: int, b: int, response: tuple[int, ...]) -> None:
    """Judge a response to a task: is it paid, and why.

    A and B lie in 0 to 4. RESPONSE is a list of token ids: digits stand for themselves, 13 is the
    stop token. Right is the sum, then twice the sum modulo 10, then 13. The status is 0 if the
    response is paid and 1 if not.

    \b
    Example:
      mathrl verify 3 4 -- 7 4 13
    """
    verdict = arithmetic.verify((a, b), response)
    click.echo(f"reward {verdict['reward']} ({verdict['reason']}): {verdict['detail']}")
    ctx.exit(1 - verdict["reward"])


# ---------------------------------------------------------------- bench, record, rebuild


@main.command()
@click.option(
    "--seeds", type=click.IntRange(min=1), default=5, show_default=True, metavar="N",
    help="Train with the seeds 0 to N-1.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default="runs/bench",
    show_default=True, metavar="FOLDER", help="Where checkpoints and manifest are written.",
)  # fmt: skip
def bench(seeds: int, out: Path) -> None:
    """Train the bench from nothing: 20 demonstrations, then rewards.

    Each checkpoint, bench-SEED.safetensors, is written as soon as it is trained, and the manifest,
    bench.json, at the end. The tables show for each seed what supervision gained and what
    reinforcement gained, the held-out tasks as they came out, and what was spent.
    One seed takes some seconds of one core.

    \b
    Example:
      mathrl bench --seeds 1 --out /tmp/bench
    """
    from mathrl import evidence, experiments

    _make_folder(out, "--out")

    def tell(label: str, seed: int, result: Mapping[str, Any]) -> None:
        _tell(label, seed, result)
        click.echo(f"written: {out / f'{label}-{seed}.safetensors'}")

    recorded = experiments.run("bench", range(seeds), folder=out, tell=tell)
    evidence.write_manifest(out / "bench.json", recorded)
    click.echo(f"written: {out / 'bench.json'}\n")
    _report(recorded)


@main.command()
@click.argument("name")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
    help="Where the manifest is written; by default docs/evidence of the checkout.",
)  # fmt: skip
def record(name: str, out: Path | None) -> None:
    """Run an experiment and write its manifest.

    The book reads its numbers from these manifests. NAME is one of baselines, bench, budgets,
    demonstrations, divergence, masks, shaped, splits. The checkpoints are not kept: the manifest
    holds their hashes, and training makes the same ones again.

    \b
    Example:
      mathrl record baselines --out /tmp/evidence
    """
    from mathrl import evidence, experiments

    names = sorted([*experiments.EXPERIMENTS, MASKS])
    if name not in names:
        expected = ", ".join(names)
        raise click.BadParameter(f"{name!r} is not one of {expected}", param_hint="NAME")
    folder = _in_checkout(EVIDENCE) if out is None else out
    _make_folder(folder, "--out")
    path = folder / f"{name}.json"
    evidence.write_manifest(path, _run(name))
    click.echo(f"written: {path}")


@main.command()
@click.argument("name")
@click.pass_context
def rebuild(ctx: click.Context, name: str) -> None:
    """Repeat a recorded run from nothing and compare.

    NAME is that of a manifest in docs/evidence of the checkout, or the path of one. On the machine
    and with the versions that recorded it, metrics and checkpoints must be equal to the last bit;
    elsewhere summaries must be, within 0.05. The status is 1 if they differ.

    \b
    Examples:
      mathrl rebuild bench
      mathrl rebuild runs/bench/bench.json
    """
    from mathrl import evidence

    path = _manifest_path(name)
    recorded = _verified(evidence.read_manifest, path)
    config, seeds = _settings(path, recorded), recorded["seeds"]
    arms = recorded["metrics"]["runs"]
    size = f"{_count(len(arms), 'arm')}, {_count(len(seeds), 'seed')}"
    click.echo(f"{recorded['name']}: {size}, recorded in {recorded['seconds']:.0f} s")
    for source in evidence.changed_sources(recorded):
        click.echo(f"changed since it was recorded: {source}")
    repeated = _run(recorded["name"], seeds, config)
    ours, theirs = repeated["environment"], recorded["environment"]
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            click.echo(f"recorded elsewhere: {key} was {theirs.get(key)}, is {ours.get(key)}")
    found = evidence.differences(recorded, repeated)
    for line in found[:SHOWN_DIFFERENCES]:
        click.echo(f"differs: {line}")
    if len(found) > SHOWN_DIFFERENCES:
        click.echo(f"differs: {len(found) - SHOWN_DIFFERENCES} more")
    if found:
        ctx.exit(1)
    same = "equal to the last bit" if ours == theirs else "summaries equal within 0.05"
    click.echo(f"{path.name} is confirmed: {same}")


def _tell(label: str, seed: int, result: Mapping[str, Any]) -> None:
    train, test = (_shown(result["end"][split]["success"]) for split in ("train", "test"))
    click.echo(f"{label}, seed {seed}: success {train}, held-out {test}")


def _run(name: str, seeds: Sequence[int] | None = None, config: Any = None) -> "Manifest":
    """Do a run, with seeds and settings of a manifest or with today's."""
    from mathrl import experiments, masking

    if name == MASKS:
        return masking.run(name, seeds or masking.SEEDS, config=config, tell=_tell)
    return experiments.run(name, seeds, arms=config, tell=_tell)


def _settings(path: Path, recorded: "Manifest") -> Any:
    """The settings of a manifest, which need not be those of today's run of that name."""
    from mathrl import masking

    try:
        if recorded["name"] == MASKS:
            return masking.settings(recorded["config"])
        return {label: _arm(settings) for label, settings in recorded["config"].items()}
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise click.ClickException(
            f"manifest {path.name}: not the settings of a run: {error!r}"
        ) from None


def _arm(settings: Mapping[str, Any]) -> "Arm":
    from mathrl.config import ReinforceConfig, SupervisedConfig
    from mathrl.decoder import DecoderConfig
    from mathrl.experiments import Arm

    reinforced = settings["reinforced"]
    return Arm(**{
        **settings,
        "model": DecoderConfig(**settings["model"]),
        "supervised": SupervisedConfig(**settings["supervised"]),
        "reinforced": None if reinforced is None else ReinforceConfig(**reinforced),
    })  # fmt: skip


# ---------------------------------------------------------------- evaluate


@main.command()
@click.argument("checkpoint", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--manifest", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="The manifest of the run; the checkpoint must be the one it names.",
)  # fmt: skip
def evaluate(checkpoint: Path, manifest: Path | None) -> None:
    """Verify a checkpoint and list what its policy does.

    All numbers are exact, without sampling. For each split: success of one sample, of the worst
    task and of greedy decoding; the probability of each failure (a wrong sum, or a wrong last digit
    after a right sum); the entropy of whole responses in nats; pass@k. Without a manifest the file
    is shown to be whole, but not to be that of a certain run, and the splits are those of the
    contract.

    \b
    Example:
      mathrl evaluate runs/bench/bench-0.safetensors --manifest runs/bench/bench.json
    """
    from mathrl import evaluate as exact
    from mathrl import evidence, experiments
    from mathrl.problem import arithmetic_problem

    expected, chosen, source = None, ("contract", 0), "not compared with a manifest"
    if manifest is not None:
        recorded = _verified(evidence.read_manifest, manifest)
        if checkpoint.name not in recorded["checkpoints"]:
            raise click.ClickException(f"manifest {manifest.name}: names no {checkpoint.name}")
        expected = recorded["checkpoints"][checkpoint.name]
        label, seed = checkpoint.stem.rsplit("-", 1)
        chosen = _settings(manifest, recorded)[label].split, int(seed)
        source = f"the one of manifest {manifest.name}"
    model = _verified(evidence.load_checkpoint, checkpoint, expected)
    click.echo(f"checkpoint {checkpoint.name}: whole, {source}")
    click.echo(f"contract {arithmetic.digest()[:12]}, split {chosen[0]!r}\n")
    splits = dict(zip(("training", "held-out"), experiments.tasks(*chosen), strict=True))
    try:
        summaries = [exact.summary(model, tasks) for tasks in splits.values()]
        chances = [exact.value(model, arithmetic_problem(tasks)) for tasks in splits.values()]
    except ValueError as error:
        raise click.ClickException(f"checkpoint {checkpoint.name}: {error}") from None
    _table(
        "Exact, mean over tasks",
        ("tasks", "", "success", "worst", "greedy", "wrong sum", "wrong last", "entropy"),
        [
            [name, str(len(tasks)), *map(_shown, summary.values())]
            for (name, tasks), summary in zip(splits.items(), summaries, strict=True)
        ],
    )
    passes = [
        [
            str(k),
            *(
                _shown(fmean(exact.pass_at_k(min(p, 1.0), k) for p in ps.tolist()))
                for ps in chances
            ),
        ]
        for k in experiments.PASS_AT
    ]
    _table("pass@k, exact", ("k", *splits), passes)


# ---------------------------------------------------------------- claims


@main.command()
@click.pass_context
def claims(ctx: click.Context) -> None:
    """List every claim of the book with its tests.

    Reads the pages and the tests of the checkout that this package is installed from. The status is
    1 if a claim has no test or a test names no claim.
    """
    ledger = _ledger()
    try:
        stated, proofs = ledger.stated(), ledger.established()
    except ledger.LedgerError as error:
        raise click.ClickException(str(error)) from None
    for claim in sorted(stated.values(), key=lambda c: [int(part) for part in c.id.split(".")]):
        click.echo(f"{claim.id}  {claim.page}\n{textwrap.indent(claim.text, '    ')}")
        for proof in proofs:
            if proof.id == claim.id:
                click.echo(f"    * {proof.kind}: {proof.test}")
        click.echo()
    click.echo(f"{len(stated)} claims, {len(proofs)} tests")
    problems = ledger.problems(stated, proofs)
    for problem in problems:
        click.echo(problem, err=True)
    ctx.exit(1 if problems else 0)


def _ledger() -> ModuleType:
    """The parser that the book is built with."""
    path = _in_checkout(Path("docs/hooks/claims.py"))
    spec = importlib.util.spec_from_file_location("claims", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- shared


def _in_checkout(path: Path) -> Path:
    """A path of the repository that this package is installed from."""
    if not (ROOT / "mkdocs.yml").is_file():
        raise click.ClickException(
            f"{path} is part of the repository, and this package was not installed from a "
            "checkout: clone it and run `pip install -e .` there"
        )
    return ROOT / path


def _manifest_path(name: str) -> Path:
    given = name.endswith(".json")
    path = Path(name) if given else _in_checkout(EVIDENCE) / f"{name}.json"
    if not path.is_file():
        known = "" if given else ", ".join(sorted(p.stem for p in path.parent.glob("*.json")))
        hint = f"; there are: {known}" if known else ""
        raise click.BadParameter(f"no manifest {path}{hint}", param_hint="NAME")
    return path


def _make_folder(path: Path, option: str) -> None:
    """Refuse a folder that cannot be written to before anything is computed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(str(error), param_hint=option) from None
    if not os.access(path, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written to", param_hint=option)


def _verified(read: Callable[..., Any], *arguments: Any) -> Any:
    """What reads a link of the chain, its refusal as one line."""
    from mathrl.evidence import EvidenceError

    try:
        return read(*arguments)
    except EvidenceError as error:
        raise click.ClickException(f"refused: {error}") from None


# ---------------------------------------------------------------- tables


def _report(recorded: "Manifest") -> None:
    """Tables of the bench, from its manifest."""
    [rows] = recorded["metrics"]["runs"].values()
    stages = ("start", "supervised", "end")

    def success(row: Mapping[str, Any], split: str) -> list[float]:
        return [row[stage][split]["success"] for stage in stages]

    training = []
    for row in rows:
        start, supervised, end = values = success(row, "train")
        gained = f"{supervised - start:+.4f}", f"{end - supervised:+.4f}"
        training.append([str(row["seed"]), *map(_shown, values), *gained])
    names = ("seed", "start", "supervised", "reinforced")
    gains = ("+ supervised", "+ reinforced")
    _table("Exact success on the 20 training tasks", (*names, *gains), training)
    held_out = [[str(row["seed"]), *map(_shown, success(row, "test"))] for row in rows]
    _table("Exact success on the 5 held-out tasks", names, held_out)
    budgets = ("supervised_budget", "reinforced_budget")
    kinds = ("optimizer_steps", "samples", "sampled_tokens", "trained_tokens", "positions")
    spent = [
        [stage.removesuffix("_budget"), *(f"{sum(row[stage][k] for row in rows):,}" for k in kinds)]
        for stage in budgets
    ]
    columns = ["stage", *(kind.replace("_", " ") for kind in kinds)]
    _table(f"Spent, {_count(len(rows), 'seed')} together", columns, spent)
    solved = sum(row["end"]["train"]["success"] >= 0.99 for row in rows)
    click.echo(
        f"{solved} of {_count(len(rows), 'seed')} with at least 0.99 on the training tasks, "
        f"{recorded['seconds']:.1f} s in all"
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for index, column in enumerate(columns):
        grid.add_column(column, justify="right" if index else "left")
    for row in rows:
        grid.add_row(*row)
    Console().print(grid, "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _shown(chance: float) -> str:
    return f"{chance:.1e}" if 0 < chance < 1e-4 else f"{chance:.4f}"


if __name__ == "__main__":
    main()
