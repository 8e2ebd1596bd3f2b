"""Law: the Triton kernel of paged attention computes what the reference does.

The tests run on a GPU, or anywhere in Triton's interpreter:
`TRITON_INTERPRET=1 pytest -m gpu tests/gpu/test_triton_attention.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.triton_device import DEVICE, NEEDS_TRITON
from tests.paged_attention_cases import PATTERNS, fill_cache, make_queries, name_pattern, options_of
from windlass.kernels.paged_attention import CACHE_DTYPES, make_kv_cache, paged_attention

pytestmark = NEEDS_TRITON
BATCHES = [([5, 40, 100], [1, 1, 1]), ([5, 40, 100], [5, 1, 30]), ([130], [1]), ([130, 60], [33, 0]), ([200], [70])]


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=name_pattern)
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
    """Batches of decode steps, of prompt chunks, and of both; a sequence's keys are read in one part or in several."""
    from windlass.kernels import triton_attention

    monkeypatch.setattr(triton_attention, "_PROGRAMS", most_programs)
    cache, table = fill_cache(contexts, cache_dtype)
    query, start, lengths = make_queries(contexts, counts)
    options = options_of(pattern)
    expected = paged_attention(query, cache, table, start, lengths, **options)
    moved = make_kv_cache(cache.num_blocks, 16, 2, 20, 24, cache_dtype, path="reference", device=DEVICE)
    for target, source in zip(moved.tensors, cache.tensors, strict=True):
        target.copy_(source)
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"].to(DEVICE)
    query, *others = (tensor.to(DEVICE) for tensor in (query, table, start, lengths))
    found = triton_attention.attend(query, moved, *others, **options)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-4)


def test_shapes_without_a_kernel_are_named() -> None:
    from windlass.kernels.triton_attention import can_attend

    query = torch.zeros(1, 2, 16)
    assert can_attend(query, make_kv_cache(1, 16, 2, 16))
    assert not can_attend(query, make_kv_cache(1, 48, 2, 16))
    assert not can_attend(query, make_kv_cache(1, 16, 2, 512))
    assert not can_attend(query.double(), make_kv_cache(1, 16, 2, 16))
