"""Weight formats: how the matrix of a linear layer is packed, and how the packed matrix is multiplied.

[Note: weight formats] A format maps a matrix to named tensors and back, and multiplies an input by the packed matrix
without an unpacked copy of all of it. `windlass.kernels.packed_linear.PackedLinear` is the layer on top. A format has
no state.

[Note: optional members] A format may also have `join` (`JoinableFormat`), `unpack_rows` (`RowFormat`) and
`keeps_order`. Without `join`, layers with the same input are multiplied one by one. Without `unpack_rows`, a lookup of
rows unpacks the full matrix. Without `keeps_order`, tensor parallelism first tests on a random matrix whether shards of
the packed tensors are shards of the matrix. `packed_tensors.RowTensors` implements the first two for formats whose
tensors all have one row for each output feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from windlass.base.errors import WeightFormatError
from windlass.kernels.coded_formats import CodedWeightFormat, Float8WeightFormat, make_coded_formats
from windlass.kernels.device_matmul import CodedMatrix, find_device_product, has_kernel
from windlass.kernels.ordered_formats import ORDERED, OrderedWeightFormat
from windlass.kernels.packed_matmul import Product, packed_matmul
from windlass.kernels.packed_tensors import PackedTensorForm as PackedTensorForm
from windlass.kernels.packed_tensors import PackedWeight as PackedWeight
from windlass.kernels.packed_tensors import RowTensors as RowTensors
from windlass.kernels.packed_tensors import check_finite, check_matrix


class WeightFormat(Protocol):
    """Stateless packing of matrices `[out_features, in_features]`; see [Note: optional members].

    Attributes:
        name: name of the format in the registry; letters, digits and `_`.
    """

    @property
    def name(self) -> str: ...

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        """Return name, dtype and shape of every packed tensor, as a safetensors file holds them. Each name follows the
        layer's: `<layer>.weight`, `<layer>.weight_scale`. Any names are allowed, and any shapes, `()` included.
        Raise `WeightFormatError` for sizes that the format does not pack."""
        ...

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Pack a finite floating-point matrix.

        Raises:
            WeightFormatError: `weight` is not such a matrix, or has values outside the format's range.
        """
        ...

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the matrix `[out_features, in_features]` in the format's own precision (float32 or bfloat16)."""
        ...

    def linear(
        self, input: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, product: Product | None = None
    ) -> torch.Tensor:
        """Return `input @ unpack(packed).T + bias` in the dtype of `input`, with gradients of `input` and `bias`.

        Args:
            input: `[..., in_features]`.
            packed: tensors of `file_form`.
            bias: `[out_features]` of the dtype of `input`, or None.
            product: function that computes the forward's values from another form of the packed weight; None: the
                format's own product.

        Returns:
            `[..., out_features]`.
        """
        ...


@runtime_checkable
class JoinableFormat(Protocol):
    """Weight format with `join`: `pack` rounds each row independently, so layers with the same input are packed as one
    matrix."""

    def join(self, parts: Sequence[PackedWeight]) -> PackedWeight:
        """Return the packed matrix of the rows of all parts, in the order of `parts`."""
        ...


@runtime_checkable
class RowFormat(Protocol):
    """Weight format that unpacks single rows."""

    def unpack_rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Return the rows that `index` (int64 `[rows]`) selects, in the format's own precision."""
        ...


class CastWeightFormat(RowTensors):
    """Format that stores a matrix in one floating-point dtype, rounded to nearest, ties to even."""

    keeps_order = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        return {"weight": PackedTensorForm(self.dtype, (out_features, in_features))}

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        check_matrix(weight, self.name)
        packed = weight.detach().to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        check_finite(packed, self.name, f"is outside of the range of {self.dtype}")
        return {"weight": packed}

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        return packed["weight"].clone()

    def linear(
        self, input: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, product: Product | None = None
    ) -> torch.Tensor:
        return packed_matmul(input, bias, _cast_rows, [packed["weight"]], product)


class Int8WeightFormat(RowTensors):
    """Symmetric int8 with one float32 scale for each output channel.

    `scale = max |row| / 127`, `q = round(row / scale)` in float32, to nearest, ties to even, clamped to [-127, 127]. A
    row of zeros has scale 0. So `|row - q * scale|` is at most half of `scale`, up to the rounding of float32. The
    product in plain PyTorch uses `q * scale`, computed in float32 and rounded to the dtype of the input.
    """

    name, keeps_order = "int8", True

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        return {
            "weight": PackedTensorForm(torch.int8, (out_features, in_features)),
            "weight_scale": PackedTensorForm(torch.float32, (out_features, 1)),
        }

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        check_matrix(weight, self.name)
        wide = weight.detach().to(torch.float32)
        check_finite(wide, self.name, "is outside of the range of torch.float32")
        columns = wide.shape[1]
        scale = wide.abs().amax(1, keepdim=True) / 127 if columns else wide.new_zeros(wide.shape[0], 1)
        # a row of zeros (or of numbers so small that its scale is 0) is divided by 1
        quotient = wide / torch.where(scale > 0, scale, torch.ones_like(scale))
        return {"weight": quotient.round_().clamp_(-127, 127).to(torch.int8), "weight_scale": scale}

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        return packed["weight"].to(torch.float32) * packed["weight_scale"]

    def linear(
        self, input: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, product: Product | None = None
    ) -> torch.Tensor:
        codes, scale = packed["weight"], packed["weight_scale"]
        if product is None and has_kernel(input):
            product = find_device_product(input, CodedMatrix("int8", codes, scale))
        return packed_matmul(input, bias, _scaled_rows, [codes, scale], product)


def _cast_rows(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return rows[0].to(dtype)


def _scaled_rows(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return (rows[0].to(torch.float32) * rows[1]).to(dtype)


_formats: dict[str, WeightFormat] = {}


def register_weight_format(weight_format: WeightFormat) -> None:
    """Make a format available under its name.

    Raises:
        WeightFormatError: another format has the name, or the name has other characters than letters, digits and `_`.
    """
    name = weight_format.name
    if not f"x{name}".isidentifier():
        raise WeightFormatError(f"weight format {name!r} has an invalid name; use letters, digits and underscores")
    if _formats.get(name, weight_format) is not weight_format:
        raise WeightFormatError(f"a weight format named {name!r} is registered already; use another name")
    _formats[name] = weight_format


def get_weight_format(name: str) -> WeightFormat:
    """Return the format of a name. `list_weight_formats` leaves out those of [Note: ordered features], to which no
    weights are rounded.

    Raises:
        WeightFormatError: no format has the name.
    """
    inner = _formats.get(name.removesuffix(ORDERED))
    if name not in _formats and isinstance(inner, CodedWeightFormat) and name.endswith(ORDERED):
        return OrderedWeightFormat(inner)
    if name not in _formats:
        raise WeightFormatError(f"there is no weight format named {name!r}; use one of {', '.join(sorted(_formats))}")
    return _formats[name]


def list_weight_formats() -> list[str]:
    """Return the names of all formats, sorted."""
    return sorted(_formats)


def keeps_order(weight_format: WeightFormat) -> bool:
    """Return True if a format declares that its packed tensors keep the order of the matrix's rows and columns.

    A shard of the matrix is then the corresponding shard of each packed tensor.
    """
    return bool(getattr(weight_format, "keeps_order", False))


def check_packed(weight_format: WeightFormat, packed: PackedWeight, out_features: int, in_features: int) -> None:
    """Check names, dtypes and shapes of the packed tensors of a matrix.

    Raises:
        WeightFormatError: the tensors are not those of `file_form`.
    """
    forms = weight_format.file_form(out_features, in_features)
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in packed.items()}
    requested = {name: (form.dtype, tuple(form.shape)) for name, form in forms.items()}
    if found != requested:
        raise WeightFormatError(
            f"packed tensors {found} are not of format {weight_format.name!r}, whose file_form({out_features}, "
            f"{in_features}) is {requested}; give those that it packed"
        )


def unpack_rows(weight_format: WeightFormat, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
    """Return some rows of a packed matrix in the format's own precision.

    Args:
        index: int64 `[rows]`.
    """
    if isinstance(weight_format, RowFormat):
        return weight_format.unpack_rows(packed, index)
    return weight_format.unpack(packed)[index]


register_weight_format(CastWeightFormat("fp32", torch.float32))
register_weight_format(CastWeightFormat("bf16", torch.bfloat16))
register_weight_format(CastWeightFormat("fp16", torch.float16))
register_weight_format(Int8WeightFormat())
register_weight_format(Float8WeightFormat())
for _coded in make_coded_formats():
    register_weight_format(_coded)
