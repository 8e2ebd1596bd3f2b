"""Memory of per-rank states: float32 tensors, or slots (storage of one tensor) on the tier of the unit's
optimizer states.

[Note: offloaded per-rank states] If `offload_optimizer` moves a unit's optimizer states, its per-rank states are on the
same tier. An exchange fetches the states of the units whose messages form one batch, and stores them when the messages
have arrived. Space on disk is allocated when the update is constructed, so that a full disk raises before the first
step. A state is zero until it is stored for the first time, and is not transferred before. If a state cannot be read,
the exchange continues with zeros, because other ranks wait for its message, and does not replace the contents on disk.
All ranks raise at their next check ([Note: a disk that fails]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from windlass.base.device_memory import device_has_own_memory, empty_host_tensor
from windlass.base.pending import Pending
from windlass.storage.slot import Slot, Tier
from windlass.zero.core.unit import Unit

MakeSlot = Callable[[str, int, torch.dtype, Tier], Slot]
"""Returns a new slot, given its name, number of elements, dtype and tier."""

_IN_FLIGHT = 2  # number of stores that may be in flight after a `put`


@dataclass(eq=False)
class _Store:
    """Transfer of `values` to the slot of `state` (a name and a unit index).

    The reference to `values` keeps the memory alive until the transfer has ended.
    """

    pending: Pending
    values: torch.Tensor
    state: tuple[str, int]


class RankStateMemory:
    """Flat float32 states by name and unit, zeros at first."""

    def __init__(self, make_slot: MakeSlot) -> None:
        self._make_slot = make_slot
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}
        self._slots: dict[tuple[str, int], Slot] = {}
        self._stored: set[tuple[str, int]] = set()  # slots that have contents; the others are zeros
        self._stores: list[_Store] = []
        # by state, the number of failed reads of its slot that `fetch` must not report again
        self._failed_reads: dict[tuple[str, int], int] = {}
        self._unread: set[tuple[str, int]] = set()  # states whose last fetch failed, until their `put`
        self._factors: dict[tuple[str, int], list[float]] = {}  # pending `rescale` factors by state, oldest first

    def is_offloaded(self, unit: Unit) -> bool:
        """Return True if a unit's states are not in the memory in which the device computes."""
        return unit.state_tier is Tier.NVME or (
            unit.state_tier is Tier.HOST and device_has_own_memory(unit.full.device)
        )

    def open(self, key: str, unit: Unit, numel: int) -> None:
        """Allocate the slot of an offloaded state `[numel]`. Does nothing for other states, or if the slot exists.

        A lack of disk space is recorded by the disk tier.
        """
        if self.is_offloaded(unit) and (key, unit.index) not in self._slots:
            name = f"{key} of {unit.names[0]}"
            self._slots[key, unit.index] = self._make_slot(name, numel, torch.float32, unit.state_tier)

    def tensor(self, key: str, unit: Unit, numel: int) -> torch.Tensor:
        """Return a state `[numel]` that is not offloaded, zeros at first. The caller may change it in place."""
        assert not self.is_offloaded(unit)
        if (key, unit.index) not in self._tensors:
            self._tensors[key, unit.index] = torch.zeros(numel, dtype=torch.float32, device=unit.full.device)
        return self._tensors[key, unit.index]

    def prefetch(self, key: str, units: Iterable[Unit]) -> None:
        """Start to read states from NVMe for later `fetch`es, as far as the staging buffers have room."""
        for unit in units:
            if (key, unit.index) in self._stored and not self._slots[key, unit.index].prefetch():
                return

    def fetch(self, key: str, unit: Unit, numel: int) -> torch.Tensor:
        """Return a state `[numel]` on the device: the tensor in memory, or a copy to pass to `put`."""
        if not self.is_offloaded(unit):
            return self.tensor(key, unit, numel)
        self.open(key, unit, numel)
        state = (key, unit.index)
        if state not in self._stored:
            return torch.zeros(numel, dtype=torch.float32, device=unit.full.device)
        for store in [one for one in self._stores if one.state == state]:
            store.pending.wait()  # the next micro-batch may fetch a state whose store is in flight
            self._stores.remove(store)
        values = torch.empty(numel, dtype=torch.float32, device=unit.full.device)
        self._slots[state].fetch(values).wait()
        self._unread.discard(state)
        if self._has_new_failure(state):
            self._unread.add(state)
            return values.zero_()
        return self._scaled(state, values)

    def put(self, key: str, unit: Unit, values: torch.Tensor) -> None:
        """Start to store a state that `fetch` returned. An offloaded state's `values` must not change afterwards."""
        if self.is_offloaded(unit):
            state = (key, unit.index)
            if state in self._unread:
                self._unread.remove(state)
                return
            # On a device with memory of its own, the write to disk starts when the copy to host memory is polled.
            self._stores = [one for one in self._stores if not one.pending.poll()]
            self._stores.append(_Store(self._slots[state].put(values), values, state))
            self._stored.add(state)
            self._factors.pop(state, None)
            self._wait_for_stores(_IN_FLIGHT)

    def rescale(self, key: str, unit: Unit, factor: float) -> None:
        """Multiply an offloaded state by `factor` at its next read. Does nothing for states that are zero."""
        state = (key, unit.index)
        if state in self._stored and factor != 1.0:
            self._factors.setdefault(state, []).append(factor)

    def wait(self) -> None:
        """Wait for all stores. A failed write is recorded by the disk tier."""
        self._wait_for_stores(0)

    def _wait_for_stores(self, left: int) -> None:
        while len(self._stores) > left:
            self._stores.pop(0).pending.wait()

    def read_part(self, key: str, unit: Unit, start: int, numel: int) -> torch.Tensor:
        """Return a copy of elements `[start, start + numel)` of an offloaded state, in host memory."""
        self.wait()
        state = (key, unit.index)
        if state not in self._stored:
            return torch.zeros(numel, dtype=torch.float32)
        values, slot = empty_host_tensor(numel, torch.float32, pin=False), self._slots[state]
        before = slot.failed_reads
        slot.load(values, start).wait()
        # The next `fetch` must ignore failures of this read, but not failures of a read that was prefetched for it.
        self._failed_reads[state] = self._failed_reads.get(state, 0) + slot.failed_reads - before
        return self._scaled(state, values)

    def write_part(self, key: str, unit: Unit, start: int, values: torch.Tensor) -> None:
        """Write `values` to the elements from `start` on of an offloaded state without a pending `rescale`."""
        self.wait()
        assert (key, unit.index) not in self._factors
        slot = self._slots[key, unit.index]
        if (key, unit.index) not in self._stored:
            slot.store(torch.zeros(slot.numel, dtype=torch.float32)).wait()
            self._stored.add((key, unit.index))
        slot.store(values.to("cpu", torch.float32).contiguous(), start).wait()

    def zero(self, key: str) -> None:
        """Reset the state `key` of all units to zero."""
        for (name, _), tensor in self._tensors.items():
            if name == key:
                tensor.zero_()
        self._forget_contents(key)

    def drop(self, key: str | None = None) -> None:
        """Free the tensors of the state `key` (None: of all states), and reset it to zero. Slots stay allocated, and
        their contents, damaged or not, are discarded.
        """
        self.wait()  # a write that fails later would count as damage of the new contents
        self._tensors = {one: tensor for one, tensor in self._tensors.items() if key not in (None, one[0])}
        self._forget_contents(key)
        for one, slot in self._slots.items():
            if key in (None, one[0]):
                slot.discard()

    def _forget_contents(self, key: str | None) -> None:
        """Make the state `key` (None: all states) zero in its slots."""
        self._stored = {one for one in self._stored if key not in (None, one[0])}
        self._unread = {one for one in self._unread if key not in (None, one[0])}
        self._factors = {one: factors for one, factors in self._factors.items() if key not in (None, one[0])}

    def _has_new_failure(self, state: tuple[str, int]) -> bool:
        """Return True if a read of a state's slot for `fetch` has failed since the last call."""
        before, now = self._failed_reads.get(state, 0), self._slots[state].failed_reads
        self._failed_reads[state] = now
        return now != before

    def _scaled(self, state: tuple[str, int], values: torch.Tensor) -> torch.Tensor:
        """Apply the factors of a state to values read from its slot, in place."""
        for factor in self._factors.get(state, ()):
            values.mul_(factor)
        return values
