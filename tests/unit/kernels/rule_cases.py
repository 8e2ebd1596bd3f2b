"""Values to test every update rule, and pieces of any dtypes to run it on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from windlass.kernels.reference import quantize_blockwise
from windlass.kernels.update_rules import AdagradRule, AdamRule, LambRule, LionRule, SGDRule, UpdateRule
from windlass.kernels.update_tensors import UpdateTensors, count_scales

Make = Callable[[int], UpdateRule]


def adam(
    decoupled: bool = True, amsgrad: bool = False, decay: float = 0.1, beta1: float = 0.9, up: bool = False
) -> Make:
    return lambda step: AdamRule(1e-2, (beta1, 0.999), 1e-8, decay, decoupled, amsgrad, up, step)


def lamb(decay: float = 0.1, inside: bool = False, correct: bool = True) -> Make:
    return lambda step: LambRule(1e-2, (0.9, 0.99), 1e-6, decay, correct, inside, 0.01, 10.0, False, step)


def sgd(momentum: float = 0.9, dampening: float = 0.0, decay: float = 0.1, nesterov: bool = False) -> Make:
    return lambda step: SGDRule(1e-2, momentum, dampening, decay, nesterov, False, step == 1)


RULES: dict[str, Make] = {
    "adamw": adam(),
    "adamw-no-decay": adam(decay=0.0),
    "adamw-amsgrad-maximize": adam(amsgrad=True, up=True),
    "adamw-beta1-small": adam(beta1=0.3),
    "adam": adam(decoupled=False),
    "adam-amsgrad": adam(decoupled=False, amsgrad=True),
    "lion": lambda step: LionRule(1e-2, (0.9, 0.99), 0.1, False),
    "lion-maximize": lambda step: LionRule(1e-2, (0.9, 0.99), 0.0, True),
    "adagrad": lambda step: AdagradRule(1e-2, 0.0, 1e-10, 0.0, False, step),
    "adagrad-decays": lambda step: AdagradRule(1e-2, 0.1, 1e-10, 0.1, True, step),
    "sgd": sgd(momentum=0.0, decay=0.0),
    "sgd-decay": sgd(momentum=0.0),
    "sgd-momentum": sgd(dampening=0.3),
    "sgd-nesterov": sgd(nesterov=True, decay=0.0),
    "lamb": lamb(),
    "lamb-inside": lamb(decay=0.0, inside=True, correct=False),
}


def piece(
    rule: UpdateRule,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: torch.dtype = torch.float32,
    lowered: torch.dtype | None = None,
    shift: int = 0,
) -> UpdateTensors:
    """Return a piece with zero states. Each of its tensors starts `shift` elements into its memory."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(tensor.numel() + shift, dtype=tensor.dtype)
        return memory[shift:].copy_(tensor)

    count = parameter.numel()
    states = tuple(moved(torch.zeros(count, dtype=state)) for _ in rule.signed_states)
    coded = state == torch.uint8
    return UpdateTensors(
        moved(parameter),
        moved(gradient),
        states,
        tuple(torch.zeros(count_scales(count)) for _ in rule.signed_states) if coded else (),
        None if lowered is None else moved(torch.zeros(count, dtype=lowered)),
    )


def copy_of(piece: UpdateTensors) -> UpdateTensors:
    return UpdateTensors(
        piece.parameter.clone(),
        piece.gradient,
        tuple(state.clone() for state in piece.states),
        tuple(scale.clone() for scale in piece.scales),
        None if piece.low_precision_copy is None else piece.low_precision_copy.clone(),
    )


def tensors(piece: UpdateTensors) -> dict[str, torch.Tensor]:
    named = {"parameter": piece.parameter}
    named |= {f"state {number}": state for number, state in enumerate(piece.states)}
    named |= {f"scale {number}": scale for number, scale in enumerate(piece.scales)}
    return named if piece.low_precision_copy is None else {**named, "lowered": piece.low_precision_copy}


def assert_same_bits(one: UpdateTensors, other: UpdateTensors) -> None:
    """Assert that the tensors of `one` and `other` are bitwise equal, except that any NaN equals any NaN."""
    for (name, a), b in zip(tensors(one).items(), tensors(other).values(), strict=True):
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        same = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
        assert same.all(), (
            f"{name}: {(~same).sum()} of {a.numel()} differ, first at {same.logical_not().nonzero()[0].item()}: "
            f"{a[~same][0]} and {b[~same][0]}"
        )


def nearest(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_blockwise(values, torch.full(values.shape, 1 << 19), signed)
