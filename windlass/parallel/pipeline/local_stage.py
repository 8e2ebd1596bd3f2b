"""Which place along the pipeline this rank has, before there is a mesh."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from windlass.base.errors import ConfigError


def find_local_stage(num_stages: int | None, topology: Any) -> tuple[int, int]:
    """This rank's place along the pipeline, and how many there are: the outermost axis, unless a topology says.

    Raises:
        ConfigError: they don't divide the ranks, or the two say different numbers.
    """
    rank, world = _rank_and_world_size()
    if topology is not None:
        stages = int(topology.get_dim("pipe"))
        if num_stages not in (None, stages):
            raise ConfigError(f"num_stages is {num_stages}, and the topology has {stages} along pipe; leave one out")
        return int(topology.get_coord(rank).pipe), stages
    stages = num_stages or 1
    if stages < 1 or world % stages:
        raise ConfigError(f"{world} ranks can't be cut into num_stages = {stages}; write a number that divides {world}")
    return rank // (world // stages), stages


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
