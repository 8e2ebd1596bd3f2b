"""Tests of a parameter of 2^31 + 1 elements: no count, offset or length has 32 bits. Run it alone: it needs 5 GB."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.unit.kernels.rule_cases import RULES
from windlass.checkpoint.fragment_boxes import boxes_of_range, flat_start
from windlass.comm.ordered_sum import sum_of_squares
from windlass.kernels import keyed_sum
from windlass.kernels.kernel_dispatch import apply_updates
from windlass.kernels.update_tensors import UpdateTensors
from windlass.storage import DiskTier
from windlass.zero.core.unit_layout import layout_of

NUMEL = (1 << 31) + 1
SPOTS = [0, 1, (1 << 30) + 3, (1 << 31) - 1, 1 << 31]


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_large_parameter_is_split_at_one_shard_boundary(ranks: int) -> None:
    layout = layout_of([(7,), (NUMEL,), (3, 5), (1 << 16, 1 << 16)], ranks)
    result = [0] * 4
    for rank in range(ranks):
        start, stop = layout.shard_range(rank, ranks)
        for piece in layout.pieces(start, stop):
            assert piece.start == result[piece.index] and 0 <= piece.offset <= stop - start - piece.numel
            result[piece.index] = piece.stop
    assert result == [7, NUMEL, 15, 1 << 32]


def test_boxes_beyond_32_bits() -> None:
    shape = ((1 << 16) + 1, 1 << 16)  # 2^32 + 2^16 elements
    first, last = (1 << 31) - 5, (1 << 32) + 77
    at = first
    for box in boxes_of_range(shape, first, last):
        assert flat_start(shape, box.offsets) == at
        at += math.prod(box.sizes)
    assert at == last


@pytest.mark.slow
def test_kernels_and_disk_reach_the_last_element(tmp_path: Path) -> None:
    parameter = torch.zeros(NUMEL, dtype=torch.bfloat16)
    gradient = torch.zeros(NUMEL, dtype=torch.bfloat16)  # never written: takes no memory
    for number, spot in enumerate(SPOTS):
        parameter[spot] = 2.0 + number
    assert sum_of_squares(parameter).item() == sum((2.0 + n) ** 2 for n in range(len(SPOTS)))
    words = parameter.view(torch.int16)
    middle = (1 << 31) - 12_345
    total = keyed_sum(words[:middle], 0, 5) + keyed_sum(words[middle:], middle, 5)
    assert keyed_sum(words, 0, 5) == total != 0
    with DiskTier([tmp_path]) as tier:
        extent = tier.allocate(parameter.nbytes, "a large parameter")
        tier.write(extent, 0, parameter).wait()
        back = torch.empty(1 << 20, dtype=torch.bfloat16)
        for spot in SPOTS:
            start = min(max(spot - 100, 0), NUMEL - back.numel())
            tier.read(extent, 2 * start, back).wait()
            assert torch.equal(back, parameter[start : start + back.numel()])
    rule = RULES["sgd"](1)
    before = parameter[SPOTS].clone()
    expected = UpdateTensors(before.clone(), torch.zeros(len(SPOTS), dtype=torch.bfloat16))
    expected.gradient.fill_(0.5)
    for spot in SPOTS:
        gradient[spot] = 0.5
    apply_updates(rule, [UpdateTensors(parameter, gradient)])
    apply_updates(rule, [expected])
    assert torch.equal(parameter[SPOTS], expected.parameter) and not torch.equal(expected.parameter, before)
