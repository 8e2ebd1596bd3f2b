"""Tests of notes on out-of-memory errors: prediction against limit, and the cheapest change that fits."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.causal_models import model_of
from windlass.base.errors import ConfigError, DeviceMemoryError
from windlass.cli.expected_errors import describe_expected_error
from windlass.cli.training.run_failure import describe_failure
from windlass.config import BatchSizes, load_config
from windlass.engine.out_of_memory import FailedRun, batch_shape, is_out_of_memory, note_out_of_memory
from windlass.parallel.model_checkpointing import enable_checkpointing
from windlass.plan import out_of_memory_note as notes
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
    return FailedRun(model, load_config(raw), ranks, CPU, moment, (raw["train_micro_batch_size_per_gpu"], 48))


def note(run: FailedRun, limit: int | None) -> str:
    with patch.object(notes, "memory_limit", lambda _: limit):
        return notes.out_of_memory_note(run)


def peak(run: FailedRun, raw: dict[str, Any]) -> int:
    return plan_memory(notes.planning_copy(run.model), load_config(raw), RunShape(run.world_size, 48)).peak("host")


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
    run = FailedRun(llama, load_config(raw), 2, torch.device("cuda"), "backward", (4, 48))
    options = {"checkpointed": False, "can_checkpoint": True}
    for one in notes.possible_changes(raw, 4, 1, run, **options):
        load_config(one.config)
    raw["zero_optimization"] = True
    run = failed(llama, raw)
    first = next(notes.possible_changes(raw, 4, 1, run, **options))
    assert first.text == "zero_optimization.stage 2" and load_config(first.config).zero_optimization.stage == 2


def test_chosen_tiers_are_planned_for_the_limit(llama: nn.Module) -> None:
    raw = config(stage=3, offload="auto")
    run = FailedRun(llama, load_config(raw), 2, torch.device("cuda"), "backward", (4, 48))
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


def test_what_cannot_be_planned_still_has_its_actual_memory() -> None:
    text = note(failed(nn.Linear(3, 3), config()), 1 << 30)
    assert "resident now" in text and "not predicted (Linear cannot be built again" in text
    assert batch_shape(({"mask": None, "ids": torch.zeros(2, 7)},)) == (2, 7) and batch_shape((1, "x")) is None


def test_the_emulated_device_is_the_limit(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_EMULATE_DEVICE", "60K")
    run = failed(llama, config(stage=0), moment="load")
    text = notes.out_of_memory_note(run)
    assert "of the emulated device in use (limit 0.1 MiB)" in text and "of device memory in the" in text
    assert "cheapest change that fits: zero_optimization." in text
