"""Configurations whose step time is simulated and measured on CPU ranks, and the machine as it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rig.models import Sizes
from windlass.simulate.cluster import Cluster, Network
from windlass.simulate.hardware_parts import DevicePart, HostPart, LinkPart

MODEL = Sizes(hidden=512, layers=6, heads=8, intermediate=1536, vocabulary=4096)
SAMPLES, LENGTH = 1, 256
WIRE_ELEMENTS = 2_400_000
"""Elements of the timed reductions and gathers of data ranks."""
LARGE_ELEMENTS = 12_000_000
"""Elements of each tensor of the timed operation on tensors that fit into no cache."""
ONE_STAGE = ", one stage"
"""Suffix of the names of times that are measured while one stage of a pipeline works and the others wait."""
KERNELS = ("products", "attention", "elementwise", "large tensors")


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
    """Rates of the slowest rank while all ranks work, in the groups of one mesh.

    Attributes:
        product_rate: FLOP/s of the model's products, forward and backward.
        attention_rate: FLOP/s of its attention, forward and backward, as the simulator counts them.
        memory_rate: Bytes a second of elementwise operations on activations.
        state_rate: Bytes a second of elementwise operations on tensors too large for a cache.
        wire: Rate and latency of windlass's reductions and gathers over gloo, among the data ranks.
        axes: Rate and latency along each other axis: of all-reduces of activations for tp, of all-to-alls for sp, of
            messages between stages for pp.
    """

    product_rate: float
    attention_rate: float
    memory_rate: float
    state_rate: float
    wire: LinkPart
    axes: dict[str, LinkPart]

    @classmethod
    def of_seconds(cls, case: TimedCase, seconds: Mapping[str, float]) -> MeasuredMachine:
        """Derive the rates from the seconds of `TimedRank.measure`.

        Ranks share the cores. While a pipeline fills and drains, only one stage works, so that part of its
        micro-batches takes the times that were measured on one stage while the others waited.
        """
        work, stages = measured_work(), case.axes.get("pp", 1)
        # Part of a stage's micro-batches that overlap with no other stage's.
        alone = min(1.0, (stages - 1) / case.micro_batches)
        mixed = {
            name: value + alone * (seconds.get(f"{name}{ONE_STAGE}", value) - value) for name, value in seconds.items()
        }
        links = {axis: _link(mixed, axis, messages, size) for axis, size, messages in _measured_axes(case) if size > 1}
        wire = links.pop("data", None) or LinkPart(1e12, 0.0, 1.0)
        products, attention, elementwise, large = (work[name] / mixed[name] for name in KERNELS)
        return cls(products, attention, elementwise, large, wire, links)

    def cluster(self, case: TimedCase) -> Cluster:
        """Return the machine as a cluster of one host on which ranks compute and communicate with the same cores.

        A slow link leaves the cores free while it sends.
        """
        device = DevicePart(
            "core", {"fp32": self.product_rate}, 16 << 30, self.memory_rate, matmul_efficiency=1.0,
            attention_efficiency=self.attention_rate / self.product_rate, memory_efficiency=1.0, launch_seconds=1e-5,
        )  # fmt: skip
        memory_rate = self.state_rate * case.ranks
        host = HostPart("this machine", case.ranks, self.wire, self.wire, memory_rate=memory_rate, axis_links=self.axes)
        network = Network(switch_latency=0.0)
        return Cluster(device, host, 1, network, overlaps=bool(case.link), name="this machine")


def measured_work() -> dict[str, float]:
    """Return the work of each operation that a rank times: FLOPs of products, bytes of the other operations."""
    tokens, head = SAMPLES * LENGTH, MODEL.hidden // MODEL.heads
    scores = SAMPLES * MODEL.heads * LENGTH * LENGTH * head
    return {
        "products": 12.0 * tokens * MODEL.hidden * MODEL.intermediate,
        "attention": (0.5 * 4 + 0.5 * 8 * 1.25) * scores,
        "elementwise": 4.0 * 5 * tokens * MODEL.intermediate,
        "large tensors": 4.0 * 3 * LARGE_ELEMENTS,
    }


def _measured_axes(case: TimedCase) -> list[tuple[str, int, float]]:
    """Return each measured axis, its number of ranks, and the number of latencies that a timed operation takes."""
    sizes = {axis: case.axes.get(axis, 1) for axis in ("tp", "sp", "pp")}
    data = case.ranks // (sizes["tp"] * sizes["pp"])
    # A ring all-reduce has 2 (n - 1) steps; the wire is timed over a reduction and a gather.
    tp = 2.0 * (sizes["tp"] - 1)
    return [("data", data, 2.0), ("tp", sizes["tp"], tp), ("sp", sizes["sp"], 1.0), ("pp", sizes["pp"], 1.0)]


def _link(seconds: Mapping[str, float], axis: str, steps: float, size: int) -> LinkPart:
    others = (size - 1) / size
    activation = 4.0 * SAMPLES * LENGTH * MODEL.hidden
    nbytes = {"data": 2 * 4 * WIRE_ELEMENTS * others, "tp": 2 * activation * others, "sp": activation * others}
    least = seconds[f"{axis}, one element"]
    return LinkPart(nbytes.get(axis, activation) / max(seconds[axis] - least, 1e-9), least / steps, 1.0)
