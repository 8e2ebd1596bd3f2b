"""Tests of the mesh shape: coordinates and groups, at up to 1,024 ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.base.errors import ConfigError
from windlass.comm.mesh_shape import AXES, DATA_AXES, DATA_LOADING_AXES, EXPERT_DATA_AXES, MeshShape

THOUSAND = [
    MeshShape(dp_shard=1024),
    MeshShape(pp=4, dp_replicate=2, dp_shard=16, tp=8),
    MeshShape(pp=8, dp_shard=4, ep=4, sp=2, tp=4),
    MeshShape(pp=2, dp_replicate=2, dp_shard=4, ep=8, sp=4, tp=2),
    MeshShape(dp_shard=16, sp=64),
    MeshShape(pp=16, ep=64),
]
small = st.integers(1, 3)
grids = st.builds(MeshShape, pp=small, dp_replicate=small, dp_shard=small, ep=small, sp=small, tp=small)
subsets = st.lists(st.sampled_from(AXES), unique=True).map(tuple)


@given(grids)
def test_rank_and_coordinates_are_inverse(grid: MeshShape) -> None:
    places = [grid.coordinates(rank) for rank in range(grid.world)]
    assert [grid.rank(**place) for place in places] == list(range(grid.world))
    assert places == sorted(places, key=lambda place: tuple(place[axis] for axis in AXES))


@settings(max_examples=30)
@given(grids, subsets)
def test_groups_partition_the_world(grid: MeshShape, axes: tuple[str, ...]) -> None:
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world))
    assert {len(group) for group in groups} == {grid.size(*axes)}
    for group in groups:
        assert list(group) == sorted(group)
        assert all(grid.along(rank, *axes) == group for rank in group)


@settings(max_examples=30)
@given(grids, subsets, subsets)
def test_groups_of_different_axes_share_one_rank(grid: MeshShape, some: tuple[str, ...], more: tuple[str, ...]) -> None:
    """A group along some axes and a group along the other axes share exactly one rank."""
    others = tuple(axis for axis in AXES if axis not in some)
    for first in grid.groups(*some)[:4]:
        for second in grid.groups(*others)[:4]:
            assert len(set(first) & set(second)) == 1
    both = set(some) & set(more)
    for rank in range(0, grid.world, 1 + grid.world // 8):
        assert set(grid.along(rank, *some)) & set(grid.along(rank, *more)) == set(grid.along(rank, *both))


@pytest.mark.parametrize("grid", THOUSAND, ids=str)
def test_groups_at_1024_ranks(grid: MeshShape) -> None:
    assert grid.world == 1024
    assert (grid.data, grid.data_loading_size) == (grid.size(*DATA_AXES), grid.size(*DATA_LOADING_AXES))
    for axes in [
        *((axis,) for axis in AXES),
        ("dp_shard", "tp"),
        ("pp", "ep"),
        DATA_AXES,
        EXPERT_DATA_AXES,
        DATA_LOADING_AXES,
        AXES,
    ]:
        groups = grid.groups(*axes)
        assert len(groups) == 1024 // grid.size(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(1024))
    stride = 1
    for axis in reversed(AXES):  # ranks are numbered like digits: tp, the last axis, varies fastest
        assert {tuple(b - a for a, b in zip(group, group[1:], strict=False)) for group in grid.groups(axis)} == {
            (stride,) * (grid.size(axis) - 1)
        }
        stride *= grid.size(axis)


@pytest.mark.parametrize("grid", THOUSAND, ids=str)
def test_tensor_parallel_ranks_share_a_node_of_eight(grid: MeshShape) -> None:
    nodes = [{rank // 8 for rank in group} for group in grid.groups("tp")]
    assert all(len(node) == 1 for node in nodes)


def test_ranks_along_pp_sp_and_tp_share_a_data_loading_rank() -> None:
    grid = MeshShape(pp=2, dp_replicate=2, dp_shard=2, ep=2, sp=2, tp=2)
    assert set(DATA_AXES) == {*DATA_LOADING_AXES, "sp"}
    assert set(EXPERT_DATA_AXES) == set(DATA_AXES) - {"ep"}
    for rank in range(grid.world):
        here = grid.coordinates(rank)
        for other in grid.along(rank, "pp", "sp", "tp"):
            assert all(grid.coordinates(other)[axis] == here[axis] for axis in DATA_LOADING_AXES)
            assert grid.data_loading_rank(other) == grid.data_loading_rank(rank)


def test_sizes_and_coordinates_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="the axis sp has 0 ranks"):
        MeshShape(sp=0)
    grid = MeshShape(pp=2, tp=2)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank {rank} is not in a world of 4"):
            grid.coordinates(rank)
    for places in ({"tp": 2}, {"tp": -1}, {"dp": 0}):
        with pytest.raises(ValueError, match="is not an index on the axes pp 2"):
            grid.rank(**places)
    assert grid.rank(pp=1) == 2
