"""Construction of units from their plans: tiers, buffers, and initial values from rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from windlass.base.device_memory import DeviceMemoryLedger, device_has_own_memory
from windlass.base.dtypes import is_castable
from windlass.base.errors import ModelError
from windlass.comm.codec import get_codec
from windlass.comm.mesh import Mesh
from windlass.comm.transport import BufferRequest, TransportBuffer
from windlass.storage.slot import Slot, Tier
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.gradient_reducer import GradientReducer
from windlass.zero.core.unit import Unit, UnitCallbacks
from windlass.zero.core.unit_layout import UnitLayout
from windlass.zero.core.unit_plan import UnitPlan
from windlass.zero.setup.dp_group_builder import is_primary_replica, norm_weight
from windlass.zero.setup.zero_settings import Placements, UnitTiers, ZeroSettings
from windlass.zero.sharded_init.unit_values import broadcast_full_parameters, local_shard_values, mark_full_parameters


def effective_tiers(tiers: Placements, device: torch.device, *, delayed: bool = False) -> Placements:
    """Return the tiers to use on `device`.

    On a device whose memory is the host's memory (a CPU), the host tier becomes the device tier.

    Args:
        delayed: Delayed updates are enabled. They need separate memory for master weights and gradients, so the tiers
            of these stay as they are.
    """
    if device_has_own_memory(device):
        return tiers

    def of(tier: Tier) -> Tier:
        return Tier.DEVICE if tier is Tier.HOST else tier

    state, gradient = (tiers.state, tiers.gradient) if delayed else (of(tiers.state), of(tiers.gradient))
    units = tuple(UnitTiers(of(one.param), of(one.gradient), of(one.state)) for one in tiers.of_units)
    return replace(tiers, param=of(tiers.param), state=state, gradient=gradient, pin=False, of_units=units)


def make_units(
    plans: list[UnitPlan],
    settings: ZeroSettings,
    tiers: Placements,
    mesh: Mesh,
    dp_groups: list[DataParallelGroup],
    callbacks: UnitCallbacks,
    *,
    trains: bool,
) -> list[Unit]:
    """Return the units of `plans`, without memory.

    Args:
        dp_groups: Data-parallel groups. The first is for dense parameters, the last for experts.
        callbacks: Callables that the units call.
        trains: The model will have gradients. If False, all units are frozen.
    """
    policy = settings.policy
    total = sum(plan.numel for plan in plans if plan.trainable)
    offloaded_numel = 0  # number of trained elements with offloaded states
    units = []
    for number, plan in enumerate(plans):
        # Frozen values in a quantised format keep the format. A trained parameter needs a dtype that updates can write.
        casts = is_castable(plan.dtype) or (plan.dtype.is_floating_point and plan.trainable and trains)
        compute = settings.param_dtype if settings.param_dtype is not None and casts else plan.dtype
        dp_group = dp_groups[-1] if plan.kind.is_expert else dp_groups[0]
        layout = UnitLayout(tuple(p.numel() for p in plan.parameters), dp_group.mesh.data.size)
        # Experts that no other rank holds have no shards to gather.
        alone = dp_group.group.size == 1 < dp_groups[0].group.size and tiers.param is Tier.DEVICE
        released = policy.param and not plan.persistent and not alone
        own = tiers.of_units[number] if tiers.of_units else None
        tier = (own.param if own is not None else tiers.param) if released else Tier.DEVICE
        codec = settings.trained_codec if plan.trainable and trains else settings.frozen_codec
        if codec is not None and not (released and get_codec(codec).accepts(compute)):
            codec = None
        unit = Unit(
            number, plan, layout, compute, dp_group, callbacks, reshards=released, tier=tier, gather_codec=codec
        )
        unit.extra_reduce_groups, unit.norm_weight = (
            dp_group.extra_reduce_groups(mesh, plan.kind, is_sharded=policy.state),
            norm_weight(mesh, plan.kind),
        )
        unit.is_primary_replica = is_primary_replica(mesh, plan.kind)
        unit.trainable = unit.trainable and trains
        if unit.trainable and policy.state and own is not None:
            unit.state_tier, unit.gradient_tier = own.state, own.gradient
        elif unit.trainable and policy.state and offloaded_numel < tiers.ratio * total:
            unit.state_tier = tiers.state
            unit.gradient_tier = tiers.gradient if tiers.state is not Tier.DEVICE else Tier.DEVICE
            offloaded_numel += plan.numel
        if policy.state:
            unit.state_start, unit.state_stop = layout.shard_range(dp_group.group.index, dp_group.group.size)
        units.append(unit)
    return units


class UnitBuilder:
    """Builder that allocates the buffers of all units and gradients at once, then fills the units one by one."""

    def __init__(
        self,
        model: nn.Module,
        settings: ZeroSettings,
        tiers: Placements,
        dp_groups: list[DataParallelGroup],
        device: torch.device,
        ledger: DeviceMemoryLedger,
    ) -> None:
        self._model, self._settings, self._tiers, self._dp_groups = model, settings, tiers, dp_groups
        self._device, self._ledger = device, ledger

    def make_slot(self, name: str, numel: int, dtype: torch.dtype, tier: Tier) -> Slot:
        """Return a new slot with the storage options of this model, and account for its device memory.

        Args:
            name: Contents, for error messages and the memory ledger.
        """
        if tier is Tier.DEVICE:
            self._ledger.set_held_bytes(name, numel * dtype.itemsize)
        tiers = self._tiers
        return Slot(name, numel, dtype, tier, self._device, disk=tiers.disk, staging=tiers.staging, pin=tiers.pin)

    def fill(
        self, units: list[Unit], plans: list[UnitPlan], gradients: GradientReducer
    ) -> Iterator[tuple[Unit, torch.Tensor]]:
        """Give every unit its buffer and its initial values. Collective.

        Yields:
            Each unit with its values in place, and this rank's state span of these values (the range whose optimizer
            states it keeps) `[state_stop - state_start]`, in the dtype before the cast to `param_dtype`. The span is
            valid until the next iteration, which reshards the unit.
        """
        policy = self._settings.policy
        if not policy.param:
            mark_full_parameters(self._model, policy.stage)
        of_gradients = {id(dp_group): gradients.buffer_requests(dp_group) for dp_group in self._dp_groups}
        held = sum(_bytes(needs) for needs in of_gradients.values())
        if policy.grad:
            self._ledger.set_held_bytes("ring of gradient buffers", held)
        elif gradients.slots:
            self._ledger.set_held_bytes("gradients", held)
        of_unit: dict[int, TransportBuffer] = {}
        for dp_group in self._dp_groups:
            shared = [u for u in units if u.dp_group is dp_group and (u.reshards or (u.trainable and policy.state))]
            needs: list[BufferRequest] = [unit.buffer_request() for unit in shared] + of_gradients[id(dp_group)]
            if not needs and len(self._dp_groups) == 1:
                continue
            buffers = dp_group.transport.allocate(needs, self._device, lanes=len(gradients.slots))
            of_unit |= {id(unit): buffer for unit, buffer in zip(shared, buffers, strict=False)}
            gradients.take_buffers(dp_group, buffers[len(shared) :])
        for unit, plan in zip(units, plans, strict=True):
            buffer = of_unit.get(id(unit))
            if buffer is None:
                buffer = TransportBuffer(torch.zeros(unit.layout.padded, dtype=unit.dtype, device=self._device))
            elif unit.reshards and not buffer.shared:
                unit.transport.free_memory(buffer)  # so that only one unit at a time is unsharded
            unit.bind(buffer, self._ledger, self._make_shard_slot)
            span = self._place(unit, plan)
            yield unit, span
            del span
            unit.finish_init()
        gradients.bind_buffers()

    def _place(self, unit: Unit, plan: UnitPlan) -> torch.Tensor:
        """Store a unit's initial values, and return this rank's state span of them, see `fill`. Collective.

        Parameters constructed under `zero.Init` are exchanged in shards if possible, else gathered. Other values come
        from the first rank of the data-parallel group.
        """
        group, data = unit.dp_group.group, unit.dp_group.mesh.data
        if unit.reshards and group.size == data.size and unit.secondary_shard is None:
            own = local_shard_values(unit.parameters, unit.layout, plan.dtype, self._device)
            if own is not None:
                if unit.frees_memory:
                    unit.store_local_shard(own.to(unit.dtype))
                else:
                    unit.local_shard.copy_(own)
                return own
        if unit.dtype == plan.dtype and not unit.buffer.shared:
            unit.full.zero_()  # the padding between and after the parameters
            self._collect(unit, unit.full)
            unit.point()  # frees the parameters' original memory before the master weights are allocated
            if unit.frees_memory:
                unit.store_local_shard(unit.local_shard)
            return unit.full[unit.state_start : unit.state_stop]
        values = torch.zeros(unit.layout.padded, dtype=plan.dtype, device=self._device)
        self._collect(unit, values)
        if unit.buffer.shared:
            start, stop = unit.layout.shard_range(group.index, group.size)
            unit.local_shard.copy_(values[start:stop])
        else:
            unit.full.copy_(values)
            if unit.frees_memory:
                unit.store_local_shard(unit.local_shard)
        return values[unit.state_start : unit.state_stop]

    def _make_shard_slot(self, unit: Unit, numel: int) -> Slot:
        return self.make_slot(f"sharded parameters of {unit.names[0]}", numel, unit.dtype, unit.tier)

    def _collect(self, unit: Unit, values: torch.Tensor) -> None:
        """Fill `values` `[padded]` with the parameters of the first rank of the data-parallel group. Collective."""
        broadcast_full_parameters(
            unit.parameters, [unit.parameter_view(values, i) for i in range(len(unit.parameters))]
        )
        data = unit.dp_group.mesh.data
        if data.index == 0:
            for index, parameter in enumerate(unit.parameters):
                unit.parameter_view(values, index).copy_(parameter.detach())
        if data.size > 1 and values.numel():
            data.broadcast(values.view(torch.uint8))


def _bytes(needs: list[BufferRequest]) -> int:
    return sum(need.numel * need.dtype.itemsize for need in needs)


def check_devices(model: nn.Module, device: torch.device) -> None:
    """Raise if the model cannot be trained on `device`.

    Raises:
        ModelError: a parameter is complex, on the meta device, or on an accelerator other than `device`; or the model
            itself is a `ScriptModule`.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a ScriptModule of torch.jit, which accepts no hooks; put it into a module of Python whose "
            "forward calls it, or pass the model that was compiled"
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ModelError(f"parameter {name!r} is on the meta device and has no values; load or initialise it first")
        if parameter.is_complex():
            raise ModelError(
                f"parameter {name!r} is {parameter.dtype}: complex parameters are not supported; keep real ones and "
                "use torch.view_as_complex in the forward"
            )
        if parameter.device.type not in ("cpu", device.type) or (
            parameter.device.type == device.type
            and None not in (parameter.device.index, device.index)
            and parameter.device.index != device.index
        ):
            raise ModelError(
                f"parameter {name!r} is on {parameter.device}, but this rank trains on {device}; move the model "
                "there or leave it on the CPU"
            )
