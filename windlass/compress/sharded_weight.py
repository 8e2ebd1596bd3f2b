"""Weight of a compressed layer that is sharded over tensor-parallel ranks, but rounded and masked in full."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.placement import get_placement
from windlass.parallel.tensor.parameter_sharding import mark_partial_gradient


@dataclass(frozen=True)
class ShardedWeight:
    """Sharding of a weight over the ranks of an axis along one dimension.

    Attributes:
        dim: sharded dimension: 0 for outputs, 1 for inputs.
        places: for each rank, the positions of its shard along `dim`.
        size: size of the full weight along `dim`.
    """

    axis: MeshAxis
    dim: int
    places: tuple[Tensor, ...]
    size: int

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """All-gather the shards of a tensor along `dim`, without gradients, and return the full tensor. Collective."""
        parts = self.axis.all_gather(local.detach(), dim, [len(places) for places in self.places])
        shape = list(local.shape)
        shape[dim] = self.size
        whole = parts.new_empty(shape)
        return whole.index_copy_(dim, torch.cat(self.places).to(whole.device), parts)

    def local(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a full tensor along `dim`; a tensor of size 1 along `dim`, which broadcasts, is
        returned unchanged."""
        if whole.shape[dim] == 1 != self.size:
            return whole
        return whole.index_select(dim, self.places[self.axis.index].to(whole.device))


def find_sharded_weight(weight: nn.Parameter, axis: MeshAxis) -> ShardedWeight | None:
    """Return the sharding of a weight over an axis; None: each rank has the full weight. Collective."""
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
    """Return True if a parameter is replicated over an axis, but each rank computes only a part of its gradient."""
    return axis.name in get_placement(parameter).partial_axes


def mark_scores(scores: nn.Parameter, axis: MeshAxis) -> None:
    """Record that each rank computes only the part of the scores' gradient that follows from its shard of the
    weight."""
    mark_partial_gradient(scores, axis.name)
