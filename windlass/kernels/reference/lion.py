"""Lion on flat fp32 tensors, in the order of operations of windlass.optim.Lion."""

from __future__ import annotations

import torch

from windlass.kernels.reference.fused_multiply_add import fma
from windlass.kernels.update_rules import LionRule


def lion_update(
    rule: LionRule, parameter: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return the new parameter, and replace the state exp_avg in the list. Source: arXiv:2302.06675, algorithm 2."""
    keep, beta1, rest1, beta2, rest2, size = rule.coefficients
    direction = fma(gradient, rest1, states[0] * beta1)
    states[0] = fma(gradient, rest2, states[0] * beta2)
    return parameter * keep - direction.sign() * size
