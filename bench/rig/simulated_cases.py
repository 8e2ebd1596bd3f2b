"""Configurations whose step time is simulated and measured on CPU ranks, and the machine as it was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rig.models import Sizes
from windlass.simulate.cluster import Cluster, Network
from windlass.simulate.parts import DevicePart, HostPart, LinkPart

MODEL = Sizes(hidden=512, layers=6, heads=8, intermediate=1536, vocabulary=4096)
SAMPLES, LENGTH = 2, 256


@dataclass(frozen=True)
class TimedCase:
    """Configuration of one row."""

    ranks: int
    stage: int = 0
    axes: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1

    @property
    def name(self) -> str:
        """Name of the row."""
        words = [f"{axis} {size}" for axis, size in self.axes.items()]
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
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
    *(TimedCase(2, stage) for stage in range(4)),
    TimedCase(2, 2, micro_batches=2),
    TimedCase(2, 0, {"tp": 2}),
    TimedCase(2, 0, {"pp": 2}, 4),
    TimedCase(4, 2),
    TimedCase(4, 3),
)


@dataclass(frozen=True)
class MeasuredMachine:
    """Rates of one rank while all ranks work.

    Attributes:
        product_rate: FLOP/s of the model's products, forward and backward.
        attention_rate: FLOP/s of its attention, forward and backward, as the simulator counts them.
        memory_rate: Bytes a second of elementwise operations.
        wire_rate: Bytes a second that a rank receives in windlass's reductions and gathers over gloo.
        latency: Seconds of the smallest collective.
    """

    product_rate: float
    attention_rate: float
    memory_rate: float
    wire_rate: float
    latency: float

    def cluster(self, ranks: int) -> Cluster:
        """Return the machine as a cluster of one host on which ranks compute and communicate with the same cores."""
        device = DevicePart(
            "core", {"fp32": self.product_rate}, 16 << 30, self.memory_rate, matmul_efficiency=1.0,
            attention_efficiency=self.attention_rate / self.product_rate, memory_efficiency=1.0, launch_seconds=1e-5,
        )  # fmt: skip
        wire = LinkPart(self.wire_rate, self.latency, 1.0)
        host = HostPart("this machine", ranks, wire, wire, memory_rate=self.memory_rate * ranks)
        return Cluster(device, host, 1, Network(switch_latency=0.0), overlaps=False, name="this machine")
