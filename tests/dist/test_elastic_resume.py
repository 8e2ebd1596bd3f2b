"""Tests that a checkpoint saved on any ranks, at any stage and from any tiers continues in any other layout."""

from __future__ import annotations

from itertools import cycle, islice
from math import lcm
from typing import Any

import pytest

from tests.dist.elastic_runs import TIERS, Layout, Row, allowed, hold
from tests.dist.quick_rows import in_shares
from tests.pairwise import covering_rows, pairwise

PLACES = {
    "first_ranks": [2, 3, 1, 4],
    "first_stage": [3, 2, 1, 0],
    "first_home": list(TIERS),
    "second_ranks": [3, 2, 4, 1],
    "second_stage": [3, 1, 0, 2],
    "second_home": list(TIERS),
}
WHATS = {
    "model": [
        "tied",
        "frozen",
        "lora",
        "unused_by_step",
        "unused_always",
        "odd_shapes",
        "mixed",
        "convolutions",
        "mlp",
    ],  # fmt: skip
    "optimizer": ["AdamW", "Adam", "Lamb", "Muon", "Adagrad", "stranger"],
    "precision": ["fp32", "bf16", "fp16"],
}
CUTS = {"first_cut": ["all", "hpz", "mics"], "second_cut": ["all", "mics", "hpz"]}


def sensible(row: dict[str, Any]) -> bool:
    """Return True if the (partial) row is a valid case."""
    for which in ("first", "second"):
        ranks, stage = row.get(f"{which}_ranks", 4), row.get(f"{which}_stage", 3)
        if not allowed(ranks, stage, row.get(f"{which}_home", "device"), row.get(f"{which}_cut", "all")):
            return False
    return not (row.get("model") == "mixed" and row.get("precision", "fp32") != "fp32")


def row_of(found: dict[str, Any], transport: str) -> Row:
    """Return the row for these factors. A step has the fewest micro-batches that both numbers of ranks divide."""
    first, second = (
        Layout(found[f"{which}_ranks"], found[f"{which}_stage"], found[f"{which}_home"], transport,
               found.get(f"{which}_cut", "all"))
        for which in ("first", "second")
    )  # fmt: skip
    shared = lcm(first.ranks, second.ranks)
    return Row(first, second, **{key: found[key] for key in WHATS if key in found}, micro_batches=shared)


def micro_batches_of(found: dict[str, Any]) -> float:
    """Return the number of micro-batches of a step, on which most of the cost of a row depends."""
    return float(row_of(found, "gloo").micro_batches)


def with_whats(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Combine rows of layouts with models, optimizers and precisions in turn."""
    whats = [row for row in pairwise(WHATS, sensible)]
    return [{**row, **what} for row, what in zip(rows, islice(cycle(whats), len(rows)), strict=True)]


@in_shares
def test_every_pair_of_layouts_resumes_as_one_run(every: bool, tmp_path: Any) -> None:
    """`make test` has every pair of tiers, and each stage and number of ranks before and after."""
    rows = with_whats(pairwise(PLACES, sensible))
    if not every:
        quick = covering_rows(rows, lambda a, b: {a, b} == {"first_home", "second_home"}, micro_batches_of)
        rows = [row for row, kept in zip(rows, quick, strict=True) if kept]
    hold([row_of(row, ("shm", "gloo")[number % 2]) for number, row in enumerate(rows)], tmp_path)


@pytest.mark.slow
def test_every_pair_of_layouts_and_training_variants_resumes_as_one_run(transport: str, tmp_path: Any) -> None:
    rows = pairwise({**PLACES, **WHATS, **CUTS}, sensible)
    hold([row_of(row, transport) for row in rows], tmp_path)
