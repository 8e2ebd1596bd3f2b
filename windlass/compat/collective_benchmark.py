"""Latency and bandwidth of single collectives over sizes and dtypes, between the ranks of torch.distributed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from windlass.base.compute_device import local_device, synchronize
from windlass.base.errors import CommunicationError
from windlass.comm.collective_bandwidth import calc_bw_log
from windlass.compat import collectives

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "pt2pt")
"""Operations that can be measured. pt2pt sends from rank 0 to rank 1 and back; its time is half the round trip."""
_LOG_NAMES = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}


@dataclass(frozen=True)
class CollectiveSettings:
    """Operations, sizes and dtypes to measure.

    Attributes:
        sizes: bytes of a rank's message, rounded up to a number of elements that the number of ranks divides.
        warmups, trials: number of untimed and of timed calls for each operation, dtype and size.
        async_op: start the operation, then wait for it.
    """

    operations: Sequence[str] = OPERATIONS
    sizes: Sequence[int] = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    warmups: int = 5
    trials: int = 50
    async_op: bool = False


@dataclass(frozen=True)
class CollectiveRow:
    """Measurement of one operation at one size, as medians over the trials.

    Attributes:
        nbytes: bytes of a rank's message.
        seconds: time from the start on all ranks to the end on this one.
        algorithm_gbps, bus_gbps: see `windlass.comm.collective_bandwidth.calc_bw_log`.
    """

    operation: str
    dtype: str
    nbytes: int
    seconds: float
    algorithm_gbps: float
    bus_gbps: float


def measure_collectives(settings: CollectiveSettings) -> Iterator[CollectiveRow]:
    """Yield a row for each operation, dtype and size, without repetitions. Collective over all ranks, with the same
    settings.

    Raises:
        CommunicationError: an operation is unknown, or pt2pt is requested with one rank.
    """
    ranks = collectives.get_world_size()
    for operation in dict.fromkeys(settings.operations):
        if operation not in OPERATIONS:
            raise CommunicationError(
                f"{operation!r} is not an operation to measure; write one of {', '.join(OPERATIONS)}"
            )
        if operation == "pt2pt" and ranks < 2:
            raise CommunicationError("pt2pt needs two ranks, and there is one; start more, or leave it out")
        for dtype in dict.fromkeys(settings.dtypes):
            # different sizes may be rounded up to the same number of elements
            for elements in sorted({-(-size // (dtype.itemsize * ranks)) * ranks for size in settings.sizes}):
                run = _make_call(operation, elements, dtype, settings.async_op)
                seconds = _median_time(run, settings.warmups, settings.trials)
                if operation == "pt2pt":
                    seconds /= 2
                nbytes = elements * dtype.itemsize
                algorithm, bus = calc_bw_log(_LOG_NAMES.get(operation, operation), nbytes, seconds * 1e3, ranks)
                name = str(dtype).removeprefix("torch.")
                yield CollectiveRow(operation, name, nbytes, seconds, algorithm, bus)


def _make_call(operation: str, elements: int, dtype: torch.dtype, async_op: bool) -> Callable[[], None]:
    """Return a function that runs the operation once and waits for its end."""
    device, rank, ranks = local_device(), collectives.get_rank(), collectives.get_world_size()
    message = torch.ones(elements, dtype=dtype, device=device)

    def wait(work: object) -> None:
        if async_op and work is not None:
            work.wait()  # type: ignore[attr-defined]

    if operation == "all_reduce":
        operator = collectives.ReduceOp.MAX  # sums would grow beyond the range of 16-bit dtypes
        return lambda: wait(collectives.all_reduce(message, op=operator, async_op=async_op))
    if operation == "broadcast":
        return lambda: wait(collectives.broadcast(message, 0, async_op=async_op))
    if operation == "all_gather":
        whole = torch.empty(elements * ranks, dtype=dtype, device=device)
        return lambda: wait(collectives.all_gather_into_tensor(whole, message, async_op=async_op))
    if operation == "reduce_scatter":
        whole = torch.ones(elements * ranks, dtype=dtype, device=device)
        return lambda: wait(collectives.reduce_scatter_tensor(message, whole, async_op=async_op))
    if operation == "all_to_all":
        received = torch.empty_like(message)
        return lambda: wait(collectives.all_to_all_single(received, message, async_op=async_op))

    def there_and_back() -> None:
        if rank == 0:
            collectives.send(message, 1)
            collectives.recv(message, 1)
        elif rank == 1:
            collectives.recv(message, 0)
            collectives.send(message, 0)

    return there_and_back


def _median_time(run: Callable[[], None], warmups: int, trials: int) -> float:
    device, times = local_device(), []
    for number in range(warmups + trials):
        collectives.barrier()
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        if number >= warmups:
            times.append(time.perf_counter() - start)
    return statistics.median(times)
