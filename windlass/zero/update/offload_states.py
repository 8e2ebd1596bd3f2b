"""Temporary offload of a model's device memory to the host, so that other work can use the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from windlass.base.device_memory import (
    DeviceMemoryLedger,
    copy_to_device,
    copy_to_host,
    device_has_own_memory,
    empty_host_tensor,
)
from windlass.base.errors import ModelError
from windlass.base.pending import Pending
from windlass.storage.slot import Tier
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.unit import Unit
from windlass.zero.update.master_weights import MasterWeights

KINDS = ("optimizer_states", "master_weights", "parameters", "gradients")


@dataclass
class _OffloadedTensors:
    """Device tensors of one entry of the memory ledger, and their copies in host memory."""

    holder: str
    tensors: list[torch.Tensor]
    copies: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(copy.numel() * copy.element_size() for copy in self.copies)


class StateOffloader:
    """Offload of a model's device tensors, for `offload_states` and `reload_states` of the engine.

    On CUDA the tensors stay and only their memory is freed, so that all views of them are valid again after `reload`.
    """

    def __init__(
        self,
        units: list[Unit],
        slots: list[GradientSlot],
        masters: MasterWeights,
        device: torch.device,
        ledger: DeviceMemoryLedger,
    ) -> None:
        self._units, self._slots, self._masters = units, slots, masters
        self._device, self._ledger = device, ledger
        self._offloaded: list[_OffloadedTensors] = []
        self._kinds: frozenset[str] = frozenset()  # kinds of the last `offload`, equal on ranks with equal calls

    @property
    def has_offloaded(self) -> bool:
        """True if states are offloaded now."""
        return bool(self._offloaded)

    def require_on_device(self, name: str, unit: Unit, *kinds: str) -> None:
        """Check that the values of these kinds of a unit are not offloaded, before they are read or set.

        Depends only on the unit and on the offloaded kinds, so ranks that offloaded the same kinds raise together.

        Args:
            name: parameter that is read or set, for the message.

        Raises:
            ModelError: values of one of these kinds are offloaded.
        """
        for kind in kinds:
            if kind in self._kinds and self._can_move(kind, unit):
                raise ModelError(
                    f"the {kind.replace('_', ' ')} of {name!r} are offloaded; call engine.reload_states() first"
                )

    def require_for_compute(self, units: Iterable[Unit], *kinds: str) -> None:
        """Check that no values of these kinds are offloaded, before a forward or backward uses any of the units.

        Raises:
            ModelError: values of one of these kinds are offloaded.
        """
        if not self._kinds.isdisjoint(kinds):
            for unit in units:
                self.require_on_device(unit.names[0], unit, *kinds)

    def offload(self, kinds: Iterable[str], *, pin: bool) -> int:
        """Move the device tensors of these kinds to host memory until `reload`.

        Does nothing on a device without memory of its own, such as the CPU.

        Args:
            kinds: any of `KINDS`.
            pin: page-lock the copies.

        Returns:
            Number of bytes that were moved.

        Raises:
            ModelError: states are offloaded already.
        """
        if self._offloaded:
            raise ModelError("offload_states: states are offloaded already; call engine.reload_states() first")
        if not device_has_own_memory(self._device):
            return 0
        self._kinds = frozenset(kinds)
        transfers: list[Pending] = []
        for holder, tensors in [found for kind in KINDS if kind in self._kinds for found in self._of(kind)]:
            copies = [empty_host_tensor(tensor.numel(), tensor.dtype, pin=pin) for tensor in tensors]
            flat = [tensor.reshape(-1) for tensor in tensors]
            transfers += [copy_to_host(copy, one) for copy, one in zip(copies, flat, strict=True)]
            self._offloaded.append(_OffloadedTensors(holder, tensors, copies))
        # The memory may be freed only after all copies from it have finished.
        for pending in transfers:
            pending.wait()
        for one in self._offloaded:
            for tensor in one.tensors:
                if tensor.device.type == "cuda":
                    tensor.untyped_storage().resize_(0)
                else:
                    # An emulated device: wrong values make accidental reads visible.
                    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
            self._ledger.set_held_bytes(one.holder, 0)
        return sum(one.nbytes for one in self._offloaded)

    def reload(self) -> None:
        """Move all offloaded tensors back to the device. Returns when the copies have finished."""
        transfers = []
        for one in self._offloaded:
            self._ledger.set_held_bytes(one.holder, one.nbytes)
            for tensor, copy in zip(one.tensors, one.copies, strict=True):
                if tensor.device.type == "cuda":
                    tensor.untyped_storage().resize_(copy.numel() * copy.element_size())
                transfers.append(copy_to_device(tensor.view(-1), copy))
        for pending in transfers:
            pending.wait()
        self._offloaded, self._kinds = [], frozenset()

    def _can_move(self, kind: str, unit: Unit) -> bool:
        """Return True if `offload` moves values of this kind of the unit, on any rank that has some."""
        if kind == "parameters":
            slot = unit.shard_slot
            on_device = slot is not None and slot.tensor is not None and slot.tier is Tier.DEVICE
            return on_device and unit.dtype.is_floating_point
        if kind == "gradients":
            return any(slot.unit is unit and slot.buffer is None and slot.storage is None for slot in self._slots)
        trains = bool(self._masters.chunks_of(unit)) and unit.state_tier is Tier.DEVICE
        return trains and (kind == "optimizer_states" or self._masters.full_span(unit) is not None)

    def _of(self, kind: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield the tensors of `kind` whose device memory can be freed, with their names in the memory ledger."""
        if kind == "parameters":
            # A unit without a separate shard tensor keeps its shard inside the full buffer, which stays on the device.
            for unit in self._units:
                shard_slot = unit.shard_slot
                if shard_slot is None or shard_slot.tensor is None or shard_slot.tier is not Tier.DEVICE:
                    continue
                if shard_slot.tensor.is_floating_point():
                    yield shard_slot.name, [shard_slot.tensor]
        elif kind == "master_weights":
            for unit in self._units:
                full = self._masters.full_span(unit)
                if full is not None and unit.state_tier is Tier.DEVICE:
                    yield f"master weights of {unit.names[0]}", [full]
        elif kind == "gradients":
            # If the slot has a buffer, the shard may be a view of the buffer, and cannot be freed separately.
            for slot in self._slots:
                if slot.shard is not None and slot.buffer is None:
                    yield f"gradient of {slot.unit.names[0]}", [slot.shard]
        elif kind == "optimizer_states":
            for chunk in self._masters.chunks:
                if chunk.tier is Tier.DEVICE:
                    yield f"optimizer states of {chunk.name}", self._masters.state_offload.tensors(chunk)
