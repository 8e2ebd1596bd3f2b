"""Reference update: decode stored tensors to fp32, apply the rule, and encode them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass.kernels.reference.adagrad import adagrad_update
from windlass.kernels.reference.adam import adam_update
from windlass.kernels.reference.blockwise import dequantize_blockwise, quantize_blockwise
from windlass.kernels.reference.lamb import lamb_update
from windlass.kernels.reference.lion import lion_update
from windlass.kernels.reference.sgd import sgd_update
from windlass.kernels.reference.stochastic_rounding import (
    get_state_noise,
    make_rounding_noise,
    stochastic_round_to_bf16,
)
from windlass.kernels.update_rules import AdagradRule, AdamRule, LambRule, LionRule, SGDRule, UpdateRule
from windlass.kernels.update_tensors import SCALE_BLOCK, UpdateTensors

_APPLY: dict[type, Callable[[Any, torch.Tensor, torch.Tensor, list[torch.Tensor]], torch.Tensor]] = {
    AdamRule: adam_update,
    LionRule: lion_update,
    AdagradRule: adagrad_update,
    SGDRule: sgd_update,
    LambRule: lamb_update,
}
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
    span = count if isinstance(rule, LambRule) else _SPAN_ELEMENTS  # its norms are over the whole tensor
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
