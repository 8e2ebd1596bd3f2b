"""Command `windlass verify`: compares training under a configuration with plain PyTorch, and locates a difference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from windlass.base.bounded_input import MAX_RANKS_PER_HOST, parse_int
from windlass.base.errors import ConfigError
from windlass.base.printable_console import PrintableConsole
from windlass.base.text import one_line, plural
from windlass.cli.script_help import SCRIPT_HELP

if TYPE_CHECKING:
    from windlass.verify.verification_report import Deviation, VerificationReport


_TABLE_WIDTH = 110  # minimum width, so that a narrow terminal does not shorten cells


def verify(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT [ARGUMENT]...]",
            help=SCRIPT_HELP,
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="ds_config.json; overrides the configuration that the script passes.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Instead of a script: a Hugging Face config.json, directory, hub:NAME, or package.mod:function."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="With --model: ROWSxLENGTH of generated tokens [micro-batch x 32], or package.mod:function, called "
            "with step, micro-batch and rank."
        ),
    ] = None,
    nproc: Annotated[str, typer.Option(help="Comma-separated numbers of ranks to verify on.")] = "2",
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.", min=1)] = 5,
    seed: Annotated[int, typer.Option(help="With --model: seed of initial weights and generated tokens.")] = 0,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone", help="Train a second plain copy independently, and print the drift that rounding causes."
        ),
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="With --model: run Python files that come with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON, and nothing else.")] = False,
) -> None:
    """Train with plain PyTorch in one process, and sharded by CONFIG on N ranks, on the same batches; compare each step
    phase by phase: weights and outputs of every module, every gradient before and after the reduction, norm and
    clipping, every new weight. Exit code 0: equal; 1: not equal, or the comparison failed."""
    counts = _parse_rank_counts(nproc)
    _check_options(script, config, model, batch)
    from windlass.config.config_source import source_for_ranks
    from windlass.verify.verification_job import VerificationJob
    from windlass.verify.verification_run import run_verification as verify_on

    source = None if config is None else source_for_ranks(config)
    order = VerificationJob("", steps, source, list(script or []), model, batch, seed, alone, trust_remote_code)
    screen = PrintableConsole(stderr=as_json, soft_wrap=True, highlight=False, markup=False)
    screen.width = max(screen.width, _TABLE_WIDTH)
    found: list[VerificationReport] = []
    for count in counts:
        reports = verify_on(order, count)
        found += reports
        if not as_json:
            for number, report in enumerate(reports):
                name = f", engine {number + 1} of {len(reports)}" if len(reports) > 1 else ""
                show_report(screen, report, name)
    if as_json:
        typer.echo(json.dumps([_replace_non_finite(report.to_dict()) for report in found], indent=2))
    if not all(report.is_equal for report in found):
        raise typer.Exit(1)


def show_report(screen: Console, report: VerificationReport, name: str = "") -> None:
    """Print a report: the compared runs, a row for each step, the tolerances, and the first deviation."""
    parts = [f"{plural(report.ranks, 'rank')}, stage {report.stage}{name}"]
    many = "es" if report.micro_batches > 1 else ""
    parts += [f"{report.parameters:,} parameters", f"{report.micro_batches} micro-batch{many} a rank and step"]
    screen.print(f"plain PyTorch in one process, beside {', '.join(parts)}")
    screen.print(f"dtypes: {report.dtypes}")
    if report.steps:
        screen.print(_step_table(report))
    for phase, allowed in report.tolerances.items():
        screen.print(f"  allowed, {phase:<9}{allowed}")
    for note in report.notes:
        screen.print(f"  note: {note}")
    if report.is_equal:
        steps = len(report.steps)
        screen.print(f"equal: {plural(steps, 'step')}, every phase within its bound", style="bold green")
        return
    _show_deviation(screen, report.deviations[0])
    others: dict[str, int] = {}
    for one in report.deviations[1:]:
        others[one.phase] = others.get(one.phase, 0) + 1
    if others:
        counted = ", ".join(f"{count} in {phase}" for phase, count in others.items())
        screen.print(f"  more deviations in that step, which may follow from it: {counted}")


def _step_table(report: VerificationReport) -> Table:
    phases = ("forward", "gradient", "reduce", "clip", "update")
    table = Table(
        title="largest difference as a fraction of its tolerance; 0: bitwise equal", title_justify="left", box=None
    )
    alone = any(row.drift is not None for row in report.steps)
    for heading in ("step", "loss sharded", "loss plain", *phases, *(("loss alone", "drift") if alone else ())):
        table.add_column(heading, justify="right")
    bad = {(one.step, one.phase) for one in report.deviations}
    for row in report.steps:
        cells = [f"{row.step}", _format_loss(row.loss), _format_loss(row.plain_loss)]
        for phase in phases:
            skipped = not row.applied and phase in ("reduce", "clip")
            text = "skipped" if skipped else _format_figure(row.worst_ratios.get(phase, 0.0))
            cells.append(f"{text} !" if (row.step, phase) in bad else text)
        if alone:
            cells += [_format_loss(row.independent_loss), "-" if row.drift is None else f"{row.drift:.1e}"]
        table.add_row(*cells)
    return table


def _show_deviation(screen: Console, deviation: Deviation) -> None:
    where = f"step {deviation.step}" if deviation.step else "before the first step"
    if deviation.rank is not None:
        where += f", rank {deviation.rank}"
    if deviation.micro is not None:
        where += f", micro-batch {deviation.micro}"
    screen.print(f"NOT equal: first difference: {where}, phase {deviation.phase}", style="bold red")
    rows = [("tensor", f"{deviation.tensor} ({deviation.role})"), ("module", deviation.module or "-")]
    rows.append(
        ("error", f"{_format_figure(deviation.ulps)} units in the last place, {deviation.relative:.3g} relative")
    )
    rows.append(("element", f"sharded {deviation.actual:.9g}, plain {deviation.expected:.9g}"))
    rows.append(("allowed", deviation.allowed))
    if deviation.hint:
        rows.append(("hint", deviation.hint))
    for what, value in rows:
        screen.print(f"  {what:<9}{value}")


def _parse_rank_counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    counts = [number for word in words if (number := parse_int(word)) is not None]
    if len(counts) < len(words) or not all(1 <= count <= MAX_RANKS_PER_HOST for count in counts):
        raise ConfigError(
            f"--nproc is {one_line(text, 60)!r}; give numbers of ranks from 1 to {MAX_RANKS_PER_HOST:,}, as in "
            "--nproc 2,4"
        )
    return counts


def _check_options(script: list[str] | None, config: str | None, model: str | None, batch: str | None) -> None:
    if script and script[0].startswith("-") and not Path(script[0]).exists():
        raise ConfigError(f"no such option: {script[0]}; options of the script go after its name")
    if bool(script) == (model is not None):
        raise ConfigError("the model is missing or given twice; pass a script or --model, not both")
    if script and not Path(script[0]).is_file():
        raise ConfigError(f"no such script: {script[0]}; check the path")
    if model is not None and config is None:
        raise ConfigError("--model needs --config: the ds_config.json under which it is to be trained")
    if batch is not None and model is None:
        raise ConfigError("--batch needs --model; a script has its own batches")


def _format_loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _format_figure(value: float) -> str:
    if not math.isfinite(value):
        return "inf"
    return f"{value:.3g}"


def _replace_non_finite(value: Any) -> Any:
    """Replace non-finite floats by text, because JSON has no number for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    return [_replace_non_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
