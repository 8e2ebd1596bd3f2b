"""The noise that states are rounded with, and rounding to bf16 with it."""

from __future__ import annotations

import torch

NOISE_BITS = 20
NOISE_MASK = (1 << NOISE_BITS) - 1
_WORD = 0xFFFFFFFF


def make_rounding_noise(parameter: torch.Tensor, gradient: torch.Tensor, seed: int) -> torch.Tensor:
    """A hash of each element's old parameter and gradient (both fp32) and of the step; 32 bits as int64.

    It depends on nothing but the element's own values: not on where it stands, nor on how the work is split.
    """
    first, second, added = (_hash32(3 * seed + number & _WORD) for number in range(3))
    # A NaN counts as 0: which bits of it survive is the processor's choice.
    mixed = torch.where(parameter.isnan(), 0, _bits(parameter) * (first | 1) & _WORD)
    mixed = mixed ^ (_bits(gradient) + added & _WORD)
    return (mixed ^ (mixed >> 15)) * (second | 1) & _WORD


def get_state_noise(noise: torch.Tensor, state: int) -> torch.Tensor:
    """The 20 bits that state number `state` is rounded with."""
    if state == 1:
        return noise >> 12
    return (noise ^ (noise >> 12) if state == 0 else noise >> 6) & NOISE_MASK


def stochastic_round_to_bf16(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16, to one of the two neighbours, the nearer the likelier: right on average over `noise` (20 bits)."""
    bits = (_bits(values) + (noise >> 4)) >> 16
    bits = torch.where(values.isnan(), 0x7FC0, bits)
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).to(torch.int64) & _WORD


def _hash32(bits: int) -> int:
    """A word in which every bit depends on every bit of `bits`."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _WORD
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _WORD
    return bits ^ (bits >> 16)
