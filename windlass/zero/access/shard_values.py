"""Access to the part of one parameter that this rank computes with, and to this rank's fragment of it.

The functions read and set the weight, the gradient and optimizer states, at any ZeRO stage.

Two groups of functions differ in how much of the parameter they read or set:

- `part_*` and `set_part_*`: the unsharded tensor that this rank computes with. Under tensor or expert parallelism this
  is the rank's part of the model's parameter; `full_values` has the functions for the full parameter. These functions
  are collective over the data-parallel ranks, which call them for the same parameters in the same order. For an expert
  that is a separate module, these are the ranks that hold the expert. Other ranks may hold another number of experts.
- `local_*` and `set_local_*`: this rank's ZeRO fragment, flat. Only `set_local_param` is collective.

All functions of a parameter raise ModelError if it belongs to no engine, except `part_param` of a parameter constructed
under `zero.Init`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.rank_group import RankGroup
from windlass.kernels.update_tensors import count_scales
from windlass.optim import quantized_states
from windlass.optim.cpu_optimizer import StateFormat
from windlass.optim.elementwise_optimizers import SCALAR_STATES
from windlass.storage.slot import Tier
from windlass.zero.access.differentiable import differentiable_full
from windlass.zero.core.collective_scheduler import SyncPoint
from windlass.zero.core.unit import expert_data_group
from windlass.zero.parameter_registry import ParameterLocation, require
from windlass.zero.sharded_init import initial_shard
from windlass.zero.update.elementwise_update import state_dtype
from windlass.zero.update.master_weights import copy_differing
from windlass.zero.update.update_protocol import Update


def part_param(parameter: nn.Parameter) -> torch.Tensor:
    """Return a new tensor with the master weight of the part of the parameter that this rank computes with.

    Collective. The dtype is that of the master weights (by default float32). A frozen parameter, or one constructed
    under `zero.Init` before `initialize`, has no master weight and is returned in its own dtype.

    The result may be part of a loss. Its gradient is cast to the parameter's dtype and added to the parameter's
    gradient.
    """
    init_shard = initial_shard.find(parameter)
    return (
        init_shard.full_value()
        if init_shard is not None
        else differentiable_full(parameter, _whole(_finished(parameter)))
    )


def _whole(place: ParameterLocation) -> torch.Tensor:
    masters = place.model.masters
    place.model.require_weights_on_device(place.unit, place.name)
    if not masters.chunks_of(place.unit):
        with place.model.runtime.exact_values(place.unit, experts_only=is_expert_only(place)) as values:
            return values[place.index].clone(memory_format=torch.contiguous_format)
    place.model.recapture_parameters()
    return assemble(place, masters.read_span(place.unit, among=_ranks_with_parameter(place)))


def part_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the current gradient of the part that this rank computes with, or None if no rank has a gradient.

    The gradient is reduced over ranks and not clipped, and the loss scale is divided out. Collective.
    """
    place = require(parameter)
    number = _slot_number(place)
    if number is None:
        return None
    model, slot = place.model, place.model.slots[number]
    alone = is_expert_only(place)
    model.runtime.end_failed_backwards()
    model.scheduler.sync(SyncPoint.GRADIENT_READ, experts_only=alone)
    model.reducer.finish()
    group = place.unit.dp_group.mesh.data if alone else model.mesh.dense.data
    facts = torch.tensor([int(bool(slot.written)), int(place.index in slot.used)], device=model.device)
    group.all_reduce(facts)
    if facts[1] == 0:
        return None
    model.state_offloader.require_on_device(place.name, place.unit, "gradients")
    # Reduce unreduced gradients. If only another replica (MiCS) has a gradient, reduce zeros in this replica.
    if facts[0] > 0 or not slot.has_reduced:
        requested = [other is slot for other in model.slots]
        model.reducer.reduce_units(requested)
    if model.reducer.keeps_local_gradients:  # the mean of the local gradients is the reduced gradient
        mean = place.unit.parameter_view(slot.read(), place.index) / group.size
        return group.all_reduce(mean).div_(model.callbacks.loss_scale())
    part = model.agreement.local_part(place.unit, slot.read())
    full = assemble(
        place, model.agreement.sum_replicas(place.unit, part.clone()) if place.unit.extra_reduce_groups else part
    )
    return full.div_(model.callbacks.loss_scale())


def part_states(parameter: nn.Parameter, *wanted: str) -> dict[str, Any]:
    """Return the optimizer states of the part that this rank computes with, by name. Collective.

    Args:
        wanted: Names of states. No names: all states that any rank has.

    Returns:
        Tensors, or other values that the optimizer keeps (a number, a string, a list). Empty before the first step.

    Raises:
        ModelError: a state exists per shard (e.g. the scales of 8-bit states) and cannot be assembled.
    """
    place = _finished(parameter)
    _require_states(place)
    with place.model.masters.resident([place.unit], among=_ranks_with_parameter(place)):
        kept = _coded(place)
        local = [(start, _checked_state(kept, state, wanted)) for start, _, state in _state(place)]
    return _assemble_states(place, place.unit.dp_group.group.all_gather_object(local))


def replica_states(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the same as `part_states` where this rank has all states of the parameter, as at stage 0. Not collective.

    Raises:
        ModelError: the states are offloaded, or the parameter belongs to no engine.
    """
    place = _updated(parameter)
    _require_states(place)
    with place.model.masters.resident([place.unit], alone=True):
        kept = _coded(place)
        return _assemble_states(
            place, [[(start, _checked_state(kept, state, ())) for start, _, state in _state(place)]]
        )


def _checked_state(kept: dict[str, StateFormat], state: dict[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """Return the entries of one fragment's state to send to peers: the requested ones, or all if none is requested.

    The scales of quantized states are returned only if requested. Tensors are copied to the CPU.
    """
    scales = [f"{key}_scale" for key in kept]
    read = {key: _read(kept, state, key) for key in wanted or state if key in state and (wanted or key not in scales)}
    return {key: one.detach().cpu().clone() if isinstance(one, torch.Tensor) else one for key, one in read.items()}


def _assemble_states(place: ParameterLocation, found: list[list[tuple[int, dict[str, Any]]]]) -> dict[str, Any]:
    """Return all states in `found`, by name; see `_assemble_state`."""
    keys = dict.fromkeys(key for entry in found for _, values in entry for key in values)
    return {key: _assemble_state(place, key, found) for key in keys}


def _assemble_state(place: ParameterLocation, key: str, found: list[list[tuple[int, dict[str, Any]]]]) -> Any:
    """Return the state `key`, assembled from the fragments of all ranks.

    Args:
        found: For each rank a list of `(start of the fragment in the parameter, its states)`.

    Raises:
        ModelError: the state exists per shard and cannot be assembled.
    """
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
    if not _steps_segments(place.model.update):  # the owner rank keeps the state for all elements
        is_single = not shape and first.shape == (1,)  # a 0-d parameter, see `OwnedParameter.stepped_shape`
        return (first.view(()) if is_single else first).to(place.model.device)
    if not place.model.policy.state:  # every rank has the state for all elements
        parts = of_ranks[0]
    if sum(value.numel() for _, value in parts) != shape.numel():
        raise ModelError(
            f"state {key!r} of {place.name!r} exists per shard and cannot be assembled (e.g. the scales of 8-bit "
            "states); use another state_dtype to read full optimizer states"
        )
    return torch.cat([value.reshape(-1) for _, value in parts]).view(shape).to(place.model.device)


def set_part_param(parameter: nn.Parameter, value: torch.Tensor, *, keeps_unchanged: bool = False) -> None:
    """Set the weight of the part that this rank computes with, and its master weight. Collective.

    Args:
        value: Tensor of the parameter's shape, equal on all data-parallel ranks.
        keeps_unchanged: Keep master weights that equal `value` when they are rounded to its dtype.

    Raises:
        ModelError: `value` has another shape.
    """
    place = require(parameter)
    _check_shape(place, value)
    _require_weights(place)
    flat = value.detach().reshape(-1)
    if keeps_unchanged and not place.unit.reshards:
        # In-place changes may exist on one rank alone, and would otherwise be copied to the master weights there.
        place.model.recapture_parameters()
        with torch.no_grad():
            place.unit.parameter_view(place.unit.full, place.index).copy_(value)
        place.model.masters.accept_version(parameter)
    with place.model.editing_parameters([place.unit], experts_only=is_expert_only(place)):
        if not place.model.masters.chunks_of(place.unit):
            _set_frozen(place, value)
        for index, start, stop, piece in place.model.masters.pieces(place.unit):
            if index == place.index and keeps_unchanged:
                copy_differing(piece, flat[start:stop])
            elif index == place.index:
                piece.copy_(flat[start:stop])


def set_part_grad(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient of this step, of the part that this rank computes with. Collective.

    Args:
        value: Gradient without the loss scale, of the parameter's shape, equal on all data-parallel ranks.

    Raises:
        ModelError: there is no gradient to replace, or `value` has another shape.
    """
    place = require(parameter)
    _check_shape(place, value)
    if part_grad(parameter) is None:
        raise ModelError(f"{place.name!r} has no gradient to replace; set it between backward and step")
    number = _slot_number(place)
    assert number is not None
    slot = place.model.slots[number]
    flat, gradient = value.detach().reshape(-1), slot.read()
    # The step sums the gradient over `extra_reduce_groups`, so each of their ranks stores an equal fraction of `value`.
    factor = place.model.callbacks.loss_scale() / math.prod(group.size for group in place.unit.extra_reduce_groups)
    if place.model.reducer.keeps_local_gradients:  # equal on all ranks, so the mean of the local gradients is `value`
        place.unit.parameter_view(gradient, place.index).copy_(value).mul_(factor)
        slot.write(gradient)
        return
    for piece in place.unit.pieces():
        if piece.index == place.index:
            gradient.narrow(0, piece.offset, piece.numel).copy_(flat[piece.start : piece.stop]).mul_(factor)
    slot.write(gradient)


def set_part_state(parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Set the optimizer state `key` of the part that this rank computes with. Collective.

    Args:
        value: Tensor that is equal on all data-parallel ranks. If it has the parameter's shape, each rank stores its
            fragments of it. Any other tensor (e.g. a step count) is stored unchanged.
    """
    place = _finished(parameter)
    _require_states(place)
    shape, on, update = place.unit.shapes[place.index], _step_device(place), place.model.update
    chunks = place.model.masters.chunks_of(place.unit)
    if update is not None and chunks and value.shape == shape and key not in SCALAR_STATES:
        value = value.to(state_dtype(update.optimizer, value.dtype, chunks[0]))
    with place.model.masters.resident([place.unit], changes=True, among=_ranks_with_parameter(place)):
        for start, stop, state in _state(place):
            if _steps_segments(update) and value.shape == shape and key not in SCALAR_STATES:
                _write(place, state, key, value.detach().reshape(-1)[start:stop].to(on, copy=True))
            elif value.dim() == 0 and (key in SCALAR_STATES or value.shape != shape):
                state[key] = _number(place, key, value)
            else:
                now = state.get(key)
                is_single = update is not None and not shape and value.shape == shape
                if isinstance(now, torch.Tensor):  # the shape of `now` distinguishes a value per element from a count
                    is_single = is_single and now.shape == (1,)
                _write(place, state, key, (value.view(1) if is_single else value).detach().to(on, copy=True))


def has_state_memory(parameter: nn.Parameter) -> bool:
    """Return False if the parameter is frozen, and nothing in its unit has been trained: states set are dropped."""
    place = require(parameter)
    return bool(place.model.masters.chunks_of(place.unit))


def require_states_on_device(parameter: nn.Parameter) -> None:
    """Check that the parameter's optimizer states are not offloaded.

    Raises:
        ModelError: the states are offloaded, or the parameter belongs to no engine.
    """
    _require_states(require(parameter))


def keep_states(parameter: nn.Parameter, names: Collection[str]) -> None:
    """Drop the optimizer states of this rank's fragments of the parameter, except those in `names`. Collective."""
    place = _finished(parameter)
    _require_states(place)
    kept = {*names, *(f"{key}_scale" for key in _coded(place) if key in names)}
    with place.model.masters.resident([place.unit], changes=True, among=_ranks_with_parameter(place)):
        for _, _, state in _state(place):
            for key in [key for key in state if key not in kept]:
                del state[key]


def set_plain_state(parameter: nn.Parameter, key: str, value: Any) -> None:
    """Set the optimizer state `key` to a value that is not a tensor, as `part_states` returned it."""
    place = _updated(parameter)
    if isinstance(value, int | float) and _steps_segments(place.model.update):
        value = torch.tensor(float(value))  # old torch checkpoints have plain step counts; torch now requires tensors
    for _, _, state in _state(place):
        state[key] = _number(place, key, value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def local_param(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's fragment of the master weight, flat.

    It is empty if other ranks have all elements, or if the parameter is frozen.

    The result is a view of the master weight, or a copy if that is on NVMe or is updated in several chunks.
    """
    place = _updated(parameter)
    masters = place.model.masters
    place.model.require_weights_on_device(place.unit, place.name)
    place.model.recapture_parameters()
    with masters.resident([place.unit], alone=True):
        fragments = [piece for index, _, _, piece in masters.pieces(place.unit) if index == place.index]
        return _joined(place, fragments)


def local_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's fragment of the reduced gradient, flat and multiplied by the loss scale.

    Returns:
        A view of the gradient, or a copy if it is on NVMe. Empty if other ranks have all elements. None if there is no
        reduced gradient.

    Raises:
        ModelError: the update reduces local gradients itself, so there is no shard of a reduced gradient.
    """
    place = require(parameter)
    number = _slot_number(place)
    if number is None:
        return None
    slot = place.model.slots[number]
    _refuse_local_gradients(place)
    place.model.reducer.finish()
    if not slot.has_reduced or (slot.shard is None and slot.storage is None):
        return None
    place.model.state_offloader.require_on_device(place.name, place.unit, "gradients")
    for piece in place.unit.pieces():
        if piece.index == place.index:
            return slot.read().narrow(0, piece.offset, piece.numel)
    return slot.read().narrow(0, 0, 0)


def local_state(parameter: nn.Parameter, key: str) -> torch.Tensor | None:
    """Return this rank's fragment of the optimizer state `key`, or None if the rank has no such state.

    The result is a view of the state, or a copy if that is on NVMe, is updated in several chunks, or is quantized.

    Raises:
        ModelError: the state is neither a tensor nor numbers.
    """
    place = _updated(parameter)
    _require_states(place)
    with place.model.masters.resident([place.unit], alone=True):
        kept = _coded(place)
        values = [value for _, _, state in _state(place) if (value := _read(kept, state, key)) is not None]
        if not values:
            return None
        if not isinstance(values[0], torch.Tensor):
            return state_tensor(place, key, values[0])
        return values[0] if values[0].dim() == 0 else _joined(place, values)


def local_state_names(parameter: nn.Parameter) -> list[str]:
    """Return the names of the optimizer states of this rank's fragment; empty if it has none."""
    place = _updated(parameter)
    with place.model.masters.resident([place.unit], alone=True):
        scales = [f"{key}_scale" for key in _coded(place)]
        return [
            key for key in dict.fromkeys(key for _, _, state in _state(place) for key in state) if key not in scales
        ]


def set_local_param(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's fragment of the weight. Collective: every rank sets its own fragment, which may be empty.

    Raises:
        ModelError: `value` has another number of elements than the fragment.
    """
    place = require(parameter)
    masters = place.model.masters
    _require_weights(place)
    with place.model.editing_parameters([place.unit], experts_only=is_expert_only(place)):
        fragments = [piece for index, _, _, piece in masters.pieces(place.unit) if index == place.index]
        _check_piece(place, sum(piece.numel() for piece in fragments), value)
        for piece, part in zip(fragments, _split(value, [piece.numel() for piece in fragments]), strict=True):
            piece.copy_(part.detach().reshape(-1))


def set_local_grad(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's fragment of the reduced gradient. `value` is multiplied by the loss scale already.

    Raises:
        ModelError: there is no reduced gradient, see also `local_grad`, or `value` has another number of elements than
            the fragment.
    """
    place = require(parameter)
    piece = local_grad(parameter)
    if piece is None:
        raise ModelError(f"this rank has no gradient of {place.name!r} to replace; set it between backward and step")
    _check_piece(place, piece.numel(), value)
    number = _slot_number(place)
    assert number is not None
    slot = place.model.slots[number]
    gradient = slot.read()
    for own in place.unit.pieces():
        if own.index == place.index:
            gradient.narrow(0, own.offset, own.numel).copy_(value.detach().reshape(-1))
    slot.write(gradient)


def set_local_state(parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Set this rank's fragment of the optimizer state `key`; a scalar `value` (a step count) is set unchanged.

    Raises:
        ModelError: `value` has another number of elements than the current state.
    """
    place = _updated(parameter)
    _require_states(place)
    on = _step_device(place)
    with place.model.masters.resident([place.unit], changes=True, alone=True):
        states = [(stop - start, state) for start, stop, state in _state(place)]
        now = [state.get(key) for _, state in states]
        held = sum(one.numel() for one in now if isinstance(one, torch.Tensor) and one.dim() > 0)
        if held and held != value.numel():
            raise ModelError(
                f"state {key!r} of {place.name!r} has {held} elements on this rank, the value has {value.numel()}; "
                "pass one number for each of this rank's elements"
            )
        if value.dim() == 0:
            for _, state in states:
                state[key] = _number(place, key, value)
            return
        for (_, state), part in zip(states, _split(value, [size for size, _ in states]), strict=True):
            _write(place, state, key, part.detach().to(on, copy=True))


def state_tensor(place: ParameterLocation, key: str, value: Any) -> torch.Tensor:
    """Return the value of the optimizer state `key` as a tensor.

    Raises:
        ModelError: the value is neither a tensor nor numbers.
    """
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"state {key!r} of {place.name!r} is a {type(value).__name__}, which is neither a tensor nor numbers; take "
            "it from engine.optimizer.state_dict(), called on all ranks"
        ) from error


def _finished(parameter: nn.Parameter) -> ParameterLocation:
    """Return the location of `parameter`, after its model has finished a delayed update. Collective."""
    place = require(parameter)
    place.model.scheduler.sync(SyncPoint.STATE_READ, experts_only=is_expert_only(place))
    place.model.finish_update()
    return place


def _require_weights(place: ParameterLocation) -> None:
    place.model.state_offloader.require_on_device(place.name, place.unit, "parameters", "master_weights")


def _require_states(place: ParameterLocation) -> None:
    place.model.state_offloader.require_on_device(place.name, place.unit, "optimizer_states")


def is_expert_only(place: ParameterLocation) -> bool:
    """Return True if a parameter belongs to an expert that is a separate module, not sharded over the `ep` axis.

    Ranks along `ep` then hold different experts, and possibly different numbers of them.
    """
    return place.unit.kind.is_expert and place.unit.placements[place.index].is_full


def _ranks_with_parameter(place: ParameterLocation) -> RankGroup | None:
    """Return the ranks that read or set the parameter together. None: all ranks."""
    return expert_data_group([place.unit]) if is_expert_only(place) else None


def _updated(parameter: nn.Parameter) -> ParameterLocation:
    """Return the location of `parameter`, after this rank has waited for a delayed update. Not collective."""
    place = require(parameter)
    place.model.wait_for_update()
    return place


def _joined(place: ParameterLocation, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate adjacent pieces. A single piece is returned itself, unless it is a temporary copy from NVMe, which is
    copied."""
    if not pieces:
        return torch.empty(0, device=_step_device(place))
    stays = len(pieces) == 1 and place.unit.state_tier is not Tier.NVME
    return pieces[0] if stays else torch.cat([piece.reshape(-1) for piece in pieces])


def _split(value: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    if len(sizes) == 1:
        return [value]
    return list(value.reshape(-1).split(sizes)) if sizes else []


def _step_device(place: ParameterLocation) -> torch.device:
    chunks = place.model.masters.chunks_of(place.unit)
    return chunks[0].device if chunks else place.model.device


def _number(place: ParameterLocation, key: str, value: torch.Tensor) -> torch.Tensor:
    """Return a copy of a state that is one number, on the device and in the dtype in which a step reads it."""
    update, parameter = place.model.update, place.unit.parameters[place.index]
    groups = update.optimizer.param_groups if update is not None and key == "step" else ()
    group = next((group for group in groups if any(one is parameter for one in group["params"])), {})
    if group.get("fused") or group.get("capturable"):  # torch's `load_state_dict` moves the same steps to the device
        return value.detach().to(_step_device(place), torch.float32, copy=True)
    return value.detach().clone()


def _refuse_local_gradients(place: ParameterLocation) -> None:
    if place.model.reducer.keeps_local_gradients:
        raise ModelError(
            f"{place.name!r} has no shard of a reduced gradient: {type(place.model.update).__name__} reduces the local "
            "gradients itself, in the step; use full_grad and set_full_grad, which take the mean over ranks"
        )


def _steps_segments(update: Update | None) -> bool:
    """Return True if each rank steps flat segments; False if an owner rank steps the unsharded parameter."""
    return update is not None and not update.needs_whole_parameters


def _slot_number(place: ParameterLocation) -> int | None:
    return next((n for n, slot in enumerate(place.model.slots) if slot.unit is place.unit), None)


def _state(place: ParameterLocation) -> list[tuple[int, int, dict[str, Any]]]:
    """Return this rank's optimizer states of a parameter: `(start, stop, state)` for each fragment that it updates."""
    update = place.model.update
    if update is None:
        return []
    return [
        (entry.start, entry.stop, update.state_offload.states[entry.state_key])
        for entry in update.state_entries(place.unit)
        if entry.index == place.index
    ]


def _coded(place: ParameterLocation) -> dict[str, StateFormat]:
    """Return the formats of the parameter's states that are quantized to 8 bits, by name."""
    update = place.model.update
    formats = update.formats().get(id(place.unit.parameters[place.index]), {}) if update is not None else {}
    return {key: kept for key, kept in formats.items() if kept.is_quantized}


def _read(kept: dict[str, StateFormat], state: dict[str, Any], key: str) -> Any:
    """Return a state's value. Quantized states are dequantized to float32."""
    value, how = state.get(key), kept.get(key)
    if how is None or value is None:
        return value
    wide = torch.empty(value.shape)
    scales = quantized_states.BlockScales(0, value.numel(), 0, state[f"{key}_scale"])
    quantized_states.dequantize_state(value.reshape(-1), 0, [scales], how.is_signed, wide.view(-1))
    return wide


def _write(place: ParameterLocation, state: dict[str, Any], key: str, value: torch.Tensor) -> None:
    """Set a state's value. Quantized states are quantized to the nearest code."""
    kept = _coded(place).get(key)
    if kept is None:
        state[key] = value
        return
    state[key] = torch.empty(value.shape, dtype=torch.uint8)
    state[f"{key}_scale"] = torch.empty(count_scales(value.numel()))
    quantized_states.quantize_state(value.reshape(-1), state[key].view(-1), state[f"{key}_scale"], kept.is_signed)


def assemble(place: ParameterLocation, span: torch.Tensor) -> torch.Tensor:
    """Assemble a tensor of the parameter's shape, on the model's device, from the spans of all ranks. Collective.

    Args:
        span: This rank's shard of a flat tensor of the unit, or the full flat tensor; on any device.
    """
    model, unit = place.model, place.unit
    layout, group = unit.layout, unit.dp_group.group
    offset, numel = layout.offsets[place.index], layout.numels[place.index]
    full = torch.empty(unit.shapes[place.index], dtype=span.dtype, device=model.device)
    flat = full.view(-1)
    is_sharded = span.numel() < layout.padded
    for rank in range(group.size) if is_sharded else [group.index]:
        first, last = layout.shard_range(rank, group.size) if is_sharded else (0, layout.padded)
        begin, end = max(first, offset), min(last, offset + numel)
        if begin >= end:
            continue
        part = flat[begin - offset : end - offset]
        if rank == group.index:
            part.copy_(span[begin - first : end - first])
        if is_sharded:
            group.broadcast(part, rank)
    return full


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
        raise ModelError(
            f"{place.name!r} has shape {tuple(shape)}, the value has {tuple(value.shape)}; pass one of that shape"
        )


def _check_piece(place: ParameterLocation, numel: int, value: torch.Tensor) -> None:
    if numel != value.numel():
        raise ModelError(
            f"this rank has {numel} elements of {place.name!r}, the value has {value.numel()}; pass one number for "
            "each of this rank's elements"
        )
