"""Laws of the forecast: it equals the plan of each configuration, and skips configurations without a plan."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import nn

from tests.causal_models import model_of
from windlass.base.errors import ModelError
from windlass.config import Config, load_config
from windlass.config.batch_sizes import ACCUMULATION, MICRO
from windlass.config.config_overrides import override_keys
from windlass.parallel.model_checkpointing import disable_checkpointing, enable_checkpointing
from windlass.parallel.sequence.batch_sharding import SHARD_KEY
from windlass.plan.activation_trace import ActivationTrace
from windlass.plan.memory_plan import HOST
from windlass.plan.memory_planner import MemoryPlanner
from windlass.plan.plan_run import RunShape, plan_memory
from windlass.plan.planned_layout import PlannedLayout
from windlass.tune import memory_forecast
from windlass.tune.memory_forecast import BatchShape, CandidatePlanner, ForecastOrder, ForecastResult, start_forecast
from windlass.tune.search_space import CHECKPOINTING, REDUCE_BUCKET, STAGE

SIZES: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
}
RAW: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def test_the_forecast_equals_the_plan(tmp_path: Path) -> None:
    model = model_of("LlamaForCausalLM", **SIZES)
    candidates = {
        f"z{stage}_mbs{micro}_{checkpoints}": {STAGE: stage, MICRO: micro, CHECKPOINTING: checkpoints, REDUCE_BUCKET: 7}
        for stage, micro, checkpoints in ((3, 4, False), (2, 4, True))
    }
    order = ForecastOrder(candidates, str(tmp_path / "forecast.json"))
    order.write(tmp_path / "order.json")
    ids = torch.zeros((2, 16), dtype=torch.long)
    start_forecast(str(tmp_path / "order.json"), RAW, model, 2, 12)(2, (), {"input_ids": ids, "labels": ids})
    found = ForecastResult(**json.loads(Path(order.result).read_text()))
    assert (found.problem, found.fed, found.tokens, found.base, found.can_checkpoint) == ("", 2, 16, 12, True)
    for name, overrides in candidates.items():
        (enable_checkpointing if overrides[CHECKPOINTING] else disable_checkpointing)(model)
        config = load_config(override_keys(RAW, overrides))
        plan = plan_memory(model, config, RunShape(2, 16))
        planned = plan.peak(HOST, ("init", "load", "forward", "backward", "step"))
        assert abs(found.host_bytes[name] - planned) < 1e-2 * planned, "blocks of 64 bytes are not quite linear"


def test_activations_that_the_program_checkpoints_itself_are_planned_so() -> None:
    ids = torch.zeros((2, 16), dtype=torch.long)
    batch = BatchShape(2, (), {"input_ids": ids, "labels": ids})

    def peak(*, enabled: bool, own: bool) -> int:
        model = model_of("LlamaForCausalLM", **{**SIZES, "num_hidden_layers": 8}).to("meta")
        planner = CandidatePlanner(model, RAW, 2, "cpu", own_checkpointing=own)
        return planner.peaks({CHECKPOINTING: enabled, MICRO: 64}, batch)[1]

    assert peak(enabled=False, own=True) == peak(enabled=True, own=False) < peak(enabled=False, own=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(True, 1000)]),
        ({"comm.transport": "gloo"}, [(False, 1000), (False, 2000)]),
        ({"zero_optimization.zero_quantized_gradients": True}, [(False, 1000), (False, 2000)]),
    ],
)
def test_chunks_of_a_reduction_are_planned_unless_ranks_share_memory(
    changes: dict[str, Any], expected: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []

    class Planner(MemoryPlanner):
        def __init__(self, model: nn.Module, config: Config, layout: PlannedLayout, trace: ActivationTrace) -> None:
            planned.append((layout.shares_memory, layout.settings.wire_options.reduce_chunk))
            super().__init__(model, config, layout, trace)

    monkeypatch.setattr(memory_forecast, "MemoryPlanner", Planner)
    raw = override_keys(RAW, {STAGE: 3, **changes})
    planner = CandidatePlanner(nn.Linear(8, 8, device="meta"), raw, 2, "cpu")
    batch = BatchShape(2, (torch.zeros(2, 8),), {})
    for bucket in (1000, 2000):
        planner.peaks({REDUCE_BUCKET: bucket}, batch)
    assert planned == expected


@pytest.mark.parametrize("changes", [{"parallel.tp": 2}, {"parallel.sp": 2}, {"parallel.recompute": True}])
def test_candidates_with_other_axes_or_memory_savings_have_traces_of_their_own(changes: dict[str, Any]) -> None:
    model = model_of("LlamaForCausalLM", **SIZES)
    ids = torch.zeros((2, 32), dtype=torch.long)
    batch = BatchShape(2, (), {"input_ids": ids, "labels": ids})
    planner = CandidatePlanner(model, RAW, 2, "cpu")
    assert planner.peaks({}, batch) != planner.peaks(changes, batch)
    assert planner.peaks(changes, batch) == CandidatePlanner(model, RAW, 2, "cpu").peaks(changes, batch)


def test_a_pipeline_is_predicted_with_all_micro_batches_of_its_schedule() -> None:
    model = model_of("LlamaForCausalLM", **SIZES)
    ids = torch.zeros((2, 32), dtype=torch.long)
    batch = BatchShape(2, (), {"input_ids": ids, "labels": ids})
    raw = {**RAW, "parallel": {"pp": 2}, "pipeline": {"schedule": "gpipe"}}
    planner = CandidatePlanner(model, raw, 2, "cpu")
    one, four = (planner.peaks({ACCUMULATION: steps}, batch) for steps in (1, 4))
    assert one[1] < four[1]


@pytest.mark.parametrize("largest", [0, 1])
def test_the_stage_of_a_pipeline_that_needs_most_is_predicted(largest: int) -> None:
    """The last stage has the logits; the first stage the activations of more micro-batches.

    The holes of the heap differ a little, since ids and labels of the forecast are two tensors.
    """
    sizes = {**SIZES, "vocab_size": 4096} if largest else {**SIZES, "num_hidden_layers": 8}
    model = model_of("LlamaForCausalLM", **sizes).to("meta")
    ids = torch.zeros((2, 32), dtype=torch.long)
    batch = BatchShape(2, (), {"input_ids": ids, "labels": ids})
    raw = {**RAW, "parallel": {"pp": 2}, ACCUMULATION: 4}
    plan = plan_memory(model, load_config(raw), RunShape(2, 32))
    assert any(f"pipeline stage {largest}, which needs most" in note for note in plan.notes)
    planned = plan.peak(HOST, ("init", "load", "forward", "backward", "step"))
    assert CandidatePlanner(model, raw, 2, "cpu").peaks({}, batch)[1] == pytest.approx(planned, rel=0.1)


def test_a_batch_of_one_rank_along_sp_is_not_traced() -> None:
    batch = BatchShape(2, (), {"input_ids": torch.zeros((2, 8), dtype=torch.long), SHARD_KEY: object()})
    with pytest.raises(ModelError, match=r"only this rank's tokens along parallel\.sp"):
        CandidatePlanner(nn.Linear(8, 8), RAW, 2, "cpu").peaks({}, batch)


def test_a_model_that_cannot_be_traced_gives_facts_and_a_reason(tmp_path: Path) -> None:
    class Reads(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows)[: len(rows.unique().tolist())]

    order = ForecastOrder({"z0": {STAGE: 0}}, str(tmp_path / "forecast.json"))
    order.write(tmp_path / "order.json")
    start_forecast(str(tmp_path / "order.json"), RAW, Reads(4, 4), 1, 0)(2, (torch.zeros(2, 4),), {})
    found = ForecastResult(**json.loads(Path(order.result).read_text()))
    assert found.parameters == 20 and not found.host_bytes and "cannot be traced" in found.problem


def test_a_model_of_two_positional_arguments_is_predicted(tmp_path: Path) -> None:
    class Pair(torch.nn.Linear):
        def forward(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (super().forward(rows) * scale).sum()

    dtypes = {"fp32": {"bf16.enabled": False}, "bf16": {"bf16.enabled": True}}
    order = ForecastOrder(dtypes, str(tmp_path / "forecast.json"))
    order.write(tmp_path / "order.json")
    batch = (torch.zeros(2, 4000), torch.zeros(2, 1))
    start_forecast(str(tmp_path / "order.json"), RAW, Pair(4000, 4), 1, 0)(2, batch, {})
    found = ForecastResult(**json.loads(Path(order.result).read_text()))
    assert found.problem == "" and found.host_bytes["fp32"] != found.host_bytes["bf16"]


def test_candidates_after_one_that_cannot_be_planned_are_predicted(tmp_path: Path) -> None:
    order = ForecastOrder({"wrong": {STAGE: 7}, "z2": {STAGE: 2}}, str(tmp_path / "forecast.json"))
    order.write(tmp_path / "order.json")
    start_forecast(str(tmp_path / "order.json"), RAW, nn.Linear(8, 8), 1, 0)(2, (torch.zeros(2, 8),), {})
    found = ForecastResult(**json.loads(Path(order.result).read_text()))
    assert list(found.host_bytes) == list(found.device_bytes) == ["z2"]
    assert found.problem.startswith("wrong: ") and "stage" in found.problem


def test_a_model_that_cannot_be_copied_is_not_predicted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.guard = Lock()  # type: ignore[assignment]
    order = ForecastOrder({"a": {}}, str(tmp_path / "forecast.json"))
    order.write(tmp_path / "order.json")
    start_forecast(str(tmp_path / "order.json"), RAW, model, 1, 0)(2, (torch.zeros(2, 4),), {})
    found = ForecastResult(**json.loads(Path(order.result).read_text()))
    assert "Sequential cannot be copied without its values" in found.problem and not found.host_bytes
