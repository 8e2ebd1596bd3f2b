"""The axes of the data-parallel mesh as process groups: dp_replicate x dp_shard."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from windlass.base.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """Some ranks that communicate; `ranks` are global, `index` is this rank's place among them.

    `beside` is a second process group of the same ranks, for CPU tensors, where `process_group` takes none.
    """

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int
    beside: dist.ProcessGroup | None = None

    @property
    def talks(self) -> dist.ProcessGroup:
        """The process group that takes CPU tensors."""
        return self.process_group if self.beside is None else self.beside

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class DataMesh:
    """The data ranks: `data` all of them, `shard` those that cut state among them, `replicate` those with equal cuts.

    `regather` are the neighbours that hold a second copy of the parameters between them (hpZ), or None.
    """

    data: Group
    shard: Group
    replicate: Group
    regather: Group | None = None

    def close(self) -> None:
        """Give back the groups' sockets; nobody may communicate over them after that."""
        groups = [group for group in (self.data, self.shard, self.replicate, self.regather) if group is not None]
        each = [one for group in groups for one in (group.process_group, group.beside) if one is not None]
        for process_group in {id(one): one for one in each}.values():
            with contextlib.suppress(ValueError):  # it went with the default group, or was closed before
                dist.destroy_process_group(process_group)


def _groups_of(world: list[list[int]], rank: int, timeout: timedelta | None) -> Group:
    """This rank's group of a partition of all ranks. Collective: every rank makes every group in the same order."""
    mine: Group | None = None
    talks = "gloo" in dist.get_backend_config()  # else CPU tensors need a group of their own
    for ranks in world:
        process_group = dist.new_group(ranks, timeout=timeout)
        beside = None if talks else dist.new_group(ranks, timeout=timeout, backend="gloo")
        if rank in ranks:
            assert process_group is not None
            mine = Group(process_group, tuple(ranks), ranks.index(rank), beside)
    assert mine is not None, f"rank {rank} is in none of {world}"
    return mine


def build_data_mesh(
    shard_size: int | None = None, regather_size: int | None = None, *, timeout: timedelta | None = None
) -> DataMesh:
    """The mesh over all ranks. Collective.

    Args:
        shard_size: over how many neighbours state is cut (MiCS, HSDP); None: all.
        regather_size: how many neighbours hold a second copy of the parameters (hpZ); None: no such copy.
        timeout: after which a collective that a peer never joined fails; None: torch's own (nccl: 10 minutes).

    Raises:
        ConfigError: a size does not divide the number of ranks.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    for name, size in (("mics_shard_size", shard_size), ("zero_hpz_partition_size", regather_size)):
        if size is not None and (size < 1 or world % size):
            raise ConfigError(f"zero_optimization.{name} = {size} does not divide the {world} data ranks")
    everyone = list(range(world))
    data = _groups_of([everyone], rank, timeout)
    if shard_size is None or shard_size == world:
        shard, replicate = data, Group(data.process_group, (rank,), 0)  # alone: never communicates
    else:
        shard = _groups_of([everyone[i : i + shard_size] for i in range(0, world, shard_size)], rank, timeout)
        replicate = _groups_of([everyone[i::shard_size] for i in range(shard_size)], rank, timeout)
    regather = None
    if regather_size is not None and 1 < regather_size < world:
        regather = _groups_of([everyone[i : i + regather_size] for i in range(0, world, regather_size)], rank, timeout)
    return DataMesh(data, shard, replicate, regather)
