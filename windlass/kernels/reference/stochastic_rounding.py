"""Noise for stochastic rounding of states, and rounding to bf16 with it."""

from __future__ import annotations

import torch

NOISE_BITS = 20
NOISE_MASK = (1 << NOISE_BITS) - 1
_WORD = 0xFFFFFFFF


def make_rounding_noise(parameter: torch.Tensor, gradient: torch.Tensor, seed: int) -> torch.Tensor:
    """Hash each element's old parameter and gradient (both fp32) with `seed`. Return 32 bits as int64.

    The noise of an element depends only on its values and the seed, not on its position or on how the work is
    split.
    """
    first, second, added = (_hash32(3 * seed + number & _WORD) for number in range(3))
    # A NaN counts as 0, because its payload bits depend on the processor.
    mixed = torch.where(parameter.isnan(), 0, _bits(parameter) * (first | 1) & _WORD)
    mixed = mixed ^ (_bits(gradient) + added & _WORD)
    return (mixed ^ (mixed >> 15)) * (second | 1) & _WORD


def get_state_noise(noise: torch.Tensor, state: int) -> torch.Tensor:
    """Return the 20 bits of noise for state number `state`."""
    if state == 1:
        return noise >> 12
    return (noise ^ (noise >> 12) if state == 0 else noise >> 6) & NOISE_MASK


def stochastic_round_to_bf16(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16 stochastically: to one of the two neighbours, unbiased over `noise` (20 bits)."""
    bits = (_bits(values) + (noise >> 4)) >> 16
    bits = torch.where(values.isnan(), 0x7FC0, bits)
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).to(torch.int64) & _WORD


def _hash32(bits: int) -> int:
    """Hash a word so that every bit depends on every bit of `bits`."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _WORD
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _WORD
    return bits ^ (bits >> 16)
