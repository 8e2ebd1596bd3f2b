"""Attention over a paged KV cache as a Triton kernel: decode steps, chunks of prompts, and batches of both.

A program computes some queries of one sequence, for all query heads that share a head of the cache, over one part of
the keys: [Note: parts of the keys]. Softmax and sums are in float32, products of float32 in full precision.

[Note: parts of the keys] A decode step of few sequences would use few processors. Its keys are divided into parts that
programs compute side by side. Each writes its weighted sum of values, largest score and sum of weights, and `_combine`
joins these. The number of parts follows from shapes alone, so a CUDA graph can capture the launch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from windlass.kernels.paged_attention import PagedKVCache

_TILE_QUERIES = 16  # prompt tokens in a tile, for each head of the cache
_PROGRAMS = 256  # enough programs to occupy a device
_MOST_PARTS = 32


@triton.jit
def _attend_tile(
    query,
    out,
    maxima,
    weights,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    starts,
    lengths,
    sinks,
    scaling,
    softcap,
    sequences,
    table_stride,
    query_stride,
    head_stride,
    tokens,
    blocks_of_part,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PARTS: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    # tiles of sequence s begin at starts[s] // QUERIES + s, which leaves room for one incomplete tile
    low = tl.full((), 0, tl.int32)
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    first = (tile - (start // QUERIES + sequence)) * QUERIES
    if first >= count:
        return
    length = tl.load(lengths + sequence)
    before = length - count  # number of tokens before the queries
    row = tl.arange(0, ROWS)
    index = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (row < QUERIES * GROUP) & (index < count)
    position = before + index
    feature = tl.arange(0, KEY_PAD)
    value_feature = tl.arange(0, VALUE_PAD)
    token = (start + index).to(tl.int64)
    q = tl.load(
        query + token[:, None] * query_stride + head[:, None] * head_stride + feature[None, :],
        mask=valid[:, None] & (feature < KEY_DIM)[None, :],
        other=0.0,
    )
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS and PARTS == 1:
        best = tl.load(sinks + head, mask=valid, other=0.0)
        total = tl.full((ROWS,), 1.0, tl.float32)
    sums = tl.zeros((ROWS, VALUE_PAD), tl.float32)
    begin = tl.full((), 0, tl.int32)
    if WINDOW > 0:
        begin = tl.maximum(begin, before + first - WINDOW + 1)
    if CHUNK > 0:
        begin = tl.maximum(begin, (before + first) // CHUNK * CHUNK)
    end = tl.minimum(length, before + first + QUERIES)
    first_block = begin // BLOCK
    last_block = (end + BLOCK - 1) // BLOCK
    if PARTS > 1:
        first_block = tl.maximum(first_block, part * blocks_of_part)
        last_block = tl.minimum(last_block, (part + 1) * blocks_of_part)
    offset = tl.arange(0, BLOCK)
    for place in range(first_block, last_block):
        block = tl.load(table + sequence * table_stride + place).to(tl.int64) * KV_HEADS + kv_head
        key_position = place * BLOCK + offset
        k = tl.load(
            keys + (block * KEY_DIM + feature[:, None]) * BLOCK + offset[None, :],
            mask=(feature < KEY_DIM)[:, None] & (key_position < length)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scaling
        if HAS_SCALES:
            scores *= tl.load(key_scales + block * BLOCK + offset, mask=key_position < length, other=0.0)[None, :]
        if HAS_SOFTCAP:
            # compute tanh by exp, in the form that cannot overflow
            bent = tl.exp(-2.0 * tl.abs(scores) / softcap)
            scores = tl.where(scores < 0, -1.0, 1.0) * softcap * (1.0 - bent) / (1.0 + bent)
        seen = key_position[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (position[:, None] - key_position[None, :] < WINDOW)
        if CHUNK > 0:
            seen = seen & (position[:, None] // CHUNK == key_position[None, :] // CHUNK)
        scores = tl.where(seen & valid[:, None], scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # no visible key so far: avoid -inf - -inf
        weight = tl.exp(scores - shift[:, None])
        scale = tl.exp(best - shift)
        total = total * scale + tl.sum(weight, 1)
        v = tl.load(
            values + (block * BLOCK + offset[:, None]) * VALUE_STRIDE + value_feature[None, :],
            mask=(key_position < length)[:, None] & (value_feature < VALUE_DIM)[None, :],
            other=0.0,
        )
        if HAS_SCALES:
            weight *= tl.load(value_scales + block * BLOCK + offset, mask=key_position < length, other=0.0)[None, :]
        sums = sums * scale[:, None] + tl.dot(weight.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        best = highest
    stored = valid[:, None] & (value_feature < VALUE_DIM)[None, :]
    place_of_row = (part * tokens + token) * HEADS + head
    if PARTS == 1:
        sums = sums / tl.where(valid, total, 1.0)[:, None]
    else:
        tl.store(maxima + place_of_row, best, mask=valid)
        tl.store(weights + place_of_row, total, mask=valid)
    tl.store(
        out + place_of_row[:, None] * VALUE_DIM + value_feature[None, :], sums.to(out.dtype.element_ty), mask=stored
    )


def can_attend(query: torch.Tensor, cache: PagedKVCache) -> bool:
    """Return True if the kernel supports the query's dtype, the block size (a power of two) and the heads (at most 256
    features).
    """
    power = cache.block_size & (cache.block_size - 1) == 0
    known = query.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return power and known and max(cache.key_dim, cache.value_dim) <= 256


def attend(
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
    """Compute `windlass.kernels.paged_attention.paged_attention` without waiting for the device.

    The arguments are on one device, and `paged_attention` has checked them.
    """
    tokens, heads, _ = query.shape
    sequences = context_lengths.shape[0]
    group = heads // cache.kv_heads
    decodes = tokens == sequences  # usually one query for each sequence; some may have none
    tile = 1 if decodes else _TILE_QUERIES
    tiles = tokens // tile + sequences
    parts = _count_parts(sequences * cache.kv_heads, block_table.shape[1]) if decodes else 1
    query = query if query.stride(-1) == 1 else query.contiguous()
    shape = (tokens, heads, cache.value_dim)
    out = query.new_zeros(shape) if parts == 1 else query.new_zeros((parts, *shape), dtype=torch.float32)
    maxima = torch.full((parts, tokens, heads), -math.inf, dtype=torch.float32, device=query.device)
    weights = torch.zeros_like(maxima)
    sinks = None if sinks is None else sinks.float().contiguous()
    none = maxima  # any tensor will do in place of absent scales and sinks, which the kernel does not read
    _attend_tile[(tiles, cache.kv_heads, parts)](
        query,
        out,
        maxima,
        weights,
        cache.keys,
        cache.values,
        none if cache.key_scales is None else cache.key_scales,
        none if cache.value_scales is None else cache.value_scales,
        block_table,
        query_start,
        context_lengths,
        none if sinks is None else sinks,
        scaling,
        softcap or 1.0,
        sequences,
        block_table.stride(0),
        query.stride(0),
        query.stride(1),
        tokens,
        -(-block_table.shape[1] // parts),
        HEADS=heads,
        KV_HEADS=cache.kv_heads,
        GROUP=group,
        QUERIES=tile,
        ROWS=max(16, triton.next_power_of_2(tile * group)),
        KEY_DIM=cache.key_dim,
        KEY_PAD=max(16, triton.next_power_of_2(cache.key_dim)),
        VALUE_DIM=cache.value_dim,
        VALUE_STRIDE=cache.values.shape[-1],
        VALUE_PAD=max(16, triton.next_power_of_2(cache.value_dim)),
        BLOCK=cache.block_size,
        WINDOW=sliding_window or 0,
        CHUNK=chunk_size or 0,
        HAS_SOFTCAP=bool(softcap),
        HAS_SINKS=sinks is not None,
        HAS_SCALES=cache.key_scales is not None,
        PARTS=parts,
    )
    return out if parts == 1 else _combine(out, maxima, weights, sinks).to(query.dtype)


def _count_parts(programs: int, blocks: int) -> int:
    """Return the number of parts of the keys, at least four blocks each."""
    return max(1, min(_PROGRAMS // max(programs, 1), blocks // 4, _MOST_PARTS))


def _combine(
    sums: torch.Tensor, maxima: torch.Tensor, weights: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Join the parts `[parts, tokens, heads, ...]`; see [Note: parts of the keys]."""
    best: Any = maxima.amax(0)
    if sinks is not None:
        best = torch.maximum(best, sinks)
    best = torch.where(best == -math.inf, torch.zeros_like(best), best)  # tokens of no sequence: avoid -inf - -inf
    scale = torch.exp(maxima - best)
    total = (weights * scale).sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks - best)
    return (sums * scale[..., None]).sum(0) / total.clamp_min(1e-30)[..., None]
