"""Tests of the order in which pages of a KV cache are allocated ahead of its blocks."""

from __future__ import annotations

import pytest
import torch

from windlass.inference import cache_population
from windlass.inference.cache_population import CachePopulation
from windlass.kernels.huge_pages import HUGE_PAGE


@pytest.fixture
def populated(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def record(part: torch.Tensor) -> None:
        found.append(part)

    monkeypatch.setattr(cache_population, "populate_pages", record)
    return found


def test_each_page_ahead_of_the_blocks_in_use_is_allocated_once(populated: list[torch.Tensor]) -> None:
    per_page, block_size = 4, 512
    row = HUGE_PAGE // per_page
    tensors = [torch.empty(200, row, dtype=torch.uint8) for _ in range(2)]
    population = CachePopulation([*tensors, torch.empty(200, 8)], block_size)
    while population.advance():
        pass
    lead = cache_population._LEAD_TOKENS // block_size
    assert len(populated) == 2 * lead // per_page
    population.reach(0)
    assert not population.advance()
    population.reach(9)
    while population.advance():
        pass
    assert len(populated) == 2 * -(-(lead + 9) // per_page)
    population.reach(10**6)
    while population.advance():
        pass
    for tensor in tensors:
        parts = [part for part in populated if tensor.data_ptr() <= part.data_ptr() < tensor.data_ptr() + tensor.nbytes]
        assert torch.cat(parts).shape == tensor.shape
        assert [part.data_ptr() for part in parts] == sorted({part.data_ptr() for part in parts})


def test_nothing_is_done_after_a_refusal_or_the_end(
    populated: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.empty(8, HUGE_PAGE, dtype=torch.uint8)
    population = CachePopulation([tensor], 16)
    assert population.advance()
    population.close()
    assert not population.advance()
    monkeypatch.setattr(cache_population, "populate_pages", lambda part: "not here")
    population = CachePopulation([tensor], 16)
    assert not population.advance()
    population.reach(5)
    assert not population.advance()
    assert len(populated) == 1
    assert not CachePopulation([], 16).advance()
