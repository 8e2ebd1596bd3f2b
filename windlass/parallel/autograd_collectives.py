"""Differentiable collectives, with two conventions for the gradient.

Along an axis whose ranks compute *the same* loss (tp), every rank receives the complete gradient: sharded layers begin
with `copy_to_parallel_region` or `scatter_to_parallel_region`, and end with `reduce_from_parallel_region` or
`gather_from_parallel_region`. Along an axis whose ranks compute different losses, or parts of one loss (sp, ep),
training minimizes the sum of all ranks' losses: the backward of `all_reduce`, `all_gather`, `reduce_scatter` and
`all_to_all` is the exact transpose of the forward with respect to that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from windlass.comm.mesh_axis import MeshAxis


class _Sum(torch.autograd.Function):
    """Sum over ranks in the forward, in the backward, or in both; identity where it does not sum."""

    @staticmethod
    def forward(ctx: Any, axis: MeshAxis, tensor: torch.Tensor, in_forward: bool, in_backward: bool) -> torch.Tensor:
        ctx.axis, ctx.in_backward = axis, in_backward
        return axis.all_reduce(tensor.contiguous().clone()) if in_forward else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        full = ctx.axis.all_reduce(gradient.contiguous().clone()) if ctx.in_backward else gradient
        return None, full, None, None


_AlongDim = Callable[[torch.Tensor, int, list[int]], torch.Tensor]
"""Operation on parts of the given sizes along a dimension, one part for each rank."""


def _own_part(axis: MeshAxis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    return tensor.narrow(dim, sum(sizes[: axis.index]), sizes[axis.index])


def _copy_of_own_part(axis: MeshAxis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    return _own_part(axis, tensor, dim, sizes).clone()  # the result must not keep the full tensor in memory


class _PartsAlongDim(torch.autograd.Function):
    """One operation along a dimension in the forward, and its transpose in the backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: int, sizes: list[int], operation: _AlongDim, transpose: _AlongDim
    ) -> torch.Tensor:
        ctx.dim, ctx.sizes, ctx.transpose = dim, sizes, transpose
        return operation(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.transpose(gradients[0], ctx.dim, ctx.sizes), None, None, None, None


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
    return tensor if axis.size == 1 else _Sum.apply(axis, tensor, False, True)


def reduce_from_parallel_region(tensor: torch.Tensor, axis: MeshAxis) -> torch.Tensor:
    """All-reduce partial sums in the forward; pass the gradient through in the backward (Megatron's g)."""
    return tensor if axis.size == 1 else _Sum.apply(axis, tensor, True, False)


def all_reduce(tensor: torch.Tensor, axis: MeshAxis) -> torch.Tensor:
    """Sum over ranks whose losses differ: all-reduce in the forward and in the backward."""
    return tensor if axis.size == 1 else _Sum.apply(axis, tensor, True, True)


def all_gather(tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """All-gather the parts along `dim`; reduce-scatter the gradient.

    Args:
        sizes: size of each rank's part along `dim`; None: equal sizes.
    """
    parts = _gather_sizes(tensor, axis, dim, sizes)
    return _along_dim(tensor, axis, dim, parts, axis.all_gather, axis.reduce_scatter)


def reduce_scatter(tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Sum over ranks and keep this rank's part along `dim`; all-gather the gradient.

    Args:
        sizes: size of each rank's part along `dim`; None: equal sizes.

    Raises:
        ValueError: the size along `dim` is not the sum of `sizes`, or not a multiple of the axis size.
    """
    parts = _scatter_sizes(tensor, axis, dim, sizes)
    return _along_dim(tensor, axis, dim, parts, axis.reduce_scatter, axis.all_gather)


def scatter_to_parallel_region(
    tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Keep this rank's part along `dim` of a replicated tensor; all-gather the gradient.

    Args:
        sizes: size of each rank's part along `dim`; None: equal sizes.

    Raises:
        ValueError: `sizes` is None, and the size along `dim` is not a multiple of the axis size.
    """
    parts = _scatter_sizes(tensor, axis, dim, sizes)
    return _along_dim(tensor, axis, dim, parts, partial(_copy_of_own_part, axis), axis.all_gather)


def gather_from_parallel_region(
    tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """All-gather the parts along `dim` for a computation that is the same on every rank. The backward keeps this rank's
    part of the gradient, without a reduction.

    Args:
        sizes: size of each rank's part along `dim`; None: equal sizes.
    """
    parts = _gather_sizes(tensor, axis, dim, sizes)
    return _along_dim(tensor, axis, dim, parts, axis.all_gather, partial(_own_part, axis))


def all_to_all(
    tensor: torch.Tensor,
    axis: MeshAxis,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Send rows `[sum(send_sizes), ...]` to the other ranks and return the received rows `[sum(receive_sizes), ...]`.

    The backward sends the gradients back.

    Args:
        send_sizes: number of rows for each rank; None: equal numbers.
        receive_sizes: number of rows from each rank; None: `send_sizes`.
    """
    if axis.size == 1:
        return tensor
    back = None if send_sizes is None else list(send_sizes)
    swapped: torch.Tensor = _AllToAll.apply(axis, tensor, back, back if receive_sizes is None else list(receive_sizes))
    return swapped


def _along_dim(
    tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: list[int], operation: _AlongDim, transpose: _AlongDim
) -> torch.Tensor:
    if axis.size == 1:
        return tensor
    found: torch.Tensor = _PartsAlongDim.apply(tensor, dim, sizes, operation, transpose)
    return found


def _gather_sizes(tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None) -> list[int]:
    return list(sizes) if sizes is not None else [tensor.shape[dim]] * axis.size


def _scatter_sizes(tensor: torch.Tensor, axis: MeshAxis, dim: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is not None:
        return list(sizes)
    each, rest = divmod(tensor.shape[dim], axis.size)
    if rest:
        raise ValueError(
            f"{tensor.shape[dim]} elements along dimension {dim} cannot be sharded evenly over {axis.name}; pass sizes"
        )
    return [each] * axis.size
