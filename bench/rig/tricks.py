"""Techniques for long sequences: each alone, all, all but one; and the search for the longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rig.models import Sizes

SIZES = Sizes(hidden=128, layers=8, heads=2, intermediate=512, vocabulary=8192)
TILE = 256  # tokens that MLPs and losses are computed for at a time
_PROBES = 3  # between one that fits and one that does not
_NEAR = 0.02  # relative precision of the search


@dataclass(frozen=True)
class Tricks:
    """Enabled techniques.

    Attributes:
        sp: ranks that the sequence is cut over.
        inputs: where inputs of layers wait that are computed again; "nvme" is files.
    """

    sp: int = 1
    tiled_mlp: bool = False
    tiled_loss: bool = False
    recompute: bool = False
    inputs: Literal["device", "cpu", "nvme"] = "device"

    def section(self) -> dict[str, Any]:
        """`parallel` of windlass. Files have no key of their own there: they lie where other state on disk does."""
        section: dict[str, Any] = {"sp": self.sp}
        section |= {"tiled_mlp": TILE} if self.tiled_mlp else {}
        section |= {"tiled_loss": TILE} if self.tiled_loss else {}
        if self.recompute and self.inputs != "nvme":
            section |= {"recompute": True, "activation_tier": self.inputs}
        return section


_ALL = Tricks(2, tiled_mlp=True, tiled_loss=True, recompute=True, inputs="cpu")
ROWS = {
    "nothing": Tricks(),
    "sp 2": Tricks(sp=2),
    "tiled MLP": Tricks(tiled_mlp=True),
    "tiled loss": Tricks(tiled_loss=True),
    "recompute": Tricks(recompute=True),
    "recompute, inputs to host": Tricks(recompute=True, inputs="cpu"),
    "recompute, inputs to files": Tricks(recompute=True, inputs="nvme"),
    "all": _ALL,
    "all but sp 2": replace(_ALL, sp=1),
    "all but tiled MLP": replace(_ALL, tiled_mlp=False),
    "all but tiled loss": replace(_ALL, tiled_loss=False),
    "all but recompute": replace(_ALL, recompute=False, inputs="device"),
    "all but inputs to host": replace(_ALL, inputs="device"),
}
"""All of them take inputs to host memory; without recomputation there are none to take."""


@dataclass(frozen=True)
class Point:
    """One step on a sequence.

    Attributes:
        peak: bytes, of the rank that takes most, above those after importing torch and transformers.
        resident: the same, with what waits in host memory where that is another memory.
        seconds: of the step.
        loss: of the whole sequence.
    """

    length: int
    peak: int
    resident: int
    seconds: float
    loss: float


def search(measure: Callable[[int], Point], cap: int, *, first: int, most: int, grain: int) -> list[Point]:
    """Steps on sequences of growing length until one does not fit, then between the last that fits and that one.

    Args:
        measure: one step on a sequence of this length.
        cap: bytes that a peak may have.
        first: length to begin with; each is twice the one before, up to `most`.
        grain: lengths that are searched for are multiples of it.

    Returns:
        All that was measured, by length.
    """
    found = [measure(first)]
    while found[-1].peak <= cap and found[-1].length < most:
        found.append(measure(min(2 * found[-1].length, most)))
    for _ in range(_PROBES if len(found) > 1 and found[-1].peak > cap else 0):
        low, high = max(fitting(found, cap), key=_length), min(bursting(found, cap), key=_length)
        guess = low.length + (high.length - low.length) * (cap - low.peak) / max(high.peak - low.peak, 1)
        length = min(max(int(guess) // grain * grain, low.length + grain), high.length - grain)
        if high.length - low.length <= max(grain, _NEAR * low.length) or not low.length < length < high.length:
            break
        found.append(measure(length))
    return sorted(found, key=_length)


def fitting(points: Sequence[Point], cap: int) -> list[Point]:
    """Those within the cap, up to the first that is not."""
    least = min((one.length for one in points if one.peak > cap), default=None)
    return [one for one in points if least is None or one.length < least]


def bursting(points: Sequence[Point], cap: int) -> list[Point]:
    """Those over the cap."""
    return [one for one in points if one.peak > cap]


def longest(points: Sequence[Point], cap: int) -> Point | None:
    """The longest that fits of those measured; None: not even the first."""
    return max(fitting(points, cap), key=_length, default=None)


def _length(point: Point) -> int:
    return point.length
