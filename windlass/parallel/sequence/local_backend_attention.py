"""Ulysses with another attention backend for the local heads, which sees whole sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.attention.attention_backend import HeadSlice
from windlass.attention.attention_mask import AttentionMask
from windlass.attention.mask_pattern import MaskBand
from windlass.parallel.sequence.sequence_attention import SequenceMask, check_tokens
from windlass.parallel.sequence.sequence_shard import SequenceShard
from windlass.parallel.sequence.ulysses_heads import UlyssesHeads, swap_heads_for_tokens, swap_tokens_for_heads


def describe_full_mask(shard: SequenceShard, band: MaskBand, device: torch.device | str) -> AttentionMask:
    """Return the mask of the whole sequences of a batch, with its padding and packed documents."""
    length = shard.sharding.length
    padding = torch.zeros(shard.num_samples, length, dtype=torch.bool)
    documents = torch.zeros(shard.num_samples, length, dtype=torch.long)
    for rows in shard.mask:
        for number, seen in enumerate(rows.visible_ranges):
            padding[rows.start : rows.stop, slice(*seen.keys)] = True
            if seen.queries == seen.keys:  # a document; otherwise all queries see the keys
                documents[rows.start : rows.stop, slice(*seen.keys)] = number
    has_documents = any(seen.queries != (0, length) for rows in shard.mask for seen in rows.visible_ranges)
    return AttentionMask(
        shard.num_samples,
        length,
        length,
        band,
        padding=None if bool(padding.all()) else padding.to(device),
        sequence_ids=documents.to(device) if has_documents else None,
        device=device,
    )


def local_backend_attention(
    module: nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    *,
    scaling: float | None,
    heads: HeadSlice,
    **arguments: Any,
) -> torch.Tensor:
    """Swap tokens for heads, compute whole sequences with the backend of `mask.local`, and swap back. Collective.

    Args:
        query: `[samples, heads, local tokens, features]`; key, value: the same with as many heads or fewer.
        heads: the heads of `query` in the layer.

    Returns:
        `[samples, heads, local tokens, features of values]`.
    """
    assert mask.local is not None
    check_tokens(query, key, value, mask)
    axis, sharding = mask.shard.axis, mask.shard.sharding
    counts = UlyssesHeads(query.shape[1], key.shape[1], axis.size)
    total, ranks = query.shape[1], range(axis.size)
    query, key, value = swap_tokens_for_heads(query, key, value, axis, ranks, sharding.sizes)
    start, stop = counts.query_range(axis.index)
    if start == stop:  # more ranks than heads: nothing to compute, but the backward of the swap is collective
        output = query[..., :1].expand(*query.shape[:3], value.shape[-1])
    else:
        key_heads = torch.tensor(counts.key_head_of(axis.index), device=key.device)
        output = mask.local.backend.attend(
            module,
            query,
            key.index_select(1, key_heads),  # one key head for each query head: local groups may be uneven
            value.index_select(1, key_heads),
            mask.local.mask,
            scaling=scaling,
            dropout=0.0,
            heads=HeadSlice(heads.start + start, heads.start + stop, heads.total),
            **arguments,
        )
    return swap_heads_for_tokens(output, axis, ranks, sharding.sizes, total)
