"""`windlass run`: starts any script on N ranks of this machine."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from windlass.launch.run import start


def run(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="A script and its own options.")],
    nproc: Annotated[int | None, typer.Option("--nproc", "-n", help="Ranks. [one for each GPU, else 1]")] = None,
    master_port: Annotated[int | None, typer.Option(help="Where ranks meet. [a free port]")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT names a module, as in python -m.")] = False,
    grace: Annotated[float, typer.Option(help="Seconds to end in after Ctrl-C, before ranks are killed.", min=0)] = 30,
) -> None:
    """Start SCRIPT on N ranks of this machine, through torch's elastic launcher.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment. Ranks end with this
    command, however it ends; Ctrl-C reaches each of them once. The worst exit code of the ranks comes back.
    """
    ranks = _one_for_each_gpu() if nproc is None else nproc
    outcome = start(command, ranks, module=module, master_port=master_port, grace_s=grace)
    for failure in outcome.failures:
        typer.echo(f"windlass run: {failure}", err=True)
    if outcome.interrupted_by is not None:
        name = signal.Signals(outcome.interrupted_by).name
        typer.echo(f"windlass run: stopped by {name}, no rank is left", err=True)
    raise typer.Exit(outcome.code)


def _one_for_each_gpu() -> int:
    import torch

    return max(1, torch.cuda.device_count())
