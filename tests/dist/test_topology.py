"""Tests of a topology's groups on real ranks, and of a grid that is read back as a script's mpu."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.dist.harness import run_ranks
from windlass.base.errors import ConfigError
from windlass.compat.pipeline_grid import PipelineParallelGrid
from windlass.compat.process_topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from windlass.parallel.script_ranks import sizes_of_mpu


def query_grid(grid: PipelineParallelGrid) -> dict[str, Any]:
    """Return all values that a script may query, and for each group a sum that identifies its ranks."""
    sums = {}
    for axis in ("pipe", "data", "model", "slice"):
        total = torch.tensor(float(1 << grid.get_global_rank()))
        dist.all_reduce(total, group=getattr(grid, f"get_{axis}_parallel_group")())
        sums[axis] = int(total)
    names = ("pipe", "data", "model", "slice")
    for megatron, axis in (("pipeline_model", "pipe"), ("tensor_model", "slice")):
        for what in ("rank", "world_size", "group"):
            assert (
                getattr(grid, f"get_{megatron}_parallel_{what}")() == getattr(grid, f"get_{axis}_parallel_{what}")()
            ), (megatron, what)
    assert grid.get_data_parallel_group_ranks() == dist.get_process_group_ranks(grid.get_data_parallel_group())
    return {
        "sums": sums,
        "ranks": {name: getattr(grid, f"get_{name}_parallel_rank")() for name in names},
        "sizes": {name: getattr(grid, f"get_{name}_parallel_world_size")() for name in names},
        "stage": (grid.get_stage_id(), grid.is_first_stage, grid.is_last_stage, grid.get_data_parallel_id()),
        "next": grid.stage_to_global((grid.get_stage_id() + 1) % grid.pipe_parallel_size),
        "p2p": grid.p2p_groups[grid.get_global_rank()],
    }


def in_three_layouts() -> list[Any]:
    results = [
        query_grid(PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))),
        query_grid(PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=2))),
        query_grid(PipelineParallelGrid()),
    ]
    try:
        PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=1))
    except ConfigError as error:
        results.append(str(error))
    return results


def bits(*ranks: int) -> int:
    return sum(1 << rank for rank in ranks)


def test_groups_reduce_over_their_ranks() -> None:
    three = run_ranks(in_three_layouts, 4)
    for rank, (cut, copied, dealt, refused) in enumerate(three):
        stage, place = divmod(rank, 2)
        assert cut["sums"] == {
            "pipe": bits(place, place + 2),
            "data": bits(rank),
            "model": bits(0, 1, 2, 3),
            "slice": bits(2 * stage, 2 * stage + 1),
        }
        assert cut["ranks"] == {"pipe": stage, "data": 0, "model": rank, "slice": place}
        assert cut["sizes"] == {"pipe": 2, "data": 1, "model": 4, "slice": 2}
        assert copied["sums"] == {
            "pipe": bits(place, place + 2),
            "data": bits(2 * stage, 2 * stage + 1),
            "model": bits(place, place + 2),
            "slice": bits(rank),
        }
        assert copied["ranks"] == {"pipe": stage, "data": place, "model": stage, "slice": 0}
        assert dealt == copied  # by default the axes get the prime factors of 4
        for item in (cut, copied):
            assert item["next"] == (rank + 2) % 4
            assert item["p2p"] == [rank, (rank + 2) % 4]
        assert cut["stage"] == (stage, stage == 0, stage == 1, 0)
        assert copied["stage"] == (stage, stage == 0, stage == 1, place)
        assert refused.startswith("the topology pipe 2 x data 1 has 2 ranks, but the job has 4; start as many")


def read_back() -> tuple[dict[str, int], str]:
    result = sizes_of_mpu(PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)), 4)
    try:
        sizes_of_mpu(PipelineParallelGrid(ProcessTopology(["data", "pipe"], [2, 2])), 4)
    except ConfigError as error:
        return result, str(error)
    return result, ""


def test_grid_serves_as_mpu_and_another_rank_order_is_refused() -> None:
    """A grid is accepted as mpu, and another rank order is refused on every rank.

    Rank 0 has the same coordinates in every order, so only its groups reveal the order. All ranks raise the error of
    rank 0.
    """
    for result, refused in run_ranks(read_back, 4):
        assert result == {"pp": 2, "ep": 1, "sp": 1, "tp": 2}
        assert refused.startswith("rank 0: the mpu orders ranks differently")
        assert "the ranks of get_pipeline_model_parallel_group() is [0, 1]" in refused and "would be [0, 2]" in refused
