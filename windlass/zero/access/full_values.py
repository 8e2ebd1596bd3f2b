"""Access to the full weight, gradient and optimizer states of one parameter, over all kinds of sharding.

All functions are collective: every rank that has a part or a copy of the parameter calls them for the same parameters
in the same order. For experts that are separate modules, each rank calls them for the experts that it holds.

All functions raise ModelError if the parameter belongs to no engine, except `full_param` of a parameter constructed
under `zero.Init`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.full_parameters import gather_full_with_grad, select_local_shard
from windlass.parallel.placement import Placement
from windlass.zero.access import shard_values
from windlass.zero.parameter_registry import ParameterLocation, find, require


def full_param(parameter: nn.Parameter) -> torch.Tensor:
    """Return a new tensor with the full master weight of `parameter`. Collective.

    The dtype is that of the master weights (by default float32). A frozen parameter, or one constructed under
    `zero.Init` before `initialize`, has no master weight and is returned in its own dtype.

    The result may be part of a loss. Its gradient is cast to the parameter's dtype and added to the parameter's
    gradient.
    """
    place = find(parameter)
    part = shard_values.part_param(parameter)
    return part if place is None else _joined(place, part)


def full_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the current full gradient, or None if no rank has a gradient. Collective.

    The gradient is reduced over ranks and not clipped, and the loss scale is divided out.
    """
    part = shard_values.part_grad(parameter)
    return None if part is None else _joined(require(parameter), part)


def full_state(parameter: nn.Parameter, key: str) -> torch.Tensor | None:
    """Return the full optimizer state `key` (`exp_avg`, `momentum_buffer`, `step`, ...). Collective.

    Returns:
        A tensor, even if the optimizer's state is a plain number. None before the first step, or if there is no state
        `key`.

    Raises:
        ModelError: the state exists per shard (e.g. the scales of 8-bit states) and cannot be assembled, or it is
            neither a tensor nor numbers.
    """
    state = full_states(parameter, key).get(key)
    return state if state is None else shard_values.state_tensor(require(parameter), key, state)


def full_states(parameter: nn.Parameter, *keys: str) -> dict[str, Any]:
    """Return the full optimizer states with the names `keys`, or all states if no name is given. Collective.

    Values that are not tensors (a number, a string, a list) are returned unchanged.

    Raises:
        ModelError: a state exists per shard (e.g. the scales of 8-bit states) and cannot be assembled.
    """
    place = require(parameter)
    return {key: _whole(place, value) for key, value in shard_values.part_states(parameter, *keys).items()}


def _whole(place: ParameterLocation, found: Any) -> Any:
    if isinstance(found, torch.Tensor) and tuple(found.shape) == _placement(place).local_shape and found.dim():
        return _joined(place, found)
    return found


def set_full_param(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the full weight and its master weight. Collective.

    Args:
        value: Tensor of the full parameter's shape, equal on all ranks.

    Raises:
        ModelError: `value` has another shape.
    """
    shard_values.set_part_param(parameter, _part(parameter, value))


def set_full_grad(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the full gradient of this step. Collective.

    Args:
        value: Gradient without the loss scale, of the full parameter's shape, equal on all ranks.

    Raises:
        ModelError: there is no gradient to replace, or `value` has another shape.
    """
    shard_values.set_part_grad(parameter, _part(parameter, value))


def set_full_state(parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Set the full optimizer state `key`. Collective.

    Args:
        value: Tensor that is equal on all ranks. If it has the full parameter's shape, each rank stores its
            fragments of it. Any other tensor (e.g. a step count) is stored unchanged.
    """
    placement = _placement(require(parameter))
    part = value
    if value.dim() and tuple(value.shape) == placement.global_shape:
        part = select_local_shard(value, placement)
    shard_values.set_part_state(parameter, key, part)


def _placement(place: ParameterLocation) -> Placement:
    return place.unit.placements[place.index]


def _joined(place: ParameterLocation, part: torch.Tensor) -> torch.Tensor:
    return gather_full_with_grad(part, _placement(place), place.model.mesh.axes)


def _part(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    place = require(parameter)
    placement = _placement(place)
    if tuple(value.shape) != placement.global_shape:
        raise ModelError(
            f"{place.name!r} has shape {placement.global_shape}, the value has {tuple(value.shape)}; pass a value of "
            "the parameter's shape"
        )
    return select_local_shard(value, placement)
