"""The disk tier's rate compared with raw direct I/O of the same size and depth, alternately in one run.

python bench/disk_tier_rate.py --path /mnt/nvme
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from windlass.base.errors import StorageError
from windlass.base.pending import Pending
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.storage import DiskTier
from windlass.storage.io_engine import ENGINES, IoEngine, start_io_engine

_RESULTS = Path(__file__).parent / "results"
_MIB = 1 << 20
_REQUESTS_IN_FLIGHT = 4
Works = dict[str, Callable[[], object]]
Times = dict[str, list[float]]


class RawDirectIo:
    """One file whose blocks are transferred as fast as possible: the maximum rate of the disk.

    Args:
        folder: folder on the disk.
        nbytes: size of the file.
        block: bytes of a block.
        depth: blocks in flight.
        memory: source and target of the transfers: the tier's own buffers, because the page layout affects the rate.
    """

    def __init__(self, folder: Path, nbytes: int, block: int, depth: int, memory: torch.Tensor) -> None:
        placeholder, name = tempfile.mkstemp(dir=folder)
        os.close(placeholder)
        self._file = os.open(name, os.O_RDWR | os.O_DIRECT)
        os.unlink(name)
        os.posix_fallocate(self._file, 0, nbytes)
        self._blocks, self._block, self._depth = nbytes // block, block, depth
        self._memory, self._blocks_in_memory = memory, memory.numel() // block
        self._threads = ThreadPoolExecutor(depth)
        self._ring = self._start_ring()

    def timed_works(self, write: bool, word: str) -> Works:
        """Return two transfers of the file: by threads, with one block each at a time, and, if the kernel has io_uring,
        by a bare ring to which all blocks are submitted at once."""
        ring: Works = {f"raw ring {word}": partial(self._move_by_ring, write)} if self._ring is not None else {}
        return {f"raw threads {word}": partial(self._move_by_threads, write)} | ring

    def close(self) -> None:
        self._threads.shutdown()
        if self._ring is not None:
            self._ring.close()
        os.close(self._file)

    def _start_ring(self) -> IoEngine | None:
        try:
            engine = start_io_engine(
                [self._file],
                requested="io_uring",
                queue_depth=self._depth,
                threads=1,
                block_size=self._block,
                alignment=1,
            ).engine
        except StorageError as error:
            bench_console().print(f"no bare ring to compare with: {error}", soft_wrap=True)
            return None
        engine.add_region(self._memory.data_ptr(), self._memory.numel())
        return engine

    def _move_by_ring(self, write: bool) -> None:
        assert self._ring is not None
        block, start = self._block, self._memory.data_ptr()
        spans = [(0, i * block, start + i % self._blocks_in_memory * block, block, 0) for i in range(self._blocks)]
        request = self._ring.submit(write, spans)
        assert request is not None
        while not request.wait(1.0):
            pass
        if request.failure() is not None:
            raise OSError(f"a raw transfer failed: {request.failure()}")

    def _move_by_threads(self, write: bool) -> None:
        blocks, memory = itertools.count(), memoryview(self._memory.numpy())  # type: ignore[arg-type]
        list(self._threads.map(lambda _: self._move_blocks(blocks, memory, write), range(self._depth)))

    def _move_blocks(self, blocks: Iterator[int], memory: memoryview, write: bool) -> None:
        """Transfer blocks until none is left."""
        move, block = os.pwritev if write else os.preadv, self._block
        while (index := next(blocks)) < self._blocks:
            at = index % self._blocks_in_memory * block
            if move(self._file, [memory[at : at + block]], index * block) != block:
                raise OSError("a raw transfer is incomplete: the disk is full, or failing")


class TierRequests:
    """Transfers of bytes through the disk tier, in requests of the size that a training step makes."""

    def __init__(self, engine: str, folder: Path, block: int, depth: int) -> None:
        threads = min(depth, 256)
        self.tier = DiskTier([folder], queue_depth=depth, block_size=block, threads=threads, engine=engine)

    def prepare(self, nbytes: int, memory: torch.Tensor) -> None:
        """Allocate the space. `memory` is divided into the buffers of `_REQUESTS_IN_FLIGHT` requests."""
        self._extent = self.tier.allocate(nbytes, "the benchmark")
        self._buffers = memory.chunk(_REQUESTS_IN_FLIGHT)
        self._offsets = range(0, nbytes, self._buffers[0].numel())

    def move_all(self, write: bool) -> None:
        """Read or write all bytes with at most four requests in flight, one per buffer."""
        move = self.tier.write if write else self.tier.read
        under_way: dict[int, Pending] = {}
        for number, place in enumerate(self._offsets):
            turn = number % len(self._buffers)
            if turn in under_way:
                under_way.pop(turn).wait()
            under_way[turn] = move(self._extent, place, self._buffers[turn])
        for pending in under_way.values():
            pending.wait()


def main(
    path: Annotated[Path, typer.Option(help="A directory on the disk to measure.")] = Path("."),
    megabytes: Annotated[int, typer.Option(min=64, help="MiB transferred per round.")] = 1024,
    request: Annotated[int, typer.Option(min=1, help="MiB of one request to the tier.")] = 64,
    block: Annotated[int, typer.Option(min=4, help="KiB of a block, raw and in the tier.")] = 1024,
    depth: Annotated[int, typer.Option(min=1, help="Blocks in flight, raw and in the tier.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 7,
    engines: Annotated[str, typer.Option(help="Comma-separated: io_uring, threads, python.")] = "io_uring",
    target: Annotated[float, typer.Option(help="Target fraction of the raw rate, for the first engine.")] = 0.85,
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "disk",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a target is missed.")] = False,
) -> None:
    """Measure, print the table, write the JSON. Exit code 1: --strict and the target missed."""
    chosen = [engine.strip() for engine in engines.split(",")]
    for engine in chosen:
        if engine not in ENGINES:
            raise typer.BadParameter(f"engine {engine!r} is unknown; use {', '.join(ENGINES)}")
    nbytes, console = megabytes // request * request * _MIB, bench_console()
    if _REQUESTS_IN_FLIGHT * request * _MIB < (depth * block) << 10:
        raise typer.BadParameter(
            f"{_REQUESTS_IN_FLIGHT} requests of {request} MiB are less than {depth} blocks of {block} KiB"
        )
    if nbytes == 0:
        raise typer.BadParameter(f"a round of {megabytes} MiB is smaller than a request of {request} MiB")
    tiers = {engine: TierRequests(engine, path, block << 10, depth) for engine in chosen}
    try:
        console.print("\n".join(tier.tier.description() for tier in tiers.values()), soft_wrap=True)
        memory = tiers[chosen[0]].tier.allocate_buffer(_REQUESTS_IN_FLIGHT * request * _MIB).random_()
        for tier in tiers.values():
            tier.prepare(nbytes, memory)
        with closing(RawDirectIo(path, nbytes, block << 10, depth, memory)) as raw:
            works: Works = {}
            for write, word in ((True, "write"), (False, "read")):
                works |= raw.timed_works(write, word)
                works |= {f"{engine} {word}": partial(tier.move_all, write) for engine, tier in tiers.items()}
            times = _time_interleaved(works, rounds)
    finally:
        for tier in tiers.values():
            tier.tier.close()
    ratios = _ratios_to_raw(times)
    console.print(_result_table(times, ratios, nbytes))
    facts = {"bytes": nbytes, "request": request * _MIB, "block": block << 10, "depth": depth, "path": str(path)}
    write_result(results / f"{name}.json", {"bench": "disk", **facts, "seconds": times, "of_raw": ratios})
    console.print(f"written: {results / name}.json", soft_wrap=True)
    low = {work: ratio for work, ratio in ratios.items() if work.startswith(chosen[0]) and ratio < target}
    for work, ratio in low.items():
        console.print(f"missed: {work} reached {ratio:.0%} of the raw rate, the target is {target:.0%}")
    if low and strict:
        raise typer.Exit(1)


def _time_interleaved(works: Works, rounds: int) -> Times:
    """Return the seconds of each transfer in each round. Every other round runs in reverse order; round 0 only fills
    the files."""
    times: Times = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items() if number % 2 == 0 else reversed(works.items()):
            start = time.perf_counter()
            work()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def _ratios_to_raw(times: Times) -> dict[str, float]:
    """Return for each transfer its rate relative to the faster raw transfer of the round, as the median over rounds."""
    ratios = {}
    for name, result in times.items():
        word = name.rpartition(" ")[2]
        raw = zip(*(times[other] for other in times if other.startswith("raw ") and other.endswith(word)), strict=True)
        ratios[name] = statistics.median(min(best) / ours for best, ours in zip(raw, result, strict=True))
    return ratios


def _result_table(times: Times, ratios: dict[str, float], nbytes: int) -> Table:
    table = Table(title=f"{nbytes / 1e9:.2f} GB a turn", title_justify="left")
    table.add_column("what")
    for column in ("median GB/s", "min", "max", "of the best raw"):
        table.add_column(column, justify="right")
    for name, result in times.items():
        rates = [nbytes / seconds / 1e9 for seconds in result]
        middle = f"{statistics.median(rates):.2f}"
        table.add_row(name, middle, f"{min(rates):.2f}", f"{max(rates):.2f}", f"{ratios[name]:.0%}")
    return table


if __name__ == "__main__":
    typer.run(main)
