"""Cost of the watchdog: CPU seconds of its thread relative to training, and of its wait records relative to a step.

    python bench/watchdog_overhead.py

The cost is computed as a sum, because it is smaller than the noise between two runs of a step: the CPU seconds of the
thread while ranks train (each such second may delay the main thread), and the cost of a wait record times the number of
records in a step. With --in-turns it also times steps with and without the watchdog, which is meaningful on a quiet
machine only.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import threading
import time
import timeit
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
PROMISED_PER_CENT = 0.5


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Processes, one thread each.")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Layers of a transformer of width 256.")] = 8,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of three seconds.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round.")] = 20,
    in_turns: Annotated[bool, typer.Option("--in-turns", help="Also time steps without the watchdog.")] = False,
    transport: Annotated[str, typer.Option(help="shm or gloo.")] = "gloo",
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "watchdog",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Train at stage 3, print the cost in per cent of a step, write the JSON; exit code 1 if it is above 0.5."""
    from torch.multiprocessing.spawn import spawn

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"OMP_NUM_THREADS": "1", "WINDLASS_LOG_LEVEL": "WARNING", "WINDLASS_TRANSPORT": transport}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(_run_rank, (layers, rounds, steps, in_turns, answers), nprocs=ranks)
    result = answers.get()
    result["per_cent"] = 100 * (
        result["thread_s_per_s"] + result["marks_per_step"] * result["mark_s"] / result["step_s"]
    )
    requested = {"ranks": ranks, "layers": layers, "rounds": rounds, "steps": steps, "transport": transport}
    path = write_result(results / f"{name}.json", {"bench": "watchdog", **requested, **result})
    console = bench_console()
    console.print(
        f"a step takes {1000 * result['step_s']:.1f} ms; the thread uses {1e6 * result['thread_s_per_s']:.0f} us of "
        f"CPU per second; {result['marks_per_step']:.0f} wait records per step of {1e9 * result['mark_s']:.0f} ns; "
        f"together {result['per_cent']:.3f} per cent of a step"
    )
    if in_turns:
        console.print(f"alternately, with / without: {result['with_over_without']:.4f} (median of {rounds} rounds)")
    console.print(f"written: {path}", soft_wrap=True)
    raise typer.Exit(int(result["per_cent"] > PROMISED_PER_CENT))


def _run_rank(rank: int, layers: int, rounds: int, steps: int, in_turns: bool, result_queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    import torch
    import torch.distributed as dist

    import windlass
    from windlass import watchdog
    from windlass.base import collective_activity

    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, layers)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = windlass.initialize(model=model, config=config)
    batch = torch.randn(4, 64, 256)
    marks = [0]
    enter = collective_activity.WaitScope.__enter__

    def counted(self: collective_activity.WaitScope) -> None:
        marks[0] += 1
        enter(self)

    def turn() -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            engine.backward(engine(batch).square().mean())
            engine.step()
        return (time.perf_counter() - begin) / steps

    turn()
    collective_activity.WaitScope.__enter__ = counted  # type: ignore[method-assign]
    turn()
    collective_activity.WaitScope.__enter__ = enter  # type: ignore[method-assign]
    ratios, own, wall, seconds = [], 0.0, 0.0, []
    slowest = torch.tensor(turn())
    dist.all_reduce(slowest)
    turns = 1 + int(3.0 / (slowest.item() / dist.get_world_size() * steps))  # three seconds, for three heartbeats
    for _ in range(rounds):
        without = 0.0
        if in_turns:
            watchdog.start(None)
            without = turn()
            watchdog.start(watchdog.WatchdogLimits())
        clock = time.pthread_getcpuclockid(_watchdog_thread().ident or 0)
        before, begin = time.clock_gettime(clock), time.perf_counter()
        with_it = statistics.median([turn() for _ in range(turns)])
        own += time.clock_gettime(clock) - before
        wall += time.perf_counter() - begin
        seconds.append(with_it)
        if without:
            ratios.append(with_it / without)
    number = 100_000
    names = {"During": collective_activity.WaitScope, "names": []}
    mark = timeit.timeit("with During('gather', names): pass", number=number, globals=names)
    dist.barrier()
    if rank == 0:
        result_queue.put(
            {
                "step_s": statistics.median(seconds),
                "thread_s_per_s": own / wall,
                "marks_per_step": marks[0] / steps,
                "mark_s": mark / number,
                **({"with_over_without": statistics.median(ratios)} if ratios else {}),
            }
        )
    engine.destroy()


def _watchdog_thread() -> threading.Thread:
    return next(item for item in threading.enumerate() if item.name == "windlass-watchdog")


if __name__ == "__main__":
    typer.run(main)
