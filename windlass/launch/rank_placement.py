"""Placement of ranks on hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """Machine that runs ranks, with one slot for each.

    `slots` are indices into the devices available on the host, or device names (`GPU-8f3...`); on a host without GPUs
    only the number of slots counts.
    """

    name: str
    slots: tuple[int | str, ...]

    @property
    def address(self) -> str:
        """Name or address of the host, without the login user."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True)
class RankPlacement:
    """Placement of one rank. `node_rank` is the index of its host, `local_rank` its index on that host."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    local_world_size: int
    world_size: int
    num_nodes: int

    def environment(self) -> dict[str, str]:
        """Return the environment variables of this placement, under the names that torchrun and `deepspeed` use."""
        values = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "LOCAL_SIZE": self.local_world_size,
            "CROSS_RANK": self.node_rank,
            "CROSS_SIZE": self.num_nodes,
        }
        return {name: str(value) for name, value in values.items()}


def place_ranks(hosts: Sequence[Host]) -> list[list[RankPlacement]]:
    """Return, for each host, the placements of its ranks. Ranks are numbered host by host."""
    world, rank, found = sum(len(host.slots) for host in hosts), 0, []
    for node, host in enumerate(hosts):
        size = len(host.slots)
        found.append(
            [RankPlacement(rank + local, local, node, host.name, size, world, len(hosts)) for local in range(size)],
        )
        rank += size
    return found
