"""Parameters that were frozen begin to be trained: their units get masters, a place for gradients, and states to come.

A unit begins as a whole. Those of its parameters that stay frozen have masters from then on, but no states, since the
update leaves out what had no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from windlass.base.errors import StorageError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.comm.transport import Buffer
from windlass.storage.slot import Home
from windlass.zero.access import put_grad
from windlass.zero.chunk import Chunk
from windlass.zero.gradient_slot import GradientSlot

if TYPE_CHECKING:
    from windlass.zero.sharded import ShardedModel


def can_grow(model: ShardedModel, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether these parameters can begin to be trained where they are; the same on all ranks."""
    assert model.update is not None
    wanted = {id(parameter) for parameter in parameters}
    units = (unit for unit in model.units if any(id(p) in wanted for p in unit.parameters))
    return not any(
        unit.trainable is False and model.update.refuses(model.masters.stepped_in(unit.dtype), _home(model))
        for unit in units
    )


def grow(model: ShardedModel, parameters: Iterable[nn.Parameter]) -> None:
    """Have `parameters` trained from now on, where `can_grow`. Collective, between a backward and a forward; all ranks
    name the same.

    Raises:
        StorageError: there is no space on disk for masters and states, on some rank; nothing was changed.
    """
    wanted = {id(parameter): parameter for parameter in parameters}
    model.order.meet("a change of parameters or states")
    model.finish_update()
    model.gradients.finish()  # of a step that has begun
    model.take_back()
    model.runtime.release_all()
    units = [u for u in model.units if not u.trainable and any(id(p) in wanted for p in u.parameters)]
    slots = [GradientSlot(unit) for unit in units]
    chunks = _take_space(model, slots)
    for parameter in wanted.values():
        put_grad(parameter, None)  # of a backward before, of which nobody took anything
    _bring_buffers(model, slots)
    assert model.update is not None
    for unit in units:
        span = unit.read_cut() if unit.released else unit.own_cut(unit.full)
        model.masters.make(unit, span)
    model.update.grow(chunks)
    if model.delayed is not None:
        for slot in slots:
            model.delayed.prepare(slot)
    model.health.check("masters of what was unfrozen could not be kept", loses=True)
    model.masters.remember_versions(units)
    for average in model.averages.values():
        average.take_in(units)
    model.watch_gradients()
    elements = sum(unit.numel for unit in units)
    logger.info(
        f"trained from now on: {plural(len(wanted), 'parameter')} more; {plural(elements, 'element')} more have masters"
    )


def _home(model: ShardedModel) -> Home:
    """Where masters and states of what is added rest: with those of the others."""
    if not model.policy.state:
        return Home.DEVICE
    others = {slot.unit.state_home for slot in model.slots}
    return model.homes.state if model.homes.ratio >= 1.0 or others == {model.homes.state} else Home.DEVICE


def _take_space(model: ShardedModel, slots: list[GradientSlot]) -> list[Chunk]:
    """The chunks of these units, and the space on disk that they will need."""
    home = _home(model)
    for slot in slots:
        slot.unit.trainable, slot.unit.state_home = True, home
    chunks = model.masters.grow(slots)
    try:
        model.reserve("what was unfrozen cannot be trained")
    except StorageError:
        for slot in slots:
            slot.unit.trainable, slot.unit.state_home = False, Home.DEVICE
        model.masters.shrink(chunks)
        raise
    return chunks


def _bring_buffers(model: ShardedModel, slots: list[GradientSlot]) -> None:
    """Buffers that peers reach, for gradients and for parameters that are whole on every rank and stepped in cuts."""
    own: dict[int, Buffer] = {}  # of a unit's gradient
    held = 0
    for family in model.families:
        units = [slot.unit for slot in slots if slot.unit.family is family]
        whole = [unit for unit in units if not unit.released and model.policy.state]
        needs = model.gradients.needs_of(family, units)
        wanted = [*(unit.need() for unit in whole), *needs]
        buffers = family.transport.extend(wanted, model.device, lanes=len(slots))
        held += sum(need.numel * need.dtype.itemsize for need in needs)
        for unit, buffer in zip(whole, buffers, strict=False):
            unit.move(buffer)
        if needs and model.policy.grad:
            model.gradients.widen(family, buffers[len(whole) :])
        elif needs:
            own |= {id(unit): buffer for unit, buffer in zip(units, buffers[len(whole) :], strict=True)}
    if held:
        model.ledger.hold(f"gradients of {slots[0].unit.names[0]} and what began with it", held)
    model.gradients.grow(slots, [own[id(slot.unit)] for slot in slots] if own else [])
