"""Rounding of inputs to int8, one scale for each row and group of features."""

from __future__ import annotations

import torch
from torch.nn import functional as F

CODE_GROUP = 128  # features that share a scale


def quantize_groups(x: torch.Tensor) -> torch.Tensor:
    """Return `x` `[..., features]`, each group of 128 features rounded to multiples of `max(abs(group)) / 127`.

    The dtype stays that of `x`.

    Rounding is to nearest, ties to even. A group with an infinity or a NaN becomes NaN.
    """
    features = x.shape[-1]
    groups = F.pad(x.float(), (0, -features % CODE_GROUP)).unflatten(-1, (-1, CODE_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 2.0**-120, 127 / largest, torch.zeros_like(largest))
    rounded = (groups * factor).round() * (largest / 127)
    rounded = torch.where(largest.isfinite(), rounded, torch.full_like(rounded, torch.nan))
    return rounded.flatten(-2)[..., :features].to(x.dtype)
