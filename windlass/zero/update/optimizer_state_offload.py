"""Tiers of master weights and optimizer states between steps, and their transfer to memory for a step.

[Note: homes] Every optimizer needs its tensors in memory. Tensors on the device or in host memory are always
resident. Tensors on disk are loaded batch by batch: during the update of one batch, the next batches are read
and earlier ones are written. The state of a parameter is all tensors that the optimizer put into its `state`.
They move with the master weights of their chunk as one contiguous record, so states of any optimizer can be on
disk.

[Note: reading ahead] Only this file changes data on disk, so a record may be read at any time before its step:
as soon as the gradient of its unit is on its tier, while the backward continues. The last writes of a step
continue in the next forward; the tier orders later reads of the same bytes after them. The room in the staging
pool limits the amount in flight.
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
from windlass.storage.disk_error_messages import abbreviate_names
from windlass.storage.disk_tier import DiskTier
from windlass.storage.extent_transfer import Extent
from windlass.storage.slot import Slot, Tier
from windlass.storage.staging_memory import aligned_buffer
from windlass.storage.staging_pool import StagingPool
from windlass.zero.update.update_chunk import UpdateChunk

_ALIGN = 64  # bytes
_SPARE = 0.25  # of the staging memory is left to parameters while a backward runs
_SLACK = 4 * _ALIGN  # what the states of a piece may lose to alignment


@dataclass(frozen=True)
class _RecordEntry:
    """A tensor in a record: whose state it is and under which key; the master weights have neither."""

    state_key: nn.Parameter | None
    key: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    nbytes: int

    def view_in(self, record: torch.Tensor) -> torch.Tensor:
        """The tensor within its record `[bytes]`."""
        return record[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


_Found = tuple[nn.Parameter | None, str, torch.Tensor]  # what is to be laid out, as in _Entry


@dataclass
class _StateRecord:
    """Record of a chunk on disk.

    Attributes:
        discarded: the record has no content until it is written again.
    """

    entries: list[_RecordEntry] = field(default_factory=list)
    nbytes: int = 0
    extent: Extent | None = None
    discarded: bool = False
    _grouped: tuple[list[_RecordEntry], dict[nn.Parameter | None, list[_RecordEntry]]] = field(
        default_factory=lambda: ([], {})
    )

    def of(self, tenant: nn.Parameter) -> list[_RecordEntry]:
        """Return the record entries of one parameter. They are grouped once, because a chunk may have thousands of
        parameters.
        """
        if self._grouped[0] is not self.entries:
            self._grouped = self.entries, {}
            for entry in self.entries:
                self._grouped[1].setdefault(entry.state_key, []).append(entry)
        return self._grouped[1].get(tenant, [])


@dataclass
class _FetchedChunk:
    """A chunk on its way in, at hand, or on its way out.

    Attributes:
        record: buffer with its record; None where it does not rest on disk.
        own: buffer with its gradient, where that was read from disk.
        gradient: its part of the reduced gradient, where that was asked for.
    """

    chunk: UpdateChunk
    record: torch.Tensor | None
    pending: Pending
    own: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    gradient_pending: Pending = DONE


@dataclass(frozen=True)
class StateRecordOnDisk:
    """Current record of a chunk on disk, to be read by another thread before it is overwritten.

    Attributes:
        extent: its location.
    """

    extent: Extent
    _tier: DiskTier
    _entries: tuple[_RecordEntry, ...]
    _nbytes: int

    def read(self) -> dict[tuple[nn.Parameter | None, str], torch.Tensor]:
        """Read the record into new memory, by parameter and key, with the master weights under `(None, "")`.

        Raises:
            StorageError: the record cannot be read.
        """
        buffer, _ = aligned_buffer(max(self._nbytes, 1))
        self._tier.read_unguarded(self.extent, 0, buffer[: self._nbytes])
        return {(entry.state_key, entry.key): entry.view_in(buffer) for entry in self._entries}


class OptimizerStateOffload:
    """Loads chunks into memory and stores them on their tiers.

    Args:
        device: device of the model.
        tier: the disk, if any chunk is on it.
        staging: pool of host buffers for transfers from and to disk.
        pin: page-lock host memory.
        state_bytes: bytes per element of future states, by dtype. Disk space for them is reserved when their
            chunk first
            goes to disk, so that a full disk raises before a step begins.

    Attributes:
        on_fetched: called with each chunk that was loaded.
        state_name_of: returns the parameter name of a state entry, for messages.
        states: the optimizer's states, by parameter.
    """

    def __init__(
        self,
        device: torch.device,
        ledger: DeviceMemoryLedger,
        tier: DiskTier | None,
        staging: StagingPool | None,
        *,
        pin: bool,
        state_bytes: Callable[[torch.dtype], int] = lambda dtype: 0,
    ) -> None:
        self._device, self._ledger, self._tier, self._staging, self._pin = device, ledger, tier, staging, pin
        self._state_bytes = cache(state_bytes)
        self.on_fetched: Callable[[UpdateChunk], None] = lambda chunk: None
        self.state_name_of: Callable[[UpdateChunk, nn.Parameter], str] = lambda chunk, tenant: "?"
        self.states: MutableMapping[Any, Any] = {}
        self._records: dict[int, _StateRecord] = {}
        self._fetched: dict[int, _FetchedChunk] = {}
        self._read_ahead_queue: deque[UpdateChunk] = deque()  # to be read ahead once there is room

    def read_ahead(self, chunks: list[UpdateChunk]) -> None:
        """Start to read the records of the next step, in its order, as far as the staging pool has room."""
        self._read_ahead_queue += [
            c for c in chunks if c.tier is Tier.NVME and c.master is None and id(c) not in self._fetched
        ]
        # one after the other: what comes later in a step would take the memory from what it begins with
        while self._read_ahead_queue and self._has_room([self._read_ahead_queue[0]], spare=_SPARE):
            self._start_fetch(self._read_ahead_queue.popleft())

    def iterate_batches(self, batches: list[list[UpdateChunk]]) -> Iterator[list[UpdateChunk]]:
        """Each batch in turn, with masters, states and gradients at hand; it goes home when the next is asked for."""
        self._recover_failed_step()
        self._read_ahead_queue.clear()
        ahead = 0  # batches that have set out
        for number, batch in enumerate(batches):
            while ahead < len(batches) and (ahead < number + 2 or self._has_room(batches[ahead])):
                for chunk in batches[ahead]:
                    self._start_fetch(chunk)
                    self._start_gradient_fetch(chunk)
                ahead += 1
            for chunk in batch:
                self._finish_fetch(chunk)
            yield batch
            for chunk in batch:
                self._start_store(chunk)
        self._account([chunk for batch in batches for chunk in batch])

    @contextmanager
    def resident(
        self, chunks: list[UpdateChunk], *, changes: bool = True, came: Callable[[], None] = lambda: None, room: int = 0
    ) -> Iterator[None]:
        """Context with master weights and states of `chunks` in memory, all at once.

        Args:
            changes: store the changed values; otherwise the data on disk stays unchanged.
            came: called when all chunks are in memory. If it raises, no data is written to disk.
            room: minimum bytes of the host buffer for a chunk on disk.
        """
        away = [chunk for chunk in chunks if chunk.master is None]
        for chunk in away:
            self._start_fetch(chunk, room=room)
        for chunk in chunks:
            self._finish_fetch(chunk)
        try:
            came()
        except BaseException:
            for chunk in away:
                self._discard_fetched(chunk)
            raise
        try:
            yield
        finally:
            for chunk in away:
                (self._start_store if changes else self._discard_fetched)(chunk)
            if self._staging is not None:
                self._staging.wait_all()

    @contextmanager
    def overwritten(
        self,
        chunk: UpdateChunk,
        states: dict[nn.Parameter, dict[str, torch.Tensor]],
        *,
        came: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Load a chunk to replace its values, which are then stored.

        Args:
            states: by parameter and key, the non-scalar states that the chunk shall have, described by tensors
                without memory.
                Other states are dropped; missing ones are created with zeros.
            came: as in `resident`.
        """
        wanted = [(tenant, key, like) for tenant, state in states.items() for key, like in state.items()]
        master: _Found = (None, "", torch.empty(chunk.numel, dtype=chunk.dtype, device="meta"))
        with self.resident([chunk], came=came, room=_record_end(_lay_out([master, *wanted]))):
            for tenant in chunk.state_keys:
                state, likes = self.states.setdefault(tenant, {}), states.get(tenant, {})
                for key in [
                    key
                    for key, value in state.items()
                    if is_offloadable(value) and not _same_form(value, likes.get(key))
                ]:
                    del state[key]
                state.update({key: like for key, like in likes.items() if key not in state})
            self._materialize_states(chunk)
            yield

    def describe_state(self, chunk: UpdateChunk, tenant: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter of a chunk. Values on disk are described by tensors without memory."""
        state = dict(self.states.get(tenant, {}))
        if chunk.master is None:
            for entry in self._records[id(chunk)].of(tenant):
                state[entry.key] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return state

    def record_of(self, chunk: UpdateChunk) -> StateRecordOnDisk | None:
        """Return a chunk's record on disk; None for a chunk in memory."""
        record = self._records.get(id(chunk))
        if chunk.master is not None or record is None or record.extent is None or self._tier is None:
            return None
        return StateRecordOnDisk(record.extent, self._tier, tuple(record.entries), record.nbytes)

    def record_nbytes(self, chunk: UpdateChunk, dtype: torch.dtype) -> int:
        """Bytes that the record of a chunk with masters of `dtype` will take on disk, states included."""
        per_piece = [_align_up(piece.numel * self._state_bytes(dtype)) + _SLACK for piece in chunk.pieces()]
        return _align_up(chunk.numel * dtype.itemsize) + sum(per_piece)

    def tensors(self, chunk: UpdateChunk) -> list[torch.Tensor]:
        """The elementwise optimizer states of a chunk in memory."""
        return [tensor for _, _, tensor in self._tensors_to_store(chunk)[1:]]

    def inventory(self, chunks: list[UpdateChunk]) -> Iterator[tuple[UpdateChunk, str, int]]:
        """Bytes of every elementwise optimizer state: chunk, key, bytes. Counts (`step`) are left out."""
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
        """A new chunk, its master weights at hand: to its home."""
        if chunk.tier is Tier.NVME:
            self._start_store(chunk)

    def _recover_failed_step(self) -> None:
        """Take home what a step that failed left on its way: its gradients are not those of the next. What was only
        read is as it is on disk."""
        for visit in list(self._fetched.values()):
            if visit.chunk.tier is Tier.NVME and visit.chunk.master is None:  # it never arrived
                self._drop_gradient(visit)
            else:
                self._start_store(visit.chunk)

    def _has_room(self, batch: list[UpdateChunk], *, spare: float = 0.0) -> bool:
        """Return True if a batch can be loaded early: it is on disk, and the staging pool has room, with a fraction
        `spare` left free.
        """
        if self._staging is None or any(chunk.tier is not Tier.NVME for chunk in batch):
            return False
        waiting = [chunk for chunk in batch if id(chunk) not in self._fetched]
        wanted = sum(self._records[id(chunk)].nbytes for chunk in waiting)
        return self._staging.has_room(wanted + int(spare * self._staging.limit))

    # in

    def _start_fetch(self, chunk: UpdateChunk, *, room: int = 0) -> None:
        """Start to bring masters and states to hand, where they are not there and not on their way."""
        if chunk.tier is not Tier.NVME or id(chunk) in self._fetched:
            return
        record = self._records[id(chunk)]
        assert record.extent is not None and self._tier is not None and self._staging is not None
        buffer = self._staging.acquire(max(record.nbytes, room), torch.uint8)
        try:
            came = buffer[: record.nbytes]
            if record.discarded:
                came.zero_()
                pending: Pending = DONE
            else:
                pending = self._tier.read(record.extent, 0, came)
        except BaseException:
            self._staging.release(buffer)
            raise
        self._fetched[id(chunk)] = _FetchedChunk(chunk, buffer, pending)

    def _start_gradient_fetch(self, chunk: UpdateChunk) -> None:
        """Start to bring the chunk's part of the reduced gradient to where its master weights are stepped."""
        whole = chunk.slot.stepped
        if whole is None:
            return
        visit = self._fetched.setdefault(id(chunk), _FetchedChunk(chunk, None, DONE))
        rests = isinstance(whole, Slot)
        source = whole.tensor if isinstance(whole, Slot) else whole
        if source is None:
            assert isinstance(whole, Slot) and self._staging is not None
            visit.gradient = visit.own = self._staging.acquire(chunk.numel, whole.dtype)
            visit.gradient_pending = whole.load(visit.gradient, chunk.start)
            return
        visit.gradient = source[chunk.start : chunk.stop]
        if not rests and chunk.tier is not Tier.DEVICE and device_has_own_memory(self._device):
            on_device, visit.gradient = visit.gradient, empty_host_tensor(chunk.numel, source.dtype, pin=self._pin)
            visit.gradient_pending = copy_to_host(visit.gradient, on_device)

    def _finish_fetch(self, chunk: UpdateChunk) -> None:
        visit = self._fetched.get(id(chunk))
        if visit is not None:
            visit.pending.wait()
            visit.gradient_pending.wait()
            chunk.gradient = visit.gradient
            if visit.record is not None:
                self._unpack(chunk, visit.record)
        self.on_fetched(chunk)

    def _unpack(self, chunk: UpdateChunk, buffer: torch.Tensor) -> None:
        for entry in self._records[id(chunk)].entries:
            if entry.state_key is None:
                chunk.master = entry.view_in(buffer)
            else:
                self.states[entry.state_key][entry.key] = entry.view_in(buffer)

    def _materialize_states(self, chunk: UpdateChunk) -> None:
        """Zeros for states that are only described, in the memory in which the rest came if they fit there."""
        found = self._tensors_to_store(chunk)
        laid = _lay_out(found)
        visit = self._fetched.get(id(chunk))
        record = visit.record if visit is not None else None
        if record is not None and not (_record_end(laid) <= record.numel() and _fits_in_place(laid, found, record)):
            record = None
        for entry, (tenant, key, tensor) in zip(laid, found, strict=True):
            if tenant is not None and tensor.device.type == "meta":
                if record is None:
                    made = torch.empty(entry.shape, dtype=entry.dtype, device=chunk.device)
                else:
                    made = entry.view_in(record)
                self.states[tenant][key] = made.zero_()

    # out

    def _start_store(self, chunk: UpdateChunk) -> None:
        visit = self._fetched.pop(id(chunk), None)
        chunk.gradient = None
        if visit is not None:
            self._drop_gradient(visit)
        if chunk.tier is not Tier.NVME:
            return
        assert self._tier is not None and self._staging is not None
        found = self._tensors_to_store(chunk)
        record = self._records.setdefault(id(chunk), _StateRecord())
        laid = _lay_out(found)
        nbytes = _record_end(laid)
        if record.extent is None or nbytes > record.extent.nbytes:
            if record.extent is not None:
                self._tier.free(record.extent)
            most = max(nbytes, self.record_nbytes(chunk, chunk.dtype))
            record.extent = self._tier.allocate(most, f"master weights and optimizer states of {chunk.name}")
            record.extent.describe_content = partial(_describe, ref(self), ref(chunk))
        record.entries, record.nbytes, record.discarded = laid, nbytes, False
        buffer = visit.record if visit is not None else None
        target = buffer
        if target is None or target.numel() < nbytes or not _fits_in_place(laid, found, target):
            target = self._staging.acquire(nbytes, torch.uint8)
        for entry, (_, _, tensor) in zip(laid, found, strict=True):
            place = entry.view_in(target)
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)
            if entry.state_key is not None:
                del self.states[entry.state_key][entry.key]
        if buffer is not None and target is not buffer:
            self._staging.release(buffer)
        chunk.master = None
        for tenant in chunk.state_keys:
            tenant.data = tenant.data.new_empty(0)  # or the buffer could not go
        self._staging.release(target, self._tier.write(record.extent, 0, target[:nbytes]))

    def _drop_gradient(self, visit: _FetchedChunk) -> None:
        visit.gradient_pending.wait()
        if visit.own is not None and self._staging is not None:
            self._staging.release(visit.own)
        visit.own = visit.gradient = None
        visit.gradient_pending = DONE

    def _discard_fetched(self, chunk: UpdateChunk) -> None:
        """Forget what came to hand; it is as it was on disk."""
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
        """Name what lies in bytes `[first, last)` of a chunk's record."""
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
                names.append(f"{entry.key} of {self.state_name_of(chunk, entry.state_key)!r}")
        return abbreviate_names(names)

    def discard(self) -> None:
        """Forget all that is on disk: every record is to be filled anew (`refilled`) before it is used."""
        self.discard_read_ahead()
        for record in self._records.values():
            if record.extent is not None:
                assert self._tier is not None
                self._tier.discard(record.extent)
                record.discarded = True

    def discard_read_ahead(self) -> None:
        """Drop what was read for the next step: it is to be read again."""
        self._read_ahead_queue.clear()
        for visit in list(self._fetched.values()):
            if visit.chunk.master is None:
                self._discard_fetched(visit.chunk)

    def _tensors_to_store(self, chunk: UpdateChunk) -> list[_Found]:
        """Return the tensors of a chunk to store: its master weights, and all non-scalar tensors of its states."""
        found: list[_Found] = [(None, "", chunk.values())]
        for tenant in chunk.state_keys:
            for key, value in self.states.get(tenant, {}).items():
                if is_offloadable(value):
                    found.append((tenant, key, value.contiguous()))
        return found

    def _account(self, chunks: list[UpdateChunk]) -> None:
        if emulated_device_memory() is None:
            return
        for chunk in chunks:
            if chunk.tier is Tier.DEVICE:
                found = self._tensors_to_store(chunk)[1:]
                held = sum(tensor.numel() * tensor.element_size() for _, _, tensor in found)
                self._ledger.set_held_bytes(f"optimizer states of {chunk.name}", held)


def is_offloadable(value: Any) -> bool:
    """Return True if a state value is offloaded with the master weights: all tensors except scalars."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


def _same_form(value: torch.Tensor, like: torch.Tensor | None) -> bool:
    return like is not None and (value.shape, value.dtype) == (like.shape, like.dtype) and value.is_contiguous()


def _record_end(laid: list[_RecordEntry]) -> int:
    return laid[-1].offset + laid[-1].nbytes


def _lay_out(found: list[_Found]) -> list[_RecordEntry]:
    entries, end = [], 0
    for tenant, key, tensor in found:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(_RecordEntry(tenant, key, tensor.dtype, tensor.shape, end, nbytes))
        end += _align_up(nbytes)
    return entries


def _fits_in_place(laid: list[_RecordEntry], found: list[_Found], record: torch.Tensor) -> bool:
    """Return True if every tensor in the record is already at its place. Otherwise moving tensors could overwrite
    others.
    """
    storage = record.untyped_storage().data_ptr()
    return all(
        tensor.device.type == "meta"
        or tensor.untyped_storage().data_ptr() != storage
        or tensor.data_ptr() == entry.view_in(record).data_ptr()
        for entry, (_, _, tensor) in zip(laid, found, strict=True)
    )


def _describe(
    residence: ReferenceType[OptimizerStateOffload], chunk: ReferenceType[UpdateChunk], first: int, last: int
) -> str:
    """Weakly, as the tier holds this to its end: it would keep the model alive that is to close it."""
    by, of = residence(), chunk()
    return "" if by is None or of is None else by.describe(of, first, last)


def _align_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
