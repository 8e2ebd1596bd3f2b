"""Computation of crc32 by the package `isal` if it is installed, else by zlib, which is slower than a disk."""

from __future__ import annotations

from ctypes import Array, c_ubyte

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # no build for this platform
    from zlib import crc32 as _crc32


def crc32(data: bytes | memoryview | Array[c_ubyte], before: int = 0) -> int:
    """Return the crc32 of `data`, continuing from the crc32 `before` of preceding bytes."""
    return _crc32(data, before)
