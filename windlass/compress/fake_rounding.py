"""Rounding and masks during training, with straight-through gradients, by DeepSpeed's rules.

[Note: straight-through] The forward uses rounded weights or masks, the backward passes the gradient on as if nothing
had been rounded (Bengio et al. 2013, https://arxiv.org/abs/1308.3432).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windlass.base.errors import ConfigError
from windlass.base.log import logger

_FEW_LEVELS = {1: "1 bit, where a value becomes sign(x) mean|x|", 2: "2 bits, where a value becomes -a, 0 or a"}
_DEFAULT_RULES = ("symmetric", "nearest")
_TWN_THRESHOLD = 0.7  # threshold relative to the mean magnitude: Li et al., Ternary Weight Networks (2016)


def round_straight_through(
    values: Tensor, bits: int, groups: int, *, symmetric: bool = True, noise: torch.Generator | None = None
) -> Tensor:
    """Return values rounded to few levels, with the gradient of the identity.

    Symmetric: `s = 2 max|x| / 2 ** bits`, `round(x / s)` clamped to `[-2 ** (bits - 1), 2 ** (bits - 1) - 1]`, times
    `s`. Asymmetric: `s = (max - min) / 2 ** bits`, zero point `round(min / s) s`. 2 bits: 0 for magnitudes up to 0.7
    mean|x|, else `sign(x) a`, where `a` is the mean of the larger magnitudes. 1 bit: `sign(x) mean|x|`. The rule
    applies to each of `groups` slices of the flattened tensor.

    Args:
        symmetric: no effect with 1 or 2 bits.
        noise: CPU generator for stochastic rounding: a quotient `x / s` is rounded up with a probability equal to its
            fractional part. None: round to nearest. No effect with 1 or 2 bits.

    Raises:
        ConfigError: the groups do not divide the tensor.
    """
    if values.numel() % groups:
        raise ConfigError(
            f"quantize_groups is {groups}, which does not divide the {values.numel()} elements of a tensor of shape "
            f"{tuple(values.shape)}; choose a divisor"
        )
    return straight_through(values, rounded_values(values, bits, groups, symmetric=symmetric, noise=noise))


def rounded_values(
    values: Tensor, bits: int, groups: int, *, symmetric: bool = True, noise: torch.Generator | None = None
) -> Tensor:
    """Return the values of `round_straight_through`, without a gradient."""
    with torch.no_grad():
        wide = values.detach().float().reshape(groups, -1)
        return _round(wide, bits, symmetric, noise).view(values.shape).to(values.dtype)


def warn_of_unused_rules(bits: int, rules: Mapping[str, str]) -> None:
    """Log a warning if `bits` is 1 or 2 and `rules` (values by configuration key) has values other than "symmetric" and
    "nearest": such rules have no effect with 1 or 2 bits."""
    named = [f"{key} {value!r}" for key, value in rules.items() if value not in _DEFAULT_RULES]
    if bits in _FEW_LEVELS and named:
        logger.warning("%s: no effect at %s", " and ".join(named), _FEW_LEVELS[bits])


def straight_through(source: Tensor, result: Tensor) -> Tensor:
    """Return `result` with the gradient of the identity of `source`; see [Note: straight-through]."""
    return _StraightThrough.apply(source, result)  # type: ignore[no-any-return]


def _round(wide: Tensor, bits: int, symmetric: bool, noise: torch.Generator | None) -> Tensor:
    if bits == 1:
        return wide.sign() * wide.abs().mean(1, keepdim=True)
    if bits == 2:
        kept = wide.abs() > _TWN_THRESHOLD * wide.abs().mean(1, keepdim=True)
        level = (wide.abs() * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
        return wide.sign() * kept * level
    levels = 2**bits
    if symmetric:
        scale = _divisor(2 * wide.abs().amax(1, keepdim=True) / levels)
        return _nearest(wide / scale, noise).clamp_(-levels / 2, levels / 2 - 1) * scale
    low, high = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)
    scale = _divisor((high - low) / levels)
    zero = (low / scale).round() * scale
    return _nearest((wide - zero) / scale, noise).clamp_(0, levels - 1) * scale + zero


def _nearest(values: Tensor, noise: torch.Generator | None) -> Tensor:
    if noise is None:
        return values.round()
    return (values + torch.rand(values.shape, generator=noise).to(values.device)).floor()


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def top_share(scores: Tensor, share: float) -> Tensor:
    """Return 1 for the largest scores (the fraction `share`, rounded up) and 0 for the others, in the dtype of
    `scores`; the gradient passes to all scores."""
    with torch.no_grad():
        flat = scores.detach().flatten()
        kept = math.ceil(share * flat.numel())
        mask = torch.zeros_like(flat)
        mask[flat.argsort(descending=True, stable=True)[:kept]] = 1
    return _StraightThrough.apply(scores, mask.view(scores.shape))  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, result: Tensor) -> Tensor:
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
