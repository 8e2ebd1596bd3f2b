"""Tests that ranks train as one process of plain PyTorch, for any stage, transport and model.

A covering array has every pair of factor values. `make test` runs enough of its rows for every model and every pair of
the other values; `tests/parity` runs all combinations.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from tests.dist.equivalence_cases import (
    FACTORS,
    FROZEN_KNOBS,
    HF_FACTORS,
    allowed_quick,
    name_of,
    recipe_of,
    setting_of,
)
from tests.dist.equivalence_runs import (
    ADAMW,
    SGD,
    Setting,
    bitwise_difference,
    hold,
    hold_all,
    specimen,
    train_ranks_in_turn,
)
from tests.models import ZOO
from tests.oracle import Recipe
from tests.pairwise import covering_rows, pairwise

ROWS = pairwise(FACTORS, allowed_quick)
HF_ROWS = pairwise(HF_FACTORS, allowed_quick)


def quick(rows: list[dict[str, Any]], counts: Callable[[str, str], bool]) -> list[Any]:
    """Return the rows as test parameters. Rows outside of a small subset with the pairs of `counts` are slow."""
    kept = covering_rows(rows, counts, cost=lambda row: float(row["ranks"]))
    return [pytest.param(row, marks=() if k else pytest.mark.slow) for row, k in zip(rows, kept, strict=True)]


def steps_of(name: str) -> int:
    """Return the number of steps, fewer than in `tests/parity`. A model with changing branches takes one step more."""
    return 3 if "moving" in specimen(name).traits else 2


@pytest.mark.parametrize("row", quick(ROWS, lambda a, b: "model" not in (a, b)), ids=name_of)
def test_ranks_equal_one_process(row: dict[str, Any]) -> None:
    hold(row["model"], recipe_of(row, steps_of(row["model"])), setting_of(row))


@pytest.mark.parametrize(
    "row",
    quick(HF_ROWS, lambda a, b: "model" in (a, b) and len(HF_FACTORS[b if a == "model" else a]) == 2),
    ids=name_of,
)
def test_hugging_face_models_equal_one_process(row: dict[str, Any]) -> None:
    hold(row["model"], recipe_of(row, steps_of(row["model"])), setting_of(row))


def short_recipe(name: str, steps: int, accumulates: bool = True) -> Recipe:
    return Recipe(accumulation=2 if accumulates and "once" not in ZOO[name].traits else 1, steps=steps)


# A gather from shared memory needs no partner, so only gloo reveals a wrong order of collectives.
@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.slow), "gloo"])
@pytest.mark.parametrize("name", ZOO)
def test_every_model_with_all_parameters_resharded(name: str, transport: str) -> None:
    """Every model trains correctly at stage 3 with no persistent parameters, no reuse and no merged units.

    Over gloo, every third model accumulates gradients.
    """
    strict = Setting(stage=3, transport=transport, zero=FROZEN_KNOBS)
    accumulates = transport == "shm" or list(ZOO).index(name) % 3 == 0
    hold_all(name, short_recipe(name, steps_of(name), accumulates), [strict], exact="rounds" not in ZOO[name].traits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_model_with_prefetch(name: str) -> None:
    ahead = [Setting(stage=3, transport=transport, plain_backward=True) for transport in ("shm", "gloo")]
    hold_all(name, short_recipe(name, 3), ahead, exact="rounds" not in ZOO[name].traits)


def test_every_pair_is_covered() -> None:
    missing = []
    for (a, xs), (b, ys) in combinations(FACTORS.items(), 2):
        seen = {(row[a], row[b]) for row in ROWS}
        missing += [(a, x, b, y) for x in xs for y in ys if (x, y) not in seen and allowed_quick({a: x, b: y})]
    assert not missing


# Models for which stages 1 to 3 do the same arithmetic in the same order, and differ only in where values are stored.
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


def in_turn(names: list[str], precisions: list[str]) -> list[Any]:
    """Return all pairs of models and precisions. Every second model is quick in one precision; other pairs are slow."""
    return [
        pytest.param(
            name, precision, marks=() if row % 2 == 0 and row // 2 % len(precisions) == column else pytest.mark.slow
        )
        for row, name in enumerate(names)
        for column, precision in enumerate(precisions)
    ]


PLACES = [(stage, transport) for transport in ("shm", "gloo") for stage in (1, 2, 3)]


@pytest.mark.parametrize(
    "places", [[PLACES[0], PLACES[2], PLACES[4]], pytest.param(PLACES, marks=pytest.mark.slow)], ids=["three", "all"]
)
@pytest.mark.parametrize(("name", "precision"), in_turn(SAME_ARITHMETIC, ["fp32", "bf16"]))
def test_stages_and_transports_are_bitwise_equal(name: str, precision: str, places: list[tuple[int, str]]) -> None:
    steps = 3 if len(places) == len(PLACES) else 2
    recipe = Recipe(ranks=3, precision=precision, optimizer="AdamW", optimizer_params=ADAMW, steps=steps)
    settings = [Setting(stage=stage, transport=transport) for stage, transport in places]
    first, *others = train_ranks_in_turn(name, recipe, settings)
    for setting, other in zip(settings[1:], others, strict=True):
        assert not (text := bitwise_difference(first, other)), (setting, text[:5])


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_repeats_bitwise(stage: int, transport: str) -> None:
    recipe = Recipe(ranks=3, optimizer_params=SGD, steps=3)
    first, second = train_ranks_in_turn("tied", recipe, 2 * [Setting(stage=stage, transport=transport)])
    assert not bitwise_difference(first, second)
