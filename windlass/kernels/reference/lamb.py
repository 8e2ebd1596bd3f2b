"""LAMB on flat fp32 tensors, in the order of operations of windlass.optim.Lamb."""

from __future__ import annotations

import torch

from windlass.kernels.reference.fused_multiply_add import fma, rounded_sqrt
from windlass.kernels.update_rules import EPS_INSIDE, LambRule


def lamb_update(
    rule: LambRule, parameter: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return the new parameter, and replace exp_avg and exp_avg_sq in the list.

    Source: arXiv:1904.00962, algorithm 2.
    """
    beta1, rest1, beta2, rest2, eps, decay, size, least, most = rule.coefficients
    states[0] = fma(gradient, rest1, states[0] * beta1)
    states[1] = fma(gradient * rest2, gradient, states[1] * beta2)
    inside = rule.flags & EPS_INSIDE
    denominator = rounded_sqrt(states[1] + eps) if inside else rounded_sqrt(states[1]) + eps
    direction = states[0] / denominator
    if decay:
        direction = fma(parameter, decay, direction)
    weight_norm, direction_norm = (tensor.double().square().sum().sqrt().float() for tensor in (parameter, direction))
    ratio = torch.ones(())
    if weight_norm > 0 and direction_norm > 0:
        ratio = (weight_norm / direction_norm).clamp(least, most)
    return parameter - direction * (ratio * size)
