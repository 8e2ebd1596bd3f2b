"""Sum of gradients of parameters that several pipeline ranks hold, e.g. an embedding tied to the head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.point_to_point import exchange_tensors


def sum_shared_gradients(model: nn.Module, shared_parameters: Mapping[str, tuple[int, ...]], axis: MeshAxis) -> int:
    """Replace the gradient of each shared parameter by the sum over the ranks that hold it.

    The sum is taken in rank order, so all ranks get identical bits. Gradients are full (unsharded) and in `.grad`. All
    ranks that hold a shared parameter must call this.

    Returns:
        Bytes that this rank received.
    """
    held = [(ranks, model.get_parameter(name)) for name, ranks in sorted(shared_parameters.items())]
    held = [(ranks, parameter) for ranks, parameter in held if parameter.requires_grad]
    sends: list[tuple[int, torch.Tensor]] = []
    receives: list[tuple[int, torch.Tensor]] = []
    parts: list[list[torch.Tensor]] = []
    for ranks, parameter in held:
        own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        own = own.contiguous()
        parts.append([])
        for rank in ranks:
            if rank == axis.index:
                parts[-1].append(own)
                continue
            other = torch.empty_like(own)
            sends.append((rank, own.view(-1)))
            receives.append((rank, other.view(-1)))
            parts[-1].append(other)
    moved = exchange_tensors(axis.group, sends, receives)
    axis.traffic.add("shared gradients", 0, moved)
    for (_, parameter), each in zip(held, parts, strict=True):
        total = each[0].clone()
        for part in each[1:]:
            total += part
        parameter.grad = total
    return moved
