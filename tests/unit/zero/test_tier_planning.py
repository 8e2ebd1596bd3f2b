"""Tests that limits of `offload` that have no effect on a device are reported."""

from __future__ import annotations

import logging

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
