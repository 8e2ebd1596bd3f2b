"""Queue of transfers between memory and extents, which orders conflicting transfers and records their results."""

from __future__ import annotations

import errno
import os
import threading

import torch

from windlass.base.errors import DamageError, StorageError
from windlass.base.log import logger
from windlass.base.native_memory import native_access_problem
from windlass.base.pending import DONE, Pending
from windlass.kernels.page_sums import PageSums
from windlass.storage.disk_error_messages import advice_for, error_name, format_bytes, is_data_lost
from windlass.storage.extent_allocator import PAGE, page_down, page_up, split_at_pages
from windlass.storage.extent_transfer import DiskTransfer, Extent, PartialPage
from windlass.storage.io_engine import IoEngine
from windlass.storage.io_rates import IoRates
from windlass.storage.python_io_engine import BlockSpan
from windlass.storage.staging_memory import aligned_buffer
from windlass.storage.striped_files import StripedFiles


class TransferQueue:
    """Files, I/O engine and running transfers of a tier, without its space allocation.

    It holds no reference to the tier, so that a tier without references is collected at once and closes this queue.

    Attributes:
        lock: held during any change of the state.
        extents: every extent of the tier.
        owner_pid: the only process that may use the queue.
    """

    def __init__(self, stripes: StripedFiles, engine: IoEngine) -> None:
        self._stripes, self._engine = stripes, engine
        self.lock = threading.RLock()
        self.extents: set[Extent] = set()
        self.owner_pid = os.getpid()
        self._transferred_bytes = [0, 0]  # bytes of successful reads and of successful writes
        self._failed_transfers: list[DiskTransfer] = []
        self._open = True

    def check_usable(self, extent: Extent | None = None) -> None:
        """Raise StorageError if this process can't use the queue, the queue is closed, or it does not have `extent`."""
        if os.getpid() != self.owner_pid:
            raise StorageError(
                f"a disk tier of process {self.owner_pid} can't be used in {os.getpid()}, forked from it; open one "
                "there"
            )
        if not self._open:
            raise StorageError("the disk tier is closed and its contents are gone; open another")
        if extent is not None and extent not in self.extents:
            raise StorageError(
                f"{extent.name} is no longer on this disk tier (freed, or of another one); allocate it anew"
            )

    def start(
        self, write: bool, extent: Extent, first: int, tensor: torch.Tensor, sums: PageSums | None = None
    ) -> Pending:
        """Start moving all bytes of `tensor` to or from the extent, from byte `first` of the extent on.

        Args:
            sums: checksums of all of `tensor`, which another module computes and compares; None: the engine does.

        Raises:
            StorageError: the queue cannot be used, the tensor's memory cannot be accessed, the range is not in the
                extent, or bytes to read were never written.
        """
        data = _byte_view(tensor, extent)
        last = first + data.numel()
        with self.lock:
            self.check_usable(extent)
            if first < 0 or last > extent.nbytes:
                raise StorageError(
                    f"bytes {first} to {last} of {extent.name} were requested, but it has {extent.nbytes} on disk; "
                    "stay within them"
                )
            if first == last:
                return DONE
            for transfer in list(extent.transfers):
                if transfer.conflicts_with(write, first, last):
                    transfer.finish()
            self.collect_finished(extent)
            gap = None if write else extent.written_ranges.first_gap(first, last)
            if gap is not None:
                raise StorageError(
                    f"bytes {gap[0]} to {gap[1]} of {extent.name} have no value: they were never written, "
                    "or their last write failed; write them before reading"
                )
            return self._submit(write, extent, first, data, sums)

    def collect_finished(self, extent: Extent) -> None:
        """Record the extent's finished transfers, so that their tensors are freed."""
        for transfer in list(extent.transfers):
            if transfer.request is not None and transfer.request.done():
                self._finish_transfer(transfer)

    def totals(self) -> IoRates:
        """Return the bytes and seconds of all reads and writes since the construction."""
        with self.lock:
            for extent in self.extents:
                self.collect_finished(extent)
            read, write, reading, writing, busy = self._engine.totals()
            return IoRates(self._transferred_bytes[0], self._transferred_bytes[1], read, write, reading, writing, busy)

    def close(self) -> None:
        """Cancel queued blocks, wait for those in flight, and free the space. Log failures that no call has raised."""
        if os.getpid() != self.owner_pid or not self._open:
            return
        with self.lock:
            self._open = False
            self._engine.close()
            for extent in self.extents:
                self.collect_finished(extent)
            self._stripes.close()
            for transfer in self._failed_transfers:
                if not transfer.error_was_raised and transfer.error is not None:
                    logger.error("a transfer failed, and no call waited for it: %s", transfer.error)
            self._failed_transfers, self.extents = [], set()

    def damage_error(self, extent: Extent, page: int, last: int) -> StorageError:
        """Return the error of a read of bytes `[0, last)` of an extent, whose page with index `page` is damaged."""
        read = DiskTransfer(False, extent, 0, last, None, [], None, self._finish_transfer)
        with self.lock:
            (place,) = self._stripes.locate(extent.start + page * PAGE, extent.start + (page + 1) * PAGE)
            return self._build_error(read, errno.EBADMSG, place.file, place.offset, 0)

    def _submit(
        self, write: bool, extent: Extent, first: int, data: torch.Tensor, sums: PageSums | None
    ) -> DiskTransfer:
        parts, (body, end) = split_at_pages(first, first + data.numel())
        edges = [self._partial_page(write, extent, low, data[low - first : high - first]) for low, high in parts]
        spans = self._spans(extent, body, end, data.data_ptr() + body - first)
        if sums is not None:
            spans = [(*span[:4], 0) for span in spans]
            if write:
                extent.page_checksums[body // PAGE : end // PAGE] = sums.renewed
        for edge in edges:
            spans += self._spans(extent, edge.page_offset, edge.page_offset + PAGE, edge.page_buffer.data_ptr())
        transfer = DiskTransfer(write, extent, first, first + data.numel(), data, edges, None, self._finish_transfer)
        transfer.request = self._engine.submit(write, spans)
        extent.transfers.append(transfer)
        return transfer

    def _partial_page(self, write: bool, extent: Extent, first: int, part: torch.Tensor) -> PartialPage:
        """Return the buffer of a partial page. For a write, it is filled with the page's other contents."""
        page = page_down(first)
        edge = PartialPage(page, first - page, aligned_buffer(PAGE)[0], part)
        if write:
            end = first + part.numel()
            if extent.written_ranges.overlaps(page, first) or extent.written_ranges.overlaps(end, page + PAGE):
                old = DiskTransfer(False, extent, page, page + PAGE, edge.page_buffer, [], None, self._finish_transfer)
                old.request = self._engine.submit(
                    False, self._spans(extent, page, page + PAGE, edge.page_buffer.data_ptr())
                )
                extent.transfers.append(old)
                old.wait()
            edge.copy_in()
        return edge

    def _spans(self, extent: Extent, first: int, last: int, address: int) -> list[BlockSpan]:
        """Return the engine's spans for the bytes `[first, last)` of an extent, which are full pages."""
        pieces = self._stripes.locate(extent.start + first, extent.start + last)
        sums = extent.page_checksums.data_ptr() + first // PAGE * extent.page_checksums.itemsize
        return [
            (p.file, p.offset, address + p.start, p.nbytes, sums + p.start // PAGE * extent.page_checksums.itemsize)
            for p in pieces
        ]

    def _finish_transfer(self, transfer: DiskTransfer) -> None:
        """Record the result of a finished transfer, once."""
        with self.lock:
            request, extent = transfer.request, transfer.extent
            if request is None:
                return
            failure = request.failure()
            if failure is None:
                self._transferred_bytes[transfer.write] += transfer.last - transfer.first
                if transfer.write:
                    extent.written_ranges.add(transfer.first, transfer.last)
                else:
                    for edge in transfer.partial_pages:
                        edge.copy_out()
            else:
                # A failed write may also have damaged the rest of its first and last page.
                if transfer.write:
                    extent.written_ranges.remove(page_down(transfer.first), page_up(transfer.last))
                transfer.error = self._build_error(transfer, *failure)
                if failure[0] != errno.ECANCELED:
                    self._failed_transfers.append(transfer)
            extent.transfers.remove(transfer)
            transfer.data, transfer.partial_pages = None, []
            # Clear `request` last: to a poll, which runs without the lock, None means that the result is recorded.
            transfer.request = None

    def _build_error(self, transfer: DiskTransfer, error: int, file: int, offset: int, done: int) -> StorageError:
        doing, names = "writing" if transfer.write else "reading", self._stripes.path_names
        where = names[file] if file < len(names) else "a closed tier"
        damaged = is_data_lost(error) and not transfer.write
        return (DamageError if damaged else StorageError)(
            f"{doing} {format_bytes(transfer.last - transfer.first)} of {transfer.extent.name} failed at byte "
            f"{offset + done} of the file on {where}"
            f"{self._describe_damaged_page(transfer, file, offset + done) if damaged else ''}: "
            f"{error_name(error)}; {advice_for(error)}"
        )

    def _describe_damaged_page(self, transfer: DiskTransfer, file: int, offset: int) -> str:
        """Return the byte range of a damaged page, with the names of the page's contents if its extent has names."""
        extent = transfer.extent
        first = page_down(self._stripes.tier_offset(file, offset) - extent.start)
        last = min(first + PAGE, extent.nbytes)
        names = extent.describe_content(first, last) if extent.describe_content is not None else ""
        return f" (bytes {first} to {last} of it{', of ' if names else ''}{names})"


def _byte_view(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
    """Return a `[bytes]` uint8 view of a tensor's memory."""
    if why := native_access_problem(tensor):
        raise StorageError(
            f"{extent.name} can't be moved from or to a {tensor.dtype} tensor of shape {list(tensor.shape)}: it {why}"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)
