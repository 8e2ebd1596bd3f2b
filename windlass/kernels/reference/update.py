"""From stored tensors to fp32, through a rule, and back: one update as the kernels define it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from windlass.kernels.piece import BLOCK, Piece
from windlass.kernels.reference.adagrad import adagrad
from windlass.kernels.reference.adam import adam
from windlass.kernels.reference.blockwise import decode, encode
from windlass.kernels.reference.lamb import lamb
from windlass.kernels.reference.lion import lion
from windlass.kernels.reference.narrow_rounding import noise, noise_of_state, round_to_bf16
from windlass.kernels.reference.sgd import sgd
from windlass.kernels.rules import SGD, Adagrad, Adam, Lamb, Lion, Rule

_APPLY: dict[type, Callable[[Any, torch.Tensor, torch.Tensor, list[torch.Tensor]], torch.Tensor]] = {
    Adam: adam,
    Lion: lion,
    Adagrad: adagrad,
    SGD: sgd,
    Lamb: lamb,
}
_SPAN = 4096 * BLOCK  # elements at a time: bounds the temporaries


@torch.no_grad()
def update(rule: Rule, piece: Piece, divisor: float) -> None:
    """Update one piece in place; gradients are divided by `divisor`."""
    flat = Piece(
        piece.parameter.view(-1),
        piece.gradient.view(-1),
        tuple(state.view(-1) for state in piece.states),
        piece.scales,
        None if piece.lowered is None else piece.lowered.view(-1),
    )
    count = piece.parameter.numel()
    span = count if isinstance(rule, Lamb) else _SPAN  # its norms are over the whole
    for start in range(0, count, span):
        _update_span(rule, _cut(flat, start, min(start + span, count)), divisor)


def _update_span(rule: Rule, piece: Piece, divisor: float) -> None:
    gradient = piece.gradient.float()
    slope = gradient if divisor == 1.0 else torch.div(gradient, torch.tensor(divisor, dtype=torch.float32))
    states = _open(rule, piece)
    parameter = piece.parameter.float()
    bits = noise(parameter, gradient, rule.seed)
    renewed = _APPLY[type(rule)](rule, parameter, -slope if rule.maximize else slope, states)
    piece.parameter.copy_(renewed)
    if piece.lowered is not None:
        piece.lowered.copy_(renewed)
    for number, (signed, state) in enumerate(zip(rule.signed, states, strict=True)):
        stored, own = piece.states[number], noise_of_state(bits, number)
        if piece.scales:
            codes, scales = encode(state, own, signed)
            stored.copy_(codes)
            piece.scales[number].copy_(scales)
        else:
            stored.copy_(round_to_bf16(state, own) if stored.dtype == torch.bfloat16 else state)


def _open(rule: Rule, piece: Piece) -> list[torch.Tensor]:
    if not piece.scales:
        return [state.float() for state in piece.states]
    return [decode(*coded) for coded in zip(piece.states, piece.scales, rule.signed, strict=True)]


def _cut(piece: Piece, start: int, stop: int) -> Piece:
    blocks = slice(start // BLOCK, -(-stop // BLOCK))
    return Piece(
        piece.parameter[start:stop],
        piece.gradient[start:stop],
        tuple(state[start:stop] for state in piece.states),
        tuple(scale[blocks] for scale in piece.scales),
        None if piece.lowered is None else piece.lowered[start:stop],
    )
