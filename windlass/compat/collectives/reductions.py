"""Asynchronous reductions: the backend's own if it supports them, else an exchange of all parts and a local reduction.

[Note: composed reductions] A composed reduction sends all its messages when it is started and only computes at its end.
A second round of messages at the end could deadlock ranks that wait for their works in different orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.compat.collectives import byte_collectives
from windlass.compat.collectives.backend_capabilities import capabilities_of, require_rank
from windlass.compat.collectives.byte_payload import (
    copy_elements,
    describe_tensor,
    flatten,
    is_flat_view,
    pack_bytes,
    require_dense,
    unpack_bytes,
)
from windlass.compat.collectives.collective_work import CollectiveWork
from windlass.compat.collectives.native_reductions import NativeReduction, find_native_reduction
from windlass.compat.collectives.rank_order_reduction import reduce_in_rank_order, reduce_pairs_in_rank_order
from windlass.compat.collectives.reduce_operators import PAIR_OPS, ReduceOp, ReduceOperator, require_supported_dtype

# torch 2.13 renamed this function: the old name warns there, and the new name does not exist in 2.10
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# One tensor, or a pair of values and indices.
Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def all_reduce(operand: Operand, operator: ReduceOperator, group: Any) -> CollectiveWork:
    """Start an all-reduce of every rank's `operand`, in place."""
    tensors, size = _check_operand(operand, operator), dist.get_world_size(group)
    if tensors[0].numel() == 0:
        return CollectiveWork(outputs=tensors)
    way = _find_native(tensors, operator, group)
    if size == 1 or way is None:
        return _all_gather_and_reduce(tensors, operator, group)
    wire = way.preprocess(flatten(tensors[0]))
    work = dist.all_reduce(wire, op=_torch_op(way), group=group, async_op=True)
    return CollectiveWork([work], _finish_callback(wire, tensors[0], way, size), tensors)


def check_all_reduce(operand: Operand, operator: ReduceOperator, group: Any) -> None:
    """Raise CommunicationError if `all_reduce` does not take the operand."""
    tensors = _check_operand(operand, operator)
    if tensors[0].numel():
        _find_native(tensors, operator, group)  # raises if the group has no backend for the device


def reduce(operand: Operand, dst: int, operator: ReduceOperator, group: Any) -> CollectiveWork:
    """Start a reduction of every rank's `operand` into rank `dst`'s. The other ranks' operands are unchanged."""
    tensors, size = _check_operand(operand, operator), dist.get_world_size(group)
    here = dist.get_rank() == dst
    require_rank("dst", dst, group)
    if tensors[0].numel() == 0:
        return CollectiveWork(outputs=tensors)
    way = _find_native(tensors, operator, group)
    if size == 1:
        return _all_gather_and_reduce(tensors, operator, group)
    if way is None:
        return _gather_and_reduce(tensors, dst, operator, group)
    wire = way.preprocess(flatten(tensors[0]))
    if (
        not here
        and _shares_memory(wire, tensors[0])
        and not capabilities_of(group, wire.device).preserves_reduce_inputs
    ):
        wire = wire.clone()  # the backend accumulates partial sums in this buffer
    work = dist.reduce(wire, dst, op=_torch_op(way), group=group, async_op=True)
    return CollectiveWork([work], _finish_callback(wire, tensors[0], way, size) if here else None, tensors)


def reduce_scatter(output: Operand, parts: Sequence[Operand], operator: ReduceOperator, group: Any) -> CollectiveWork:
    """Start a reduce-scatter: `output` receives the reduction of every rank's part for this rank.

    Parts may differ in size.
    """
    size, index = dist.get_world_size(group), dist.get_rank(group)
    into = _check_operand(output, operator)
    each = [_check_operand(part, operator) for part in parts]
    if len(each) != size:
        raise CommunicationError(f"reduce_scatter: {len(each)} parts for a group of {size} ranks; pass one for each")
    for mine, out in zip(each[index], into, strict=True):
        if mine.numel() != out.numel() or mine.dtype != out.dtype:
            raise CommunicationError(
                f"reduce_scatter: output is {describe_tensor(out)}, but this rank's part is {describe_tensor(mine)}; "
                "give both the same size and dtype"
            )
    way = _find_native(into, operator, group)
    # The backend's reduce-scatter needs parts of equal size.
    equal_sizes = all(part[0].numel() == into[0].numel() for part in each)
    if (
        size > 1
        and equal_sizes
        and into[0].numel()
        and way is not None
        and capabilities_of(group, into[0].device).has_reduce_scatter
    ):
        return _native_reduce_scatter(into[0], [part[0] for part in each], way, group)
    # Without a native reduce-scatter, send each rank its parts; the receiver reduces them.
    sends = [pack_bytes(_premultiplied(part, operator)) for part in each]
    received, work = byte_collectives.start_all_to_all_bytes(sends, [sends[index].numel()] * size, group)

    def finish() -> None:
        _reduce_into(into, [unpack_bytes(part, into) for part in received], operator)

    return CollectiveWork([work], finish, into)


def reduce_scatter_tensor(output: Operand, operand: Operand, operator: ReduceOperator, group: Any) -> CollectiveWork:
    """Start a reduce-scatter like `reduce_scatter`, of equal parts that are concatenated in one tensor."""
    size = dist.get_world_size(group)
    out = output if isinstance(output, (tuple, list)) else (output,)
    whole = operand if isinstance(operand, (tuple, list)) else (operand,)
    ranges = []
    for one, into in zip(whole, out, strict=True):
        if one.numel() != size * into.numel():
            raise CommunicationError(
                f"reduce_scatter_tensor: {describe_tensor(one)} is not {size} times the output, "
                f"{describe_tensor(into)}; pass an input with one part of that size for each rank"
            )
        ranges.append(
            [part.reshape(into.shape) for part in one.reshape(-1).chunk(size)] if one.numel() else [one] * size
        )
    parts: list[Any] = [tuple(part) if len(whole) > 1 else part[0] for part in zip(*ranges, strict=True)]
    return reduce_scatter(output, parts, operator, group)


def _native_reduce_scatter(
    output: torch.Tensor, parts: list[torch.Tensor], reduction: NativeReduction, group: Any
) -> CollectiveWork:
    wire = reduction.preprocess(torch.cat([flatten(part) for part in parts]))
    received = torch.empty(output.numel(), dtype=wire.dtype, device=wire.device)
    work = _REDUCE_SCATTER(received, wire, op=_torch_op(reduction), group=group, async_op=True)
    size = len(parts)
    return CollectiveWork([work], lambda: copy_elements(reduction.result(received, size), output), [output])


def _all_gather_and_reduce(tensors: list[torch.Tensor], operator: ReduceOperator, group: Any) -> CollectiveWork:
    received, work = byte_collectives.start_all_gather_bytes(pack_bytes(_premultiplied(tensors, operator)), group)

    def finish() -> None:
        _reduce_into(tensors, [unpack_bytes(part, tensors) for part in received], operator)

    return CollectiveWork([work], finish, tensors)


def _gather_and_reduce(tensors: list[torch.Tensor], dst: int, operator: ReduceOperator, group: Any) -> CollectiveWork:
    packed = pack_bytes(_premultiplied(tensors, operator))
    received = None
    if dist.get_rank() == dst:
        received = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    work = dist.gather(packed, received, dst, group=group, async_op=True)

    def finish() -> None:
        if received is not None:
            _reduce_into(tensors, [unpack_bytes(part, tensors) for part in received], operator)

    return CollectiveWork([work], finish, tensors)


def _premultiplied(tensors: list[torch.Tensor], operator: ReduceOperator) -> list[torch.Tensor]:
    """Return the tensors to send. The factor of PREMUL_SUM is applied here, because other ranks do not have it."""
    if operator.kind is ReduceOp.PREMUL_SUM:
        return [reduce_in_rank_order(tensors, operator)]
    return tensors


def _reduce_into(targets: list[torch.Tensor], parts: list[list[torch.Tensor]], operator: ReduceOperator) -> None:
    # Each rank has already applied its factor before sending.
    if operator.kind is ReduceOp.PREMUL_SUM:
        operator = ReduceOperator(ReduceOp.SUM)
    if operator.kind not in PAIR_OPS:
        copy_elements(reduce_in_rank_order([part[0] for part in parts], operator), targets[0])
        return
    halves = [part if len(part) == 2 else list(part[0].unbind(-1)) for part in parts]
    best, place = reduce_pairs_in_rank_order([half[0] for half in halves], [half[1] for half in halves], operator)
    if len(targets) == 2:
        copy_elements(best, targets[0])
        copy_elements(place, targets[1])
    else:
        copy_elements(torch.stack([best, place], dim=-1), targets[0])


def _check_operand(operand: Operand, operator: ReduceOperator) -> list[torch.Tensor]:
    """Validate the operand for the operator. Return its tensors: one, or values and indices."""
    kind = operator.kind
    if not isinstance(operand, (tuple, list)):
        require_dense(operand)
        require_supported_dtype(operator, operand.dtype)
        if kind in PAIR_OPS and (operand.dim() == 0 or operand.shape[-1] != 2):
            raise CommunicationError(
                f"ReduceOp.{kind.name} needs pairs, but {describe_tensor(operand)} holds none: pass a tensor [..., 2] "
                "of values and indices, or the two as a tuple (values, indices)"
            )
        return [operand]
    if kind not in PAIR_OPS or len(operand) != 2:
        raise CommunicationError(
            f"ReduceOp.{kind.name} got {len(operand)} tensors; pass one, or for MINLOC and MAXLOC (values, indices)"
        )
    values, indices = operand
    require_dense(values)
    require_dense(indices)
    require_supported_dtype(operator, values.dtype)
    if values.shape != indices.shape or indices.dtype.is_floating_point or indices.dtype.is_complex:
        raise CommunicationError(
            f"ReduceOp.{kind.name}: values are {describe_tensor(values)} and indices {describe_tensor(indices)}; give "
            "indices the shape of the values and an integer dtype"
        )
    return [values, indices]


def _find_native(tensors: list[torch.Tensor], operator: ReduceOperator, group: Any) -> NativeReduction | None:
    able = capabilities_of(group, tensors[0].device)
    return None if operator.kind in PAIR_OPS else find_native_reduction(operator, tensors[0].dtype, able)


def _torch_op(reduction: NativeReduction) -> Any:
    return getattr(dist.ReduceOp, reduction.op.name)


def _shares_memory(wire: torch.Tensor, tensor: torch.Tensor) -> bool:
    return is_flat_view(tensor) and wire.dtype == tensor.dtype and wire.data_ptr() == tensor.data_ptr()


def _finish_callback(wire: torch.Tensor, tensor: torch.Tensor, reduction: NativeReduction, size: int) -> Any:
    """Return a callback that copies the result to its tensor; None if the result is already there."""
    if reduction.postprocess is None and _shares_memory(wire, tensor):
        return None
    return lambda: copy_elements(reduction.result(wire, size), tensor)
