"""Layouts of a 7B and a 70B model on 8 and 64 GPUs, and what each costs by the formulas: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.comm.grid import Grid
from windlass.parallel.model_shape import PRESETS, ModelShape
from windlass.parallel.pipeline.simulation import bubble
from windlass.parallel.volumes import (
    Volume,
    Work,
    by_axis,
    data_volumes,
    parameters_here,
    sequence_volumes,
    tensor_volumes,
    volumes,
)

NODE = 8
"""GPUs of a node."""
TOKENS, EACH = 4096, 16_384
"""Tokens of a micro-batch on a rank, and of a step for each GPU."""
MODELS = {"7b": "7B", "70b": "70B"}


@dataclass(frozen=True)
class Layout:
    """Ranks on axes, and how they are used.

    Attributes:
        name: as the pictures have it.
        grid: the axes.
        stage: of ZeRO.
        ring: along sp keys and values pass round; else heads are exchanged.
    """

    name: str
    grid: Grid
    stage: int
    ring: bool = False

    @property
    def work(self) -> Work:
        """A step of `EACH` tokens for each GPU, in micro-batches of `TOKENS` on each rank along sp."""
        tokens = TOKENS * self.grid.sp
        micros = EACH * self.grid.world // (self.grid.readers * tokens)
        return Work(tokens, micros, self.stage, ulysses=1 if self.ring else 0)

    @property
    def idle(self) -> float:
        """The part of a step in which ranks of a pipeline wait, under 1F1B with equal stages."""
        return bubble("1f1b", self.grid.pp, self.work.micro_batches)

    def states(self, model: ModelShape) -> float:
        """Bytes of parameters (2), gradients (4), masters and Adam's moments (12 an element) at rest on a rank."""
        dense, experts = max((parameters_here(model, self.grid, p) for p in range(self.grid.pp)), key=sum)
        cut = self.grid.dp_shard * self.grid.ep * self.grid.sp
        cuts = [cut if self.stage >= first else 1 for first in (3, 2, 1)]
        return (dense + experts) * sum(size / ranks for size, ranks in zip((2, 4, 12), cuts, strict=True))

    def received(self, model: ModelShape) -> dict[tuple[str, bool], int]:
        """Bytes that a rank receives in a step, by axis and by whether they leave a node."""
        stages = [volumes(model, self.grid, self.work, pipe) for pipe in range(self.grid.pp)]
        most = max(stages, key=lambda found: sum(by_axis(found).values()))
        totals: dict[tuple[str, bool], int] = {}
        for volume in most:
            key = volume.axis, self.leaves_node(volume)
            totals[key] = totals.get(key, 0) + volume.nbytes
        return totals

    def leaves_node(self, volume: Volume) -> bool:
        """Whether the ranks that send it lie on several nodes."""
        axes: tuple[str, ...] = (volume.axis,)
        if volume.axis == "data":
            replicas = ("dp_replicate",) if volume.operation == "replicate" or not self.stage else ()
            axes = replicas if volume.operation == "replicate" else (*replicas, "dp_shard", "ep", "sp")
        return any(len({rank // NODE for rank in group}) > 1 for group in self.grid.groups(*axes))


LAYOUTS: dict[int, list[Layout]] = {
    8: [
        Layout("data 8, stage 1", Grid(dp_shard=8), 1),
        Layout("data 8, stage 3", Grid(dp_shard=8), 3),
        Layout("tp 8", Grid(tp=8), 0),
        Layout("tp 2 x data 4, stage 1", Grid(tp=2, dp_shard=4), 1),
        Layout("pp 8", Grid(pp=8), 0),
        Layout("sp 8 Ulysses, stage 3", Grid(sp=8), 3),
        Layout("sp 8 ring, stage 3", Grid(sp=8), 3, ring=True),
    ],
    64: [
        Layout("data 64, stage 1", Grid(dp_shard=64), 1),
        Layout("data 64, stage 3", Grid(dp_shard=64), 3),
        Layout("data 8 x 8 copies, stage 3", Grid(dp_shard=8, dp_replicate=8), 3),
        Layout("tp 8 x data 8, stage 1", Grid(tp=8, dp_shard=8), 1),
        Layout("pp 8 x data 8, stage 1", Grid(pp=8, dp_shard=8), 1),
        Layout("pp 4 x tp 8 x data 2, stage 1", Grid(pp=4, tp=8, dp_shard=2), 1),
        Layout("pp 8 x tp 8", Grid(pp=8, tp=8), 0),
        Layout("sp 8 Ulysses x data 8, stage 3", Grid(sp=8, dp_shard=8), 3),
    ],
}


@dataclass
class Bar:
    """One layout's bytes, for a row of the table and a bar of the picture."""

    layout: Layout
    states: float
    received: dict[tuple[str, bool], int] = field(default_factory=dict)

    @property
    def across(self) -> int:
        """Bytes that leave a node."""
        return sum(nbytes for (_, leaves), nbytes in self.received.items() if leaves)


def bars(model: ModelShape, gpus: int) -> list[Bar]:
    """All layouts of a model on so many GPUs."""
    return [Bar(layout, layout.states(model), layout.received(model)) for layout in LAYOUTS[gpus]]


def table() -> str:
    """The numbers behind the bars, as Markdown."""
    lines = ["| GPUs | layout | " + " | ".join(f"{name}: states, received, of it across" for name in MODELS.values())]
    lines = [f"{lines[0]} |", "|---|---|" + "---|" * len(MODELS)]
    for gpus in LAYOUTS:
        found = [bars(PRESETS[model], gpus) for model in MODELS]
        for row in zip(*found, strict=True):
            cells = (f"{in_gb(bar.states)}, {in_gb(sum(bar.received.values()))}, {in_gb(bar.across)}" for bar in row)
            lines.append(f"| {gpus} | {row[0].layout.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def in_gb(nbytes: float) -> str:
    """Gigabytes, in as many digits as matter."""
    return f"{nbytes / 1e9:,.1f}" if nbytes < 1e11 else f"{nbytes / 1e9:,.0f}"


def lengths(model: ModelShape, tokens: int, ranks: int = 8) -> dict[str, int]:
    """Bytes that a rank receives for one sequence of so many tokens, forward and backward, by what it is for."""
    shared = tokens * model.hidden * 2
    ways = {"Ulysses": 0, "ring": 1}
    found = {"tp": tensor_volumes(model.layers, shared, tokens, ranks, Work(tokens))}
    found |= {name: sequence_volumes(model, model.layers, ranks, 1, Work(tokens, ulysses=ways[name])) for name in ways}
    found["ZeRO-3"] = data_volumes("data", model.parameters, ranks, 1, Work(tokens, stage=3))
    return {name: sum(volume.nbytes for volume in volumes_of) for name, volumes_of in found.items()}
