"""Names and arguments of `deepspeed.sequence`: attention for user-defined modules, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ConfigError
from windlass.comm.mesh_axis import axis_from_process_group
from windlass.parallel.autograd_collectives import gather_from_parallel_region
from windlass.parallel.sequence.ulysses_heads import swap_heads_for_tokens, swap_tokens_for_heads
from windlass.parallel.sequence_loss import IGNORE_INDEX, cross_entropy_per_token


class DistributedAttention(nn.Module):
    """Ulysses around an attention function: swaps tokens for heads before the call, and back after it.

    Args:
        local_attention: called with query, key and value of whole sequences and some of the heads, in the layout of the
            inputs; returns the same layout.
        sequence_process_group: the ranks along sp.
        scatter_idx, gather_idx: the dimensions of heads and of tokens: 2 and 0, or 2 and 1.
        sp_stream: ignored.

    Raises:
        ConfigError: other dimensions are given.
    """

    exchanges_sequence_shards = True  # the engine then does not shard this model's sequences itself

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ConfigError(
                f"scatter_idx = {scatter_idx}, gather_idx = {gather_idx}: heads lie along 2, tokens along 0 or 1"
            )
        del sp_stream
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self._axis = axis_from_process_group(sequence_process_group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int | None = None,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the attention of this rank's tokens to all tokens. Collective.

        Args:
            query: `[local tokens, samples, heads, features]`, or `[samples, local tokens, heads, features]`; key and
                value: the same with as many heads or fewer. Ranks may have unequal numbers of tokens.
            batch_dim_idx: dimension of the samples, 1 or 0. Default: the one that `gather_idx` does not name.

        Raises:
            ConfigError: rotary embeddings are given; apply them before.
        """
        if rotary_pos_emb is not None:
            raise ConfigError(
                "DistributedAttention applies no rotary_pos_emb; apply it to the tokens of each rank before"
            )
        batch = 1 - self.gather_idx if batch_dim_idx is None else batch_dim_idx
        tokens_first = batch == 1
        axis = self._axis
        here = torch.tensor([query.shape[1 - batch]], device=query.device)
        tokens = [int(count) for count in axis.all_gather(here).tolist()]
        members, heads = range(axis.size), query.shape[2]
        if axis.size > 1:
            query, key, value = (_heads_first(tensor, tokens_first) for tensor in (query, key, value))
            found = swap_tokens_for_heads(query, key, value, axis, members, tokens)
            query, key, value = (_heads_last(tensor, tokens_first) for tensor in found)
        output = self.local_attn(query, key, value, *args, **kwargs)
        if axis.size > 1:
            back = swap_heads_for_tokens(_heads_first(output, tokens_first), axis, members, tokens, heads)
            output = _heads_last(back, tokens_first)
        return output


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    sp_group: dist.ProcessGroup,
    ignore_index: int = IGNORE_INDEX,
) -> torch.Tensor:
    """Compute the cross entropy of the tokens of all ranks along sp, on every rank. Collective.

    Args:
        vocab_parallel_logits: `[local tokens, samples, vocabulary]`.
        target: `[local tokens, samples]`.

    Returns:
        `[tokens, samples]`, in fp32. The backward keeps the gradient of the local tokens and does not sum over ranks,
        so every rank has to compute the same loss from the result.
    """
    flat = vocab_parallel_logits.reshape(-1, vocab_parallel_logits.shape[-1])
    losses = cross_entropy_per_token(flat, target.reshape(-1), ignore_index=ignore_index).view(target.shape)
    axis = axis_from_process_group(sp_group)
    sizes = axis.all_gather(torch.tensor([target.shape[0]], device=target.device)).tolist()
    return gather_from_parallel_region(losses, axis, 0, sizes)


def _heads_first(tensor: torch.Tensor, tokens_first: bool) -> torch.Tensor:
    return tensor.permute(1, 2, 0, 3) if tokens_first else tensor.transpose(1, 2)


def _heads_last(tensor: torch.Tensor, tokens_first: bool) -> torch.Tensor:
    return (tensor.permute(2, 0, 1, 3) if tokens_first else tensor.transpose(1, 2)).contiguous()
