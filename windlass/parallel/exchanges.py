"""Collectives that autograd goes through: each is the transpose of its backward.

Two conventions meet here. Along an axis whose ranks compute *the same* loss (tp), a gradient that arrives is whole on
every rank already: `enter` and `leave` bracket what is cut. Along an axis whose ranks compute losses of their own, or
parts of one (sp, ep), what is descended is the sum of all ranks' losses, and `total`, `gather`, `scatter` and `swap`
are exact transposes under that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from windlass.comm.axis import Axis


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_reduce(gradients[0].contiguous().clone())


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
        return axis.all_reduce(tensor.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, gradients[0]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, tensor: torch.Tensor) -> torch.Tensor:
        ctx.axis = axis
        return axis.all_reduce(tensor.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_reduce(gradients[0].contiguous().clone())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.all_gather(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.reduce_scatter(gradients[0], ctx.dim, ctx.sizes), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.reduce_scatter(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_gather(gradients[0], ctx.dim, ctx.sizes), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return tensor.narrow(dim, sum(sizes[: axis.index]), sizes[axis.index]).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_gather(gradients[0], ctx.dim, ctx.sizes), None, None


class _Show(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.all_gather(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        axis, sizes = ctx.axis, ctx.sizes
        return None, gradients[0].narrow(ctx.dim, sum(sizes[: axis.index]), sizes[axis.index]), None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: Axis, tensor: torch.Tensor, sends: list[int] | None, receives: list[int] | None
    ) -> torch.Tensor:
        ctx.axis, ctx.sends, ctx.receives = axis, sends, receives
        return axis.all_to_all(tensor, sends, receives)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, ctx.axis.all_to_all(gradients[0], ctx.receives, ctx.sends), None, None


def enter(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """What is the same on all ranks goes into layers that are cut: as it is; gradients are added up (Megatron's f)."""
    return tensor if axis.size == 1 else _Enter.apply(axis, tensor)


def leave(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Ranks' parts of a sum are added up; each part's gradient is that of the sum (Megatron's g)."""
    return tensor if axis.size == 1 else _Leave.apply(axis, tensor)


def total(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over ranks, of what goes into each rank's own loss: gradients are added up too."""
    return tensor if axis.size == 1 else _Total.apply(axis, tensor)


def gather(tensor: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """All ranks' parts along `dim`, end to end; gradients from all ranks are added up and cut again."""
    return tensor if axis.size == 1 else _Gather.apply(axis, tensor, dim, _sizes(tensor, axis, dim, sizes))


def scatter(tensor: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's part along `dim` of the sum over ranks; gradients are gathered."""
    return tensor if axis.size == 1 else _Scatter.apply(axis, tensor, dim, _parts(tensor, axis, dim, sizes))


def take(tensor: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's part along `dim` of what is the same on all ranks; the parts' gradients are gathered."""
    return tensor if axis.size == 1 else _Take.apply(axis, tensor, dim, _parts(tensor, axis, dim, sizes))


def show(tensor: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """All ranks' parts along `dim`, for computing the same of them on every rank: a part's gradient is cut out of the
    whole's."""
    return tensor if axis.size == 1 else _Show.apply(axis, tensor, dim, _sizes(tensor, axis, dim, sizes))


def swap(
    tensor: torch.Tensor, axis: Axis, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
) -> torch.Tensor:
    """Rows `[sum(sends), ...]` to other ranks and theirs to here `[sum(receives), ...]`; gradients go back."""
    if axis.size == 1:
        return tensor
    back = None if sends is None else list(sends)
    swapped: torch.Tensor = _Swap.apply(axis, tensor, back, back if receives is None else list(receives))
    return swapped


def _sizes(tensor: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> list[int]:
    return list(sizes) if sizes is not None else [tensor.shape[dim]] * axis.size


def _parts(tensor: torch.Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is not None:
        return list(sizes)
    each, rest = divmod(tensor.shape[dim], axis.size)
    if rest:
        raise ValueError(f"{tensor.shape[dim]} elements along dimension {dim} can't be cut evenly over {axis.name}")
    return [each] * axis.size
