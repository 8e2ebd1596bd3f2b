"""Product of an input and a packed matrix, which is unpacked a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional as F

from windlass.base.native_products import native_product

BLOCK_NUMEL = 1 << 22  # elements that are unpacked at once: 16 MiB of float32

UnpackRows = Callable[[list[torch.Tensor], torch.dtype], torch.Tensor]


class Product(Protocol):
    """Object that multiplies an input by a packed weight. It may store the weight in a form of its own."""

    def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `input @ weight.T + bias` without gradients."""
        ...

    def end_backward(self) -> None:
        """Free memory of the packed weight once a backward has read it. Called at the end of each backward."""
        ...


def packed_matmul(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    unpack_rows: UnpackRows,
    packed: Sequence[torch.Tensor],
    product: Product | None = None,
    shared: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Return `input @ weight.T + bias` in the dtype of `input`, where `weight` is unpacked from `packed`.

    The backward unpacks again, so that autograd saves only the packed tensors; it gives gradients of `input` and
    `bias`. A matrix of at most `BLOCK_NUMEL` elements is one block: then, without `product`, values and gradients have
    the bits of `F.linear` with the unpacked weight.

    Args:
        input: `[..., in_features]`.
        bias: `[out_features]` of the dtype of `input`, or None.
        unpack_rows: returns `[rows, in_features]` in a given dtype, from the same rows of all packed tensors.
        packed: tensors whose first dimension is `out_features`, without gradients.
        product: multiplies in the forward, in place of `unpack_rows` and `F.linear`, from its own form of the weight.
        shared: tensors that each call of `unpack_rows` receives in full, after the rows.
    """
    result: torch.Tensor = _PackedMatmul.apply(input, bias, unpack_rows, product, len(packed), *packed, *shared)
    return result


def multiply_alone(
    input: torch.Tensor, bias: torch.Tensor | None, product: Product | None, out_features: int
) -> torch.Tensor | None:
    """Return `product(input, bias)` if no derivative is needed; None if the caller must use `packed_matmul`."""
    given = [input] if bias is None else [input, bias]
    if product is None or torch.is_grad_enabled() and any(one.requires_grad for one in given):
        return None
    if any(unpack_dual(one).tangent is not None for one in given):
        return None  # so that `packed_matmul` raises: it has no forward-mode derivative
    with native_product(2 * input.numel() * out_features):
        return product(input, bias)


class _PackedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        bias: torch.Tensor | None,
        unpack_rows: UnpackRows,
        product: Product | None,
        count: int,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.unpack_rows, ctx.product, ctx.count, ctx.has_bias = unpack_rows, product, count, bias is not None
        packed, shared = tensors[:count], tensors[count:]
        if product is not None:
            with native_product(2 * input.numel() * packed[0].shape[0]):
                return product(input, bias)
        blocks = list(_blocks(packed, input.shape[-1]))
        if len(blocks) == 1:
            return F.linear(input, unpack_rows([*packed, *shared], input.dtype), bias)
        out = input.new_empty((*input.shape[:-1], packed[0].shape[0]))
        for start, stop in blocks:
            weight = unpack_rows([*(tensor[start:stop] for tensor in packed), *shared], input.dtype)
            out[..., start:stop] = F.linear(input, weight, None if bias is None else bias[start:stop])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        packed, shared = tensors[: ctx.count], tensors[ctx.count :]
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = _grad_input(grad, ctx.unpack_rows, packed, shared)
            if ctx.product is not None:
                ctx.product.end_backward()
        if ctx.has_bias and ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_input, grad_bias, None, None, None, *[None] * len(tensors)


def _grad_input(
    grad: torch.Tensor, unpack_rows: UnpackRows, packed: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]
) -> torch.Tensor:
    columns = unpack_rows([*(tensor[:0] for tensor in packed), *shared], grad.dtype).shape[1]
    blocks = list(_blocks(packed, columns))
    if len(blocks) == 1:
        return grad @ unpack_rows([*packed, *shared], grad.dtype)
    wide = torch.promote_types(grad.dtype, torch.float32)  # 16-bit products of many blocks are added in float32
    total = torch.zeros((*grad.shape[:-1], columns), dtype=wide, device=grad.device)
    for start, stop in blocks:
        weight = unpack_rows([*(tensor[start:stop] for tensor in packed), *shared], grad.dtype)
        total += grad[..., start:stop] @ weight
    return total.to(grad.dtype)


def _blocks(packed: Sequence[torch.Tensor], columns: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows that are unpacked together; at least one range."""
    rows = packed[0].shape[0]
    step = max(1, BLOCK_NUMEL // max(columns, 1))
    for start in range(0, max(rows, 1), step):
        yield start, min(start + step, rows)
