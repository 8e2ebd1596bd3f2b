"""Largest eigenvalue of the Hessian of each block's weights, by power iteration.

[Note: curvature by differences] The product of the Hessian and a direction is the difference of two gradients, at
weights shifted along the direction and against it. The shift is an extra leaf that the layer adds to its weight, so
that gradients of the parameters are not touched and every stage of ZeRO sees plain forwards and backwards.
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
    direction = _scaled([_first_direction(layer).to(device) for layer in layers], stability)
    _gradients(layers, loss, [0 * one for one in direction], group)  # sets `shifted_square`
    size, found = _PART * math.sqrt(sum(layer.compression.shifted_square for layer in layers)), 0.0
    for _ in range(steps):
        ahead = _gradients(layers, loss, [size * one for one in direction], group)
        behind = _gradients(layers, loss, [-size * one for one in direction], group)
        product = [(one - other) / (2 * size) for one, other in zip(ahead, behind, strict=True)]
        value = sum(float((one * other).sum()) for one, other in zip(product, direction, strict=True))
        is_done = abs(value - found) <= tolerance * abs(value)
        found, direction = value, _scaled(product, stability)
        if is_done:
            break
    return found


def _first_direction(layer: CompressedLayer) -> Tensor:
    """Return a direction that is the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(layer.compression.name.encode()))
    return torch.randn(layer.weight.shape, generator=generator)


def _gradients(
    layers: Sequence[CompressedLayer], loss: Callable[[], Tensor], shifts: Sequence[Tensor], group: RankGroup | None
) -> list[Tensor]:
    """Return the gradients at shifted weights, averaged over the data ranks."""
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
    return gradients


def _scaled(values: Sequence[Tensor], stability: float) -> list[Tensor]:
    norm = sum(float(one.square().sum()) for one in values) ** 0.5
    return [one / (norm + stability) for one in values]
