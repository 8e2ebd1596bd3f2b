"""Parsing of numbers from command lines, hostfiles and environment variables, and reading of files, within bounds."""

from __future__ import annotations

import math
import string
from pathlib import Path

MAX_RANKS_PER_HOST = 4096
MAX_HOSTS = 65_536
MAX_RANKS = 2**20
"""Maximum number of ranks of a run: a larger rank map takes gigabytes."""
_MAX_DIGITS = 18
_READ_BYTES = 2**16


def parse_int(text: str) -> int | None:
    """Parse at most 18 ASCII digits with an optional minus sign and surrounding spaces; None for anything else."""
    digits = text.strip(string.whitespace).removeprefix("-")  # bare strip() removes \x1f too, which int() refuses
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _MAX_DIGITS:
        return None
    return int(text)


def parse_finite_float(text: str) -> float | None:
    """Parse a finite number; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_bounded(path: Path, max_bytes: int) -> bytes | None:
    """Read a file. Return None if it has more than `max_bytes` bytes, as an endless device or pipe has."""
    data = bytearray()
    with open(path, "rb") as stream:
        while piece := stream.read(_READ_BYTES):
            data += piece
            if len(data) > max_bytes:
                return None
    return bytes(data)
