"""8-bit optimizer states: small floats with one scale for each block of 256 elements.

The scale is a power of two. Divided by it and rounded, the block's largest magnitude is from 1 to 1.875, the value of
the largest code. Signed codes have a sign, 4 bits of exponent and 3 of mantissa; unsigned ones 5 and 3. Code 0 is 0.
Rounding is stochastic: a value becomes one of its two neighbours, whose distance is at most an eighth of the value, and
the mean over the noise is the value. So a moving average that changes by a thousandth per step does change, which it
would not with rounding to nearest. Signed magnitudes below that of code 1, 1.125 * 2^-15 of the scale, become 0 or code
1, also correct on average. Unsigned values below code 1, 1.125 * 2^-31 of the scale, become code 1, unless they are 0:
they are under a square root in a denominator.

The exponent and mantissa bits of a code are those of the fp32 number, since scales are powers of two. Therefore a
decoded value encodes to the same code and scale again, with any noise.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, with computed codes instead of
a lookup table.
"""

from __future__ import annotations

import torch

from windlass.kernels.reference.stochastic_rounding import NOISE_BITS, NOISE_MASK
from windlass.kernels.update_tensors import SCALE_BLOCK, count_scales

_MIN_SIGNED_VALUE = 1.125 * 2.0**-15  # value of signed code 1, in units of the scale
_SIGNED_SPAN, _UNSIGNED_SPAN = 15, 31  # number of exponents that codes have below the scale's exponent
# Biased exponents of the smallest scales, which blocks of smaller values use too. With these scales, code 1 (for signed
# codes: also its product with a noise) decodes to a normal number.
_MIN_SIGNED_EXPONENT, _MIN_UNSIGNED_EXPONENT = 64, 32
_INFINITE_EXPONENT = 255


def quantize_blockwise(values: torch.Tensor, noise: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode flat fp32 `values` as codes and scales.

    Args:
        noise: int64 `[n]`, random integers in [0, 2^20); 2^19 everywhere rounds to nearest.
        signed: True if values may be negative.

    Returns:
        uint8 `[n]` and fp32 `[count_scales(n)]`. If a block has an infinity, a NaN or a value that rounds to infinity,
        its codes are 0 and its scale is infinite, and the block decodes to NaN.
    """
    # Round to 3 bits of mantissa. In these integers, as in codes and fp32, the mantissa bits follow the exponent bits.
    sizes = (values.abs().view(torch.int32).to(torch.int64) + noise) >> NOISE_BITS
    sizes = torch.where(values.isnan(), _INFINITE_EXPONENT << 3, sizes)
    exponents = _block_maxima(sizes) >> 3
    lost = exponents >= _INFINITE_EXPONENT
    exponents = exponents.clamp(min=_MIN_SIGNED_EXPONENT if signed else _MIN_UNSIGNED_EXPONENT)
    scales = torch.where(lost, _INFINITE_EXPONENT, exponents).to(torch.int32).bitwise_left_shift(23).view(torch.float32)
    codes = sizes - (_expand_blocks(exponents - (_SIGNED_SPAN if signed else _UNSIGNED_SPAN), values.numel()) << 3)
    if signed:
        # Round values below code 1 again, to 0 or to code 1, with a noise that is independent of the first.
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
    """Decode flat uint8 `codes` `[n]`, with fp32 scales `[count_scales(n)]`, to fp32 values."""
    bits = codes.to(torch.int32)
    magnitudes = bits & 127 if signed else bits
    base = (127 - (_SIGNED_SPAN if signed else _UNSIGNED_SPAN)) << 3
    values = torch.where(magnitudes == 0, 0, (magnitudes + base) << NOISE_BITS).view(torch.float32)
    if signed:
        values = torch.where(bits > 127, -values, values)
    return values * _expand_blocks(scales, codes.numel())


def _block_maxima(sizes: torch.Tensor) -> torch.Tensor:
    full = sizes.new_zeros(count_scales(sizes.numel()) * SCALE_BLOCK)
    full[: sizes.numel()] = sizes
    return full.view(-1, SCALE_BLOCK).amax(1)


def _expand_blocks(of_blocks: torch.Tensor, count: int) -> torch.Tensor:
    return of_blocks.repeat_interleave(SCALE_BLOCK)[:count]
