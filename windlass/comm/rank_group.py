"""Groups of ranks that communicate."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate. `ranks` are global; `index` is this rank's position among them.

    `cpu_process_group` is a second process group of the same ranks, if `process_group` does not support CPU
    tensors.
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
    """Data-parallel ranks: `data` is all of them, `shard` the ranks over which states are sharded, `replicate` the
    ranks with equal shards.

    `secondary` are the neighbours that hold a secondary copy of the parameters together (hpZ), or None.
    """

    data: RankGroup
    shard: RankGroup
    replicate: RankGroup
    secondary: RankGroup | None = None
