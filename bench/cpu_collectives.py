"""Reductions and gathers between CPU ranks of one host: windlass's transports, gloo's own, and the limit of memory
bandwidth.

python bench/cpu_collectives.py --ranks 2
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
_TIMEOUT = timedelta(minutes=5)
Works = dict[str, Callable[[], object]]


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Processes, one thread each.")] = 2,
    megabytes: Annotated[str, typer.Option(help="Sizes of the whole buffer, comma-separated.")] = "8,100",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each operation.")] = 11,
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "collectives",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Time the operations alternately, print a table, write the JSON."""
    from torch.multiprocessing.spawn import spawn

    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="WARNING")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.pop("WINDLASS_TRANSPORT", None)
    sizes = [int(size) for size in megabytes.split(",")]
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as folder:
        arguments = (ranks, sizes, rounds, f"file://{folder}/meeting", answers)
        spawn(_run_rank, arguments, nprocs=ranks)
        measured = answers.get()
    console = bench_console()
    for size in sizes:
        console.print(_result_table(measured[str(size)], size, ranks))
    path = write_result(results / f"{name}.json", {"bench": "collectives", "ranks": ranks, "milliseconds": measured})
    console.print(f"written: {path}", soft_wrap=True)


def _run_rank(rank: int, ranks: int, sizes: list[int], rounds: int, init_method: str, result_queue: Any) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 deprecates these names; 2.10 has only them
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=ranks)
    results = {}
    for size in sizes:
        elements = size * 250_000 // ranks * ranks
        works = {
            **_gloo_works(elements, ranks),
            **_windlass_works("shm", elements, rank, ranks),
            **_windlass_works("gloo", elements, rank, ranks),
        }
        results[str(size)] = _time_interleaved({**works, **_memory_works(elements)}, rounds)
    if rank == 0:
        result_queue.put(results)
    dist.barrier()
    dist.destroy_process_group()


def _time_interleaved(works: Works, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each operation in each round, from all ranks being ready to the last rank's end."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items() if number % 2 else reversed(works.items()):
            dist.barrier()
            start = time.perf_counter()
            work()
            dist.barrier()
            if number:  # round 0 is not counted, because it touches fresh pages
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def _gloo_works(elements: int, ranks: int) -> Works:
    import torch
    import torch.distributed as dist

    full, part = torch.ones(elements), torch.empty(elements // ranks)
    return {
        "torch gloo all_reduce": lambda: dist.all_reduce(full),
        "torch gloo reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "torch gloo all_gather": lambda: dist.all_gather_into_tensor(full, part),
    }


def _windlass_works(transport: str, elements: int, rank: int, ranks: int) -> Works:
    """Return functions: a reduction of a private buffer, a gather into one, and (shm) a gather into shared pages."""
    import torch
    import torch.distributed as dist

    from windlass.comm.choose_transport import choose_transport
    from windlass.comm.rank_group import RankGroup
    from windlass.comm.transport import BufferRequest, WireOptions

    process_group = dist.new_group(list(range(ranks)))
    assert isinstance(process_group, dist.ProcessGroup)
    group, cpu = RankGroup(process_group, tuple(range(ranks)), rank), torch.device("cpu")
    ours, _ = choose_transport(transport, group, cpu, ways=WireOptions(), timeout=_TIMEOUT)
    needs = [BufferRequest(elements, torch.float32), BufferRequest(elements, torch.float32)]
    if transport == "shm":
        needs.append(BufferRequest(elements, torch.float32, shared=True))
    gradients, *parameters = ours.allocate(needs, cpu, lanes=1)
    out = torch.zeros(elements // ranks)

    def reduce() -> None:
        ours.wait_until_read(gradients)
        ours.reduce(0, gradients, out, add=False, factor=1.0, elements=elements, wire=torch.float32).wait()

    def gather(buffer: Any) -> None:
        ours.wait_until_read(buffer)
        ours.publish(buffer)
        ours.all_gather(buffer, elements=elements).wait()

    works: Works = {f"windlass {transport} reduce": reduce}
    for buffer, kind in zip(parameters, ("gather", "gather of shared pages"), strict=False):
        works[f"windlass {transport} {kind}"] = partial(gather, buffer)
    return works


def _memory_works(elements: int) -> Works:
    import torch

    source, target = torch.ones(elements), torch.ones(elements)
    return {"local copy": lambda: target.copy_(source), "local add": lambda: target.add_(source)}


def _result_table(times: dict[str, list[float]], size: int, ranks: int) -> Table:
    table = Table(title=f"{size} MB of float32 between {ranks} ranks", title_justify="left")
    table.add_column("operation")
    for column in ("median ms", "min", "max", "buffer GB/s"):
        table.add_column(column, justify="right")
    for name, result in times.items():
        median = statistics.median(result)
        table.add_row(name, f"{median:.2f}", f"{min(result):.2f}", f"{max(result):.2f}", f"{size / median:.2f}")
    return table


if __name__ == "__main__":
    typer.run(main)
