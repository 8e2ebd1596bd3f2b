"""Extents of a disk tier, and transfers of a part of an extent."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from windlass.base import trace_ranges
from windlass.base.errors import StorageError
from windlass.storage.byte_ranges import ByteRanges
from windlass.storage.extent_allocator import PAGE, page_down, page_up
from windlass.storage.io_engine import IoRequest


@dataclass(eq=False)
class Extent:
    """Range of the bytes of a tier, from `allocate` until `free`.

    Attributes:
        name: its name in messages.
        nbytes: number of its bytes.
        start: its offset in the tier's bytes; a multiple of the page size.
        allocated_bytes: `nbytes` rounded up to whole pages.
        written_ranges: bytes that have a value.
        page_checksums: `[pages]` int32, checksum of every page as last written. See [Note: checksums of pages].
        transfers: transfers that were started and not yet found finished.
        failed_reads: number of reads that failed, on a tier that defers failures.
        wait_until_writable: called before any part of the extent is overwritten or freed; returns when that is allowed.
            None: always allowed.
        describe_content: returns names of the contents of bytes `[first, last)` for messages.

    [Note: checksums of pages] A disk may return other bytes than were written: flipped bits, an old version of a block
    whose write was lost, or a block of another file. So the engine stores a checksum of every page that it writes,
    computed from the memory to be written, and compares the page with this checksum when it reads the page. All
    transfers are of whole pages, so a checksum always covers a whole page. Checksums are in memory only, since no other
    process reads the files, and take a thousandth of the bytes on disk. Computing a checksum takes as long as reading
    the page from memory. So a native update compares and computes the checksums of the pages that it changes
    (`PageSums`), while they are in the CPU cache.
    """

    name: str
    nbytes: int
    start: int
    allocated_bytes: int
    written_ranges: ByteRanges = field(default_factory=ByteRanges)
    transfers: list[DiskTransfer] = field(default_factory=list)
    failed_reads: int = 0
    wait_until_writable: Callable[[], None] | None = None
    describe_content: Callable[[int, int], str] | None = None
    page_checksums: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.page_checksums = torch.empty(self.allocated_bytes // PAGE, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class PartialPage:
    """Page of which a transfer needs only a part. It passes through a buffer of its own.

    Attributes:
        page_offset: offset of the page in the extent, in bytes.
        offset_in_page: offset of the part in the page, in bytes.
        page_buffer: `[4096]` uint8, page-aligned.
        part: uint8 view of the caller's tensor.
    """

    page_offset: int
    offset_in_page: int
    page_buffer: torch.Tensor
    part: torch.Tensor

    def copy_in(self) -> None:
        """Copy the part into the page buffer."""
        self.page_buffer[self.offset_in_page : self.offset_in_page + self.part.numel()].copy_(self.part)

    def copy_out(self) -> None:
        """Copy the part from the page buffer to the caller's tensor."""
        self.part.copy_(self.page_buffer[self.offset_in_page : self.offset_in_page + self.part.numel()])


@dataclass(eq=False)
class DiskTransfer:
    """Transfer between a tensor and an extent, as a `Pending`. The tensor is referenced until `on_finished` has run.

    Attributes:
        first, last: byte range of the extent, half open.
        request: request of the I/O engine; None after `on_finished`.
        on_finished: function that records the result and clears `request`. Calling it again does nothing.
        error: error of the transfer, or None.
        error_was_raised: True once a call has raised the error.
    """

    write: bool
    extent: Extent
    first: int
    last: int
    data: torch.Tensor | None
    partial_pages: list[PartialPage]
    request: IoRequest | None
    on_finished: Callable[[DiskTransfer], None]
    error: StorageError | None = None
    error_was_raised: bool = False
    owner_pid: int = field(default_factory=os.getpid)

    def poll(self) -> bool:
        """Return True once the transfer has finished.

        Raises:
            StorageError: the transfer failed, or another process started it. The message gives the reason and advice.
                Every later call raises it again.
        """
        self._check_process()
        request = self.request
        if request is not None:
            if not request.done():
                return False
            self.on_finished(self)
        self._raise()
        return True

    def wait(self) -> None:
        """Wait until the transfer has finished. Raises as `poll` does."""
        self.finish()
        self._raise()

    def finish(self) -> None:
        """Wait until the transfer has finished, without raising its error."""
        self._check_process()
        request = self.request
        if request is not None:
            with trace_ranges.traced("disk", self.extent.name):
                while not request.wait(0.2):  # in slices, so that Ctrl-C is handled
                    pass
            self.on_finished(self)

    def conflicts_with(self, write: bool, first: int, last: int) -> bool:
        """Return True if a new transfer of `[first, last)` must wait for this one: they share a page, and at
        least one of them writes.
        """
        shares = page_down(first) < page_up(self.last) and page_down(self.first) < page_up(last)
        return shares and (write or self.write)

    def _check_process(self) -> None:
        if os.getpid() != self.owner_pid:
            raise StorageError(
                f"a transfer of {self.extent.name} was started by process {self.owner_pid} and can't be awaited in "
                f"{os.getpid()}, forked from it; open a tier of its own there"
            )

    def _raise(self) -> None:
        if self.error is not None:
            self.error_was_raised = True
            raise self.error
