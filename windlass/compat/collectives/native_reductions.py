"""Reductions that a backend lacks, composed from an operator that the backend supports.

Each has a preprocessing step, a supported operator and a postprocessing step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from windlass.compat.collectives.backend_capabilities import BackendCapabilities
from windlass.compat.collectives.rank_order_reduction import (
    ACCUMULATION_DTYPES,
    BOOLEAN_OPS,
    accumulation_dtype_of,
    divide_by_count,
    is_nonzero,
)
from windlass.compat.collectives.reduce_operators import ReduceOp, ReduceOperator

_Postprocess = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class NativeReduction:
    """Reduction by an operator that the backend supports.

    Args:
        op: the supported operator.
        preprocess: maps the elements `[n]` to the elements sent, `[n]`; returns the tensor's own memory if nothing
            changes.
        postprocess: maps the elements received and the number of ranks to the result; None if nothing changes.
    """

    op: ReduceOp
    preprocess: Callable[[torch.Tensor], torch.Tensor]
    postprocess: _Postprocess | None = None

    def result(self, arrived: torch.Tensor, count: int) -> torch.Tensor:
        """Return the result of the reduction over `count` ranks."""
        return arrived if self.postprocess is None else self.postprocess(arrived, count)


def _is_odd(total: torch.Tensor, count: int) -> torch.Tensor:
    return total & 1


def _cast_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda elements: elements.to(dtype)


def _nonzero_as(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda elements: is_nonzero(elements).to(dtype)


def _premultiply(dtype: torch.dtype, operator: ReduceOperator) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda elements: elements.to(dtype) * operator.factor


_NATIVE_ACCUMULATION_DTYPES = {**ACCUMULATION_DTYPES, torch.int16: torch.int32}
# Native operator with the same result on zeros and ones, dtype of the zeros and ones, and postprocessing step.
_LOGICAL_REDUCTIONS: dict[ReduceOp, tuple[ReduceOp, torch.dtype, _Postprocess | None]] = {
    ReduceOp.LAND: (ReduceOp.MIN, torch.uint8, None),
    ReduceOp.LOR: (ReduceOp.MAX, torch.uint8, None),
    ReduceOp.LXOR: (ReduceOp.SUM, torch.int32, _is_odd),
}


def find_native_reduction(
    operator: ReduceOperator, dtype: torch.dtype, capabilities: BackendCapabilities
) -> NativeReduction | None:
    """Return a native reduction equivalent to `operator` on `dtype`; None: the backend supports none."""
    kind = operator.kind
    if dtype is torch.bool:
        kind = BOOLEAN_OPS.get(kind, kind)
    if kind in _LOGICAL_REDUCTIONS:
        native, on, after = _LOGICAL_REDUCTIONS[kind]
        return NativeReduction(native, _nonzero_as(on), after) if _supports(capabilities, native, on) else None
    on = dtype if _supports(capabilities, kind, dtype) else _NATIVE_ACCUMULATION_DTYPES.get(dtype, dtype)
    if kind is ReduceOp.AVG and not _supports(capabilities, kind, on):
        on = accumulation_dtype_of(operator, dtype)
        return (
            NativeReduction(ReduceOp.SUM, _cast_to(on), divide_by_count)
            if _supports(capabilities, ReduceOp.SUM, on)
            else None
        )
    if kind is ReduceOp.PREMUL_SUM:
        on = dtype if _supports(capabilities, ReduceOp.SUM, dtype) else on
        return (
            NativeReduction(ReduceOp.SUM, _premultiply(on, operator))
            if _supports(capabilities, ReduceOp.SUM, on)
            else None
        )
    return NativeReduction(kind, _cast_to(on)) if _supports(capabilities, kind, on) else None


def _supports(capabilities: BackendCapabilities, kind: ReduceOp, dtype: torch.dtype) -> bool:
    return dtype in capabilities.reduce_dtypes.get(kind, frozenset())
