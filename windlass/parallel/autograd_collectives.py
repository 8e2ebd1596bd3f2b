"""Differentiable collectives. The backward of each is the transpose of its forward.

There are two conventions. Along an axis whose ranks compute *the same* loss (tp), every rank receives the complete
gradient: `copy_to_parallel_region` and `reduce_from_parallel_region` enclose the sharded layers. Along an axis whose
ranks compute different losses, or parts of one loss (sp, ep), training minimizes the sum of all ranks' losses:
`all_reduce`, `all_gather`, `reduce_scatter` and `all_to_all` are exact transposes with respect to that sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from windlass.comm.mesh_axis import MeshAxis


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor) -> torch.Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_reduce(gradients[0].contiguous().clone())


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor) -> torch.Tensor:
        return axis.all_reduce(tensor.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, gradients[0]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor) -> torch.Tensor:
        ctx.axis = axis
        return axis.all_reduce(tensor.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_reduce(gradients[0].contiguous().clone())


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.all_gather(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.reduce_scatter(gradients[0], ctx.dim, ctx.sizes), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.reduce_scatter(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_gather(gradients[0], ctx.dim, ctx.sizes), None, None


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return tensor.narrow(dim, sum(sizes[: axis.index]), sizes[axis.index]).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_gather(gradients[0], ctx.dim, ctx.sizes), None, None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.all_gather(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis, sizes = ctx.axis, ctx.sizes
        return None, gradients[0].narrow(ctx.dim, sum(sizes[: axis.index]), sizes[axis.index]), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: MeshAxis, tensor: torch.Tensor, send_sizes: list[int] | None, receive_sizes: list[int] | None
    ) -> torch.Tensor:
        ctx.axis, ctx.sends, ctx.receives = axis, send_sizes, receive_sizes
        return axis.all_to_all(tensor, send_sizes, receive_sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_to_all(gradients[0], ctx.receives, ctx.sends), None, None


def copy_to_parallel_region(tensor: torch.Tensor, axis: MeshAxis) -> torch.Tensor:
    """Pass a replicated tensor into sharded layers: identity in the forward, all-reduce in the backward (Megatron's
    f)."""
    return tensor if axis.size == 1 else _CopyToRegion.apply(axis, tensor)


def reduce_from_parallel_region(tensor: torch.Tensor, axis: MeshAxis) -> torch.Tensor:
    """All-reduce partial sums in the forward; pass the gradient through in the backward (Megatron's g)."""
    return tensor if axis.size == 1 else _ReduceFromRegion.apply(axis, tensor)


def all_reduce(tensor: torch.Tensor, axis: MeshAxis) -> torch.Tensor:
    """Sum over ranks whose losses differ: all-reduce in the forward and in the backward."""
    return tensor if axis.size == 1 else _AllReduce.apply(axis, tensor)


def all_gather(tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """All-gather the parts along `dim`; reduce-scatter the gradient."""
    return tensor if axis.size == 1 else _AllGather.apply(axis, tensor, dim, _gather_sizes(tensor, axis, dim, sizes))


def reduce_scatter(tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Sum over ranks and keep this rank's part along `dim`; all-gather the gradient."""
    return (
        tensor if axis.size == 1 else _ReduceScatter.apply(axis, tensor, dim, _scatter_sizes(tensor, axis, dim, sizes))
    )


def scatter_to_parallel_region(
    tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Keep this rank's part along `dim` of a replicated tensor; all-gather the gradient."""
    return (
        tensor
        if axis.size == 1
        else _ScatterToRegion.apply(axis, tensor, dim, _scatter_sizes(tensor, axis, dim, sizes))
    )


def gather_from_parallel_region(
    tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """All-gather the parts along `dim` for a computation that is the same on every rank. The backward keeps this rank's
    part of the gradient, without a reduction.
    """
    return (
        tensor
        if axis.size == 1
        else _GatherFromRegion.apply(axis, tensor, dim, _gather_sizes(tensor, axis, dim, sizes))
    )


def all_to_all(
    tensor: torch.Tensor,
    axis: MeshAxis,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Send rows `[sum(send_sizes), ...]` to the other ranks and return the received rows `[sum(receive_sizes), ...]`.
    The backward sends the gradients back.
    """
    if axis.size == 1:
        return tensor
    back = None if send_sizes is None else list(send_sizes)
    swapped: torch.Tensor = _AllToAll.apply(axis, tensor, back, back if receive_sizes is None else list(receive_sizes))
    return swapped


def _gather_sizes(tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None) -> list[int]:
    return list(sizes) if sizes is not None else [tensor.shape[dim]] * axis.size


def _scatter_sizes(tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is not None:
        return list(sizes)
    each, rest = divmod(tensor.shape[dim], axis.size)
    if rest:
        raise ValueError(
            f"{tensor.shape[dim]} elements along dimension {dim} cannot be sharded evenly over {axis.name}"
        )
    return [each] * axis.size
