"""Numbers of bytes as users write them."""

from __future__ import annotations

import re

from windlass.base.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str, source: str) -> int:
    """Parse a number of bytes: `1500000`, `1.5G`, `512MiB`. K, M, G and T are powers of 1024, with or without `B`.

    Raises:
        ConfigError: the text is not a number of bytes. The message names `source`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{source} = {text!r} is not a number of bytes; write 1500000, 1.5G or 512MiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])
