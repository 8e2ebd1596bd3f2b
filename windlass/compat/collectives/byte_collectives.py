"""Asynchronous collectives that move elements unchanged. They send bytes, so that every dtype is supported.

An invalid argument raises `CommunicationError` before this rank sends anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.compat.collectives.backend_capabilities import (
    backend_of,
    capabilities_of,
    group_or_world,
    require_rank,
)
from windlass.compat.collectives.byte_payload import (
    as_bytes,
    combine_callbacks,
    copy_elements,
    describe_tensor,
    nbytes_of,
    receive_buffer,
    require_dense,
    unpack_bytes,
)
from windlass.compat.collectives.collective_work import CollectiveWork

# torch 2.13 renamed this function: the old name warns there, and the new name does not exist in 2.10
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_all_gather_bytes(own: torch.Tensor, group: Any) -> tuple[list[torch.Tensor], Any]:
    """Start an all-gather of bytes; every rank's `own` has the same size.

    Returns:
        The output buffers, one per rank, and torch's work (None if nothing is sent).
    """
    size = dist.get_world_size(group)
    if size == 1 or own.numel() == 0:
        return [own] * size, None
    together = torch.empty(size * own.numel(), dtype=torch.uint8, device=own.device)
    work = _ALL_GATHER(together, own, group=group, async_op=True)
    return list(together.chunk(size)), work


def start_all_to_all_bytes(
    sends: Sequence[torch.Tensor], sizes: Sequence[int], group: Any
) -> tuple[list[torch.Tensor], Any]:
    """Start an all-to-all of bytes: send `sends[i]` to rank i, and receive `sizes[i]` bytes from it.

    Returns:
        The output buffers, one per rank, and torch's work (None if nothing is sent).
    """
    if len(sends) == 1:
        return [sends[0]], None
    together = torch.empty(sum(sizes), dtype=torch.uint8, device=sends[0].device)
    work = dist.all_to_all_single(
        together, torch.cat(list(sends)), list(sizes), [part.numel() for part in sends], group=group, async_op=True
    )
    return list(together.split(list(sizes))), work


def broadcast(tensor: torch.Tensor, src: int, group: Any) -> CollectiveWork:
    """Start a broadcast of rank `src`'s `tensor` into every rank's `tensor`."""
    require_rank("src", src, group)
    here = dist.get_rank() == src
    # The source only reads its tensor; a receiver that is not contiguous needs a contiguous buffer and a copy.
    travels, finish = (as_bytes(tensor), None) if here else receive_buffer(tensor)
    if travels.numel() == 0 or dist.get_world_size(group) == 1:
        return CollectiveWork(outputs=[tensor])
    return CollectiveWork([dist.broadcast(travels, src, group=group, async_op=True)], finish, [tensor])


def all_gather(tensors: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any) -> CollectiveWork:
    """Start an all-gather: `tensors[i]` receives rank i's `tensor`. Ranks may have tensors of different sizes."""
    size, index = dist.get_world_size(group), dist.get_rank(group)
    _require_one_per_rank("all_gather", "tensor_list", tensors, tensor, size)
    _require_same_size("all_gather", tensors[index], tensor)
    # `tensors` has one entry per rank, so every rank computes the same sizes and takes the same path.
    longest = max(nbytes_of(one) for one in tensors)
    own = as_bytes(tensor)
    if longest == 0:
        return CollectiveWork(outputs=tensors)
    if size > 1 and all(nbytes_of(one) == longest for one in tensors):
        landings = [receive_buffer(one) for one in tensors]
        work = dist.all_gather([where for where, _ in landings], own, group=group, async_op=True)
        return CollectiveWork([work], combine_callbacks([finish for _, finish in landings]), tensors)
    # An all-gather needs equal sizes: pad to the longest, and drop the padding on arrival.
    padded = torch.cat([own, own.new_empty(longest - own.numel())]) if own.numel() < longest else own
    received, work = start_all_gather_bytes(padded, group)

    def finish() -> None:
        for part, one in zip(received, tensors, strict=True):
            copy_elements(unpack_bytes(part, [one])[0], one)

    return CollectiveWork([work], finish, tensors)


def all_gather_into_tensor(output: torch.Tensor, tensor: torch.Tensor, group: Any) -> CollectiveWork:
    """Start an all-gather of every rank's `tensor` into `output`, concatenated in rank order."""
    check_all_gather_into_tensor(output, tensor, group)
    size = dist.get_world_size(group)
    into, finish = receive_buffer(output)
    own = as_bytes(tensor)
    if own.numel() == 0:
        return CollectiveWork(outputs=[output])
    if size == 1:
        copy_elements(tensor, output)
        return CollectiveWork(outputs=[output])
    return CollectiveWork([_ALL_GATHER(into, own, group=group, async_op=True)], finish, [output])


def check_all_gather_into_tensor(output: torch.Tensor, tensor: torch.Tensor, group: Any) -> None:
    """Raise CommunicationError unless `output` can receive the `tensor` of every rank."""
    size = dist.get_world_size(group)
    require_dense(output)
    require_dense(tensor)
    if output.numel() != size * tensor.numel() or output.dtype != tensor.dtype:
        raise CommunicationError(
            f"all_gather_into_tensor: the output, {describe_tensor(output)}, is not {size} times the input, "
            f"{describe_tensor(tensor)}; pass an output of that size and of the input's dtype"
        )
    if size > 1:
        backend_of(group, tensor.device)  # raises if there is none


def gather(tensor: torch.Tensor, tensors: Sequence[torch.Tensor] | None, dst: int, group: Any) -> CollectiveWork:
    """Start a gather: on rank `dst`, `tensors[i]` receives rank i's `tensor`."""
    require_rank("dst", dst, group)
    size, own = dist.get_world_size(group), as_bytes(tensor)
    landings = None
    if dist.get_rank() == dst:
        _require_one_per_rank("gather", "gather_list", tensors, tensor, size, equal=True)
        assert tensors is not None
        landings = [receive_buffer(one) for one in tensors]
    if own.numel() == 0:
        return CollectiveWork()
    into = [where for where, _ in landings] if landings is not None else None
    work = dist.gather(own, into, dst, group=group, async_op=True)
    return CollectiveWork([work], combine_callbacks([finish for _, finish in landings or ()]), tensors or ())


def scatter(tensor: torch.Tensor, tensors: Sequence[torch.Tensor] | None, src: int, group: Any) -> CollectiveWork:
    """Start a scatter: rank i's `tensor` receives `tensors[i]` of rank `src`."""
    require_rank("src", src, group)
    sends = None
    if dist.get_rank() == src:
        _require_one_per_rank("scatter", "scatter_list", tensors, tensor, dist.get_world_size(group), equal=True)
        assert tensors is not None
        sends = [as_bytes(one) for one in tensors]
    into, finish = receive_buffer(tensor)
    if into.numel() == 0:
        return CollectiveWork(outputs=[tensor])
    return CollectiveWork([dist.scatter(into, sends, src, group=group, async_op=True)], finish, [tensor])


def gatherv(tensor: torch.Tensor, tensors: Sequence[torch.Tensor] | None, dst: int, group: Any) -> CollectiveWork:
    """Start a gather of tensors of different sizes: on rank `dst`, `tensors[i]` receives rank i's `tensor`.

    Only `dst` has the sizes, so torch's gather, which needs equal sizes, cannot be used.
    """
    require_rank("dst", dst, group)
    if dist.get_rank() != dst:
        return _transfers([dist.P2POp(dist.isend, as_bytes(tensor), dst, group)], [])
    index = dist.get_rank(group)
    _require_one_per_rank("gatherv", "gather_list", tensors, tensor, dist.get_world_size(group))
    assert tensors is not None
    _require_same_size("gatherv", tensors[index], tensor)
    copy_elements(tensor, tensors[index])
    landings = {i: receive_buffer(one) for i, one in enumerate(tensors) if i != index}
    ranks = dist.get_process_group_ranks(group_or_world(group))
    receives = [dist.P2POp(dist.irecv, into, ranks[i], group) for i, (into, _) in landings.items()]
    return _transfers(receives, [finish for _, finish in landings.values()], tensors)


def scatterv(tensor: torch.Tensor, tensors: Sequence[torch.Tensor] | None, src: int, group: Any) -> CollectiveWork:
    """Start a scatter of tensors of different sizes: rank i's `tensor` receives `tensors[i]` of rank `src`."""
    require_rank("src", src, group)
    if dist.get_rank() != src:
        into, finish = receive_buffer(tensor)
        return _transfers([dist.P2POp(dist.irecv, into, src, group)], [finish], [tensor])
    index = dist.get_rank(group)
    _require_one_per_rank("scatterv", "scatter_list", tensors, tensor, dist.get_world_size(group))
    assert tensors is not None
    _require_same_size("scatterv", tensor, tensors[index])
    copy_elements(tensors[index], tensor)
    ranks = dist.get_process_group_ranks(group_or_world(group))
    parts = [(i, as_bytes(one)) for i, one in enumerate(tensors) if i != index]
    return _transfers([dist.P2POp(dist.isend, part, ranks[i], group) for i, part in parts], [], [tensor])


def _transfers(operations: list[Any], finishes: Sequence[Any], outputs: Sequence[torch.Tensor] = ()) -> CollectiveWork:
    """Start point-to-point operations together. Empty messages are sent too, since only one side has the sizes."""
    works = dist.batch_isend_irecv(operations) if operations else []
    return CollectiveWork(works, combine_callbacks(finishes), outputs)


def all_to_all(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any) -> CollectiveWork:
    """Start an all-to-all: `outputs[i]` receives rank i's tensor for this rank. All sizes may differ."""
    size, index = dist.get_world_size(group), dist.get_rank(group)
    for name, each in (("output_tensor_list", outputs), ("input_tensor_list", inputs)):
        if len(each) != size:
            raise CommunicationError(
                f"all_to_all: {name} holds {len(each)} tensors for {size} ranks; pass one for each"
            )
        for one in each:
            require_dense(one)
    _require_same_size("all_to_all", outputs[index], inputs[index])
    sends = [as_bytes(one) for one in inputs]
    if size > 1 and capabilities_of(group, inputs[0].device).has_all_to_all_lists:
        landings = [receive_buffer(one) for one in outputs]
        work = dist.all_to_all([where for where, _ in landings], sends, group=group, async_op=True)
        return CollectiveWork([work], combine_callbacks([finish for _, finish in landings]), outputs)
    received, work = start_all_to_all_bytes(sends, [nbytes_of(one) for one in outputs], group)

    def finish() -> None:
        for part, one in zip(received, outputs, strict=True):
            copy_elements(unpack_bytes(part, [one])[0], one)

    return CollectiveWork([work], finish, outputs)


def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: Any,
) -> CollectiveWork:
    """Start an all-to-all of the rows of `tensor`: `input_splits[i]` rows for rank i; None: the same number for each.

    `output_splits[i]` is the number of rows from rank i.
    """
    size = dist.get_world_size(group)
    if output.dtype != tensor.dtype:
        raise CommunicationError(f"all_to_all_single: output is {output.dtype}, input {tensor.dtype}; use one dtype")
    rows_out, rows_in = (
        _split_bytes(name, one, splits, size)
        for name, one, splits in (("output", output, output_splits), ("input", tensor, input_splits))
    )
    into, finish = receive_buffer(output)
    sent = as_bytes(tensor)
    if size == 1:
        copy_elements(tensor, output)
        return CollectiveWork(outputs=[output])
    # A rank that neither sends nor receives joins too: the collective needs every rank.
    work = dist.all_to_all_single(into, sent, rows_out, rows_in, group=group, async_op=True)
    return CollectiveWork([work], finish, [output])


def _split_bytes(name: str, tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return the number of bytes for each rank."""
    require_dense(tensor)
    if tensor.dim() == 0:
        raise CommunicationError(f"all_to_all_single: the {name} has no rows to split; pass a tensor of 1 dim or more")
    rows = tensor.shape[0]
    if not splits:
        if rows % size:
            raise CommunicationError(
                f"all_to_all_single: {rows} rows of the {name} do not split over {size} ranks; pass {name}_split_sizes"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise CommunicationError(
            f"all_to_all_single: {name}_split_sizes = {list(splits)}; pass {size} numbers of at least 0 that add up to "
            f"the {rows} rows of the {name}"
        )
    row = nbytes_of(tensor) // rows if rows else 0
    return [count * row for count in splits]


def _require_one_per_rank(
    operation: str,
    name: str,
    tensors: Sequence[torch.Tensor] | None,
    tensor: torch.Tensor,
    size: int,
    *,
    equal: bool = False,
) -> None:
    require_dense(tensor)
    if tensors is None or len(tensors) != size:
        count = "nothing" if tensors is None else f"{len(tensors)} tensors"
        raise CommunicationError(f"{operation}: {name} holds {count} for a group of {size} ranks; pass one for each")
    for one in tensors:
        require_dense(one)
        if equal or one.dtype != tensor.dtype:
            _require_same_size(operation, one, tensor)


def _require_same_size(operation: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise CommunicationError(
            f"{operation}: a tensor {describe_tensor(one)} cannot hold the elements of {describe_tensor(other)}; give "
            "both the same size and dtype"
        )
