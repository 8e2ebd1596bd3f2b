"""All-gather of full tensors from the parts on the ranks, for tests and export."""

from __future__ import annotations

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.full_parameters import write_local_shard
from windlass.parallel.placement import Placement


def gather_full_tensor(local: torch.Tensor, placement: Placement, *axes: MeshAxis) -> torch.Tensor:
    """Gather the full tensor on every rank of the axes. Collective.

    Args:
        local: this rank's part: a parameter, its gradient, or an optimizer state of its shape.
        placement: placement of the parameter; ranks along `placement.sharded_axes` hold other parts.
        axes: the mesh axes; axes along which the tensor is not sharded are ignored.

    Raises:
        ValueError: an axis along which the tensor is sharded is missing.
    """
    missing = placement.sharded_axes - {axis.name for axis in axes}
    if missing:
        raise ValueError(
            f"the tensor is sharded over {sorted(placement.sharded_axes)}; pass the missing axes {sorted(missing)} too"
        )
    parts = [(placement, local.detach().reshape(-1))]
    for axis in axes:
        if axis.name in placement.sharded_axes:
            parts = _all_gather_parts(parts, axis)
    full = local.new_empty(placement.global_shape)
    for placed, flat in parts:
        write_local_shard(flat.view(placed.local_shape), full, placed)
    return full


def _all_gather_parts(
    parts: list[tuple[Placement, torch.Tensor]], axis: MeshAxis
) -> list[tuple[Placement, torch.Tensor]]:
    """All-gather the parts of all ranks along the axis."""
    placements = axis.all_gather_object([placed for placed, _ in parts])
    counts = [[torch.Size(placed.local_shape).numel() for placed in of_rank] for of_rank in placements]
    flat = axis.all_gather(torch.cat([part for _, part in parts]), 0, [sum(of_rank) for of_rank in counts])
    sizes = [count for of_rank in counts for count in of_rank]
    everything = [placed for of_rank in placements for placed in of_rank]
    return list(zip(everything, flat.split(sizes), strict=True))
