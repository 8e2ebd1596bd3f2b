"""Tests of the comparison of one step with the plain model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from windlass.verify.module_trace import WEIGHT, TensorSample, TraceEvent
from windlass.verify.step_comparison import StepComparison
from windlass.verify.tolerance import Tolerance


@pytest.mark.parametrize(("change", "found"), [(0.0, 0), (1e-9, 1)])
def test_norms_of_weights_are_compared_in_double_precision(change: float, found: int) -> None:
    values = torch.ones(4)

    def event(norm: float) -> TraceEvent:
        return TraceEvent(WEIGHT, "", "weight", TensorSample(values, torch.Size([1000]), 250, norm))

    compared = StepComparison(nn.Linear(1, 1), Tolerance(torch.float32, torch.float32, torch.float32, 1, 1), 1)
    compared._compare_event(event(30.0 * (1 + change)), event(30.0), {})
    assert len(compared.deviations) == found
