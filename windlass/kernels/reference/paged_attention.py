"""Attention over a paged cache in plain PyTorch, sequence by sequence."""

from __future__ import annotations

import torch


def attend_to_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lengths: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None,
    chunk_size: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `windlass.kernels.paged_attention.paged_attention` in the dtype of `query`.

    Args:
        keys: `[blocks, kv_heads, block_size, key_dim]` in the dtype of `query`.
        values: `[blocks, kv_heads, block_size, value_dim]` in the dtype of `query`.
    """
    tokens, heads, _ = query.shape
    kv_heads, block_size = keys.shape[1:3]
    out = query.new_zeros(tokens, heads, values.shape[-1])
    for sequence, context in enumerate(context_lengths.tolist()):
        first, last = int(query_start[sequence]), int(query_start[sequence + 1])
        if first == last:
            continue
        blocks = block_table[sequence, : -(-context // block_size)].long()
        key = keys[blocks].transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(heads // kv_heads, 0)
        value = values[blocks].transpose(0, 1).flatten(1, 2)[:, :context].repeat_interleave(heads // kv_heads, 0)
        scores = query[first:last].transpose(0, 1) @ key.transpose(1, 2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_position = torch.arange(context - (last - first), context)[:, None]
        key_position = torch.arange(context)[None, :]
        visible = key_position <= query_position
        if sliding_window is not None:
            visible &= query_position - key_position < sliding_window
        if chunk_size is not None:
            visible &= query_position // chunk_size == key_position // chunk_size
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:  # a sink takes weight in the softmax, and has no value
            sink = sinks.to(scores.dtype)[:, None, None].expand(heads, last - first, 1)
            weights = torch.cat([scores, sink], 2).softmax(2)[:, :, :-1]
        else:
            weights = scores.softmax(2)
        out[first:last] = (weights @ value).transpose(0, 1)
    return out
