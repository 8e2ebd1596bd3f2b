"""Budget of a compression: limits of size, loss, speed and latency, parsed from a command-line option."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from windlass.base.errors import ConfigError

_KEYS = ("size", "loss", "speed", "latency")
_EXAMPLE = "write e.g. size=0.3 or size=4x, loss=+0.02 or loss=1%, speed=2.0, latency=2ms, with commas between them"


@dataclass(frozen=True)
class CompressionBudget:
    """Limits of a compressed model; None: no limit.

    Attributes:
        size: bytes of all tensors, as a share of the bytes before compression.
        loss: increase of the bits per byte of held-out text; with `is_relative`, as a share of the bits per byte
            before compression.
        speed: tokens generated per second for one request, as a multiple of the speed before compression.
        latency: seconds per generated token.
    """

    size: float | None = None
    loss: float | None = None
    is_relative: bool = False
    speed: float | None = None
    latency: float | None = None


def parse_budget(text: str) -> CompressionBudget:
    """Read a budget, e.g. `size=4x,loss=1%`.

    Raises:
        ConfigError: a key is unknown or repeated, a value is not a positive number with a valid unit, or the size is
            not below that of the model.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in _KEYS or not equals or key in found:
            raise ConfigError(f"budget (--budget) has {part.strip()!r}; {_EXAMPLE}")
        found[key] = value.strip()
    size = _number(found, "size", r"(?P<n>[\d.]+)(?P<unit>x?|%)")
    loss = _number(found, "loss", r"\+?(?P<n>[\d.]+)(?P<unit>%?)")
    speed = _number(found, "speed", r"(?P<n>[\d.]+)(?P<unit>x?)")
    latency = _number(found, "latency", r"(?P<n>[\d.]+)(?P<unit>ms|us|s)")
    share = None
    if size is not None:
        number, unit = size
        share = 1 / number if unit == "x" else number / 100 if unit == "%" else number
        if share >= 1:
            raise ConfigError(f"budget (--budget) size={found['size']} is not smaller than the model; {_EXAMPLE}")
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    return CompressionBudget(
        size=share,
        loss=None if loss is None else loss[0] / (100 if loss[1] else 1),
        is_relative=loss is not None and loss[1] == "%",
        speed=None if speed is None else speed[0],
        latency=None if latency is None else latency[0] * scale[latency[1]],
    )


def _number(found: dict[str, str], key: str, pattern: str) -> tuple[float, str] | None:
    if key not in found:
        return None
    match = re.fullmatch(pattern, found[key])
    try:
        number = float(match["n"]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise ConfigError(f"budget (--budget) has {key}={found[key]!r}, which is not a positive {key}; {_EXAMPLE}")
    return number, match["unit"]


def parse_shares(text: str) -> dict[str, float]:
    """Read shares of units to remove, e.g. `heads=0.25,layers=4`.

    Raises:
        ConfigError: a part is not `kind=number` with a number above 0, or a kind is given twice.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < math.inf or key in found:
            twice = ", a kind that is given twice" if key in found else ""
            raise ConfigError(f"prune (--prune) has {part.strip()!r}{twice}; write e.g. heads=0.25,ffn=0.25,layers=4")
        found[key] = number
    return found
