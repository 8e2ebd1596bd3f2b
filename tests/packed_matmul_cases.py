"""Packed matrices for tests of device kernels, and the exact product of each."""

from __future__ import annotations

import torch

from windlass.kernels.coded_formats import CodedWeightFormat
from windlass.kernels.weight_format import PackedWeight, get_weight_format, list_weight_formats

FORMATS = [
    name
    for name in list_weight_formats()
    if name in ("int8", "fp8") or isinstance(get_weight_format(name), CodedWeightFormat)
]


def pack_random(name: str, outputs: int, features: int, seed: int = 0) -> PackedWeight:
    """Return a packed matrix whose rows differ in scale; a matrix of more than two rows has a row of zeros."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, features, generator=draw) * torch.rand(outputs, 1, generator=draw).mul(4).exp()
    if outputs > 2:
        weight[1] = 0
    return get_weight_format(name).pack(weight)


def random_inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_product(
    name: str, packed: PackedWeight, input: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product in float64, and the sums of the magnitudes of its terms."""
    weight, wide = get_weight_format(name).unpack(packed).double(), input.double()
    added = 0 if bias is None else bias.double()
    return wide @ weight.T + added, wide.abs() @ weight.abs().T + abs(added)
