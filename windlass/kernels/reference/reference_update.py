"""Reference implementation of an optimizer step: decode stored tensors to fp32, apply the update rule, and encode them
again.

The rules of Adam, Adagrad and SGD have the order of operations of torch's fused CPU step, and the rules of Lion and
LAMB have the order of `windlass.optim`, so that the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass.kernels.reference.blockwise import dequantize_blockwise, quantize_blockwise
from windlass.kernels.reference.fused_multiply_add import fma, rounded_sqrt
from windlass.kernels.reference.stochastic_rounding import (
    get_state_noise,
    make_rounding_noise,
    stochastic_round_to_bf16,
)
from windlass.kernels.update_rules import (
    AMSGRAD,
    COUPLED,
    EPS_INSIDE,
    FIRST_STEP,
    MOMENTUM,
    NESTEROV,
    AdagradRule,
    AdamRule,
    LambRule,
    LionRule,
    SGDRule,
    UpdateRule,
)
from windlass.kernels.update_tensors import SCALE_BLOCK, UpdateTensors

_SPAN_ELEMENTS = 4096 * SCALE_BLOCK  # elements at a time, which bounds the temporaries


@torch.no_grad()
def update_with_reference(rule: UpdateRule, tensors: UpdateTensors, divisor: float) -> None:
    """Update one parameter's tensors in place. Gradients are divided by `divisor`."""
    flat = UpdateTensors(
        tensors.parameter.view(-1),
        tensors.gradient.view(-1),
        tuple(state.view(-1) for state in tensors.states),
        tensors.scales,
        None if tensors.low_precision_copy is None else tensors.low_precision_copy.view(-1),
    )
    count = tensors.parameter.numel()
    span = count if isinstance(rule, LambRule) else _SPAN_ELEMENTS  # LAMB's norms are over the whole tensor
    for start in range(0, count, span):
        _update_span(rule, _slice_span(flat, start, min(start + span, count)), divisor)


def _update_span(rule: UpdateRule, tensors: UpdateTensors, divisor: float) -> None:
    gradient = tensors.gradient.float()
    slope = gradient if divisor == 1.0 else torch.div(gradient, torch.tensor(divisor, dtype=torch.float32))
    states = _dequantize_states(rule, tensors)
    parameter = tensors.parameter.float()
    bits = make_rounding_noise(parameter, gradient, rule.seed)
    renewed = _APPLY[type(rule)](rule, parameter, -slope if rule.maximize else slope, states)
    tensors.parameter.copy_(renewed)
    if tensors.low_precision_copy is not None:
        tensors.low_precision_copy.copy_(renewed)
    for number, (signed, state) in enumerate(zip(rule.signed_states, states, strict=True)):
        stored, own = tensors.states[number], get_state_noise(bits, number)
        if tensors.scales:
            codes, scales = quantize_blockwise(state, own, signed)
            stored.copy_(codes)
            tensors.scales[number].copy_(scales)
        else:
            stored.copy_(stochastic_round_to_bf16(state, own) if stored.dtype == torch.bfloat16 else state)


def _dequantize_states(rule: UpdateRule, tensors: UpdateTensors) -> list[torch.Tensor]:
    if not tensors.scales:
        return [state.float() for state in tensors.states]
    return [
        dequantize_blockwise(*coded) for coded in zip(tensors.states, tensors.scales, rule.signed_states, strict=True)
    ]


def _slice_span(tensors: UpdateTensors, start: int, stop: int) -> UpdateTensors:
    blocks = slice(start // SCALE_BLOCK, -(-stop // SCALE_BLOCK))
    return UpdateTensors(
        tensors.parameter[start:stop],
        tensors.gradient[start:stop],
        tuple(state[start:stop] for state in tensors.states),
        tuple(scale[blocks] for scale in tensors.scales),
        None if tensors.low_precision_copy is None else tensors.low_precision_copy[start:stop],
    )


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
    denominator = torch.div(rounded_sqrt(square), torch.tensor(correction, dtype=torch.float32)) + eps
    return parameter + states[0] * size / denominator


def lion_update(
    rule: LionRule, parameter: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return the new parameter, and replace the state exp_avg in the list. Source: arXiv:2302.06675, algorithm 2."""
    keep, beta1, rest1, beta2, rest2, size = rule.coefficients
    direction = fma(gradient, rest1, states[0] * beta1)
    states[0] = fma(gradient, rest2, states[0] * beta2)
    return parameter * keep - direction.sign() * size


def adagrad_update(
    rule: AdagradRule, parameter: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return the new parameter, and replace the state `sum` in the list. Source: Duchi et al., JMLR 12 (2011)."""
    decay, eps, size = rule.coefficients
    if rule.flags & COUPLED:
        gradient = fma(parameter, decay, gradient)
    states[0] = fma(gradient, gradient, states[0])
    return parameter - gradient * size / (rounded_sqrt(states[0]) + eps)


def sgd_update(
    rule: SGDRule, parameter: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor]
) -> torch.Tensor:
    """Return the new parameter. With a momentum, replace the state `momentum_buffer` in the list."""
    decay, momentum, rest, size = rule.coefficients
    if rule.flags & COUPLED:
        gradient = fma(parameter, decay, gradient)
    if rule.flags & MOMENTUM:
        states[0] = gradient.clone() if rule.flags & FIRST_STEP else fma(gradient, rest, states[0] * momentum)
        gradient = fma(states[0], momentum, gradient) if rule.flags & NESTEROV else states[0]
    return fma(gradient, size, parameter)


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
    ratio = torch.ones((), dtype=torch.float32)
    if weight_norm > 0 and direction_norm > 0:
        ratio = (weight_norm / direction_norm).clamp(least, most)
    return parameter - direction * (ratio * size)


_APPLY: dict[type, Callable[[Any, torch.Tensor, torch.Tensor, list[torch.Tensor]], torch.Tensor]] = {
    AdamRule: adam_update,
    LionRule: lion_update,
    AdagradRule: adagrad_update,
    SGDRule: sgd_update,
    LambRule: lamb_update,
}
