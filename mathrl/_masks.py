"""The command `mathrl masks`: tables of training rows, splits, and what is wrong."""

import importlib
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mathrl import splits

if TYPE_CHECKING:
    from mathrl.records import Simulator, Trajectory
    from mathrl.trajectory import Call, Row


def _no_empty(
    ctx: click.Context, option: click.Parameter, value: tuple[str, ...]
) -> tuple[str, ...]:
    if "" in value:
        raise click.BadParameter("the text of a stop token must not be empty")
    return value


def _import_tokenizer(ctx: click.Context, option: click.Parameter, value: str | None) -> Any:
    if value is None:
        return None
    sys.path.insert(0, os.getcwd())  # as `python -m` does, and the installed script does not
    module, _, name = value.partition(":")
    try:
        tokenizer = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"expected MODULE:NAME of an object; {error}") from None
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise click.BadParameter(f"{module} cannot be imported: {error!r}") from None
    if isinstance(tokenizer, type):
        raise click.BadParameter(f"{value} is a class; name an object of it")
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise click.BadParameter(f"{value} has no `encode` and `decode`")
    return tokenizer


@click.command()
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
)
@click.option(
    "--tokenizer", callback=_import_tokenizer, metavar="MODULE:NAME",
    help="An object with `encode` and `decode`, imported from the working folder or from what is "
    "installed. Shows tokens as text.",
)  # fmt: skip
@click.option(
    "--template", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="A chat template in Jinja, for a file of messages.",
)  # fmt: skip
@click.option(
    "--stop", multiple=True, callback=_no_empty, metavar="TEXT",
    help="Text of a stop token, for a file of messages; may be given several times.",
)  # fmt: skip
@click.option(
    "--allow", multiple=True, type=click.Choice(splits.REASONS), metavar="REASON",
    help="A reason to split that is intended; several times. One of " + ", ".join(splits.REASONS),
)  # fmt: skip
@click.option(
    "--fold", type=click.IntRange(min=0), default=6, show_default=True, metavar="N",
    help="Show runs of more than N untrained targets as one line.",
)  # fmt: skip
@click.pass_context
def masks(
    ctx: click.Context,
    file: Path,
    tokenizer: Any,
    template: Path | None,
    stop: tuple[str, ...],
    allow: tuple[str, ...],
    fold: int,
) -> None:
    """Show who wrote each token and what is trained.

    A line of FILE ("-" is standard input) is a JSON object: a call with `prompt_ids` and
    `output_ids`, optionally `log_probs`, `finish_reason`, `advantage`, `trajectory` and settings of
    sampling; or a conversation with `messages`, which also needs --tokenizer, --template and
    --stop. Calls of one trajectory are in the order in which they were made.

    Prints the table of each training row and every split with its reason. The status is 1 if a
    prompt does not extend what came before it (unless allowed), log-probabilities are missing for
    a part of the targets or are fillers, or a line is malformed.

    \b
    Examples:
      mathrl masks calls.jsonl --allow branch
      mathrl masks chats.jsonl --tokenizer mine:tokenizer --template chat.jinja --stop '<|im_end|>'
    """
    from mathrl import records

    def decode(ids: Sequence[int]) -> str:
        try:
            text = tokenizer.decode(list(ids))
        except Exception as error:
            raise click.ClickException(f"--tokenizer cannot decode {[*ids]}: {error!r}") from None
        if not isinstance(text, str):
            kind = type(text).__name__
            raise click.ClickException(f"--tokenizer decodes {[*ids]} to {kind}, not to text")
        return text

    piped = str(file) == "-"
    simulate = _simulator(tokenizer, template, stop)
    try:
        if piped:
            lines = sys.stdin.buffer.read().splitlines()
            trajectories = records.parse(lines, source="standard input", simulate=simulate)
        else:
            trajectories = records.read(file, simulate=simulate)
    except records.RecordError as error:
        hint = "; give --tokenizer, --template and --stop"
        needed = error.field == "messages" and simulate is None
        raise click.ClickException(f"{error}{hint if needed else ''}") from None
    if not trajectories:
        raise click.ClickException(f"{'standard input' if piped else file}: holds no call")
    shown = decode if tokenizer is not None else None
    wrong = [line for each in trajectories for line in _audit(each, shown, {*allow}, fold)]
    for line, count in Counter(wrong).items():
        click.echo(f"wrong: {line}" + (f", {count} times" if count > 1 else ""))
    if not wrong:
        click.echo("nothing wrong")
    ctx.exit(1 if wrong else 0)


def _simulator(tokenizer: Any, template: Path | None, stop: Sequence[str]) -> "Simulator | None":
    from mathrl import messages

    if template is None and not stop:
        return None
    if tokenizer is None or template is None or not stop:
        raise click.UsageError("messages need all of --tokenizer, --template and --stop")
    try:
        chat = messages.ChatTemplate(template.read_text("utf-8"))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--template") from None

    def simulate(talk: Sequence[Any], tools: Sequence[Any] | None) -> "Sequence[Call]":
        try:
            return messages.calls_from_messages(
                talk, template=chat, tokenizer=tokenizer, stop=stop, tools=tools
            )
        except ValueError as error:
            if str(error).startswith("`tokenizer`"):  # no field of the file
                raise click.BadParameter(str(error), param_hint="--tokenizer") from None
            raise
        except Exception as error:  # whatever a template or a tokenizer does
            problem = f"`messages` cannot be rendered and encoded: {error!r}"
            raise ValueError(problem) from None

    return simulate


def _audit(
    trajectory: "Trajectory", decode: splits.Decoder | None, allowed: set[str], fold: int
) -> list[str]:
    """Print one trajectory; return what is wrong with it."""
    from mathrl.audit import audit
    from mathrl.trajectory import build

    built = build(trajectory.calls, advantages=trajectory.advantages, decode=decode)
    sampled = sum(len(call.output_ids) for call in trajectory.calls)
    click.echo(
        f"trajectory {trajectory.name!r}: calls {len(trajectory.calls)}, rows {len(built.rows)}, "
        f"splits {len(built.splits)}, tokens sampled {sampled}, "
        f"trained {sum(row.trained for row in built.rows)}"
    )
    for split in built.splits:
        click.echo(f"  line {trajectory.lines[split.call]}: {split}")
    for item in built.untrained:
        click.echo(f"  line {trajectory.lines[item.call]}: call {item.call}: {item.reason}")
    wrong = [f"split, {s.reason}" for s in built.splits if s.reason not in allowed]
    for number, row in enumerate(built.rows):
        table = audit(row, decode=decode, fold=fold).text()
        click.echo(f"\n  row {number}, {len(row.tokens)} tokens\n{textwrap.indent(table, '  ')}")
    click.echo()
    return wrong + _faults(built.rows)


def _faults(rows: "Sequence[Row]") -> list[str]:
    """What is wrong with the log-probabilities, as far as the rows alone show it."""
    from mathrl.audit import audit_batch

    known = [
        [p is not None for p, m in zip(row.old_log_probs, row.mask, strict=True) if m]
        for row in rows
    ]
    present, total = sum(map(sum, known)), sum(map(len, known))
    if present == 0:  # not recorded at all, which is no fault of these calls
        return []
    if present < total:
        return [f"{total - present} of {total} trained targets have no log-probability"]
    found = []
    for row in rows:
        old = [p or 0.0 for p in row.old_log_probs]  # None where nothing is trained
        found += audit_batch([row.tokens], [[1] * len(row.tokens)], [row.mask], old_log_probs=[old])
    return [fault.kind for fault in found]
