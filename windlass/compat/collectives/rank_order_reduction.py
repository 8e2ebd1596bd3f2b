"""Reference semantics of each operator: reduction, in rank order, of all ranks' tensors within one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch

from windlass.compat.collectives.reduce_operators import LOGICAL_OPS, ReduceOp, ReduceOperator

# Accumulation dtype for element types that would round at every step, or that torch cannot compute with.
ACCUMULATION_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}

_BinaryOp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_BINARY_OPS: dict[ReduceOp, _BinaryOp] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
    ReduceOp.LAND: torch.logical_and,
    ReduceOp.LOR: torch.logical_or,
    ReduceOp.LXOR: torch.logical_xor,
}
# A sum of booleans is true where any of them is, as in torch.
BOOLEAN_OPS: dict[ReduceOp, ReduceOp] = {
    ReduceOp.SUM: ReduceOp.LOR,
    ReduceOp.MAX: ReduceOp.LOR,
    ReduceOp.BOR: ReduceOp.LOR,
    ReduceOp.PRODUCT: ReduceOp.LAND,
    ReduceOp.MIN: ReduceOp.LAND,
    ReduceOp.BAND: ReduceOp.LAND,
    ReduceOp.BXOR: ReduceOp.LXOR,
}


def accumulation_dtype_of(operator: ReduceOperator, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements of `dtype` are reduced. Integers are summed in 64 bits for an average."""
    if operator.kind is ReduceOp.AVG and not dtype.is_floating_point and not dtype.is_complex:
        return torch.int64
    return ACCUMULATION_DTYPES.get(dtype, dtype)


def divide_by_count(total: torch.Tensor, count: int) -> torch.Tensor:
    """Return `total / count` in the dtype of `total`; integers round towards zero."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total / count
    return torch.div(total, count, rounding_mode="trunc")


def is_nonzero(tensor: torch.Tensor) -> torch.Tensor:
    """Return a boolean mask of the nonzero elements."""
    if tensor.dtype is torch.bool:
        return tensor
    # torch implements few comparisons for unsigned integers
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]) != 0
    return tensor.to(ACCUMULATION_DTYPES.get(tensor.dtype, tensor.dtype)) != 0


def reduce_in_rank_order(parts: Sequence[torch.Tensor], operator: ReduceOperator) -> torch.Tensor:
    """Reduce tensors of one shape and dtype with one operator. Return a new tensor of that dtype."""
    dtype, kind = parts[0].dtype, operator.kind
    if dtype is torch.bool:
        kind = BOOLEAN_OPS.get(kind, kind)
    if kind in LOGICAL_OPS:
        return reduce(_BINARY_OPS[kind], map(is_nonzero, parts)).to(dtype, copy=True)
    computed = accumulation_dtype_of(operator, dtype)
    ready = [part.to(computed) for part in parts]
    if kind is ReduceOp.PREMUL_SUM:
        ready = [part * operator.factor for part in ready]
    result = reduce(_BINARY_OPS[kind], ready[1:], ready[0].clone())
    if kind is ReduceOp.AVG:
        result = divide_by_count(result, len(parts))
    return result.to(dtype)


def reduce_pairs_in_rank_order(
    values: Sequence[torch.Tensor], indices: Sequence[torch.Tensor], operator: ReduceOperator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each element, the smallest or largest of the ranks' values and the index paired with it. Among equal
    values the lowest index wins.
    """
    best, place = values[0].clone(), indices[0].clone()
    for value, index in zip(values[1:], indices[1:], strict=True):
        better = value < best if operator.kind is ReduceOp.MINLOC else value > best
        nan, best_nan = torch.isnan(value), torch.isnan(best)
        equal = (value == best) | (nan & best_nan)
        # NaN precedes every number; among equal values, including NaNs, the lowest index wins.
        take = (better & ~best_nan) | (nan & ~best_nan) | (equal & (index < place))
        best, place = torch.where(take, value, best), torch.where(take, index, place)
    return best, place
