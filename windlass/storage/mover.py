"""Moves tensors between memory and extents: starts transfers, keeps those that meet in order, notes how they went."""

from __future__ import annotations

import errno
import os
import threading

import torch

from windlass.base.errors import DamageError, StorageError
from windlass.base.log import logger
from windlass.base.pending import DONE, Pending
from windlass.base.raw_memory import why_unusable
from windlass.storage.engine import Engine
from windlass.storage.failure import advice, error_name, in_words, is_damage
from windlass.storage.memory import aligned_buffer
from windlass.storage.python_engine import Span
from windlass.storage.rates import Rates
from windlass.storage.space import PAGE, cut_at_pages, page_down, page_up
from windlass.storage.stripes import Stripes
from windlass.storage.transfer import Edge, Extent, Transfer


class Mover:
    """What a tier is beneath its space: files, the engine that moves blocks, and what is under way.

    Nothing here refers to the tier, so that a tier that nobody holds any more ends at once, and this after it.

    Attributes:
        lock: held by whoever changes anything.
        live: every extent of the tier.
        owner: the only process that may use it.
    """

    def __init__(self, stripes: Stripes, engine: Engine) -> None:
        self._stripes, self._engine = stripes, engine
        self.lock = threading.RLock()
        self.live: set[Extent] = set()
        self.owner = os.getpid()
        self._moved = [0, 0]  # bytes of transfers that succeeded: reads, writes
        self._failed: list[Transfer] = []
        self._open = True

    def check(self, extent: Extent | None = None) -> None:
        """Raises StorageError if this can't be used here and now, or no longer has the extent."""
        if os.getpid() != self.owner:
            raise StorageError(
                f"a disk tier of process {self.owner} can't be used in {os.getpid()}, forked from it; open one there"
            )
        if not self._open:
            raise StorageError("the disk tier is closed, and what it held is gone; open another")
        if extent is not None and extent not in self.live:
            raise StorageError(
                f"{extent.what} is no longer on this disk tier (freed, or of another one); allocate it anew"
            )

    def start(self, write: bool, extent: Extent, first: int, tensor: torch.Tensor) -> Pending:
        """Start moving all bytes of `tensor` to or from the extent, from its byte `first` on."""
        data = _bytes_of(tensor, extent)
        last = first + data.numel()
        with self.lock:
            self.check(extent)
            if first < 0 or last > extent.nbytes:
                raise StorageError(
                    f"bytes {first} to {last} of {extent.what} were asked for, but it has {extent.nbytes} on disk; "
                    "stay within them"
                )
            if first == last:
                return DONE
            for transfer in list(extent.transfers):
                if transfer.meets(write, first, last):
                    transfer.finish()
            self.reap(extent)
            gap = None if write else extent.written.gap(first, last)
            if gap is not None:
                raise StorageError(
                    f"bytes {gap[0]} to {gap[1]} of {extent.what} are read but hold nothing: they were never written, "
                    "or writing them failed; write them first"
                )
            return self._submit(write, extent, first, data)

    def reap(self, extent: Extent) -> None:
        """Find out what has finished, so that its tensors are let go."""
        for transfer in list(extent.transfers):
            if transfer.request is not None and transfer.request.done():
                self._settle(transfer)

    def totals(self) -> Rates:
        """Since the beginning."""
        with self.lock:
            for extent in self.live:
                self.reap(extent)
            read, write, reading, writing, busy = self._engine.totals()
            return Rates(self._moved[0], self._moved[1], read, write, reading, writing, busy)

    def close(self) -> None:
        """Cancel what waits, await what is in flight, give the space back; log failures that nobody was told of."""
        if os.getpid() != self.owner or not self._open:
            return
        with self.lock:
            self._open = False
            self._engine.close()
            for extent in self.live:
                self.reap(extent)
            self._stripes.close()
            for transfer in self._failed:
                if not transfer.told and transfer.error is not None:
                    logger.error("nobody waited for this, and it went wrong: %s", transfer.error)
            self._failed, self.live = [], set()

    def _submit(self, write: bool, extent: Extent, first: int, data: torch.Tensor) -> Transfer:
        parts, (body, end) = cut_at_pages(first, first + data.numel())
        edges = [self._edge(write, extent, low, data[low - first : high - first]) for low, high in parts]
        spans = self._spans(extent, body, end, data.data_ptr() + body - first)
        for edge in edges:
            spans += self._spans(extent, edge.page, edge.page + PAGE, edge.memory.data_ptr())
        transfer = Transfer(write, extent, first, first + data.numel(), data, edges, None, self._settle)
        transfer.request = self._engine.submit(write, spans)
        extent.transfers.append(transfer)
        return transfer

    def _edge(self, write: bool, extent: Extent, first: int, part: torch.Tensor) -> Edge:
        """A page that is partly asked for. One to be written must hold what else is there."""
        page = page_down(first)
        edge = Edge(page, first - page, aligned_buffer(PAGE)[0], part)
        if write:
            end = first + part.numel()
            if extent.written.touch(page, first) or extent.written.touch(end, page + PAGE):
                old = Transfer(False, extent, page, page + PAGE, edge.memory, [], None, self._settle)
                old.request = self._engine.submit(False, self._spans(extent, page, page + PAGE, edge.memory.data_ptr()))
                extent.transfers.append(old)
                old.wait()
            edge.fill()
        return edge

    def _spans(self, extent: Extent, first: int, last: int, address: int) -> list[Span]:
        """Whole pages `[first, last)` of an extent, as the engine moves them."""
        pieces = self._stripes.locate(extent.start + first, extent.start + last)
        sums = extent.sums.data_ptr() + first // PAGE * extent.sums.itemsize
        return [
            (p.file, p.offset, address + p.start, p.nbytes, sums + p.start // PAGE * extent.sums.itemsize)
            for p in pieces
        ]

    def _settle(self, transfer: Transfer) -> None:
        """Note how a finished transfer went; once."""
        with self.lock:
            request, extent = transfer.request, transfer.extent
            if request is None:
                return
            failure = request.failure()
            if failure is None:
                self._moved[transfer.write] += transfer.last - transfer.first
                if transfer.write:
                    extent.written.add(transfer.first, transfer.last)
                else:
                    for edge in transfer.edges:
                        edge.deliver()
            else:
                if transfer.write:  # what shared its first or last page may be torn too
                    extent.written.remove(page_down(transfer.first), page_up(transfer.last))
                transfer.error = self._explain(transfer, *failure)
                if failure[0] != errno.ECANCELED:
                    self._failed.append(transfer)
            extent.transfers.remove(transfer)
            transfer.data, transfer.edges = None, []
            transfer.request = None  # last: who polls without the lock then finds everything done

    def _explain(self, transfer: Transfer, error: int, file: int, offset: int, done: int) -> StorageError:
        doing, names = "writing" if transfer.write else "reading", self._stripes.names
        where = names[file] if file < len(names) else "a closed tier"
        damaged = is_damage(error) and not transfer.write
        return (DamageError if damaged else StorageError)(
            f"{doing} {in_words(transfer.last - transfer.first)} of {transfer.extent.what} failed at byte "
            f"{offset + done} of the file on {where}{self._holding(transfer, file, offset + done) if damaged else ''}: "
            f"{error_name(error)}; {advice(error)}"
        )

    def _holding(self, transfer: Transfer, file: int, offset: int) -> str:
        """What lies in a page of a file, as far as its extent can tell."""
        extent = transfer.extent
        first = page_down(self._stripes.position(file, offset) - extent.start)
        last = min(first + PAGE, extent.nbytes)
        names = extent.describe(first, last) if extent.describe is not None else ""
        return f" (bytes {first} to {last} of it{', of ' if names else ''}{names})"


def _bytes_of(tensor: torch.Tensor, extent: Extent) -> torch.Tensor:
    """`[bytes]` uint8 view of a tensor's memory."""
    if why := why_unusable(tensor):
        raise StorageError(
            f"{extent.what} can't be moved from or to a {tensor.dtype} tensor of shape {list(tensor.shape)}: it {why}"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)
