"""Tests that every element of every parameter has exactly one owner, at up to 1,024 ranks.

Placements along tp and ep are combined with ZeRO's shards. A parameter that tp replicates has one owner on each tp
rank.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.comm.test_mesh_shape import THOUSAND
from windlass.comm.mesh_shape import DATA_AXES, EXPERT_DATA_AXES, MeshShape
from windlass.parallel.placement import Placement, Ranges, compute_shard_range, make_full_ranges, make_ranges_along
from windlass.zero.core.unit_layout import layout_of

HEADS, WIDTH, HIDDEN = 9, 4, 24  # the tp sizes in `THOUSAND`, except 1, do not divide the heads
FUSED = (3 * HEADS * WIDTH, HIDDEN)
EXPERTS = (128, 12, 6)


def fused(grid: MeshShape, place: dict[str, int]) -> tuple[Ranges, ...]:
    """Return the local rows of a fused query-key-value weight in whole heads: three ranges of one dimension."""
    rows = HEADS * WIDTH
    start, stop = compute_shard_range(rows, grid.tp, place["tp"], grain=WIDTH)
    return make_ranges_along(FUSED, 0, [(part * rows + start, part * rows + stop) for part in range(3)])


def placement(kind: str, grid: MeshShape, place: dict[str, int]) -> Placement:
    """Return the placement of a parameter of that kind at these coordinates."""
    if kind == "norm":
        return Placement((HIDDEN,), make_full_ranges((HIDDEN,)))
    if kind == "column":
        return Placement(
            FUSED, make_ranges_along(FUSED, 0, [compute_shard_range(FUSED[0], grid.tp, place["tp"])]), frozenset({"tp"})
        )
    if kind == "row":
        return Placement(
            FUSED, make_ranges_along(FUSED, 1, [compute_shard_range(FUSED[1], grid.tp, place["tp"])]), frozenset({"tp"})
        )
    if kind == "fused":
        return Placement(FUSED, fused(grid, place), frozenset({"tp"}))
    assert kind == "experts"
    of_rank = [compute_shard_range(EXPERTS[0], grid.ep, place["ep"])]
    ranges = list(make_ranges_along(EXPERTS, 0, of_rank))
    ranges[1] = (compute_shard_range(EXPERTS[1], grid.tp, place["tp"]),)
    return Placement(EXPERTS, tuple(ranges), frozenset({"ep", "tp"}), is_expert=True)


@cache
def elements_of(part: Placement) -> np.ndarray:
    """Return the flat global index of each local element. Assert that boxes and ranges give the same indices."""
    full = np.arange(math.prod(part.global_shape)).reshape(part.global_shape)
    local = np.full(part.local_shape, -1)
    for box in part.shard_boxes():
        inner = tuple(slice(at, at + size) for at, size in zip(box.local_offsets, box.sizes, strict=True))
        outer = tuple(slice(at, at + size) for at, size in zip(box.global_offsets, box.sizes, strict=True))
        local[inner] = full[outer]
    kept = np.ix_(*([index for span in ranges for index in range(*span)] for ranges in part.ranges))
    assert np.array_equal(local, full[kept])
    return local.reshape(-1)


def owners(kinds: list[str], grid: MeshShape, stage: int, replica: int) -> dict[str, np.ndarray]:
    """Count how often each element of each parameter of a pipeline stage is owned within a replica."""
    counts: dict[str, np.ndarray] = {}
    for ranks in grid.groups("dp_shard", "ep", "sp", "tp"):
        here = grid.coordinates(ranks[0])
        if (here["pp"], here["dp_replicate"]) != (stage, replica):
            continue
        for rank in ranks:
            place = grid.coordinates(rank)
            parts = [placement(kind, grid, place) for kind in kinds]
            for expert in (False, True):
                _count(
                    counts, grid, place, [(k, p) for k, p in zip(kinds, parts, strict=True) if p.is_expert == expert]
                )
    return counts


def _count(
    counts: dict[str, np.ndarray], grid: MeshShape, at: dict[str, int], unit: list[tuple[str, Placement]]
) -> None:
    """Add to `counts` one for each element of a unit that the rank at these coordinates owns.

    A unit holds parameters that are reduced over the same ranks, concatenated and sharded evenly.
    """
    axes = EXPERT_DATA_AXES if unit[0][1].is_expert else DATA_AXES
    index, cutters = 0, [axis for axis in axes if axis != "dp_replicate"]
    for axis in cutters:
        index = index * grid.size(axis) + at[axis]
    layout = layout_of([part.local_shape for _, part in unit], grid.size(*axes))
    for piece in layout.pieces(*layout.shard_range(index, grid.size(*cutters))):
        kind, part = unit[piece.index]
        count = counts.setdefault(kind, np.zeros(math.prod(part.global_shape), dtype=int))
        np.add.at(count, elements_of(part)[piece.start : piece.stop], 1)


def check(grid: MeshShape, stage: int, replica: int) -> None:
    kinds = ["column", "norm", "fused", "experts", "row"]
    counts = owners(kinds, grid, stage, replica)
    for kind in kinds:
        # tp replicates norms: each tp rank has a copy, and each copy has one owner
        often = grid.tp if kind == "norm" else 1
        assert set(counts[kind].tolist()) == {often}, (kind, grid)


@pytest.mark.parametrize("grid", THOUSAND, ids=str)
def test_every_element_has_one_owner_at_1024_ranks(grid: MeshShape) -> None:
    for stage in {0, grid.pp - 1}:
        for replica in {0, grid.dp_replicate - 1}:
            check(grid, stage, replica)


small = st.integers(1, 3)


@settings(max_examples=25)
@given(small, small, small, small, small, small)
def test_every_element_has_one_owner(pp: int, replicate: int, shard: int, ep: int, sp: int, tp: int) -> None:
    check(MeshShape(pp, replicate, shard, ep, sp, tp), pp - 1, replicate - 1)


def test_ranks_that_reduce_a_parameter_hold_the_same_part_of_it() -> None:
    """Ranks that reduce a parameter together have equal placements; ranks along the axes that shard it differ."""
    grid = MeshShape(pp=2, dp_replicate=2, dp_shard=2, ep=4, sp=2, tp=2)
    for kind in ("column", "row", "fused", "experts"):
        for rank in range(0, grid.world, 7):
            here = placement(kind, grid, grid.coordinates(rank))
            for axes, same in (
                (EXPERT_DATA_AXES if here.is_expert else DATA_AXES, True),
                (tuple(here.sharded_axes), False),
            ):
                others = [
                    placement(kind, grid, grid.coordinates(other)) for other in grid.along(rank, *axes) if other != rank
                ]
                assert others and all((other == here) == same for other in others)
