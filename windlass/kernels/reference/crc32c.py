"""CRC-32C (Castagnoli), bit by bit: the reference of the page checksums on disk."""

from __future__ import annotations

_REVERSED = 0x82F63B78  # the polynomial 0x1EDC6F41 with reversed bits, in the order in which they are shifted out


def crc32c(data: bytes) -> int:
    """Compute the checksum of `data` as RFC 3720 defines it: 0xE3069283 for `b"123456789"`."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (_REVERSED if value & 1 else 0)
    return value ^ 0xFFFFFFFF
