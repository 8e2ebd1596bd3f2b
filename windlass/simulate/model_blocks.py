"""Blocks and units of the model chunks on one rank, with the computation of each block."""

from __future__ import annotations

from dataclasses import dataclass, field

from windlass.simulate.hardware_parts import DevicePart
from windlass.simulate.layer_work import (
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
from windlass.simulate.rank_units import EMBEDDING, HEAD, NORM, RankUnits, SimulatedUnit
from windlass.simulate.step_workload import StepWork


@dataclass(eq=False)
class SimulatedBlock:
    """Module whose call unshards units.

    Attributes:
        kind: `embedding`, `layer`, `norm` (the last norm, which is computed with the head) or `head`.
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
        number: Index among all chunks; chunk `c` is on stage `c % pp`.
        follows_trained: A block of an earlier chunk is trained, so that the chunk computes the gradient of its input.
    """

    number: int
    blocks: list[SimulatedBlock]
    follows_trained: bool = False

    @property
    def is_trained(self) -> bool:
        """True if a block of the chunk is trained."""
        return any(map(_is_trained, self.blocks))

    @property
    def backward_order(self) -> list[SimulatedBlock]:
        """Blocks in the order of their backward. Frozen blocks in front of the first trained one have no backward."""
        trained = [self.follows_trained or _is_trained(block) for block in self.blocks]
        return list(reversed(self.blocks[trained.index(True) :])) if any(trained) else []

    @property
    def has_layers(self) -> bool:
        """True if a layer is in the chunk, and not only the embedding or the head."""
        return any(block.kind == "layer" for block in self.blocks)


def _is_trained(block: SimulatedBlock) -> bool:
    return not block.units or any(unit.trainable for unit in block.units)


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
        tp_rank=work.tp_rank,
    )


def build_chunks(work: StepWork, device: DevicePart, stage: int) -> tuple[list[ModelChunk], list[SimulatedUnit]]:
    """Build the chunks of a pipeline stage, or the full model as one chunk.

    Returns:
        The chunks, and all units of the stage in model order.
    """
    sizes, style = rank_sizes(work), work.style
    units = RankUnits(work, sizes, stage)
    of_block = units.of_block
    forward = layer_forward(work.shape, sizes, style, device)
    # The gradients of a layer are copied into the flat buffer from which they are reduced.
    nbytes = units.layer_numel * (style.itemsize + work.accumulation_bytes)
    backward = [
        *layer_backward(work.shape, sizes, style, device),
        Segment("gradients", (Operation("other", 0.0, nbytes, 1, style.dtype),)),
    ]
    again = recomputed(forward, style)
    chunks = []
    for number in range(stage, work.chunks, work.grid.pp):
        blocks = []
        if number == 0:
            first, last = embedding_work(work.shape, sizes, style)
            blocks.append(SimulatedBlock(EMBEDDING, EMBEDDING, [first], [last], units=of_block.get(EMBEDDING, [])))
        for layer in range(work.layer_bounds[number], work.layer_bounds[number + 1]):
            name = f"layer {layer}"
            blocks.append(SimulatedBlock(name, "layer", forward, backward, again, of_block.get(name, [])))
        if number == work.chunks - 1:
            first, last = head_work(work.shape, sizes, style)
            blocks.append(SimulatedBlock(NORM, NORM, [], [], units=of_block.get(NORM, [])))
            blocks.append(SimulatedBlock(HEAD, HEAD, [first], [last], units=of_block.get(HEAD, [])))
        chunks.append(ModelChunk(number, blocks))
    return chunks, units.units


def global_model_flops(work: StepWork, device: DevicePart) -> float:
    """Return the FLOPs of a step of the global batch, without recomputation: three times those of its forward."""
    sizes = layer_sizes(work.shape, work.samples, work.length, tp=1, sp=1, ep=1, ulysses=1, sequence_norms=False)
    layer = sum(one.model_flops for one in layer_forward(work.shape, sizes, work.style, device))
    head = head_work(work.shape, sizes, work.style)[0].model_flops
    batches = work.volumes.micro_batches * work.grid.data_loading_size
    return 3.0 * batches * (work.shape.layers * layer + head)
