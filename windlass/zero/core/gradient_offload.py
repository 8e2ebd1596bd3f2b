"""Offload of a unit's reduced gradient to its tier, as soon as it is reduced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from windlass.base.device_memory import DeviceMemoryLedger, copy_to_host, device_has_own_memory, empty_host_tensor
from windlass.base.pending import DONE, FinishingPending, Pending
from windlass.base.trace_ranges import traced
from windlass.comm.transport import local_shard
from windlass.storage.slot import Slot, Tier
from windlass.zero.core.gradient_slot import GradientSlot


@dataclass(frozen=True)
class GradientOffloadCallbacks:
    """Callables of the model that place offloaded gradients.

    Attributes:
        tier_of: Returns the tier of a unit's gradient.
        make_slot: Allocates host memory or a file range for an offloaded gradient. Arguments: name, number of elements,
            dtype and tier.
    """

    tier_of: Callable[[GradientSlot], Tier]
    make_slot: Callable[[str, int, torch.dtype, Tier], Slot]


class GradientOffload:
    """Output buffers of reductions, and the transfers from these to the gradients' tiers.

    A shard on the device is reduced in place. A shard on the host or NVMe tier is reduced into a device buffer. The sum
    is copied out while the backward continues, and replaces the content of the tier or is added to it.

    Args:
        dtype: Dtype of accumulated gradients.
    """

    IN_FLIGHT = 2  # number of output buffers; more would only take device memory

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        ledger: DeviceMemoryLedger,
        callbacks: GradientOffloadCallbacks,
    ) -> None:
        self._dtype, self._device, self._ledger = dtype, device, ledger
        self._callbacks = callbacks
        self._in_flight: deque[tuple[Pending, torch.Tensor]] = deque()
        self._free: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}  # all buffers, by address
        self._largest = 0

    def prepare(self, slot: GradientSlot) -> None:
        """Allocate memory for the reduced shard of a unit."""
        numel, tier = slot.unit.state_stop - slot.unit.state_start, self._callbacks.tier_of(slot)
        name = f"gradient of {slot.unit.names[0]}"
        if tier is Tier.DEVICE:
            self._ledger.set_held_bytes(name, numel * self._dtype.itemsize)
            slot.shard = torch.zeros(numel, dtype=self._dtype, device=self._device)
        else:
            slot.storage = self._callbacks.make_slot(name, numel, self._dtype, tier)
            slot.storage.set_content_description(slot.names_in)
            # All output buffers have the size of the largest shard, so that any of them fits.
            if numel > self._largest:
                self._largest = numel
                self.finish()
                self._free, self._taken = [], {}  # the old buffers are too small now

    def account(self, slot: GradientSlot, numel: int) -> None:
        """Record that `numel` elements of a unit's gradient are in device memory."""
        self._ledger.set_held_bytes(f"gradient of {slot.unit.names[0]}", numel * self._dtype.itemsize)

    def output_buffer(self, slot: GradientSlot, own: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the buffer that receives a reduction's sum, and True if the sum must be added to the buffer's content.

        Args:
            own: This rank's shard of the unit's buffer.
        """
        if slot.storage is None:
            assert slot.shard is not None
            # A rank that keeps the full gradient (stage 0) receives only its own shard from the reduction.
            full = slot.shard.numel() != own.numel()
            group = slot.unit.dp_group.group
            return local_shard(slot.shard, group.index, group.size) if full else slot.shard, slot.has_reduced
        # Wait for an offload rather than allocate more than `IN_FLIGHT` buffers.
        while not self._free and len(self._taken) >= self.IN_FLIGHT and self._in_flight:
            self._finish_one()
        if not self._free:
            self._ledger.set_held_bytes(f"buffer {len(self._taken)} of gradients", self._largest * self._dtype.itemsize)
            self._free.append(torch.empty(self._largest, dtype=self._dtype, device=self._device))
            self._taken[_memory(self._free[0])] = self._free[0]
        return self._free.pop()[: own.numel()], False

    def offload(self, slot: GradientSlot, out: torch.Tensor) -> None:
        """Start the transfer of the complete sum in `out` to its tier. On the device tier there is nothing to do."""
        storage = slot.storage
        if storage is None:
            return
        adds = slot.is_offloaded
        slot.is_offloaded = True
        # The first sum of a step replaces the content of the tier; later ones are added on the host.
        if not adds:
            landing = storage.put(out)
            landing.poll()  # starts the NVMe write if the copy to the host is done
            self._in_flight.append((landing, out))
            return
        staged = out
        arrival: Pending = DONE
        if device_has_own_memory(self._device):
            staged = empty_host_tensor(out.numel(), out.dtype, pin=True)
            arrival = copy_to_host(staged, out)
        slot.norm_squares = None  # the old value is for this sum only; the step computes that of the total
        self._in_flight.append((FinishingPending(None, arrival.wait, lambda: _add(storage, staged)), out))

    def finish(self) -> None:
        """Wait until every gradient is in its tier."""
        while self._in_flight:
            self._finish_one()

    def _finish_one(self) -> None:
        pending, out = self._in_flight.popleft()
        with traced("store", "gradients"):
            pending.wait()
        self._free.append(self._taken[_memory(out)])


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's memory, also if the tensor has no elements."""
    return tensor.untyped_storage().data_ptr()


def _add(storage: Slot, part: torch.Tensor) -> None:
    full = storage.read()
    full.add_(part)
    storage.write(full)
