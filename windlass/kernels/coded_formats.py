"""Weight formats of 1 to 8 bits: codes with a scale for each group of input features.

[Note: coded formats] A weight is `(code - zero) * scale`. A row has one 16-bit float scale for each group of `group`
features, or a single scale; the last group of a row has fewer features if `group` does not divide them. Codes have the
`pack-quantized` layout of compressed-tensors, except in `TritWeightFormat`. All formats have its tensor names:
`weight_packed`, `weight_scale`, `weight_shape` and, with zero points, `weight_zero_point`, which is packed along the
outputs. Files contain the packed tensors unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.nn import functional as F

from windlass.base.errors import WeightFormatError
from windlass.kernels.bit_packing import (
    TRITS_OF_BYTE,
    count_words,
    pack_trits,
    pack_words,
    unpack_trits,
    unpack_words,
)
from windlass.kernels.device_matmul import CodedMatrix, find_device_product, has_kernel
from windlass.kernels.packed_matmul import BLOCK_NUMEL, Product, multiply_alone, packed_matmul
from windlass.kernels.packed_tensors import PackedTensorForm, PackedWeight, RowTensors, check_finite, check_matrix

GROUPS = (32, 64, 128)  # features that can share a scale
SCALE_DTYPE = torch.float16  # as in GPTQ, AWQ and GGUF files, so that their weights are read exactly
# Weights up to this magnitude have finite scales in every format: the largest scale, of `BinaryWeightFormat`, is twice
# a mean magnitude, in float16.
SAFE_MAGNITUDE = 2.0**14
# Largest error of a stored scale, relative to the largest scale of its matrix: half a code of 8 bits.
_SCALE_ERROR = 2.0**-8
_TWN_THRESHOLD = 0.7  # threshold relative to the mean magnitude: Li et al., Ternary Weight Networks (2016)


@dataclass(frozen=True)
class GroupCodes:
    """Codes of a matrix, one code per byte.

    Attributes:
        codes: uint8 `[out_features, in_features]`.
        scale: float16 `[out_features, groups]`.
        zero: code of the value 0, uint8 `[out_features, groups]`; None: the `zero` of the format.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None


class CodedWeightFormat:
    """Base class of formats that store codes and a scale for each group. A subclass defines the rounding of a matrix.

    Attributes:
        bits: number of bits of a code in the layout that native kernels read; files may have another layout.
        group: number of input features that share a scale; None: all features of a row.
        zero: code of the value 0, where a weight has no zero points of its own.
        has_zeros: True if each group has a zero point.
    """

    bits: int
    zero: float
    has_zeros = False
    keeps_order = True
    _coding: Literal["words", "trits"] = "words"

    def __init__(self, name: str, group: int | None) -> None:
        if group is not None and group not in GROUPS:
            raise WeightFormatError(f"format {name!r} has groups of {group} features; use one of {GROUPS}, or rows")
        self.name, self.group = name, group

    def count_groups(self, in_features: int) -> int:
        """Return the number of scales of a row."""
        return 1 if self.group is None else -(-in_features // self.group)

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        groups = self.count_groups(in_features)
        forms = {
            "weight_packed": self._code_form(out_features, in_features),
            "weight_scale": PackedTensorForm(SCALE_DTYPE, (out_features, groups)),
            "weight_shape": PackedTensorForm(torch.int64, (2,)),
        }
        if self.has_zeros:
            forms["weight_zero_point"] = PackedTensorForm(torch.int32, (count_words(out_features, self.bits), groups))
        return forms

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        check_matrix(weight, self.name)
        step = max(1, BLOCK_NUMEL // max(weight.shape[1], 1))
        parts = []
        for rows in weight.detach().split(step) if len(weight) else [weight.detach()]:
            wide = rows.to(torch.float32)
            check_finite(wide, self.name, "is outside of the range of torch.float32")
            part = self.quantize(wide)
            check_finite(part.scale, self.name, f"has a scale outside of the range of {SCALE_DTYPE}")
            parts.append((self._pack_codes(part.codes), part.scale, part.zero))
        zero = torch.cat([zero for _, _, zero in parts if zero is not None]) if self.has_zeros else None
        packed, scale = torch.cat([one for one, _, _ in parts]), torch.cat([one for _, one, _ in parts])
        return self._tensors(packed, scale, zero, weight.shape[1])

    def quantize(self, wide: torch.Tensor) -> GroupCodes:
        """Round a finite float32 matrix."""
        raise NotImplementedError

    def pack_codes(self, coded: GroupCodes) -> PackedWeight:
        """Pack codes, e.g. those of another library's checkpoint.

        Raises:
            WeightFormatError: the scales have another shape, or zero points are missing or not supported.
        """
        rows, columns = coded.codes.shape
        if tuple(coded.scale.shape) != (rows, self.count_groups(columns)) or (coded.zero is None) == self.has_zeros:
            raise WeightFormatError(
                f"scales of shape {tuple(coded.scale.shape)} do not fit {rows} rows of {columns} codes in format "
                f"{self.name!r}; give {(rows, self.count_groups(columns))}, and zero points if the name has 'zp'"
            )
        return self._tensors(self._pack_codes(coded.codes), coded.scale.to(SCALE_DTYPE), coded.zero, columns)

    def unpack_codes(self, packed: PackedWeight) -> GroupCodes:
        """Return the codes of a packed matrix."""
        columns = int(packed["weight_shape"][1])
        codes = self._unpack_codes(packed["weight_packed"], columns)
        return GroupCodes(codes, packed["weight_scale"], self.unpack_zeros(packed))

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        columns = int(packed["weight_shape"][1])
        return self._rows(self._row_tensors(packed), torch.float32, columns)

    def unpack_rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Return some rows of the matrix in float32.

        Args:
            index: int64 `[rows]`.
        """
        rows = [tensor[index] for tensor in self._row_tensors(packed)]
        return self._rows(rows, torch.float32, int(packed["weight_shape"][1]))

    def linear(
        self, input: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, product: Product | None = None
    ) -> torch.Tensor:
        if product is None and has_kernel(input):
            product = find_device_product(input, self._device_matrix(packed))
        alone = multiply_alone(input, bias, product, len(packed["weight_packed"]))
        if alone is not None:
            return alone  # a product without derivatives needs no unpacked zero points
        unpack_rows = partial(self._rows, columns=input.shape[-1])
        return packed_matmul(input, bias, unpack_rows, self._row_tensors(packed), product)

    def _device_matrix(self, packed: PackedWeight) -> CodedMatrix:
        codes, scale, zeros = packed["weight_packed"], packed["weight_scale"], packed.get("weight_zero_point")
        return CodedMatrix(self._coding, codes, scale, self.bits, self.group, self.zero, zeros)

    def join(self, parts: Sequence[PackedWeight]) -> PackedWeight:
        """Return the packed matrix of the rows of all parts, in the order of `parts`."""
        zeros = [self.unpack_zeros(part) for part in parts]
        zero = torch.cat([zero for zero in zeros if zero is not None]) if self.has_zeros else None
        packed, scale = (torch.cat([part[name] for part in parts]) for name in ("weight_packed", "weight_scale"))
        return self._tensors(packed, scale, zero, int(parts[0]["weight_shape"][1]))

    def _code_form(self, out_features: int, in_features: int) -> PackedTensorForm:
        return PackedTensorForm(torch.int32, (out_features, count_words(in_features, self.bits)))

    def _pack_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return pack_words(codes, self.bits)

    def _unpack_codes(self, packed: torch.Tensor, columns: int) -> torch.Tensor:
        return unpack_words(packed, self.bits, columns)

    def _tensors(
        self, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, columns: int
    ) -> PackedWeight:
        tensors = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([len(scale), columns])}
        if zero is not None:
            tensors["weight_zero_point"] = pack_words(zero.t().contiguous(), self.bits).t().contiguous()
        return tensors

    def unpack_zeros(self, packed: PackedWeight) -> torch.Tensor | None:
        """Return the zero points, uint8 `[out_features, groups]`, if the format has any."""
        if not self.has_zeros:
            return None
        words = packed["weight_zero_point"].t().contiguous()
        return unpack_words(words, self.bits, len(packed["weight_packed"])).t().contiguous()

    def _row_tensors(self, packed: PackedWeight) -> list[torch.Tensor]:
        """Return tensors whose first dimension is the outputs."""
        zeros = self.unpack_zeros(packed)
        return [packed["weight_packed"], packed["weight_scale"], *([] if zeros is None else [zeros])]

    def _rows(self, rows: list[torch.Tensor], dtype: torch.dtype, columns: int) -> torch.Tensor:
        codes = self._unpack_codes(rows[0], columns).to(torch.float32)
        scale = self._spread(rows[1].to(torch.float32), columns)
        zero: torch.Tensor | float = self._spread(rows[2].to(torch.float32), columns) if self.has_zeros else self.zero
        return codes.sub_(zero).mul_(scale).to(dtype)

    def _spread(self, values: torch.Tensor, columns: int) -> torch.Tensor:
        """Repeat `[rows, groups]` values for each feature of a group. Without groups, return `[rows, 1]` unchanged."""
        return values if self.group is None else values.repeat_interleave(self.group, 1)[:, :columns]

    def group_weights(self, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix as `[rows, groups, group]`, with zeros after the last column, and the sizes of the groups."""
        rows, columns = wide.shape
        size = self.group or max(columns, 1)
        count = self.count_groups(columns)
        groups = F.pad(wide, (0, count * size - columns)).view(rows, count, size)
        sizes = torch.full((groups.shape[1],), size, dtype=torch.float64, device=wide.device)
        if groups.shape[1]:
            sizes[-1] = max(columns - (groups.shape[1] - 1) * size, 1)
        return groups, sizes


class IntegerWeightFormat(CodedWeightFormat):
    """Integers of 1 to 8 bits, symmetric or with a zero point for each group.

    Symmetric: `scale = max |group| / (2 ** (bits - 1) - 1/2)`, rounded to float16, so that the largest weights of
    either sign are at most half a step from the nearest code (of 1 bit, whose values are `-scale` and 0:
    `scale = max |group|`); `q = round(w / scale)`, clamped to
    `[-2 ** (bits - 1), 2 ** (bits - 1) - 1]`, code `q + 2 ** (bits - 1)`. With zero points:
    `scale = (max - min) / (2 ** bits - 1)` in float16, of a range that includes 0, `zero = round(-min / scale)`, code
    `round(w / scale) + zero`, both clamped to the codes. Rounding is to nearest, ties to even, in float32; a scale of 0
    gives zeros.
    """

    def __init__(self, bits: int, group: int | None, has_zeros: bool = False) -> None:
        super().__init__(f"int{bits}" + (f"_g{group}" if group else "") + ("_zp" if has_zeros else ""), group)
        self.bits, self.zero, self.has_zeros = bits, 2.0 ** (bits - 1), has_zeros
        self.steps = (2**bits - 1) / 2 if bits > 1 else 1.0  # steps from 0 to the largest magnitude

    def quantize(self, wide: torch.Tensor) -> GroupCodes:
        groups, _ = self.group_weights(wide)
        top = 2**self.bits - 1
        if self.has_zeros:
            low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
            scale = ((high - low) / top).to(SCALE_DTYPE)
            zero = (-low / _divisor(scale)).round_().clamp_(0, top)
            offset: torch.Tensor | float = self._spread(zero, wide.shape[1])
        else:
            scale, zero, offset = (groups.abs().amax(2) / self.steps).to(SCALE_DTYPE), None, self.zero
        steps = (wide / self._spread(_divisor(scale), wide.shape[1])).round_()
        codes = (steps + offset).clamp_(0, top).to(torch.uint8)
        return GroupCodes(codes, scale, None if zero is None else zero.to(torch.uint8))


class TernaryWeightFormat(CodedWeightFormat):
    """`-scale`, 0 and `scale` in two bits: codes 1, 2 and 3, which are compressed-tensors' integers of two bits.

    Weights whose magnitude is at most 0.7 times the mean magnitude of their group become 0; the scale is the mean
    magnitude of the others, in float64, then rounded to float16 (Li et al. 2016, https://arxiv.org/abs/1605.04711).
    """

    bits, zero = 2, 2.0

    def __init__(self, group: int) -> None:
        super().__init__(f"ternary_g{group}", group)

    def quantize(self, wide: torch.Tensor) -> GroupCodes:
        signs, scale = _ternary(self, wide)
        return GroupCodes((signs + 2).to(torch.uint8), scale)


class TritWeightFormat(CodedWeightFormat):
    """`-scale`, 0 and `scale` of a row in 1.6 bits: five digits of base 3 (0, 1, 2) a byte, the first with weight 1.

    The rule is that of `TernaryWeightFormat` for a row. `weight_packed` is uint8.
    """

    bits, zero = 2, 1.0  # native kernels read codes of two bits
    _coding = "trits"

    def __init__(self) -> None:
        super().__init__("ternary", None)

    def quantize(self, wide: torch.Tensor) -> GroupCodes:
        signs, scale = _ternary(self, wide)
        return GroupCodes((signs + 1).to(torch.uint8), scale)

    def _code_form(self, out_features: int, in_features: int) -> PackedTensorForm:
        return PackedTensorForm(torch.uint8, (out_features, -(-in_features // TRITS_OF_BYTE)))

    def _pack_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return pack_trits(codes)

    def _unpack_codes(self, packed: torch.Tensor, columns: int) -> torch.Tensor:
        return unpack_trits(packed, columns)


class BinaryWeightFormat(CodedWeightFormat):
    """`-scale` or `scale` in one bit, which is 1 for weights of 0 and above.

    The scale is the mean magnitude of the group, in float64, then rounded to float16 (Rastegari et al. 2016,
    https://arxiv.org/abs/1603.05279). `weight_scale` holds twice that mean, so that a weight is
    `(code - 1/2) * weight_scale`.
    """

    bits, zero = 1, 0.5

    def __init__(self, group: int | None) -> None:
        super().__init__("binary" + (f"_g{group}" if group else ""), group)

    def quantize(self, wide: torch.Tensor) -> GroupCodes:
        groups, sizes = self.group_weights(wide)
        scale = (groups.abs().sum(2, dtype=torch.float64) / sizes).to(SCALE_DTYPE)
        return GroupCodes((wide >= 0).to(torch.uint8), scale * 2)


class Float8WeightFormat(RowTensors):
    """float8 e4m3 with one float32 scale for each output channel: compressed-tensors' `float-quantized`.

    `scale = max |row| / 448`, `q = row / scale` rounded to float8 e4m3fn, to nearest, ties to even. A row of zeros has
    scale 0. The product in plain PyTorch uses `q * scale`, computed in float32 and rounded to the dtype of the input.
    """

    name, keeps_order = "fp8", True

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        return {
            "weight": PackedTensorForm(torch.float8_e4m3fn, (out_features, in_features)),
            "weight_scale": PackedTensorForm(torch.float32, (out_features, 1)),
        }

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        check_matrix(weight, self.name)
        wide = weight.detach().to(torch.float32)
        check_finite(wide, self.name, "is outside of the range of torch.float32")
        scale = wide.abs().amax(1, keepdim=True) / 448 if wide.shape[1] else wide.new_zeros(len(wide), 1)
        quotient = (wide / _divisor(scale)).clamp_(-448, 448)
        return {"weight": quotient.to(torch.float8_e4m3fn), "weight_scale": scale}

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        return packed["weight"].to(torch.float32) * packed["weight_scale"]

    def linear(
        self, input: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, product: Product | None = None
    ) -> torch.Tensor:
        codes, scale = packed["weight"], packed["weight_scale"]
        if product is None and has_kernel(input):
            product = find_device_product(input, CodedMatrix("fp8", codes, scale))
        return packed_matmul(input, bias, _float8_rows, [codes, scale], product)


def make_coded_formats() -> Iterator[CodedWeightFormat]:
    """Yield all coded formats."""
    for group in (None, *GROUPS):
        for bits in range(1, 8):
            yield IntegerWeightFormat(bits, group)
            yield IntegerWeightFormat(bits, group, has_zeros=True)
        yield BinaryWeightFormat(group)
        yield IntegerWeightFormat(8, group, has_zeros=True)
        if group is not None:
            yield IntegerWeightFormat(8, group)
            yield TernaryWeightFormat(group)
    yield TritWeightFormat()


def fits_scale_dtype(scale: torch.Tensor) -> bool:
    """Return True if the scales of a matrix, e.g. bfloat16 ones of another library's checkpoint, keep their values in
    `SCALE_DTYPE`: none becomes infinite, and none changes by more than 1/256 of the largest."""
    wide = scale.to(torch.float64)
    if scale.dtype == SCALE_DTYPE or not wide.numel():
        return True
    error = (wide.to(SCALE_DTYPE).to(torch.float64) - wide).abs().max()
    return bool(error <= _SCALE_ERROR * wide.abs().max())


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32, with 1 instead of 0."""
    wide = scale.to(torch.float32)
    return torch.where(wide > 0, wide, torch.ones_like(wide))


def _ternary(form: CodedWeightFormat, wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -1, 0 or 1 for each weight, and the scales of the groups."""
    groups, counts = form.group_weights(wide)
    sizes = groups.abs()
    mean = (sizes.sum(2, dtype=torch.float64) / counts).unsqueeze(2)
    kept = sizes > _TWN_THRESHOLD * mean
    total = (sizes * kept).sum(2, dtype=torch.float64)
    scale = (total / kept.sum(2).clamp(min=1)).to(SCALE_DTYPE)
    return (groups.sign() * kept).flatten(1)[:, : wide.shape[1]], scale


def _float8_rows(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return (rows[0].to(torch.float32) * rows[1]).to(dtype)
