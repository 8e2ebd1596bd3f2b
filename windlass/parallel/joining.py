"""Whole parameters from the parts that ranks have, and parts from the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from windlass.comm.axis import Axis
from windlass.parallel.placement import Box, Placement


def select(whole: torch.Tensor, placement: Placement) -> torch.Tensor:
    """What of the whole lies here: a new contiguous tensor, or `whole` itself where that is all of it."""
    if placement.whole:
        return whole
    local = whole.new_empty(placement.local_shape)
    for box in placement.boxes():
        local[_local(box)] = whole[_whole(box)]
    return local


def spread_out(local: torch.Tensor, placement: Placement) -> torch.Tensor:
    """A tensor of the whole's shape with what lies here in its place, and zeros elsewhere."""
    whole = local.new_zeros(placement.shape)
    put(local, whole, placement)
    return whole


def put(local: torch.Tensor, whole: torch.Tensor, placement: Placement) -> None:
    """Copy what lies here to its place in the whole."""
    for box in placement.boxes():
        whole[_whole(box)] = local[_local(box)]


def collected(local: torch.Tensor, placement: Placement, axes: Mapping[str, Axis]) -> torch.Tensor:
    """The whole of a tensor that is no part of a graph, on every rank along the axes that cut it, as traffic of a step.
    Collective over them."""
    whole = spread_out(local, placement)
    for name in sorted(placement.cut):
        axes[name].all_reduce(whole)
    return whole


def join(local: torch.Tensor, placement: Placement, axes: Mapping[str, Axis]) -> torch.Tensor:
    """The whole tensor, on every rank along the axes that cut it. Collective over them.

    Autograd goes through it: along tp every rank's gradient of the whole is the whole one already, along ep those of
    all ranks are added up.

    Args:
        local: of `placement.local_shape`.
        axes: of the mesh, by name.
    """
    cuts = [axes[name] for name in sorted(placement.cut) if axes[name].size > 1]
    if not cuts or placement.whole:
        return local
    joined: torch.Tensor = _Join.apply(local, placement, cuts)
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, placement: Placement, cuts: list[Axis]) -> torch.Tensor:
        ctx.placement, ctx.cuts = placement, cuts
        whole = spread_out(local, placement)
        for axis in cuts:
            _apart(axis).all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = gradients[0]
        for axis in ctx.cuts:
            if axis.name != "tp":
                whole = _apart(axis).all_reduce(whole.contiguous().clone())
        return select(whole, ctx.placement), None, None


def _apart(axis: Axis) -> Axis:
    """The axis with a count of its own: what is looked at is no part of what a step sends."""
    return Axis(axis.name, axis.group)


def _local(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.local, box.sizes, strict=True))


def _whole(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.whole, box.sizes, strict=True))
