"""Collectives with the names and arguments of `deepspeed.comm`.

Ranks are global, also if `group` is a subset of all ranks. With `async_op`, a call returns a work object, whose `wait`
completes the result; otherwise the call blocks until the result is there. `prof` and `log_name` are for the
`comms_logger`. `debug` is accepted and ignored, because the logger looks up the caller's name itself. On a rank outside
`group`, a call warns and does nothing. An invalid argument raises `CommunicationError` before anything is sent, also if
only one tensor of a coalesced call is invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
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
    """Broadcast rank `src`'s `tensor` to every rank's `tensor`."""
    return _start("broadcast", group, async_op, lambda: byte_collectives.broadcast(tensor, src, group))


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
    """Broadcast rank `src`'s list. Objects are pickled: use it only among ranks that trust each other."""
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
    """Scatter rank `src`'s `scatter_list`: rank i's `tensor` receives `scatter_list[i]`. Other ranks pass no list."""
    return _start("scatter", group, async_op, lambda: byte_collectives.scatter(tensor, scatter_list, src, group))


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
    """Gather to rank `dst`: its `gather_list[i]` receives rank i's `tensor`. Other ranks pass no list."""
    return _start("gather", group, async_op, lambda: byte_collectives.gather(tensor, gather_list, dst, group))


@timed_op
def scatterv(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatterv",
    debug: Any = None,
) -> Any:
    """Scatter tensors that may differ in size. Each rank's `tensor` has the size of its part."""
    return _start("scatterv", group, async_op, lambda: byte_collectives.scatterv(tensor, scatter_list, src, group))


@timed_op
def gatherv(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gatherv",
    debug: Any = None,
) -> Any:
    """Gather tensors that may differ in size. `gather_list[i]` has the size of rank i's `tensor`."""
    return _start("gatherv", group, async_op, lambda: byte_collectives.gatherv(tensor, gather_list, dst, group))


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
    """Reduce every rank's `tensor` into that of rank `dst`. The other ranks' tensors are unchanged."""
    return _start("reduce", group, async_op, lambda: reductions.reduce(tensor, dst, to_reduce_operator(op), group))


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
    """Reduce every rank's `tensor` and write the result to all of them, in place.

    `op` is windlass's or torch's `ReduceOp`. `MINLOC` and `MAXLOC` take pairs; see the docstring of `ReduceOp`.
    """
    return _start("all_reduce", group, async_op, lambda: reductions.all_reduce(tensor, to_reduce_operator(op), group))


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
    """All-reduce like `all_reduce`, but return the tensor unless `async_op` is set."""
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
    """All-reduce several tensors, with one work object for all."""

    def start() -> CollectiveWork:
        operator, ones = to_reduce_operator(op), list(tensors)
        for one in ones:
            reductions.check_all_reduce(one, operator, group)
        return _combine_works([reductions.all_reduce(one, operator, group) for one in ones])

    return _start("all_reduce_coalesced", group, async_op, start)


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
    """All-gather: on every rank, `tensor_list[i]` receives rank i's `tensor`.

    Ranks may have tensors of different sizes.
    """
    return _start("all_gather", group, async_op, lambda: byte_collectives.all_gather(tensor_list, tensor, group))


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
    """All-gather every rank's `tensor` `[n, ...]` into `output_tensor`, `[ranks * n, ...]` or `[ranks, n, ...]`."""
    return _start(
        "all_gather_into_tensor",
        group,
        async_op,
        lambda: byte_collectives.all_gather_into_tensor(output_tensor, tensor, group),
    )


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False, debug: Any = None
) -> Any:
    """Call `all_gather_into_tensor`."""
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
    """Call `all_gather_into_tensor` for several pairs of tensors, with one work object for all."""

    def start() -> CollectiveWork:
        outputs, inputs = list(output_tensors), list(input_tensors)
        if len(outputs) != len(inputs):
            raise CommunicationError(
                f"all_gather_coalesced: got {len(outputs)} output_tensors and {len(inputs)} input_tensors; pass one "
                "output for each input"
            )
        pairs = list(zip(outputs, inputs, strict=True))
        for out, own in pairs:
            byte_collectives.check_all_gather_into_tensor(out, own, group)
        return _combine_works([byte_collectives.all_gather_into_tensor(out, own, group) for out, own in pairs])

    return _start("all_gather_coalesced", group, async_op, start)


@timed_op
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Any = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: Any = None,
) -> None:
    """All-gather objects: `object_list[i]` receives rank i's `obj`.

    Objects are pickled: use it only among ranks that trust each other.
    """
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
    """Reduce-scatter: rank i's `output` receives the reduction of every rank's `input_list[i]`.

    Parts may differ in size.
    """
    return _start(
        "reduce_scatter",
        group,
        async_op,
        lambda: reductions.reduce_scatter(output, input_list, to_reduce_operator(op), group),
    )


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
    """Reduce-scatter: rank i's `output_tensor` receives the reduction of part i of every rank's `tensor`.

    All parts have the same size.
    """
    return _start(
        "reduce_scatter_tensor",
        group,
        async_op,
        lambda: reductions.reduce_scatter_tensor(output_tensor, tensor, to_reduce_operator(op), group),
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
    """Call `reduce_scatter_tensor`."""
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
    """All-to-all: `output_tensor_list[i]` receives the tensor in rank i's `input_tensor_list` for this rank.

    Sizes may differ.
    """
    return _start(
        "all_to_all", group, async_op, lambda: byte_collectives.all_to_all(output_tensor_list, input_tensor_list, group)
    )


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
    """All-to-all of rows: send rows of `tensor` to each rank, and receive rows from each in `output`.

    `input_split_sizes[i]` is the number of rows for rank i, `output_split_sizes[i]` the number from rank i. None: the
    rows are divided equally.
    """
    return _start(
        "all_to_all_single",
        group,
        async_op,
        lambda: byte_collectives.all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group),
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
    """Send to rank `dst`, which must receive with the same tag.

    NCCL ignores tags: there, the order of calls must match.
    """
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
    """Receive from rank `src`, or from any rank if `src` is None and the backend supports that (gloo, MPI).

    Returns:
        The sender's rank; -1 on a rank outside the group.
    """
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
    """Start a `send`, and return its work object."""
    return _start("isend", group, True, lambda: send_and_receive.send(tensor, dst, group, tag))


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
    """Start a `recv`, and return its work object."""
    return _start("irecv", group, True, lambda: send_and_receive.receive(tensor, src, group, tag)[0])


@timed_op
def batch_isend_irecv(
    p2p_op_list: Sequence[Any], prof: bool = False, log_name: str = "batch_isend_irecv", debug: Any = None
) -> list[Any]:
    """Start all `P2POp`s of a list at once. Return their work objects."""
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
    """Block until every rank of the group reaches this call."""
    if not warn_unless_member(group, "barrier"):
        return None
    return dist.barrier(group=group_or_world(group), async_op=async_op, device_ids=device_ids)


def _start(name: str, group: Any, async_op: bool, call: Callable[[], CollectiveWork]) -> Any:
    """Start a collective. Return its work object if `async_op`, else wait. Return None on a rank outside the group."""
    return wait_or_return(call(), async_op) if warn_unless_member(group, name, stacklevel=5) else None


def _combine_works(works: list[CollectiveWork]) -> CollectiveWork:
    """Combine several work objects into one."""

    def finish() -> None:
        for work in works:
            work.wait()

    inner = [one for work in works for one in work.works]
    return CollectiveWork(inner, finish, [tensor for work in works for tensor in work.outputs])
