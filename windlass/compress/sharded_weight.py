"""Weight of a compressed layer of which tensor-parallel ranks hold parts: it is rounded and masked as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.placement import get_placement
from windlass.parallel.tensor.parameter_sharding import mark_partial_gradient


@dataclass(frozen=True)
class ShardedWeight:
    """Parts of a weight along one dimension.

    Attributes:
        dim: 0: outputs, 1: inputs.
        places: for each rank, the positions of its part along `dim`.
        size: size of the whole along `dim`.
    """

    axis: MeshAxis
    dim: int
    places: tuple[Tensor, ...]
    size: int

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """Return the whole of a tensor of which each rank holds these parts along a dimension. Collective."""
        parts = self.axis.all_gather(local.detach(), dim, [len(places) for places in self.places])
        shape = list(local.shape)
        shape[dim] = self.size
        whole = parts.new_empty(shape)
        return whole.index_copy_(dim, torch.cat(self.places).to(whole.device), parts)

    def local(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part; the tensor itself if it has one element along the dimension, for broadcasting."""
        if whole.shape[dim] == 1 != self.size:
            return whole
        return whole.index_select(dim, self.places[self.axis.index].to(whole.device))


def find_sharded_weight(weight: nn.Parameter, axis: MeshAxis) -> ShardedWeight | None:
    """Return the parts of a weight over an axis; None: each rank has the whole. Collective."""
    placement = get_placement(weight)
    if axis.name not in placement.sharded_axes:
        return None
    dim = next(d for d, ranges in enumerate(placement.ranges) if ranges != ((0, placement.global_shape[d]),))
    places = tuple(
        torch.cat([torch.arange(start, stop) for start, stop in ranges])
        for ranges in axis.all_gather_object(placement.ranges[dim])
    )
    return ShardedWeight(axis, dim, places, placement.global_shape[dim])


def is_partial(parameter: nn.Parameter, axis: MeshAxis) -> bool:
    """Return True if each rank of an axis computes a part of the gradient of a whole parameter."""
    return axis.name in get_placement(parameter).partial_axes


def mark_scores(scores: nn.Parameter, axis: MeshAxis) -> None:
    """Record that each rank computes the part of the scores' gradient that its part of the weight gives."""
    mark_partial_gradient(scores, axis.name)
