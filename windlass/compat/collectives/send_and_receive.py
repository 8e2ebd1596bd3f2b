"""Asynchronous point-to-point operations: send, receive, and batches of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.compat.collectives.backend_capabilities import capabilities_of, group_or_world, require_rank
from windlass.compat.collectives.byte_payload import as_bytes, combine_callbacks, receive_buffer
from windlass.compat.collectives.collective_work import CollectiveWork


def send(tensor: torch.Tensor, dst: int, group: Any, tag: int) -> CollectiveWork:
    """Start sending `tensor` to the global rank `dst`, which must receive equally many bytes with the same tag."""
    require_rank("dst", dst, group)
    return CollectiveWork([dist.isend(as_bytes(tensor), dst, group=group, tag=tag)])


def receive(tensor: torch.Tensor, src: int | None, group: Any, tag: int) -> tuple[CollectiveWork, Callable[[], int]]:
    """Start receiving into `tensor` from rank `src`; from any rank if `src` is None and the backend supports it.

    Returns:
        The work, and a function that returns the sender's global rank once the work is complete.

    Raises:
        CommunicationError: `src` is not in the group, or is None and the backend needs the sender's rank.
    """
    into, finish = receive_buffer(tensor)
    if src is not None:
        require_rank("src", src, group)
        return CollectiveWork([dist.irecv(into, src, group=group, tag=tag)], finish, [tensor]), lambda: src
    if not capabilities_of(group, tensor.device).receives_from_any:
        raise CommunicationError(
            f"recv: the backend of {tensor.device.type} tensors needs the sender's rank; pass src, or receive into a "
            "CPU tensor over gloo"
        )
    work = dist.irecv(into, None, group=group, tag=tag)
    assert work is not None

    def source() -> int:
        return dist.get_global_rank(group_or_world(group), work._source_rank())

    return CollectiveWork([work], finish, [tensor]), source


class P2POp:
    """One operation in a batch for `batch_isend_irecv`.

    Args:
        op: `isend` or `irecv`, of `windlass.compat.collectives` or of `torch.distributed`.
        tensor: tensor to send or to receive into.
        peer: global rank of the other side.

    Raises:
        CommunicationError: `op` is neither `isend` nor `irecv`.
    """

    def __init__(
        self, op: Callable[..., Any], tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0
    ) -> None:
        name = getattr(op, "__name__", "")
        if name not in ("isend", "irecv"):
            raise CommunicationError(f"P2POp: op = {op!r} is neither isend nor irecv; pass one of these")
        self.op, self.tensor, self.peer, self.group, self.tag = name, tensor, peer, group, tag


def start_batch(operations: Sequence[Any]) -> list[CollectiveWork]:
    """Start all operations in one torch batch, because some backends need matching sends and receives together."""
    started, finishes = [], []
    for one in operations:
        name = one.op if isinstance(one.op, str) else one.op.__name__
        require_rank("peer", one.peer, one.group)
        travels, finish = receive_buffer(one.tensor) if name == "irecv" else (as_bytes(one.tensor), None)
        started.append(dist.P2POp(getattr(dist, name), travels, one.peer, one.group, one.tag))
        finishes.append(finish)
    if not started:
        return []
    works = dist.batch_isend_irecv(started)
    if len(works) != len(started):  # the backend returned one work for the whole batch
        return [CollectiveWork(works, combine_callbacks(finishes), [one.tensor for one in operations])]
    return [CollectiveWork([work], finish) for work, finish in zip(works, finishes, strict=True)]
