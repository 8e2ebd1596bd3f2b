"""From a plan to units with values: homes chosen, buffers allocated, rank 0's parameters spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ModelError
from windlass.base.memory import Ledger, separate
from windlass.comm.groups import DataMesh, Group
from windlass.comm.transport import Buffer, Need, Transport
from windlass.storage.slot import Home, Slot
from windlass.zero.born_units import bring_whole, note_whole, own_cut
from windlass.zero.gradients import Gradients
from windlass.zero.layout import Layout
from windlass.zero.partition import Plan
from windlass.zero.settings import Homes, Settings
from windlass.zero.unit import Unit


def effective(homes: Homes, device: torch.device, *, delayed: bool = False) -> Homes:
    """Homes that differ: where the device's memory is the host's, what rests in host memory rests on the device.

    Args:
        delayed: updates are, so that master weights and handed-over gradients are other memory in any case.
    """
    if separate(device):
        return homes

    def of(home: Home) -> Home:
        return Home.DEVICE if home is Home.HOST else home

    state, gradient = (homes.state, homes.gradient) if delayed else (of(homes.state), of(homes.gradient))
    return replace(homes, param=of(homes.param), state=state, gradient=gradient, pin=False)


def make_units(
    plans: list[Plan], settings: Settings, homes: Homes, mesh: DataMesh, group: Group, *, trains: bool
) -> list[Unit]:
    """The units, as yet without memory.

    Args:
        group: over which state is cut.
        trains: there will be gradients; else everything counts as frozen.
    """
    policy = settings.policy
    total = sum(plan.numel for plan in plans if plan.trainable)
    away = 0  # trained elements whose states rest away from the device
    units = []
    for number, plan in enumerate(plans):
        floating = plan.parameters[0].is_floating_point()
        compute = settings.compute if settings.compute is not None and floating else plan.dtype
        layout = Layout(tuple(p.numel() for p in plan.parameters), mesh.data.size)
        released = policy.param and not plan.kept
        unit = Unit(number, plan, layout, compute, released=released, home=homes.param if released else Home.DEVICE)
        unit.trainable = unit.trainable and trains
        if unit.trainable and policy.state and away < homes.ratio * total:
            unit.state_home = homes.state
            away += plan.numel
        if policy.state:
            unit.state_start, unit.state_stop = layout.cut(group.index, group.size)
        units.append(unit)
    return units


class Builder:
    """Allocates the buffers of all units and gradients at once, then fills unit by unit.

    Args:
        group: over which state is cut.
        transport: over it.
        regather: the nearer one of hpZ.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        homes: Homes,
        mesh: DataMesh,
        group: Group,
        transport: Transport,
        regather: Transport | None,
        device: torch.device,
        ledger: Ledger,
    ) -> None:
        self._model, self._settings, self._homes, self._mesh, self._group = model, settings, homes, mesh, group
        self._transport, self._regather, self._device, self._ledger = transport, regather, device, ledger

    def slot(self, name: str, numel: int, dtype: torch.dtype, home: Home) -> Slot:
        """A slot of this model."""
        if home is Home.DEVICE:
            self._ledger.hold(name, numel * dtype.itemsize)
        homes = self._homes
        return Slot(name, numel, dtype, home, self._device, tier=homes.disk, staging=homes.staging, pin=homes.pin)

    def fill(self, units: list[Unit], plans: list[Plan], gradients: Gradients) -> Iterator[tuple[Unit, torch.Tensor]]:
        """Give every unit its buffer and its values.

        Yields:
            Each unit once its parameters are in place, with this rank's state span of its values before they were cast
            `[state_stop - state_start]`, gone when the next is asked for. The unit is released, where it will be, after
            that.
        """
        policy = self._settings.policy
        if not policy.param:
            note_whole(self._model, policy.stage)
        shared = [u for u in units if u.released or (u.trainable and policy.state)]
        needs: list[Need] = [unit.need(self._transport) for unit in shared] + gradients.needs()
        if policy.grad:
            self._ledger.hold("the ring of gradients", _bytes(gradients.needs()))
        elif gradients.slots:
            self._ledger.hold("gradients", _bytes(gradients.needs()))
        lanes = len(gradients.slots)
        buffers = self._transport.allocate(needs, self._device, lanes=lanes) if needs else []
        of_unit = {id(unit): buffer for unit, buffer in zip(shared, buffers, strict=False)}
        for unit, plan in zip(units, plans, strict=True):
            buffer = of_unit.get(id(unit))
            if buffer is None:
                buffer = Buffer(torch.zeros(unit.layout.padded, dtype=unit.dtype, device=self._device))
            elif unit.released and not buffer.common:
                self._transport.vacate(buffer)  # one unit whole at a time
            unit.bind(buffer, self._transport, self._regather, self._ledger, self._rests)
            span = self._place(unit, plan)
            yield unit, span
            del span
            unit.settle_in()
        gradients.bind(buffers[len(shared) :])

    def _place(self, unit: Unit, plan: Plan) -> torch.Tensor:
        """Put a unit's values where they belong; returns this rank's state span of them. Those of parameters that were
        born sharded come piece by piece, those of others from rank 0."""
        if unit.released and self._group.size == self._mesh.data.size and unit.secondary is None:
            own = own_cut(unit.parameters, unit.layout, plan.dtype, self._device)
            if own is not None:
                if unit.frees:
                    unit.keep_cut(own.to(unit.dtype))
                else:
                    unit.own_full.copy_(own)
                return own
        values = self._values(unit, plan)
        if unit.buffer.common:
            start, stop = unit.layout.cut(self._group.index, self._group.size)
            unit.own_full.copy_(values[start:stop])
        else:
            unit.full.copy_(values)
            if unit.frees:
                unit.keep_cut(unit.own_full)
        return values[unit.state_start : unit.state_stop]

    def _rests(self, unit: Unit, numel: int) -> Slot:
        return self.slot(f"parameters of {unit.names[0]} at rest", numel, unit.dtype, unit.home)

    def _values(self, unit: Unit, plan: Plan) -> torch.Tensor:
        """Rank 0's parameters `[padded]`, in their own dtype."""
        values = torch.zeros(unit.layout.padded, dtype=plan.dtype, device=self._device)
        bring_whole(unit.parameters, [unit.parameter_view(values, i) for i in range(len(unit.parameters))])
        if self._mesh.data.index == 0:
            for index, parameter in enumerate(unit.parameters):
                unit.parameter_view(values, index).copy_(parameter.detach())
        if self._mesh.data.size > 1 and values.numel():
            process_group = self._mesh.data.process_group
            dist.broadcast(values.view(torch.uint8), self._mesh.data.ranks[0], group=process_group)
        return values


def _bytes(needs: list[Need]) -> int:
    return sum(need.numel * need.dtype.itemsize for need in needs)


def check_devices(model: nn.Module, device: torch.device) -> None:
    """The model can be trained on `device`.

    Raises:
        ModelError: a parameter is on the meta device, or on another accelerator.
    """
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
