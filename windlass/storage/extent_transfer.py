"""A place on the disk, and one reading or writing of a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from windlass.base.errors import StorageError
from windlass.storage.byte_ranges import ByteRanges
from windlass.storage.extent_allocator import PAGE, page_down, page_up
from windlass.storage.io_engine import IoRequest


@dataclass(eq=False)
class Extent:
    """Bytes of a tier that belong to one thing, from `allocate` until `free`.

    Attributes:
        what: its name in messages.
        nbytes: how many bytes it has.
        start: where it begins among the tier's bytes; a whole page.
        size: what it takes of them: whole pages.
        written: which of its bytes have a value.
        sums: a checksum of every page, as it was last written. See [Note: checksums of pages].
        transfers: what was started on it and not yet found to be finished.
        guard: called before anything of it is written over or freed; returns when that may be.
        describe: names what lies in bytes `[first, last)` of it, for messages.

    [Note: checksums of pages] A disk may return other bytes than were written: flipped bits, an old version of a block
    whose write was lost, a block of another file. So the engine takes a checksum of every page that it writes, from the
    memory that is to be written, and compares it with that of what it reads. All transfers are of whole pages, so that
    no checksum is ever of a part of what was moved. They are in memory only, as the files are of use to this process
    only, and take a thousandth of what is on disk.
    """

    name: str
    nbytes: int
    start: int
    allocated_bytes: int
    written_ranges: ByteRanges = field(default_factory=ByteRanges)
    transfers: list[DiskTransfer] = field(default_factory=list)
    wait_until_writable: Callable[[], None] | None = None
    describe_content: Callable[[int, int], str] | None = None
    page_checksums: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.page_checksums = torch.empty(self.allocated_bytes // PAGE, dtype=torch.int32)


@dataclass(frozen=True, eq=False)
class PartialPage:
    """A page of which only a part is asked for; it passes through memory of its own.

    Attributes:
        page: where in the extent the page begins, in bytes.
        low: where in the page the part begins, in bytes.
        memory: `[4096]` uint8, page-aligned.
        part: uint8 view of the caller's tensor.
    """

    page_offset: int
    offset_in_page: int
    page_buffer: torch.Tensor
    part: torch.Tensor

    def copy_in(self) -> None:
        """Bring the part into the page."""
        self.page_buffer[self.offset_in_page : self.offset_in_page + self.part.numel()].copy_(self.part)

    def copy_out(self) -> None:
        """Bring the part to where it was asked for."""
        self.part.copy_(self.page_buffer[self.offset_in_page : self.offset_in_page + self.part.numel()])


@dataclass(eq=False)
class DiskTransfer:
    """One request, as a `Pending`. Holds its tensor until it is found finished.

    Attributes:
        first, last: bytes of the extent, half open.
        request: of the engine; None once it was found finished.
        settle: notes how it went; called once.
        error: what went wrong, if anything did.
        told: whether the error was raised.
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
        """True once finished.

        Raises:
            StorageError: it failed; says where, why and what to do. So does every later call.
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
        """Block until finished. Raises as `poll` does."""
        self.finish()
        self._raise()

    def finish(self) -> None:
        """Block until finished, well or not."""
        self._check_process()
        request = self.request
        if request is not None:
            while not request.wait(0.2):  # in slices, so that Ctrl-C is heard
                pass
            self.on_finished(self)

    def conflicts_with(self, write: bool, first: int, last: int) -> bool:
        """Whether this must be over before another on `[first, last)` may begin: they share a page, and one writes."""
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
