"""The disk tier: tensors kept in files, moved by direct I/O, many blocks in flight at once."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from windlass.base.errors import StorageError
from windlass.base.log import logger
from windlass.base.pending import Pending
from windlass.storage.engine import Running, native, start_engine
from windlass.storage.failure import error_name
from windlass.storage.memory import aligned_buffer
from windlass.storage.mover import Mover
from windlass.storage.rates import Rates
from windlass.storage.space import PAGE, Space, page_up
from windlass.storage.spans import Spans
from windlass.storage.stripes import Stripes
from windlass.storage.transfer import Extent

_LARGEST_BLOCK = 1 << 30
_LARGEST_REGION = 1 << 30  # what the kernel takes as one registered buffer
_MEASURED_AT_ONCE = 64 << 20


class DiskTier:
    """Tensors on one or more disks.

    Transfers run in any order, but two that share a page, one of them writing, run in the order of the calls: the
    later call waits for the earlier transfer. Bytes that were never written can't be read, nor those that a failed
    write was to replace. Methods may be called from any thread, but in the process that made the tier only.

    Args:
        paths: a directory on each disk; blocks go round them. See [Note: unlinked files] for what is in them.
        queue_depth: blocks in flight at once, where io_uring serves.
        block_size: bytes of a block, a multiple of 4096.
        threads: blocks in flight at once, where threads serve. [queue_depth, at most 16]
        label: becomes part of the name of this process's directories.
        engine: `io_uring`, `threads` or `python`. [what WINDLASS_DISK_ENGINE says, else the first that works]

    Raises:
        StorageError: a path is a file, may not be written to or is full; or a number makes no sense.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        queue_depth: int = 32,
        block_size: int = 1 << 20,
        threads: int | None = None,
        label: str = "windlass",
        engine: str | None = None,
    ) -> None:
        threads = min(queue_depth, 16) if threads is None else threads
        _check(paths, queue_depth, block_size, threads)
        self._block = block_size
        self._stripes = Stripes([Path(path) for path in paths], block_size, label)
        try:
            self._running = _start(self._stripes, engine, queue_depth, threads, block_size)
        except BaseException:
            self._stripes.close()
            raise
        self._engine = self._running.engine
        self._mover = Mover(self._stripes, self._engine)
        self._lock = self._mover.lock
        self._space, self._reserved = Space(), 0
        self._reset_at = Rates()
        self._told_unregistered = False
        # Also at exit, after an exception too, and when nobody holds the tier any more.
        weakref.finalize(self, self._mover.close)

    def allocate(self, nbytes: int, what: str) -> Extent:
        """Take space for `nbytes` bytes, in whole pages of 4096. It holds nothing until it is written.

        Args:
            what: its name in messages.

        Raises:
            StorageError: a disk has less; names it, what was asked, what is free and what to do.
        """
        if nbytes < 0:
            raise StorageError(f"{what} cannot have {nbytes} bytes on disk; ask for 0 or more")
        with self._lock:
            self._mover.check()
            size = page_up(nbytes)
            self._stripes.resize(max(self._space.find(size) + size, self._space.end, self._reserved), what)
            extent = Extent(what, nbytes, self._space.take(size), size)
            self._mover.live.add(extent)
            return extent

    def reserve(self, nbytes: int) -> None:
        """Take space for `nbytes` bytes in all, what is allocated included, before anything begins.

        Each extent rounds its bytes up to whole pages of 4096.

        Raises:
            StorageError: as `allocate`.
        """
        with self._lock:
            self._mover.check()
            reserved = max(self._reserved, page_up(nbytes))
            self._stripes.resize(max(self._space.end, reserved), "all that is to be offloaded")
            self._reserved = reserved

    def free(self, extent: Extent) -> None:
        """Give an extent's space back, once what is in flight on it has finished."""
        _await_guard(extent)
        with self._lock:
            self._mover.check(extent)
            for transfer in list(extent.transfers):
                transfer.finish()
            self._mover.live.remove(extent)
            self._space.give_back(extent.start, extent.size)
            self._stripes.resize(max(self._space.end, self._reserved), extent.what)

    def discard(self, extent: Extent) -> None:
        """Forget what an extent holds: all of it counts as never written. Nothing else of it changes."""
        _await_guard(extent)
        with self._lock:
            self._mover.check(extent)
            for transfer in list(extent.transfers):
                transfer.finish()
            extent.written = Spans()

    def write(self, extent: Extent, offset: int, source: torch.Tensor) -> Pending:
        """Start writing a tensor's bytes at `offset` bytes into the extent.

        Args:
            offset: any. Parts of pages at either end cost a page each, and a read where they hold other values.
            source: contiguous, on the CPU, of any dtype; not to be changed until this is done.

        Raises:
            StorageError: it does not fit there. What goes wrong on the disk is raised by the result's poll and wait.
        """
        _await_guard(extent)
        return self._mover.start(True, extent, offset, source)

    def read(self, extent: Extent, offset: int, into: torch.Tensor) -> Pending:
        """Start reading, from `offset` bytes into the extent, as many bytes as the tensor `into` has.

        Args:
            offset: any, as in `write`.
            into: contiguous, on the CPU, of any dtype; whole only once this is done.

        Raises:
            StorageError: they reach beyond the extent, or were never written. Else as `write`; a `DamageError` where
                the disk returned other bytes than were written.
        """
        return self._mover.start(False, extent, offset, into)

    def read_now(self, extent: Extent, offset: int, into: torch.Tensor) -> None:
        """As `read`, and wait; what goes wrong on the disk is raised here and noted nowhere else."""
        self._mover.start(False, extent, offset, into).wait()

    def buffer(self, nbytes: int) -> torch.Tensor:
        """`[nbytes]` uint8 memory for which transfers are fastest: whole pages, which the kernel keeps at hand.

        It is zero at first, and goes with its last view.

        Raises:
            StorageError: there is no such memory.
        """
        with self._lock:
            self._mover.check()
            tensor, owner = aligned_buffer(nbytes)
            step = max(_LARGEST_REGION // self._block, 1) * self._block
            for first in range(0, page_up(nbytes), step):
                place = self._engine.add_region(tensor.data_ptr() + first, min(step, page_up(nbytes) - first))
                if place >= 0:
                    weakref.finalize(owner, self._engine.remove_region, place).atexit = False
                elif place != -errno.ENOTSUP and not self._told_unregistered:
                    self._told_unregistered = True
                    logger.debug("disk buffers stay unregistered (%s; ulimit -l may say why)", error_name(-place))
            return tensor

    def measure(self, nbytes: int = 256 << 20) -> Rates:
        """The rate of writing and then reading `nbytes` with nothing else to do, over space already written once.

        It takes that space, and a buffer of at most 64 MiB, while it runs. `achieved` does not count it.
        """
        with self._lock:
            before, size = self._mover.totals(), page_up(max(nbytes, 1))
            extent = self.allocate(size, "a measurement of the disk's rate")
            try:
                buffer, found = self.buffer(min(size, _MEASURED_AT_ONCE)), Rates()
                for write, counts in ((True, False), (True, True), (False, True)):
                    start = self._mover.totals()
                    places = range(0, size, buffer.numel())
                    for transfer in [self._mover.start(write, extent, at, buffer[: size - at]) for at in places]:
                        transfer.wait()
                    found = found.plus(self._mover.totals().since(start)) if counts else found
            finally:
                self.free(extent)
            self._reset_at = self._reset_at.plus(self._mover.totals().since(before))
            return found

    def achieved(self, *, reset: bool = False) -> Rates:
        """What passed since the last reset; `reset` begins anew after this."""
        now = self._mover.totals()
        found = now.since(self._reset_at)
        if reset:
            self._reset_at = now
        return found

    def path_in_use(self) -> str:
        """How blocks travel, why so, and where to, in one line."""
        how = "direct" if self._stripes.direct else "through the page cache"
        return f"{self._running.name} ({self._running.why}), {how}, to {', '.join(self._stripes.names)}"

    def directories(self) -> list[Path]:
        """This process's own directories, one a path; gone once the tier is closed."""
        return self._stripes.directories

    def close(self) -> None:
        """Cancel what waits, await what is in flight, and give the space back: what was kept is gone.

        A failure that nobody was told of is logged. Closing again does nothing.
        """
        self._mover.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _await_guard(extent: Extent) -> None:
    """Without any lock of the tier's: whoever the guard waits for reads from it."""
    if extent.guard is not None:
        extent.guard()


def _start(stripes: Stripes, engine: str | None, depth: int, threads: int, block: int) -> Running:
    module, _ = native()
    alignment = stripes.memory_alignment(None if module is None else module.direct_memory_alignment)
    return start_engine(
        stripes.descriptors, asked=engine, depth=depth, threads=threads, largest=block, alignment=alignment
    )


def _check(paths: Sequence[str | Path], depth: int, block: int, threads: int) -> None:
    if isinstance(paths, (str, Path)) or not paths:
        raise StorageError(f"paths of a disk tier are {paths!r}; give a list with at least one directory")
    if block < PAGE or block % PAGE or block > _LARGEST_BLOCK:
        raise StorageError(f"block_size of a disk tier is {block}; give a multiple of {PAGE}, at most {_LARGEST_BLOCK}")
    if not 1 <= depth <= 4096 or not 1 <= threads <= 256:
        raise StorageError(f"queue_depth is {depth} and threads {threads}; give 1 to 4096, and 1 to 256")
