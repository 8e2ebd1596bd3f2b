"""Groups of ranks that communicate, and the groups of data ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class RankGroup:
    """Group of ranks that communicate. `ranks` are global ranks, and `index` is this rank's position among them.

    `cpu_process_group` is a second process group of the same ranks for CPU tensors, if `process_group` does not support
    these.
    """

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int
    cpu_process_group: dist.ProcessGroup | None = None

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """Process group that supports CPU tensors."""
        return self.process_group if self.cpu_process_group is None else self.cpu_process_group

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class DataMesh:
    """Groups of the data ranks.

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
