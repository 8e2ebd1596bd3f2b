"""Predicted bytes of all slots equal those of a real engine, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.dist.equivalence_runs import ADAMW, SGD, Setting, ds_config, specimen, start
from tests.dist.harness import run_ranks
from tests.models import Place, cast
from tests.oracle import Recipe
from windlass.config import load_config
from windlass.plan.activation_trace import ActivationTrace
from windlass.plan.memory_planner import MemoryPlanner
from windlass.plan.planned_layout import Target, plan_layout

SLOTS = {"param": "parameters", "grad": "gradients", "master": "master weights", "secondary": "secondary shards"}
CASES = [
    ("fp32", 100_000, ADAMW, "AdamW"),
    ("bf16", 0, ADAMW, "AdamW"),
    ("bf16", 64, SGD, "SGD"),
]


def both(precision: str, persistence: int, params: Any, optimizer: str, transport: str) -> list[tuple[Any, Any]]:
    """Return the predicted and the real bytes of each stage, by kind."""
    found = []
    for stage in range(4):
        recipe = Recipe(precision=precision, optimizer=optimizer, optimizer_params=params)
        setting = Setting(stage=stage, transport=transport, persistence=persistence)
        config = ds_config(recipe, setting)
        subject = specimen("odd_shapes")
        layout = plan_layout(subject.build(), load_config(config), 2, Target("cpu", transport), rank=dist.get_rank())
        planned = MemoryPlanner(subject.build(), load_config(config), layout, ActivationTrace()).slot_bytes()
        engine = start(subject, config)
        subject.train(engine, cast(subject.batch(Place(0, 0, dist.get_rank())), recipe.dtype), engine.backward)
        engine.step()
        report = engine.report()
        engine.destroy()
        real: dict[str, int] = {"gradient ring": report["transit"]}
        for (slot, _), nbytes in report["slots"].items():
            kind = SLOTS.get(slot, "optimizer states")
            real[kind] = real.get(kind, 0) + nbytes
        kinds = {*real} - {"module buffers"}
        found.append(({kind: planned.get(kind, 0) for kind in kinds}, real))
    return found


@pytest.mark.parametrize(("precision", "persistence", "params", "optimizer"), CASES)
def test_slots_are_exact(precision: str, persistence: int, params: Any, optimizer: str) -> None:
    for transport in ("shm", "gloo"):
        for by_stage in run_ranks(both, 2, precision, persistence, params, optimizer, transport, transport=transport):
            for planned, real in by_stage:
                assert planned == real
