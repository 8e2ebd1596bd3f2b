"""Weight formats whose groups consist of scattered input features, as GPTQ writes them with `desc_act`.

[Note: ordered features] The columns of the matrix are stored sorted by group, in a coded format, beside the input
feature of each column (`weight_order`). A product takes the input features in that order.
"""

from __future__ import annotations

import torch

from windlass.base.errors import WeightFormatError
from windlass.kernels.coded_formats import CodedWeightFormat, GroupCodes
from windlass.kernels.packed_matmul import Product
from windlass.kernels.packed_tensors import PackedTensorForm, PackedWeight

ORDERED, ORDER = "_ordered", "weight_order"  # suffix of the names; name of the tensor


class OrderedWeightFormat:
    """Coded format with another order of the input features; see [Note: ordered features].

    Args:
        inner: format of the sorted columns.
    """

    def __init__(self, inner: CodedWeightFormat) -> None:
        self.inner, self.name = inner, inner.name + ORDERED

    def file_form(self, out_features: int, in_features: int) -> dict[str, PackedTensorForm]:
        return {
            **self.inner.file_form(out_features, in_features),
            ORDER: PackedTensorForm(torch.int64, (in_features,)),
        }

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Pack a matrix with its columns in reverse. (So a test division of the packed tensors among ranks fails, as it
        must for scattered features.)"""
        order = torch.arange(weight.shape[1], device=weight.device).flip(0)
        return {**self.inner.pack(weight.flip(1) if weight.dim() == 2 else weight), ORDER: order}

    def pack_codes(self, coded: GroupCodes, groups: torch.Tensor) -> PackedWeight:
        """Pack codes, given the number of the group of each column. The groups must be `sorts`."""
        order = groups.argsort(stable=True)
        sorted_codes = GroupCodes(coded.codes[:, order].contiguous(), coded.scale, coded.zero)
        return {**self.inner.pack_codes(sorted_codes), ORDER: order}

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        return self._in_place(self.inner.unpack(inner_tensors(packed)), packed)

    def unpack_rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Return the rows that `index` (int64 `[rows]`) selects, in float32."""
        return self._in_place(self.inner.unpack_rows(inner_tensors(packed), index), packed)

    def linear(
        self, input: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, product: Product | None = None
    ) -> torch.Tensor:
        return self.inner.linear(self.reorder(input, packed), inner_tensors(packed), bias, product)

    def reorder(self, input: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        """Return an input `[..., in_features]` with its features in the order of the stored columns."""
        return input.index_select(-1, packed[ORDER])

    def _in_place(self, values: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        found = torch.empty_like(values)
        if len(packed[ORDER]) and int(packed[ORDER].max()) >= values.shape[1]:
            raise WeightFormatError(f"{ORDER} has features that the matrix of {values.shape[1]} columns lacks")
        found[:, packed[ORDER]] = values
        return found


def inner_tensors(packed: PackedWeight) -> PackedWeight:
    """Return the tensors of the format of the sorted columns."""
    return {name: tensor for name, tensor in packed.items() if name != ORDER}


def sorts(groups: torch.Tensor, size: int) -> bool:
    """Return True if the columns, sorted by their groups, are the groups of `size` neighbours of a coded format."""
    return torch.equal(groups.sort().values, torch.arange(len(groups), device=groups.device) // size)
