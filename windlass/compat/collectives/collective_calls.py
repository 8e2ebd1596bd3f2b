"""The collectives that a script calls, with the names and arguments of `deepspeed.comm`.

Ranks are global, also where `group` is a part of them. With `async_op` a call returns a work, whose `wait` brings the
result; without, it returns once that is there. `prof` and `log_name` are for the `comms_logger`; `debug` is accepted
and changes nothing, since the caller's name is looked up where it is asked for. A rank outside `group` does nothing.
Everything raises `CommunicationError` where an argument is wrong, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.compat.collectives import byte_collectives, reductions, send_and_receive
from windlass.compat.collectives.backend_capabilities import group_or_world, require_initialized, warn_unless_member
from windlass.compat.collectives.collective_work import CollectiveWork, wait_or_return
from windlass.compat.collectives.reduce_operators import ReduceOp, to_reduce_operator
from windlass.compat.collectives.reductions import Operand
from windlass.compat.collectives.send_and_receive import P2POp as P2POp
from windlass.compat.collectives.timed_calls import timed_op

Tensor = torch.Tensor


@timed_op
def broadcast(
    tensor: Tensor,
    src: int,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: Any = None,
) -> Any:
    """Every rank's `tensor` becomes that of rank `src`."""
    return (
        wait_or_return(byte_collectives.broadcast(tensor, src, group), async_op)
        if warn_unless_member(group, "broadcast")
        else None
    )


@timed_op
def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: Any = None,
    device: Any = None,
    prof: bool = False,
    log_name: str = "broadcast_object_list",
    debug: Any = None,
) -> None:
    """Every rank's list becomes that of rank `src`, pickled on the way: only among ranks that trust each other."""
    if warn_unless_member(group, "broadcast_object_list"):
        dist.broadcast_object_list(object_list, src, group=group, device=device)


@timed_op
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: Any = None,
) -> Any:
    """Rank i's `tensor` becomes `scatter_list[i]` of rank `src`; others pass no list."""
    return (
        wait_or_return(byte_collectives.scatter(tensor, scatter_list, src, group), async_op)
        if warn_unless_member(group, "scatter")
        else None
    )


@timed_op
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: Any = None,
) -> Any:
    """On rank `dst`, `gather_list[i]` becomes rank i's `tensor`; others pass no list."""
    return (
        wait_or_return(byte_collectives.gather(tensor, gather_list, dst, group), async_op)
        if warn_unless_member(group, "gather")
        else None
    )


@timed_op
def reduce(
    tensor: Operand,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: Any = None,
) -> Any:
    """Rank `dst`'s `tensor` becomes the reduction of all; the others' stay as they are."""
    if not warn_unless_member(group, "reduce"):
        return None
    return wait_or_return(reductions.reduce(tensor, dst, to_reduce_operator(op), group), async_op)


@timed_op
def all_reduce(
    tensor: Operand,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    """Every rank's `tensor` becomes the reduction of all, in place.

    `op` is a `ReduceOp` of ours or of torch's; `MINLOC` and `MAXLOC` take pairs, as its docstring says.
    """
    return (
        wait_or_return(reductions.all_reduce(tensor, to_reduce_operator(op), group), async_op)
        if warn_unless_member(group, "all_reduce")
        else None
    )


@timed_op
def inference_all_reduce(
    tensor: Operand,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    """As `all_reduce`; without `async_op` it returns the tensor."""
    if not warn_unless_member(group, "inference_all_reduce"):
        return tensor
    work = wait_or_return(reductions.all_reduce(tensor, to_reduce_operator(op), group), async_op)
    return work if async_op else tensor


@timed_op
def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: Any = None,
) -> Any:
    """`all_reduce` of several tensors, as one work."""
    if not warn_unless_member(group, "all_reduce_coalesced"):
        return None
    return wait_or_return(
        _combine_works([reductions.all_reduce(one, to_reduce_operator(op), group) for one in tensors]), async_op
    )


@timed_op
def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: Any = None,
) -> Any:
    """`tensor_list[i]` becomes rank i's `tensor`, on every rank; ranks may have tensors of different sizes."""
    return (
        wait_or_return(byte_collectives.all_gather(tensor_list, tensor, group), async_op)
        if warn_unless_member(group, "all_gather")
        else None
    )


@timed_op
def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: Any = None,
) -> Any:
    """`output_tensor` `[ranks * n, ...]` or `[ranks, n, ...]` becomes every rank's `tensor` `[n, ...]`."""
    if not warn_unless_member(group, "all_gather_into_tensor"):
        return None
    return wait_or_return(byte_collectives.all_gather_into_tensor(output_tensor, tensor, group), async_op)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, debug: Any = None
) -> Any:
    """`all_gather_into_tensor`."""
    return all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op, debug=debug)


@timed_op
def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_coalesced",
    debug: Any = None,
) -> Any:
    """`all_gather_into_tensor` of several pairs of tensors, as one work."""
    if not warn_unless_member(group, "all_gather_coalesced"):
        return None
    pairs = zip(output_tensors, input_tensors, strict=True)
    return wait_or_return(
        _combine_works([byte_collectives.all_gather_into_tensor(out, own, group) for out, own in pairs]), async_op
    )


@timed_op
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Any = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: Any = None,
) -> None:
    """`object_list[i]` becomes rank i's `obj`, pickled on the way: only among ranks that trust each other."""
    if warn_unless_member(group, "all_gather_object"):
        dist.all_gather_object(object_list, obj, group=group)


@timed_op
def reduce_scatter(
    output: Operand,
    input_list: Sequence[Operand],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: Any = None,
) -> Any:
    """On rank i, `output` becomes the reduction of every rank's `input_list[i]`; parts may differ in size."""
    if not warn_unless_member(group, "reduce_scatter"):
        return None
    return wait_or_return(reductions.reduce_scatter(output, input_list, to_reduce_operator(op), group), async_op)


@timed_op
def reduce_scatter_tensor(
    output_tensor: Operand,
    tensor: Operand,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: Any = None,
) -> Any:
    """On rank i, `output_tensor` becomes the reduction of the i-th of equal parts of every rank's `tensor`."""
    if not warn_unless_member(group, "reduce_scatter_tensor"):
        return None
    return wait_or_return(
        reductions.reduce_scatter_tensor(output_tensor, tensor, to_reduce_operator(op), group), async_op
    )


def reduce_scatter_fn(
    output_tensor: Operand,
    tensor: Operand,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    """`reduce_scatter_tensor`."""
    return reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op, prof=prof, debug=debug)


@timed_op
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all",
    debug: Any = None,
) -> Any:
    """`output_tensor_list[i]` becomes what rank i has for this one in its `input_tensor_list`; sizes may differ."""
    if not warn_unless_member(group, "all_to_all"):
        return None
    return wait_or_return(byte_collectives.all_to_all(output_tensor_list, input_tensor_list, group), async_op)


@timed_op
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: Any = None,
) -> Any:
    """Rows of `tensor` go to every rank and rows from each come to `output`: equally many, or as the sizes say."""
    if not warn_unless_member(group, "all_to_all_single"):
        return None
    return wait_or_return(
        byte_collectives.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group), async_op
    )


@timed_op
def send(
    tensor: Tensor,
    dst: int,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "send",
    debug: Any = None,
) -> None:
    """Send to rank `dst`, which receives under the same tag (NCCL knows no tags: the order counts)."""
    if warn_unless_member(group, "send"):
        send_and_receive.send(tensor, dst, group, tag).wait()


@timed_op
def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "recv",
    debug: Any = None,
) -> int:
    """Receive from rank `src`, or on gloo from anybody; the sender's rank, -1 on a rank outside the group."""
    if not warn_unless_member(group, "recv"):
        return -1
    work, source = send_and_receive.receive(tensor, src, group, tag)
    work.wait()
    return source()


@timed_op
def isend(
    tensor: Tensor,
    dst: int,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "isend",
    debug: Any = None,
) -> Any:
    """`send`, as a work."""
    return (
        wait_or_return(send_and_receive.send(tensor, dst, group, tag), True)
        if warn_unless_member(group, "isend")
        else None
    )


@timed_op
def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    prof: bool = False,
    log_name: str = "irecv",
    debug: Any = None,
) -> Any:
    """`recv`, as a work."""
    return (
        wait_or_return(send_and_receive.receive(tensor, src, group, tag)[0], True)
        if warn_unless_member(group, "irecv")
        else None
    )


@timed_op
def batch_isend_irecv(
    p2p_op_list: Sequence[Any], prof: bool = False, log_name: str = "batch_isend_irecv", debug: Any = None
) -> list[Any]:
    """Start every `P2POp` of a list at once; their works."""
    require_initialized()
    return [wait_or_return(work, True) for work in send_and_receive.start_batch(p2p_op_list)]


@timed_op
def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    prof: bool = False,
    log_name: str = "barrier",
    debug: Any = None,
) -> Any:
    """Return once every rank of the group came here."""
    if not warn_unless_member(group, "barrier"):
        return None
    return dist.barrier(group=group_or_world(group), async_op=async_op, device_ids=device_ids)


def _combine_works(works: list[CollectiveWork]) -> CollectiveWork:
    """Several as one."""

    def finish() -> None:
        for work in works:
            work.wait()

    inner = [one for work in works for one in work.works]
    return CollectiveWork(inner, finish, [tensor for work in works for tensor in work.outputs])
