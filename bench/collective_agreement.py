"""Cost of the agreement on the order of collectives, if ranks run the same modules, and if not.

python bench/collective_agreement.py --ranks 2
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
_TARGET_RATIO = 1.01
CASES = {
    "agreeing, nobody asks": "all ranks run the same modules, and the ranks exchange nothing to verify it (a "
    "baseline, not a supported mode)",
    "agreeing": "all ranks run the same modules",
    "apart": "each rank runs its own experts, the same in every step: more parameters are reduced and stepped, too",
    "apart, changing": "each rank chooses other experts in every step",
    "uneven": "as `agreeing`, and rank 0 has one more micro-batch than the others",
}
Times = dict[str, dict[str, list[float]]]


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Processes, one thread each.")] = 2,
    transports: Annotated[str, typer.Option(help="Comma-separated.")] = "shm,gloo",
    stages: Annotated[str, typer.Option(help="Comma-separated.")] = "2,3",
    width: Annotated[int, typer.Option(min=16, help="Width of the model; an expert has 8 x width^2 parameters.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Layers, each with one expert per rank, and a block.")] = 4,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each case.")] = 7,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 4,
    agreeing_only: Annotated[
        bool,
        typer.Option("--agreeing-only", help="Rounds of the two agreeing cases: many short ones against noise."),
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "agreement",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Time the cases alternately, print a table for each stage and transport, write the JSON."""
    from torch.multiprocessing.spawn import spawn

    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="WARNING")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.pop("WINDLASS_TRANSPORT", None)
    context = multiprocessing.get_context("spawn")
    console, result = bench_console(), {}
    cases = [case for case in CASES if case.startswith("agreeing") or not agreeing_only]
    for transport in transports.split(","):
        for stage in (int(stage) for stage in stages.split(",")):
            answers = context.SimpleQueue()
            with tempfile.TemporaryDirectory(prefix="windlass-bench-") as folder:
                shape = (stage, transport, width, layers, rows, rounds, steps, cases)
                spawn(_run_rank, (ranks, shape, f"file://{folder}/meeting", answers), nprocs=ranks)
                result[f"{transport}, stage {stage}"] = measured = answers.get()
            console.print(_result_table(measured, f"{transport}, stage {stage}, {ranks} ranks"))
    path = write_result(results / f"{name}.json", {"bench": "agreement", "ranks": ranks, "measured": result})
    console.print(f"written: {path}", soft_wrap=True)


def _run_rank(rank: int, ranks: int, shape: tuple[Any, ...], init_method: str, result_queue: Any) -> None:
    import torch
    import torch.distributed as dist

    stage, transport, width, layers, rows, rounds, steps, cases = shape
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks)
    engine = _build_engine(stage, transport, width, layers, ranks)
    order = engine._sharded.scheduler
    board, results = order._board, [0]
    post = board.post

    def counted(mine: list[int], what: str) -> Any:
        results[0] += 1
        return post(mine, what)

    board.post = counted
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))
    times: dict[str, list[float]] = {case: [] for case in cases}
    talks: dict[str, list[float]] = {case: [] for case in cases}
    number = 0
    for turn in range(rounds + 1):
        for case in cases if turn % 2 else reversed(cases):
            order.skips_agreement = False
            taken = []
            for step in range(-2, steps):  # negative: two untimed steps, which record the order
                number += 1
                order.skips_agreement = case == "agreeing, nobody asks" and step >= 0
                dist.barrier()
                results[0], start = 0, time.perf_counter()
                _train_step(engine, x, case, number, rank, ranks, layers)
                dist.barrier()
                if step >= 0:
                    taken.append((time.perf_counter() - start) * 1e3)
            if turn:
                times[case].append(statistics.median(taken))
                talks[case].append(results[0])
    if rank == 0:
        result_queue.put({"milliseconds": times, "exchanges": talks})
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def _build_engine(stage: int, transport: str, width: int, layers: int, experts: int) -> Any:
    import torch
    from torch import Tensor, nn

    import windlass

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    class Layered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common = nn.ModuleList(mlp() for _ in range(layers))
            self.experts = nn.ModuleList(nn.ModuleList(mlp() for _ in range(experts)) for _ in range(layers))

        def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
            for common, choice, index in zip(self.common, self.experts, chosen, strict=True):
                x = x + common(x)
                x = x + choice[index](x)
            return x.square().mean()

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "blocks": ["Sequential"],
        },
        "comm": {"transport": transport},
    }
    return windlass.initialize(model=Layered(), config=config)[0]


def _train_step(engine: Any, x: Any, case: str, step_number: int, rank: int, ranks: int, layers: int) -> None:
    import torch

    chosen = [0] * layers
    if case == "apart":
        chosen = [rank] * layers
    elif case == "apart, changing":
        generator = torch.Generator().manual_seed(step_number * ranks + rank)
        chosen = torch.randint(0, ranks, (layers,), generator=generator).tolist()
    for _ in range(2 if case == "uneven" and rank == 0 else 1):
        engine.backward(engine(x, chosen))
    engine.step()


def _result_table(measured: Times, title: str) -> Table:
    ratio, error = "x agreeing, nobody asks", "standard error of the mean"
    table = Table("case", "ms a step", ratio, "mean of that", error, "spread", "exchanges", title=title)
    base = measured["milliseconds"]["agreeing, nobody asks"]
    for case, times in measured["milliseconds"].items():
        ratios = [item / other for item, other in zip(times, base, strict=True)]
        text = f"{statistics.median(ratios):.3f}"
        if case == "agreeing":
            text += f" (promised: at most {_TARGET_RATIO})"
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        often = f"{statistics.median(measured['exchanges'][case]):.0f}"
        mean = f"{statistics.mean(ratios):.3f}"
        error = f"{statistics.stdev(ratios) / len(ratios) ** 0.5:.3f}" if len(ratios) > 1 else "-"
        table.add_row(case, f"{statistics.median(times):.1f}", text, mean, error, spread, often)
        table.caption = f"{table.caption or ''}{case}: {CASES[case]}\n"
    return table


if __name__ == "__main__":
    typer.run(main)
