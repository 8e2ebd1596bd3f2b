"""Tests of parameters that are marked as sharded by attributes, as Megatron's layers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.rank_group import RankGroup
from windlass.parallel.full_parameters import select_local_shard
from windlass.parallel.megatron_flags import has_flagged_parameters, place_flagged_parameters
from windlass.parallel.placement import get_placement, has_placement


def axis(size: int, index: int) -> MeshAxis:
    none: Any = None
    return MeshAxis("tp", RankGroup(none, tuple(range(size)), index))


def flagged(shape: tuple[int, ...], **flags: Any) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(shape))
    model.norm = nn.Parameter(torch.zeros(3))
    for name, value in flags.items():
        setattr(model.weight, name, value)
    return model


@pytest.mark.parametrize("flag", ["tensor_model_parallel", "model_parallel"])
@pytest.mark.parametrize(("dim", "whole"), [(0, (12, 6)), (1, (4, 18))])
def test_placement_follows_the_rank(flag: str, dim: int, whole: tuple[int, int]) -> None:
    for rank in range(3):
        model = flagged((4, 6), partition_dim=dim, **{flag: True})
        assert has_flagged_parameters(model) and place_flagged_parameters(model, axis(3, rank)) == 1
        result = get_placement(model.weight)
        assert result.global_shape == whole and result.sharded_axes == {"tp"} and not has_placement(model.norm)
        numbers = torch.arange(whole[0] * whole[1]).view(whole)
        assert torch.equal(select_local_shard(numbers, result), numbers.chunk(3, dim)[rank])


def test_strided_parameters_are_sharded_per_block() -> None:
    """A fused matrix is split as in Megatron: into stride x ranks pieces, dealt round-robin."""
    full, ranks, stride = torch.arange(24), 2, 3
    for rank in range(ranks):
        model = flagged((12,), tensor_model_parallel=True, partition_stride=stride)
        place_flagged_parameters(model, axis(ranks, rank))
        expected = torch.cat(full.chunk(stride * ranks)[rank::ranks])
        assert torch.equal(select_local_shard(full, get_placement(model.weight)), expected)


def test_parameters_without_flags_are_not_placed() -> None:
    for model in (flagged((4, 6)), flagged((4, 6), tensor_model_parallel=False, partition_dim=-1)):
        assert not has_flagged_parameters(model) and place_flagged_parameters(model, axis(2, 0)) == 0
        assert not has_placement(model.weight)
    alone = flagged((4, 6), tensor_model_parallel=True)
    assert place_flagged_parameters(alone, axis(1, 0)) == 0 and not has_placement(alone.weight)


def test_negative_dimension_is_zero_and_placement_is_idempotent() -> None:
    model = flagged((4, 6), tensor_model_parallel=True, partition_dim=-1)
    assert place_flagged_parameters(model, axis(2, 1)) == 1 and get_placement(model.weight).global_shape == (8, 6)
    assert place_flagged_parameters(model, axis(2, 1)) == 0 and get_placement(model.weight).global_shape == (8, 6)


@pytest.mark.parametrize(
    ("shape", "flags", "text"),
    [
        ((4, 6), {"partition_dim": 2}, r"'weight' has partition_dim 2, and shape \(4, 6\)"),
        ((), {}, r"'weight' has partition_dim 0, and shape \(\)"),
        ((4, 6), {"partition_dim": 1, "partition_stride": 4}, "6 elements along dim 1, not a multiple.* 4"),
        ((4, 6), {"partition_stride": 0}, "partition_stride 0"),
    ],
)
def test_inconsistent_flags_are_refused_by_name(shape: tuple[int, ...], flags: dict[str, int], text: str) -> None:
    model = flagged(shape, tensor_model_parallel=True, **flags)
    with pytest.raises(ModelError, match=text):
        place_flagged_parameters(model, axis(2, 0))
    assert not has_placement(model.weight)
