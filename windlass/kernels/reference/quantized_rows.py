"""Rows of int8 with one scale each, as int8 KV caches hold them."""

from __future__ import annotations

import torch


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows (last dimension) rounded to int8, and the float32 scale of each row."""
    wide = rows.float()
    scale = wide.abs().amax(-1) / 127
    quotient = wide / torch.where(scale > 0, scale, torch.ones_like(scale))[..., None]
    return quotient.round_().clamp_(-127, 127).to(torch.int8), scale
