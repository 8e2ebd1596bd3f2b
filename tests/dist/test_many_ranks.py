"""Tests with more ranks than cores and than rows of parameters: training on 8 and 16 ranks, resuming on 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.dist.elastic_runs import LATE, Layout, Row, load_and_continue, save_and_continue
from tests.dist.elastic_runs import complaints as resumed_complaints
from tests.dist.equivalence_runs import Setting, complaints, expected, train_rank, train_rank_in_turn
from tests.dist.harness import Pool
from tests.oracle import Recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def many() -> Iterator[Pool]:
    """Pool of sixteen processes, which ends with this module."""
    pool = Pool(16)
    yield pool
    pool.end()


@pytest.mark.parametrize("name", ["tied", "odd_shapes"])
def test_eight_ranks_train_as_one_process(name: str, many: Pool) -> None:
    recipe = Recipe(ranks=8, accumulation=2, steps=3)
    settings = [
        Setting(stage, config=(("comm", {"transport": transport}),))
        for transport in ("gloo", "shm")
        for stage in range(4)
    ]
    by_rank = many.run(train_rank_in_turn, 8, name, recipe, settings, timeout=600.0)
    for number, setting in enumerate(settings):
        text = complaints([traces[number] for traces in by_rank], expected(name, recipe), recipe)
        assert not text, f"{setting}:\n" + "\n".join(text[:8])


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_sixteen_ranks_train_as_one_process(transport: str, many: Pool) -> None:
    recipe = Recipe(ranks=16, accumulation=1, steps=3)
    setting = Setting(stage=3, config=(("comm", {"transport": transport}),))
    text = complaints(
        many.run(train_rank, 16, "tied", recipe, setting, timeout=300.0), expected("tied", recipe), recipe
    )
    assert not text, "\n".join(text[:8])


@pytest.mark.parametrize(("first", "second"), [(3, 3), (1, 2)])
def test_checkpoint_of_sixteen_ranks_resumes_on_three(first: int, second: int, many: Pool, tmp_path: Any) -> None:
    row = Row(Layout(16, first), Layout(3, second), model="tied", micro_batches=48)
    expected = many.run(save_and_continue, 16, row, str(tmp_path), env=LATE, timeout=300.0)
    actual = many.run(load_and_continue, 3, row, str(tmp_path), env=LATE, timeout=300.0)
    for of_rank in actual:
        text = resumed_complaints(row, expected[0], of_rank)
        assert not text, "\n".join(text[:8])
    back = replace(row, first=row.second, second=row.first)
    again = many.run(load_and_continue, 16, back, str(tmp_path), env=LATE, timeout=300.0)
    assert not resumed_complaints(row, expected[0], again[15])
