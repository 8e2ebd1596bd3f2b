"""Matrix products of rows that lie sorted by expert, each with its expert's matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

_GROUPED_MM: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNMENT = 16  # bytes, which its kernels ask of addresses and strides


@dataclass(frozen=True)
class RowGroups:
    """Which rows belong to which expert: the first `counts[0]` rows to the first one, and so on.

    Attributes:
        counts: `[experts]`, rows of each, on the device of the rows.
        known: the same on the host, where somebody had to know them already.
    """

    counts: torch.Tensor
    host_counts: Sequence[int] | None = None

    def sizes(self) -> list[int]:
        """Rows of each expert, on the host: waits for the device if nobody knows them."""
        return self.counts.tolist() if self.host_counts is None else list(self.host_counts)

    def expert_of(self, rows: torch.Tensor) -> torch.Tensor:
        """`[rows]`, the number of each row's expert among those here."""
        numbers = torch.arange(self.counts.shape[0], device=self.counts.device)
        return numbers.repeat_interleave(self.counts, output_size=rows.shape[0])


def grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    groups: RowGroups,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Each row through its expert's linear layer; one kernel for all experts where torch has one.

    Every expert's weight gets a gradient, zeros where it had no row.

    Args:
        rows: `[rows, in]`, sorted by expert.
        weight: `[experts, out, in]`, or `[experts, in, out]` if `transposed`.
        bias: `[experts, out]`.

    Returns:
        `[rows, out]`.
    """
    rows, weight, bias = _autocast_operands(rows, weight, bias)
    matrices = weight if transposed else weight.transpose(-2, -1)  # [experts, in, out]
    if has_grouped_kernel(rows, weight):
        if weight.requires_grad and weight.device.type != "cpu":
            matrices = _ZeroUnusedGradients.apply(matrices, groups.counts)
        ends = groups.counts.cumsum(0).to(torch.int32)
        found: torch.Tensor = _GROUPED_MM(rows, matrices, offs=ends)
    else:
        found = grouped_linear_loop(rows, matrices, groups)
    return found if bias is None else found + bias.index_select(0, groups.expert_of(rows))


def grouped_linear_loop(rows: torch.Tensor, matrices: torch.Tensor, groups: RowGroups) -> torch.Tensor:
    """What `grouped_linear` means: one product for each expert that has rows.

    Args:
        rows: `[rows, in]`.
        matrices: `[experts, in, out]`.
    """
    sizes = groups.sizes()
    filled = [expert for expert, size in enumerate(sizes) if size] or [0]  # none at all: still a part of the graph
    parts = rows.split(sizes)
    each = matrices.unbind(0)
    return torch.cat([parts[expert] @ each[expert] for expert in filled])


def has_grouped_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch has one kernel for all experts: 16 bits on CUDA (compute capability 8.0 on), also fp32 on the CPU;
    addresses and strides of whole 16 bytes."""
    if _GROUPED_MM is None or rows.dtype != weight.dtype or not weight.is_contiguous() or not rows.is_contiguous():
        return False
    if any(tensor.data_ptr() % _ALIGNMENT for tensor in (rows, weight)):
        return False
    if any(size * weight.element_size() % _ALIGNMENT for size in weight.shape[1:]):
        return False
    if weight.device.type == "cuda":
        return weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)


class _ZeroUnusedGradients(torch.autograd.Function):
    """The weights; in their gradient, experts without a row get zeros: a kernel that has nothing to add up for a matrix
    may leave it as the memory was."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (counts,) = ctx.saved_tensors
        return gradients[0].masked_fill(counts.eq(0)[:, None, None], 0.0), None


def _autocast_operands(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What autocast makes of the operands of a linear layer: torch does not do so for grouped products."""
    device = rows.device.type
    if not torch.is_autocast_enabled(device) or not rows.is_floating_point():
        return rows, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
