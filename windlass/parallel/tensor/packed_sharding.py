"""Sharding of packed, frozen linear layers: each rank keeps the bytes of its rows or columns.

[Note: parts of packed weights] Codes, scales and zero points of a part are those of the whole matrix, so that no rank
rounds anything anew. A part begins and ends where a group and a word of codes do, along either dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.base.errors import ModelError, WeightFormatError
from windlass.kernels.grouped_formats import GroupedWeightFormat
from windlass.kernels.packed_linear import PackedMatrix
from windlass.kernels.packed_tensors import PackedTensorForm
from windlass.kernels.weight_format import WeightFormat
from windlass.parallel.placement import Ranges
from windlass.parallel.tensor.parameter_sharding import shard_parameter
from windlass.parallel.tensor.rank_ranges import count_elements

_WHOLE = "weight_shape"  # name of the whole matrix's shape, which every rank has
_MANY = 64  # so many equal parts take 64 times the words of one part only if each part begins and ends at a word


def shard_packed(name: str, module: PackedMatrix, dim: int, ranges: Ranges, axis: str) -> None:
    """Keep only `ranges` of a packed matrix along `dim`: 0, outputs, or 1, inputs. See [Note: parts of packed weights].

    Raises:
        ModelError: a range begins or ends inside of a group.
    """
    sizes, local = module.sizes, list(module.sizes)
    local[dim] = count_elements(ranges)
    _check_format(name, module.format, local, axis)
    for part, form in _forms(module, sizes).items():
        if part == _WHOLE:
            continue
        if _count(module, part, dim, 1) == form.shape[dim]:
            continue  # one scale for all of the dimension
        edges = [[_place(name, module, part, dim, edge, axis) for edge in span] for span in ranges]
        scale = form.dtype.itemsize if dim == 1 else 1
        placed = tuple((start * scale, stop * scale) for start, stop in edges)
        stored = module.parameter_name(part)
        shard_parameter(f"{name}.{stored}", module.get_parameter(stored), dim, placed, axis)
    module.become_part(*local)


def _check_format(name: str, form: WeightFormat, local: Sequence[int], axis: str) -> None:
    """Check that a part consists of whole groups."""
    try:
        if any(len(one.shape) != 2 for part, one in form.file_form(*local).items() if part != _WHOLE):
            raise WeightFormatError("its groups reach over several rows")
        if isinstance(form, GroupedWeightFormat):
            form.check_shape(*local)
    except WeightFormatError as error:
        raise ModelError(
            f"{name} is packed as {form.name!r} and cannot be sharded over {axis}: {error}; choose another group or "
            "format, or replicate the layer by parallel.tensor_table"
        ) from error


def _place(name: str, module: PackedMatrix, part: str, dim: int, edge: int, axis: str) -> int:
    """Return the position in a packed tensor of the boundary between two ranks."""
    size = module.sizes[dim]
    if edge in (0, size):
        return 0 if edge == 0 else _forms(module, module.sizes)[part].shape[dim]
    place = _count(module, part, dim, edge)
    if _count(module, part, dim, _MANY * edge) != _MANY * place:
        what = "input" if dim else "output"
        raise ModelError(
            f"{name} is packed as {module.format.name!r}, and {axis} would shard its {size} {what} features at {edge}, "
            "inside of a group of that format; choose a group that divides each rank's part, another number of ranks, "
            "or replicate the layer by parallel.tensor_table"
        )
    return place


def _count(module: PackedMatrix, part: str, dim: int, features: int) -> int:
    """Return the size of a packed tensor along a dimension with this many features."""
    sizes = list(module.sizes)
    sizes[dim] = features
    return _forms(module, (sizes[0], sizes[1]))[part].shape[dim]


def _forms(module: PackedMatrix, sizes: tuple[int, int]) -> dict[str, PackedTensorForm]:
    return module.format.file_form(*sizes)
