"""Tests of the independent plain run of `windlass verify --alone`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from windlass.verify.independent_run import IndependentRun
from windlass.verify.reference_model import ReferenceModel
from windlass.verify.step_recorder import StepRecord


@pytest.mark.parametrize(("factor", "clipping", "expected"), [(0.5, 0.0, -2.0), (1.0, 0.0, -4.0), (1.0, 1.0, -1.0)])
def test_gradients_of_ranks_are_averaged_or_summed(factor: float, clipping: float, expected: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    alone = IndependentRun(ReferenceModel(model, optimizer, None, torch.device("cpu")), lambda: clipping)
    gradients = [torch.tensor([[value]], dtype=torch.float64) for value in (2.0, 6.0)]
    records = [StepRecord(outside_gradients={"weight": one}, loss_scale=2.0) for one in gradients]
    sharded = {"weight": torch.full((1, 1), expected)}
    _, drift = alone.step(records, [{"lr": 1.0}], sharded, names={"weight"}, factor=factor, applied=True)
    assert drift == pytest.approx(0.0, abs=1e-6)
