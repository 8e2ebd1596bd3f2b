"""Idle time of pipeline ranks, measured with layers that only wait, compared with the formulas of the papers.

python bench/pipeline_bubble.py --ranks 2,4
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch import Tensor, nn

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.comm.mesh import build_mesh
from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.pipeline import LayerSpec, PipelineSequential, build_schedule, compute_bubble_fraction
from windlass.parallel.pipeline.pipeline_schedules import ScheduleName
from windlass.parallel.pipeline.schedule_executor import ExecutorCallbacks, execute_schedule
from windlass.parallel.pipeline.stage_transfers import StageTransfers
from windlass.parallel.pipeline.transfer_order import add_transfers

_RESULTS = Path(__file__).parent / "results"
_TOLERANCE = 0.05  # allowed deviation, relative to the formula's value


@dataclass(frozen=True)
class ScheduleSetting:
    """Schedule, and its numbers of ranks, of micro-batches and of stages on each rank (`each`)."""

    schedule: ScheduleName
    ranks: int
    micros: int
    each: int = 1

    def __str__(self) -> str:
        return f"{self.schedule}{f' x {self.each}' if self.each > 1 else ''}"


@dataclass
class DelayClock:
    """Timer that sums the seconds of this rank's layers."""

    busy: float = 0.0

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds` in place of a computation, so that ranks can share cores."""
        start = time.perf_counter()
        while (left := start + seconds - time.perf_counter()) > 0:
            time.sleep(max(0.0, left - 0.0005) or 0.0001)
        self.busy += time.perf_counter() - start


_clock = DelayClock()


class _DelayInputs(torch.autograd.Function):
    """Function that takes a fixed time in the forward, and the same time in the backward of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _clock.wait(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _clock.wait(ctx.seconds)
        return gradients[0], None


class _DelayWeights(torch.autograd.Function):
    """Function that takes a fixed time in the backward of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _clock.wait(ctx.seconds)
        return gradients[0], None


class DelayLayer(nn.Module):
    """Layer that takes equally long for its forward, the backward of its input, and that of its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        passed: Tensor = _DelayInputs.apply(x, self.seconds)
        return passed + _DelayWeights.apply(self.weight, self.seconds)


def _make_settings(ranks: list[int], micros: list[int]) -> list[ScheduleSetting]:
    results: list[ScheduleSetting] = []
    for count in ranks:
        for number in micros:
            results += [ScheduleSetting("gpipe", count, number), ScheduleSetting("1f1b", count, number)]
            if number % count == 0:
                results.append(ScheduleSetting("interleaved", count, number, 2))
            if number >= count:
                results.append(ScheduleSetting("zero-bubble", count, number))
    return results


def main(
    ranks: Annotated[str, typer.Option(help="Ranks of the pipeline, comma-separated.")] = "2,4",
    micros: Annotated[str, typer.Option(help="Micro-batches in a step, comma-separated.")] = "4,8",
    milliseconds: Annotated[float, typer.Option(help="Length of a stage's forward, half of a backward.")] = 150.0,
    steps: Annotated[int, typer.Option(min=1, help="Runs of each schedule; the shortest counts.")] = 2,
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "pipeline_bubble",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Measure every schedule, print a table, write the JSON; exit code 1 if one is more than 5 % off its formula."""
    from torch.multiprocessing.spawn import spawn

    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="WARNING")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    expected = _make_settings([int(entry) for entry in ranks.split(",")], [int(entry) for entry in micros.split(",")])
    measured: list[dict[str, Any]] = []
    for count in sorted({setting.ranks for setting in expected}):
        local = [setting for setting in expected if setting.ranks == count]
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="windlass-bench-") as folder:
            spawn(
                _run_rank, (count, local, milliseconds / 1e3, steps, f"file://{folder}/meeting", answers), nprocs=count
            )
            measured += answers.get()
    console, table = bench_console(), Table("schedule", "ranks", "micro-batches", "formula", "measured", "off by")
    for item in measured:
        cells = [f"{100 * item[key]:.1f} %" for key in ("formula", "measured", "off")]
        table.add_row(item["schedule"], str(item["ranks"]), str(item["micros"]), *cells)
    console.print(table)
    path = write_result(results / f"{name}.json", {"bench": "pipeline_bubble", "ms": milliseconds, "found": measured})
    console.print(f"written: {path}", soft_wrap=True)
    if any(abs(entry["off"]) > _TOLERANCE for entry in measured):
        raise typer.Exit(1)


def _run_rank(
    rank: int,
    ranks: int,
    settings: list[ScheduleSetting],
    seconds: float,
    steps: int,
    init_method: str,
    result_queue: Any,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks)
    mesh = build_mesh(MeshShape(pp=ranks))
    results = []
    for setting in settings:
        per_stage = seconds / setting.each  # each rank has the same amount of work under every schedule
        layers = [LayerSpec(DelayLayer, per_stage) for _ in range(ranks * setting.each)]
        model = PipelineSequential(layers, num_stages=ranks, loss_fn=_mean_loss, virtual_stages=setting.each)
        program = add_transfers(build_schedule(setting.schedule, ranks, setting.micros, setting.each))[rank]
        passing = StageTransfers(mesh.pp, torch.device("cpu"))
        batch = (torch.zeros(8), torch.zeros(()))
        shortest: tuple[float, float] | None = None
        for _ in range(1 + steps):  # the first run exchanges shapes
            _clock.busy = 0.0
            dist.barrier()
            start = time.perf_counter()
            execute_schedule(program, model, passing, [batch] * setting.micros, ExecutorCallbacks(call_module=model))
            took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            busy = torch.tensor([_clock.busy], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(busy)
            shortest = min(shortest or (float("inf"), 0.0), (float(took), float(busy)))
        assert shortest is not None
        idle = 1 - shortest[1] / (ranks * shortest[0])
        formula = compute_bubble_fraction(setting.schedule, ranks, setting.micros, setting.each)
        results.append(
            {
                "schedule": str(setting),
                "ranks": ranks,
                "micros": setting.micros,
                "formula": formula,
                "measured": idle,
                "off": idle / formula - 1,
                "seconds": shortest[0],
            }
        )
    if rank == 0:
        result_queue.put(results)
    dist.barrier()
    dist.destroy_process_group()


def _mean_loss(out: Tensor, _: Tensor) -> Tensor:
    return out.sum()


if __name__ == "__main__":
    typer.run(main)
