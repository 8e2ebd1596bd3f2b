"""The laws of memory and of communication, counted and exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.dist.cases import FROZEN_KNOBS
from tests.dist.harness import run_ranks
from tests.dist.laws import ADAMW, SGD, Setting, backward_of, ds_config, specimen, start
from tests.models import Place, cast
from tests.oracle import Recipe


def reported(name: str, recipe: Recipe, setting: Setting, steps: int) -> list[dict[str, Any]]:
    """The engine's report after each step."""
    subject = specimen(name)
    engine = start(subject, ds_config(recipe, setting))
    backward = backward_of(engine, setting.plain_backward)
    reports = []
    for step in range(steps):
        for micro in range(recipe.accumulation):
            batch = cast(subject.batch(Place(step, micro, dist.get_rank())), recipe.dtype)
            subject.train(engine, batch, backward)
            engine.step()
        reports.append(engine.report())
    engine.destroy()
    return reports


def elements(name: str) -> int:
    """P: the elements of the model's parameters."""
    return sum(p.numel() for p in specimen(name).build().parameters())


def volume(stage: int, accumulation: int) -> int:
    """Payload of a step in multiples of P: reductions and gathers, an all-reduce being both."""
    return {0: 2, 1: 2, 2: accumulation + 1, 3: 3 * accumulation}[stage]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["four_blocks", "odd_shapes", "attention"])
def test_payload_is_exact(name: str, ranks: int, accumulation: int, stage: int, transport: str) -> None:
    recipe = Recipe(ranks=ranks, accumulation=accumulation, optimizer_params=SGD)
    setting = Setting(stage=stage, transport=transport, zero=FROZEN_KNOBS)
    wanted = volume(stage, accumulation) * elements(name)
    for reports in run_ranks(reported, ranks, name, recipe, setting, 3, transport=transport):
        assert [report["payload_elements"] for report in reports] == [wanted] * 3


@pytest.mark.parametrize("accumulation", [1, 3])
def test_default_knobs_never_carry_more(accumulation: int, stage: int, transport: str) -> None:
    recipe = Recipe(accumulation=accumulation)
    setting = Setting(stage=stage, transport=transport, persistence=100_000)
    wanted = volume(stage, accumulation) * elements("four_blocks")
    for reports in run_ranks(reported, 2, "four_blocks", recipe, setting, 3, transport=transport):
        for report in reports:
            assert 0 < report["payload_elements"] <= wanted


def test_one_rank_carries_nothing(stage: int) -> None:
    for reports in run_ranks(reported, 1, "mlp", Recipe(ranks=1), Setting(stage=stage), 2):
        assert [report["payload_elements"] for report in reports] == [0, 0]
