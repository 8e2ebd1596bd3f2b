"""Commands of `windlass bench`, which measure training, transports, disks, the device and servers of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windlass.base.bounded_input import MAX_RANKS_PER_HOST

bench_app = typer.Typer(
    name="bench",
    help="Measurements of training, transports, disks, the device and servers of this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

NprocOption = Annotated[
    int | None,
    typer.Option("--nproc", "-n", min=1, max=MAX_RANKS_PER_HOST, help="Number of ranks. [one for each GPU, else 2]"),
]
OutOption = Annotated[Path, typer.Option(help="Folder for the JSON file and the picture.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds in which each configuration is timed.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Timed steps in a round.")]
HiddenOption = Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64.")]
LayersOption = Annotated[int, typer.Option(min=1, help="Number of blocks of the model.")]
LengthOption = Annotated[int, typer.Option(min=2, help="Number of tokens in a sequence.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Number of samples on each rank.")]
_DEFAULT_OUT = Path("windlass-bench")


@bench_app.command("zero-memory")
def zero_memory(
    nproc: NprocOption = None,
    engines: Annotated[
        str | None, typer.Option(help="Engines, with commas: windlass-STAGE and baselines. [all]")
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="Width of each linear layer.")] = 2000,
    depth: Annotated[int, typer.Option(min=1, help="Number of linear layers.")] = 20,
    batch: BatchOption = 20,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps, after which parameters are summed.")] = 2,
    out: OutOption = _DEFAULT_OUT,
) -> None:
    """Compare peak memory and parameter sums of torch DDP, ZeroRedundancyOptimizer, FSDP2 and stages 0 to 3."""
    from windlass.cli.benches import zero_memory_bench as experiment
    from windlass.cli.benches.bench_launch import default_nproc

    chosen = [name.strip() for name in engines.split(",")] if engines else list(experiment.ENGINES)
    _exit_on_mismatch(
        experiment.run_zero_memory_bench(chosen, nproc or default_nproc(), width, depth, batch, steps, out)
    )


@bench_app.command("stages")
def stages(
    nproc: NprocOption = None,
    hidden: HiddenOption = 512,
    layers: LayersOption = 6,
    length: LengthOption = 128,
    batch: BatchOption = 2,
    rounds: RoundsOption = 5,
    steps: StepsOption = 3,
    out: OutOption = _DEFAULT_OUT,
) -> None:
    """Measure speed, run time and memory of stages 0 to 3; compare their order with that in DeepSpeed's tutorials."""
    from windlass.cli.benches import training_bench
    from windlass.cli.benches.bench_launch import default_nproc

    sizes = training_bench.BenchSizes(_check_hidden_size(hidden), layers, length, batch, rounds, steps)
    _exit_on_mismatch(training_bench.run_stages_bench(nproc or default_nproc(), sizes, out))


@bench_app.command("precision")
def precision(
    nproc: NprocOption = None,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage of all runs.")] = 2,
    hidden: HiddenOption = 256,
    layers: LayersOption = 4,
    length: LengthOption = 128,
    batch: BatchOption = 2,
    rounds: RoundsOption = 5,
    steps: StepsOption = 3,
    out: OutOption = _DEFAULT_OUT,
) -> None:
    """Measure time, memory and final loss in fp32, bf16 and fp16."""
    from windlass.cli.benches import training_bench
    from windlass.cli.benches.bench_launch import default_nproc

    sizes = training_bench.BenchSizes(_check_hidden_size(hidden), layers, length, batch, rounds, steps)
    _exit_on_mismatch(training_bench.run_precision_bench(nproc or default_nproc(), sizes, stage, out))


@bench_app.command("offload")
def offload(
    nproc: NprocOption = None,
    hidden: HiddenOption = 512,
    layers: LayersOption = 6,
    length: LengthOption = 128,
    batch: BatchOption = 2,
    rounds: RoundsOption = 3,
    steps: StepsOption = 3,
    bf16: Annotated[bool, typer.Option("--bf16", help="Parameters in bf16, master weights in fp32.")] = False,
    device_bytes: Annotated[
        str, typer.Option(help="Memory of the emulated device on a machine without a GPU; 0: emulate none.")
    ] = "64G",
    folder: Annotated[
        Path | None, typer.Option(help="Folder on the disk to use. [the system's temporary folder]")
    ] = None,
    rivals: Annotated[bool, typer.Option(help="Measure DeepSpeed too, if it is installed.")] = True,
    out: OutOption = _DEFAULT_OUT,
) -> None:
    """Measure samples per second, memory and copies, for states and parameters on the device, in host memory and on
    disk. DeepSpeed is measured too."""
    from windlass.cli.benches import offload_bench as experiment
    from windlass.cli.benches import training_bench
    from windlass.cli.benches.bench_launch import default_nproc

    sizes = training_bench.BenchSizes(_check_hidden_size(hidden), layers, length, batch, rounds, steps)
    _exit_on_mismatch(
        experiment.run_offload_bench(nproc or default_nproc(), sizes, bf16, device_bytes, folder, rivals, out)
    )


@bench_app.command("transport")
def transport(
    nproc: NprocOption = None,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 3,
    hidden: HiddenOption = 512,
    layers: LayersOption = 6,
    length: LengthOption = 128,
    batch: BatchOption = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Number of runs of each setting.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a run.")] = 10,
    cpu: Annotated[bool, typer.Option(help="With GPUs: measure CPU ranks too.")] = True,
    collectives: Annotated[
        str | None,
        typer.Option(
            help="Measure single collectives instead: all, or, with commas, some of all_reduce, all_gather, "
            "reduce_scatter, all_to_all, broadcast, pt2pt."
        ),
    ] = None,
    sizes: Annotated[str, typer.Option(help="--collectives: bytes of a rank's message.")] = "1K,64K,1M,16M",
    dtypes: Annotated[str, typer.Option(help="--collectives: fp32, bf16, fp16.")] = "fp32",
    trials: Annotated[int, typer.Option(min=1, help="--collectives: timed calls of each.")] = 20,
    out: OutOption = _DEFAULT_OUT,
) -> None:
    """Measure samples per second and run time over shared memory and gloo; on GPUs, over nccl with InfiniBand, shared
    memory and peer-to-peer each on and off. With --collectives: latency, algorithm and bus bandwidth, and the link of
    a rank in the cluster file of OUT, for `windlass simulate`."""
    if collectives is not None:
        from windlass.cli.benches import collective_bench
        from windlass.cli.benches.bench_launch import default_nproc

        ranks = nproc or default_nproc()
        chosen = collective_bench.parse_settings(collectives, sizes, dtypes, trials, ranks)
        collective_bench.run_collective_bench(chosen, ranks, out)
        return
    import torch

    from windlass.cli.benches import training_bench
    from windlass.cli.benches import transport_bench as experiment
    from windlass.cli.benches.bench_launch import default_nproc

    work = training_bench.BenchSizes(_check_hidden_size(hidden), layers, length, batch, rounds, steps)
    settings = experiment.available_settings(torch.cuda.device_count(), cpu=cpu)
    _exit_on_mismatch(experiment.run_transport_bench(settings, nproc or default_nproc(), work, stage, out))


@bench_app.command("disk")
def disk(
    folder: Annotated[list[Path], typer.Option(help="Folder on the disk; repeat it to stripe over several disks.")],
    size: Annotated[str, typer.Option(help="Bytes to move with each setting.")] = "256M",
    block_sizes: Annotated[str, typer.Option(help="Values of aio.block_size.")] = "256K,1M,8M",
    queue_depths: Annotated[str, typer.Option(help="Values of aio.queue_depth.")] = "4,16,64",
    threads: Annotated[str, typer.Option(help="Values of aio.intra_op_parallelism.")] = "1,4",
    rounds: RoundsOption = 2,
    out: OutOption = _DEFAULT_OUT,
) -> None:
    """Measure the disk tier with each setting of the section aio, and write the fastest section. Set the rates of the
    disks in the cluster file of OUT, for `windlass simulate`."""
    from windlass.cli.benches import disk_bench
    from windlass.compat.ds_io import parse_size

    settings = disk_bench.parse_settings(block_sizes, queue_depths, threads)
    disk_bench.run_disk_bench(folder, settings, parse_size(size, "--size"), rounds, out)


@bench_app.command("device")
def device(
    dtypes: Annotated[
        str, typer.Option(help="Dtypes of products, with commas; attention is measured in the first.")
    ] = "fp32,bf16",
    size: Annotated[int, typer.Option(min=16, max=1 << 15, help="Rows and columns of a product's factors.")] = 2048,
    out: OutOption = _DEFAULT_OUT,
) -> None:
    """Measure matrix products, attention, memory and the smallest operation of this device, and set `[device]` in the
    cluster file of OUT, for `windlass simulate`. A CPU is measured with this process's threads (OMP_NUM_THREADS).
    """
    from windlass.cli.benches import device_bench

    device_bench.run_device_bench(device_bench.parse_dtypes(dtypes), size, out)


@bench_app.command("serve")
def serve(
    workload: Annotated[
        str, typer.Option(help="fastgen: service levels under three policies; load: a server under 64 clients.")
    ] = "fastgen",
    model: Annotated[Path | None, typer.Option(help="Directory of a model. [a random Llama]")] = None,
    hidden: HiddenOption = 512,
    layers: LayersOption = 8,
    clients: Annotated[str, typer.Option(help="fastgen: numbers of clients, with commas.")] = "1,2,4,6,8,16,32",
    requests: Annotated[int | None, typer.Option(min=8, help="Requests of a run. [fastgen: 128; load: 1000]")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="fastgen: mean tokens of a prompt.")] = 260,
    answer: Annotated[int, typer.Option(min=1, help="fastgen: mean tokens of an answer.")] = 60,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="fastgen: tokens of a step.")] = 77,
    seeds: Annotated[int, typer.Option(min=1, help="fastgen: runs with each number of clients.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="fastgen: call the engine's steps, in one thread.")] = False,
    unscaled: Annotated[
        bool, typer.Option("--unscaled", help="fastgen: lengths and times of FastGen's own benchmark, for a GPU.")
    ] = False,
    max_gap_ms: Annotated[float, typer.Option(min=0.1, help="load: value of the server's option --max-gap-ms.")] = 20.0,
    out: OutOption = _DEFAULT_OUT,
) -> None:
    """Measure a server: FastGen's effective throughput under three scheduling policies, or a load of bad, cancelled and
    long requests over HTTP."""
    if workload not in ("fastgen", "load"):
        raise typer.BadParameter(f"{workload!r} is not a workload; write fastgen or load", param_hint="--workload")
    if model is None:
        _check_hidden_size(hidden)
    if workload == "load":
        from windlass.cli.benches.load_bench import LoadSettings, run_load_bench

        settings = LoadSettings(model, hidden, layers, requests or 1000, max_gap_ms=max_gap_ms)
        _exit_on_mismatch(run_load_bench(settings, out))
        return
    from windlass.cli.benches.fastgen_bench import FastgenSettings, run_fastgen_bench

    lengths = (2600, 60, 768) if unscaled else (prompt, answer, tokens_per_step)
    _exit_on_mismatch(
        run_fastgen_bench(
            FastgenSettings(
                model,
                hidden,
                layers,
                _parse_clients(clients),
                requests or (512 if unscaled else 128),
                *lengths,
                seeds=seeds,
                in_thread=not raw,
                scaled=not unscaled,
            ),
            out,
        )
    )


def _parse_clients(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(
            f"{text!r} is not a list of positive numbers; write e.g. 1,4,16", param_hint="--clients"
        )
    return tuple(sorted({int(part) for part in parts}))


def _check_hidden_size(hidden: int) -> int:
    if hidden % 64:
        raise typer.BadParameter(f"{hidden} is not a multiple of 64, the size of a head; try {hidden // 64 * 64}")
    return hidden


def _exit_on_mismatch(is_valid: bool) -> None:
    """Exit with code 1 if losses or tokens differ, or a request was lost: the figures then mean nothing."""
    if not is_valid:
        raise typer.Exit(1)
