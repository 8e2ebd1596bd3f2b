"""Class `_SeqAllToAll` of `deepspeed.sequence.layer`: all-to-all between sequence shards and head shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import ConfigError
from windlass.comm.mesh_axis import MeshAxis, axis_from_process_group
from windlass.parallel.autograd_collectives import all_to_all
from windlass.parallel.placement import compute_shard_range


class SequenceAllToAll:
    """Namespace for `apply`, because DeepSpeed's `_SeqAllToAll` is an autograd function."""

    @staticmethod
    def apply(
        group: dist.ProcessGroup,
        input: torch.Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        stream: Any = None,
        handle: Any = None,
        type: Any = None,
        is_fwd: bool = True,
        num_kv_heads: int | None = None,
    ) -> torch.Tensor:
        """Scatter dimension `scatter_idx` over the group, and concatenate the ranks' parts along `gather_idx`.

        Collective.

        If the size of dimension `scatter_idx` is not divisible by the number of ranks, each of the first ranks gets one
        element more. The backward exchanges gradients in reverse.

        Args:
            batch_dim_idx: unused; the two dimensions determine the exchange.
            stream, type, is_fwd: unused; the exchange is not overlapped.

        Raises:
            ConfigError: `handle` or `num_kv_heads` is not None.
        """
        if handle is not None or num_kv_heads is not None:
            raise ConfigError(
                "_SeqAllToAll takes no handle and no num_kv_heads; use DistributedAttention, which shards the heads"
            )
        axis = axis_from_process_group(group)
        return input if axis.size == 1 else exchange(input, axis, scatter_idx, gather_idx)


def exchange(tensor: torch.Tensor, axis: MeshAxis, scattered: int, joined: int) -> torch.Tensor:
    """Scatter dimension `scattered` over the ranks, and concatenate the parts received along `joined`. Collective."""
    spans = [compute_shard_range(tensor.shape[scattered], axis.size, rank) for rank in range(axis.size)]
    own = spans[axis.index][1] - spans[axis.index][0]
    lengths = [int(n) for n in axis.all_gather(torch.tensor([tensor.shape[joined]], device=tensor.device)).tolist()]
    shapes = []
    for length in lengths:
        shape = list(tensor.shape)
        shape[scattered], shape[joined] = own, length
        shapes.append(shape)
    parts = [tensor.narrow(scattered, start, stop - start).reshape(-1) for start, stop in spans]
    receives = [torch.Size(shape).numel() for shape in shapes]
    arrived = all_to_all(torch.cat(parts), axis, [part.numel() for part in parts], receives)
    pieces = [flat.view(shape) for flat, shape in zip(arrived.split(receives), shapes, strict=True)]
    return torch.cat(pieces, joined)
