"""Largest eigenvalue of the Hessian of each block's weights, by power iteration.

[Note: curvature by differences] The product of the Hessian and a direction is approximated by the difference of two
gradients, at weights shifted along the direction and against it, divided by the distance. The shift is an extra leaf
tensor that the layer adds to its weight, so that gradients of the parameters are not touched and every stage of ZeRO
runs plain forwards and backwards. Tensor-parallel ranks shift their shards of a weight along their shards of one
direction, and sum their parts of products. Ranks of a pipeline run each forward and backward together; ranks without
the block add nothing to norms and products.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.rank_group import RankGroup
from windlass.compress.compressed_layers import CompressedLayer

_PART = 1e-2  # norm of a shift, relative to the norm of the block's weights, or absolute if they are all 0


# Function that runs a forward and a backward, on the same samples each time. It returns the gradients of the mean loss
# with respect to the shifts of the layers; None for a shift that the loss does not depend on.
ShiftGradients = Callable[[Sequence[Tensor]], Sequence[Tensor | None]]


@dataclass(frozen=True)
class CurvatureRanks:
    """Ranks over which curvature is measured.

    Attributes:
        data: data-parallel ranks, each with other samples; the Hessian is that of their mean loss. None: this rank
            alone.
        stages: ranks of the pipeline, all of which take part in the measurement of each block; None: no pipeline.
    """

    data: RankGroup | None = None
    stages: MeshAxis | None = None


def largest_eigenvalue(
    layers: Sequence[CompressedLayer],
    gradients: ShiftGradients,
    device: torch.device,
    *,
    steps: int = 100,
    tolerance: float = 1e-2,
    stability: float = 1e-6,
    ranks: CurvatureRanks | None = None,
) -> float:
    """Return the eigenvalue of largest magnitude of a block's Hessian. Collective over the ranks of the model.

    Args:
        layers: layers whose weights are the block; empty on a rank of a pipeline without layers of the block.
        gradients: function that returns the gradients of the loss with respect to the shifts of these layers.
        device: device of the layers.
        steps: maximum number of iterations.
        tolerance: relative change of the eigenvalue that ends the iteration.
        stability: value added to each norm before a division by it.
        ranks: data-parallel ranks and ranks of the pipeline; None: neither.
    """
    block = _Block(layers, gradients, device, ranks or CurvatureRanks())
    direction = block.normalized([_first_direction(layer).to(device) for layer in layers], stability)
    block.gradients_at([0 * one for one in direction])  # sets `shifted_square`
    square = block.sum_of_parts([layer.compression.shifted_square for layer in layers])
    size, found = _PART * (math.sqrt(square) or 1.0), 0.0
    for _ in range(steps):
        ahead = block.gradients_at([size * one for one in direction])
        behind = block.gradients_at([-size * one for one in direction])
        product = [(one - other) / (2 * size) for one, other in zip(ahead, behind, strict=True)]
        value = block.inner_product(product, direction)
        is_done = abs(value - found) <= tolerance * abs(value)
        found, direction = value, block.normalized(product, stability)
        if is_done:
            break
    return found


def _first_direction(layer: CompressedLayer) -> Tensor:
    """Return this rank's part of a direction that is the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(layer.compression.name.encode()))
    shape, sharded = list(layer.weight.shape), layer.compression.sharded
    if sharded is None:
        return torch.randn(shape, generator=generator)
    shape[sharded.dim] = sharded.size
    return sharded.local(torch.randn(shape, generator=generator), sharded.dim)


class _Block:
    """Weights of one block, and sums over the ranks that have them."""

    def __init__(
        self,
        layers: Sequence[CompressedLayer],
        gradients: ShiftGradients,
        device: torch.device,
        ranks: CurvatureRanks,
    ) -> None:
        self._layers, self._gradients, self._device, self._ranks = layers, gradients, device, ranks

    def gradients_at(self, shifts: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients at shifted weights, averaged over data-parallel ranks. Gradients of which
        tensor-parallel ranks compute parts are summed over these ranks.
        """
        leaves = [shift.detach().clone().requires_grad_() for shift in shifts]
        for layer, leaf in zip(self._layers, leaves, strict=True):
            layer.compression.shift = leaf
        try:
            with torch.enable_grad():
                found = self._gradients(leaves)
        finally:
            for layer in self._layers:
                layer.compression.shift = None
        gradients = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]
        data = self._ranks.data
        if data is not None and data.size > 1:
            for one in gradients:
                data.all_reduce(one).div_(data.size)
        for layer, one in zip(self._layers, gradients, strict=True):
            if layer.compression.partial is not None:
                layer.compression.partial.all_reduce(one)
        return gradients

    def normalized(self, values: Sequence[Tensor], stability: float) -> list[Tensor]:
        """Return values divided by their norm."""
        norm = self.inner_product(values, values) ** 0.5
        return [one / (norm + stability) for one in values]

    def inner_product(self, values: Sequence[Tensor], others: Sequence[Tensor]) -> float:
        """Return the inner product of two lists with a tensor for each layer."""
        return self.sum_of_parts([float((one * other).sum()) for one, other in zip(values, others, strict=True)])

    def sum_of_parts(self, sums: Sequence[float]) -> float:
        """Return the sum over layers, over the ranks that hold parts of weights, and over the ranks of a pipeline. The
        result is equal on all of these ranks. Collective."""
        parts = [layer.compression.sharded for layer in self._layers]
        axis, total = next((one.axis for one in parts if one is not None), None), sum(sums)
        if axis is not None:
            # a weight that all ranks hold in full counts on the first rank only
            held = [one is not None or axis.index == 0 for one in parts]
            total = self._sum_over(axis, sum(one for one, is_held in zip(sums, held, strict=True) if is_held))
        stages = self._ranks.stages
        return self._sum_over(stages, total) if stages is not None and stages.size > 1 else total

    def _sum_over(self, axis: MeshAxis, value: float) -> float:
        return float(axis.all_reduce(torch.tensor(value, dtype=torch.float64, device=self._device)))
