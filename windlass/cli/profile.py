"""Command `windlass profile`: records steps of a script as a trace of all ranks, and prints where the time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from windlass.base.bounded_input import MAX_RANKS_PER_HOST
from windlass.base.errors import ConfigError
from windlass.base.text import print_escaped
from windlass.cli.script_help import SCRIPT_HELP
from windlass.compat.stand_in_path import stand_in_environment
from windlass.launch.script_session import rank_import_path


def profile(
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGUMENT]...",
            help=SCRIPT_HELP,
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="ds_config.json; overrides the configuration that the script passes.")
    ] = None,
    nproc: Annotated[int, typer.Option(help="Number of ranks on this machine.", min=1, max=MAX_RANKS_PER_HOST)] = 1,
    steps: Annotated[int, typer.Option(help="Optimizer steps to record; the script is ended after them.", min=1)] = 3,
    skip: Annotated[int, typer.Option(help="Optimizer steps before the recorded ones.", min=0)] = 2,
    out: Annotated[Path, typer.Option(help="File of the trace; compressed if it ends in .gz.")] = Path("trace.json"),
    operators: Annotated[
        bool,
        typer.Option(
            "--operators/--no-operators", help="Also record torch's operators and allocations (larger trace)."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, and nothing else.")] = False,
) -> None:
    """Record steps of a training script on N ranks. Write one trace of all ranks for ui.perfetto.dev, and print the
    time of each rank: compute, idle, waits by resource; the rank that others wait for; memory at its peak by kind."""
    if not script:
        raise ConfigError("nothing to profile: pass a training script, as in windlass profile train.py --steps 3")
    if script[0].startswith("-") and not Path(script[0]).exists():
        raise ConfigError(f"no such option: {script[0]}; options of the script go after its name")
    if not Path(script[0]).is_file():
        raise ConfigError(f"no such script: {script[0]}; check the path")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write a trace to {out}: give a file in a folder that exists, as trace.json")
    from windlass.config.config_source import source_for_ranks
    from windlass.tracing.profile_job import ProfileJob, run_profile

    source = None if config is None else source_for_ranks(config)
    job = ProfileJob("", list(script), str(out), steps, skip, source, operators)
    found = run_profile(job, nproc, stand_in_environment({"PYTHONPATH": rank_import_path()}))
    if as_json:
        typer.echo(json.dumps({**found["data"], "trace": str(out)}, indent=2))
        return
    print_escaped(found["text"])
    print_escaped(f"trace: {out}; open it in ui.perfetto.dev or chrome://tracing")
