"""Tests of the start of a run with `offload`: its micro-batches count, and limits without effect are reported."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import windlass
from tests.ports import free_port


def test_a_device_limit_on_a_cpu_is_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
        "offload": {"device_memory": "1MB", "host_memory": "1GB"},
    }
    with caplog.at_level(logging.WARNING, logger="windlass"):
        engine, *_ = windlass.initialize(model=nn.Linear(4, 4), config=config)
    engine.destroy()
    torch.distributed.destroy_process_group()
    assert "offload.device_memory = 1,048,576 bytes has no effect" in caplog.text
    assert "limit offload.host_memory" in caplog.text


@pytest.mark.parametrize(
    ("batch", "accumulation"),
    [
        ({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}, 3),
        ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 8}, 4),
        ({"train_micro_batch_size_per_gpu": 2, "pipeline": {"micro_batches": 5}}, 5),
        ({"elasticity": {"enabled": True, "micro_batch_sizes": [2], "max_train_batch_size": 12}}, 6),
        ({"train_batch_size": 7}, 1),
    ],
)
def test_tiers_are_chosen_for_the_micro_batches_of_a_step(
    batch: dict[str, Any], accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def plan(model: Any, optimizer: Any, section: Any, settings: Any, mesh: Any, device: Any, count: int) -> Any:
        found.append(count)
        return settings

    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr("windlass.engine.sharded_model_builder.plan_tiers", plan)
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}, "offload": "auto", **batch}
    engine, *_ = windlass.initialize(model=nn.Linear(4, 4), config=config)
    assert found == [accumulation] and engine.gradient_accumulation_steps() == accumulation
    engine.destroy()
    torch.distributed.destroy_process_group()
