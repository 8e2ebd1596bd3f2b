"""How a back end that lacks an operator or a dtype comes to it by one that it has: a step before and one after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from windlass.collectives.backends import Abilities
from windlass.collectives.fold import OF_TRUTHS, WIDER, averaged, truth, wide
from windlass.collectives.operators import Operator, ReduceOp

_After = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """A reduction by an operator that the back end has.

    Args:
        native: that operator.
        before: `[n]` of the tensor's elements to `[n]` of what travels; the tensor's own memory where nothing changes.
        after: what arrived, and the number of ranks, to the result; None: they are the same.
    """

    native: ReduceOp
    before: Callable[[torch.Tensor], torch.Tensor]
    after: _After | None = None

    def result(self, arrived: torch.Tensor, count: int) -> torch.Tensor:
        """The reduction of `count` ranks."""
        return arrived if self.after is None else self.after(arrived, count)


def _odd(total: torch.Tensor, count: int) -> torch.Tensor:
    return total & 1


def _cast(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda elements: elements.to(dtype)


def _truths(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda elements: truth(elements).to(dtype)


def _scaled(dtype: torch.dtype, operator: Operator) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda elements: elements.to(dtype) * operator.factor


_WIDER_STILL = {**WIDER, torch.int16: torch.int32}
_OF_LOGICAL: dict[
    ReduceOp, tuple[ReduceOp, torch.dtype, _After | None]
] = {  # by the operator that comes to it on 0 and 1
    ReduceOp.LAND: (ReduceOp.MIN, torch.uint8, None),
    ReduceOp.LOR: (ReduceOp.MAX, torch.uint8, None),
    ReduceOp.LXOR: (ReduceOp.SUM, torch.int32, _odd),
}


def recipe(operator: Operator, dtype: torch.dtype, able: Abilities) -> Recipe | None:
    """How `operator` on elements of `dtype` is done by what the back end has; None: all parts are to be folded here."""
    kind = operator.kind
    if dtype is torch.bool:
        kind = OF_TRUTHS.get(kind, kind)
    if kind in _OF_LOGICAL:
        native, on, after = _OF_LOGICAL[kind]
        return Recipe(native, _truths(on), after) if _has(able, native, on) else None
    on = dtype if _has(able, kind, dtype) else _WIDER_STILL.get(dtype, dtype)
    if kind is ReduceOp.AVG and not _has(able, kind, on):
        on = wide(operator, dtype)
        return Recipe(ReduceOp.SUM, _cast(on), averaged) if _has(able, ReduceOp.SUM, on) else None
    if kind is ReduceOp.PREMUL_SUM:
        on = dtype if _has(able, ReduceOp.SUM, dtype) else on
        return Recipe(ReduceOp.SUM, _scaled(on, operator)) if _has(able, ReduceOp.SUM, on) else None
    return Recipe(kind, _cast(on)) if _has(able, kind, on) else None


def _has(able: Abilities, kind: ReduceOp, dtype: torch.dtype) -> bool:
    return dtype in able.reduces.get(kind, frozenset())
