"""Product of a row-parallel layer, overlapped with its all-reduce."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from windlass.comm.mesh_axis import MeshAxis


def row_parallel_linear(
    inputs: torch.Tensor, weight: torch.Tensor, axis: MeshAxis, tp_overlap_chunks: int = 1
) -> torch.Tensor:
    """Compute `inputs @ weight.T`, summed over the axis. The incoming gradient is complete on every rank.

    Args:
        inputs: `[..., features of this rank]`.
        weight: `[outputs, features of this rank]`.
        tp_overlap_chunks: split the tokens into this many chunks; the all-reduce of one overlaps the product of the
            next (Wang et al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023).
    """
    if axis.size == 1:
        return functional.linear(inputs, weight)
    device = inputs.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        inputs, weight = inputs.to(kind), weight.to(kind)
    return _RowParallelLinear.apply(axis, tp_overlap_chunks, inputs, weight)  # type: ignore[no-any-return]


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: MeshAxis, tp_overlap_chunks: int, inputs: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        rows = inputs.reshape(-1, inputs.shape[-1])
        out = rows.new_empty((*inputs.shape[:-1], weight.shape[0]))
        results = out.view(-1, weight.shape[0]).tensor_split(tp_overlap_chunks)
        travelling = []
        for part, result in zip(rows.tensor_split(tp_overlap_chunks), results, strict=True):
            torch.mm(part, weight.t(), out=result)
            travelling.append(axis.start_all_reduce(result))
        for pending in travelling:
            pending.wait()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows = gradients[0].reshape(-1, weight.shape[0])
        to_inputs = rows.mm(weight).view(inputs.shape) if ctx.needs_input_grad[2] else None
        to_weight = rows.t().mm(inputs.reshape(-1, inputs.shape[-1])) if ctx.needs_input_grad[3] else None
        return None, None, to_inputs, to_weight
