"""Predicted bytes of all slots equal those of a real engine, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import windlass
from tests.causal_models import build
from tests.dist.equivalence_runs import ADAMW, SGD, Setting, ds_config, specimen, start
from tests.dist.harness import run_ranks
from tests.models import Place, cast
from tests.oracle import Recipe
from windlass.config import load_config
from windlass.plan.activation_trace import ActivationTrace
from windlass.plan.memory_planner import MemoryPlanner
from windlass.plan.plan_run import RunShape, trace_of
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


def along_axis(axis: str, stage: int) -> tuple[Any, Any, int, int]:
    """Return the predicted and the real bytes of slots, and the predicted and real bytes that autograd saves."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "parallel": {axis: 2},
    }
    ids = torch.arange(32).reshape(2, 16)
    target, run = Target("cpu", "shm"), RunShape(2, 16)
    layout = plan_layout(build("llama"), load_config(config), 2, target, rank=dist.get_rank())
    trace = trace_of(load_config(config), layout, run, 2)
    planned = MemoryPlanner(layout.model, load_config(config), layout, trace).slot_bytes()
    model = build("llama")
    engine = windlass.initialize(model=model, config=config)[0]
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    report = engine.report()
    engine.destroy()
    real: dict[str, int] = {}
    for (slot, _), nbytes in report["slots"].items():
        kind = SLOTS.get(slot, "optimizer states")
        real[kind] = real.get(kind, 0) + nbytes
    real.pop("module buffers", None)
    return (
        {kind: planned.get(kind, 0) for kind in real},
        real,
        trace.saved_by_autograd,
        sum(tensor.untyped_storage().nbytes() for tensor in saved.values()),
    )


@pytest.mark.parametrize(("axis", "stage"), [("tp", 1), ("sp", 0)])
def test_parts_of_a_rank_along_an_axis_are_exact(axis: str, stage: int) -> None:
    for planned, real, traced, saved in run_ranks(along_axis, 2, axis, stage):
        assert planned == real
        assert traced == pytest.approx(saved, rel=0.02)  # the ids of the batch, which each hook holds in its own form


@pytest.mark.parametrize(("precision", "persistence", "params", "optimizer"), CASES)
def test_slots_are_exact(precision: str, persistence: int, params: Any, optimizer: str) -> None:
    for transport in ("shm", "gloo"):
        for by_stage in run_ranks(both, 2, precision, persistence, params, optimizer, transport, transport=transport):
            for planned, real in by_stage:
                assert planned == real
