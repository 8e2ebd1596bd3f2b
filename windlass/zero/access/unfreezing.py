"""Unfreezing of parameters after `initialize`: their units get master weights and memory for gradients and states.

The whole unit becomes trainable. Its other parameters, which stay frozen, get master weights too. They get no optimizer
states, because the update skips parameters without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from windlass.base.errors import StorageError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.comm.transport import TransportBuffer
from windlass.storage.slot import Tier
from windlass.zero.core.collective_scheduler import SyncPoint
from windlass.zero.core.gradient_slot import GradientSlot
from windlass.zero.core.sharded_parameter import put_grad
from windlass.zero.update.update_chunk import UpdateChunk

if TYPE_CHECKING:
    from windlass.zero.sharded_model import ShardedModel


def can_unfreeze(model: ShardedModel, parameters: Iterable[nn.Parameter]) -> bool:
    """Return True if these parameters can become trainable without a new engine. Equal on all ranks."""
    assert model.update is not None
    requested = {id(parameter) for parameter in parameters}
    units = (unit for unit in model.units if any(id(p) in requested for p in unit.parameters))
    return not any(
        unit.trainable is False
        and model.update.cannot_step(model.masters.step_dtype(unit.dtype), _unfrozen_tier(model))
        for unit in units
    )


def unfreeze(model: ShardedModel, parameters: Iterable[nn.Parameter]) -> None:
    """Make frozen `parameters` trainable. Collective, between a backward and the next forward.

    Args:
        model: Model for which `can_unfreeze` returned True.
        parameters: The same parameters on all ranks.

    Raises:
        StorageError: some rank has too little disk space for master weights and states, and the model is unchanged; or
            a write of the new master weights failed, and the model's state is lost.
    """
    requested = {id(parameter): parameter for parameter in parameters}
    model.scheduler.sync(SyncPoint.STATE_CHANGE)
    model.finish_update()
    model.reducer.finish()  # reductions of the last backward may be in flight
    model.recapture_parameters()
    model.runtime.reshard_all()
    units = [u for u in model.units if not u.trainable and any(id(p) in requested for p in u.parameters)]
    slots = [GradientSlot(unit) for unit in units]
    chunks = _take_space(model, slots)
    for parameter in requested.values():
        put_grad(parameter, None)  # left by an earlier backward, before the parameter had a hook
    _bring_buffers(model, slots)
    assert model.update is not None
    for unit in units:
        if model.settings.trained_codec is None and unit.gather_codec is not None:
            unit.use_gather_codec(None)  # a codec would round away updates below its quantization step
        span = unit.read_local_shard() if unit.reshards else unit.local_span(unit.full)
        model.masters.create(unit, span)
    model.update.add_chunks(chunks)
    model.quantization_errors.add(slots)
    if model.delayed_update is not None:
        for slot in slots:
            model.delayed_update.allocate_spare(slot)
    model.disk_health.check("master weights of unfrozen parameters could not be stored", loses=True)
    model.masters.remember_versions(units)
    for average in model.averages.values():
        average.add_units(units)
    model.hook_gradients()
    elements = sum(unit.numel for unit in units)
    logger.info(
        f"unfroze {plural(len(requested), 'parameter')}; their units have new master weights of "
        f"{plural(elements, 'element')}"
    )


def _unfrozen_tier(model: ShardedModel) -> Tier:
    """Return the tier of master weights and states of unfrozen parameters.

    Without sharded states this is the device. If tiers were chosen for each unit, it is the slowest of them. Otherwise
    it is the configured tier if that holds the states of all trainable units, else the device.
    """
    if not model.policy.state:
        return Tier.DEVICE
    if model.tiers.of_units:
        return model.tiers.state
    others = {slot.unit.state_tier for slot in model.slots}
    return model.tiers.state if model.tiers.ratio >= 1.0 or others == {model.tiers.state} else Tier.DEVICE


def _take_space(model: ShardedModel, slots: list[GradientSlot]) -> list[UpdateChunk]:
    """Make the units of `slots` trainable, create their chunks, and reserve their disk space. Return the chunks.

    Raises:
        StorageError: some rank has too little disk space. The units are frozen again.
    """
    tier = _unfrozen_tier(model)
    for slot in slots:
        slot.unit.trainable, slot.unit.state_tier = True, tier
        slot.unit.gradient_tier = model.tiers.gradient if tier is not Tier.DEVICE else Tier.DEVICE
    chunks = model.masters.add_slots(slots)
    try:
        model.reserve("the unfrozen parameters cannot be trained")
    except StorageError:
        for slot in slots:
            slot.unit.trainable, slot.unit.state_tier = False, Tier.DEVICE
            slot.unit.gradient_tier = Tier.DEVICE
        model.masters.remove_chunks(chunks)
        raise
    return chunks


def _bring_buffers(model: ShardedModel, slots: list[GradientSlot]) -> None:
    """Allocate gradient buffers that peers can read, and add `slots` to the reducer. Collective.

    Units that are never resharded but have sharded states also move to buffers that peers can read, because each rank
    updates a shard and the ranks gather the result.
    """
    own: dict[int, TransportBuffer] = {}  # gradient buffer, by id of its unit
    held = 0
    for dp_group in model.dp_groups:
        units = [slot.unit for slot in slots if slot.unit.dp_group is dp_group]
        full = [unit for unit in units if not unit.reshards and model.policy.state]
        needs = model.reducer.extra_buffer_requests(dp_group, units)
        requested = [*(unit.buffer_request() for unit in full), *needs]
        buffers = dp_group.transport.extend(requested, model.device, lanes=len(slots))
        held += sum(need.numel * need.dtype.itemsize for need in needs)
        for unit, buffer in zip(full, buffers, strict=False):
            unit.move_to(buffer)
        if needs and model.policy.grad:
            model.reducer.replace_ring(dp_group, buffers[len(full) :])
        elif needs:
            own |= {id(unit): buffer for unit, buffer in zip(units, buffers[len(full) :], strict=True)}
    if held:
        model.ledger.set_held_bytes(f"gradients of {slots[0].unit.names[0]} and the units unfrozen with it", held)
    model.reducer.add_slots(slots, [own[id(slot.unit)] for slot in slots] if own else [])
