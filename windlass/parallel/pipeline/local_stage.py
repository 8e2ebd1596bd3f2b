"""Position of this rank along the pipeline, before a mesh exists."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from windlass.base.errors import ConfigError


def find_local_stage(num_stages: int | None, topology: Any) -> tuple[int, int]:
    """Return this rank's position along the pipeline and the number of ranks along it.

    The pipeline is the outermost axis of the ranks, unless `topology` defines it.

    Raises:
        ConfigError: the number of stages does not divide the number of ranks, or `num_stages` and `topology` differ.
    """
    rank, world = _rank_and_world_size()
    if topology is not None:
        stages = int(topology.get_dim("pipe"))
        if num_stages not in (None, stages):
            raise ConfigError(f"num_stages is {num_stages}, and the topology has {stages} along pipe; leave one out")
        return int(topology.get_coord(rank).pipe), stages
    stages = num_stages or 1
    if stages < 1 or world % stages:
        raise ConfigError(
            f"{world} ranks can't be split into num_stages = {stages}; write a number that divides {world}"
        )
    return rank // (world // stages), stages


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
