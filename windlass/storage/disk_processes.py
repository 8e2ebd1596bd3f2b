"""Rates of a disk that several processes use at the same time."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from windlass.base.errors import StorageError
from windlass.storage.disk_sweep import DiskMeasurement, DiskSetting, measure_runs


class Barrier(Protocol):
    """Barrier of threads or of processes."""

    def wait(self, timeout: float | None = None, /) -> int:
        """Wait for all others."""

    def abort(self) -> None:
        """Make `wait` of all others raise `threading.BrokenBarrierError`."""


@dataclass(frozen=True)
class TimedTransfer:
    """Bytes that one process moved in one direction, with start and end in seconds of the host's monotonic clock."""

    nbytes: int
    start: float
    end: float


@dataclass(frozen=True)
class ProcessRuns:
    """Transfers of one process: one write and one read for each run."""

    writes: list[TimedTransfer]
    reads: list[TimedTransfer]
    engine: str


def measure_processes(setting: DiskSetting, folders: Sequence[Path], nbytes: int, loops: int = 1) -> DiskMeasurement:
    """Measure one setting in a process for each folder, all at the same time. The best of `loops` runs counts.

    Each process writes and then reads `nbytes` in each run. All processes start each timed transfer together. The rate
    of a run is the number of bytes of all processes, divided by the time from the first start to the last end.

    Raises:
        StorageError: a folder is missing, not writable or too full, or a process was killed.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(folders))
    with ProcessPoolExecutor(len(folders), context, _set_barrier, (barrier,)) as pool:
        waiting = [pool.submit(_measure_with_others, setting, folder, nbytes, loops) for folder in folders]
        wait(waiting)
    return combine_runs(setting, _results(waiting))


def measure_one(setting: DiskSetting, folder: Path, nbytes: int, loops: int, barrier: Barrier) -> ProcessRuns:
    """Measure the transfers of this process, one of several. Each process waits for the others before every timed
    transfer.
    """
    starts: list[float] = []

    def start_together() -> None:
        barrier.wait()
        starts.append(time.monotonic())

    try:
        found, engine = measure_runs(setting, [folder], nbytes, loops, start_together)
    except BaseException:
        barrier.abort()
        raise
    writes = [
        TimedTransfer(one.write_bytes, start, start + one.write_seconds)
        for one, start in zip(found, starts[0::2], strict=True)
    ]
    reads = [
        TimedTransfer(one.read_bytes, start, start + one.read_seconds)
        for one, start in zip(found, starts[1::2], strict=True)
    ]
    return ProcessRuns(writes, reads, engine)


def combine_runs(setting: DiskSetting, found: Sequence[ProcessRuns]) -> DiskMeasurement:
    """Return the combined rates of all processes, of the best run in each direction."""
    reads = max(map(_rate, zip(*(one.reads for one in found), strict=True)))
    writes = max(map(_rate, zip(*(one.writes for one in found), strict=True)))
    return DiskMeasurement(setting, reads, writes, found[0].engine)


def _rate(transfers: Sequence[TimedTransfer]) -> float:
    seconds = max(one.end for one in transfers) - min(one.start for one in transfers)
    return sum(one.nbytes for one in transfers) / seconds if seconds else 0.0


_barrier: list[Barrier] = []  # barrier of this worker process, set by the initializer of the pool


def _set_barrier(barrier: Barrier) -> None:
    _barrier[:] = [barrier]


def _measure_with_others(setting: DiskSetting, folder: Path, nbytes: int, loops: int) -> ProcessRuns:
    return measure_one(setting, folder, nbytes, loops, _barrier[0])


def _results(ended: Sequence[Future[ProcessRuns]]) -> list[ProcessRuns]:
    """Return the results, or raise the first error that is not the consequence of another one."""
    errors = [error for one in ended if (error := one.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors and isinstance(errors[0], BrokenProcessPool):
        raise StorageError(
            f"one of {len(ended)} processes that measure the disk was killed, e.g. for lack of memory; use fewer "
            "processes"
        ) from errors[0]
    if errors:
        raise errors[0]
    return [one.result() for one in ended]
