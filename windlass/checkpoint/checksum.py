"""The crc32 of bytes, by the processor's own instructions where `isal` is at hand: zlib alone is slower than a disk."""

from __future__ import annotations

from ctypes import Array, c_ubyte

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # there is no build of it for this platform
    from zlib import crc32 as _crc32


def crc32(data: bytes | memoryview | Array[c_ubyte], before: int = 0) -> int:
    """Of `data`; or, of what had the crc32 `before` and `data` after it."""
    return _crc32(data, before)
