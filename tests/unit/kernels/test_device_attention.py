"""Law: attention as accelerators compute it in plain PyTorch equals the reference, on the CPU."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from windlass.kernels.device_attention import attend_plainly, write_on_device
from windlass.kernels.paged_attention import PagedKVCache, make_kv_cache, paged_attention, write_kv

PATTERNS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 17},
    {"chunk_size": 32},
    {"softcap": 5.0},
    {"sinks": torch.linspace(-1, 1, 6)},
]
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
CONTEXTS, COUNTS = [5, 40, 130], [5, 1, 33]


def fill(dtype: torch.dtype, write: Any) -> tuple[PagedKVCache, torch.Tensor]:
    """Return a cache of three sequences in scattered blocks, and its block table."""
    generator = torch.Generator().manual_seed(0)
    cache = make_kv_cache(14, 16, 2, 20, 24, dtype, path="reference")
    for tensor in cache.tensors:
        tensor.zero_()
    blocks = iter(torch.randperm(14, generator=generator).tolist())
    table = torch.zeros(len(CONTEXTS), 9, dtype=torch.int32)
    for row, context in enumerate(CONTEXTS):
        for place in range(-(-context // 16)):
            table[row, place] = next(blocks)
        position = torch.arange(context)
        slots = table[row, position // 16].long() * 16 + position % 16
        write(cache, *(torch.randn(context, 2, size, generator=generator) for size in (20, 24)), slots)
    return cache, table


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_rows_are_those_of_the_reference(dtype: torch.dtype) -> None:
    for found, expected in zip(fill(dtype, write_on_device)[0].tensors, fill(dtype, write_kv)[0].tensors, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: next(iter(pattern), "causal"))
@pytest.mark.parametrize("most_scores", [1 << 28, 1])
def test_outputs_are_those_of_the_reference(
    dtype: torch.dtype, pattern: dict[str, Any], most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.kernels.device_attention._MOST_SCORES", most_scores)
    cache, table = fill(dtype, write_kv)
    query = torch.randn(sum(COUNTS), 6, 20, generator=torch.Generator().manual_seed(1))
    start = torch.tensor([0, *accumulate(COUNTS)], dtype=torch.int32)
    lengths = torch.tensor(CONTEXTS, dtype=torch.int32)
    options = {"scaling": 0.2, "sliding_window": None, "chunk_size": None, "softcap": None, "sinks": None, **pattern}
    found = attend_plainly(query, cache, table, start, lengths, **options)
    torch.testing.assert_close(found, paged_attention(query, cache, table, start, lengths, **options))
