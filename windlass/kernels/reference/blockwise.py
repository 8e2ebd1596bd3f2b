"""States in 8 bits an element: small floats under one scale for each block of 256.

The scale puts the block's largest magnitude at 1.875, the largest code. Signed codes have a sign, 4 bits of exponent
and 3 of mantissa, unsigned ones 5 and 3; code 0 is 0. Rounding is stochastic: a value becomes one of its two
neighbours, whose distance is at most an eighth of it, and the mean over the noise is the value. So an average that
moves by a thousandth a step does move, as it would not if rounded to nearest. Signed magnitudes below 2^-15 of the
scale become 0 or the smallest code, right on average as well; unsigned values (which stand under a square root in a
denominator) never become 0 unless they are 0.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, with codes that are computed
instead of looked up.
"""

from __future__ import annotations

import torch

from windlass.kernels.piece import BLOCK, scales_of
from windlass.kernels.reference.narrow_rounding import NOISE_BITS

_LARGEST = 1.875
_SMALLEST_SIGNED = 1.125 * 2.0**-15  # the value of code 1
_LEAST_SCALED = 2.0**-125  # blocks below it are scaled as if their largest magnitude were this
_SIGNED_BASE, _UNSIGNED_BASE = 112 << 3, 96 << 3


def encode(values: torch.Tensor, noise: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of flat fp32 `values`.

    Args:
        noise: int64 of 20 bits for each value; half of 2^20 everywhere rounds to nearest.
        signed: whether values may be negative.

    Returns:
        uint8 `[n]` and fp32 `[scales_of(n)]`. Where a block holds an infinity or a NaN its scale is not finite, and
        all of the block is lost when it is decoded.
    """
    magnitudes = values.abs()
    top = _largest(magnitudes)
    limit = torch.tensor(_LARGEST)
    sizes = magnitudes * _spread(torch.div(limit, top), values.numel())
    codes = (sizes.view(torch.int32).to(torch.int64) + noise) >> NOISE_BITS
    if signed:
        below = (sizes > noise.float() * (2.0**-20 * _SMALLEST_SIGNED)).to(torch.int64)
        codes = torch.where(sizes < _SMALLEST_SIGNED, below, (codes - _SIGNED_BASE).clamp(max=127))
        codes = codes | torch.where(values.signbit(), 128, 0)
    else:
        least = (values != 0).to(torch.int64)
        codes = torch.maximum((codes - _UNSIGNED_BASE).clamp(max=255), least)
    return codes.to(torch.uint8), torch.div(top, limit)


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 values of flat uint8 `codes`."""
    bits = codes.to(torch.int32)
    magnitudes = bits & 127 if signed else bits
    base = _SIGNED_BASE if signed else _UNSIGNED_BASE
    values = torch.where(magnitudes == 0, 0, (magnitudes + base) << NOISE_BITS).view(torch.float32)
    if signed:
        values = torch.where(bits > 127, -values, values)
    return values * _spread(scales, codes.numel())


def _largest(magnitudes: torch.Tensor) -> torch.Tensor:
    whole = magnitudes.new_zeros(scales_of(magnitudes.numel()) * BLOCK)
    whole[: magnitudes.numel()] = magnitudes
    return whole.view(-1, BLOCK).amax(1).clamp(min=_LEAST_SCALED)


def _spread(of_blocks: torch.Tensor, count: int) -> torch.Tensor:
    return of_blocks.repeat_interleave(BLOCK)[:count]
