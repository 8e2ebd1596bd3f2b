"""Conversion between full parameters and the parts that ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.placement import Placement, ShardBox


def select_local_shard(full: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return this rank's part of the full tensor: a new contiguous tensor, or `full` itself if it is not
    sharded."""
    if placement.is_full:
        return full
    local = full.new_empty(placement.local_shape)
    for box in placement.shard_boxes():
        local[_local_slices(box)] = full[_global_slices(box)]
    return local


def make_zero_padded_full(local: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return a tensor of the full shape that holds the local part in its place and zeros elsewhere."""
    full = local.new_zeros(placement.global_shape)
    write_local_shard(local, full, placement)
    return full


def write_local_shard(local: torch.Tensor, full: torch.Tensor, placement: Placement) -> None:
    """Copy the local part to its place in the full tensor."""
    for box in placement.shard_boxes():
        full[_global_slices(box)] = local[_local_slices(box)]


def gather_full(local: torch.Tensor, placement: Placement, axes: Mapping[str, MeshAxis]) -> torch.Tensor:
    """Return the full tensor, by an all-reduce of zero-padded parts. Collective over the sharded axes.

    The all-reduce is not differentiable. The bytes are counted as traffic of the step.
    """
    full = make_zero_padded_full(local, placement)
    for name in sorted(placement.sharded_axes):
        axes[name].all_reduce(full)
    return full


def gather_full_with_grad(local: torch.Tensor, placement: Placement, axes: Mapping[str, MeshAxis]) -> torch.Tensor:
    """Gather the full tensor on every rank along the sharded axes, differentiably. Collective over these axes.

    The backward returns this rank's part of the gradient. Along tp every rank has the complete gradient; along ep the
    ranks' gradients are summed first.

    Args:
        local: this rank's part, of `placement.local_shape`.
        axes: the mesh axes, by name.
    """
    sharded_axes = [axes[name] for name in sorted(placement.sharded_axes) if axes[name].size > 1]
    if not sharded_axes or placement.is_full:
        return local
    joined: torch.Tensor = _GatherFull.apply(local, placement, sharded_axes)
    return joined


class _GatherFull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, placement: Placement, axes: list[MeshAxis]) -> torch.Tensor:
        ctx.placement, ctx.axes = placement, axes
        full = make_zero_padded_full(local, placement)
        for axis in axes:
            _uncounted_axis(axis).all_reduce(full)
        return full

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        full = gradients[0]
        for axis in ctx.axes:
            if axis.name != "tp":
                full = _uncounted_axis(axis).all_reduce(full.contiguous().clone())
        return select_local_shard(full, ctx.placement), None, None


def _uncounted_axis(axis: MeshAxis) -> MeshAxis:
    """Return the axis with a separate byte counter. Inspecting a parameter does not count as traffic of a step."""
    return MeshAxis(axis.name, axis.group)


def _local_slices(box: ShardBox) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.local_offsets, box.sizes, strict=True))


def _global_slices(box: ShardBox) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.global_offsets, box.sizes, strict=True))
