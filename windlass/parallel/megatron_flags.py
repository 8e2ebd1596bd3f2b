"""Parameters that a script's own layers cut, by the attributes with which Megatron and its users flag them."""

from __future__ import annotations

from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.placement import Placement, Ranges, has_placement, make_ranges_along, set_placement

_FLAGS = ("tensor_model_parallel", "model_parallel")


def has_flagged_parameters(model: nn.Module) -> bool:
    """Whether a parameter says that it is cut."""
    return any(_is_flagged(parameter) for parameter in model.parameters())


def place_flagged_parameters(model: nn.Module, axis: MeshAxis) -> int:
    """Say of every parameter with `tensor_model_parallel` or `model_parallel` set that it is a part along `axis`.

    It was cut along its `partition_dim` (0 where that is missing, or negative as Megatron's is by default), in
    `partition_stride` blocks of which each rank has a slice (1 by default), as evenly as it is here on every rank.

    Returns:
        How many parameters there are of those.

    Raises:
        ModelError: a stride does not divide a parameter, or there is no such dimension.
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
                f"partition_stride {stride}"
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
    """This rank's slice of each of so many blocks."""
    block = size // blocks
    each = block // axis.size
    return tuple(
        (number * block + axis.index * each, number * block + (axis.index + 1) * each) for number in range(blocks)
    )
