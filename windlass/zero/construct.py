"""From a plan to units with values: homes chosen, buffers allocated, rank 0's parameters spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ModelError
from windlass.base.memory import Ledger, separate
from windlass.comm.mesh import Mesh
from windlass.comm.transport import Buffer, Need
from windlass.storage.slot import Home, Slot
from windlass.zero.born_units import bring_whole, note_whole, own_cut
from windlass.zero.family import Family, share, speaks
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
    plans: list[Plan], settings: Settings, homes: Homes, mesh: Mesh, families: list[Family], *, trains: bool
) -> list[Unit]:
    """The units, as yet without memory.

    Args:
        families: that of dense parameters first, that of experts last.
        trains: there will be gradients; else everything counts as frozen.
    """
    policy = settings.policy
    total = sum(plan.numel for plan in plans if plan.trainable)
    away = 0  # trained elements whose states rest away from the device
    units = []
    for number, plan in enumerate(plans):
        floating = plan.parameters[0].is_floating_point()
        compute = settings.compute if settings.compute is not None and floating else plan.dtype
        family = families[-1] if plan.kind.expert else families[0]
        layout = Layout(tuple(p.numel() for p in plan.parameters), family.mesh.data.size)
        alone = (
            family.group.size == 1 < families[0].group.size and homes.param is Home.DEVICE
        )  # nobody to share it with
        released = policy.param and not plan.kept and not alone
        home = homes.param if released else Home.DEVICE
        unit = Unit(number, plan, layout, compute, family, released=released, home=home)
        unit.sums, unit.share = family.sums(mesh, plan.kind, cut=policy.state), share(mesh, plan.kind)
        unit.speaks = speaks(mesh, plan.kind)
        unit.trainable = unit.trainable and trains
        if unit.trainable and policy.state and away < homes.ratio * total:
            unit.state_home = homes.state
            away += plan.numel
        if policy.state:
            unit.state_start, unit.state_stop = layout.cut(family.group.index, family.group.size)
        units.append(unit)
    return units


class Builder:
    """Allocates the buffers of all units and gradients at once, then fills unit by unit."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        homes: Homes,
        families: list[Family],
        device: torch.device,
        ledger: Ledger,
    ) -> None:
        self._model, self._settings, self._homes, self._families = model, settings, homes, families
        self._device, self._ledger = device, ledger

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
        of_gradients = {id(family): gradients.needs(family) for family in self._families}
        held = sum(_bytes(needs) for needs in of_gradients.values())
        if policy.grad:
            self._ledger.hold("the ring of gradients", held)
        elif gradients.slots:
            self._ledger.hold("gradients", held)
        of_unit: dict[int, Buffer] = {}
        for family in self._families:
            shared = [u for u in units if u.family is family and (u.released or (u.trainable and policy.state))]
            needs: list[Need] = [unit.need() for unit in shared] + of_gradients[id(family)]
            if not needs and len(self._families) == 1:
                continue
            buffers = family.transport.allocate(needs, self._device, lanes=len(gradients.slots))
            of_unit |= {id(unit): buffer for unit, buffer in zip(shared, buffers, strict=False)}
            gradients.take(family, buffers[len(shared) :])
        for unit, plan in zip(units, plans, strict=True):
            buffer = of_unit.get(id(unit))
            if buffer is None:
                buffer = Buffer(torch.zeros(unit.layout.padded, dtype=unit.dtype, device=self._device))
            elif unit.released and not buffer.common:
                unit.transport.vacate(buffer)  # one unit whole at a time
            unit.bind(buffer, self._ledger, self._rests)
            span = self._place(unit, plan)
            yield unit, span
            del span
            unit.settle_in()
        gradients.bind()

    def _place(self, unit: Unit, plan: Plan) -> torch.Tensor:
        """Put a unit's values where they belong; returns this rank's state span of them. Those of parameters that were
        born sharded come piece by piece, those of others from rank 0."""
        group, data = unit.family.group, unit.family.mesh.data
        if unit.released and group.size == data.size and unit.secondary is None:
            own = own_cut(unit.parameters, unit.layout, plan.dtype, self._device)
            if own is not None:
                if unit.frees:
                    unit.keep_cut(own.to(unit.dtype))
                else:
                    unit.own_full.copy_(own)
                return own
        if unit.dtype == plan.dtype and not unit.buffer.common:
            unit.full.zero_()  # what lies between and after the parameters
            self._collect(unit, unit.full)
            unit.point()  # frees the parameters' own memory before masters take theirs
            if unit.frees:
                unit.keep_cut(unit.own_full)
            return unit.full[unit.state_start : unit.state_stop]
        values = torch.zeros(unit.layout.padded, dtype=plan.dtype, device=self._device)
        self._collect(unit, values)
        if unit.buffer.common:
            start, stop = unit.layout.cut(group.index, group.size)
            unit.own_full.copy_(values[start:stop])
        else:
            unit.full.copy_(values)
            if unit.frees:
                unit.keep_cut(unit.own_full)
        return values[unit.state_start : unit.state_stop]

    def _rests(self, unit: Unit, numel: int) -> Slot:
        return self.slot(f"parameters of {unit.names[0]} at rest", numel, unit.dtype, unit.home)

    def _collect(self, unit: Unit, values: torch.Tensor) -> None:
        """Fill `values` `[padded]` with the parameters of the first data rank. Collective."""
        bring_whole(unit.parameters, [unit.parameter_view(values, i) for i in range(len(unit.parameters))])
        data = unit.family.mesh.data
        if data.index == 0:
            for index, parameter in enumerate(unit.parameters):
                unit.parameter_view(values, index).copy_(parameter.detach())
        if data.size > 1 and values.numel():
            dist.broadcast(values.view(torch.uint8), data.ranks[0], group=data.process_group)


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
