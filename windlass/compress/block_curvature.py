"""Largest eigenvalue of the Hessian of each block's weights, by power iteration.

[Note: curvature by differences] The product of the Hessian and a direction is the difference of two gradients, at
weights shifted along the direction and against it. The shift is an extra leaf that the layer adds to its weight, so
that gradients of the parameters are not touched and every stage of ZeRO sees plain forwards and backwards. Ranks of
tensor parallelism shift their parts of a weight along their parts of one direction, and add their parts of products.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from windlass.comm.rank_group import RankGroup
from windlass.compress.compressed_layers import CompressedLayer

_PART = 1e-2  # norm of a shift, relative to the norm of the block's weights


def largest_eigenvalue(
    layers: Sequence[CompressedLayer],
    loss: Callable[[], Tensor],
    *,
    steps: int = 100,
    tolerance: float = 1e-2,
    stability: float = 1e-6,
    group: RankGroup | None = None,
) -> float:
    """Return the eigenvalue of largest magnitude of a block's Hessian. Collective over the ranks of the model.

    Args:
        layers: layers whose weights are the block.
        loss: runs the forward on the same samples each time.
        steps: iterations, at most.
        tolerance: relative change of the eigenvalue that ends the iteration.
        stability: value added to each norm before a division by it.
        group: data ranks with other samples; the Hessian is that of their mean loss.
    """
    device = next(layer.weight.device for layer in layers)
    start = [_first_direction(layer).to(device) for layer in layers]
    direction = _scaled(layers, start, stability)
    _gradients(layers, loss, [0 * one for one in direction], group)  # sets `shifted_square`
    square = _sum_of_parts(layers, [layer.compression.shifted_square for layer in layers], device)
    size, found = _PART * math.sqrt(square), 0.0
    for _ in range(steps):
        ahead = _gradients(layers, loss, [size * one for one in direction], group)
        behind = _gradients(layers, loss, [-size * one for one in direction], group)
        product = [(one - other) / (2 * size) for one, other in zip(ahead, behind, strict=True)]
        value = _inner(layers, product, direction)
        is_done = abs(value - found) <= tolerance * abs(value)
        found, direction = value, _scaled(layers, product, stability)
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


def _gradients(
    layers: Sequence[CompressedLayer], loss: Callable[[], Tensor], shifts: Sequence[Tensor], group: RankGroup | None
) -> list[Tensor]:
    """Return the gradients at shifted weights, averaged over the data ranks and summed where ranks have parts."""
    leaves = [shift.detach().clone().requires_grad_() for shift in shifts]
    for layer, leaf in zip(layers, leaves, strict=True):
        layer.compression.shift = leaf
    try:
        with torch.enable_grad():
            found = torch.autograd.grad(loss().float(), leaves, allow_unused=True)
    finally:
        for layer in layers:
            layer.compression.shift = None
    gradients = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]
    if group is not None and group.size > 1:
        for one in gradients:
            group.all_reduce(one).div_(group.size)
    for layer, one in zip(layers, gradients, strict=True):
        if layer.compression.partial is not None:
            layer.compression.partial.all_reduce(one)
    return gradients


def _scaled(layers: Sequence[CompressedLayer], values: Sequence[Tensor], stability: float) -> list[Tensor]:
    norm = _inner(layers, values, values) ** 0.5
    return [one / (norm + stability) for one in values]


def _inner(layers: Sequence[CompressedLayer], values: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    sums = [float((one * other).sum()) for one, other in zip(values, others, strict=True)]
    return _sum_of_parts(layers, sums, values[0].device)


def _sum_of_parts(layers: Sequence[CompressedLayer], sums: Sequence[float], device: torch.device) -> float:
    """Return the sum over layers and, for the weights that ranks hold in parts, over ranks: equal on all of them."""
    axis = next((layer.compression.sharded.axis for layer in layers if layer.compression.sharded is not None), None)
    if axis is None:
        return sum(sums)
    # a weight that all ranks hold counts on the first one
    held = [layer.compression.sharded is not None or axis.index == 0 for layer in layers]
    own = sum(one for one, is_held in zip(sums, held, strict=True) if is_held)
    return float(axis.all_reduce(torch.tensor(own, dtype=torch.float64, device=device)))
