"""Memory that the ranks of one host map together, and counters for synchronization.

[Note: transports] The memory is an anonymous file (`memfd`). It has no name on any file system, so a small /dev/shm
does not limit it, and nothing is left behind when a rank dies. Peers open it through `/proc/PID/fd/N`, which the kernel
allows only to the same user. If any rank cannot open it, all ranks use gloo or MPI (`choose_transport`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from windlass.base.collective_activity import WaitScope, activity
from windlass.base.errors import CommunicationError
from windlass.base.processes import is_alive
from windlass.comm.rank_group import RankGroup

_fence = threading.Lock()


def fence() -> None:
    """Order memory accesses of this thread: those before the call take effect before those after it.

    x86 keeps the order of stores and of loads. Arm does not. On Arm, the atomic operations that take and release a lock
    act as the barrier.
    """
    with _fence:
        pass


def _first_problem(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)


def shared_memory_problem(group: RankGroup) -> str | None:
    """Return the reason why these ranks cannot share memory, or None if they can. Collective, equal on all ranks."""
    # Different machines may have equal host names (e.g. in containers); the boot id distinguishes them.
    host = socket.gethostname(), _boot_id()
    without = None if hasattr(os, "memfd_create") else f"{platform.system()} has no anonymous memory files"
    ranks = group.all_gather_object((host, without))
    if (hosts := len({host for host, _ in ranks})) > 1:
        return f"the ranks are on {hosts} hosts"
    if problem := _first_problem(without for _, without in ranks):
        return problem
    # Only an attempt shows if permissions (e.g. of /proc) are sufficient.
    try:
        SharedMemory(group, 4096)
    except CommunicationError as error:
        return str(error)
    return None


def _boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()
    return ""


class SharedMemory:
    """One block of bytes for each rank of a group, each mapped by all ranks. The constructor is collective.

    Args:
        group: Ranks of one host.
        size: Bytes of this rank's own block, which is rounded up to full pages; ranks may differ.

    Attributes:
        blocks: uint8 tensors, one per rank, in group order: `[bytes of the rank's block]`, initially zeros.
        pids: Id of the process that owns each block.

    Raises:
        CommunicationError: a rank could not allocate its block or map a peer's. Raised on every rank.
    """

    def __init__(self, group: RankGroup, size: int) -> None:
        size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        own, problem = -1, None
        try:
            try:
                own = os.memfd_create("windlass", os.MFD_CLOEXEC)
                os.ftruncate(own, size)
            except OSError as error:  # raised on all ranks, below
                problem = f"rank {dist.get_rank()} cannot allocate {size} bytes of shared memory ({error})"
            identity = _identity(own) if problem is None else (0, 0)
            answers = group.all_gather_object((problem, (os.getpid(), own, size, identity)))
            if problem := _first_problem(problem for problem, _ in answers):
                raise CommunicationError(problem)
            offers = [offer for _, offer in answers]
            self.blocks = []
            try:
                maps = [
                    _map(os.dup(own) if index == group.index else _open_descriptor(pid, descriptor), pid, size, file)
                    for index, (pid, descriptor, size, file) in enumerate(offers)
                ]
                self.blocks = [torch.frombuffer(one, dtype=torch.uint8) for one in maps]
            except OSError as error:
                problem = f"rank {dist.get_rank()} cannot map a peer's memory ({error})"
            self.pids = [pid for pid, _, _, _ in offers]
            # The all-gather is also a barrier, after which no peer needs the descriptor.
            if problem := _first_problem(group.all_gather_object(problem)):
                raise CommunicationError(problem)
        finally:
            if own >= 0:
                os.close(own)


def _identity(descriptor: int) -> tuple[int, int]:
    """Return the device and inode numbers, which identify an open file on this host."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _open_descriptor(pid: int, descriptor: int) -> int:
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def _map(file: int, pid: int, size: int, identity: tuple[int, int]) -> mmap.mmap:
    """Map the block of process `pid`, which is open as the descriptor `file`, and close the descriptor.

    Raises:
        OSError: the file does not have this identity and size, or cannot be mapped.
    """
    try:
        # If the ranks are in different PID namespaces (containers), `pid` may be another process here, even this one.
        if _identity(file) != identity:
            raise OSError(f"the number {pid} is another process here: the ranks are in different PID namespaces")
        if os.fstat(file).st_size != size:
            raise OSError(f"block of process {pid} has {os.fstat(file).st_size} bytes, not {size}")
        return mmap.mmap(file, size)
    finally:
        os.close(file)


class Counters:
    """Counters in shared memory: each rank raises its own, and all ranks read all of them.

    The constructor is collective.

    Args:
        group: Ranks of one host.
        count: Number of counters per rank; all start at 0.
        timeout: Maximum wait for a peer.
    """

    def __init__(self, group: RankGroup, count: int, timeout: timedelta) -> None:
        self._memory = SharedMemory(group, 8 * count)
        self._views = [
            memoryview(block.numpy()).cast("q")  # type: ignore[arg-type]
            for block in self._memory.blocks
        ]
        self._own = self._views[group.index]
        self._peers = [(i, view) for i, view in enumerate(self._views) if i != group.index]
        self._group, self._timeout = group, timeout.total_seconds()
        self._count = max(count, 1)
        self._rest: Counters | None = None  # counters added by `extend`

    def extend(self, count: int) -> int:
        """Add `count` counters and return the index of the first. Collective."""
        if self._rest is not None:
            return self._count + self._rest.extend(count)
        self._rest = Counters(self._group, count, timedelta(seconds=self._timeout))
        return self._count

    def raise_to(self, counter: int, value: int) -> None:
        """Set one of this rank's counters. A peer that reads the new value also sees everything written before."""
        # Data written before must become visible before the counter does.
        fence()
        self.set(counter, value)

    def set(self, counter: int, value: int) -> None:
        """Set one of this rank's counters without a fence.

        Peers may read the counter only once they have read the value of another counter that this rank raised later.
        """
        if self._rest is not None and counter >= self._count:
            self._rest.set(counter - self._count, value)
        else:
            self._own[counter] = value

    def read(self, rank: int, counter: int) -> int:
        """Return a counter of the rank at group index `rank`."""
        if self._rest is not None and counter >= self._count:
            return self._rest.read(rank, counter - self._count)
        return int(self._views[rank][counter])

    def reached(self, counter: int, value: int) -> bool:
        """Return True if every peer's counter is at `value` or above."""
        if self._rest is not None and counter >= self._count:
            return self._rest.reached(counter - self._count, value)
        for _, view in self._peers:
            if view[counter] < value:
                return False
        # Reads after this see everything that the peers wrote before they raised the counter.
        fence()
        return True

    def wait(self, counter: int, value: int, what: str) -> None:
        """Block until every peer's counter is at `value` or above.

        Raises:
            CommunicationError: a peer died, or the time-out passed. The message names the rank and `what`.
        """
        if self._rest is not None and counter >= self._count:
            self._rest.wait(counter - self._count, value, what)
            return
        if self.reached(counter, value):
            return
        with WaitScope(what) if activity.current_wait is None else contextlib.nullcontext():
            self._block(lambda: self.reached(counter, value), self._peers, counter, value, what)

    def wait_for_rank(self, rank: int, counter: int, value: int, what: str) -> None:
        """Block until the counter of the peer at group index `rank` is at `value` or above.

        Raises:
            CommunicationError: the peer died, or the time-out passed.
        """
        if self._rest is not None and counter >= self._count:
            self._rest.wait_for_rank(rank, counter - self._count, value, what)
            return
        view = self._views[rank]
        if view[counter] < value:
            with WaitScope(what) if activity.current_wait is None else contextlib.nullcontext():
                self._block(lambda: view[counter] >= value, [(rank, view)], counter, value, what)
        fence()

    def _block(
        self,
        reached: Callable[[], bool],
        peers: list[tuple[int, memoryview[int]]],
        counter: int,
        value: int,
        what: str,
    ) -> None:
        start, pause, checked = time.monotonic(), 0.0, 0.0
        while not reached():
            waited = time.monotonic() - start
            # Spin for 2 ms, because most waits are short; then sleep, to leave the core to other ranks.
            if waited > 0.002:
                pause = min(0.001, waited / 64)
            if pause:
                time.sleep(pause)
            else:
                os.sched_yield()
            # Checking processes takes system calls, so do it at most twice a second.
            if waited - checked > 0.5:
                checked = waited
                self._check_peers(peers, counter, value, what, waited)

    def _check_peers(
        self, peers: list[tuple[int, memoryview[int]]], counter: int, value: int, what: str, waited: float
    ) -> None:
        for index, view in peers:
            if view[counter] >= value:
                continue
            rank, pid = self._group.ranks[index], self._memory.pids[index]
            # Read the counter again: the peer may have raised it before it ended.
            if not is_alive(pid) and view[counter] < value:
                raise CommunicationError(
                    f"rank {rank} (process {pid}) ended while {what} was waiting for it; see its output for the reason"
                )
            if waited > self._timeout:
                raise CommunicationError(
                    f"rank {rank} (process {pid}) did not join {what} within {self._timeout:.0f} s; "
                    "it is alive, and the watchdog's hang report names its current call; raise the time-out of "
                    "init_distributed if it needs longer"
                )
