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
from windlass.storage.byte_ranges import ByteRanges
from windlass.storage.disk_error_messages import error_name
from windlass.storage.extent_allocator import PAGE, ExtentAllocator, page_up
from windlass.storage.extent_transfer import Extent
from windlass.storage.io_engine import IoEngineChoice, native_module, start_io_engine
from windlass.storage.io_rates import IoRates
from windlass.storage.staging_memory import aligned_buffer
from windlass.storage.striped_files import StripedFiles
from windlass.storage.transfer_queue import TransferQueue

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
        self._stripes = StripedFiles([Path(path) for path in paths], block_size, label)
        try:
            self._engine_choice = _start_io_engine(self._stripes, engine, queue_depth, threads, block_size)
        except BaseException:
            self._stripes.close()
            raise
        self._engine = self._engine_choice.engine
        self._transfers = TransferQueue(self._stripes, self._engine)
        self._lock = self._transfers.lock
        self._allocator, self._reserved = ExtentAllocator(), 0
        self._rates_at_reset = IoRates()
        self._logged_unregistered = False
        # Also at exit, after an exception too, and when nobody holds the tier any more.
        weakref.finalize(self, self._transfers.close)

    def allocate(self, nbytes: int, name: str) -> Extent:
        """Take space for `nbytes` bytes, in whole pages of 4096. It holds nothing until it is written.

        Args:
            what: its name in messages.

        Raises:
            StorageError: a disk has less; names it, what was asked, what is free and what to do.
        """
        if nbytes < 0:
            raise StorageError(f"{name} cannot have {nbytes} bytes on disk; ask for 0 or more")
        with self._lock:
            self._transfers.check_usable()
            size = page_up(nbytes)
            self._stripes.resize(max(self._allocator.find_free(size) + size, self._allocator.end, self._reserved), name)
            extent = Extent(name, nbytes, self._allocator.allocate(size), size)
            self._transfers.extents.add(extent)
            return extent

    def reserve(self, nbytes: int) -> None:
        """Take space for `nbytes` bytes in all, what is allocated included, before anything begins.

        Each extent rounds its bytes up to whole pages of 4096.

        Raises:
            StorageError: as `allocate`.
        """
        with self._lock:
            self._transfers.check_usable()
            reserved = max(self._reserved, page_up(nbytes))
            self._stripes.resize(max(self._allocator.end, reserved), "all that is to be offloaded")
            self._reserved = reserved

    def free(self, extent: Extent) -> None:
        """Give an extent's space back, once what is in flight on it has finished."""
        _wait_until_writable(extent)
        with self._lock:
            self._transfers.check_usable(extent)
            for transfer in list(extent.transfers):
                transfer.finish()
            self._transfers.extents.remove(extent)
            self._allocator.free(extent.start, extent.allocated_bytes)
            self._stripes.resize(max(self._allocator.end, self._reserved), extent.name)

    def discard(self, extent: Extent) -> None:
        """Forget what an extent holds: all of it counts as never written. Nothing else of it changes."""
        _wait_until_writable(extent)
        with self._lock:
            self._transfers.check_usable(extent)
            for transfer in list(extent.transfers):
                transfer.finish()
            extent.written_ranges = ByteRanges()

    def write(self, extent: Extent, offset: int, source: torch.Tensor) -> Pending:
        """Start writing a tensor's bytes at `offset` bytes into the extent.

        Args:
            offset: any. Parts of pages at either end cost a page each, and a read where they hold other values.
            source: contiguous, on the CPU, of any dtype; not to be changed until this is done.

        Raises:
            StorageError: it does not fit there. What goes wrong on the disk is raised by the result's poll and wait.
        """
        _wait_until_writable(extent)
        return self._transfers.start(True, extent, offset, source)

    def read(self, extent: Extent, offset: int, into: torch.Tensor) -> Pending:
        """Start reading, from `offset` bytes into the extent, as many bytes as the tensor `into` has.

        Args:
            offset: any, as in `write`.
            into: contiguous, on the CPU, of any dtype; whole only once this is done.

        Raises:
            StorageError: they reach beyond the extent, or were never written. Else as `write`; a `DamageError` where
                the disk returned other bytes than were written.
        """
        return self._transfers.start(False, extent, offset, into)

    def read_unguarded(self, extent: Extent, offset: int, into: torch.Tensor) -> None:
        """As `read`, and wait; what goes wrong on the disk is raised here and noted nowhere else."""
        self._transfers.start(False, extent, offset, into).wait()

    def allocate_buffer(self, nbytes: int) -> torch.Tensor:
        """`[nbytes]` uint8 memory for which transfers are fastest: whole pages, which the kernel keeps at hand.

        It is zero at first, and goes with its last view.

        Raises:
            StorageError: there is no such memory.
        """
        with self._lock:
            self._transfers.check_usable()
            tensor, owner = aligned_buffer(nbytes)
            step = max(_LARGEST_REGION // self._block, 1) * self._block
            for first in range(0, page_up(nbytes), step):
                place = self._engine.add_region(tensor.data_ptr() + first, min(step, page_up(nbytes) - first))
                if place >= 0:
                    weakref.finalize(owner, self._engine.remove_region, place).atexit = False
                elif place != -errno.ENOTSUP and not self._logged_unregistered:
                    self._logged_unregistered = True
                    logger.debug("disk buffers stay unregistered (%s; ulimit -l may say why)", error_name(-place))
            return tensor

    def measure_rates(self, nbytes: int = 256 << 20) -> IoRates:
        """The rate of writing and then reading `nbytes` with nothing else to do, over space already written once.

        It takes that space, and a buffer of at most 64 MiB, while it runs. `achieved` does not count it.
        """
        with self._lock:
            before, size = self._transfers.totals(), page_up(max(nbytes, 1))
            extent = self.allocate(size, "a measurement of the disk's rate")
            try:
                buffer, found = self.allocate_buffer(min(size, _MEASURED_AT_ONCE)), IoRates()
                for write, counts in ((True, False), (True, True), (False, True)):
                    start = self._transfers.totals()
                    places = range(0, size, buffer.numel())
                    for transfer in [self._transfers.start(write, extent, at, buffer[: size - at]) for at in places]:
                        transfer.wait()
                    found = found.plus(self._transfers.totals().since(start)) if counts else found
            finally:
                self.free(extent)
            self._rates_at_reset = self._rates_at_reset.plus(self._transfers.totals().since(before))
            return found

    def io_rates(self, *, reset: bool = False) -> IoRates:
        """What passed since the last reset; `reset` begins anew after this."""
        now = self._transfers.totals()
        found = now.since(self._rates_at_reset)
        if reset:
            self._rates_at_reset = now
        return found

    def description(self) -> str:
        """How blocks travel, why so, and where to, in one line."""
        how = "direct" if self._stripes.is_direct else "through the page cache"
        return f"{self._engine_choice.name} ({self._engine_choice.reason}), {how}, to {', '.join(self._stripes.path_names)}"

    def directories(self) -> list[Path]:
        """This process's own directories, one a path; gone once the tier is closed."""
        return self._stripes.directories

    def close(self) -> None:
        """Cancel what waits, await what is in flight, and give the space back: what was kept is gone.

        A failure that nobody was told of is logged. Closing again does nothing.
        """
        self._transfers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _wait_until_writable(extent: Extent) -> None:
    """Without any lock of the tier's: whoever the guard waits for reads from it."""
    if extent.wait_until_writable is not None:
        extent.wait_until_writable()


def _start_io_engine(
    stripes: StripedFiles, engine: str | None, queue_depth: int, threads: int, block_size: int
) -> IoEngineChoice:
    module, _ = native_module()
    alignment = stripes.memory_alignment(None if module is None else module.direct_memory_alignment)
    return start_io_engine(
        stripes.descriptors,
        requested=engine,
        queue_depth=queue_depth,
        threads=threads,
        block_size=block_size,
        alignment=alignment,
    )


def _check(paths: Sequence[str | Path], depth: int, block: int, threads: int) -> None:
    if isinstance(paths, (str, Path)) or not paths:
        raise StorageError(f"paths of a disk tier are {paths!r}; give a list with at least one directory")
    if block < PAGE or block % PAGE or block > _LARGEST_BLOCK:
        raise StorageError(f"block_size of a disk tier is {block}; give a multiple of {PAGE}, at most {_LARGEST_BLOCK}")
    if not 1 <= depth <= 4096 or not 1 <= threads <= 256:
        raise StorageError(f"queue_depth is {depth} and threads {threads}; give 1 to 4096, and 1 to 256")
