"""Where each rank is: on which host, the how-manieth there, and of how many in all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A machine that ranks run on, and its slots: one rank for each.

    `slots` are numbers of devices among those that the host gives, or their names (`GPU-8f3...`); on a host without
    GPUs they only count.
    """

    name: str
    slots: tuple[int | str, ...]

    @property
    def address(self) -> str:
        """Its name or address, without the user who is to log in there."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True)
class RankPlacement:
    """One rank's place. `node` counts hosts, `local_rank` the ranks of this host."""

    rank: int
    local_rank: int
    node_rank: int
    host: str
    local_world_size: int
    world_size: int
    num_nodes: int

    def environment(self) -> dict[str, str]:
        """As torchrun and the `deepspeed` command name it."""
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
    """The places of each host: ranks count through the hosts in their order."""
    world, rank, found = sum(len(host.slots) for host in hosts), 0, []
    for node, host in enumerate(hosts):
        size = len(host.slots)
        found.append(
            [RankPlacement(rank + local, local, node, host.name, size, world, len(hosts)) for local in range(size)],
        )
        rank += size
    return found
