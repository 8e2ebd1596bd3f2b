"""Products of bf16 tensors on a CPU without bf16 instructions: computed in float32, and rounded to bf16 once.

torch takes 4 to 40 times as long there as for float32 matrices. Packed layers have native products. This is for all
others: layers of live modules, experts, and attention in models with their own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from windlass.base.compute_device import multiplies_fast
from windlass.inference.model_forward import find_device
from windlass.inference.step_recording import get_recorder

_LEAST_ROWS = 8  # for fewer, torch's product takes less time than a float32 copy of the weight
_MATMUL = frozenset([torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__])
_OTHERS = frozenset(
    [
        functional.scaled_dot_product_attention,
        functional.conv1d,
        torch.einsum,
        *(getattr(place, name) for place in (torch, torch.Tensor) for name in ("bmm", "addmm", "baddbmm")),
    ]
)


def multiplies_bf16_slowly(model: nn.Module) -> bool:
    """Return True if `model` has bf16 parameters and is on a CPU for which torch has no fast bf16 products."""
    is_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    return is_bf16 and not multiplies_fast(torch.bfloat16, find_device(model))


def fast_operator(overload: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same as a recorded operator, or the operator itself if torch's is fast."""
    if overload is torch.ops.aten._grouped_mm.default and not multiplies_fast(torch.bfloat16, torch.device("cpu")):
        return _multiply_groups
    return overload


def widened_products() -> AbstractContextManager[Any]:
    """Return a context in which products of bf16 tensors are computed in float32.

    Products of a matrix and few rows are not changed, and nothing is while a forward is recorded.
    """
    return nullcontext() if get_recorder() is not None else _WidenedProducts()


class _WidenedProducts(TorchFunctionMode):
    """Context that computes products of bf16 tensors in float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._grouped_mm:
            return _multiply_groups(*args, **kwargs)
        if not _is_slow(func, args, kwargs) or "out" in kwargs:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map_only(torch.Tensor, _widened, (args, dict(kwargs)))
        return func(*wide_args, **wide_kwargs).to(torch.bfloat16)


def _is_slow(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call is a product of bf16 tensors that is faster in float32."""
    if func is not functional.linear and func not in _MATMUL and func not in _OTHERS:
        return False
    tensors = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor)]
    # torch refuses most products of several dtypes, and those it accepts have a result of another dtype
    if {tensor.dtype for tensor in tensors if tensor.is_floating_point()} != {torch.bfloat16}:
        return False
    if func in _OTHERS or tensors[0].numel() >= _LEAST_ROWS * tensors[0].shape[-1]:
        return True
    # torch is fast with few rows if the weight `[in, out]` of the product is contiguous along `in`, as in linear layers
    return func in _MATMUL and (len(tensors) < 2 or tensors[1].dim() != 2 or tensors[1].stride(0) != 1)


def _multiply_groups(
    input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Return the product of each group of rows of `input` `[rows, in]` with its matrix of `weight` `[groups, in, out]`.

    A matrix with enough rows is copied to float32, one at a time. Arguments are those of `torch._grouped_mm`, which
    computes products of other forms, devices and dtypes.
    """
    is_stack = input.dim() == 2 and weight.dim() == 3 and input.device.type == "cpu"
    is_bf16 = input.dtype == weight.dtype == torch.bfloat16
    if not (is_stack and is_bf16) or offs is None or any(value is not None for value in kwargs.values()):
        return torch._grouped_mm(input, weight, offs=offs, **kwargs)
    out = input.new_zeros(len(input), weight.shape[-1])
    start = 0
    for matrix, stop in zip(weight, offs.tolist(), strict=True):
        rows = input[start:stop]
        if len(rows) >= _LEAST_ROWS:
            out[start:stop] = rows.float() @ matrix.float()
        elif len(rows):
            out[start:stop] = rows @ matrix
        start = stop
    return out


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
