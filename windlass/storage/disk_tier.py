"""Disk tier: tensors in files, moved by direct I/O with many blocks in flight at once."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from windlass.base.errors import StorageError
from windlass.base.log import logger
from windlass.base.pending import Pending
from windlass.kernels.kernel_dispatch import can_sum_pages, compare_pages
from windlass.kernels.page_sums import PageSums
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
_LARGEST_REGION = 1 << 30  # maximum size of one registered buffer in the kernel
_MEASURED_AT_ONCE = 64 << 20


class DiskTier:
    """Storage of tensors on one or more disks.

    Transfers run in any order, except that two transfers that share a page run in call order if one of them writes: the
    later call waits for the earlier transfer. Bytes that were never written, or whose last write failed, can't be read.
    Methods may be called from any thread, but only in the process that constructed the tier.

    Args:
        paths: a directory on each disk. Blocks are striped over them. See [Note: unlinked files] for their contents.
        queue_depth: blocks in flight at once under io_uring.
        block_size: bytes of a block, a multiple of 4096.
        threads: blocks in flight at once under the other engines. None: `queue_depth`, but at most 16.
        label: part of the names of this process's directories.
        engine: `io_uring`, `threads` or `python`. None: the value of the environment variable WINDLASS_DISK_ENGINE,
            else the first engine that works.

    Raises:
        StorageError: `paths` is empty or not a list; a path is a file, not writable or full; a number is out of range;
            or the engine is unknown or does not work.
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
        # Close also at exit, even after an exception, and when the last reference to the tier is gone.
        weakref.finalize(self, self._transfers.close)

    def allocate(self, nbytes: int, name: str) -> Extent:
        """Allocate `nbytes` bytes, rounded up to pages of 4096. The extent has no contents until it is written.

        Args:
            name: name of the extent in messages.

        Raises:
            StorageError: `nbytes` is negative, or a disk has too little space. The message gives the disk, the
                requested and the free bytes, and advice.
        """
        if nbytes < 0:
            raise StorageError(f"{name} cannot have {nbytes} bytes on disk; request 0 or more")
        with self._lock:
            self._transfers.check_usable()
            size = page_up(nbytes)
            self._stripes.resize(max(self._allocator.find_free(size) + size, self._allocator.end, self._reserved), name)
            extent = Extent(name, nbytes, self._allocator.allocate(size), size)
            self._transfers.extents.add(extent)
            return extent

    def reserve(self, nbytes: int) -> None:
        """Reserve space for `nbytes` bytes in total, including the allocated ones, so that a full disk fails early.

        `nbytes` must count each extent as whole pages of 4096 bytes.

        Raises:
            StorageError: as in `allocate`.
        """
        with self._lock:
            self._transfers.check_usable()
            reserved = max(self._reserved, page_up(nbytes))
            self._stripes.resize(max(self._allocator.end, reserved), "all offloaded tensors")
            self._reserved = reserved

    def free(self, extent: Extent) -> None:
        """Wait for an extent's transfers, then free its space."""
        _wait_until_writable(extent)
        with self._lock:
            self._transfers.check_usable(extent)
            for transfer in list(extent.transfers):
                transfer.finish()
            self._transfers.extents.remove(extent)
            self._allocator.free(extent.start, extent.allocated_bytes)
            self._stripes.resize(max(self._allocator.end, self._reserved), extent.name)

    def discard(self, extent: Extent) -> None:
        """Wait for an extent's transfers, then mark all its bytes as never written. The extent stays allocated."""
        _wait_until_writable(extent)
        with self._lock:
            self._transfers.check_usable(extent)
            for transfer in list(extent.transfers):
                transfer.finish()
            extent.written_ranges = ByteRanges()

    def write(self, extent: Extent, offset: int, source: torch.Tensor, *, sums: PageSums | None = None) -> Pending:
        """Start writing a tensor's bytes at `offset` bytes into the extent.

        Args:
            offset: any byte. A partial page at each end of the range costs the write of a page, and a read if the page
                has other contents.
            source: contiguous, on the CPU, of any dtype. It must not change until the transfer has finished.
            sums: current checksums of all of `source`. The engine then computes none.

        Raises:
            StorageError: the range exceeds the extent, `source` is not contiguous on the CPU, or the other contents of
                a partial page can't be read. Other disk errors are raised by `poll` and `wait` of the result.
        """
        _wait_until_writable(extent)
        return self._transfers.start(True, extent, offset, source, sums)

    def read(self, extent: Extent, offset: int, into: torch.Tensor, *, sums: PageSums | None = None) -> Pending:
        """Start reading from `offset` bytes into the extent, as many bytes as the tensor `into` has.

        Args:
            offset: any byte, as in `write`.
            into: contiguous, on the CPU, of any dtype. Its contents are undefined until the transfer has finished.
            sums: result of `page_sums`. The engine then compares nothing, and `compare` must follow.

        Raises:
            StorageError: the range exceeds the extent or was never written, or `into` is not contiguous on the CPU.
                Disk errors are raised by `poll` and `wait`, as `DamageError` if the disk returned other or fewer bytes
                than were written.
        """
        return self._transfers.start(False, extent, offset, into, sums)

    def page_sums(self, extent: Extent, into: torch.Tensor) -> PageSums | None:
        """Return the stored checksums for a `read` into `into` from the start of an extent; None if the engine must
        compare.

        Also None if `into` is not whole pages at a page boundary. The optimizer update that changes `into` compares and
        renews the checksums of the changed pages, while they are in the CPU cache ([Note: checksums of pages]).
        """
        nbytes = into.numel() * into.element_size()
        if self._engine_choice.name == "python" or not can_sum_pages() or nbytes % PAGE or into.data_ptr() % PAGE:
            return None
        return PageSums(into, extent.page_checksums[: nbytes // PAGE])

    def compare(self, extent: Extent, sums: PageSums) -> None:
        """Compare the pages of a finished read that no update has compared.

        Raises:
            DamageError: a page is damaged, as found here or by an update.
        """
        compare_pages(sums)
        if (page := sums.first_damaged()) is not None:
            raise self._transfers.damage_error(extent, page, sums.memory.numel())

    def read_unguarded(self, extent: Extent, offset: int, into: torch.Tensor) -> None:
        """Read and wait. Disk errors are raised here, also by a `DeferredFailureTier`."""
        self._transfers.start(False, extent, offset, into).wait()

    def allocate_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate `[nbytes]` uint8 memory for fast transfers: whole pages, registered with the kernel if possible.

        The memory is zero at first and is freed with its last view.

        Raises:
            StorageError: there is not enough memory.
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
                    logger.debug("disk buffers are not registered (%s; check ulimit -l)", error_name(-place))
            return tensor

    def measure_rates(self, nbytes: int = 256 << 20, *, before_timed: Callable[[], None] | None = None) -> IoRates:
        """Measure and return the rates of writing and then reading `nbytes` on the idle tier. The space is written once
        before the timed writes.

        The measurement temporarily uses that space and a buffer of at most 64 MiB. `io_rates` does not include it.

        Args:
            before_timed: function called before the timed writes, and again before the timed reads.
        """
        with self._lock:
            before, size = self._transfers.totals(), page_up(max(nbytes, 1))
            extent = self.allocate(size, "a measurement of the disk's rate")
            try:
                buffer, found = self.allocate_buffer(min(size, _MEASURED_AT_ONCE)), IoRates()
                for write, counts in ((True, False), (True, True), (False, True)):
                    if counts and before_timed is not None:
                        before_timed()
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
        """Return bytes and times since the last reset. `reset` starts a new measurement."""
        now = self._transfers.totals()
        found = now.since(self._rates_at_reset)
        if reset:
            self._rates_at_reset = now
        return found

    def description(self) -> str:
        """Describe the engine, the reason for it, the I/O mode and the paths in one line."""
        how = "direct" if self._stripes.is_direct else "through the page cache"
        return (
            f"{self._engine_choice.name} ({self._engine_choice.reason}), {how}, to "
            f"{', '.join(self._stripes.path_names)}"
        )

    def directories(self) -> list[Path]:
        """Return this process's directories, one for each path. `close` removes them."""
        return self._stripes.directories

    def close(self) -> None:
        """Cancel waiting transfers, wait for those in flight, and free the space. All stored data is lost.

        Failures that no call has raised yet are logged. Closing again does nothing.
        """
        self._transfers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _wait_until_writable(extent: Extent) -> None:
    """Wait until the extent may be overwritten or freed.

    The caller must not hold the tier's lock, because the reader of the extent needs the lock to finish.
    """
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
        raise StorageError(f"paths of a disk tier are {paths!r}; pass a list with at least one directory")
    if block < PAGE or block % PAGE or block > _LARGEST_BLOCK:
        raise StorageError(f"block_size of a disk tier is {block}; pass a multiple of {PAGE}, at most {_LARGEST_BLOCK}")
    if not 1 <= depth <= 4096 or not 1 <= threads <= 256:
        raise StorageError(f"queue_depth is {depth} and threads {threads}; pass 1 to 4096, and 1 to 256")
