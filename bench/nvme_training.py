"""Training of a model whose states are several times larger than the memory of its ranks, with a check of the
memory limit.

python bench/nvme_training.py --path /mnt/nvme
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from windlass.base.byte_counts import parse_bytes
from windlass.base.log import logger
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.launch.start_ranks import launch, threads_per_rank

_RESULTS = Path(__file__).parent / "results"
_RANK_SCRIPT = Path(__file__).parent / "rig" / "infinity_rank.py"
_STATE_BYTES_PER_PARAMETER = 16  # bytes per parameter: bf16 weight and gradient, float32 master weight and two moments
_MIN_STATES_OVER_MEMORY = 3.0
# Large blocks return to the system when they are freed: fresh pages cost time, but memory is scarce here.
_MALLOC_ENVIRONMENT = {
    "WINDLASS_KEEP_FREED_MEMORY": "0",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 20),
}


def main(
    hidden: Annotated[int, typer.Option(min=64, help="Width of the Llama, a multiple of 64.")] = 1280,
    layers: Annotated[int, typer.Option(min=1, help="Number of blocks; 12.25 x hidden^2 parameters each.")] = 25,
    cap: Annotated[str, typer.Option(help="Memory limit of a rank.")] = "1.2G",
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps.")] = 12,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank.")] = 2,
    length: Annotated[int, typer.Option(min=8, help="Bytes of text of a sequence.")] = 256,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 2e-4,
    path: Annotated[Path, typer.Option(help="A folder on the disk to use.")] = Path("."),
    name: Annotated[str, typer.Option(help="Name of the files in --results.")] = "infinity",
    results: Annotated[Path, typer.Option(help="Folder of the JSON and the picture.")] = _RESULTS,
) -> None:
    """Train, print and plot the memory; exit code 1 if a rank exceeded its limit, or the loss did not fall."""
    console = bench_console()
    most = parse_bytes(cap, "--cap")
    parameters = layers * (4 * hidden**2 + 3 * hidden * (hidden * 11 // 4)) + 2 * 256 * hidden
    if parameters * _STATE_BYTES_PER_PARAMETER < _MIN_STATES_OVER_MEMORY * most * ranks:
        raise typer.BadParameter(
            f"{parameters:,} parameters have {parameters * _STATE_BYTES_PER_PARAMETER / 1e9:.2f} GB of states, less "
            f"than {_MIN_STATES_OVER_MEMORY:g} x "
            f"{ranks} ranks x {most / 1e9:.2f} GB: lower --cap or raise --layers"
        )
    console.print(
        f"{parameters / 1e6:.0f}M parameters, {parameters * _STATE_BYTES_PER_PARAMETER / 1e9:.2f} GB of states; "
        f"{ranks} ranks may take "
        f"{most / 1e9:.2f} GB each"
    )
    with tempfile.TemporaryDirectory(prefix="windlass-infinity-", dir=path) as folder:
        work = {
            "hidden": hidden,
            "layers": layers,
            "cap": most,
            "steps": steps,
            "batch": batch,
            "length": length,
            "lr": lr,
        }
        Path(folder, "work.json").write_text(json.dumps({**work, "path": folder}))
        env = {"WINDLASS_LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": str(threads_per_rank(ranks)), **_MALLOC_ENVIRONMENT}
        code = launch([str(_RANK_SCRIPT), folder], ranks, env=env)
        if code:
            raise typer.Exit(code)
        result = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
    peaks = [max(size for _, size in rank["samples"]) for rank in result]
    losses = result[0]["losses"]
    fell = statistics.mean(losses[-3:]) < statistics.mean(losses[:3])
    states = result[0]["parameters"] * _STATE_BYTES_PER_PARAMETER
    verdict = {
        "states": states,
        "cap_of_a_rank": most,
        "peak_of_a_rank": max(peaks),
        "states_over_memory": states / sum(peaks),
        "kept_to_it": max(peaks) < most,
        "loss_fell": fell,
        "bytes_a_parameter_and_step": statistics.median(sum(moved) for moved in _disk_bytes_per_step(result))
        / result[0]["parameters"],
    }
    console.print(_result_table(result, peaks, verdict))
    written = write_result(results / f"{name}.json", {"bench": "infinity", **work, "verdict": verdict, "ranks": result})
    console.print(f"written: {written}", soft_wrap=True)
    _plot(result, verdict, results / f"{name}.png")
    if not (verdict["kept_to_it"] and fell):
        raise typer.Exit(1)


def _disk_bytes_per_step(rank_results: list[dict[str, Any]]) -> list[list[int]]:
    """Return the bytes that all ranks read and wrote in each step but the first, which creates the states."""
    return [
        [sum(rank["disk"][step][way] for rank in rank_results) for way in (0, 1)]
        for step in range(1, len(rank_results[0]["disk"]))
    ]


def _result_table(rank_results: list[dict[str, Any]], peaks: list[int], verdict: dict[str, Any]) -> Table:
    table = Table(title=f"windlass, stage 3, all slots on disk; {rank_results[0]['path']}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    seconds = statistics.median(rank_results[0]["seconds"][1:])
    read, write = (statistics.median(step[way] for step in _disk_bytes_per_step(rank_results)) for way in (0, 1))
    for what, value in (
        ("states (16 bytes a parameter)", f"{verdict['states'] / 1e9:.2f} GB"),
        ("cap of a rank", f"{verdict['cap_of_a_rank'] / 1e9:.2f} GB"),
        ("peak of each rank (PSS)", ", ".join(f"{peak / 1e9:.2f}" for peak in peaks) + " GB"),
        ("states / peaks of all ranks", f"{verdict['states_over_memory']:.2f}"),
        ("loss", f"{rank_results[0]['losses'][0]:.3f} -> {rank_results[0]['losses'][-1]:.3f}"),
        ("a step (median)", f"{seconds:.1f} s"),
        ("read and written in it", f"{read / 1e9:.2f} GB and {write / 1e9:.2f} GB"),
        ("bytes a parameter and step", f"{verdict['bytes_a_parameter_and_step']:.1f} (design: 38)"),
    ):
        table.add_row(what, value)
    return table


def _plot(rank_results: list[dict[str, Any]], verdict: dict[str, Any], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no picture: matplotlib is not installed (pip install 'windlass[plot]')")
        return
    figure = Figure(figsize=(11, 5.5), dpi=140, layout="constrained")
    memory, loss = figure.subplots(1, 2, width_ratios=[3, 1])
    for number, rank in enumerate(rank_results):
        times, sizes = zip(*rank["samples"], strict=True)
        memory.plot(times, [size / 1e9 for size in sizes], label=f"rank {number}", linewidth=0.9)
    states = verdict["states"] / len(rank_results) / 1e9
    memory.axhline(states, color="#888888", linestyle=":", label=f"its part of the states ({states:.1f} GB)")
    memory.axhline(verdict["cap_of_a_rank"] / 1e9, color="#b00020", linestyle="--", label="its limit")
    for at, what in rank_results[0]["marks"]:
        if not what.startswith("step ") or what == "step 1":
            memory.annotate(what, (at, 0.02), rotation=90, fontsize=7, color="#555555", va="bottom")
        memory.axvline(at, color="#dddddd", linewidth=0.6, zorder=0)
    memory.set(xlabel="seconds", ylabel="GB (proportional set size)", ylim=(0, states * 1.08))
    memory.legend(loc="center right", fontsize=8)
    loss.plot(range(1, len(rank_results[0]["losses"]) + 1), rank_results[0]["losses"], marker="o", markersize=3)
    loss.set(xlabel="step", ylabel="loss (nats a byte)")
    figure.suptitle(
        f"{rank_results[0]['parameters'] / 1e6:.0f}M parameters trained on {len(rank_results)} ranks from disk"
    )
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(str(path))


if __name__ == "__main__":
    typer.run(main)
