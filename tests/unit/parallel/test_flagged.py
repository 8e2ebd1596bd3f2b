"""Parameters that say by themselves that they are cut, as Megatron's layers have them say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.axis import Axis
from windlass.comm.groups import Group
from windlass.parallel.flagged import any_flagged, place_flagged
from windlass.parallel.joining import select
from windlass.parallel.placement import is_placed, placement_of


def axis(size: int, index: int) -> Axis:
    none: Any = None
    return Axis("tp", Group(none, tuple(range(size)), index))


def flagged(shape: tuple[int, ...], **flags: Any) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(shape))
    model.norm = nn.Parameter(torch.zeros(3))
    for name, value in flags.items():
        setattr(model.weight, name, value)
    return model


@pytest.mark.parametrize("flag", ["tensor_model_parallel", "model_parallel"])
@pytest.mark.parametrize(("dim", "whole"), [(0, (12, 6)), (1, (4, 18))])
def test_a_part_lies_where_its_rank_does(flag: str, dim: int, whole: tuple[int, int]) -> None:
    for rank in range(3):
        model = flagged((4, 6), partition_dim=dim, **{flag: True})
        assert any_flagged(model) and place_flagged(model, axis(3, rank)) == 1
        found = placement_of(model.weight)
        assert found.shape == whole and found.cut == {"tp"} and not is_placed(model.norm)
        numbers = torch.arange(whole[0] * whole[1]).view(whole)
        assert torch.equal(select(numbers, found), numbers.chunk(3, dim)[rank])


def test_strides_are_blocks_of_which_each_rank_has_a_slice() -> None:
    """As Megatron cuts a fused matrix: the whole in stride x ranks pieces, dealt out in turn."""
    whole, ranks, stride = torch.arange(24), 2, 3
    for rank in range(ranks):
        model = flagged((12,), tensor_model_parallel=True, partition_stride=stride)
        place_flagged(model, axis(ranks, rank))
        wanted = torch.cat(whole.chunk(stride * ranks)[rank::ranks])
        assert torch.equal(select(whole, placement_of(model.weight)), wanted)


def test_nothing_is_said_of_what_is_not_flagged() -> None:
    for model in (flagged((4, 6)), flagged((4, 6), tensor_model_parallel=False, partition_dim=-1)):
        assert not any_flagged(model) and place_flagged(model, axis(2, 0)) == 0
        assert not is_placed(model.weight)
    alone = flagged((4, 6), tensor_model_parallel=True)
    assert place_flagged(alone, axis(1, 0)) == 0 and not is_placed(alone.weight)


def test_a_negative_dimension_is_the_first_and_placing_again_changes_nothing() -> None:
    model = flagged((4, 6), tensor_model_parallel=True, partition_dim=-1)
    assert place_flagged(model, axis(2, 1)) == 1 and placement_of(model.weight).shape == (8, 6)
    assert place_flagged(model, axis(2, 1)) == 0 and placement_of(model.weight).shape == (8, 6)


@pytest.mark.parametrize(
    ("shape", "flags", "text"),
    [
        ((4, 6), {"partition_dim": 2}, r"'weight' has partition_dim 2, and shape \(4, 6\)"),
        ((), {}, r"'weight' has partition_dim 0, and shape \(\)"),
        ((4, 6), {"partition_dim": 1, "partition_stride": 4}, "6 elements along dim 1, not a multiple.* 4"),
        ((4, 6), {"partition_stride": 0}, "partition_stride 0"),
    ],
)
def test_flags_that_do_not_fit_are_named(shape: tuple[int, ...], flags: dict[str, int], text: str) -> None:
    model = flagged(shape, tensor_model_parallel=True, **flags)
    with pytest.raises(ModelError, match=text):
        place_flagged(model, axis(2, 0))
    assert not is_placed(model.weight)
