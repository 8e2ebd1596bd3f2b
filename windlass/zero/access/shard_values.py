"""Reads and writes one parameter's weight, gradient and optimizer state, all that this rank computes with (its part of
the model's) or this rank's piece of that, at any stage.

All functions with `part` are collective over the data ranks, which call them for the same parameters in the same order.
Of an expert that is a module of its own these are the ranks that hold it; others may have fewer experts, or more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.rank_group import RankGroup
from windlass.kernels.update_tensors import count_scales
from windlass.optim import quantized_states
from windlass.optim.cpu_optimizer import StateFormat
from windlass.optim.elementwise_optimizers import SCALAR_STATES
from windlass.storage.slot import Tier
from windlass.zero.access.differentiable import differentiable_full
from windlass.zero.core.parameter_registry import ParameterLocation, require
from windlass.zero.core.unit import expert_data_group
from windlass.zero.sharded_init import initial_shard
from windlass.zero.update.elementwise_update import state_dtype
from windlass.zero.update.update_protocol import Update


def part_param(parameter: nn.Parameter) -> torch.Tensor:
    """The whole weight as a new float32 tensor (or the parameter's own dtype if that is not trained): the master
    weight. Before `initialize`, of a parameter that was born sharded, in its own dtype.

    It may be part of a loss: its gradient, in the parameter's dtype, is added to the parameter's own.
    """
    birth = initial_shard.find(parameter)
    return birth.full_value() if birth is not None else differentiable_full(parameter, _whole(_finished(parameter)))


def _whole(place: ParameterLocation) -> torch.Tensor:
    masters = place.model.masters
    if not masters.chunks_of(place.unit):
        with place.model.runtime.unsharded([place.unit], experts_only=is_expert_only(place)):
            return place.unit.parameter_view(place.unit.full, place.index).detach().clone()
    place.model.recapture_parameters()
    return assemble(place, masters.read_span(place.unit, among=_ranks_with_parameter(place)))


def part_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient as it stands, reduced over ranks, unclipped, loss scale removed; None if there is none."""
    place = require(parameter)
    number = _slot_number(place)
    if number is None:
        return None
    model, slot = place.model, place.model.slots[number]
    alone = is_expert_only(place)
    model.scheduler.sync("the reading of a gradient", experts_only=alone)
    model.reducer.finish()
    group = place.unit.dp_group.mesh.data if alone else model.mesh.dense.data
    facts = torch.tensor([int(bool(slot.written)), int(place.index in slot.used)], device=model.device)
    if group.size > 1:
        dist.all_reduce(facts, group=group.process_group)
    if facts[1] == 0:
        return None
    if facts[0] > 0 or not slot.has_reduced:  # or only another replica has some
        wanted = [other is slot for other in model.slots]
        model.reducer.reduce_units(wanted)
    if model.reducer.keeps_local_gradients:  # their mean over ranks is the reduced gradient
        mean = place.unit.parameter_view(slot.read(), place.index) / group.size
        if group.size > 1:
            dist.all_reduce(mean, group=group.process_group)
        return mean.div_(model.loss_scale())
    part = model.agreement.local_part(place.unit, slot.read())
    whole = assemble(
        place, model.agreement.sum_replicas(place.unit, part.clone()) if place.unit.extra_reduce_groups else part
    )
    return whole.div_(model.loss_scale())


def part_states(parameter: nn.Parameter, *wanted: str) -> dict[str, Any]:
    """The whole optimizer states of these names, or all that any rank has: tensors, or what else the rule keeps (a
    number, a name, a list). Empty before the first step."""
    place = _finished(parameter)
    with place.model.masters.resident([place.unit], among=_ranks_with_parameter(place)):
        kept = _coded(place)
        mine = [(start, _checked_state(kept, state, wanted)) for start, _, state in _state(place)]
    found: list[list[tuple[int, dict[str, Any]]]] = [mine]
    group = place.unit.dp_group.group
    if group.size > 1:
        found = [[]] * group.size
        dist.all_gather_object(found, mine, group=group.process_group)
    keys = dict.fromkeys(key for entry in found for _, values in entry for key in values)
    return {key: _assemble_state(place, key, found) for key in keys}


def _checked_state(kept: dict[str, StateFormat], state: dict[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """What peers are told of one piece's state: what was asked for, or all but the scales of codes."""
    scales = [f"{key}_scale" for key in kept]
    read = {key: _read(kept, state, key) for key in wanted or state if key in state and (wanted or key not in scales)}
    return {key: one.detach().cpu().clone() if isinstance(one, torch.Tensor) else one for key, one in read.items()}


def _assemble_state(place: ParameterLocation, key: str, found: list[list[tuple[int, dict[str, Any]]]]) -> Any:
    """One state of what every rank has of it, by where it starts in the parameter."""
    of_ranks = [[(at, values[key]) for at, values in entry if values.get(key) is not None] for entry in found]
    parts = sorted((part for entry in of_ranks for part in entry), key=lambda part: part[0])
    if not parts:
        return None
    shape = place.unit.shapes[place.index]
    first = parts[0][1]
    if not isinstance(first, torch.Tensor):
        return first
    if first.shape == shape and key not in SCALAR_STATES:
        return first.to(place.model.device)
    if first.dim() == 0:
        return first
    if not _steps_segments(place.model.update):  # its owner has all of it, whatever it is
        return first.to(place.model.device)
    if not place.model.policy.state:
        parts = of_ranks[0]
    if sum(value.numel() for _, value in parts) != shape.numel():
        raise ModelError(
            f"state {key!r} of {place.name!r} belongs to pieces of it and has no whole (scales of 8-bit states, say); "
            "use another state_dtype where optimizer states are to be read whole"
        )
    return torch.cat([value.reshape(-1) for _, value in parts]).view(shape).to(place.model.device)


def set_part_param(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole weight; every rank passes the same `value`, of the parameter's shape."""
    place = require(parameter)
    _check_shape(place, value)
    flat = value.detach().reshape(-1)
    with place.model.editing_parameters([place.unit], experts_only=is_expert_only(place)):
        if not place.model.masters.chunks_of(place.unit):
            _set_frozen(place, value)
        for index, start, stop, piece in place.model.masters.pieces(place.unit):
            if index == place.index:
                piece.copy_(flat[start:stop])


def set_part_grad(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the whole gradient of this step, unscaled; every rank passes the same `value`."""
    place = require(parameter)
    _check_shape(place, value)
    if part_grad(parameter) is None:
        raise ModelError(f"{place.name!r} has no gradient to replace; set it between backward and step")
    number = _slot_number(place)
    assert number is not None
    slot = place.model.slots[number]
    flat, gradient = value.detach().reshape(-1), slot.read()
    factor = place.model.loss_scale() / math.prod(group.size for group in place.unit.extra_reduce_groups)
    if place.model.reducer.keeps_local_gradients:  # the same on every rank, so it is their mean too
        place.unit.parameter_view(gradient, place.index).copy_(value).mul_(factor)
        slot.write(gradient)
        return
    for piece in place.unit.pieces():
        if piece.index == place.index:
            gradient.narrow(0, piece.offset, piece.numel).copy_(flat[piece.start : piece.stop]).mul_(factor)
    slot.write(gradient)


def set_part_state(parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Set the whole optimizer state `key`; every rank passes the same `value`.

    A value of the parameter's shape is cut into this rank's pieces; any other (a step count) is kept as it is.
    """
    place = _finished(parameter)
    shape, on, update = place.unit.shapes[place.index], _step_device(place), place.model.update
    chunks = place.model.masters.chunks_of(place.unit)
    if update is not None and chunks and value.shape == shape and key not in SCALAR_STATES:
        value = value.to(state_dtype(update.optimizer, value.dtype, chunks[0]))
    with place.model.masters.resident([place.unit], changes=True, among=_ranks_with_parameter(place)):
        for start, stop, state in _state(place):
            if _steps_segments(update) and value.shape == shape and key not in SCALAR_STATES:
                _write(place, state, key, value.detach().reshape(-1)[start:stop].to(on, copy=True))
            elif value.dim() == 0 and (key in SCALAR_STATES or value.shape != shape):
                state[key] = value.detach().clone()
            else:
                _write(place, state, key, value.detach().to(on, copy=True))


def set_plain_state(parameter: nn.Parameter, key: str, value: Any) -> None:
    """Set the optimizer state `key` to something that is no tensor, as `part_states` gave it."""
    place = _updated(parameter)
    if isinstance(value, int | float) and _steps_segments(place.model.update):
        value = torch.tensor(float(value))  # old checkpoints of torch have plain counts, which its rules no longer take
    for _, _, state in _state(place):
        state[key] = copy.deepcopy(value)


def local_param(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's piece of the master weight, flat; empty where other ranks have it all. A view of it, unless it is on
    disk or updated in several chunks."""
    place = _updated(parameter)
    masters = place.model.masters
    with masters.resident([place.unit], alone=True):
        pieces = [piece for index, _, _, piece in masters.pieces(place.unit) if index == place.index]
        return _joined(place, pieces)


def local_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's piece of the reduced gradient, flat (loss scale included), as a view; empty where other ranks have it
    all; None if there is no gradient."""
    place = require(parameter)
    number = _slot_number(place)
    if number is None:
        return None
    slot = place.model.slots[number]
    _refuse_local_gradients(place)
    place.model.reducer.finish()
    if not slot.has_reduced or (slot.shard is None and slot.storage is None):
        return None
    for piece in place.unit.pieces():
        if piece.index == place.index:
            return slot.read().narrow(0, piece.offset, piece.numel)
    return slot.read().narrow(0, 0, 0)


def local_state(parameter: nn.Parameter, key: str) -> torch.Tensor | None:
    """This rank's piece of the optimizer state `key`; None if it has none. A view of it, unless it is on disk,
    updated in several chunks or kept in 8 bits."""
    place = _updated(parameter)
    with place.model.masters.resident([place.unit], alone=True):
        kept = _coded(place)
        found = [value for _, _, state in _state(place) if (value := _read(kept, state, key)) is not None]
        if not found:
            return None
        if not isinstance(found[0], torch.Tensor):
            return torch.tensor(found[0])
        return found[0] if found[0].dim() == 0 else _joined(place, found)


def set_local_param(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's piece of the weight. Collective: every rank sets its own (or an empty one)."""
    place = require(parameter)
    masters = place.model.masters
    with place.model.editing_parameters([place.unit], experts_only=is_expert_only(place)):
        pieces = [piece for index, _, _, piece in masters.pieces(place.unit) if index == place.index]
        _check_piece(place, sum(piece.numel() for piece in pieces), value)
        for piece, part in zip(pieces, _split(value, [piece.numel() for piece in pieces]), strict=True):
            piece.copy_(part.reshape(-1))


def set_local_grad(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's piece of the reduced gradient, loss scale included."""
    place = require(parameter)
    piece = local_grad(parameter)
    if piece is None:
        raise ModelError(f"this rank has no gradient of {place.name!r} to replace")
    _check_piece(place, piece.numel(), value)
    number = _slot_number(place)
    assert number is not None
    slot = place.model.slots[number]
    gradient = slot.read()
    for own in place.unit.pieces():
        if own.index == place.index:
            gradient.narrow(0, own.offset, own.numel).copy_(value.reshape(-1))
    slot.write(gradient)


def set_local_state(parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Set this rank's piece of the optimizer state `key`."""
    place = _updated(parameter)
    on = _step_device(place)
    with place.model.masters.resident([place.unit], changes=True, alone=True):
        states = [(stop - start, state) for start, stop, state in _state(place)]
        now = [state.get(key) for _, state in states]
        held = sum(one.numel() for one in now if isinstance(one, torch.Tensor) and one.dim() > 0)
        if held and held != value.numel():
            raise ModelError(f"state {key!r} of {place.name!r} has {held} elements here, not {value.numel()}")
        if value.dim() == 0:
            for _, state in states:
                state[key] = value.detach().clone()
            return
        for (_, state), part in zip(states, _split(value, [size for size, _ in states]), strict=True):
            _write(place, state, key, part.detach().to(on, copy=True))


def _finished(parameter: nn.Parameter) -> ParameterLocation:
    """As `require`, with no update of the model under way. Collective."""
    place = require(parameter)
    place.model.scheduler.sync("the reading of parameters or states", experts_only=is_expert_only(place))
    place.model.finish_update()
    return place


def is_expert_only(place: ParameterLocation) -> bool:
    """Whether a parameter belongs to an expert that is here whole: ranks along ep have others, and not as many."""
    return place.unit.kind.is_expert and place.unit.placements[place.index].is_full


def _ranks_with_parameter(place: ParameterLocation) -> RankGroup | None:
    """The ranks that read or set it together; None: all."""
    return expert_data_group([place.unit]) if is_expert_only(place) else None


def _updated(parameter: nn.Parameter) -> ParameterLocation:
    """As `require`, with masters and states as after the last step, whatever the other ranks do."""
    place = require(parameter)
    place.model.wait_for_update()
    return place


def _joined(place: ParameterLocation, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Pieces that follow each other, as one tensor: the very piece where there is one, and it stays in memory."""
    if not pieces:
        return torch.empty(0, device=_step_device(place))
    stays = len(pieces) == 1 and place.unit.state_tier is not Tier.NVME
    return pieces[0] if stays else torch.cat([piece.reshape(-1) for piece in pieces])


def _split(value: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    if len(sizes) == 1:
        return [value if value.dim() != 1 else value.reshape(-1)]
    return list(value.reshape(-1).split(sizes)) if sizes else []


def _step_device(place: ParameterLocation) -> torch.device:
    chunks = place.model.masters.chunks_of(place.unit)
    return chunks[0].device if chunks else place.model.device


def _refuse_local_gradients(place: ParameterLocation) -> None:
    if place.model.reducer.keeps_local_gradients:
        raise ModelError(
            f"{place.name!r} has no shard of a reduced gradient: {type(place.model.update).__name__} reduces the local "
            "gradients itself, in the step; use full_grad and set_full_grad, which take the mean over ranks"
        )


def _steps_segments(update: Update | None) -> bool:
    """Return True if each rank has the states of its own flat segments, instead of an owner those of the whole."""
    return update is not None and not update.needs_whole_parameters


def _slot_number(place: ParameterLocation) -> int | None:
    return next((n for n, slot in enumerate(place.model.slots) if slot.unit is place.unit), None)


def _state(place: ParameterLocation) -> list[tuple[int, int, dict[str, Any]]]:
    """This rank's optimizer state of a parameter: `(start, stop, state)` for each piece it steps."""
    update = place.model.update
    if update is None:
        return []
    return [
        (tenancy.start, tenancy.stop, update.state_offload.states[tenancy.state_key])
        for tenancy in update.state_entries(place.unit)
        if tenancy.index == place.index
    ]


def _coded(place: ParameterLocation) -> dict[str, StateFormat]:
    """The states of a parameter that are kept in 8 bits."""
    update = place.model.update
    found = update.formats().get(id(place.unit.parameters[place.index]), {}) if update is not None else {}
    return {key: kept for key, kept in found.items() if kept.is_quantized}


def _read(kept: dict[str, StateFormat], state: dict[str, Any], key: str) -> Any:
    """A state's value; of one in 8 bits what its codes mean, in float32."""
    value, how = state.get(key), kept.get(key)
    if how is None or value is None:
        return value
    wide = torch.empty(value.shape)
    scales = quantized_states.BlockScales(0, value.numel(), 0, state[f"{key}_scale"])
    quantized_states.dequantize_state(value.reshape(-1), 0, [scales], how.is_signed, wide.view(-1))
    return wide


def _write(place: ParameterLocation, state: dict[str, Any], key: str, value: torch.Tensor) -> None:
    """Set a state's value; of one in 8 bits, to the nearest code."""
    kept = _coded(place).get(key)
    if kept is None:
        state[key] = value
        return
    state[key] = torch.empty(value.shape, dtype=torch.uint8)
    state[f"{key}_scale"] = torch.empty(count_scales(value.numel()))
    quantized_states.quantize_state(value.reshape(-1), state[key].view(-1), state[f"{key}_scale"], kept.is_signed)


def assemble(place: ParameterLocation, span: torch.Tensor) -> torch.Tensor:
    """The whole parameter-shaped tensor, where the model computes, of which each rank has the part in its span of the
    unit, wherever that rests. Collective."""
    model, unit = place.model, place.unit
    layout, group = unit.layout, unit.dp_group.group
    offset, numel = layout.offsets[place.index], layout.numels[place.index]
    whole = torch.empty(unit.shapes[place.index], dtype=span.dtype, device=model.device)
    flat = whole.view(-1)
    cut = span.numel() < layout.padded
    for rank in range(group.size) if cut else [group.index]:
        first, last = layout.shard_range(rank, group.size) if cut else (0, layout.padded)
        begin, end = max(first, offset), min(last, offset + numel)
        if begin >= end:
            continue
        part = flat[begin - offset : end - offset]
        if rank == group.index:
            part.copy_(span[begin - first : end - first])
        if cut:
            dist.broadcast(part, group.ranks[rank], group=group.process_group)
    return whole


def _set_frozen(place: ParameterLocation, value: torch.Tensor) -> None:
    unit = place.unit
    if not unit.reshards:
        with torch.no_grad():
            unit.parameter_view(unit.full, place.index).copy_(value)
        return
    start, stop = unit.layout.shard_range(place.unit.dp_group.group.index, place.unit.dp_group.group.size)
    flat = value.detach().reshape(-1)
    own = unit.read_local_shard()
    for piece in unit.layout.pieces(start, stop):
        if piece.index == place.index:
            own.narrow(0, piece.offset, piece.numel).copy_(flat[piece.start : piece.stop])
    unit.write_local_shard(own)


def _check_shape(place: ParameterLocation, value: torch.Tensor) -> None:
    shape = place.unit.shapes[place.index]
    if value.shape != shape:
        raise ModelError(f"{place.name!r} has shape {tuple(shape)}, the value has {tuple(value.shape)}")


def _check_piece(place: ParameterLocation, numel: int, value: torch.Tensor) -> None:
    if numel != value.numel():
        raise ModelError(f"this rank has {numel} elements of {place.name!r}, the value has {value.numel()}")
