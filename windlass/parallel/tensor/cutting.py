"""A parameter becomes this rank's part of it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.narrowing import narrowed
from windlass.parallel.placement import Ranges, place, placement_of


def cut_parameter(name: str, parameter: nn.Parameter, dim: int, ranges: Ranges, axis: str) -> None:
    """Keep only `ranges` of a parameter along `dim`, and note that down. Its memory goes back; on the meta device only
    its shape changes.

    It may be cut along other dims already (experts along "ep").

    Raises:
        ModelError: it is cut along this axis or dim already.
    """
    placed = placement_of(parameter)
    size = placed.shape[dim]
    if axis in placed.cut or placed.ranges[dim] != ((0, size),):
        raise ModelError(
            f"{name} is cut along its dim {dim} already: {placed.local_shape} of {placed.shape} lie here; only other "
            f"dims can be cut over {axis}"
        )
    along = list(placed.ranges)
    along[dim] = ranges
    parameter.grad = None
    parameter.data = narrowed(parameter.detach(), dim, ranges)
    place(parameter, replace(placed, ranges=tuple(along), cut=placed.cut | {axis}))


def see_a_part(parameter: nn.Parameter, axis: str) -> None:
    """Note down that along `axis` each rank sees only a part of this parameter's gradient, to be added up."""
    placed = placement_of(parameter)
    place(parameter, replace(placed, parts=placed.parts | {axis}))
