"""Inputs of tests of paged attention: patterns, batches of sequences, and caches whose blocks are scattered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from windlass.kernels.paged_attention import PagedKVCache, make_kv_cache, write_kv

PATTERNS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 17},
    {"chunk_size": 32},
    {"softcap": 5.0},
    {"sinks": torch.linspace(-1, 1, 6)},
]


def name_pattern(pattern: dict[str, Any]) -> str:
    return next(iter(pattern), "causal")


def options_of(pattern: dict[str, Any]) -> dict[str, Any]:
    """Return all options of an attention call: defaults, and those that the pattern sets."""
    return {"scaling": 0.2, "sliding_window": None, "chunk_size": None, "softcap": None, "sinks": None, **pattern}


def fill_cache(
    contexts: Sequence[int], dtype: torch.dtype, write: Callable[..., None] = write_kv
) -> tuple[PagedKVCache, torch.Tensor]:
    """Return a cache of sequences with `contexts` tokens in scattered blocks, and its block table."""
    counts = [-(-context // 16) for context in contexts]
    generator = torch.Generator().manual_seed(0)
    cache = make_kv_cache(sum(counts) + 1, 16, 2, 20, 24, dtype, path="reference")
    for tensor in cache.tensors:
        tensor.zero_()
    blocks = iter(torch.randperm(sum(counts) + 1, generator=generator).tolist())
    table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        for place in range(count):
            table[row, place] = next(blocks)
        position = torch.arange(context)
        slots = table[row, position // 16].long() * 16 + position % 16
        write(cache, *(torch.randn(context, 2, size, generator=generator) for size in (20, 24)), slots)
    return cache, table


def make_queries(contexts: Sequence[int], counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries of the last `counts` tokens of each sequence, each sequence's offset in them, and its length."""
    query = torch.randn(sum(counts), 6, 20, generator=torch.Generator().manual_seed(1))
    start = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    return query, start, torch.tensor(contexts, dtype=torch.int32)
