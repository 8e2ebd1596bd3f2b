"""Paged KV cache on an accelerator: writes and attention that never wait for the device.

A Triton kernel (`triton_attention`) computes attention if Triton is installed and the kernel supports the shapes.
Otherwise plain PyTorch gathers the blocks of each sequence, padded to the longest one.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import TYPE_CHECKING

import torch

from windlass.kernels.reference.quantized_rows import quantize_rows

if TYPE_CHECKING:
    from windlass.kernels.paged_attention import PagedKVCache

_MOST_SCORES = 1 << 28  # maximum number of elements of one matrix product in plain PyTorch


def write_on_device(cache: PagedKVCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys and values; see `write_kv`. Slots must be in the cache, which is not checked."""
    block, offset = slots // cache.block_size, slots % cache.block_size
    if cache.key_scales is not None and cache.value_scales is not None:
        key, key_scale = quantize_rows(key)
        value, value_scale = quantize_rows(value)
        cache.key_scales[block, :, offset] = key_scale
        cache.value_scales[block, :, offset] = value_scale
    cache.keys[block, :, :, offset] = key.to(cache.dtype)
    cache.values[block, :, offset, : cache.value_dim] = value.to(cache.dtype)


@functools.cache
def has_triton() -> bool:
    """Return True if Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def attend_on_device(
    query: torch.Tensor,
    cache: PagedKVCache,
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
    """Compute `paged_attention` on the device of the cache."""
    attend = attend_plainly
    if query.device.type == "cuda" and has_triton():
        from windlass.kernels import triton_attention

        if triton_attention.can_attend(query, cache):
            attend = triton_attention.attend
    return attend(
        query,
        cache,
        block_table,
        query_start,
        context_lengths,
        scaling=scaling,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        softcap=softcap,
        sinks=sinks,
    )


def attend_plainly(
    query: torch.Tensor,
    cache: PagedKVCache,
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
    """Compute `paged_attention` in plain PyTorch, without copies of the batch's values to the host.

    Each query gathers the keys of its sequence, so memory grows with the number of queries times the width of the block
    table. Queries are computed in groups of limited size, which bounds the memory.
    """
    tokens, heads, _ = query.shape
    width = block_table.shape[1] * cache.block_size
    row = torch.arange(tokens, device=query.device)
    sequence = torch.searchsorted(query_start[1:].contiguous(), row.to(query_start.dtype), right=True)
    position = context_lengths[sequence] - query_start[sequence + 1] + row
    step = max(1, _MOST_SCORES // max(width * heads * max(cache.key_dim, cache.value_dim), 1))
    parts = []
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        keys, values = _gather(cache, block_table[sequence[part]].long())
        grouped = query[part].float().unflatten(1, (cache.kv_heads, heads // cache.kv_heads))
        scores = torch.einsum("thgd,thdn->thgn", grouped, keys).flatten(1, 2) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = _visible(position[part], width, sliding_window, chunk_size)
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        if sinks is not None:
            extra = sinks.float()[None, :, None].expand(scores.shape[0], -1, 1)
            weights = torch.cat([scores, extra], 2).softmax(2)[:, :, :-1]
        else:
            weights = scores.softmax(2)
        weights = weights.unflatten(1, (cache.kv_heads, heads // cache.kv_heads))
        parts.append(torch.einsum("thgn,thnd->thgd", weights, values).flatten(1, 2))
    return torch.cat(parts).to(query.dtype)


def _visible(position: torch.Tensor, width: int, sliding_window: int | None, chunk_size: int | None) -> torch.Tensor:
    """Return a mask `[queries, width]` of the keys that each query attends to."""
    key = torch.arange(width, device=position.device)[None]
    visible = key <= position[:, None]
    if sliding_window is not None:
        visible &= position[:, None] - key < sliding_window
    if chunk_size is not None:
        visible &= position[:, None] // chunk_size == key // chunk_size
    return visible


def _gather(cache: PagedKVCache, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys `[queries, kv_heads, key_dim, width]` and values `[queries, kv_heads, width, value_dim]`, float32."""
    keys, values = cache.keys[blocks].float(), cache.values[blocks][..., : cache.value_dim].float()
    if cache.key_scales is not None and cache.value_scales is not None:
        keys = keys * cache.key_scales[blocks][:, :, :, None]
        values = values * cache.value_scales[blocks][..., None]
    return keys.permute(0, 2, 3, 1, 4).flatten(3), values.transpose(1, 2).flatten(2, 3)
