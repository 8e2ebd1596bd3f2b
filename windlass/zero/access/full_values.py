"""Reads and writes one parameter of the whole model: its weight, gradient and optimizer state, however it is cut.

All functions are collective: every rank that has a part of the parameter, or a copy, calls them for the same parameters
in the same order. Of experts that are modules of their own a rank has some, and calls them for those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.full_parameters import gather_full_with_grad, select_local_shard
from windlass.parallel.placement import Placement
from windlass.zero.access import shard_values
from windlass.zero.core.parameter_registry import ParameterLocation, find, require


def full_param(parameter: nn.Parameter) -> torch.Tensor:
    """Return the full weight as a new float32 tensor (or in the parameter's dtype if it is frozen): the master
    weight. For a parameter constructed under `zero.Init`, before `initialize`, in its own dtype.

    The result may be part of a loss: its gradient, in the parameter's dtype, is added to the parameter's
    gradient.
    """
    place = find(parameter)
    part = shard_values.part_param(parameter)
    return part if place is None else _joined(place, part)


def full_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient as it stands, reduced over ranks, unclipped, loss scale removed; None if there is none."""
    part = shard_values.part_grad(parameter)
    return None if part is None else _joined(require(parameter), part)


def full_state(parameter: nn.Parameter, key: str) -> torch.Tensor | None:
    """The whole optimizer state `key` (`exp_avg`, `momentum_buffer`, `step`, ...); None before the first step."""
    found = full_states(parameter, key).get(key)
    return found if found is None or isinstance(found, torch.Tensor) else torch.tensor(found)


def full_states(parameter: nn.Parameter, *keys: str) -> dict[str, Any]:
    """The whole optimizer states of these names, or all there are; what a rule keeps that is no tensor (a number, a
    name, a list) is given as it is."""
    place = require(parameter)
    return {key: _whole(place, value) for key, value in shard_values.part_states(parameter, *keys).items()}


def _whole(place: ParameterLocation, found: Any) -> Any:
    if isinstance(found, torch.Tensor) and tuple(found.shape) == _placement(place).local_shape and found.dim():
        return _joined(place, found)
    return found


def set_full_param(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole weight; every rank passes the same `value`, of the whole parameter's shape."""
    shard_values.set_part_param(parameter, _part(parameter, value))


def set_full_grad(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the whole gradient of this step, unscaled; every rank passes the same `value`."""
    shard_values.set_part_grad(parameter, _part(parameter, value))


def set_full_state(parameter: nn.Parameter, key: str, value: torch.Tensor) -> None:
    """Set the whole optimizer state `key`; every rank passes the same `value`.

    A value of the whole parameter's shape is cut into this rank's pieces; any other (a step count) is kept as it is.
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
        raise ModelError(f"{place.name!r} has shape {placement.global_shape}, the value has {tuple(value.shape)}")
    return select_local_shard(value, placement)
