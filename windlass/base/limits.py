"""Numbers as people write them on command lines, in hostfiles and in environments, with bounds that catch a slip."""

from __future__ import annotations

import math
from pathlib import Path

MOST_RANKS_OF_A_HOST = 4096
MOST_HOSTS = 65_536
MOST_RANKS = 2**20
"""Of a whole run; a layout of more takes gigabytes to write down."""
_MOST_DIGITS = 18
_PIECE = 2**16


def whole_number(text: str) -> int | None:
    """Parse ASCII digits with an optional sign; None for anything else, and beyond 18 digits."""
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _MOST_DIGITS:
        return None
    return int(text)


def real_number(text: str) -> float | None:
    """Parse a finite number; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_at_most(path: Path, most: int) -> bytes | None:
    """Read a file; None if it has more than `most` bytes, as a device or a pipe without end has."""
    data = bytearray()
    with open(path, "rb") as stream:
        while piece := stream.read(_PIECE):
            data += piece
            if len(data) > most:
                return None
    return bytes(data)
