"""Parameters that a script's own layers cut, by the attributes with which Megatron and its users flag them."""

from __future__ import annotations

from torch import nn

from windlass.base.errors import ModelError
from windlass.comm.axis import Axis
from windlass.parallel.placement import Placement, Ranges, along, is_placed, place

_FLAGS = ("tensor_model_parallel", "model_parallel")


def any_flagged(model: nn.Module) -> bool:
    """Whether a parameter says that it is cut."""
    return any(_is_flagged(parameter) for parameter in model.parameters())


def place_flagged(model: nn.Module, axis: Axis) -> int:
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
        if axis.size == 1 or is_placed(parameter) or not _is_flagged(parameter):
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
        ranges = _slices(shape[dim], stride, axis)
        place(parameter, Placement(tuple(shape), along(shape, dim, ranges), cut=frozenset({axis.name})))
        found += 1
    return found


def _is_flagged(parameter: nn.Parameter) -> bool:
    return any(getattr(parameter, flag, False) for flag in _FLAGS)


def _slices(whole: int, blocks: int, axis: Axis) -> Ranges:
    """This rank's slice of each of so many blocks."""
    block = whole // blocks
    each = block // axis.size
    return tuple(
        (number * block + axis.index * each, number * block + (axis.index + 1) * each) for number in range(blocks)
    )
