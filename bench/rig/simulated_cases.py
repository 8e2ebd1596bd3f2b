"""Configurations whose step time is simulated and measured on CPU ranks, and the machine as it was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rig.models import Sizes
from windlass.simulate.cluster import Cluster, Network
from windlass.simulate.parts import DevicePart, HostPart, LinkPart

MODEL = Sizes(hidden=512, layers=6, heads=8, intermediate=1536, vocabulary=4096)
SAMPLES, LENGTH = 1, 256


@dataclass(frozen=True)
class TimedCase:
    """Configuration of one row.

    Attributes:
        link: Bytes a second to which each connection is limited; 0: unlimited.
    """

    ranks: int
    stage: int = 0
    axes: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    link: int = 0

    @property
    def name(self) -> str:
        """Name of the row."""
        words = [f"{axis} {size}" for axis, size in self.axes.items()]
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        words += [f"{self.link >> 20:,} MiB/s"] if self.link else []
        return ", ".join([f"{self.ranks} ranks", f"stage {self.stage}", *words])

    def config(self) -> dict[str, Any]:
        """Return the configuration of windlass."""
        return {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": self.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": self.stage, "stage3_max_reuse_distance": 0},
            "parallel": dict(self.axes),
            "comm": {"transport": "gloo"},
            "steps_per_print": 10**9,
        }


CASES = (
    *(TimedCase(2, stage) for stage in (0, 2, 3)),
    TimedCase(2, 2, micro_batches=2),
    TimedCase(2, 0, {"tp": 2}),
    TimedCase(2, 0, {"pp": 2}, 2),
    TimedCase(4, 2),
)
EIGHT = (
    *(TimedCase(8, stage) for stage in (2, 3)),
    TimedCase(8, 1, {"tp": 2}),
    TimedCase(8, 2, {"sp": 2}),
    TimedCase(8, 1, {"pp": 2, "tp": 2}, 2),
)
LINKED = (*(TimedCase(2, stage) for stage in (1, 2, 3)), TimedCase(2, 0, {"pp": 2}, 2), TimedCase(2, 1, {"sp": 2}))
"""Rows that are measured on each slow link."""


@dataclass(frozen=True)
class MeasuredMachine:
    """Rates of the slowest rank while all ranks work.

    Attributes:
        product_rate: FLOP/s of the model's products, forward and backward.
        attention_rate: FLOP/s of its attention, forward and backward, as the simulator counts them.
        memory_rate: Bytes a second of elementwise operations.
        wire_rate: Bytes a second that a rank receives in windlass's reductions and gathers over gloo.
        axis_rate: Bytes a second that a rank receives in an all-reduce of activations, as along tp.
        latency: Seconds of the smallest collective.
    """

    product_rate: float
    attention_rate: float
    memory_rate: float
    wire_rate: float
    axis_rate: float
    latency: float

    def cluster(self, case: TimedCase) -> Cluster:
        """Return the machine as a cluster of one host on which ranks compute and communicate with the same cores.

        A slow link leaves the cores free while it sends.
        """
        device = DevicePart(
            "core", {"fp32": self.product_rate}, 16 << 30, self.memory_rate, matmul_efficiency=1.0,
            attention_efficiency=self.attention_rate / self.product_rate, memory_efficiency=1.0, launch_seconds=1e-5,
        )  # fmt: skip
        rate = self.axis_rate if case.axes.get("tp", 1) > 1 else self.wire_rate
        wire = LinkPart(rate, self.latency, 1.0)
        host = HostPart("this machine", case.ranks, wire, wire, memory_rate=self.memory_rate * case.ranks)
        network = Network(switch_latency=0.0)
        return Cluster(device, host, 1, network, overlaps=bool(case.link), name="this machine")
