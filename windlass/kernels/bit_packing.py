"""Packing of quantization codes of 1 to 8 bits into 32-bit words, and of base-3 digits into bytes.

The words are those of compressed-tensors' `pack-quantized` files: code `i` of a row occupies `bits` bits from bit
`i * bits` on, counted from the lowest bit of the row's first word, without gaps.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from windlass.base.errors import WeightFormatError

TRITS_OF_BYTE = 5  # five base-3 digits have 3 ** 5 = 243 values, which fit in a byte


def count_words(codes: int, bits: int) -> int:
    """Return the number of 32-bit words of a row of `codes` codes."""
    return -(-codes * bits // 32)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes `[rows, n]` (uint8, below `2 ** bits`) as int32 `[rows, count_words(n, bits)]`, zeros at the end."""
    rows, count = codes.shape
    if codes.numel() == 0:
        return codes.new_zeros((rows, count_words(count, bits)), dtype=torch.int32)
    padded = F.pad(codes, (0, -count % 32))
    if bits == 8:
        packed = padded
    elif 8 % bits:  # codes cross bytes; eight codes are `bits` bytes
        shifts = _shifts_of_eight(bits, codes.device)
        joined = (padded.view(rows, -1, 8).to(shifts.dtype) << shifts).sum(2, dtype=shifts.dtype)
        packed = torch.stack([(joined >> 8 * byte) & 255 for byte in range(bits)], 2).to(torch.uint8).view(rows, -1)
    else:
        parts = padded.view(rows, -1, 8 // bits)
        packed = parts[..., 0].clone()
        for part in range(1, 8 // bits):
            packed |= parts[..., part] << (bits * part)
    words = count_words(count, bits)
    return packed[:, : 4 * words].reshape(-1).view(torch.int32).view(rows, words)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` codes of each row, as uint8 `[rows, count]`."""
    rows = len(words)
    if rows * count == 0:
        return torch.zeros(rows, count, dtype=torch.uint8, device=words.device)
    packed = words.reshape(-1).view(torch.uint8).view(rows, -1)
    if bits == 8:
        return packed[:, :count].contiguous()
    if 8 % bits:
        shifts = _shifts_of_eight(bits, words.device)
        packed = F.pad(packed, (0, -packed.shape[1] % bits)).view(rows, -1, bits).to(shifts.dtype)
        joined = packed[..., 0]
        for byte in range(1, bits):
            joined = joined | packed[..., byte] << 8 * byte
        codes: torch.Tensor = ((joined.unsqueeze(2) >> shifts) & (2**bits - 1)).to(torch.uint8)
    else:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        codes = (packed.unsqueeze(2) >> shifts) & (2**bits - 1)
    return codes.reshape(rows, -1)[:, :count].contiguous()


def _shifts_of_eight(bits: int, device: torch.device) -> torch.Tensor:
    """Return the bit offsets of eight codes in one integer, in a dtype that is wide enough for the integer."""
    if bits > 8:
        raise WeightFormatError(f"codes of {bits} bits are not packed in words; give 1 to 8 bits")
    return torch.arange(0, 8 * bits, bits, dtype=torch.int32 if bits < 4 else torch.int64, device=device)


def pack_trits(digits: torch.Tensor) -> torch.Tensor:
    """Pack digits `[rows, n]` (uint8, 0 to 2) as uint8 `[rows, ceil(n / 5)]`; a byte's first digit has weight 1."""
    rows, count = digits.shape
    if digits.numel() == 0:
        return digits.new_zeros((rows, -(-count // TRITS_OF_BYTE)))
    parts = F.pad(digits, (0, -count % TRITS_OF_BYTE)).view(rows, -1, TRITS_OF_BYTE)
    packed = parts[..., 0].clone()
    for part in range(1, TRITS_OF_BYTE):
        packed += parts[..., part] * 3**part
    return packed


def unpack_trits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` digits of each row, as uint8 `[rows, count]`."""
    if len(packed) * count == 0:
        return packed.new_zeros((len(packed), count))
    powers = torch.tensor([3**part for part in range(TRITS_OF_BYTE)], dtype=torch.uint8, device=packed.device)
    digits = packed.unsqueeze(2).div(powers, rounding_mode="floor") % 3
    return digits.reshape(len(packed), -1)[:, :count].contiguous()
