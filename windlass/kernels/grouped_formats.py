"""Weight formats with groups along any dimension: ranges of integers, and small floats.

[Note: grouped formats] Both formats are DeepSpeed's: `RangeWeightFormat` is that of its `weight_quantization`,
and `MinifloatWeightFormat` that of its `fp_quantizer`. The codes of a row fill full bytes; values of groups (scale,
minimum) are float32. Native code multiplies by range-format matrices with groups of 32, 64 or a multiple of 128 input
features (`low_bit_panels`); products with other matrices unpack a block of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from windlass.base.errors import WeightFormatError
from windlass.kernels.packed_matmul import Product, packed_matmul
from windlass.kernels.packed_tensors import PackedTensorForm, PackedWeight, check_finite, check_matrix

CODE_BITS = (2, 3, 4, 6, 8, 12)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes `[rows, n]` below `2 ** bits` as uint8 `[rows, code_bytes(n, bits)]`; code `i` of a row has the bits
    `i * bits` and up, counted from the lowest bit of the row's first byte."""
    rows, count = codes.shape
    unit = math.lcm(bits, 8)
    units = F.pad(codes.to(torch.int32), (0, -count % (unit // bits))).view(
        rows, -(-count * bits // unit), unit // bits
    )
    joined = (units << torch.arange(0, unit, bits, dtype=torch.int32, device=codes.device)).sum(2)
    return torch.stack([(joined >> shift) & 255 for shift in range(0, unit, 8)], 2).to(torch.uint8).view(rows, -1)


def unpack_codes(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` codes of each row, as int32 `[rows, count]`."""
    unit, rows = math.lcm(bits, 8), len(packed)
    units = packed.view(rows, packed.shape[1] * 8 // unit, unit // 8).to(torch.int32)
    joined: torch.Tensor = units[..., 0]
    for place in range(1, unit // 8):
        joined = joined | units[..., place] << (8 * place)
    shifts = torch.arange(0, unit, bits, dtype=torch.int32, device=packed.device)
    codes: torch.Tensor = (joined.unsqueeze(2) >> shifts) & (2**bits - 1)
    return codes.view(rows, units.shape[1] * len(shifts))[:, :count]


def code_bytes(count: int, bits: int) -> int:
    """Return the number of bytes of a row of `count` codes."""
    unit = math.lcm(bits, 8)
    return -(-count * bits // unit) * (unit // 8)


class GroupedWeightFormat:
    """Base class of formats that store codes of rows, and float32 values of groups; see [Note: grouped formats].

    Attributes:
        bits: number of bits of a code.
    """

    name: str
    bits: int
    keeps_order = True

    def _group_forms(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        """Return name, dtype and shape of every tensor with values of groups."""
        raise NotImplementedError

    def _encode(self, wide: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the codes of a float32 matrix, and the tensors of its groups."""
        raise NotImplementedError

    def _decode(self, index: torch.Tensor, codes: torch.Tensor, groups: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the float32 values of the rows `index`, from their codes."""
        raise NotImplementedError

    def check_shape(self, out_features: int, in_features: int) -> None:
        """Raise WeightFormatError if a matrix of this size cannot be packed."""

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        """Return name, dtype and shape of every packed tensor."""
        shape = (out_features, code_bytes(in_features, self.bits))
        return {
            "weight_packed": PackedTensorForm(torch.uint8, shape),
            **self._group_forms(out_features, in_features),
            "weight_shape": PackedTensorForm(torch.int64, (2,)),
        }

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Pack a finite floating-point matrix."""
        check_matrix(weight, self.name)
        wide = weight.detach().to(torch.float32)
        check_finite(wide, self.name, "is outside of the range of torch.float32")
        self.check_shape(*wide.shape)
        codes, groups = self._encode(wide)
        forms = self._group_forms(*wide.shape)
        named = {name: one.view(form.shape) for (name, form), one in zip(forms.items(), groups, strict=True)}
        return {"weight_packed": pack_codes(codes, self.bits), **named, "weight_shape": torch.tensor(wide.shape)}

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the matrix in float32."""
        codes = packed["weight_packed"]
        return self.unpack_rows(packed, torch.arange(len(codes), device=codes.device))

    def unpack_rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Return some rows of the matrix in float32.

        Args:
            index: int64 `[rows]`.
        """
        columns = int(packed["weight_shape"][1])
        codes = unpack_codes(packed["weight_packed"][index], self.bits, columns)
        return self._decode(index, codes, self._group_tensors(packed))

    def linear(
        self, input: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, product: Product | None = None
    ) -> torch.Tensor:
        """Return `input @ unpack(packed).T + bias`; see `WeightFormat.linear`."""
        columns, codes = input.shape[-1], packed["weight_packed"]

        def values(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
            index, rows, *groups = tensors
            return self._decode(index, unpack_codes(rows, self.bits, columns), groups).to(dtype)

        index = torch.arange(len(codes), device=codes.device)
        return packed_matmul(input, bias, values, [index, codes], product, shared=self._group_tensors(packed))

    def join(self, parts: Sequence[PackedWeight]) -> PackedWeight:
        """Return the packed matrix of the rows of all parts, in the order of `parts`."""
        rows = sum(len(part["weight_packed"]) for part in parts)
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        joined["weight_shape"] = torch.tensor([rows, int(parts[0]["weight_shape"][1])])
        return joined

    def _group_tensors(self, packed: PackedWeight) -> list[torch.Tensor]:
        return [tensor for name, tensor in packed.items() if name not in ("weight_packed", "weight_shape")]


class RangeWeightFormat(GroupedWeightFormat):
    """Integers `q` that divide the range from a group's minimum to its maximum: a weight is `q / scale + minimum`.

    `scale = (2 ** bits - 1) / (max - min)`, 1 where all weights of the group are equal; `q = round((w - min) * scale)`,
    to nearest, ties to even, in float32. DeepSpeed has this format as `weight_quantization` with `symmetric: false`.

    Args:
        group: number of successive features that share a scale; it must divide the size of `dim`.
        dim: dimension of the features of a group: 0, output features, or 1, input features.
    """

    def __init__(self, bits: int, group: int, dim: int = 1) -> None:
        if bits not in CODE_BITS or bits > 8 or dim not in (0, 1) or group < 1:
            raise WeightFormatError(
                f"a range of {bits} bits in groups of {group} along dimension {dim} is not a weight format; use "
                "2, 3, 4, 6 or 8 bits, and dimension 0 or 1"
            )
        self.bits, self.group, self.dim = bits, group, dim
        self.name = f"range{bits}_g{group}" + ("_outputs" if dim == 0 else "")

    def check_shape(self, out_features: int, in_features: int) -> None:
        size = (out_features, in_features)[self.dim]
        if size % self.group:
            raise WeightFormatError(
                f"groups of {self.group} do not divide dimension {self.dim} of a weight of shape "
                f"{(out_features, in_features)}; use a divisor of {size}"
            )

    def _group_forms(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        count = -(-(out_features, in_features)[self.dim] // self.group)
        shape = (count, in_features) if self.dim == 0 else (out_features, count)
        return {name: PackedTensorForm(torch.float32, shape) for name in ("weight_scale", "weight_minimum")}

    def _encode(self, wide: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        groups = wide.unflatten(self.dim, (-1, self.group))
        low, high = groups.amin(self.dim + 1, keepdim=True), groups.amax(self.dim + 1, keepdim=True)
        top = 2**self.bits - 1
        scale = torch.where(high > low, top / (high - low), torch.ones_like(low))
        codes = ((groups - low) * scale).clamp_(0, top).round_().to(torch.uint8)
        return codes.view(wide.shape), [scale, low]

    def _decode(self, index: torch.Tensor, codes: torch.Tensor, groups: Sequence[torch.Tensor]) -> torch.Tensor:
        scale, low = (self._spread(one, index) for one in groups)
        return codes.to(torch.float32).div_(scale).add_(low)

    def _spread(self, values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if self.dim == 0:
            return values[index // self.group]
        return values[index].repeat_interleave(self.group, 1)


class MinifloatWeightFormat(GroupedWeightFormat):
    """Floats of a sign, some bits of exponent and of mantissa, without infinities, times a scale of a group.

    Groups are successive elements of the flattened matrix; the last group may be shorter. The scale is the
    group's maximum magnitude divided by `largest`; `q = w / scale`, rounded to the nearest value, ties to even. A group
    of zeros has scale 0. The format is that of DeepSpeed's `fp_quantizer`.

    Args:
        bits: number of bits of a value: 4, 6, 8 or 12.
        mantissa: number of bits of the mantissa.
        group: number of elements that share a scale.
    """

    def __init__(self, bits: int, mantissa: int, group: int) -> None:
        exponent = bits - 1 - mantissa
        if bits not in (4, 6, 8, 12) or mantissa < 1 or exponent < 1 or group < 1:
            raise WeightFormatError(
                f"floats of {bits} bits with {mantissa} of mantissa in groups of {group} are not a weight format; use "
                "4, 6, 8 or 12 bits with at least one of mantissa and exponent"
            )
        self.bits, self.mantissa, self.group = bits, mantissa, group
        self.bias = 2 ** (exponent - 1) - 1
        highest = min(2**exponent - 1 - self.bias, _HIGHEST_EXPONENT)
        self.largest = (2 - 2.0**-mantissa) * 2.0**highest
        self.name = f"float{bits}_e{exponent}m{mantissa}_g{group}"

    def _group_forms(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        return {"weight_scale": PackedTensorForm(torch.float32, (-(-out_features * in_features // self.group),))}

    def _encode(self, wide: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        codes, scale = self.encode_groups(wide.reshape(-1))
        return codes.view(wide.shape), [scale]

    def _decode(self, index: torch.Tensor, codes: torch.Tensor, groups: Sequence[torch.Tensor]) -> torch.Tensor:
        (scale,), columns = groups, codes.shape[1]
        if columns % self.group == 0:
            return self.decode(codes).mul_(
                scale.view(-1, columns // self.group)[index].repeat_interleave(self.group, 1)
            )
        places = index.unsqueeze(1) * columns + torch.arange(columns, device=index.device)
        return self.decode(codes).mul_(scale[places // self.group])

    def join(self, parts: Sequence[PackedWeight]) -> PackedWeight:
        """Return the packed matrix of the rows of all parts, in the order of `parts`.

        Raises:
            WeightFormatError: the last group of a matrix is short.
        """
        if any(part["weight_shape"].prod().item() % self.group for part in parts[:-1]):
            raise WeightFormatError(f"matrices of format {self.name!r} whose last group is short cannot be joined")
        return super().join(parts)

    def encode_groups(self, flat: torch.Tensor, *, stochastic: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes (int32) of float32 elements, and the scales of their groups.

        Args:
            stochastic: round up with a probability equal to the distance from the next lower value, in steps, instead
                of rounding to the nearest value.
        """
        padded = F.pad(flat, (0, -flat.numel() % self.group)).view(-1, self.group)
        scale = padded.abs().amax(1) / self.largest
        divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(1)
        return self.encode(padded / divisor, stochastic=stochastic).view(-1)[: flat.numel()], scale

    def encode(self, values: torch.Tensor, *, stochastic: bool = False) -> torch.Tensor:
        """Return the codes (int32) of float32 values. Magnitudes above `largest` become `largest`."""
        size = values.abs().clamp_(max=self.largest)
        least = 1 - self.bias  # exponent of the smallest normal number, and of all subnormal ones
        step = _exponent(size).clamp_(min=least) - self.mantissa
        steps = torch.ldexp(size, -step)
        steps = (steps + torch.rand_like(steps)).floor_() if stochastic else steps.round_()
        rounded = torch.ldexp(steps, step).clamp_(max=self.largest)
        exponent = _exponent(rounded).clamp_(min=least)
        # a number below the smallest normal one has the exponent's code 0 and no leading 1
        code: torch.Tensor = torch.ldexp(rounded, self.mantissa - exponent).to(torch.int32)
        sign: torch.Tensor = torch.signbit(values).to(torch.int32) << (self.bits - 1)
        return code.add_((exponent - least) << self.mantissa).bitwise_or_(sign)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the float32 values of codes (int32)."""
        size = codes & (2 ** (self.bits - 1) - 1)
        fraction, exponent = size & (2**self.mantissa - 1), size >> self.mantissa
        whole = torch.where(exponent > 0, fraction + 2**self.mantissa, fraction).to(torch.float32)
        value = torch.ldexp(whole, exponent.clamp(min=1) - (self.bias + self.mantissa))
        return torch.where(codes >> (self.bits - 1) > 0, -value, value)


_HIGHEST_EXPONENT = 8  # DeepSpeed's scales map the largest magnitude of 12-bit floats to this exponent


def _exponent(size: torch.Tensor) -> torch.Tensor:
    """Return `floor(log2(size))`, int32; -126 for 0."""
    exponent = torch.frexp(size).exponent - 1
    return torch.where(size > 0, exponent, torch.full_like(exponent, -126))
