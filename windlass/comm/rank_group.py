"""Groups of ranks that communicate, and the groups of data ranks.

[Note: collectives start in comm] Code outside `windlass/comm` and `windlass/compat` does not call collectives of
`torch.distributed`: it calls `windlass/comm`, for example the methods of `RankGroup`, `MeshAxis` and `Mesh`, and the
functions of `comm/point_to_point`. So the process group of a call is always that of a `RankGroup`, and the hang report
recognizes each wait: it classifies the frames of `windlass/comm` as waits for other ranks (`watchdog/thread_location`),
and takes the name of the operation from the surrounding `WaitScope`, or from the method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError
from windlass.comm.group_creation import new_process_group

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """Group of ranks that communicate. `ranks` are global ranks, and `index` is this rank's position among them.

    `cpu_process_group` is a second process group of the same ranks for CPU tensors, if `process_group` does not support
    these. Only `send`, `receive` and `cpu_group` use it; the other methods use `process_group`.

    The methods that transfer data are collective over the group, except `send`, `receive`, `send_object` and
    `receive_object`. Collective methods send nothing in a group of one rank. `source` and `target` are indices in the
    group. Objects are pickled; received objects are copies.
    """

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int
    cpu_process_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> RankGroup:
        """Wrap an existing process group that contains this rank."""
        ranks = tuple(dist.get_process_group_ranks(process_group))
        return cls(process_group, ranks, dist.get_rank(process_group))

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """Process group that supports CPU tensors."""
        return self.process_group if self.cpu_process_group is None else self.cpu_process_group

    @property
    def size(self) -> int:
        return len(self.ranks)

    # Tensors

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce the contiguous `tensor` in place over the group, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, op, group=self.process_group)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Broadcast the values of the rank at index `source` into the contiguous `tensor`, and return it."""
        if self.size > 1:
            dist.broadcast(tensor, self.ranks[source], group=self.process_group)
        return tensor

    def start_broadcast(self, tensor: torch.Tensor, source: int = 0) -> Any:
        """Start a broadcast of a contiguous tensor, which must not change before the end of the returned operation.

        `wait_for_transfers` of `comm/point_to_point` waits for the operation. Returns None in a group of one rank.
        """
        if self.size == 1:
            return None
        return dist.broadcast(tensor, self.ranks[source], group=self.process_group, async_op=True)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send a contiguous tensor to the rank at index `target`, and wait until its memory may be changed."""
        dist.send(tensor, self.ranks[target], group=self._group_for(tensor))

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Receive into the contiguous `tensor` from the rank at index `source`, and return it."""
        dist.recv(tensor, self.ranks[source], group=self._group_for(tensor))
        return tensor

    # Objects

    def all_gather_object(self, value: T) -> list[T]:
        """All-gather a Python value, in the order of the group."""
        values: list[T] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def gather_object(self, value: T, target: int = 0) -> list[T]:
        """Return, on the rank at index `target`, the values of all ranks in group order; on others, an empty list."""
        values: list[T] | None = [value] * self.size if self.index == target else None
        if self.size > 1:
            dist.gather_object(value, values, group=self.process_group, group_dst=target)
        return values or []

    def broadcast_object(self, value: T | None = None, source: int = 0) -> T:
        """Return the value of the rank at index `source`. The values of the other ranks are ignored."""
        values: list[Any] = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, group=self.process_group, group_src=source)
        found: T = values[0]
        return found

    def send_object(self, value: Any, target: int) -> None:
        """Send a Python value to the rank at index `target`, which calls `receive_object`."""
        dist.send_object_list([value], group=self.process_group, group_dst=target)

    def receive_object(self, source: int) -> Any:
        """Return the value that the rank at index `source` sends by `send_object`."""
        values: list[Any] = [None]
        dist.recv_object_list(values, group=self.process_group, group_src=source)
        return values[0]

    # Group

    def barrier(self) -> None:
        """Wait until all ranks of the group have called this."""
        if self.size > 1:
            dist.barrier(group=self.process_group)

    def destroy(self) -> None:
        """Destroy the process groups, which closes their connections. No rank may communicate over them afterwards."""
        close_process_groups(self.process_group, self.cpu_process_group)

    def _group_for(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        return self.cpu_group if tensor.device.type == "cpu" else self.process_group


@dataclass(frozen=True)
class DataMesh:
    """This rank's groups of data ranks, for dense parameters or for experts.

    Attributes:
        data: All data ranks.
        shard: Ranks over which states are sharded.
        replicate: Ranks with equal shards.
        secondary: Nearby ranks that hold a second sharded copy of the parameters (hpZ), or None.
    """

    data: RankGroup
    shard: RankGroup
    replicate: RankGroup
    secondary: RankGroup | None = None


def close_process_groups(*process_groups: dist.ProcessGroup | None) -> None:
    """Destroy the process groups that still exist, which closes their connections. Arguments `None` are skipped."""
    for process_group in process_groups:
        if process_group is not None:
            with contextlib.suppress(ValueError):  # the group was destroyed with the default group, or earlier
                dist.destroy_process_group(process_group)


def world_group() -> RankGroup:
    """Return the group of all ranks (the default process group), for code that runs without a mesh.

    Raises:
        CommunicationError: the default process group is not initialized.
    """
    if dist.group.WORLD is None:
        raise CommunicationError(
            "the default process group is not initialized: call windlass.init_distributed() or windlass.initialize() "
            "first"
        )
    return RankGroup(dist.group.WORLD, tuple(range(dist.get_world_size())), dist.get_rank())


def create_rank_group(
    partition: Sequence[tuple[int, ...]], *, backend: str | None = None, timeout: timedelta | None = None
) -> RankGroup:
    """Create the process groups of disjoint sets of ranks, and return this rank's group. Collective over all ranks.

    Args:
        partition: Sets of global ranks, equal on all ranks.
        backend: Backend of the groups; the default group's by default.
        timeout: Time after which a collective fails if a peer does not join; torch's default by default.

    Raises:
        CommunicationError: this rank is in none of the sets (then it creates no group); or see `new_process_group`.
    """
    rank = dist.get_rank()
    own = next((number for number, ranks in enumerate(partition) if rank in ranks), None)
    if own is None:
        raise CommunicationError(f"rank {rank} is in none of the groups {list(partition)}; add it to one of them")
    # `new_group` is collective over all ranks, so every rank creates the groups of the others too.
    created = [new_process_group(ranks, backend=backend, timeout=timeout) for ranks in partition]
    return RankGroup.of(created[own])  # in torch's order of the ranks, which is ascending
