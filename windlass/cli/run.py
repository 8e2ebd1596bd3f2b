"""`windlass run`: starts any script on N ranks of this machine."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from windlass.launch.elastic import start_elastic


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="A script and its own options.")],
    nproc: Annotated[int | None, typer.Option("--nproc", "-n", help="Ranks. [one for each GPU, else 1]")] = None,
    master_port: Annotated[int | None, typer.Option(help="Where ranks meet. [a free port]")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module, as in python -m.")] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to start again after a failure, without the ranks that were lost.")
    ] = 0,
    min_nproc: Annotated[int, typer.Option(min=1, help="With fewer ranks left it is not started again.")] = 1,
    grace: Annotated[float, typer.Option(help="Seconds to end in after Ctrl-C, before ranks are killed.", min=0)] = 30,
) -> None:
    """Start SCRIPT on N ranks of this machine, through torch's elastic launcher.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment. Ranks end with this
    command, however it ends; Ctrl-C reaches each of them once. The worst exit code of the ranks comes back. With
    --max-restarts a run that lost ranks (a signal ended them) comes back on those that remain.
    """
    ranks = _one_for_each_gpu() if nproc is None else nproc
    outcome = start_elastic(
        command,
        ranks,
        max_restarts=max_restarts,
        min_nproc=min_nproc,
        module=module,
        master_port=master_port,
        grace_s=grace,
    )
    for failure in outcome.failures:
        typer.echo(f"windlass run: {failure}", err=True)
    if outcome.interrupted_by is not None:
        name = signal.Signals(outcome.interrupted_by).name
        typer.echo(f"windlass run: stopped by {name}, no rank is left", err=True)
    raise typer.Exit(outcome.code)


def _one_for_each_gpu() -> int:
    import torch

    return max(1, torch.cuda.device_count())
