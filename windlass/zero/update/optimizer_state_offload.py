"""Tiers of master weights and optimizer states between steps, and their transfer to memory for a step.

[Note: records on NVMe] An optimizer needs its tensors in memory. Tensors on the device or host tier always are.
Tensors on NVMe are loaded batch by batch: during the update of one batch, the next batches are read and earlier
batches are written. The master weights of a chunk and all non-scalar tensors that the optimizer put into its `state`
are one contiguous record, so states of any optimizer can be on NVMe.

[Note: prefetch of records] Only this file changes records on NVMe, so a record may be read at any time before its step.
If a step follows the backward, the read starts as soon as the gradient of the unit is reduced and the staging pool has
room, while the backward continues. The last writes of a step continue in the next forward. The disk tier orders later
reads of the same bytes after these writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from windlass.base.device_memory import (
    DeviceMemoryLedger,
    copy_to_host,
    device_has_own_memory,
    empty_host_tensor,
    emulated_device_memory,
)
from windlass.base.pending import DONE, Pending
from windlass.base.trace_ranges import traced
from windlass.kernels.page_sums import PageSums
from windlass.storage.disk_error_messages import abbreviate_names
from windlass.storage.disk_tier import DiskTier
from windlass.storage.extent_allocator import page_up
from windlass.storage.extent_transfer import Extent
from windlass.storage.slot import Slot, Tier
from windlass.storage.staging_memory import aligned_buffer
from windlass.storage.staging_pool import StagingPool
from windlass.zero.update.update_chunk import UpdateChunk

_ALIGN = 64  # bytes
_SPARE = 0.25  # fraction of the staging memory that `read_ahead` leaves free for parameters during a backward
_SLACK = 4 * _ALIGN  # bytes reserved for the alignment of the states of one fragment


@dataclass(frozen=True)
class _RecordEntry:
    """Location of one tensor in a record.

    Attributes:
        state_key: parameter under which the optimizer's `state` has the tensor; None for the master weights.
        key: name of the state ("exp_avg"); empty for the master weights.
        offset: offset in the record, in bytes.
    """

    state_key: nn.Parameter | None
    key: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    nbytes: int

    def view_in(self, record: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of `record`, the bytes of its record (uint8)."""
        return record[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


_Found = tuple[nn.Parameter | None, str, torch.Tensor]  # tensor to store: state_key, key, tensor


@dataclass
class _StateRecord:
    """Record of a chunk on NVMe.

    Attributes:
        entries: its tensors, in order of their offsets.
        nbytes: bytes up to the end of the last tensor, rounded up to full pages. The extent may be larger.
        extent: its location; None until the first write.
        discarded: True if the record has no content until it is written again.
    """

    entries: list[_RecordEntry] = field(default_factory=list)
    nbytes: int = 0
    extent: Extent | None = None
    discarded: bool = False
    _grouped: tuple[list[_RecordEntry], dict[nn.Parameter | None, list[_RecordEntry]]] = field(
        default_factory=lambda: ([], {})
    )

    def of(self, state_key: nn.Parameter) -> list[_RecordEntry]:
        """Return the record entries of one parameter. They are grouped once, because a chunk may have thousands of
        parameters.
        """
        if self._grouped[0] is not self.entries:
            self._grouped = self.entries, {}
            for entry in self.entries:
                self._grouped[1].setdefault(entry.state_key, []).append(entry)
        return self._grouped[1].get(state_key, [])


@dataclass
class _FetchedChunk:
    """Chunk from the start of its transfer to memory until it is stored or discarded.

    Attributes:
        record: staging buffer with the chunk's record; None if the chunk is not on NVMe.
        pending: read of the record.
        sums: checksums of the record that are not compared yet; None if there are none.
        own: staging buffer with the chunk's gradient; None unless the gradient was read from NVMe.
        gradient: chunk's part of the reduced gradient, `[chunk.numel]`; None if there is none or none was requested.
        gradient_pending: transfer of the gradient.
    """

    chunk: UpdateChunk
    record: torch.Tensor | None
    pending: Pending
    sums: PageSums | None = None
    own: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    gradient_pending: Pending = DONE


@dataclass(frozen=True)
class StateRecordOnDisk:
    """Handle of a chunk's current record on NVMe, for a thread that reads the record before it is overwritten.

    Attributes:
        extent: location of the record.
    """

    extent: Extent
    _tier: DiskTier
    _entries: tuple[_RecordEntry, ...]
    _nbytes: int

    def read(self) -> dict[tuple[nn.Parameter | None, str], torch.Tensor]:
        """Return the tensors of the record in new memory, by state key and name; the master weights by `(None, "")`.

        Raises:
            StorageError: the record cannot be read.
        """
        buffer, _ = aligned_buffer(max(self._nbytes, 1))
        self._tier.read_unguarded(self.extent, 0, buffer[: self._nbytes])
        return {(entry.state_key, entry.key): entry.view_in(buffer) for entry in self._entries}


@dataclass(frozen=True)
class StateOffloadCallbacks:
    """Callables of the model that the transfer of optimizer states calls.

    Attributes:
        state_bytes: Returns the bytes of optimizer states that an element will have, for a dtype of master weights.
            Space for them is allocated with the first write of a chunk, so that a full disk raises before a step.
        on_fetched: Called with each chunk when its tensors are in memory, also for chunks that always are.
        state_name_of: Returns the parameter name of a state key of a chunk, for messages.
    """

    state_bytes: Callable[[torch.dtype], int] = lambda dtype: 0
    on_fetched: Callable[[UpdateChunk], None] = lambda chunk: None
    state_name_of: Callable[[UpdateChunk, nn.Parameter], str] = lambda chunk, state_key: "?"


class OptimizerStateOffload:
    """Transfer of chunks between their tiers and memory.

    Args:
        device: device of the model.
        ledger: receives the bytes of optimizer states on an emulated device.
        tier: disk tier; None if no chunk is on NVMe.
        staging: pool of host buffers for transfers from and to NVMe; None if no chunk is on NVMe.
        pin: page-lock host memory.
        callbacks: callables of the model.

    Attributes:
        states: the optimizer's states, by state key. Non-scalar tensors of a chunk on NVMe are included only while the
            chunk is in memory.
    """

    def __init__(
        self,
        device: torch.device,
        ledger: DeviceMemoryLedger,
        tier: DiskTier | None,
        staging: StagingPool | None,
        *,
        pin: bool,
        callbacks: StateOffloadCallbacks,
    ) -> None:
        self._device, self._ledger, self._tier, self._staging, self._pin = device, ledger, tier, staging, pin
        self._callbacks, self._state_bytes = callbacks, cache(callbacks.state_bytes)
        self.states: MutableMapping[Any, Any] = {}
        self._records: dict[int, _StateRecord] = {}
        self._fetched: dict[int, _FetchedChunk] = {}
        self._read_ahead_queue: deque[UpdateChunk] = deque()  # chunks to read ahead once there is room

    def read_ahead(self, chunks: list[UpdateChunk]) -> None:
        """Start to read the records of `chunks`, given in the order of the next step, while the staging pool has room.

        The other chunks are read ahead by later calls, when there is room.
        """
        self._read_ahead_queue += [
            c for c in chunks if c.tier is Tier.NVME and c.master is None and id(c) not in self._fetched
        ]
        # Strictly in order: a later chunk must not take the staging memory that the first batches of the step need.
        while self._read_ahead_queue and self._has_room([self._read_ahead_queue[0]], spare=_SPARE):
            self._start_fetch(self._read_ahead_queue.popleft())

    def iterate_batches(
        self, batches: list[list[UpdateChunk]], *, sums_pages: bool = False
    ) -> Iterator[list[UpdateChunk]]:
        """Yield each batch once its master weights, states and gradients are in memory.

        A batch is stored on its tier when the next batch is requested.

        Args:
            sums_pages: the caller compares and renews the checksums of `page_sums` wherever it changes a record.
        """
        self._recover_failed_step()
        self._read_ahead_queue.clear()  # the loop below reads the remaining chunks
        before = self._record_bytes(batches)
        ahead = 0  # number of batches whose transfer has started
        for number, batch in enumerate(batches):
            # The next batch is always read during the update of the current batch, later batches only if there is room.
            while ahead < len(batches) and (ahead < number + 2 or self._has_room(batches[ahead])):
                for chunk in batches[ahead]:
                    self._start_fetch(chunk)
                    self._start_gradient_fetch(chunk)
                ahead += 1
            for chunk in batch:
                self._finish_fetch(chunk, compare=not sums_pages)
            yield batch
            for chunk in batch:
                self._start_store(chunk)
        self._account([chunk for batch in batches for chunk in batch])
        if self._staging is not None and self._record_bytes(batches) != before:
            self._staging.free_returned()  # records grew, e.g. in the first step: free the smaller buffers

    def _record_bytes(self, batches: list[list[UpdateChunk]]) -> int:
        """Return the bytes of the records of these batches on NVMe."""
        return sum(self._records[id(chunk)].nbytes for batch in batches for chunk in batch if chunk.tier is Tier.NVME)

    @contextmanager
    def resident(
        self,
        chunks: list[UpdateChunk],
        *,
        changes: bool = True,
        on_resident: Callable[[], None] = lambda: None,
        room: int = 0,
    ) -> Iterator[None]:
        """Context with master weights and states of `chunks` in memory, all at once.

        Args:
            changes: store the changed values; otherwise the data on disk stays unchanged.
            on_resident: called when all chunks are in memory. If it raises, no data is written to disk.
            room: minimum bytes of the staging buffer for a chunk on NVMe.
        """
        offloaded = [chunk for chunk in chunks if chunk.master is None]  # chunks that are already in memory stay there
        for chunk in offloaded:
            self._start_fetch(chunk, room=room)
        for chunk in chunks:
            self._finish_fetch(chunk)
        try:
            on_resident()
        except BaseException:
            for chunk in offloaded:
                self._discard_fetched(chunk)
            raise
        try:
            yield
        finally:
            for chunk in offloaded:
                (self._start_store if changes else self._discard_fetched)(chunk)
            if self._staging is not None:
                self._staging.wait_all()  # raises if a write failed, unless the disk tier defers failures

    @contextmanager
    def overwritten(
        self,
        chunk: UpdateChunk,
        states: dict[nn.Parameter, dict[str, torch.Tensor]],
        *,
        on_resident: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Context with a chunk in memory, whose values the caller replaces. The new values are stored afterwards.

        Args:
            states: the non-scalar states that the chunk has from now on, by state key and name, as meta tensors. Other
                non-scalar states are dropped. Missing states, and those of another shape or dtype, become zeros.
            on_resident: as in `resident`.
        """
        requested = [(state_key, key, like) for state_key, state in states.items() for key, like in state.items()]
        master: _Found = (None, "", torch.empty(chunk.numel, dtype=chunk.dtype, device="meta"))
        # The staging buffer gets room for the new record, so that the states can be created in place.
        with self.resident([chunk], on_resident=on_resident, room=_record_end(_lay_out([master, *requested]))):
            for state_key in chunk.state_keys:
                state, likes = self.states.setdefault(state_key, {}), states.get(state_key, {})
                for key in [
                    key
                    for key, value in state.items()
                    if is_offloadable(value) and not _same_form(value, likes.get(key))
                ]:
                    del state[key]
                state.update({key: like for key, like in likes.items() if key not in state})
            self._materialize_states(chunk)
            yield

    def page_sums(self, chunk: UpdateChunk) -> PageSums | None:
        """Return the checksums of a chunk's record in memory if they have not been compared yet, else None."""
        fetched = self._fetched.get(id(chunk))
        return None if fetched is None else fetched.sums

    def compare_pages(self, chunk: UpdateChunk) -> None:
        """Compare a chunk's record in memory with its checksums, before a change that does not renew them."""
        fetched = self._fetched.get(id(chunk))
        if fetched is not None and fetched.sums is not None:
            self._compare(chunk, fetched.sums)
            fetched.sums = None

    def describe_state(self, chunk: UpdateChunk, state_key: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer state of a parameter of a chunk. Tensors on NVMe are replaced by meta tensors."""
        state = dict(self.states.get(state_key, {}))
        if chunk.master is None:
            for entry in self._records[id(chunk)].of(state_key):
                state[entry.key] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return state

    def record_of(self, chunk: UpdateChunk) -> StateRecordOnDisk | None:
        """Return a chunk's record on NVMe; None for a chunk in memory."""
        record = self._records.get(id(chunk))
        if chunk.master is not None or record is None or record.extent is None or self._tier is None:
            return None
        return StateRecordOnDisk(record.extent, self._tier, tuple(record.entries), record.nbytes)

    def record_nbytes(self, chunk: UpdateChunk, dtype: torch.dtype) -> int:
        """Return the bytes on NVMe of a chunk with master weights of `dtype`, including its future states."""
        per_piece = [_align_up(piece.numel * self._state_bytes(dtype)) + _SLACK for piece in chunk.pieces()]
        return _align_up(chunk.numel * dtype.itemsize) + sum(per_piece)

    def tensors(self, chunk: UpdateChunk) -> list[torch.Tensor]:
        """Return the non-scalar optimizer states of a chunk in memory."""
        return [tensor for _, _, tensor in self._tensors_to_store(chunk)[1:]]

    def inventory(self, chunks: list[UpdateChunk]) -> Iterator[tuple[UpdateChunk, str, int]]:
        """Yield the chunk, name and bytes of every non-scalar optimizer state, in memory or on NVMe."""
        for chunk in chunks:
            if chunk.master is None:
                yield from (
                    (chunk, e.key, e.nbytes) for e in self._records[id(chunk)].entries if e.state_key is not None
                )
            else:
                yield from (
                    (chunk, key, t.numel() * t.element_size()) for _, key, t in self._tensors_to_store(chunk)[1:]
                )

    def store(self, chunk: UpdateChunk) -> None:
        """Start to write a new chunk to NVMe, and free its master weights in memory. Does nothing for other tiers."""
        if chunk.tier is Tier.NVME:
            self._start_store(chunk)

    def _recover_failed_step(self) -> None:
        """Store the chunks that a failed step left in memory, and drop their gradients.

        Records that are only being read, e.g. ahead of this step, equal the contents on NVMe and stay in flight.
        """
        for visit in list(self._fetched.values()):
            if visit.chunk.tier is Tier.NVME and visit.chunk.master is None:  # record not unpacked, so unchanged
                self._drop_gradient(visit)
            else:
                self._start_store(visit.chunk)

    def _has_room(self, batch: list[UpdateChunk], *, spare: float = 0.0) -> bool:
        """Return True if a batch can be read early: all of it is on NVMe, and the staging pool has room for it.

        Args:
            spare: fraction of the staging pool that must stay free.
        """
        if self._staging is None or any(chunk.tier is not Tier.NVME for chunk in batch):
            return False
        waiting = [chunk for chunk in batch if id(chunk) not in self._fetched]
        requested = sum(self._records[id(chunk)].nbytes for chunk in waiting)
        return self._staging.has_room(requested + int(spare * self._staging.limit))

    # From the tiers to memory

    def _start_fetch(self, chunk: UpdateChunk, *, room: int = 0) -> None:
        """Start to read a chunk's record from NVMe, unless the read has started. Does nothing for other tiers.

        Args:
            room: minimum bytes of the staging buffer.
        """
        if chunk.tier is not Tier.NVME or id(chunk) in self._fetched:
            return
        record = self._records[id(chunk)]
        assert record.extent is not None and self._tier is not None and self._staging is not None
        buffer = self._staging.acquire(max(record.nbytes, room), torch.uint8)
        try:
            on_resident = buffer[: record.nbytes]
            if record.discarded:  # there is nothing to read: the caller is about to replace all values
                on_resident.zero_()
                pending: Pending = DONE
                sums: PageSums | None = None
            else:
                sums = self._tier.page_sums(record.extent, on_resident)
                pending = self._tier.read(record.extent, 0, on_resident, sums=sums)
        except BaseException:
            self._staging.release(buffer)
            raise
        self._fetched[id(chunk)] = _FetchedChunk(chunk, buffer, pending, sums)

    def _start_gradient_fetch(self, chunk: UpdateChunk) -> None:
        """Start to copy the chunk's part of the reduced gradient to the memory in which the chunk is updated.

        Does nothing if the unit has no gradient. A gradient that is in that memory already is not copied.
        """
        full = chunk.slot.stepped
        if full is None:
            return
        visit = self._fetched.setdefault(id(chunk), _FetchedChunk(chunk, None, DONE))
        is_stored = isinstance(full, Slot)
        source = full.tensor if isinstance(full, Slot) else full
        if source is None:  # the gradient is on NVMe
            assert isinstance(full, Slot) and self._staging is not None
            visit.gradient = visit.own = self._staging.acquire(chunk.numel, full.dtype)
            visit.gradient_pending = full.load(visit.gradient, chunk.start)
            return
        visit.gradient = source[chunk.start : chunk.stop]
        # The gradient is on the device and the update in host memory: copy the gradient.
        if not is_stored and chunk.tier is not Tier.DEVICE and device_has_own_memory(self._device):
            on_device, visit.gradient = visit.gradient, empty_host_tensor(chunk.numel, source.dtype, pin=self._pin)
            visit.gradient_pending = copy_to_host(visit.gradient, on_device)

    def _finish_fetch(self, chunk: UpdateChunk, *, compare: bool = True) -> None:
        """Wait for the transfers of a chunk, and set its master weights, states and gradient."""
        visit = self._fetched.get(id(chunk))
        if visit is not None:
            with traced("fetch", "optimizer states"):
                visit.pending.wait()
                visit.gradient_pending.wait()
            if visit.sums is not None and not visit.sums.is_current:  # the read failed and filled the record with NaN
                visit.sums = None
            if compare:
                self.compare_pages(chunk)
            chunk.gradient = visit.gradient
            if visit.record is not None:
                self._unpack(chunk, visit.record)
        self._callbacks.on_fetched(chunk)

    def _compare(self, chunk: UpdateChunk, sums: PageSums) -> None:
        extent = self._records[id(chunk)].extent
        assert self._tier is not None and extent is not None
        self._tier.compare(extent, sums)

    def _unpack(self, chunk: UpdateChunk, buffer: torch.Tensor) -> None:
        """Make the master weights and states of a chunk views of the buffer with its record."""
        for entry in self._records[id(chunk)].entries:
            if entry.state_key is None:
                chunk.master = entry.view_in(buffer)
            else:
                self.states[entry.state_key][entry.key] = entry.view_in(buffer)

    def _materialize_states(self, chunk: UpdateChunk) -> None:
        """Replace meta tensors among a chunk's states by zeros, in its staging buffer if they fit there."""
        stored = self._tensors_to_store(chunk)
        laid = _lay_out(stored)
        visit = self._fetched.get(id(chunk))
        record = visit.record if visit is not None else None
        if record is not None and not (_record_end(laid) <= record.numel() and _fits_in_place(laid, stored, record)):
            record = None
        for entry, (state_key, key, tensor) in zip(laid, stored, strict=True):
            if state_key is not None and tensor.device.type == "meta":
                if record is None:
                    made = torch.empty(entry.shape, dtype=entry.dtype, device=chunk.device)
                else:
                    made = entry.view_in(record)
                self.states[state_key][key] = made.zero_()

    # From memory to the tiers

    def _start_store(self, chunk: UpdateChunk) -> None:
        """Drop the gradient of a chunk. If the chunk is on NVMe, start to write its record and free its tensors."""
        visit = self._fetched.pop(id(chunk), None)
        chunk.gradient = None
        if visit is not None:
            self._drop_gradient(visit)
        if chunk.tier is not Tier.NVME:
            return
        assert self._tier is not None and self._staging is not None
        sums = visit.sums if visit is not None else None
        if sums is not None:
            self._compare(chunk, sums)  # compares the pages that the update left unchanged; raises or records damage
        stored = self._tensors_to_store(chunk)
        record = self._records.setdefault(id(chunk), _StateRecord())
        laid = _lay_out(stored)
        nbytes = _record_end(laid)
        # The optimizer made more states than the extent has room for, or this is the first write.
        if record.extent is None or nbytes > record.extent.nbytes:
            if record.extent is not None:
                self._tier.free(record.extent)
            most = page_up(max(nbytes, self.record_nbytes(chunk, chunk.dtype)))
            record.extent = self._tier.allocate(most, f"master weights and optimizer states of {chunk.name}")
            record.extent.describe_content = partial(_describe, ref(self), ref(chunk))
        record.entries, record.nbytes, record.discarded = laid, nbytes, False
        buffer = visit.record if visit is not None else None
        # Write from the buffer of the read if all tensors are still in their places, else copy them to a new buffer.
        target = buffer
        if target is None or target.numel() < nbytes or not _fits_in_place(laid, stored, target):
            target = self._staging.acquire(nbytes, torch.uint8)
        for entry, (_, _, tensor) in zip(laid, stored, strict=True):
            place = entry.view_in(target)
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)
            if entry.state_key is not None:
                del self.states[entry.state_key][entry.key]  # a view of the buffer, which will be reused
        if buffer is not None and target is not buffer:
            self._staging.release(buffer)
        # Checksums are invalid if the buffer is new or torch has changed it: the I/O engine computes new checksums.
        if sums is not None and not (target is buffer and nbytes == sums.memory.numel() and sums.is_current):
            sums = None
        chunk.master = None
        for state_key in chunk.state_keys:
            state_key.data = state_key.data.new_empty(0)  # may be a view of the buffer, too
        # The pool reuses the buffer after the write. A failure of the write surfaces at the next check.
        self._staging.release(target, self._tier.write(record.extent, 0, target[:nbytes], sums=sums))

    def _drop_gradient(self, visit: _FetchedChunk) -> None:
        """Release the gradient of a chunk, after its transfer has finished."""
        visit.gradient_pending.wait()
        if visit.own is not None and self._staging is not None:
            self._staging.release(visit.own)
        visit.own = visit.gradient = None
        visit.gradient_pending = DONE

    def _discard_fetched(self, chunk: UpdateChunk) -> None:
        """Free the tensors of a chunk on NVMe without storing them. The record on NVMe stays unchanged."""
        visit = self._fetched.pop(id(chunk), None)
        if visit is None or visit.record is None:
            return
        assert self._staging is not None
        self._drop_gradient(visit)
        visit.pending.wait()
        for entry in self._records[id(chunk)].entries:
            if entry.state_key is not None:
                self.states[entry.state_key].pop(entry.key, None)
        chunk.master = None
        self._staging.release(visit.record)

    def describe(self, chunk: UpdateChunk, first: int, last: int) -> str:
        """Return the names of the tensors in bytes `[first, last)` of a chunk's record, for messages."""
        names: list[str] = []
        for entry in self._records[id(chunk)].entries:
            low, high = max(first - entry.offset, 0), min(last - entry.offset, entry.nbytes)
            if low >= high:
                continue
            if entry.state_key is None:
                size = entry.dtype.itemsize
                found = chunk.slot.names_in(chunk.start + low // size, chunk.start - (-high // size))
                names += [f"the master weight of {name}" for name in found]
            else:
                names.append(f"{entry.key} of {self._callbacks.state_name_of(chunk, entry.state_key)!r}")
        return abbreviate_names(names)

    def discard(self) -> None:
        """Mark all records on NVMe as lost. `overwritten` must replace each record before its next use."""
        self.discard_read_ahead()
        for record in self._records.values():
            if record.extent is not None:
                assert self._tier is not None
                self._tier.discard(record.extent)
                record.discarded = True

    def discard_read_ahead(self) -> None:
        """Drop records that were read for the next step. The step reads them again."""
        self._read_ahead_queue.clear()
        for visit in list(self._fetched.values()):
            if visit.chunk.master is None:
                self._discard_fetched(visit.chunk)

    def _tensors_to_store(self, chunk: UpdateChunk) -> list[_Found]:
        """Return the tensors of a chunk to store: its master weights, and all non-scalar tensors of its states."""
        stored: list[_Found] = [(None, "", chunk.values())]
        for state_key in chunk.state_keys:
            for key, value in self.states.get(state_key, {}).items():
                if is_offloadable(value):
                    stored.append((state_key, key, value.contiguous()))
        return stored

    def _account(self, chunks: list[UpdateChunk]) -> None:
        """Record the bytes of optimizer states on an emulated device in the ledger."""
        if emulated_device_memory() is None:
            return
        for chunk in chunks:
            if chunk.tier is Tier.DEVICE:
                state_tensors = self._tensors_to_store(chunk)[1:]
                held = sum(tensor.numel() * tensor.element_size() for _, _, tensor in state_tensors)
                self._ledger.set_held_bytes(f"optimizer states of {chunk.name}", held)


def is_offloadable(value: Any) -> bool:
    """Return True if a state value is offloaded with the master weights: non-empty tensors except scalars."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


def _same_form(value: torch.Tensor, like: torch.Tensor | None) -> bool:
    """Return True if `value` is contiguous and has the shape and dtype of `like`."""
    return like is not None and (value.shape, value.dtype) == (like.shape, like.dtype) and value.is_contiguous()


def _record_end(laid: list[_RecordEntry]) -> int:
    """Return the size of a record in bytes, rounded up to full pages, because a checksum covers a full page."""
    return page_up(laid[-1].offset + laid[-1].nbytes)


def _lay_out(found: list[_Found]) -> list[_RecordEntry]:
    """Return the entries of a record of these tensors, in this order, each aligned to 64 bytes."""
    entries, end = [], 0
    for state_key, key, tensor in found:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(_RecordEntry(state_key, key, tensor.dtype, tensor.shape, end, nbytes))
        end += _align_up(nbytes)
    return entries


def _fits_in_place(laid: list[_RecordEntry], found: list[_Found], record: torch.Tensor) -> bool:
    """Return True if every tensor that is a view of `record` is at its offset in the layout.

    Otherwise, copying one tensor to its place could overwrite another.
    """
    storage = record.untyped_storage().data_ptr()
    return all(
        tensor.device.type == "meta"
        or tensor.untyped_storage().data_ptr() != storage
        or tensor.data_ptr() == entry.view_in(record).data_ptr()
        for entry, (_, _, tensor) in zip(laid, found, strict=True)
    )


def _describe(
    offload: ReferenceType[OptimizerStateOffload], chunk: ReferenceType[UpdateChunk], first: int, last: int
) -> str:
    """Return `OptimizerStateOffload.describe`, or an empty string if the model no longer exists.

    The disk tier stores this function until the tier is closed. With strong references, the model, which closes the
    tier, would stay alive.
    """
    by, of = offload(), chunk()
    return "" if by is None or of is None else by.describe(of, first, last)


def _align_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
