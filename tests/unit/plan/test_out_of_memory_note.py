"""Tests of notes on out-of-memory errors: prediction against limit, and the cheapest change that fits."""

from __future__ import annotations

import re
import sys
from threading import Lock
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.causal_models import model_of
from windlass.base.errors import ConfigError, DeviceMemoryError
from windlass.cli.expected_errors import describe_expected_error
from windlass.cli.training.run_failure import describe_failure
from windlass.config import BatchSizes, load_config
from windlass.engine.batch_shapes import BatchShapes
from windlass.engine.out_of_memory import FailedRun, is_out_of_memory, note_out_of_memory
from windlass.parallel.model_checkpointing import enable_checkpointing
from windlass.parallel.pipeline.layer_specs import LayerSpec
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential
from windlass.plan import out_of_memory_note as notes
from windlass.plan.activation_trace import ForwardArguments
from windlass.plan.plan_run import RunShape, plan_memory

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
CPU = torch.device("cpu")


def config(micro: int = 4, stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **more,
    }


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return model_of("LlamaForCausalLM", **SIZES)


def failed(model: nn.Module, raw: dict[str, Any], ranks: int = 2, moment: str = "backward") -> FailedRun:
    return FailedRun(model, load_config(raw), ranks, CPU, moment, tokens(raw["train_micro_batch_size_per_gpu"]))


def tokens(micro: int) -> BatchShapes:
    ids = torch.zeros((micro, 48), dtype=torch.long)
    return BatchShapes((), {"input_ids": ids, "labels": ids})


def note(run: FailedRun, limit: int | None) -> str:
    with patch.object(notes, "memory_limit", lambda _: limit):
        return notes.out_of_memory_note(run)


def peak(run: FailedRun, raw: dict[str, Any]) -> int:
    return plan_memory(notes.planning_copy(run), load_config(raw), RunShape(run.world_size, 48)).peak("host")


def test_the_cheapest_change_that_fits_is_proposed(llama: nn.Module) -> None:
    run = failed(llama, config())
    now, stage_2, small = peak(run, config()), peak(run, config(stage=2)), peak(run, config(micro=1, stage=0))
    assert small < stage_2 < now
    text = note(run, now - 1)
    assert "memory of this rank in the backward: " in text and f"{now / 2**20:,.1f} MiB of host memory" in text
    assert "cheapest change that fits: zero_optimization.stage 1; predicted" in text
    assert "gradient_accumulation_steps" in note(run, small + 1000)
    nothing = note(run, 1000)
    assert "no change fits; the nearest is" in nothing and "lacks" in nothing
    assert "no change is proposed" in note(run, None)
    assert "the prediction fits" in note(run, 10 * now)


def test_single_changes_keep_the_global_batch_and_grow_dearer(llama: nn.Module) -> None:
    run = failed(llama, config(micro=6, gradient_accumulation_steps=2))
    raw = run.config.raw
    options = {"checkpointed": False, "can_checkpoint": True}
    changes = list(notes.possible_changes(raw, 6, 2, run, **options))
    assert [one.text.split(" ")[0] for one in changes] == [
        "zero_optimization.stage",
        "zero_optimization.stage",
        "train_micro_batch_size_per_gpu",
        "activation_checkpointing.enabled",
        "zero_optimization.stage",
    ]
    assert changes[2].micro_batch == 3
    for one in changes:
        assert load_config(one.config).resolve_batch(2).train == load_config(raw).resolve_batch(2).train
    single = failed(llama, config(), ranks=1)
    texts = [one.text for one in notes.possible_changes(single.config.raw, 1, 1, single, **options)]
    assert texts == ["activation_checkpointing.enabled true"]


def test_changes_of_a_pipeline_keep_its_global_batch(llama: nn.Module) -> None:
    raw = config(parallel={"pp": 2}, pipeline={"micro_batches": 2})
    changes = notes.possible_changes(raw, 4, 2, failed(llama, raw), checkpointed=False, can_checkpoint=True)
    smaller = next(one for one in changes if one.micro_batch == 2)
    assert load_config(smaller.config).resolve_batch(2) == BatchSizes(train=8, micro=2, accumulation=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_parameters_and_dtypes_of_the_model_count(dtype: torch.dtype) -> None:
    model = model_of("LlamaForCausalLM", **SIZES)
    for number, parameter in enumerate(model.parameters()):
        parameter.data = parameter.data.to(dtype)  # not the buffers, as in `from_pretrained`
        parameter.requires_grad_(number == 0)
    planned = plan_memory(model, load_config(config()), RunShape(2, 48)).peak("host")
    text = note(failed(model, config()), None)
    assert f"predicted for this configuration: {planned / 2**20:,.1f} MiB" in text


def test_a_change_that_initialize_refuses_is_skipped(llama: nn.Module) -> None:
    raw = config(optimizer={"type": "DiLoCo", "params": {"lr": 1e-3}})  # DiLoCo: stage 0 only
    run = failed(llama, raw)
    text = note(run, peak(run, raw) - 1)
    assert "cheapest change that fits: train_micro_batch_size_per_gpu 2" in text


def test_changes_apply_to_old_spellings(llama: nn.Module) -> None:
    raw = {**config(), "zero_optimization": {"stage": 1, "cpu_offload": True}}
    run = FailedRun(llama, load_config(raw), 2, torch.device("cuda"), "backward", tokens(4))
    options = {"checkpointed": False, "can_checkpoint": True}
    for one in notes.possible_changes(raw, 4, 1, run, **options):
        load_config(one.config)
    raw["zero_optimization"] = True
    run = failed(llama, raw)
    first = next(notes.possible_changes(raw, 4, 1, run, **options))
    assert first.text == "zero_optimization.stage 2" and load_config(first.config).zero_optimization.stage == 2


def test_chosen_tiers_are_planned_for_the_limit(llama: nn.Module) -> None:
    raw = config(stage=3, offload="auto")
    run = FailedRun(llama, load_config(raw), 2, torch.device("cuda"), "backward", tokens(4))
    text = note(run, 10**9)
    assert "predicted for this configuration" in text and "cheapest change that fits: " in text


def test_a_model_that_already_checkpoints_is_planned_so() -> None:
    plain, checkpointed = (model_of("LlamaForCausalLM", **{**SIZES, "num_hidden_layers": 4}) for _ in range(2))
    enable_checkpointing(checkpointed)
    raw = config(micro=63)  # mostly activations; an odd micro-batch cannot be halved
    same = {**raw, "activation_checkpointing": {"enabled": True}}
    more, less = peak(failed(plain, raw), raw), peak(failed(plain, same), same)
    assert less < 0.8 * more
    for model, nbytes in ((plain, more), (checkpointed, less)):
        predicted = note(failed(model, raw), 10**9).split("\n")[1]
        assert predicted.startswith(f"predicted for this configuration: {nbytes / 2**20:,.1f} MiB of host memory")
    proposed = "cheapest change that fits: activation_checkpointing.enabled true"
    assert proposed in note(failed(plain, raw, ranks=1), more - 1)
    assert proposed not in note(failed(checkpointed, raw, ranks=1), less - 1)


def test_only_memory_errors_get_a_note_and_nothing_hides_them(llama: nn.Module) -> None:
    run = failed(llama, config())
    for error in (torch.OutOfMemoryError("CUDA"), MemoryError(), DeviceMemoryError("emulated")):
        assert is_out_of_memory(error)
        note_out_of_memory(error, run)
        (added,) = error.__notes__
        note_out_of_memory(error, run)  # an outer call handles the same error again
        assert error.__notes__ == [added]
        assert "predicted for this configuration" in describe_failure(error, 1)
    allocator = RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: ...")
    assert is_out_of_memory(allocator) and not is_out_of_memory(RuntimeError("shape"))
    other = ConfigError("x")
    note_out_of_memory(other, run)
    assert not hasattr(other, "__notes__") and describe_expected_error(other) == "x"
    with patch.dict(sys.modules, {"windlass.plan.out_of_memory_note": None}):
        broken = MemoryError("first")
        note_out_of_memory(broken, run)
        assert str(broken) == "first" and not hasattr(broken, "__notes__")


class Tied(nn.Module):
    """Embedding with a tied head, whose forward takes a tuple and keyword arguments and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 12), nn.LayerNorm(12)
        self.head = nn.Linear(12, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.scales = [torch.ones(12), torch.ones(12)]
        self.norm.register_forward_hook(self.count)
        self.calls = 0

    def count(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls += 1

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], *, scale: float, mask: torch.Tensor) -> torch.Tensor:
        ids, weights = pair
        hidden = self.norm(self.embedding(ids) * weights[..., None] * mask * self.scales[0])
        return self.head(hidden) * scale


def tied_inputs(micro: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    pair = (torch.zeros((micro, 9), dtype=torch.long), torch.ones(micro, 9))
    return (pair,), {"scale": 0.5, "mask": torch.ones(9, 12)}


class Checkpointed(nn.Module):
    """Layers of which each is checkpointed by the model itself; the samples are along the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden.square().mean()


def checkpointed_inputs(micro: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.ones(7, micro, 16),), {}


def stacked() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 2)).requires_grad_(True)


def stacked_inputs(micro: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.ones(micro, 6),), {}


def staged() -> nn.Module:
    return PipelineSequential([LayerSpec(nn.Linear, 6, 24), torch.tanh, LayerSpec(nn.Linear, 24, 2)])


OWN = [
    pytest.param(Tied, tied_inputs, id="tied"),
    pytest.param(Checkpointed, checkpointed_inputs, id="checkpointed"),
    pytest.param(stacked, stacked_inputs, id="sequential"),
    pytest.param(staged, stacked_inputs, id="pipeline-module"),
]


@pytest.mark.parametrize(("make", "inputs"), OWN)
def test_any_module_is_predicted_with_the_batch_that_it_saw(make: Any, inputs: Any) -> None:
    raw, model = config(micro=64), make()
    run = FailedRun(model, load_config(raw), 2, CPU, "backward", BatchShapes(*inputs(64)))

    def planned(micro: int, **more: Any) -> int:
        shape = RunShape(2, 1, make_batch=lambda samples, _: lambda: ForwardArguments(*inputs(samples)))
        return plan_memory(make(), load_config(config(micro=micro, **more)), shape).peak("host")

    now, half = planned(64), planned(32)
    text = note(run, now - 1)
    assert f"predicted for this configuration: {now / 2**20:,.1f} MiB of host memory" in text
    assert "cheapest change that fits: " in text
    assert ("the forward returns no loss" in text) == (make is not Checkpointed)
    assert half < now
    smallest = note(FailedRun(model, load_config(raw), 1, CPU, "backward", run.batch), now * 10**6)
    assert "the prediction fits" in smallest and "train_micro_batch_size_per_gpu" in smallest
    assert not vars(model).get("calls"), "the note ran the trained model"


def test_a_model_whose_forward_accepts_no_other_batch_still_gets_its_prediction() -> None:
    class Fixed(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows).reshape(8, -1)

    run = FailedRun(Fixed(6, 3), load_config(config(micro=8)), 1, CPU, "backward", BatchShapes((torch.ones(8, 6),), {}))
    text = note(run, 100)
    assert "predicted for this configuration: " in text and "no change is proposed (" in text


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3))
        self.inner.guard = Lock()  # type: ignore[assignment]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows)


class Valued(nn.Linear):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows[rows[:, 0] > 0])


ROWS = BatchShapes((torch.zeros(2, 3),), {})


@pytest.mark.parametrize(
    ("model", "batch", "more", "reason"),
    [
        (Locked(), ROWS, {}, r"Locked cannot be copied .* module 'inner' \(Sequential\): cannot pickle"),
        (Valued(3, 3), ROWS, {}, r"the memory of Valued cannot be traced"),
        (nn.Linear(3, 3), ROWS, {"parallel": {"recompute": True}}, r"parallel.recompute changed Linear in place"),
        (nn.Linear(3, 3), None, {}, r"no forward has run"),
        (nn.Linear(3, 3), BatchShapes((object(),), {}), {}, r"the batch has a object"),
    ],
)
def test_a_model_that_cannot_be_planned_still_has_its_actual_memory(
    model: nn.Module, batch: BatchShapes | None, more: Any, reason: str
) -> None:
    text = note(FailedRun(model, load_config(config(micro=2, **more)), 1, CPU, "step", batch), 1 << 30)
    used, problem = text.splitlines()
    assert "resident now" in used
    assert re.match(rf"not predicted \(.*{reason}", problem), problem


def test_the_emulated_device_is_the_limit(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_EMULATE_DEVICE", "60K")
    run = failed(llama, config(stage=0), moment="load")
    text = notes.out_of_memory_note(run)
    assert "of the emulated device in use (limit 0.1 MiB)" in text and "of device memory in the" in text
    assert "cheapest change that fits: zero_optimization." in text
