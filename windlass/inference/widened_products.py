"""Products of bf16 tensors on a CPU without bf16 instructions: computed in float32, and rounded to bf16 once.

On such a CPU, torch takes 4 to 40 times as long as for float32 matrices. Packed layers have native products. This
module is for prompts in all other layers: those of live modules, experts, and attention in models with their own cache.
Products with few rows are
left to torch, which reads a bf16 weight faster than it is converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from windlass.base.compute_device import multiplies_fast
from windlass.inference.model_forward import find_device
from windlass.inference.step_recording import get_recorder

_LEAST_TOKENS = 16  # for fewer, the calls of the mode take longer than they save
_LEAST_ROWS = 8  # for fewer rows, torch reads the bf16 weight in less time than its conversion takes
_SLICE = 1 << 18  # elements of a weight that are converted to float32 at a time: 1 MiB, which stays in the cache


def multiplies_bf16_slowly(model: nn.Module) -> bool:
    """Return True if `model` has bf16 parameters and is on a CPU for which torch has no fast bf16 products."""
    is_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    return is_bf16 and not multiplies_fast(torch.bfloat16, find_device(model))


def fast_operator(overload: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same as a recorded operator, or the operator itself if torch's is fast."""
    if overload is torch.ops.aten._grouped_mm.default and not multiplies_fast(torch.bfloat16, torch.device("cpu")):
        return _multiply_groups
    return overload


def widened_products(num_tokens: int, *, enabled: bool) -> AbstractContextManager[Any]:
    """Return a context in which products of bf16 tensors are computed in float32, for a forward of `num_tokens` tokens.

    If not `enabled`, for few tokens, and while a forward is recorded, it changes nothing. The forward computes no
    gradients.
    """
    if not enabled or num_tokens < _LEAST_TOKENS or get_recorder() is not None:
        return nullcontext()
    return _WidenedProducts()


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
        widened = _PRODUCTS.get(func)
        # Offsets of groups are integers.
        if widened is None or (widened is not _multiply_groups and not _are_bf16((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        found = widened(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _are_bf16(arguments: Iterable[Any]) -> bool:
    """Return True if all tensors among the arguments are dense, in bf16 and on the CPU."""
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    return all(
        tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and tensor.layout == torch.strided
        for tensor in tensors
    )


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    return _multiply(input, weight.mT, bias) if weight.dim() == 2 else None


def _matmul(*factors: Any, **kwargs: Any) -> torch.Tensor | None:
    if kwargs or not _are_tensors(factors, 2):
        return None
    return _multiply(*factors) if factors[1].dim() == 2 else _multiply_each(torch.matmul, *factors)


def _addmm(*tensors: Any, beta: float = 1, alpha: float = 1, **kwargs: Any) -> torch.Tensor | None:
    if kwargs or not _are_tensors(tensors, 3):
        return None
    bias, first, second = tensors
    is_bias = beta == alpha == 1 and bias.shape == second.shape[1:]
    return _multiply(first, second, bias) if is_bias else None


def _bmm(*factors: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if kwargs or not _are_tensors(factors, 2) else _multiply_each(torch.bmm, *factors)


def _baddbmm(
    *tensors: Any, batch1: Any = None, batch2: Any = None, beta: float = 1, alpha: float = 1, **kwargs: Any
) -> torch.Tensor | None:
    tensors += tuple(factor for factor in (batch1, batch2) if factor is not None)
    if kwargs or not _are_tensors(tensors, 3):
        return None
    product = _multiply_each(torch.bmm, *tensors[1:], rounds=False)
    if product is None:
        return None
    found = product * alpha if beta == 0 else torch.add(tensors[0].float() * beta, product, alpha=alpha)
    return found.bfloat16()


def _are_tensors(arguments: Sequence[Any], count: int) -> bool:
    return len(arguments) == count and all(isinstance(argument, torch.Tensor) for argument in arguments)


def _conv1d(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *more: Any, **kwargs: Any
) -> torch.Tensor:
    wide = None if bias is None else bias.float()
    return functional.conv1d(input.float(), weight.float(), wide, *more, **kwargs).bfloat16()


def _multiply(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return `input @ weight + bias` in bf16; None if torch should compute it, or raise.

    Args:
        input: `[..., in]`.
        weight: `[in, out]`, which is converted in slices of its columns.
        bias: `[out]`.
    """
    if input.dim() < 2 or input.shape[-1] != weight.shape[0] or not _has_many_rows(input.shape[:-1]):
        return None
    rows = input.reshape(-1, input.shape[-1]).float()
    out = input.new_empty(len(rows), weight.shape[1])
    width = max(_SLICE // max(len(weight), 1), 1)
    for first in range(0, weight.shape[1], width):
        columns = slice(first, first + width)
        part = weight[:, columns].float()
        out[:, columns] = rows @ part if bias is None else torch.addmm(bias[columns].float(), rows, part)
    return out.view(*input.shape[:-1], weight.shape[1])


def _multiply_each(
    product: Callable[..., torch.Tensor], input: torch.Tensor, other: torch.Tensor, *, rounds: bool = True
) -> torch.Tensor | None:
    """Return the product of stacks of matrices; None if torch should compute it, or raise."""
    if input.dim() < 3 or other.dim() < 3 or not _has_many_rows(input.shape[-2:-1]):
        return None
    found = product(input.float(), other.float())
    return found.bfloat16() if rounds else found


def _has_many_rows(shape: torch.Size) -> bool:
    return shape.numel() >= _LEAST_ROWS


def _multiply_groups(
    input: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Return the product of each group of rows of `input` `[rows, in]` with its matrix of `mat2` `[groups, in, out]`.

    Arguments are those of `torch._grouped_mm`, which computes products of other forms and dtypes.
    """
    is_stack = input.dim() == 2 and mat2.dim() == 3 and _are_bf16((input, mat2)) and input.shape[1] == mat2.shape[1]
    is_plain = is_stack and all(value is None for value in kwargs.values())
    if not is_plain or offs is None or offs.dtype != torch.int32 or len(offs) != len(mat2):
        return torch._grouped_mm(input, mat2, offs=offs, **kwargs)
    out = input.new_zeros(len(input), mat2.shape[-1])
    start = 0
    for matrix, stop in zip(mat2, offs.tolist(), strict=True):
        rows = input[start:stop]
        if len(rows):
            found = _multiply(rows, matrix)
            out[start:stop] = rows @ matrix if found is None else found
        start = stop
    return out


_PRODUCTS: dict[Callable[..., Any], Callable[..., torch.Tensor | None]] = {
    functional.linear: _linear,
    functional.conv1d: _conv1d,
    torch._grouped_mm: _multiply_groups,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    torch.Tensor.mm: _matmul,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.bmm: _bmm,
    torch.Tensor.bmm: _bmm,
    torch.baddbmm: _baddbmm,
    torch.Tensor.baddbmm: _baddbmm,
}
