"""Reductions, started: by the back end's own where it has them, else every part comes here and is folded in rank order.

[Note: one exchange] What is composed sends everything when it is started and only computes at its end. A second round
of messages at the end would make ranks that wait for their works in different orders wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.collectives import moves
from windlass.collectives.backends import abilities, require_rank
from windlass.collectives.fold import fold, fold_pairs
from windlass.collectives.operators import OF_PAIRS, Operator, ReduceOp, check
from windlass.collectives.payload import flat, looks, own_memory, pack, put, require_dense, unpack
from windlass.collectives.recipes import Recipe, recipe
from windlass.collectives.work import Work

# torch 2.13 renamed it; the older name warns there, the newer one does not exist in 2.10
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# One tensor, or values and indices.
Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def all_reduce(operand: Operand, operator: Operator, group: Any) -> Work:
    """Every rank's `operand` becomes the reduction of all; in place."""
    tensors, size = _tensors(operand, operator), dist.get_world_size(group)
    if tensors[0].numel() == 0:
        return Work(fills=tensors)
    way = _way(tensors, operator, group)
    if size == 1 or way is None:
        return _folded(tensors, operator, group)
    wire = way.before(flat(tensors[0]))
    work = dist.all_reduce(wire, op=_native(way), group=group, async_op=True)
    return Work([work], _landing(wire, tensors[0], way, size), tensors)


def reduce(operand: Operand, dst: int, operator: Operator, group: Any) -> Work:
    """Rank `dst`'s `operand` becomes the reduction of all; the others' stay as they are."""
    tensors, size = _tensors(operand, operator), dist.get_world_size(group)
    here = dist.get_rank() == dst
    require_rank("dst", dst, group)
    if tensors[0].numel() == 0:
        return Work(fills=tensors)
    way = _way(tensors, operator, group)
    if size == 1:
        return _folded(tensors, operator, group)
    if way is None:
        return _folded_at(tensors, dst, operator, group)
    wire = way.before(flat(tensors[0]))
    if not here and _shares(wire, tensors[0]) and not abilities(group, wire.device).quiet:
        wire = wire.clone()  # the back end uses it for what it adds on the way
    work = dist.reduce(wire, dst, op=_native(way), group=group, async_op=True)
    return Work([work], _landing(wire, tensors[0], way, size) if here else None, tensors)


def reduce_scatter(output: Operand, parts: Sequence[Operand], operator: Operator, group: Any) -> Work:
    """`output` becomes the reduction of the part that every rank has for this one; parts may differ in size."""
    size, index = dist.get_world_size(group), dist.get_rank(group)
    into = _tensors(output, operator)
    each = [_tensors(part, operator) for part in parts]
    if len(each) != size:
        raise CommunicationError(f"reduce_scatter: {len(each)} parts for a group of {size} ranks; pass one for each")
    for mine, out in zip(each[index], into, strict=True):
        if mine.numel() != out.numel() or mine.dtype != out.dtype:
            raise CommunicationError(
                f"reduce_scatter: output is {looks(out)}, but the part for this rank is {looks(mine)}; make them alike"
            )
    way = _way(into, operator, group)
    alike = all(part[0].numel() == into[0].numel() for part in each)
    if size > 1 and alike and into[0].numel() and way is not None and abilities(group, into[0].device).scatters:
        return _scattered(into[0], [part[0] for part in each], way, group)
    sends = [pack(_ready(part, operator)) for part in each]
    received, work = moves.exchange(sends, [sends[index].numel()] * size, group)

    def finish() -> None:
        _fold_into(into, [unpack(part, into) for part in received], operator)

    return Work([work], finish, into)


def reduce_scatter_tensor(output: Operand, operand: Operand, operator: Operator, group: Any) -> Work:
    """As `reduce_scatter`, of parts that lie one after the other in one tensor."""
    size = dist.get_world_size(group)
    out = output if isinstance(output, (tuple, list)) else (output,)
    whole = operand if isinstance(operand, (tuple, list)) else (operand,)
    cuts = []
    for one, into in zip(whole, out, strict=True):
        if one.numel() != size * into.numel():
            raise CommunicationError(
                f"reduce_scatter_tensor: {looks(one)} is not {size} times the output, {looks(into)}; "
                "the input holds one part for each rank"
            )
        cuts.append([part.reshape(into.shape) for part in one.reshape(-1).chunk(size)] if one.numel() else [one] * size)
    parts: list[Any] = [tuple(part) if len(whole) > 1 else part[0] for part in zip(*cuts, strict=True)]
    return reduce_scatter(output, parts, operator, group)


def _scattered(output: torch.Tensor, parts: list[torch.Tensor], way: Recipe, group: Any) -> Work:
    wire = way.before(torch.cat([flat(part) for part in parts]))
    received = torch.empty(output.numel(), dtype=wire.dtype, device=wire.device)
    work = _REDUCE_SCATTER(received, wire, op=_native(way), group=group, async_op=True)
    size = len(parts)
    return Work([work], lambda: put(way.result(received, size), output), [output])


def _folded(tensors: list[torch.Tensor], operator: Operator, group: Any) -> Work:
    received, work = moves.gathered(pack(_ready(tensors, operator)), group)

    def finish() -> None:
        _fold_into(tensors, [unpack(part, tensors) for part in received], operator)

    return Work([work], finish, tensors)


def _folded_at(tensors: list[torch.Tensor], dst: int, operator: Operator, group: Any) -> Work:
    packed = pack(_ready(tensors, operator))
    received = None
    if dist.get_rank() == dst:
        received = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    work = dist.gather(packed, received, dst, group=group, async_op=True)

    def finish() -> None:
        if received is not None:
            _fold_into(tensors, [unpack(part, tensors) for part in received], operator)

    return Work([work], finish, tensors)


def _ready(tensors: list[torch.Tensor], operator: Operator) -> list[torch.Tensor]:
    """What this rank sends to be folded: its own factor is applied here, the others do not know it."""
    if operator.kind is ReduceOp.PREMUL_SUM:
        return [fold(tensors, operator)]
    return tensors


def _fold_into(targets: list[torch.Tensor], parts: list[list[torch.Tensor]], operator: Operator) -> None:
    if operator.kind is ReduceOp.PREMUL_SUM:
        operator = Operator(ReduceOp.SUM)
    if operator.kind not in OF_PAIRS:
        put(fold([part[0] for part in parts], operator), targets[0])
        return
    halves = [part if len(part) == 2 else list(part[0].unbind(-1)) for part in parts]
    best, place = fold_pairs([half[0] for half in halves], [half[1] for half in halves], operator)
    if len(targets) == 2:
        put(best, targets[0])
        put(place, targets[1])
    else:
        put(torch.stack([best, place], dim=-1), targets[0])


def _tensors(operand: Operand, operator: Operator) -> list[torch.Tensor]:
    """The operand's tensors, fit for the operator: one, or values and indices."""
    kind = operator.kind
    if not isinstance(operand, (tuple, list)):
        require_dense(operand)
        check(operator, operand.dtype)
        if kind in OF_PAIRS and (operand.dim() == 0 or operand.shape[-1] != 2):
            raise CommunicationError(
                f"ReduceOp.{kind.name} works on pairs, {looks(operand)} holds none: pass a tensor [..., 2] of values "
                "and indices, or the two as a tuple (values, indices)"
            )
        return [operand]
    if kind not in OF_PAIRS or len(operand) != 2:
        raise CommunicationError(f"ReduceOp.{kind.name} takes one tensor, not {len(operand)}")
    values, indices = operand
    require_dense(values)
    require_dense(indices)
    check(operator, values.dtype)
    if values.shape != indices.shape or indices.dtype.is_floating_point or indices.dtype.is_complex:
        raise CommunicationError(
            f"ReduceOp.{kind.name}: values are {looks(values)} and indices {looks(indices)}; give indices the shape "
            "of the values and an integer dtype"
        )
    return [values, indices]


def _way(tensors: list[torch.Tensor], operator: Operator, group: Any) -> Recipe | None:
    able = abilities(group, tensors[0].device)
    return None if operator.kind in OF_PAIRS else recipe(operator, tensors[0].dtype, able)


def _native(way: Recipe) -> Any:
    return getattr(dist.ReduceOp, way.native.name)


def _shares(wire: torch.Tensor, tensor: torch.Tensor) -> bool:
    return own_memory(tensor) and wire.dtype == tensor.dtype and wire.data_ptr() == tensor.data_ptr()


def _landing(wire: torch.Tensor, tensor: torch.Tensor, way: Recipe, size: int) -> Any:
    """What brings the result to its tensor; None where it is already there."""
    if way.after is None and _shares(wire, tensor):
        return None
    return lambda: put(way.result(wire, size), tensor)
