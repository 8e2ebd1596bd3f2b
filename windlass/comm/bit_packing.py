"""Packing of booleans and 4-bit codes into bytes, vectorized.

Each function has one plain signature over flat tensors, so that a native kernel can replace its body.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

_SHIFTS = tuple(range(8))


def pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """Pack `[n]` booleans into `[ceil(n / 8)]` bytes, the first flag in the lowest bit; unused bits are 0."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    padded = flags.new_zeros(-(-flags.numel() // 8) * 8, dtype=torch.uint8)
    padded[: flags.numel()] = flags
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=flags.device)
    return (padded.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the `[numel]` flags of `pack_bits` as bytes of 0 and 1."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=numel, bitorder="little"))
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:numel]


def pack_signs(values: torch.Tensor) -> torch.Tensor:
    """Return `pack_bits(values >= 0)` of `[n]` float32 values."""
    if values.device.type == "cpu":  # numpy's comparison takes a sixth of the time of torch's
        return torch.from_numpy(np.packbits(values.numpy() >= 0, bitorder="little"))
    return pack_bits(values >= 0)


def unpack_signs(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Write the flags of `pack_bits` to `out` `[n]` in float32: 1 for True, -1 for False."""
    whole = out.numel() // 8 * 8
    if out.device.type == "cpu":  # one pass over the result, where shifts or `unpackbits` need several
        rows = out[:whole].view(-1, 8).numpy()
        np.take(_signs_of_bytes().numpy(), packed[: whole // 8].numpy(), axis=0, out=rows, mode="clip")
        out[whole:] = _signs_of_bytes()[packed[whole // 8 :].long()].view(-1)[: out.numel() - whole]
    else:
        out.copy_(unpack_bits(packed, out.numel())).mul_(2.0).sub_(1.0)


@cache
def _signs_of_bytes() -> torch.Tensor:
    """Return the 8 signs of each byte value, `[256, 8]`."""
    values = torch.arange(256, dtype=torch.uint8)
    return unpack_bits(values, 8 * 256).float().mul_(2.0).sub_(1.0).view(256, 8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack `[n]` bytes of 0 to 15 into `[ceil(n / 2)]` bytes, the first code in the lower half; an unused half is 0."""
    low, high = codes[0::2], codes[1::2]
    packed = low.clone()
    packed[: high.numel()] |= high << 4
    return packed


def unpack_nibbles(packed: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the `[numel]` codes of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), 1).view(-1)[:numel]
