"""Tests of topologies: ranks and coordinates along any axes, equal to DeepSpeed's and to the mesh's."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.comm.mesh_shape import DATA_AXES, MeshShape
from windlass.compat.process_topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    topology_of,
)

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def named(dims: list[int]) -> ProcessTopology:
    return ProcessTopology([f"axis{index}" for index in range(len(dims))], dims)


@given(sizes)
def test_every_coordinate_has_one_rank(dims: list[int]) -> None:
    box = named(dims)
    assert sorted(box.mapping.values()) == list(range(box.world_size()))
    for place, rank in box.mapping.items():
        assert box.get_coord(rank) == place
        assert box.get_rank(**place._asdict()) == rank
    assert [box.get_coord(rank) for rank in range(box.world_size())] == list(product(*map(range, dims)))


@given(sizes, st.data())
def test_groups_of_an_axis_partition_the_ranks(dims: list[int], data: st.DataObject) -> None:
    box = named(dims)
    axis = data.draw(st.sampled_from(box.axes))
    groups = box.get_axis_comm_lists(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(box.world_size()))
    for group in groups:
        places = [box.get_coord(rank)._asdict() for rank in group]
        assert [place.pop(axis) for place in places] == list(range(box.get_dim(axis)))
        assert all(place == places[0] for place in places)
    for idx in range(box.get_dim(axis)):
        assert box.get_axis_list(axis, idx) == sorted(group[idx] for group in groups)


def test_topology_methods_equal_deepspeed() -> None:
    box = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert (box.get_axis_names(), box.dims) == (["pipe", "data", "model"], [2, 2, 2])
    assert box.get_rank(pipe=1, data=0, model=1) == 5
    assert box.get_coord(6) == (1, 1, 0)
    assert box.get_coord(6).data == 1
    assert box.mapping[box.ProcessCoord(pipe=0, data=1, model=0)] == 2
    assert box.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert box.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert box.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert box.get_axis_comm_lists("expert") == []
    assert box.filter_match(pipe=0, data=1) == [2, 3]
    assert box.filter_match(pipe=0, model=1) == [1, 3]
    assert box.get_axis_list("data", 1) == [2, 3, 6, 7]
    assert [box.get_rank_repr(rank) for rank in (0, 1)] == ["model_00", "model_01"]
    assert box.get_rank_repr(6, omit_axes=["pipe"]) == "data_01-model_00"
    assert box.get_rank_repr(6, omit_axes=[], inner_sep="+", outer_sep="/") == "pipe+01/data+01/model+00"
    assert (box.get_dim("data"), box.get_dim("expert"), box.world_size()) == (2, 0, 8)
    two = PipeDataParallelTopology(num_pp=2, num_dp=3)
    assert two.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert two.get_rank_repr(4) == ""
    assert str(two) == "pipe 2 x data 3"


def test_incomplete_or_invalid_coordinates_are_refused() -> None:
    box = PipeDataParallelTopology(num_pp=2, num_dp=2)
    with pytest.raises(ValueError, match="filter_match accepts a subset"):
        box.get_rank(pipe=0)
    with pytest.raises(ValueError, match="data = 2 lies outside of pipe 2 x data 2"):
        box.get_rank(pipe=0, data=2)
    with pytest.raises(ValueError, match=r"there are no axes \['model'\]"):
        box.filter_match(model=0)
    assert box.filter_match(data=2) == []
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank {rank} not found"):
            box.get_coord(rank)
    for axes, dims in ((["a"], [1, 2]), (["a", "a"], [1, 2]), (["a"], [0])):
        with pytest.raises(ValueError, match="each name once"):
            ProcessTopology(axes, dims)


small = st.integers(1, 3)


@given(small, small, small, small, small, small)
def test_topology_of_a_mesh_has_its_groups(pp: int, replicate: int, shard: int, ep: int, sp: int, tp: int) -> None:
    grid = MeshShape(pp, replicate, shard, ep, sp, tp)
    box = topology_of(grid)
    assert [tuple(group) for group in box.get_axis_comm_lists("pipe")] == grid.groups("pp")
    assert [tuple(group) for group in box.get_axis_comm_lists("model")] == grid.groups("tp")
    assert [tuple(group) for group in box.get_axis_comm_lists("data")] == grid.groups(*DATA_AXES)
