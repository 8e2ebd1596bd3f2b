"""The noise that states are rounded with, and rounding to bf16 with it."""

from __future__ import annotations

import torch

NOISE_BITS = 20
_WORD = 0xFFFFFFFF


def noise(parameter: torch.Tensor, gradient: torch.Tensor, seed: int) -> torch.Tensor:
    """A hash of each element's new parameter and gradient (both fp32) and of the step; 32 bits as int64.

    It depends on nothing but the element's own values: not on where it stands, nor on how the work is split.
    """
    bits = torch.where(parameter.isnan(), 0x7FC00000, _bits(parameter))
    mixed = bits * 0x9E3779B1 & _WORD
    mixed = mixed ^ (_bits(gradient) + seed & _WORD)
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77 & _WORD
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE3D & _WORD
    return mixed ^ (mixed >> 16)


def noise_of_state(noise: torch.Tensor, state: int) -> torch.Tensor:
    """The 20 of the 32 bits that state number `state` is rounded with."""
    return (noise >> (0, 12, 6)[state]) & ((1 << NOISE_BITS) - 1)


def round_to_bf16(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16, to one of the two neighbours, the nearer the likelier: right on average over `noise` (20 bits)."""
    bits = (_bits(values) + (noise >> 4)) >> 16
    bits = torch.where(values.isnan(), 0x7FC0, bits)
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).to(torch.int64) & _WORD
