"""`_SeqAllToAll` of `deepspeed.sequence.layer`: tokens of a sequence swapped for heads, or back, by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import ConfigError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import all_to_all
from windlass.parallel.placement import compute_shard_range
from windlass.parallel.sequence.ulysses_sp import axis_from_process_group


class SequenceAllToAll:
    """Namespace of `apply`, since DeepSpeed has an autograd function of it."""

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
        """Cut dimension `scatter_idx` over the group, and put the ranks' parts of `gather_idx` end to end. Collective.

        The first ranks get one element more where the dimension does not divide. Gradients go the way back.

        Args:
            batch_dim_idx: not used: the two dimensions say all.
            stream, type, is_fwd: not used: the exchange is not overlapped.

        Raises:
            ConfigError: `handle` or `num_kv_heads` is given.
        """
        if handle is not None or num_kv_heads is not None:
            raise ConfigError(
                "_SeqAllToAll takes no handle and no num_kv_heads; use DistributedAttention, which shares out the heads"
            )
        axis = axis_from_process_group(group)
        return input if axis.size == 1 else exchange(input, axis, scatter_idx, gather_idx)


def exchange(tensor: torch.Tensor, axis: MeshAxis, cut: int, joined: int) -> torch.Tensor:
    """Send each rank its part of dimension `cut`, and join what comes along dimension `joined`. Collective."""
    spans = [compute_shard_range(tensor.shape[cut], axis.size, rank) for rank in range(axis.size)]
    own = spans[axis.index][1] - spans[axis.index][0]
    lengths = [int(n) for n in axis.all_gather(torch.tensor([tensor.shape[joined]], device=tensor.device)).tolist()]
    shapes = []
    for length in lengths:
        shape = list(tensor.shape)
        shape[cut], shape[joined] = own, length
        shapes.append(shape)
    parts = [tensor.narrow(cut, start, stop - start).reshape(-1) for start, stop in spans]
    receives = [torch.Size(shape).numel() for shape in shapes]
    arrived = all_to_all(torch.cat(parts), axis, [part.numel() for part in parts], receives)
    pieces = [flat.view(shape) for flat, shape in zip(arrived.split(receives), shapes, strict=True)]
    return torch.cat(pieces, joined)
