"""Techniques for long sequences: combinations to measure, and the search for the longest sequence that fits.

Each technique is measured alone, all together, and all but one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rig.models import Sizes

SIZES = Sizes(hidden=128, layers=8, heads=2, intermediate=512, vocabulary=8192)
TILE = 256  # tokens in a tile of MLPs and losses
_PROBES = 3  # largest number of lengths tried between one that fits and one that does not
_NEAR = 0.02  # relative precision of the search


@dataclass(frozen=True)
class Techniques:
    """Enabled techniques.

    Attributes:
        sp: ranks over which the sequence is sharded.
        inputs: tier of the saved inputs of recomputed layers; "nvme" is files.
    """

    sp: int = 1
    tiled_mlp: bool = False
    tiled_loss: bool = False
    recompute: bool = False
    inputs: Literal["device", "cpu", "nvme"] = "device"

    def section(self) -> dict[str, Any]:
        """Return the section `parallel` of windlass. Inputs offloaded to files are left out, because the section has no
        key for their folder; `LengthRank.build` sets up their offload."""
        section: dict[str, Any] = {"sp": self.sp}
        section |= {"tiled_mlp": TILE} if self.tiled_mlp else {}
        section |= {"tiled_loss": TILE} if self.tiled_loss else {}
        if self.recompute and self.inputs != "nvme":
            section |= {"recompute": True, "activation_tier": self.inputs}
        return section


_ALL = Techniques(2, tiled_mlp=True, tiled_loss=True, recompute=True, inputs="cpu")
ROWS = {
    "nothing": Techniques(),
    "sp 2": Techniques(sp=2),
    "tiled MLP": Techniques(tiled_mlp=True),
    "tiled loss": Techniques(tiled_loss=True),
    "recompute": Techniques(recompute=True),
    "recompute, inputs to host": Techniques(recompute=True, inputs="cpu"),
    "recompute, inputs to files": Techniques(recompute=True, inputs="nvme"),
    "all": _ALL,
    "all but sp 2": replace(_ALL, sp=1),
    "all but tiled MLP": replace(_ALL, tiled_mlp=False),
    "all but tiled loss": replace(_ALL, tiled_loss=False),
    "all but recompute": replace(_ALL, recompute=False, inputs="device"),
    "all but inputs to host": replace(_ALL, inputs="device"),
}
""""all" offloads inputs to host memory; without recomputation there are no inputs to offload."""


@dataclass(frozen=True)
class Point:
    """Measurement of one step on a sequence.

    Attributes:
        peak: largest peak bytes of any rank, above those after importing torch and transformers.
        resident: the same, including offloaded bytes in host memory.
        seconds: duration of the step.
        loss: loss of the whole sequence.
    """

    length: int
    peak: int
    resident: int
    seconds: float
    loss: float


def search(measure: Callable[[int], Point], cap: int, *, first: int, most: int, grain: int) -> list[Point]:
    """Measure sequences of growing length until one does not fit, then lengths between the last two.

    Args:
        measure: runs one step on a sequence of this length.
        cap: maximum peak bytes.
        first: initial length, which is doubled up to `most`.
        grain: searched lengths are multiples of it.

    Returns:
        All measurements, by length.
    """
    results = [measure(first)]
    while results[-1].peak <= cap and results[-1].length < most:
        results.append(measure(min(2 * results[-1].length, most)))
    for _ in range(_PROBES if len(results) > 1 and results[-1].peak > cap else 0):
        low, high = max(fitting(results, cap), key=_length), min(exceeding(results, cap), key=_length)
        guess = low.length + (high.length - low.length) * (cap - low.peak) / max(high.peak - low.peak, 1)
        length = min(max(int(guess) // grain * grain, low.length + grain), high.length - grain)
        if high.length - low.length <= max(grain, _NEAR * low.length) or not low.length < length < high.length:
            break
        results.append(measure(length))
    return sorted(results, key=_length)


def fitting(points: Sequence[Point], cap: int) -> list[Point]:
    """Return the points that are shorter than the first point over the cap."""
    least = min((item.length for item in points if item.peak > cap), default=None)
    return [item for item in points if least is None or item.length < least]


def exceeding(points: Sequence[Point], cap: int) -> list[Point]:
    """Return the points over the cap."""
    return [item for item in points if item.peak > cap]


def longest(points: Sequence[Point], cap: int) -> Point | None:
    """Return the longest measured point that fits; None if the first does not."""
    return max(fitting(points, cap), key=_length, default=None)


def _length(point: Point) -> int:
    return point.length
