"""Sharding of packed, frozen linear layers: each rank keeps the bytes of its rows or columns.

[Note: parts of packed weights] Codes, scales and zero points of a part are those of the full matrix, so that no weight
is rounded a second time. Along either dimension a part begins and ends at the boundary of a group and of a word of
codes. The shapes of `file_form` show along which dimension a tensor is divided; a tensor with the same shape for any
number of features is replicated. A format without `keeps_order` may store elements in another order, so its division is
tested first on a random matrix of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from windlass.base.errors import ModelError, WeightFormatError
from windlass.kernels.grouped_formats import GroupedWeightFormat
from windlass.kernels.packed_linear import PackedMatrix
from windlass.kernels.weight_format import WeightFormat, check_packed, keeps_order
from windlass.parallel.narrow_to_ranges import narrow_to_ranges
from windlass.parallel.placement import Ranges
from windlass.parallel.tensor.parameter_sharding import shard_parameter
from windlass.parallel.tensor.rank_ranges import count_elements

Cuts = tuple[tuple[str, int, Ranges], ...]  # packed tensor, its dimension and the ranges that are kept, in elements

_WHOLE = "weight_shape"  # packed tensor whose values are the sizes of the full matrix; replicated
# Factor for a check of packed sizes: 64 parts take exactly 64 times the words of one part only if a part fills its last
# word.
_MANY = 64


def shard_packed(name: str, module: PackedMatrix, dim: int, ranges: Ranges, axis: str) -> None:
    """Keep only `ranges` of a packed matrix along `dim` (0: outputs, 1: inputs). See [Note: parts of packed weights].

    Raises:
        ModelError: see `plan_packed_part`.
    """
    local, cuts = plan_packed_part(name, module, dim, ranges, axis)
    forms = module.format.file_form(*module.sizes)
    for part, along, kept in cuts:
        whole = forms[part]
        scale = whole.dtype.itemsize if along == len(whole.shape) - 1 else 1
        placed = tuple((start * scale, stop * scale) for start, stop in kept)
        stored = module.parameter_name(part)
        shard_parameter(f"{name}.{stored}", module.get_parameter(stored), along, placed, axis)
    module.become_part(*local)


def plan_packed_part(
    name: str, module: PackedMatrix, dim: int, ranges: Ranges, axis: str
) -> tuple[tuple[int, int], Cuts]:
    """Return the sizes of a part of a packed matrix, and how its tensors are divided. Nothing is changed.

    Raises:
        ModelError: a range begins or ends inside of a group, or the format does not lay out its tensors in order.
    """
    form: Any = module.format
    local = list(module.sizes)
    local[dim] = count_elements(ranges)
    try:
        _check_format(form, local)
        cuts = tuple(_find_cuts(form, module.sizes, dim, ranges))
        if not keeps_order(form):
            _try_division(form, module.sizes, (local[0], local[1]), dim, ranges, cuts)
    except WeightFormatError as error:
        raise ModelError(
            f"{name} is packed as {form.name!r} and cannot be sharded over {axis}: {error}; choose another "
            "group or format, another number of ranks, or replicate the layer by parallel.tensor_table"
        ) from error
    return (local[0], local[1]), cuts


def _check_format(form: WeightFormat, local: Sequence[int]) -> None:
    """Raise a WeightFormatError if a part does not consist of complete groups."""
    form.file_form(*local)
    if isinstance(form, GroupedWeightFormat):
        form.check_shape(*local)


def _find_cuts(
    form: WeightFormat, sizes: tuple[int, int], dim: int, ranges: Ranges
) -> Iterator[tuple[str, int, Ranges]]:
    """Yield `(packed tensor, dimension, ranges that are kept)` for each tensor that is divided."""
    for part, whole in form.file_form(*sizes).items():
        if part == _WHOLE or _try_shape(form, sizes, part, dim, 1) == whole.shape:
            continue  # replicated, e.g. one scale for the full dimension
        double = _shape(form, sizes, part, dim, 2 * sizes[dim])
        grown = [place for place, size in enumerate(whole.shape) if double[place] != size]
        if not grown:
            continue
        along = grown[0]
        wider = _shape(form, sizes, part, 1 - dim, 2 * sizes[1 - dim])
        if len(grown) > 1 or wider[along] != whole.shape[along]:
            raise WeightFormatError("its groups reach over several rows")
        edges = [[_place(form, sizes, part, dim, along, edge) for edge in span] for span in ranges]
        yield part, along, tuple((start, stop) for start, stop in edges)


def _place(form: WeightFormat, sizes: tuple[int, int], part: str, dim: int, along: int, edge: int) -> int:
    """Convert `edge`, a boundary between ranks in features, to an index along dimension `along` of a packed tensor."""
    size = sizes[dim]
    if edge in (0, size):
        return 0 if edge == 0 else _shape(form, sizes, part, dim, size)[along]
    place = _shape(form, sizes, part, dim, edge)[along]
    if _shape(form, sizes, part, dim, _MANY * edge)[along] != _MANY * place:
        raise WeightFormatError(
            f"the part of a rank would end at {edge} of its {size} {'input' if dim else 'output'} features, inside of "
            "a group"
        )
    return place


def _try_shape(
    form: WeightFormat, sizes: tuple[int, int], part: str, dim: int, features: int
) -> tuple[int, ...] | None:
    """Return the shape of a packed tensor with this many features; None: the format cannot pack this number."""
    try:
        return _shape(form, sizes, part, dim, features)
    except WeightFormatError:
        return None


def _shape(form: WeightFormat, sizes: tuple[int, int], part: str, dim: int, features: int) -> tuple[int, ...]:
    """Return the shape of a packed tensor with this many features along a dimension."""
    rows, columns = (features, sizes[1]) if dim == 0 else (sizes[0], features)
    return form.file_form(rows, columns)[part].shape


@lru_cache(maxsize=64)
def _try_division(
    form: WeightFormat, sizes: tuple[int, int], local: tuple[int, int], dim: int, ranges: Ranges, cuts: Cuts
) -> None:
    """Raise a WeightFormatError if a part of the packed tensors does not unpack to that part of a random matrix."""
    packed = form.pack(torch.randn(sizes, generator=torch.Generator().manual_seed(0)))
    part = dict(packed)
    if _WHOLE in part:
        part[_WHOLE] = torch.tensor(local)
    for name, along, kept in cuts:
        part[name] = narrow_to_ranges(packed[name], along, kept)
    check_packed(form, part, *local)
    if not torch.equal(form.unpack(part), narrow_to_ranges(form.unpack(packed), dim, ranges)):
        raise WeightFormatError("a part of its tensors is not the packed form of a part of the matrix")
