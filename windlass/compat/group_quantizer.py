"""Op `quantizer` of `deepspeed.ops.op_builder`, and `CUDAQuantizer`: integers of 8 or 4 bits with a scale per group.

The functions work on every device. The collectives of `zero_quantized_*` use codecs (`windlass.comm.codec`) instead.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch

from windlass.base.errors import ModelError

Symmetric, Asymmetric = 0, 1
"""Values of `quant_type`. The codes cover a range around zero, or the range from a group's minimum to its maximum."""

_MAX_GROUP = 8000


class GroupQuantizationError(ModelError, AssertionError):
    """Error for elements that cannot be divided into the requested groups, or an unsupported number of bits."""


def quantize(values: torch.Tensor, groups: int, num_bits: int, quant_type: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a tensor in groups of successive elements, to the nearest integers.

    Returns:
        `(codes, parameters)`: int8 codes of the tensor's shape; two 4-bit codes share a byte, which halves the last
            dimension. Parameters are fp32: the scale `[groups, 1]`, or if asymmetric scale and minimum `[groups, 2]`.

    Raises:
        GroupQuantizationError: `groups` does not divide the number of elements, `num_bits` is neither 8 nor 4, or 4-bit
            codes have a last dimension of odd size.
    """
    _check(values.numel(), groups, num_bits)
    rows, half = values.detach().reshape(groups, -1).float(), 2 ** (num_bits - 1)
    if quant_type == Symmetric:
        scale = _nonzero(rows.abs().amax(dim=1, keepdim=True) / (half - 1))
        codes, parameters = (rows / scale).round(), scale
    else:
        low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
        scale = _nonzero((high - low) / (2 * half - 1))
        codes, parameters = ((rows - low) / scale).round() - half, torch.cat([scale, low], dim=1)
    packed = codes.to(torch.int8).view(values.shape)
    return packed if num_bits == 8 else _pack(packed), parameters


def dequantize(
    codes: torch.Tensor, parameters: torch.Tensor, groups: int, num_bits: int, quant_type: int
) -> torch.Tensor:
    """Return the values of the results of `quantize`, in fp16."""
    return dequantize_fp32(codes, parameters, groups, num_bits, quant_type).half()


def dequantize_fp32(
    codes: torch.Tensor, parameters: torch.Tensor, groups: int, num_bits: int, quant_type: int
) -> torch.Tensor:
    """Return the values of the results of `quantize`, in fp32."""
    whole = codes if num_bits == 8 else _unpack(codes)
    _check(whole.numel(), groups, num_bits)
    rows, known = whole.reshape(groups, -1).float(), parameters.view(groups, -1)
    low = known[:, 1:] if quant_type == Asymmetric else 0
    values: torch.Tensor = (rows + (2 ** (num_bits - 1) if quant_type == Asymmetric else 0)) * known[:, :1] + low
    return values.view(whole.shape)


def check_bits(num_bits: int) -> None:
    """Raise GroupQuantizationError unless `num_bits` is 4 or 8."""
    if num_bits not in (4, 8):
        raise GroupQuantizationError(f"num_bits is {num_bits}; write 8 or 4")


def even_and_odd(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes that share a byte: those with even and those with odd indices of the last dimension.

    Raises:
        GroupQuantizationError: the last dimension has an odd size.
    """
    if codes.shape[-1] % 2:
        raise GroupQuantizationError(
            f"4-bit codes need a last dimension of even size, not {codes.shape[-1]}; use 8 bits"
        )
    return codes[..., ::2], codes[..., 1::2]


def _check(numel: int, groups: int, num_bits: int) -> None:
    check_bits(num_bits)
    if groups < 1 or numel % groups:
        raise GroupQuantizationError(f"{numel} elements cannot be divided into {groups} groups; choose a divisor")


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    even, odd = even_and_odd(codes)
    return (even & 15) | (odd << 4)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    low = ((packed & 15) ^ 8) - 8
    return torch.stack([low, packed >> 4], dim=-1).flatten(-2)


class CUDAQuantizer:
    """Quantizer of parameters to 8 bits, in groups of at most 8000 elements.

    Attributes:
        quantizer_cuda_module: the op that quantizes. A script may replace it; the replacement gets tensors in fp16.
    """

    target_group_size = _MAX_GROUP
    group_size_cache: ClassVar[dict[int, int]] = {}
    quantizer_cuda_module: ClassVar[Any] = None

    def __init__(self) -> None:
        if CUDAQuantizer.quantizer_cuda_module is None:
            CUDAQuantizer.quantizer_cuda_module = sys.modules[__name__]

    def quantize(self, param: torch.Tensor, groups: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(codes, scales)` of a tensor; see `quantize`.

        Raises:
            GroupQuantizationError: no number of groups divides the elements into multiples of 8.
        """
        op = self.quantizer_cuda_module
        values = param if op is sys.modules[__name__] else param.half()
        found: tuple[torch.Tensor, torch.Tensor] = op.quantize(
            values, groups or self._num_groups(param.numel()), 8, op.Symmetric
        )
        return found

    def dequantize(
        self, quantized_param: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the values in `dtype`, by default fp16."""
        op = self.quantizer_cuda_module
        values: torch.Tensor
        if op is sys.modules[__name__]:  # dequantize to fp32, because the range of fp16 is small
            values = op.dequantize_fp32(quantized_param, scale, scale.numel(), 8, op.Symmetric)
            return values.to(dtype or torch.float16)
        values = op.dequantize(quantized_param, scale, scale.numel(), 8, op.Symmetric)
        return values if dtype is None else values.to(dtype)

    def _num_groups(self, numel: int) -> int:
        """Return the smallest number of groups of at most `target_group_size` elements, each a multiple of 8."""
        if numel not in self.group_size_cache:
            first = -(-numel // self.target_group_size)
            chosen = next(
                (count for count in range(max(first, 1), max(numel // 8, 1) + 1) if numel % (8 * count) == 0), None
            )
            if chosen is None:
                raise GroupQuantizationError(
                    f"{numel} elements do not divide into groups whose sizes are multiples of 8; pass groups"
                )
            self.group_size_cache[numel] = chosen
        return self.group_size_cache[numel]
