"""Memory of one rank by moment of a run, place (device, host, disk) and kind (such as gradients). Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MOMENTS = ("init", "load", "forward", "backward", "step", "save")
"""Moments of a run: construction of the model; `initialize`; forward, backward and step, each from the second step on;
a save."""

DEVICE, HOST, DISK = "device", "host", "disk"
SLACK = "allocator slack"

Amounts = dict[str, int]  # bytes by kind


@dataclass
class MomentMemory:
    """Bytes at the peak of one moment: for each place, the bytes of each kind.

    Attributes:
        device: Memory of the device; empty on a CPU, where all memory is the host's.
        host: Memory of the host that belongs to this rank: a page that n ranks share counts 1/n.
        disk: Space on the NVMe tier and, in a save, of the checkpoint.
    """

    device: Amounts = field(default_factory=dict)
    host: Amounts = field(default_factory=dict)
    disk: Amounts = field(default_factory=dict)

    def of(self, place: str) -> Amounts:
        """Return the amounts of one place."""
        found: Amounts = getattr(self, place)
        return found

    def total(self, place: str) -> int:
        """Return the sum of the bytes of one place."""
        return sum(self.of(place).values())


@dataclass
class MemoryPlan:
    """Predicted memory of one rank.

    Attributes:
        world_size: Number of ranks. The plan is for one rank; in a pipeline, for a rank of the stage that needs most.
        parameters: Number of elements of the full model's parameters.
        micro_batch, length: Samples of the traced micro-batch, and tokens of a sample.
        moments: Memory at each of `MOMENTS`.
        notes: Assumptions, and memory that is not counted.
    """

    world_size: int
    parameters: int
    micro_batch: int
    length: int
    moments: dict[str, MomentMemory] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def peak(self, place: str, moments: tuple[str, ...] = MOMENTS) -> int:
        """Return the largest total of one place over `moments`, in bytes."""
        return max((self.moments[m].total(place) for m in moments if m in self.moments), default=0)

    def peak_moment(self, place: str) -> str:
        """Return the moment with the largest total of one place."""
        return max(self.moments, key=lambda moment: self.moments[moment].total(place))

    def kinds(self, place: str) -> list[str]:
        """Return the kinds that a place has at any moment, in the order of their first appearance."""
        return list(dict.fromkeys(kind for one in self.moments.values() for kind, n in one.of(place).items() if n))

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "world_size": self.world_size,
            "parameters": self.parameters,
            "micro_batch": self.micro_batch,
            "length": self.length,
            "peak": {place: self.peak(place) for place in (DEVICE, HOST, DISK)},
            "moments": {
                name: {place: one.of(place) for place in (DEVICE, HOST, DISK)} for name, one in self.moments.items()
            },
            "notes": self.notes,
        }
