"""Command `windlass report`: writes an HTML page of one run, or of two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windlass.base.atomic_file import write_output
from windlass.base.errors import ConfigError
from windlass.base.text import escape_unprintable, print_escaped


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="OUT of `windlass train`, or the folder or file of jsonl_monitor.")
    ],
    against: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Another run, to show both side by side.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("report.html"),
) -> None:
    """Write one HTML page of RUN: facts of the run and its machine, curves, phases of a step, checkpoints, warnings and
    the configuration. The page is one file and opens without a network."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write a page to {out}: give a file in a folder that exists, as report.html")
    from windlass.cli.run_report.report_page import report_page
    from windlass.cli.run_report.run_data import read_run

    runs = [read_run(path) for path in (run, against) if path is not None]
    write_output(out, escape_unprintable(report_page(runs)))
    print_escaped(f"report: {out}")
