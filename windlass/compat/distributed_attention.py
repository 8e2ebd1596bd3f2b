"""Names and arguments of `deepspeed.sequence`: attention for user-defined modules, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ConfigError
from windlass.comm.mesh_axis import MeshAxis, axis_from_process_group, single_rank_axis
from windlass.parallel.autograd_collectives import gather_from_parallel_region, reduce_from_parallel_region
from windlass.parallel.sequence.ulysses_heads import swap_heads_for_tokens, swap_tokens_for_heads
from windlass.parallel.sequence_loss import IGNORE_INDEX, cross_entropy_per_token
from windlass.parallel.tensor.output_head_sharding import vocab_parallel_cross_entropy


class DistributedAttention(nn.Module):
    """Ulysses around an attention function: swaps tokens for heads before the call, and back after it.

    Args:
        local_attention: called with query, key and value of full sequences and some of the heads, in the layout of the
            inputs; returns the same layout.
        sequence_process_group: the ranks along sp.
        scatter_idx, gather_idx: the dimensions of heads and of tokens: 2 and 0, or 2 and 1.
        sp_stream: ignored.
        num_kv_heads: ignored; the keys of each call give the number.

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
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ConfigError(
                f"scatter_idx = {scatter_idx}, gather_idx = {gather_idx}: pass 2, the dimension of heads, and 0 or 1, "
                "that of tokens"
            )
        del sp_stream, num_kv_heads
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
            ConfigError: rotary embeddings are given; apply them to query and key before the call.
        """
        if rotary_pos_emb is not None:
            raise ConfigError(
                "DistributedAttention applies no rotary_pos_emb; apply it to each rank's tokens before the call"
            )
        batch = 1 - self.gather_idx if batch_dim_idx is None else batch_dim_idx
        tokens_first = batch == 1
        axis = self._axis
        tokens = _sizes_along(axis, query, 1 - batch)
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
    sp_group: dist.ProcessGroup | None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: str = "none",
    gather_sequence_loss: bool = True,
    backend: str = "torch",
) -> torch.Tensor:
    """Compute the cross entropy of sequences that are sharded along sp. Collective.

    Args:
        vocab_parallel_logits: `[local tokens, samples, vocabulary]`; with `tp_group`, the last dimension is this rank's
            part of the vocabulary.
        target: `[local tokens, samples]`.
        sp_group: the ranks along sp. None, allowed only without `gather_sequence_loss`: sequences are not sharded.
        tp_group: the ranks over which the vocabulary is sharded, in the order of the parts; None: it is not sharded.
        vocab_start_index, vocab_end_index: this rank's part of the vocabulary, checked against the logits of all ranks;
            None: not checked.
        ignore_index: label of tokens whose loss is 0.
        reduction: "none", or without `gather_sequence_loss` "sum" or "mean" over the tokens of all ranks along sp that
            are not ignored.
        gather_sequence_loss: return the losses of the tokens of all ranks along sp, instead of those of this rank.
        backend: must be "torch".

    Returns:
        `[tokens, samples]`, in fp32, or a scalar. The backward keeps the gradient of the local tokens and does not sum
        over ranks, so every rank has to compute the same loss from the result.

    Raises:
        ConfigError: an argument is unknown, or two of them contradict each other.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ConfigError(f'reduction = {reduction!r} is unknown; write "none", "sum" or "mean"')
    if backend != "torch":
        raise ConfigError(f'backend = {backend!r} is not built; write "torch"')
    if gather_sequence_loss and (reduction != "none" or sp_group is None):
        raise ConfigError(
            f"gather_sequence_loss is true, with reduction = {reduction!r} and sp_group = {sp_group}: it needs the "
            'reduction "none" and a group; set it to False'
        )
    tp = single_rank_axis("tp") if tp_group is None else axis_from_process_group(tp_group)
    sp = single_rank_axis("sp") if sp_group is None else axis_from_process_group(sp_group)
    flat, labels = vocab_parallel_logits.flatten(0, -2), target.reshape(-1).long()
    sizes = _vocabulary_sizes(tp, flat, vocab_start_index, vocab_end_index)
    if tp.size == 1:
        losses = cross_entropy_per_token(flat, labels, ignore_index=ignore_index)
    else:
        losses = vocab_parallel_cross_entropy(flat, labels, tp, sizes=sizes, ignore_index=ignore_index)
    if gather_sequence_loss:
        return gather_from_parallel_region(losses.view(target.shape), sp, 0, _sizes_along(sp, target, 0))
    if reduction == "none":
        return losses.view(target.shape)
    total = reduce_from_parallel_region(losses.sum(), sp)
    if reduction == "sum":
        return total
    return total / sp.all_reduce((labels != ignore_index).sum()).clamp(min=1)


def _vocabulary_sizes(axis: MeshAxis, logits: torch.Tensor, start: int | None, stop: int | None) -> list[int]:
    """Return the size of each rank's part of the vocabulary. Collective.

    Raises:
        ConfigError: on all ranks: a rank has no logits, or the bounds of a rank are not those of its logits.
    """
    bounds = [-1 if bound is None else bound for bound in (start, stop)]
    rows = axis.all_gather(torch.tensor([[logits.shape[1], *bounds]], device=logits.device)).tolist()
    sizes = [size for size, _, _ in rows]
    if 0 in sizes:
        raise ConfigError(f"rank {sizes.index(0)} of tp_group has logits of 0 words; shard over fewer ranks")
    for rank, (size, first, last) in enumerate(rows):
        here = sum(sizes[:rank])
        if (first, last) not in ((-1, -1), (here, here + size)):
            raise ConfigError(
                f"vocab_start_index = {first}, vocab_end_index = {last} on rank {rank} of tp_group, whose logits are "
                f"the words {here} to {here + size}; pass these, or None for both"
            )
    return sizes


def _sizes_along(axis: MeshAxis, tensor: torch.Tensor, dim: int) -> list[int]:
    """Return the size of each rank's tensor along `dim`. Collective."""
    sizes: list[int] = axis.all_gather(torch.tensor([tensor.shape[dim]], device=tensor.device)).tolist()
    return sizes


def _heads_first(tensor: torch.Tensor, tokens_first: bool) -> torch.Tensor:
    return tensor.permute(1, 2, 0, 3) if tokens_first else tensor.transpose(1, 2)


def _heads_last(tensor: torch.Tensor, tokens_first: bool) -> torch.Tensor:
    return (tensor.permute(2, 0, 1, 3) if tokens_first else tensor.transpose(1, 2)).contiguous()
