"""Reductions and gathers between CPU ranks of one host: windlass's transports, gloo's own, and what memory allows.

python bench/collectives.py --ranks 2
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

from windlass.cli.benches.facts import write_result
from windlass.cli.benches.screen import screen

_RESULTS = Path(__file__).parent / "results"
_TIMEOUT = timedelta(minutes=5)
Works = dict[str, Callable[[], object]]


def main(
    ranks: Annotated[int, typer.Option(min=2, help="Processes, one thread each.")] = 2,
    megabytes: Annotated[str, typer.Option(help="Sizes of the whole buffer, comma-separated.")] = "8,100",
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each operation takes.")] = 11,
    name: Annotated[str, typer.Option(help="Of the file in --results.")] = "collectives",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Time them in turns, print a table, write the JSON."""
    from torch.multiprocessing.spawn import spawn

    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="WARNING")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.pop("WINDLASS_TRANSPORT", None)
    sizes = [int(size) for size in megabytes.split(",")]
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as folder:
        arguments = (ranks, sizes, rounds, f"file://{folder}/meeting", answers)
        spawn(_rank, arguments, nprocs=ranks)
        measured = answers.get()
    console = screen()
    for size in sizes:
        console.print(_table(measured[str(size)], size, ranks))
    path = write_result(results / f"{name}.json", {"bench": "collectives", "ranks": ranks, "milliseconds": measured})
    console.print(f"written: {path}", soft_wrap=True)


def _rank(rank: int, ranks: int, sizes: list[int], rounds: int, meeting: str, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 has new names, 2.10 only these
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    found = {}
    for size in sizes:
        elements = size * 250_000 // ranks * ranks
        works = {
            **_gloo(elements, ranks),
            **_ours("shm", elements, rank, ranks),
            **_ours("gloo", elements, rank, ranks),
        }
        found[str(size)] = _in_turns({**works, **_memory(elements)}, rounds)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _in_turns(works: Works, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each operation in each round, from when all are ready until the last is done."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items() if number % 2 else reversed(works.items()):
            dist.barrier()
            start = time.perf_counter()
            work()
            dist.barrier()
            if number:  # the first touches fresh pages
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def _gloo(elements: int, ranks: int) -> Works:
    import torch
    import torch.distributed as dist

    whole, part = torch.ones(elements), torch.empty(elements // ranks)
    return {
        "torch gloo all_reduce": lambda: dist.all_reduce(whole),
        "torch gloo reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "torch gloo all_gather": lambda: dist.all_gather_into_tensor(whole, part),
    }


def _ours(transport: str, elements: int, rank: int, ranks: int) -> Works:
    """A reduction of a private buffer, and gathers into a private one and (shm) into pages that all ranks map."""
    import torch
    import torch.distributed as dist

    from windlass.comm.choose import choose_transport
    from windlass.comm.groups import Group
    from windlass.comm.transport import Need, Ways

    process_group = dist.new_group(list(range(ranks)))
    assert isinstance(process_group, dist.ProcessGroup)
    group, cpu = Group(process_group, tuple(range(ranks)), rank), torch.device("cpu")
    ours, _ = choose_transport(transport, group, cpu, ways=Ways(), timeout=_TIMEOUT)
    needs = [Need(elements, torch.float32), Need(elements, torch.float32)]
    if transport == "shm":
        needs.append(Need(elements, torch.float32, common=True))
    gradients, *parameters = ours.allocate(needs, cpu, lanes=1)
    out = torch.zeros(elements // ranks)

    def reduce() -> None:
        ours.settle(gradients)
        ours.reduce(0, gradients, out, add=False, factor=1.0, elements=elements, wire=torch.float32).wait()

    def gather(buffer: Any) -> None:
        ours.settle(buffer)
        ours.publish(buffer)
        ours.gather(buffer, elements=elements).wait()

    works: Works = {f"windlass {transport} reduce": reduce}
    for buffer, kind in zip(parameters, ("gather", "gather of common pages"), strict=False):
        works[f"windlass {transport} {kind}"] = partial(gather, buffer)
    return works


def _memory(elements: int) -> Works:
    import torch

    source, target = torch.ones(elements), torch.ones(elements)
    return {"local copy": lambda: target.copy_(source), "local add": lambda: target.add_(source)}


def _table(times: dict[str, list[float]], size: int, ranks: int) -> Table:
    table = Table(title=f"{size} MB of float32 between {ranks} ranks", title_justify="left")
    table.add_column("operation")
    for column in ("median ms", "min", "max", "buffer GB/s"):
        table.add_column(column, justify="right")
    for name, found in times.items():
        median = statistics.median(found)
        table.add_row(name, f"{median:.2f}", f"{min(found):.2f}", f"{max(found):.2f}", f"{size / median:.2f}")
    return table


if __name__ == "__main__":
    typer.run(main)
