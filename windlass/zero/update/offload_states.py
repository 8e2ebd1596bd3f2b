"""Takes what rests on the device to host memory for a while, so that something else may use the device."""

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
from windlass.base.errors import ConfigError, ModelError
from windlass.base.pending import Pending
from windlass.storage.slot import Tier
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.unit import Unit
from windlass.zero.update.master_weights import MasterWeights

# the last is DeepSpeed's name for what is here a ring of two units' size; it stays
KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


@dataclass
class _OffloadedTensors:
    """Tensors of one holder on the device, and their offloaded copies."""

    holder: str
    tensors: list[torch.Tensor]
    copies: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(copy.numel() * copy.element_size() for copy in self.copies)


class StateOffloader:
    """Slots of one model that were taken off the device.

    A tensor keeps its place in the program, its memory goes: every view of it is right again after `bring_back`.
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

    @property
    def offloaded_kinds(self) -> bool:
        """Return the kinds of state that are offloaded now."""
        return bool(self._offloaded)

    def offload(self, kinds: Iterable[str], *, pin: bool) -> int:
        """Take slots of these kinds to host memory; returns their bytes. Where device and host are one memory, none.

        Raises:
            ConfigError: there is no such kind.
            ModelError: something is away already.
        """
        wanted = [str(getattr(kind, "value", kind)) for kind in kinds]
        for kind in wanted:
            if kind not in KINDS:
                raise ConfigError(f"offload_states: there is no kind {kind!r}; use any of {', '.join(KINDS)}")
        if self._offloaded:
            raise ModelError("offload_states: states are offloaded already; call reload_states() before")
        if not device_has_own_memory(self._device):
            return 0
        under_way: list[Pending] = []
        for holder, tensors in [found for kind in wanted for found in self._of(kind)]:
            copies = [empty_host_tensor(tensor.numel(), tensor.dtype, pin=pin) for tensor in tensors]
            flat = [tensor.reshape(-1) for tensor in tensors]
            under_way += [copy_to_host(copy, one) for copy, one in zip(copies, flat, strict=True)]
            self._offloaded.append(_OffloadedTensors(holder, tensors, copies))
        for pending in under_way:
            pending.wait()
        for one in self._offloaded:
            for tensor in one.tensors:
                if tensor.device.type == "cuda":
                    tensor.untyped_storage().resize_(0)
                else:
                    tensor.fill_(float("nan"))  # an emulated device: whoever reads it now shall see that
            self._ledger.set_held_bytes(one.holder, 0)
        return sum(one.nbytes for one in self._offloaded)

    def reload(self) -> None:
        """Everything is on the device again."""
        under_way = []
        for one in self._offloaded:
            self._ledger.set_held_bytes(one.holder, one.nbytes)
            for tensor, copy in zip(one.tensors, one.copies, strict=True):
                if tensor.device.type == "cuda":
                    tensor.untyped_storage().resize_(copy.numel() * copy.element_size())
                under_way.append(copy_to_device(tensor.view(-1), copy))
        for pending in under_way:
            pending.wait()
        self._offloaded = []

    def _of(self, kind: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield the holders of this kind of state with their tensors in device memory of their own."""
        if kind == "lp_params":
            for unit in self._units:
                rests = unit.shard_slot
                if rests is None or rests.tensor is None or rests.tier is not Tier.DEVICE:
                    continue
                if rests.tensor.is_floating_point():
                    yield rests.name, [rests.tensor]
        elif kind == "hp_params":
            for unit in self._units:
                whole = self._masters.full_span(unit)
                if whole is not None and unit.state_tier is Tier.DEVICE:
                    yield f"master weights of {unit.names[0]}", [whole]
        elif kind == "lp_grads":
            for slot in self._slots:
                if slot.shard is not None and slot.buffer is None:
                    yield f"gradient of {slot.unit.names[0]}", [slot.shard]
        elif kind == "optim_states":
            for chunk in self._masters.chunks:
                if chunk.tier is Tier.DEVICE:
                    yield f"optimizer states of {chunk.name}", self._masters.state_offload.tensors(chunk)
