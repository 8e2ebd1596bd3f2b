"""Weight formats as a user may register them. Their tensors have other names and shapes than windlass's formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn import functional as F

from windlass.base.errors import WeightFormatError
from windlass.kernels import weight_format
from windlass.kernels.packed_matmul import Product, packed_matmul
from windlass.kernels.weight_format import PackedTensorForm, PackedWeight, RowTensors, register_weight_format


class Nibbles:
    """Format with two 4-bit codes a byte and a scale of each row, without the optional members of a format."""

    name = "my4"

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        if in_features % 2:
            raise WeightFormatError(f"my4 packs an even number of features, not {in_features}")
        return {
            "codes": PackedTensorForm(torch.uint8, (out_features, in_features // 2)),
            "scale": PackedTensorForm(torch.float32, (out_features,)),
        }

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        wide = weight.detach().float()
        scale = wide.abs().amax(1) / 7
        low, high = self._halves((wide / scale[:, None]).round().add(8).to(torch.uint8))
        return {"codes": low | high << 4, "scale": scale}

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        codes = self._merge(packed["codes"] & 15, packed["codes"] >> 4)
        return (codes.float() - 8) * packed["scale"][:, None]

    def linear(
        self, input: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, product: Product | None = None
    ) -> torch.Tensor:
        def values(rows: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
            return self.unpack({"codes": rows[0], "scale": rows[1]}).to(dtype)

        return packed_matmul(input, bias, values, [packed["codes"], packed["scale"]], product)

    def _halves(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return codes[:, ::2], codes[:, 1::2]

    def _merge(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.stack([low, high], -1).flatten(1)


class HalvedNibbles(Nibbles):
    """Format whose bytes hold a feature of the row's first half (low bits) and one of its second half (high bits)."""

    name = "my4_halves"

    def _halves(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = codes.chunk(2, 1)
        return low, high

    def _merge(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.cat([low, high], 1)


class OneScale:
    """Format with a byte for each weight and one scale of the whole matrix, a tensor without dimensions."""

    name = "my8"

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        return {
            "codes": PackedTensorForm(torch.int8, (out_features, in_features)),
            "scale": PackedTensorForm(torch.float32, ()),
        }

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        scale = weight.detach().float().abs().max() / 127
        return {"codes": (weight.detach().float() / scale).round().to(torch.int8), "scale": scale}

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        return packed["codes"].float() * packed["scale"]

    def linear(
        self, input: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, product: Product | None = None
    ) -> torch.Tensor:
        return F.linear(input, self.unpack(packed).to(input.dtype), bias)


class Signs(OneScale):
    """Format with the codes -1, 0 and 1, and one scale of the whole matrix."""

    name = "my1"

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        scale = weight.detach().float().abs().mean() * 1.5
        return {"codes": (weight.detach().float() / scale).round().clamp(-1, 1).to(torch.int8), "scale": scale}


class RowScales(RowTensors, OneScale):
    """Format with a byte for each weight and a scale of each row, and the optional members of `RowTensors`."""

    name = "my8_rows"

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        return {
            "codes": PackedTensorForm(torch.int8, (out_features, in_features)),
            "scale": PackedTensorForm(torch.float32, (out_features, 1)),
        }

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        scale = weight.detach().float().abs().amax(1, keepdim=True) / 127
        return {"codes": (weight.detach().float() / scale).round().to(torch.int8), "scale": scale}

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        return OneScale.unpack(self, packed)


class WrongForm(OneScale):
    """Format whose `file_form` lacks a tensor that `pack` returns."""

    name = "my8_wrong"

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        return {"codes": PackedTensorForm(torch.int8, (out_features, in_features))}


@contextmanager
def registered() -> Iterator[None]:
    """Register the formats inside the `with` block."""
    with patch.dict(weight_format._formats):
        for form in (Nibbles(), HalvedNibbles(), OneScale(), Signs(), RowScales(), WrongForm()):
            register_weight_format(form)
        yield
