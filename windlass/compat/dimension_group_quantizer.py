"""Classes `Quantizer` and `DeQuantizer` of `deepspeed.inference.quantization.utils`: codes of groups along a dimension.

The section `weight_quantization` of a configuration does not use them: it packs weights with windlass's formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from windlass.compat.group_quantizer import GroupQuantizationError, check_bits, even_and_odd


class DimensionGroups:
    """Division of a tensor's dimension into groups of successive indices.

    Args:
        config: dict with `num_bits` (4 or 8), `group_dim`, `group_size`, and `symmetric`, which must be False.

    Raises:
        GroupQuantizationError: another number of bits, or symmetric codes.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.bits: int = config["num_bits"]
        check_bits(self.bits)
        if config["symmetric"]:
            raise GroupQuantizationError("symmetric is true; only asymmetric codes are supported, write false")

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view `[..., groups, group_size, ...]` of the dimension `group_dim`.

        Raises:
            GroupQuantizationError: the size of the dimension is not a multiple of `group_size`.
        """
        dim, size = self.config["group_dim"], self.config["group_size"]
        if tensor.shape[dim] % size:
            raise GroupQuantizationError(
                f"dimension {dim} of shape {tuple(tensor.shape)} is not a multiple of group_size {size}; set a divisor"
            )
        divided: torch.Tensor = tensor.unflatten(dim, (-1, size))
        return divided


class DimensionGroupQuantizer(DimensionGroups):
    """Quantizer that maps the range between the minimum and the maximum of each group to unsigned integers."""

    def quantize(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `(codes, scales, minima)`; a value is `code / scale + minimum`.

        Returns:
            codes: uint8 of the tensor's shape. With 4 bits two codes share a byte, the first in its upper half, which
                halves the last dimension.
            scales, minima: in the tensor's dtype, `[..., groups, 1, ...]` for the dimension `group_dim`.

        Raises:
            GroupQuantizationError: see `split`, or 4-bit codes of a last dimension of odd size.
        """
        grouped, largest = self.split(tensor.detach()), 2**self.bits - 1
        along = self.config["group_dim"] % tensor.dim() + 1
        low, high = grouped.amin(dim=along, keepdim=True), grouped.amax(dim=along, keepdim=True)
        width = high.float() - low.float()
        scale = torch.where(width > 0, largest / width, torch.ones_like(width))
        # Without this bound, the 16-bit scale of a group of almost equal values would be infinite.
        scale = scale.clamp(max=torch.finfo(tensor.dtype).max).to(tensor.dtype)
        codes = ((grouped.float() - low.float()) * scale.float()).round().clamp(0, largest)
        packed = codes.to(torch.uint8).view(tensor.shape)
        return (packed if self.bits == 8 else _pack(packed)), scale, low


class DimensionGroupDequantizer(DimensionGroups):
    """Inverse of `DimensionGroupQuantizer`.

    Args:
        config: see `DimensionGroups`.
        dtype: dtype of the values.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__(config)
        self.dtype = dtype

    def dequantize(self, tensor: torch.Tensor, quant_scale: torch.Tensor, quant_min: torch.Tensor) -> torch.Tensor:
        """Return the values of codes, given the scales and minima that `quantize` returned."""
        codes = tensor if self.bits == 8 else torch.stack([tensor >> 4, tensor & 15], dim=-1).flatten(-2)
        values = self.split(codes).float() / quant_scale.float() + quant_min.float()
        return values.view(codes.shape).to(self.dtype)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    even, odd = even_and_odd(codes)
    return (even << 4) | odd
