"""Adagrad on flat fp32 tensors, in the order of operations of torch's fused CPU step."""

from __future__ import annotations

import torch

from windlass.kernels.reference.fused_multiply_add import fma, rounded_sqrt
from windlass.kernels.update_rules import COUPLED, AdagradRule


def adagrad_update(
    rule: AdagradRule, parameter: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return the new parameter, and replace the state sum in the list. Source: Duchi et al., JMLR 12 (2011)."""
    decay, eps, size = rule.coefficients
    if rule.flags & COUPLED:
        gradient = fma(parameter, decay, gradient)
    states[0] = fma(gradient, gradient, states[0])
    return parameter - gradient * size / (rounded_sqrt(states[0]) + eps)
