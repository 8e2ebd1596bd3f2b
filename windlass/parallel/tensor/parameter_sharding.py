"""Replacement of a parameter by this rank's part of it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.narrow_to_ranges import narrow_to_ranges
from windlass.parallel.parameter_values import replace_values
from windlass.parallel.placement import Ranges, get_placement, set_placement


def shard_parameter(name: str, parameter: nn.Parameter, dim: int, ranges: Ranges, axis: str) -> None:
    """Keep only `ranges` of a parameter along `dim`, and record its placement.

    The memory of the full parameter is freed; on the meta device only the shape changes. The parameter may already be
    sharded along other dimensions (experts along "ep"). Nothing changes if the parameter has these ranges already,
    because another module shares it.

    Raises:
        ModelError: the parameter is already sharded along this axis or dimension, in another way.
    """
    placed = get_placement(parameter)
    size = placed.global_shape[dim]
    if axis in placed.sharded_axes and placed.ranges[dim] == ranges:
        return
    if axis in placed.sharded_axes or placed.ranges[dim] != ((0, size),):
        raise ModelError(
            f"{name} cannot be sharded along its dim {dim} over {axis}: this rank has {placed.local_shape} of "
            f"{placed.global_shape} already, sharded over {', '.join(sorted(placed.sharded_axes)) or 'no axis'}; shard "
            "each axis once, along a dim that is not sharded"
        )
    along = list(placed.ranges)
    along[dim] = ranges
    replace_values(parameter, narrow_to_ranges(parameter.detach(), dim, ranges))
    set_placement(parameter, replace(placed, ranges=tuple(along), sharded_axes=placed.sharded_axes | {axis}))


def mark_partial_gradient(parameter: nn.Parameter, axis: str) -> None:
    """Record that along `axis` each rank computes only a part of this parameter's gradient, and that the parts must be
    summed.
    """
    placed = get_placement(parameter)
    set_placement(parameter, replace(placed, partial_axes=placed.partial_axes | {axis}))
