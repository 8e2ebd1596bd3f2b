"""Blocks and units of one model chunk on one rank: what is computed, all-gathered, reduced and updated together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from windlass.simulate.layer_work import (
    ComputeStyle,
    LayerSizes,
    Operation,
    Segment,
    embedding_work,
    head_work,
    layer_backward,
    layer_forward,
    layer_sizes,
    recomputed,
)
from windlass.simulate.parts import DevicePart
from windlass.storage.slot import Tier
from windlass.zero.core.unit import ShardState

if TYPE_CHECKING:
    from windlass.simulate.event_loop import SimulatedTask
    from windlass.simulate.step_workload import StepWork


@dataclass(eq=False)
class SimulatedUnit:
    """Unit without memory. The engine's prefetcher reads `numel`, `shard_state` and `tier`.

    Attributes:
        numel: Elements on this rank before ZeRO shards them.
        is_expert: Its parameters are experts, which fewer ranks share.
        persistent: It is never resharded.
        gathered: The task that gathers it, while it is unsharded.
        uses: Blocks that use it.
        backwards: Number of blocks whose backward of this micro-batch is done.
    """

    name: str
    numel: int
    is_expert: bool = False
    persistent: bool = False
    tier: Tier = Tier.DEVICE
    shard_state: ShardState = ShardState.SHARDED
    gathered: SimulatedTask | None = None
    uses: int = 1
    backwards: int = 0


@dataclass(eq=False)
class SimulatedBlock:
    """Module whose call unshards units.

    Attributes:
        kind: `embedding`, `layer` or `head`.
        forward, backward: Segments in the order of their computation.
        again: Segments of the forward that run again before the backward.
    """

    name: str
    kind: str
    forward: list[Segment]
    backward: list[Segment]
    again: list[Segment] = field(default_factory=list)
    units: list[SimulatedUnit] = field(default_factory=list)


@dataclass
class ModelChunk:
    """Part of the model between two transfers of a pipeline.

    Attributes:
        number: Its place among all chunks; chunk `c` is on stage `c % pp`.
        persistent: Unit of its small parameters, which are never resharded.
    """

    number: int
    blocks: list[SimulatedBlock]
    persistent: SimulatedUnit | None

    @property
    def units(self) -> list[SimulatedUnit]:
        """All units, each once, in model order."""
        found = dict.fromkeys(unit for block in self.blocks for unit in block.units)
        return [*found, *([self.persistent] if self.persistent is not None else [])]


def rank_sizes(work: StepWork) -> LayerSizes:
    """Return the sizes of one rank's part of a layer."""
    return layer_sizes(
        work.shape,
        work.samples,
        work.length,
        tp=work.grid.tp,
        sp=work.grid.sp,
        ep=work.grid.ep,
        ulysses=work.volumes.ulysses_degree or work.grid.sp,
        sequence_norms=work.volumes.tp_sequence_norms,
    )


def build_chunk(work: StepWork, device: DevicePart, number: int) -> ModelChunk:
    """Build chunk `number` of the pipeline, or the whole model if there is one chunk."""
    shape, sizes, style = work.shape, rank_sizes(work), work.style
    blocks, small = [], 0
    first, last = number == 0, number == work.chunks - 1
    table = None
    if first:
        table = SimulatedUnit("embedding", shape.embedding_numel // work.grid.tp)
        forward, backward = embedding_work(shape, sizes, style)
        blocks.append(SimulatedBlock("embedding", "embedding", [forward], [backward], units=[table]))
    before = sum(work.chunk_layers(chunk) for chunk in range(number))
    forward_segments = layer_forward(shape, sizes, style, device)
    backward_segments = [
        *layer_backward(shape, sizes, style, device),
        Segment("gradients", (_accumulation(work, style),)),
    ]
    again = recomputed(forward_segments, style)
    for layer in range(before, before + work.chunk_layers(number)):
        units, kept = _layer_units(work, f"layer {layer}")
        small += kept
        blocks.append(SimulatedBlock(f"layer {layer}", "layer", forward_segments, backward_segments, again, units))
    if last:
        forward, backward = head_work(shape, sizes, style)
        unit = table if shape.tied and table is not None else None
        if unit is None:
            unit = SimulatedUnit("head", shape.embedding_numel // work.grid.tp)
        else:
            unit.uses = 2
        if shape.hidden < work.persistence_threshold:
            small += shape.hidden
        else:
            unit.numel += shape.hidden
        blocks.append(SimulatedBlock("head", "head", [forward], [backward], units=[unit]))
    persistent = SimulatedUnit(f"small parameters {number}", small, persistent=True) if small else None
    return ModelChunk(number, blocks, persistent)


def _layer_units(work: StepWork, name: str) -> tuple[list[SimulatedUnit], int]:
    """Return the units of one layer, and the elements of its parameters that are never resharded."""
    shape, tp = work.shape, work.grid.tp
    matrix, keys = shape.hidden * shape.resolved_head_dim, shape.resolved_kv_heads
    sharded = [(shape.heads * matrix, 2), (keys * matrix, 2)]
    whole = [(shape.hidden, 2), (shape.experts * shape.hidden, 1)]
    ways = 3 if shape.gated else 2
    if not shape.experts:
        sharded.append((shape.feed_forward_numel // ways, ways))
    large = small = 0
    for numel, count in sharded:
        part = numel * count // tp
        large, small = (large, small + part) if numel < work.persistence_threshold else (large + part, small)
    for numel, count in whole:
        part = numel * count
        large, small = (large, small + part) if numel < work.persistence_threshold else (large + part, small)
    units = [SimulatedUnit(name, large)] if large else []
    if shape.experts:
        numel = shape.experts * shape.feed_forward_numel // (work.grid.ep * tp)
        units.append(SimulatedUnit(f"{name} experts", numel, is_expert=True))
    return units, small


def _accumulation(work: StepWork, style: ComputeStyle) -> Operation:
    """Return the copy of a layer's gradients into the flat buffer from which they are reduced."""
    numel = sum(unit.numel for unit in _layer_units(work, "")[0])
    return Operation("other", 0.0, numel * (style.itemsize + work.accumulation_bytes), 1, style.dtype)


def global_model_flops(work: StepWork, device: DevicePart) -> float:
    """Return the FLOPs of a step of the global batch, without recomputation: three times those of its forward."""
    sizes = layer_sizes(work.shape, work.samples, work.length, tp=1, sp=1, ep=1, ulysses=1, sequence_norms=False)
    layer = sum(one.model_flops for one in layer_forward(work.shape, sizes, work.style, device))
    head = head_work(work.shape, sizes, work.style)[0].model_flops
    batches = work.volumes.micro_batches * work.grid.data_loading_size
    return 3.0 * batches * (work.shape.layers * layer + head)
