"""Tests of reading the axes of a model-parallel unit (mpu) or a topology, which must order ranks as the mesh does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.base.errors import ConfigError
from windlass.comm.mesh_shape import DATA_LOADING_AXES, MeshShape
from windlass.compat.process_topology import PipeModelDataParallelTopology, ProcessTopology
from windlass.parallel import script_ranks as module
from windlass.parallel.script_ranks import known_sizes, sizes_of_mpu, sizes_of_topology

MEGATRON = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "sp": "context_parallel",
    "ep": "expert_model_parallel",
}


def unit(grid: MeshShape, rank: int, names: dict[str, str] = MEGATRON, **more: int) -> Any:
    """Return an mpu as Megatron would create it on this rank of the grid."""
    here = grid.coordinates(rank)
    text = {"data_parallel_world_size": grid.data_loading_size}
    text["data_parallel_rank"] = grid.along(rank, *DATA_LOADING_AXES).index(rank)
    for axis, name in names.items():
        text |= {f"{name}_world_size": grid.size(axis), f"{name}_rank": here[axis]}
    return SimpleNamespace(**{f"get_{key}": lambda value=value: value for key, value in {**text, **more}.items()})


def read_at(rank: int, mpu: Any, world: int) -> dict[str, int]:
    """Return the axis sizes that `rank` reads from its mpu, without the agreement with other ranks."""
    sizes, problem = module._read(mpu, world, rank)
    if problem:
        raise ConfigError(problem)
    return sizes


small = st.integers(1, 3)


@given(small, small, small, small, small)
def test_mpu_sizes_are_read_on_every_rank(pp: int, shard: int, ep: int, sp: int, tp: int) -> None:
    grid = MeshShape(pp=pp, dp_shard=shard, ep=ep, sp=sp, tp=tp)
    for rank in range(0, grid.world, max(1, grid.world // 7)):
        assert read_at(rank, unit(grid, rank), grid.world) == {"pp": pp, "ep": ep, "sp": sp, "tp": tp}


def test_method_names_of_each_kind_of_mpu() -> None:
    grid = MeshShape(pp=2, dp_shard=2, tp=2)
    deepspeed = unit(grid, 5, {"pp": "pipe_parallel", "tp": "slice_parallel"}, model_parallel_world_size=4)
    assert read_at(5, deepspeed, 8) == {"pp": 2, "ep": 1, "sp": 1, "tp": 2}
    old = unit(MeshShape(dp_shard=2, tp=2), 3, {"tp": "model_parallel"})
    assert read_at(3, old, 4) == {"pp": 1, "ep": 1, "sp": 1, "tp": 2}
    ulysses = unit(MeshShape(dp_shard=2, sp=2), 1, {"sp": "sequence_parallel"}, model_parallel_world_size=1)
    assert read_at(1, ulysses, 4) == {"pp": 1, "ep": 1, "sp": 2, "tp": 1}
    both = unit(MeshShape(dp_shard=2, sp=2), 1, {"sp": "sequence_parallel"}, context_parallel_world_size=1)
    assert read_at(1, both, 4)["sp"] == 2


def test_sequence_parallel_methods_under_another_name_are_no_tensor_parallelism() -> None:
    def size() -> int:
        return 2

    unit = SimpleNamespace(get_sequence_parallel_world_size=size, get_model_parallel_world_size=size)
    assert known_sizes(unit) == {"sp": 2}


def test_data_ranks_may_include_sequence_ranks() -> None:
    grid = MeshShape(dp_shard=2, sp=2)
    assert read_at(1, unit(grid, 1, data_parallel_world_size=4, data_parallel_rank=1), 4)["sp"] == 2


def test_mpu_without_other_axes_has_sizes_of_one() -> None:
    assert sizes_of_mpu(SimpleNamespace(), 6) == {"pp": 1, "ep": 1, "sp": 1, "tp": 1}


def test_product_of_sizes_must_equal_the_world() -> None:
    mpu = unit(MeshShape(pp=2, dp_shard=2, tp=2), 0)
    with pytest.raises(ConfigError, match=r"pp 2 x sp 1 x tp 2 x ep 1 do not divide the world of 6"):
        sizes_of_mpu(mpu, 6)
    with pytest.raises(ConfigError, match=r"leave 4 data ranks of a world of 16, but it has 2; the product"):
        sizes_of_mpu(mpu, 16)


def test_other_rank_order_is_refused_with_both_coordinates() -> None:
    grid = MeshShape(pp=2, dp_shard=2)  # in the mesh pp varies slowest; in this mpu pp varies faster than data
    mpu = unit(grid, 1, pipeline_model_parallel_rank=1, data_parallel_rank=0)
    with pytest.raises(ConfigError) as caught:
        read_at(1, mpu, 4)
    text = str(caught.value)
    assert "get_pipeline_model_parallel_rank() is 1" in text and "it would be 0" in text and "section parallel" in text
    with pytest.raises(ConfigError, match=r"get_data_parallel_rank\(\) is 1, .* it would be 0"):
        read_at(0, unit(MeshShape(dp_shard=2, tp=2), 0, data_parallel_rank=1), 4)


def test_uninitialized_mpu_is_refused() -> None:
    def unset() -> int:
        raise AssertionError("tensor model parallel group is not initialized")

    mpu = SimpleNamespace(get_tensor_model_parallel_world_size=unset)
    with pytest.raises(ConfigError, match="rank 0: the mpu failed: AssertionError: tensor model parallel"):
        sizes_of_mpu(mpu, 4)


def test_sizes_that_differ_between_ranks_are_refused() -> None:
    def gather(said: Any) -> list[Any]:
        return [said, ({**said[0], "tp": 1}, "")]

    with (
        patch.object(module.dist, "is_initialized", lambda: True),
        patch.object(module.dist, "get_rank", lambda: 0),
        patch.object(module, "world_group", lambda: SimpleNamespace(all_gather_object=gather)),
        pytest.raises(ConfigError, match=r"'tp': 2\} on rank 0 and .*'tp': 1\} on rank 1"),
    ):
        sizes_of_mpu(unit(MeshShape(tp=2), 0), 2)


@given(small, small, small)
def test_sizes_of_a_topology_are_read_without_communication(pp: int, tp: int, dp: int) -> None:
    assert sizes_of_topology(PipeModelDataParallelTopology(pp, tp, dp), pp * tp * dp) == {"pp": pp, "tp": tp}


def test_a_topology_of_other_ranks_or_another_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="the topology pipe 2 x data 1 x model 2 has 4 ranks, but the job has 8"):
        sizes_of_topology(PipeModelDataParallelTopology(2, 2, 1), 8)
    with pytest.raises(
        ConfigError, match="the topology orders ranks differently from the mesh.*pipe of rank 1 is 1.*would be 0"
    ):
        sizes_of_topology(ProcessTopology(["model", "pipe", "data"], [2, 2, 1]), 4)
