"""`windlass bench`: the experiments that tutorials print, on the ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windlass.base.limits import MOST_RANKS_OF_A_HOST

bench_app = typer.Typer(
    name="bench",
    help="The experiments that tutorials print: a table, a verdict, JSON and a picture.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Ranks = Annotated[
    int | None,
    typer.Option("--nproc", "-n", min=1, max=MOST_RANKS_OF_A_HOST, help="Ranks. [one for each GPU, else 2 on the CPU]"),
]
Out = Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns that each configuration takes.")]
Steps = Annotated[int, typer.Option(min=1, help="Timed steps of a turn.")]
Hidden = Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64.")]
Layers = Annotated[int, typer.Option(min=1, help="Blocks of the model.")]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")]
Batch = Annotated[int, typer.Option(min=1, help="Samples on a rank.")]
_OUT = Path("windlass-bench")


@bench_app.command("zero-memory")
def zero_memory(
    nproc: Ranks = None,
    engines: Annotated[str | None, typer.Option(help="Comma-separated; windlass-0 to -3 and rivals. [all]")] = None,
    width: Annotated[int, typer.Option(min=1, help="Of each linear layer.")] = 2000,
    depth: Annotated[int, typer.Option(min=1, help="Number of linear layers.")] = 20,
    batch: Batch = 20,
    steps: Annotated[int, typer.Option(min=1, help="After which parameters are added up.")] = 2,
    out: Out = _OUT,
) -> None:
    """Peak memory at four points, and parameter sums: torch DDP, ZeroRedundancyOptimizer, FSDP2, stages 0 to 3."""
    from windlass.cli.benches import zero_memory as experiment
    from windlass.cli.benches.ranks import default_ranks

    chosen = [name.strip() for name in engines.split(",")] if engines else list(experiment.ENGINES)
    _end(experiment.run(chosen, nproc or default_ranks(), width, depth, batch, steps, out))


@bench_app.command("stages")
def stages(
    nproc: Ranks = None,
    hidden: Hidden = 512,
    layers: Layers = 6,
    length: Length = 128,
    batch: Batch = 2,
    rounds: Rounds = 5,
    steps: Steps = 3,
    out: Out = _OUT,
) -> None:
    """Samples per second, run time and memory of stages 0 to 3, and whether they stand in the order of tutorials."""
    from windlass.cli.benches import training
    from windlass.cli.benches.ranks import default_ranks

    sizes = training.Sizes(_heads(hidden), layers, length, batch, rounds, steps)
    _end(training.stages(nproc or default_ranks(), sizes, out))


@bench_app.command("precision")
def precision(
    nproc: Ranks = None,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage of all three.")] = 2,
    hidden: Hidden = 256,
    layers: Layers = 4,
    length: Length = 128,
    batch: Batch = 2,
    rounds: Rounds = 5,
    steps: Steps = 3,
    out: Out = _OUT,
) -> None:
    """Time, memory and final loss in fp32, bf16 and fp16."""
    from windlass.cli.benches import training
    from windlass.cli.benches.ranks import default_ranks

    sizes = training.Sizes(_heads(hidden), layers, length, batch, rounds, steps)
    _end(training.precision(nproc or default_ranks(), sizes, stage, out))


@bench_app.command("offload")
def offload(
    nproc: Ranks = None,
    hidden: Hidden = 512,
    layers: Layers = 6,
    length: Length = 128,
    batch: Batch = 2,
    rounds: Rounds = 3,
    steps: Steps = 3,
    bf16: Annotated[bool, typer.Option("--bf16", help="Parameters in bf16, master weights in fp32.")] = False,
    device_bytes: Annotated[
        str, typer.Option(help="Memory of the emulated device, on a machine without one; 0: none.")
    ] = "64G",
    folder: Annotated[Path | None, typer.Option(help="On the disk to use. [the system's temporary folder]")] = None,
    rivals: Annotated[bool, typer.Option(help="DeepSpeed's rows too, where it is installed.")] = True,
    out: Out = _OUT,
) -> None:
    """Samples per second, memory and copies with states and parameters on the device, in host memory and on disk,
    beside DeepSpeed."""
    from windlass.cli.benches import offload as experiment
    from windlass.cli.benches import training
    from windlass.cli.benches.ranks import default_ranks

    sizes = training.Sizes(_heads(hidden), layers, length, batch, rounds, steps)
    _end(experiment.offload(nproc or default_ranks(), sizes, bf16, device_bytes, folder, rivals, out))


@bench_app.command("transport")
def transport(
    nproc: Ranks = None,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    hidden: Hidden = 512,
    layers: Layers = 6,
    length: Length = 128,
    batch: Batch = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each setting, in turns.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a run.")] = 10,
    cpu: Annotated[bool, typer.Option(help="With GPUs: the ways of CPU ranks too.")] = True,
    out: Out = _OUT,
) -> None:
    """Samples per second and run time over shared memory and gloo; on GPUs, over nccl with InfiniBand, shared memory
    and peer-to-peer each on and off."""
    import torch

    from windlass.cli.benches import training
    from windlass.cli.benches import transport as experiment
    from windlass.cli.benches.ranks import default_ranks

    sizes = training.Sizes(_heads(hidden), layers, length, batch, rounds, steps)
    settings = experiment.settings_here(torch.cuda.device_count(), cpu=cpu)
    _end(experiment.transport(settings, nproc or default_ranks(), sizes, stage, out))


def _heads(hidden: int) -> int:
    if hidden % 64:
        raise typer.BadParameter(f"{hidden} is not a multiple of 64, the size of a head; try {hidden // 64 * 64}")
    return hidden


def _end(right: bool) -> None:
    """Engines that train different models make the figures meaningless: that is a failure."""
    if not right:
        raise typer.Exit(1)
