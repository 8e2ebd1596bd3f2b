"""Law: attention as accelerators compute it in plain PyTorch equals the reference, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.paged_attention_cases import PATTERNS, fill_cache, make_queries, name_pattern, options_of
from windlass.kernels.device_attention import attend_plainly, write_on_device
from windlass.kernels.paged_attention import CACHE_DTYPES, paged_attention

CONTEXTS, COUNTS = [5, 40, 130], [5, 1, 33]


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_written_rows_are_those_of_the_reference(dtype: torch.dtype) -> None:
    (found, _), (expected, _) = fill_cache(CONTEXTS, dtype, write_on_device), fill_cache(CONTEXTS, dtype)
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=name_pattern)
@pytest.mark.parametrize("most_scores", [1 << 28, 1])
def test_outputs_are_those_of_the_reference(
    dtype: torch.dtype, pattern: dict[str, Any], most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.kernels.device_attention._MOST_SCORES", most_scores)
    cache, table = fill_cache(CONTEXTS, dtype)
    query, start, lengths = make_queries(CONTEXTS, COUNTS)
    options = options_of(pattern)
    found = attend_plainly(query, cache, table, start, lengths, **options)
    torch.testing.assert_close(found, paged_attention(query, cache, table, start, lengths, **options))
