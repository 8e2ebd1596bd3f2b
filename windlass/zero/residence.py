"""Where master weights and optimizer states rest between steps, and how they come to hand for one.

[Note: homes] Elementwise or not, an optimizer sees tensors in memory. Those that rest on the device or in host memory
are always there. Those on disk come in batch by batch: while one is updated, the next is read and the one before is
written. What a rule keeps for a parameter is whatever tensors it put into its `state`; they travel with the master
weights of their chunk as one contiguous record, so any rule can be kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from windlass.base.memory import Ledger, arena, copy_to_host, host_empty, separate
from windlass.base.pending import DONE, Pending
from windlass.storage.slot import Home
from windlass.storage.tier import DiskTier
from windlass.storage.transfer import Extent
from windlass.zero.chunk import Chunk

_ALIGN = 64  # bytes


@dataclass(frozen=True)
class _Entry:
    """A tensor in a record: whose state it is and under which key; the master weights have neither."""

    tenant: nn.Parameter | None
    key: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    nbytes: int


@dataclass
class _Record:
    """What a chunk keeps on disk."""

    entries: list[_Entry] = field(default_factory=list)
    nbytes: int = 0
    extent: Extent | None = None


@dataclass
class _Visit:
    """A chunk on its way in, at hand, or on its way out."""

    chunk: Chunk
    buffer: torch.Tensor
    gradient: torch.Tensor | None
    pending: Pending


class Residence:
    """Brings chunks to hand and takes them home.

    Args:
        device: where the model computes.
        tier: the disk, where any chunk rests on it.
        pin: page-lock host memory.

    Attributes:
        arrived: called with each chunk that came to hand.
        states: of the optimizer, by tenant.
    """

    def __init__(self, device: torch.device, ledger: Ledger, tier: DiskTier | None, *, pin: bool) -> None:
        self._device, self._ledger, self._tier, self._pin = device, ledger, tier, pin
        self.arrived: Callable[[Chunk], None] = lambda chunk: None
        self.states: MutableMapping[Any, Any] = {}
        self._records: dict[int, _Record] = {}
        self._visits: dict[int, _Visit] = {}
        self._leaving: list[tuple[Pending, torch.Tensor]] = []
        self._free: list[torch.Tensor] = []

    def travel(self, batches: list[list[Chunk]]) -> Iterator[list[Chunk]]:
        """Each batch in turn, with masters, states and gradients at hand; it goes home when the next is asked for."""
        self._abandon()
        for number, batch in enumerate(batches):
            for chunk in batch:
                self._set_out(chunk)
            self._finish_leaving(len(batches[number - 1]) if number else 0)
            if number + 1 < len(batches):
                for chunk in batches[number + 1]:
                    self._set_out(chunk)
            for chunk in batch:
                self._arrive(chunk)
            yield batch
            for chunk in batch:
                self._leave(chunk)
        self._finish_leaving(0)
        self._account([chunk for batch in batches for chunk in batch])

    @contextmanager
    def at_hand(self, chunks: list[Chunk]) -> Iterator[None]:
        """Masters and states of `chunks` in memory, all at once; what was changed is kept."""
        away, free = [chunk for chunk in chunks if chunk.master is None], len(self._free)
        for chunk in away:
            self._set_out(chunk, gradient=False)
        for chunk in chunks:
            self._arrive(chunk)
        try:
            yield
        finally:
            for chunk in away:
                self._leave(chunk)
            self._finish_leaving(0)
            del self._free[free:]  # a step needs a few, this took one for each chunk

    def tensors(self, chunk: Chunk) -> list[torch.Tensor]:
        """The elementwise optimizer states of a chunk in memory."""
        return [tensor for _, _, tensor in self._found(chunk)[1:]]

    def inventory(self, chunks: list[Chunk]) -> Iterator[tuple[Chunk, str, int]]:
        """Bytes of every elementwise optimizer state: chunk, key, bytes. Counts (`step`) are left out."""
        for chunk in chunks:
            if chunk.master is None:
                yield from ((chunk, e.key, e.nbytes) for e in self._records[id(chunk)].entries if e.tenant is not None)
            else:
                yield from ((chunk, key, t.numel() * t.element_size()) for _, key, t in self._found(chunk)[1:])

    def settle(self, chunk: Chunk) -> None:
        """A new chunk, its master weights at hand: to its home."""
        if chunk.home is Home.NVME:
            self._leave(chunk)
            self._finish_leaving(1)

    def _abandon(self) -> None:
        """Take home what a step that failed left on its way: its gradients are not those of the next."""
        for visit in list(self._visits.values()):
            visit.pending.wait()
            if visit.chunk.home is Home.NVME and visit.chunk.master is None:  # it never arrived
                del self._visits[id(visit.chunk)]
                self._free.append(visit.buffer)
            else:
                self._leave(visit.chunk)

    # in

    def _set_out(self, chunk: Chunk, *, gradient: bool = True) -> None:
        if id(chunk) in self._visits:
            return
        if chunk.home is not Home.NVME:
            if gradient and chunk.slot.holds:
                self._visits[id(chunk)] = _Visit(chunk, torch.empty(0), *self._gradient(chunk))
            return
        record = self._records[id(chunk)]
        assert record.extent is not None and self._tier is not None
        buffer = self._staging(record.nbytes)
        pending = self._tier.read(record.extent, 0, buffer[: record.nbytes])
        own, grad_pending = self._gradient(chunk) if gradient and chunk.slot.holds else (None, DONE)
        self._visits[id(chunk)] = _Visit(chunk, buffer, own, _Both(pending, grad_pending))

    def _gradient(self, chunk: Chunk) -> tuple[torch.Tensor, Pending]:
        """The chunk's part of the reduced gradient where its master weights are stepped, and when it is there."""
        slot = chunk.slot
        if slot.rests is not None:
            if slot.rests.tensor is not None:
                return slot.rests.tensor[chunk.start : chunk.stop], DONE
            into = host_empty(chunk.numel, slot.rests.dtype, pin=False)
            return into, slot.rests.load(into, chunk.start)
        assert slot.shard is not None
        part = slot.shard[chunk.start : chunk.stop]
        if chunk.home is Home.DEVICE or not separate(self._device):
            return part, DONE
        into = host_empty(chunk.numel, part.dtype, pin=self._pin)
        return into, copy_to_host(into, part)

    def _arrive(self, chunk: Chunk) -> None:
        visit = self._visits.get(id(chunk))
        if visit is not None:
            visit.pending.wait()
            chunk.gradient = visit.gradient
            if chunk.home is Home.NVME:
                self._unpack(chunk, visit)
        self.arrived(chunk)

    def _unpack(self, chunk: Chunk, visit: _Visit) -> None:
        for entry in self._records[id(chunk)].entries:
            place = visit.buffer[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)
            if entry.tenant is None:
                chunk.master = place
            else:
                self.states[entry.tenant][entry.key] = place

    # out

    def _leave(self, chunk: Chunk) -> None:
        visit = self._visits.pop(id(chunk), None)
        chunk.gradient = None
        if chunk.home is not Home.NVME:
            return
        assert self._tier is not None
        found = self._found(chunk)
        record = self._records.setdefault(id(chunk), _Record())
        laid = _lay_out(found)
        nbytes = laid[-1].offset + laid[-1].nbytes
        if record.extent is None or nbytes > record.nbytes:
            if record.extent is not None:
                self._tier.free(record.extent)
            record.extent = self._tier.allocate(nbytes, f"master weights and optimizer states of {chunk.name}")
        record.entries, record.nbytes = laid, nbytes
        buffer = visit.buffer if visit is not None else torch.empty(0, dtype=torch.uint8)
        target = buffer if _fits(buffer, nbytes, laid, found) else self._staging(nbytes)
        for entry, (_, _, tensor) in zip(laid, found, strict=True):
            place = target[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)
            if entry.tenant is not None:
                del self.states[entry.tenant][entry.key]
        if target is not buffer and buffer.numel():
            self._free.append(buffer)
        chunk.master = None
        self._leaving.append((self._tier.write(record.extent, 0, target[:nbytes]), target))

    def _found(self, chunk: Chunk) -> list[tuple[nn.Parameter | None, str, torch.Tensor]]:
        """What a chunk has to take home: its master weights, and every tensor of its tenants' state but scalars."""
        found: list[tuple[nn.Parameter | None, str, torch.Tensor]] = [(None, "", chunk.values())]
        for tenant in chunk.tenants:
            for key, value in self.states.get(tenant, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0:
                    found.append((tenant, key, value.contiguous()))
        return found

    def _finish_leaving(self, most: int) -> None:
        """Wait until at most `most` chunks are on their way out."""
        while len(self._leaving) > most:
            pending, buffer = self._leaving.pop(0)
            pending.wait()
            self._free.append(buffer)

    def _staging(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least `nbytes`; those of finished visits are used again."""
        assert self._tier is not None
        still = []
        for pending, buffer in self._leaving:
            if pending.poll():
                self._free.append(buffer)
            else:
                still.append((pending, buffer))
        self._leaving = still
        fits = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        if fits:
            best = min(fits, key=torch.Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not best]
            return best
        self._free = self._free[-1:]  # too small, hence of the time before the states were made
        return self._tier.buffer(nbytes)

    def _account(self, chunks: list[Chunk]) -> None:
        if arena() is None:
            return
        for chunk in chunks:
            if chunk.home is Home.DEVICE:
                found = self._found(chunk)[1:]
                held = sum(tensor.numel() * tensor.element_size() for _, _, tensor in found)
                self._ledger.hold(f"optimizer states of {chunk.name}", held)


class _Both:
    """Finished once both parts are."""

    def __init__(self, first: Pending, second: Pending) -> None:
        self._first, self._second = first, second

    def poll(self) -> bool:
        return self._first.poll() and self._second.poll()

    def wait(self) -> None:
        self._first.wait()
        self._second.wait()


def _fits(
    buffer: torch.Tensor, nbytes: int, laid: list[_Entry], found: list[tuple[nn.Parameter | None, str, torch.Tensor]]
) -> bool:
    """Whether a record can be put together in the buffer that it came in: large enough, and nothing in it has to move
    (a state made since lies before those that were there), or one would be overwritten before it was copied."""
    if buffer.numel() < nbytes:
        return False
    own, first = buffer.untyped_storage().data_ptr(), buffer.data_ptr()
    inside = [pair for pair in zip(laid, found, strict=True) if pair[1][2].untyped_storage().data_ptr() == own]
    return all(tensor.data_ptr() == first + entry.offset for entry, (_, _, tensor) in inside)


def _lay_out(found: list[tuple[nn.Parameter | None, str, torch.Tensor]]) -> list[_Entry]:
    entries, end = [], 0
    for tenant, key, tensor in found:
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(_Entry(tenant, key, tensor.dtype, tensor.shape, end, nbytes))
        end += -(-nbytes // _ALIGN) * _ALIGN
    return entries
