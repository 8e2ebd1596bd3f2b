"""SGD on flat fp32 tensors, in the order of operations of torch's fused CPU step."""

from __future__ import annotations

import torch

from windlass.kernels.reference.fused_multiply_add import fma
from windlass.kernels.update_rules import COUPLED, FIRST_STEP, MOMENTUM, NESTEROV, SGDRule


def sgd_update(
    rule: SGDRule, parameter: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return the new parameter. With a momentum, replace the state momentum_buffer in the list."""
    decay, momentum, rest, size = rule.coefficients
    if rule.flags & COUPLED:
        gradient = fma(parameter, decay, gradient)
    if rule.flags & MOMENTUM:
        states[0] = gradient.clone() if rule.flags & FIRST_STEP else fma(gradient, rest, states[0] * momentum)
        gradient = fma(states[0], momentum, gradient) if rule.flags & NESTEROV else states[0]
    return fma(gradient, size, parameter)
