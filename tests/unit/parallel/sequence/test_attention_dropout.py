"""Tests of dropped attention weights: the requested fraction, different per layer, and equal for any tiling."""

from __future__ import annotations

import pytest
import torch

from windlass.parallel.sequence.attention_dropout import AttentionDropout, combine_seeds
from windlass.parallel.sequence.attention_tiles import Tile

CPU = torch.device("cpu")


def whole(length: int = 64, samples: int = 4) -> Tile:
    return Tile((0, samples), (0, length), (0, length), "band", 0, 0)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_drop_rate_is_as_requested(probability: float) -> None:
    factors = AttentionDropout(probability, 3).weight_factors(6, whole(), CPU)
    assert factors.shape == (4, 6, 64, 64)
    assert factors.unique().tolist() == pytest.approx([0.0, 1 / (1 - probability)])
    dropped = (factors == 0).double()
    assert float(dropped.mean()) == pytest.approx(probability, abs=0.006)
    for dim in range(4):  # in each sample, head, query row and key column
        rest = tuple(other for other in range(4) if other != dim)
        assert float((dropped.mean(rest) - probability).abs().max()) < 0.05


def test_drop_rate_one_drops_all_weights() -> None:
    assert bool((AttentionDropout(1.0, 3).weight_factors(2, whole(), CPU) == 0).all())


def test_masks_differ_by_layer_head_sample_and_row() -> None:
    dropped = (AttentionDropout(0.5, combine_seeds(7, 1)).weight_factors(2, whole(), CPU) == 0).double() - 0.5
    other = (AttentionDropout(0.5, combine_seeds(7, 2)).weight_factors(2, whole(), CPU) == 0).double() - 0.5
    pairs = [(dropped, other), (dropped[:, 0], dropped[:, 1]), (dropped[0], dropped[1])]
    pairs += [(dropped[..., 1:, :], dropped[..., :-1, :]), (dropped[..., 1:], dropped[..., :-1]), (dropped, dropped.mT)]
    for item, two in pairs:
        assert abs(float((item * two).mean()) / 0.25) < 0.05


def test_tile_mask_equals_the_full_mask() -> None:
    result = AttentionDropout(0.3, 11).weight_factors(6, whole(), CPU)
    part = AttentionDropout(0.3, 11, first_head=2).weight_factors(
        3, Tile((1, 3), (4, 9), (2, 20), "full", 40 - 12, 40), CPU
    )
    assert torch.equal(part, result[1:3, 2:5, 40:45, 12:30])
