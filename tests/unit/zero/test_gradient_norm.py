"""Tests of the gradient norm: each element is counted on one rank, and the clipping factor is torch's."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.zero.core.gradient_norm import clip_coefficient, local_norm_squares
from windlass.zero.core.unit_layout import UnitLayout


@given(shard=st.integers(1, 16), replicas=st.integers(1, 8), numel=st.integers(1, 5000), cut=st.booleans())
def test_norm_counts_each_gradient_element_once_over_all_ranks(
    shard: int, replicas: int, numel: int, cut: bool
) -> None:
    world = shard * replicas
    layout = UnitLayout((numel,), world)
    counted = torch.zeros(layout.padded, dtype=torch.int64)
    for rank in range(world):
        start, stop = layout.shard_range(rank % shard, shard) if cut else (0, layout.padded)
        data, group = SimpleNamespace(size=world, index=rank), SimpleNamespace(size=shard if cut else world)
        dp_group = SimpleNamespace(mesh=SimpleNamespace(data=data), group=group)
        slot: Any = SimpleNamespace(numel=stop - start, unit=SimpleNamespace(layout=layout, dp_group=dp_group))
        policy: Any = SimpleNamespace(state=cut)
        first, last = local_norm_squares(slot, policy)
        counted[start + first : start + last] += 1
    assert bool((counted == 1).all())


@pytest.mark.parametrize(("norm", "limit"), [(0.5, 1.0), (1.0, 1.0), (3.0, 1.0), (math.inf, 1.0), (2.0, 0.0)])
def test_clip_coefficient_equals_torch(norm: float, limit: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.full((1,), norm)
    expected = norm
    if limit > 0:
        torch.nn.utils.clip_grad_norm_([parameter], limit)
        expected = parameter.grad.item()
    actual = norm * clip_coefficient(norm, limit)
    assert actual == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_nan_norm_is_not_clipped() -> None:
    assert math.isnan(clip_coefficient(math.nan, 1.0))
