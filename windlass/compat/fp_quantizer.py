"""Package `deepspeed.ops.fp_quantizer` and its op: floats of 4, 6, 8 and 12 bits with a scale for each group."""

from __future__ import annotations

from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.kernels.grouped_formats import MinifloatWeightFormat, code_bytes, pack_codes, unpack_codes

MANTISSA_BITS = {4: 1, 6: 2, 8: 3, 12: 4}
"""Number of mantissa bits of a float, by its total number of bits."""

_SCALE_BYTES = 4


def quantize(
    out: torch.Tensor | None,
    values: torch.Tensor,
    group_size: int,
    stochastic_rounding: bool = False,
    q_bits: int = 8,
    q_mantisa_bits: int = 3,
) -> torch.Tensor:
    """Return uint8 `[groups, bytes + 4]`: the codes of each group of successive elements, and its float32 scale.

    Args:
        out: memory of the result, or None.

    Raises:
        ModelError: there is no float format with `q_bits` bits, of which `q_mantisa_bits` are the mantissa.
    """
    form = _format(q_bits, q_mantisa_bits, group_size)
    flat = values.detach().reshape(-1).float()
    codes, scale = form.encode_groups(flat, stochastic=stochastic_rounding)
    padded = torch.nn.functional.pad(codes, (0, -flat.numel() % group_size)).view(-1, group_size)
    joined = torch.cat([pack_codes(padded, q_bits), scale.view(torch.uint8).view(-1, _SCALE_BYTES)], 1)
    return joined if out is None else out.copy_(joined.view(out.shape))


def dequantize(
    values: torch.Tensor, packed: torch.Tensor, group_size: int, q_mantisa_bits: int = 3, q_exponent_bits: int = 4
) -> torch.Tensor:
    """Write the values of `packed` (see `quantize`) to `values`, of any floating-point dtype, and return `values`."""
    bits = 1 + q_mantisa_bits + q_exponent_bits
    return selective_dequantize(values, packed, None, group_size, q_mantisa_bits, bits)


def selective_dequantize(
    values: torch.Tensor,
    packed: torch.Tensor,
    index: torch.Tensor | None,
    group_size: int,
    q_mantisa_bits: int = 3,
    q_bits: int = 8,
) -> torch.Tensor:
    """Write the values of the groups `index` (None: all groups), in that order, to `values`, and return `values`."""
    form = _format(q_bits, q_mantisa_bits, group_size)
    rows = packed.view(-1, code_bytes(group_size, q_bits) + _SCALE_BYTES)
    rows = rows if index is None else rows[index]
    scale = rows[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    codes = unpack_codes(rows[:, :-_SCALE_BYTES].contiguous(), q_bits, group_size)
    found = (form.decode(codes) * scale).view(-1)[: values.numel()]
    with torch.no_grad():
        return values.copy_(found.view(values.shape))


class FloatQuantizer:
    """Base class of quantizers of tensors.

    Args:
        group_size: number of elements that share a scale.
    """

    def __init__(self, group_size: int = 512) -> None:
        self.group_size = group_size

    def quantize(self, input: torch.Tensor, q_bits: int = 8, q_mantisa_bits: int = 3) -> torch.Tensor:
        """Return the packed form of a tensor."""
        raise NotImplementedError

    def dequantize(self, input_q: torch.Tensor, fp_out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of a packed tensor."""
        raise NotImplementedError


class FP_Quantize(FloatQuantizer):  # noqa: N801  (name of DeepSpeed)
    """Quantizer to floats of 4, 6, 8 or 12 bits. The largest element of a group determines the group's scale.

    Args:
        quantization_config: `QuantizationConfig` of `deepspeed.linear`, or the number of elements in a group.
        group_size: number of elements in a group, used if `quantization_config` is None.
    """

    def __init__(self, quantization_config: Any = None, group_size: int = 512) -> None:
        size = quantization_config if isinstance(quantization_config, int) else group_size
        self.q_config = None if isinstance(quantization_config, int) else quantization_config
        super().__init__(size if self.q_config is None else self.q_config.group_size)
        self.orig_dtype: torch.dtype | None = None
        self.orig_shape: torch.Size | None = None
        self.scale: torch.Tensor | None = None

    def quantize(
        self,
        input: torch.Tensor,
        q_bits: int = 8,
        q_mantisa_bits: int | None = None,
        stochastic_mode: bool = False,
        return_meta_tensor: bool = False,
    ) -> Any:
        """Pack a tensor.

        Args:
            q_mantisa_bits: number of mantissa bits; None: that of `MANTISSA_BITS`.
            return_meta_tensor: return the pair `(codes, scales)` instead of one tensor with both. Codes of 8 bits have
                the shape of `input`, others `[groups, bytes]`; scales are float32 as bytes, uint8 `[groups, 4]`.

        Raises:
            ModelError: there is no float format with `q_bits` bits.
        """
        self.orig_dtype, self.orig_shape = input.dtype, input.shape
        packed = quantize(None, input, self.group_size, stochastic_mode, q_bits, _mantissa(q_bits, q_mantisa_bits))
        self.scale = packed[:, -_SCALE_BYTES:].contiguous()
        if not return_meta_tensor:
            return packed
        codes = packed[:, :-_SCALE_BYTES].contiguous()
        return codes.view(-1)[: input.numel()].view(input.shape) if q_bits == 8 else codes, self.scale

    def dequantize(
        self,
        input_q: torch.Tensor,
        fp_out: torch.Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the values of a packed tensor: in `fp_out`, or in a new tensor with the shape and dtype of the last
        tensor that was quantized.

        Args:
            scale: second result of `quantize(..., return_meta_tensor=True)`, or the result of `get_scales`; None:
                `input_q` contains the scales.
        """
        return self.selective_dequantize(input_q, None, fp_out, q_bits, q_mantisa_bits, scale)

    def selective_dequantize(
        self,
        input_q: torch.Tensor,
        indexes: torch.Tensor | None,
        fp_out: torch.Tensor | None = None,
        q_bits: int = 8,
        q_mantisa_bits: int | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the values of the rows `indexes` of the quantized tensor; None: of all rows.

        Raises:
            ModelError: nothing was quantized and there is no `fp_out`, or `indexes` is set and rows
                do not consist of full groups.
        """
        mantissa, shape = _mantissa(q_bits, q_mantisa_bits), self.orig_shape
        if fp_out is None and shape is None:
            raise ModelError(
                "FP_Quantize.dequantize: nothing was quantized before, so the shape is not known; pass fp_out"
            )
        groups = None
        if indexes is not None:
            if shape is None or len(shape) < 1 or (shape.numel() // shape[0]) % self.group_size:
                raise ModelError(
                    f"FP_Quantize.selective_dequantize: rows of a tensor of shape {tuple(shape or ())} are not whole "
                    f"groups of {self.group_size}; call quantize first, or use another group_size"
                )
            each = shape.numel() // shape[0] // self.group_size
            groups = (indexes.view(-1, 1) * each + torch.arange(each, device=indexes.device)).view(-1)
            shape = torch.Size((indexes.numel(), *shape[1:]))
        if fp_out is None:
            assert shape is not None
            fp_out = torch.empty(shape, dtype=self.orig_dtype, device=input_q.device)
        if scale is not None:
            bytes_of_group = code_bytes(self.group_size, q_bits)
            codes = torch.nn.functional.pad(input_q.reshape(-1), (0, -input_q.numel() % bytes_of_group))
            scale_bytes = scale.contiguous().view(torch.uint8).view(-1, _SCALE_BYTES)
            input_q = torch.cat([codes.view(-1, bytes_of_group), scale_bytes], 1)
        return selective_dequantize(fp_out, input_q, groups, self.group_size, mantissa, q_bits)

    def get_scales(self) -> torch.Tensor:
        """Return the float32 scales `[groups, 1]` of the last `quantize`.

        Raises:
            ModelError: nothing was quantized.
        """
        if self.scale is None:
            raise ModelError("FP_Quantize.get_scales: nothing was quantized before; call quantize")
        return self.scale.view(torch.float32)


def matmul_fp8(
    inp: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, quantization_group_size: int, quantizer: FP_Quantize
) -> torch.Tensor:
    """Return `inp @ weight`, where `weight` `[in, out]` is packed in 8 bits by `quantizer`.

    Args:
        weight, scale: results of `quantizer.quantize(..., return_meta_tensor=True)`; `scale` may also be the result of
            `quantizer.get_scales()`.

    Raises:
        ModelError: `quantization_group_size` is not the quantizer's.
    """
    if quantization_group_size != quantizer.group_size:
        raise ModelError(
            f"matmul_fp8: quantization_group_size is {quantization_group_size}, that of the quantizer "
            f"{quantizer.group_size}; pass the same"
        )
    return inp @ quantizer.dequantize(weight, scale=scale).to(inp.dtype)


def _mantissa(bits: int, given: int | None) -> int:
    if given is None and bits not in MANTISSA_BITS:
        raise ModelError(f"FP_Quantize: q_bits is {bits}; write 4, 6, 8 or 12")
    return MANTISSA_BITS[bits] if given is None else given


def _format(bits: int, mantissa: int, group: int) -> MinifloatWeightFormat:
    try:
        return MinifloatWeightFormat(bits, mantissa, group)
    except ModelError as error:
        raise ModelError(f"fp_quantizer: {error}") from error
