"""Adam and AdamW on flat fp32 tensors, in the order of operations of torch's fused CPU step."""

from __future__ import annotations

import torch

from windlass.kernels.reference.fused_multiply_add import fma, rounded_sqrt
from windlass.kernels.update_rules import AMSGRAD, COUPLED, AdamRule


def adam_update(
    rule: AdamRule, parameter: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return the new parameter, and replace `states` (exp_avg, exp_avg_sq, with amsgrad max_exp_avg_sq) in the list.

    Source: Kingma & Ba, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter, arXiv:1711.05101; Reddi et al.,
    arXiv:1904.09237.
    """
    keep, decay, weight, beta2, rest2, correction, eps, size = rule.coefficients
    if rule.flags & COUPLED:
        gradient = fma(parameter, decay, gradient)
    else:
        parameter = parameter * keep
    # Interpolate from the nearer end, as torch.lerp does; weight - 1 is exact for weights from 0.5 to 1.
    if abs(weight) < 0.5:
        states[0] = fma(gradient - states[0], weight, states[0])
    else:
        states[0] = fma(gradient - states[0], weight - 1, gradient)
    states[1] = fma(gradient * rest2, gradient, states[1] * beta2)
    square = states[1]
    if rule.flags & AMSGRAD:
        square = states[2] = torch.maximum(states[2], square)
    denominator = torch.div(rounded_sqrt(square), torch.tensor(correction)) + eps
    return parameter + states[0] * size / denominator
