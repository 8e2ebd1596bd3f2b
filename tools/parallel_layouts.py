"""Layouts of a 7B and a 70B model on 8 and 64 GPUs, and the cost of each by the formulas; arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.comm_volumes import (
    CommVolume,
    StepWorkload,
    compute_data_parallel_volumes,
    compute_sequence_parallel_volumes,
    compute_step_volumes,
    compute_tensor_parallel_volumes,
    count_local_parameters,
    sum_bytes_by_axis,
)
from windlass.parallel.model_shape import PRESETS, ModelShape
from windlass.parallel.pipeline.schedule_simulation import compute_bubble_fraction

GPUS_PER_NODE = 8
"""GPUs of a node."""
TOKENS_PER_MICRO_BATCH, TOKENS_PER_GPU = 4096, 16_384
"""Tokens of a micro-batch on a rank, and of a step for each GPU."""
MODEL_TITLES = {"7b": "7B", "70b": "70B"}


@dataclass(frozen=True)
class GpuLayout:
    """Number of ranks along each axis, and settings of the axes.

    Attributes:
        name: label in the pictures.
        grid: the axes.
        zero_stage: ZeRO stage.
        uses_ring_attention: True for ring attention along sp, False for Ulysses.
    """

    name: str
    grid: MeshShape
    zero_stage: int
    uses_ring_attention: bool = False

    @property
    def workload(self) -> StepWorkload:
        """Workload of a step: `TOKENS_PER_GPU` tokens per GPU, in micro-batches of `TOKENS_PER_MICRO_BATCH` on each
        rank along sp."""
        tokens = TOKENS_PER_MICRO_BATCH * self.grid.sp
        micros = TOKENS_PER_GPU * self.grid.world // (self.grid.data_loading_size * tokens)
        return StepWorkload(tokens, micros, self.zero_stage, ulysses_degree=1 if self.uses_ring_attention else 0)

    @property
    def idle_fraction(self) -> float:
        """Fraction of a step in which a pipeline rank is idle, under 1F1B with equal stages."""
        return compute_bubble_fraction("1f1b", self.grid.pp, self.workload.micro_batches)

    def state_bytes(self, model: ModelShape) -> float:
        """Return a rank's bytes of parameters (2 an element), gradients (4), and master weights with moments (12)."""
        dense, experts = max((count_local_parameters(model, self.grid, p) for p in range(self.grid.pp)), key=sum)
        cut = self.grid.dp_shard * self.grid.ep * self.grid.sp
        cuts = [cut if self.zero_stage >= first else 1 for first in (3, 2, 1)]
        return (dense + experts) * sum(size / ranks for size, ranks in zip((2, 4, 12), cuts, strict=True))

    def received_bytes(self, model: ModelShape) -> dict[tuple[str, bool], int]:
        """Return the bytes that a rank receives in a step, by axis and by whether they leave the node."""
        stages = [compute_step_volumes(model, self.grid, self.workload, pipe) for pipe in range(self.grid.pp)]
        most = max(stages, key=lambda found: sum(sum_bytes_by_axis(found).values()))
        totals: dict[tuple[str, bool], int] = {}
        for volume in most:
            key = volume.axis, self.leaves_node(volume)
            totals[key] = totals.get(key, 0) + volume.nbytes
        return totals

    def leaves_node(self, volume: CommVolume) -> bool:
        """Return True if the ranks of the collective are on several nodes."""
        axes: tuple[str, ...] = (volume.axis,)
        if volume.axis == "data":
            replicas = ("dp_replicate",) if volume.operation == "replicate" or not self.zero_stage else ()
            axes = replicas if volume.operation == "replicate" else (*replicas, "dp_shard", "ep", "sp")
        return any(len({rank // GPUS_PER_NODE for rank in group}) > 1 for group in self.grid.groups(*axes))


LAYOUTS: dict[int, list[GpuLayout]] = {
    8: [
        GpuLayout("data 8, stage 1", MeshShape(dp_shard=8), 1),
        GpuLayout("data 8, stage 3", MeshShape(dp_shard=8), 3),
        GpuLayout("tp 8", MeshShape(tp=8), 0),
        GpuLayout("tp 2 x data 4, stage 1", MeshShape(tp=2, dp_shard=4), 1),
        GpuLayout("pp 8", MeshShape(pp=8), 0),
        GpuLayout("sp 8 Ulysses, stage 3", MeshShape(sp=8), 3),
        GpuLayout("sp 8 ring, stage 3", MeshShape(sp=8), 3, uses_ring_attention=True),
    ],
    64: [
        GpuLayout("data 64, stage 1", MeshShape(dp_shard=64), 1),
        GpuLayout("data 64, stage 3", MeshShape(dp_shard=64), 3),
        GpuLayout("data 8 x 8 copies, stage 3", MeshShape(dp_shard=8, dp_replicate=8), 3),
        GpuLayout("tp 8 x data 8, stage 1", MeshShape(tp=8, dp_shard=8), 1),
        GpuLayout("pp 8 x data 8, stage 1", MeshShape(pp=8, dp_shard=8), 1),
        GpuLayout("pp 4 x tp 8 x data 2, stage 1", MeshShape(pp=4, tp=8, dp_shard=2), 1),
        GpuLayout("pp 8 x tp 8", MeshShape(pp=8, tp=8), 0),
        GpuLayout("sp 8 Ulysses x data 8, stage 3", MeshShape(sp=8, dp_shard=8), 3),
    ],
}


@dataclass
class LayoutBytes:
    """Bytes per rank of one layout, for a row of the table and a bar of the picture."""

    layout: GpuLayout
    state_bytes: float
    received_bytes: dict[tuple[str, bool], int] = field(default_factory=dict)

    @property
    def cross_node_bytes(self) -> int:
        """Received bytes that leave the node."""
        return sum(nbytes for (_, leaves), nbytes in self.received_bytes.items() if leaves)


def layout_bytes(model: ModelShape, gpus: int) -> list[LayoutBytes]:
    """Return the bytes of all layouts of a model on this number of GPUs."""
    return [LayoutBytes(layout, layout.state_bytes(model), layout.received_bytes(model)) for layout in LAYOUTS[gpus]]


def layout_table() -> str:
    """Return a Markdown table of the bytes of all layouts."""
    lines = [
        "| GPUs | layout | " + " | ".join(f"{name}: states, received, of it across" for name in MODEL_TITLES.values())
    ]
    lines = [f"{lines[0]} |", "|---|---|" + "---|" * len(MODEL_TITLES)]
    for gpus in LAYOUTS:
        results = [layout_bytes(PRESETS[model], gpus) for model in MODEL_TITLES]
        for row in zip(*results, strict=True):
            cells = (
                ", ".join(map(format_gb, (bar.state_bytes, sum(bar.received_bytes.values()), bar.cross_node_bytes)))
                for bar in row
            )
            lines.append(f"| {gpus} | {row[0].layout.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def format_gb(nbytes: float) -> str:
    """Format bytes as gigabytes, with one decimal below 100 GB."""
    return f"{nbytes / 1e9:,.1f}" if nbytes < 1e11 else f"{nbytes / 1e9:,.0f}"


def bytes_by_sequence_method(model: ModelShape, tokens: int, ranks: int = 8) -> dict[str, int]:
    """Return the received bytes per rank for one sequence, forward and backward, by method."""
    shared = tokens * model.hidden * 2
    ways = {"Ulysses": 0, "ring": 1}
    results = {"tp": compute_tensor_parallel_volumes(model.layers, shared, tokens, ranks, StepWorkload(tokens))}
    results |= {
        name: compute_sequence_parallel_volumes(
            model, model.layers, ranks, 1, StepWorkload(tokens, ulysses_degree=ways[name])
        )
        for name in ways
    }
    results["ZeRO-3"] = compute_data_parallel_volumes("data", model.numel, ranks, 1, StepWorkload(tokens, zero_stage=3))
    return {name: sum(volume.nbytes for volume in volumes_of) for name, volumes_of in results.items()}
