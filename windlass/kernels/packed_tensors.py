"""Tensors of a packed matrix: their dtypes and shapes, and the checks of a matrix before it is packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windlass.base.errors import WeightFormatError

PackedWeight = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PackedTensorForm:
    """Dtype and shape of one packed tensor, in memory and in a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RowTensors:
    """Optional members of a weight format whose tensors all have one row for each output feature, and whose `pack`
    rounds each row by itself."""

    def unpack(self, packed: PackedWeight) -> torch.Tensor:
        """Return the matrix; see `WeightFormat.unpack`."""
        raise NotImplementedError

    def unpack_rows(self, packed: PackedWeight, index: torch.Tensor) -> torch.Tensor:
        """Return some rows of the matrix in the format's own precision.

        Args:
            index: int64 `[rows]`.
        """
        return self.unpack({name: tensor[index] for name, tensor in packed.items()})

    def join(self, parts: Sequence[PackedWeight]) -> PackedWeight:
        """Return the packed matrix of the rows of all parts, in the order of `parts`."""
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def check_matrix(weight: torch.Tensor, name: str) -> None:
    if weight.dim() != 2 or not weight.is_floating_point():
        raise WeightFormatError(
            f"format {name!r} packs floating-point matrices, not {weight.dtype} of shape {tuple(weight.shape)}; pass "
            "the weight of a linear layer before it is packed"
        )
    if weight.is_meta:
        raise WeightFormatError(f"a weight on the meta device has no values to pack as {name!r}; load them first")
    check_finite(weight, name, "is not finite")


def check_finite(weight: torch.Tensor, name: str, problem: str) -> None:
    wide = weight.float() if weight.dtype.itemsize == 1 else weight  # torch has no isfinite for float8
    # `aminmax` needs no temporary tensor, unlike `isfinite` of all elements.
    if not wide.numel() or bool(torch.stack(wide.aminmax()).isfinite().all()):
        return
    finite = torch.isfinite(wide)
    if not bool(finite.all()):
        row, column = (int(index) for index in (~finite).nonzero()[0])
        raise WeightFormatError(
            f"format {name!r} cannot pack element [{row}, {column}] of a weight of shape {tuple(weight.shape)}: it "
            f"{problem}; correct the weight before it is packed"
        )
