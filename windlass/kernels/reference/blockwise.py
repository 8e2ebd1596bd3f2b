"""States in 8 bits an element: small floats under one scale for each block of 256.

The scale is the power of two that puts the block's largest magnitude, rounded, at 1 to 1.875, the largest code. Signed
codes have a sign, 4 bits of exponent and 3 of mantissa, unsigned ones 5 and 3; code 0 is 0. Rounding is stochastic: a
value becomes one of its two neighbours, whose distance is at most an eighth of it, and the mean over the noise is the
value. So an average that moves by a thousandth a step does move, as it would not if rounded to nearest. Signed
magnitudes below 2^-15 of the scale become 0 or the smallest code, right on average as well; unsigned values (which
stand under a square root in a denominator) become the smallest code, unless they are 0.

Scales that are powers of two make codes pieces of fp32 numbers: what was decoded is coded again, by any noise, in the
same codes and scale.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, with codes that are computed
instead of looked up.
"""

from __future__ import annotations

import torch

from windlass.kernels.reference.stochastic_rounding import NOISE_BITS, NOISE_MASK
from windlass.kernels.update_tensors import SCALE_BLOCK, count_scales

_MIN_SIGNED_VALUE = 1.125 * 2.0**-15  # the value of code 1
_SIGNED_SPAN, _UNSIGNED_SPAN = 15, 31  # exponents that the codes span below that of the scale
# Biased exponents of the least scales: under them code 1, and for signed codes its product with a noise, is a normal
# number. What is smaller is scaled as if its block's largest magnitude were this.
_MIN_SIGNED_EXPONENT, _MIN_UNSIGNED_EXPONENT = 64, 32
_INFINITE_EXPONENT = 255


def quantize_blockwise(values: torch.Tensor, noise: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of flat fp32 `values`.

    Args:
        noise: int64 of 20 bits for each value; half of 2^20 everywhere rounds to nearest.
        signed: whether values may be negative.

    Returns:
        uint8 `[n]` and fp32 `[scales_of(n)]`. Where a block holds an infinity, a NaN or a value that rounds to an
        infinity its codes are 0 and its scale is infinite: all of the block is NaN when it is decoded.
    """
    # Rounded to 3 bits of mantissa, as integers of sign, exponent and mantissa that code and number have in common.
    sizes = (values.abs().view(torch.int32).to(torch.int64) + noise) >> NOISE_BITS
    sizes = torch.where(values.isnan(), _INFINITE_EXPONENT << 3, sizes)
    exponents = _block_maxima(sizes) >> 3
    lost = exponents >= _INFINITE_EXPONENT
    exponents = exponents.clamp(min=_MIN_SIGNED_EXPONENT if signed else _MIN_UNSIGNED_EXPONENT)
    scales = torch.where(lost, _INFINITE_EXPONENT, exponents).to(torch.int32).bitwise_left_shift(23).view(torch.float32)
    codes = sizes - (_expand_blocks(exponents - (_SIGNED_SPAN if signed else _UNSIGNED_SPAN), values.numel()) << 3)
    if signed:
        # Rounded once more, to 0 or to code 1, by a noise that is independent of the first.
        other = (noise * 0x9E3779B1 & NOISE_MASK).float()
        rounded = (sizes.to(torch.int32) << NOISE_BITS).view(torch.float32)
        below = (rounded > other * (2.0**-20 * _MIN_SIGNED_VALUE) * _expand_blocks(scales, values.numel())).to(
            torch.int64
        )
        codes = torch.where(codes < 1, below, codes) | torch.where(values.signbit(), 128, 0)
    else:
        codes = torch.where(codes < 1, (sizes != 0).to(torch.int64), codes)
    return torch.where(_expand_blocks(lost, values.numel()), 0, codes).to(torch.uint8), scales


def dequantize_blockwise(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 values of flat uint8 `codes`."""
    bits = codes.to(torch.int32)
    magnitudes = bits & 127 if signed else bits
    base = (127 - (_SIGNED_SPAN if signed else _UNSIGNED_SPAN)) << 3
    values = torch.where(magnitudes == 0, 0, (magnitudes + base) << NOISE_BITS).view(torch.float32)
    if signed:
        values = torch.where(bits > 127, -values, values)
    return values * _expand_blocks(scales, codes.numel())


def _block_maxima(sizes: torch.Tensor) -> torch.Tensor:
    whole = sizes.new_zeros(count_scales(sizes.numel()) * SCALE_BLOCK)
    whole[: sizes.numel()] = sizes
    return whole.view(-1, SCALE_BLOCK).amax(1)


def _expand_blocks(of_blocks: torch.Tensor, count: int) -> torch.Tensor:
    return of_blocks.repeat_interleave(SCALE_BLOCK)[:count]
