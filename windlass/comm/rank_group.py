"""Ranks that communicate: a group of them, and the groups of data ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class RankGroup:
    """Some ranks that communicate; `ranks` are global, `index` is this rank's place among them.

    `beside` is a second process group of the same ranks, for CPU tensors, where `process_group` takes none.
    """

    process_group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int
    cpu_process_group: dist.ProcessGroup | None = None

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """The process group that takes CPU tensors."""
        return self.process_group if self.cpu_process_group is None else self.cpu_process_group

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class DataMesh:
    """The data ranks: `data` all of them, `shard` those that cut state among them, `replicate` those with equal cuts.

    `regather` are the neighbours that hold a second copy of the parameters between them (hpZ), or None.
    """

    data: RankGroup
    shard: RankGroup
    replicate: RankGroup
    secondary: RankGroup | None = None
