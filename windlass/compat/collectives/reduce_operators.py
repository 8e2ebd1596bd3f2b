"""Reduction operators of DeepSpeed, torch and MPI."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError


class ReduceOp(Enum):
    """Operator of a reduction. The numbers 0 to 8 are DeepSpeed's.

    - `SUM`, `PRODUCT` (`PROD`), `MIN`, `MAX`; `AVG`: the sum divided by the number of ranks; integers round towards
      zero.
    - `BAND`, `BOR`, `BXOR`: bitwise, for integers and booleans.
    - `LAND`, `LOR`, `LXOR`: logical; nonzero elements are true. The result is 0 or 1 in the tensor's dtype.
    - `MINLOC`, `MAXLOC`: for pairs of a value and an index, the pair with the least (greatest) value, and among equal
      values the pair with the lowest index. Pairs are the last dim of one tensor, `[..., 2]`, or two tensors of one
      shape, `(values, indices)`. NaN precedes every number, as in `torch.argmin`.
    - `PREMUL_SUM`: the sum of each element times a factor, constructed with `premul_sum(factor)`.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8
    LAND = 9
    LOR = 10
    LXOR = 11
    MINLOC = 12
    MAXLOC = 13
    PREMUL_SUM = 14
    PROD = 1


BITWISE_OPS = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
LOGICAL_OPS = frozenset({ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR})
PAIR_OPS = frozenset({ReduceOp.MINLOC, ReduceOp.MAXLOC})
_ORDER_OPS = frozenset({ReduceOp.MIN, ReduceOp.MAX}) | PAIR_OPS


@dataclass(frozen=True)
class ReduceOperator:
    """Operator with its factor (a number or a tensor without dimensions), which only `PREMUL_SUM` has."""

    kind: ReduceOp
    factor: Any = None


def premul_sum(factor: float | torch.Tensor | None) -> ReduceOperator:
    """Return the operator that sums each rank's elements multiplied by that rank's `factor`.

    Args:
        factor: a number, or a tensor of one element; None if the factor is unknown: reductions then raise.

    Raises:
        CommunicationError: `factor` is a tensor of more elements.
    """
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise CommunicationError(
                f"the factor of ReduceOp.PREMUL_SUM is a tensor of shape {list(factor.shape)}, and one number "
                "multiplies all elements of a rank; multiply the tensor itself and reduce it with ReduceOp.SUM"
            )
        factor = factor.reshape(())  # a factor with dimensions would change the shape and dtype of the product
    return ReduceOperator(ReduceOp.PREMUL_SUM, factor)


def to_reduce_operator(op: Any) -> ReduceOperator:
    """Convert windlass's or torch's `ReduceOp`, or a result of `premul_sum`, to a `ReduceOperator`.

    Raises:
        CommunicationError: `op` is none of these.
    """
    if isinstance(op, ReduceOperator):
        return op
    if isinstance(op, ReduceOp):
        return ReduceOperator(op)
    kind = op if isinstance(op, dist.ReduceOp.RedOpType) else getattr(op, "op", None)
    if isinstance(kind, dist.ReduceOp.RedOpType) and kind.name in ReduceOp.__members__:
        if kind.name == "PREMUL_SUM":
            return premul_sum(getattr(op, "factor", None))  # torch exposes the factor from 2.13 on
        return ReduceOperator(ReduceOp[kind.name])
    names = ", ".join(member.name for member in ReduceOp if member is not ReduceOp.UNUSED)
    raise CommunicationError(f"op = {op!r} is not a reduction operator; write ReduceOp.SUM or another of {names}")


def require_supported_dtype(operator: ReduceOperator, dtype: torch.dtype) -> None:
    """Raise CommunicationError if an operator is undefined for elements of `dtype`."""
    kind, why = operator.kind, ""
    whole = not dtype.is_floating_point and not dtype.is_complex  # integers and booleans
    if kind is ReduceOp.UNUSED:
        why = "it is a placeholder; write SUM, MAX or another"
    elif kind is ReduceOp.PREMUL_SUM and operator.factor is None:
        why = "it has no factor here; write windlass.compat.collectives.premul_sum(factor)"
    elif kind is ReduceOp.PREMUL_SUM and whole:
        why = "its factor is a fraction; reduce a floating-point tensor"
    elif kind in BITWISE_OPS and not whole:
        why = "it works on bits; reduce an integer tensor, or tensor.view(torch.int32) to reduce the bits"
    elif kind is ReduceOp.AVG and dtype is torch.bool:
        why = "booleans have no average; reduce tensor.float()"
    elif kind in _ORDER_OPS and dtype.is_complex:
        why = "complex numbers have no order; reduce tensor.abs() or its parts"
    elif dtype is torch.uint64 and kind not in LOGICAL_OPS:
        why = "torch cannot compute with it; reduce tensor.view(torch.int64)"
    if why:
        raise CommunicationError(f"ReduceOp.{kind.name} of a {dtype} tensor: {why}")
