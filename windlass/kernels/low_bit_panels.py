"""Weight codes of 1 to 8 bits in panels of 16 output features, for native matrix products.

[Note: low-bit panels] A unit is 32 input features of the 16 outputs of a panel, in 8 steps of 4 features. With 8-bit
codes, to which those of 5 to 7 bits are widened, each step is a cache line with 4 features of each output. With
narrower codes the 8 steps together take as many cache lines as a code has bits. A product of few rows expands codes in
registers; for many rows a thread first expands its panels to bytes, so that the same micro-kernel multiplies codes of
every width. (8-bit codes are expanded to 16-bit integers where the processor has no dot product of bytes.)
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from windlass.kernels.bit_packing import pack_words, unpack_words
from windlass.kernels.coded_formats import (
    CodedWeightFormat,
    Float8WeightFormat,
    IntegerWeightFormat,
    TritWeightFormat,
)
from windlass.kernels.grouped_formats import RangeWeightFormat, unpack_codes
from windlass.kernels.inference_path import tensor_address
from windlass.kernels.packed_tensors import PackedWeight
from windlass.kernels.panel_memory import place_panels, take_panels

LowBitFormat = CodedWeightFormat | Float8WeightFormat | RangeWeightFormat

_GROUPS = (32, 64, 128)
_FLOAT8_CODES = 9
# Bits of integers in panels, by their bits in the file. Native code has no codes of 5 to 7 bits, and reads a single bit
# as -1 or 1 (`BinaryWeightFormat`).
_WIDENED = {1: 2, 5: 8, 6: 8, 7: 8}
_PANEL = 16
_ROW_GROUP = 128  # group size of formats with one scale per row: a partial sum is scaled after this many features


class LowBitPanels:
    """Packed weights of a `LowBitFormat`, rearranged in panels; see [Note: low-bit panels].

    Args:
        weight_format: format of `tensors`.
        tensors: packed tensors of the format. The panels keep no reference to them.
    """

    def __init__(self, weight_format: LowBitFormat, tensors: PackedWeight, out_features: int, in_features: int) -> None:
        module = low_bit_module()
        assert module is not None
        self.module: Any = module
        coded = weight_format if isinstance(weight_format, CodedWeightFormat) else None
        ranges = weight_format if isinstance(weight_format, RangeWeightFormat) else None
        codes = tensors["weight" if isinstance(weight_format, Float8WeightFormat) else "weight_packed"].contiguous()
        code = _FLOAT8_CODES if isinstance(weight_format, Float8WeightFormat) else weight_format.bits
        if ranges is not None and code == 6:
            codes, code = unpack_codes(codes, 6, in_features).to(torch.uint8).contiguous(), 8
        elif isinstance(coded, IntegerWeightFormat) and code in _WIDENED:
            wide, code = unpack_words(codes, code, in_features), _WIDENED[code]
            codes = wide if code == 8 else pack_words(wide, code)

        def fill(panels: torch.Tensor) -> None:
            module.pack(
                code,
                isinstance(coded, TritWeightFormat),
                tensor_address("packed weight", codes),
                codes.shape[1] * codes.element_size(),
                out_features,
                in_features,
                panels.data_ptr(),
                torch.get_num_threads(),
            )

        self._panels = take_panels(module.panel_bytes(code, out_features, in_features), fill)
        self._scales = self._group_scales = self._zeros = self._wide_scales = self._shifts = None
        # native code decodes a bit as 0 or 2, subtracts 1, and multiplies by half the scale
        divisor = 2 if code == 1 else 1
        group, zero = (_ROW_GROUP, 0.0) if coded is None else (coded.group or _ROW_GROUP, coded.zero)
        if ranges is not None:
            group, (self._wide_scales, self._shifts) = min(ranges.group, _ROW_GROUP), _range_panels(ranges, tensors)
        elif coded is None or coded.group is None:
            self._scales = tensors["weight_scale"].to(torch.float32).flatten() / divisor
        else:
            self._group_scales = _in_panels(tensors["weight_scale"] / divisor)
        zeros = None if coded is None else coded.unpack_zeros(tensors)
        if coded is not None and zeros is not None:
            self._zeros = _in_panels(zeros.expand(-1, -(-in_features // group)) if coded.group is None else zeros)
        if code == 1:
            zero = 1.0
        self._weight = (code, self._panels.data_ptr(), out_features, in_features, group)
        groups = (_address(self._group_scales), _address(self._zeros), int(zero))
        self._more = (*groups, _address(self._wide_scales), _address(self._shifts), _address(self._scales))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points, padding included."""
        held = (self._panels, self._scales, self._group_scales, self._zeros, self._wide_scales, self._shifts)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def foreign_weight(self, number: int, bias: torch.Tensor | None, is_bf16: bool, quantize_inputs: bool) -> Any:
        """Return the weight as an object of the native module; `address` is the argument of `foreign_product`.

        The object has the addresses of these panels and of `bias`, which must outlive it.
        """
        address = 0 if bias is None else tensor_address("bias", bias)
        return self.module.weight(number, *self._weight, *self._more, address, is_bf16, quantize_inputs)

    def arguments(
        self, number: int, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, quantize_inputs: bool
    ) -> tuple[object, ...]:
        """Return the arguments of the native `linear`; see `PackedPanels.native_call`."""
        return (
            number,
            *self._weight,
            *self._more,
            0 if bias is None else tensor_address("bias", bias),
            tensor_address("input", x),
            tensor_address("output", out),
            out.numel() // self._weight[2],
            x.dtype == torch.bfloat16,
            torch.get_num_threads(),
            quantize_inputs,
        )


def has_native_codes(weight_format: object) -> bool:
    """Return True if native code multiplies weights of the format by way of `LowBitPanels`."""
    if isinstance(weight_format, RangeWeightFormat):
        group = weight_format.group
        if weight_format.dim == 0 or not (group in _GROUPS or group % _ROW_GROUP == 0):
            return False
    return isinstance(weight_format, LowBitFormat) and low_bit_module() is not None


@lru_cache(maxsize=1)
def low_bit_module() -> ModuleType | None:
    """Return the native module, or None if it was not built."""
    try:
        return importlib.import_module("windlass.kernels._low_bit")
    except ImportError:  # the reason is logged for the optimizers' kernels, which are built together with this module
        return None


def _range_panels(form: RangeWeightFormat, tensors: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `1 / scale` and the shifts `-minimum * scale`, in panels.

    With these, a value `q / scale + minimum` is `(q - shift) * (1 / scale)`. The scale is infinite where the range of a
    group is below the smallest normal numbers, so that its weights are below 2e-29: they become 0.
    """
    scale, low = tensors["weight_scale"], tensors["weight_minimum"]
    values = (1 / scale, torch.where(scale.isinf(), 0.0, -low * scale))
    repeats = max(form.group // _ROW_GROUP, 1)
    wide, shifts = (_in_panels(one.repeat_interleave(repeats, 1) if repeats > 1 else one) for one in values)
    return wide, shifts


def _in_panels(values: torch.Tensor) -> torch.Tensor:
    """Return `[outputs, groups]` as `[panels, groups, 16]` in the memory of panels; outputs after the last are 0."""
    outputs, groups = values.shape
    padded = values.new_zeros(-(-outputs // _PANEL) * _PANEL, groups)
    padded[:outputs] = values
    return place_panels(padded.view(-1, _PANEL, groups).transpose(1, 2).contiguous())


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
