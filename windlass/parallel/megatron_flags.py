"""Placement of parameters that a script shards itself, read from the attributes with which Megatron flags them."""

from __future__ import annotations

from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.placement import Placement, Ranges, has_placement, make_ranges_along, set_placement

_FLAGS = ("tensor_model_parallel", "model_parallel")


def has_flagged_parameters(model: nn.Module) -> bool:
    """Return True if any parameter is flagged as sharded."""
    return any(_is_flagged(parameter) for parameter in model.parameters())


def place_flagged_parameters(model: nn.Module, axis: MeshAxis) -> int:
    """Set the placement of every parameter with `tensor_model_parallel` or `model_parallel` set, as sharded along
    `axis`.

    The parameter is sharded along its `partition_dim` (0 if that is missing, or negative, which is Megatron's default),
    in `partition_stride` blocks (1 by default). Each rank holds an equal slice of each block.

    Returns:
        Number of parameters whose placement was set. Parameters that have a placement already are skipped, and all
        parameters on an axis of one rank.

    Raises:
        ModelError: a parameter has no dimension `partition_dim`, its size along that dimension is not a multiple of its
            `partition_stride`, or the stride is less than 1.
    """
    found = 0
    for name, parameter in model.named_parameters():
        if axis.size == 1 or has_placement(parameter) or not _is_flagged(parameter):
            continue
        dim = max(0, int(getattr(parameter, "partition_dim", 0)))
        stride = int(getattr(parameter, "partition_stride", 1))
        if dim >= parameter.dim():
            raise ModelError(
                f"{name!r} has partition_dim {dim}, and shape {tuple(parameter.shape)}; name one of its dims"
            )
        if stride < 1 or parameter.shape[dim] % stride:
            raise ModelError(
                f"{name!r} has {parameter.shape[dim]} elements along dim {dim}, not a multiple of its "
                f"partition_stride {stride}; set one that divides them"
            )
        shape = list(parameter.shape)
        shape[dim] *= axis.size
        ranges = _strided_ranges(shape[dim], stride, axis)
        set_placement(
            parameter,
            Placement(tuple(shape), make_ranges_along(shape, dim, ranges), sharded_axes=frozenset({axis.name})),
        )
        found += 1
    return found


def _is_flagged(parameter: nn.Parameter) -> bool:
    return any(getattr(parameter, flag, False) for flag in _FLAGS)


def _strided_ranges(size: int, blocks: int, axis: MeshAxis) -> Ranges:
    """Return this rank's slice of each of `blocks` equal blocks."""
    block = size // blocks
    each = block // axis.size
    return tuple(
        (number * block + axis.index * each, number * block + (axis.index + 1) * each) for number in range(blocks)
    )
