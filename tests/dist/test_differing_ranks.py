"""Ranks that run different modules, or more micro-batches than others, train what one process trains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.laws import ADAMW, Setting
from tests.dist.test_offload import LATE, hold, homes
from tests.models import DIFFERING
from tests.oracle import Recipe

RECIPE = Recipe(ranks=2, accumulation=2, steps=4, optimizer="AdamW", optimizer_params=ADAMW)


def settings(transport: str, home: str, **more: Any) -> list[Setting]:
    """Every stage that cuts something, with what it cuts at `home`."""
    zero = {stage: homes("cpu", "cpu" if stage == 3 else "none", "") if home == "host" else () for stage in (1, 2, 3)}
    return [Setting(stage=stage, transport=transport, zero=zero[stage], **more) for stage in (1, 2, 3)]


@pytest.mark.parametrize("name", ["towers", "experts", "early_exit", "uneven"])
def test_ranks_that_differ_equal_one_process(name: str, transport: str) -> None:
    hold(name, RECIPE, settings(transport, "host"), LATE)
