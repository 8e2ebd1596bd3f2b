"""The great law: whatever the stage, transport or model, ranks train what one process of plain PyTorch trains.

A covering array of every pair of factor values; `tests/parity` runs the products.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from tests.dist.cases import FACTORS, HF_FACTORS, allowed, name_of, recipe_of, setting_of
from tests.dist.laws import ADAMW, SGD, Setting, bitwise_difference, hold, train_ranks
from tests.oracle import Recipe
from tests.pairwise import pairwise

ROWS = pairwise(FACTORS, allowed)
HF_ROWS = pairwise(HF_FACTORS, allowed)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_ranks_equal_one_process(row: dict[str, Any]) -> None:
    hold(row["model"], recipe_of(row), setting_of(row))


@pytest.mark.parametrize("row", HF_ROWS, ids=name_of)
def test_hugging_face_models_equal_one_process(row: dict[str, Any]) -> None:
    hold(row["model"], recipe_of(row), setting_of(row))


def test_every_pair_is_covered() -> None:
    missing = []
    for (a, xs), (b, ys) in combinations(FACTORS.items(), 2):
        seen = {(row[a], row[b]) for row in ROWS}
        missing += [(a, x, b, y) for x in xs for y in ys if (x, y) not in seen and allowed({a: x, b: y})]
    assert not missing


# Where stages only differ in where values are kept, they do the same arithmetic in the same order.
SAME_ARITHMETIC = [
    "mlp",
    "four_blocks",
    "tied",
    "siamese",
    "frozen",
    "lora",
    "cross_attention",
    "odd_shapes",
    "stashed",
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SAME_ARITHMETIC)
def test_stages_1_2_3_are_bitwise_equal(name: str, ranks: int, transport: str) -> None:
    recipe = Recipe(ranks=ranks, optimizer="AdamW", optimizer_params=ADAMW, steps=3)
    runs = {stage: train_ranks(name, recipe, Setting(stage=stage, transport=transport)) for stage in (1, 2, 3)}
    assert not bitwise_difference(runs[1], runs[2]), "stages 1 and 2"
    assert not bitwise_difference(runs[1], runs[3]), "stages 1 and 3"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_repeats_bitwise(stage: int, transport: str) -> None:
    recipe = Recipe(ranks=3, optimizer_params=SGD, steps=3)
    runs = [train_ranks("tied", recipe, Setting(stage=stage, transport=transport)) for _ in range(2)]
    assert not bitwise_difference(*runs)
