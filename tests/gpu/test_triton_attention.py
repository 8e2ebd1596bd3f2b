"""Law: the Triton kernel of paged attention computes what the reference does.

On a GPU, or anywhere by Triton's interpreter: `TRITON_INTERPRET=1 pytest -m gpu tests/gpu/test_triton_attention.py`.
"""

from __future__ import annotations

import os
from itertools import accumulate
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA GPU, or TRITON_INTERPRET=1"
    ),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
PATTERNS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 17},
    {"chunk_size": 32},
    {"softcap": 5.0},
    {"sinks": torch.linspace(-1, 1, 6)},
]
BATCHES = [([5, 40, 100], [1, 1, 1]), ([5, 40, 100], [5, 1, 30]), ([130], [1]), ([130, 60], [33, 0]), ([200], [70])]
CACHES = (torch.float32, torch.bfloat16, torch.int8)


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: next(iter(pattern), "causal"))
@pytest.mark.parametrize(("contexts", "counts"), BATCHES)
@pytest.mark.parametrize("most_programs", [1, 256])
def test_outputs_are_those_of_the_reference(
    contexts: list[int],
    counts: list[int],
    pattern: dict[str, Any],
    cache_dtype: torch.dtype,
    most_programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode steps, chunks and both; with one part of the keys, and with several."""
    from windlass.kernels import triton_attention
    from windlass.kernels.paged_attention import make_kv_cache, paged_attention, write_kv

    monkeypatch.setattr(triton_attention, "_PROGRAMS", most_programs)
    generator = torch.Generator().manual_seed(0)
    cache = make_kv_cache(24, 16, 2, 20, 24, cache_dtype, path="reference")
    for tensor in cache.tensors:
        tensor.zero_()
    blocks = iter(torch.randperm(24, generator=generator).tolist())
    table = torch.zeros(len(contexts), 16, dtype=torch.int32)
    for row, context in enumerate(contexts):
        for place in range(-(-context // 16)):
            table[row, place] = next(blocks)
        position = torch.arange(context)
        slots = table[row, position // 16].long() * 16 + position % 16
        write_kv(cache, *(torch.randn(context, 2, size, generator=generator) for size in (20, 24)), slots)
    query = torch.randn(sum(counts), 6, 20, generator=generator)
    start = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    options = {"scaling": 0.2, "sliding_window": None, "chunk_size": None, "softcap": None, "sinks": None, **pattern}
    expected = paged_attention(query, cache, table, start, lengths, **options)
    moved = make_kv_cache(24, 16, 2, 20, 24, cache_dtype, path="reference", device=DEVICE)
    for target, source in zip(moved.tensors, cache.tensors, strict=True):
        target.copy_(source)
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].to(DEVICE)
    arguments = [tensor.to(DEVICE) for tensor in (query, table, start, lengths)]
    found = triton_attention.attend(arguments[0], moved, *arguments[1:], **options)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-4)


def test_shapes_without_a_kernel_are_named() -> None:
    from windlass.kernels.paged_attention import make_kv_cache
    from windlass.kernels.triton_attention import can_attend

    query = torch.zeros(1, 2, 16)
    assert can_attend(query, make_kv_cache(1, 16, 2, 16))
    assert not can_attend(query, make_kv_cache(1, 48, 2, 16))
    assert not can_attend(query, make_kv_cache(1, 16, 2, 512))
    assert not can_attend(query.double(), make_kv_cache(1, 16, 2, 16))
