"""Products of rows, sorted by expert, with the matrix of their expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

_GROUPED_MM: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ALIGNMENT = 16  # bytes; alignment of addresses and strides that the kernels require


@dataclass(frozen=True)
class RowGroups:
    """Assignment of sorted rows to experts: the first `counts[0]` rows belong to the first expert, and so on.

    Attributes:
        counts: `[experts]`, number of rows of each expert, on the device of the rows.
        host_counts: the same numbers on the host, if they are there already; else None.
    """

    counts: torch.Tensor
    host_counts: Sequence[int] | None = None

    def sizes(self) -> list[int]:
        """Return the number of rows of each expert, on the host. Synchronizes with the device unless `host_counts` is
        set."""
        return self.counts.tolist() if self.host_counts is None else list(self.host_counts)

    def expert_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `[rows]`, the local number of each row's expert."""
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
    """Apply to each row the linear layer of its expert, in one kernel for all experts if torch has one.

    Every expert's weight gets a gradient, which is zero if the expert had no rows.

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
    """Compute the products one expert at a time: the fallback of `grouped_linear`.

    Args:
        rows: `[rows, in]`.
        matrices: `[experts, in, out]`.
    """
    sizes = groups.sizes()
    # without rows, expert 0 keeps the result in the autograd graph
    filled = [expert for expert, size in enumerate(sizes) if size] or [0]
    parts = rows.split(sizes)
    each = matrices.unbind(0)
    return torch.cat([parts[expert] @ each[expert] for expert in filled])


def has_grouped_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if torch has one kernel for all experts that accepts these tensors.

    The kernel exists for bf16 on CUDA (compute capability 8.0 or later), and for bf16 and fp32 on the CPU. Addresses
    and strides must be multiples of 16 bytes.
    """
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
    """Function that returns the weights; its backward sets the gradients of experts without rows to zero.

    A kernel with nothing to sum for a matrix may leave that part of the gradient uninitialized.
    """

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
    """Cast the operands as autocast does for a linear layer. torch does not do this for grouped products."""
    device = rows.device.type
    if not torch.is_autocast_enabled(device) or not rows.is_floating_point():
        return rows, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
