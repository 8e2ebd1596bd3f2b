"""Tests of `configure` without a process group: its arguments, its errors and its effect."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.parallel.checkpointed_models import differences, plainly, trained
from windlass import checkpointing
from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.config import load_config
from windlass.parallel import activation_checkpoint_api


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(activation_checkpoint_api, "_options", None)
    monkeypatch.setattr(activation_checkpoint_api, "_configured", False)
    monkeypatch.setattr(activation_checkpoint_api, "_settings", None)
    monkeypatch.setattr(activation_checkpoint_api, "_offloaders", {})
    yield


def section(**keys: Any) -> dict[str, Any]:
    return {"activation_checkpointing": keys}


def test_is_configured_after_configure() -> None:
    assert not checkpointing.is_configured()
    checkpointing.checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    assert not checkpointing.is_configured()
    checkpointing.configure()
    assert checkpointing.is_configured()
    checkpointing.reset()
    assert checkpointing.is_configured(), "reset gives buffers back and keeps what was said"


@pytest.mark.parametrize("kind", ["dict", "file", "config"])
def test_arguments_override_the_section(kind: str, tmp_path: Path) -> None:
    source: Any = section(number_checkpoints=3, profile=True, synchronize_checkpoint_boundary=True)
    if kind == "file":
        (tmp_path / "ds.json").write_text(json.dumps(source))
        source = str(tmp_path / "ds.json")
    checkpointing.configure(load_config(source) if kind == "config" else source, profile=False, number_checkpoints=5)
    options = activation_checkpoint_api._options
    assert options is not None
    assert (options.number_checkpoints, options.profile, options.synchronize_checkpoint_boundary) == (5, False, True)


def test_every_key_of_the_section_reaches_the_options() -> None:
    keys = set(type(load_config({}).activation_checkpointing).model_fields) - {"enabled"}  # only for models
    assert keys <= set(activation_checkpoint_api.ActivationCheckpointOptions.__dataclass_fields__)


def test_path_may_be_a_string_or_a_list(tmp_path: Path) -> None:
    assert load_config(section(nvme_path="a")).activation_checkpointing.nvme_path == ["a"]
    assert load_config(section(nvme_path=["a", "b"])).activation_checkpointing.nvme_path == ["a", "b"]
    assert load_config(section(nvme_path="")).activation_checkpointing.nvme_path == []
    assert load_config(section(nvme_path="a", profile=True)).refusals() == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"cpu_checkpointing": True, "nvme_path": "x"}, "name two tiers"),
        ({"contiguous_memory_optimization": True}, "add number_checkpoints"),
        ({"contiguous_memory_optimization": True, "number_checkpoints": 2, "nvme_path": "x"}, "write false"),
        ({"min_offload_bytes": -1}, "0 or more"),
    ],
)
def test_contradictions_are_refused_without_changes(wrong: dict[str, Any], words: str) -> None:
    checkpointing.configure(profile=True)
    with pytest.raises(ConfigError, match=words):
        checkpointing.configure(**wrong)
    assert activation_checkpoint_api._options is not None and activation_checkpoint_api._options.profile


def test_invalid_regions_are_refused() -> None:
    with pytest.raises(ConfigError, match="'gpu'.*one of device, cpu, nvme"):
        activation_checkpoint_api.checkpoint_to_tier("gpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'gpu'"), checkpointing.offload_saved_tensors("gpu"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ConfigError, match="nvme_path"), checkpointing.offload_saved_tensors("nvme"):
        pass


def test_nothing_is_offloaded_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpoint_api, "has_separate_memory", lambda device: False)
    checkpointing.configure(cpu_checkpointing=True, min_offload_bytes=0)
    assert checkpointing.get_offload_counters() is None
    x = torch.randn(100, requires_grad=True)
    with checkpointing.offload_saved_tensors("cpu", min_offload_bytes=0) as counts:
        y = x.sin()
    y.sum().backward()
    assert counts.offloaded_bytes == 0


def test_buffer_contains_saved_tensors() -> None:
    checkpointing.configure(contiguous_memory_optimization=True, number_checkpoints=3, min_offload_bytes=0)
    assert not differences(trained("Net", checkpointing.checkpoint, steps=3), trained("Net", plainly, steps=3))
    counts = checkpointing.get_offload_counters()
    assert counts is not None and counts.offloaded_bytes == 3 * 3 * 4 * 10 * 32 * 4
    assert not any(counts.stored_bytes.values())
    manner = activation_checkpoint_api._settings
    assert manner is not None and manner.offloader is not None
    (buffer,) = manner.offloader.store._buffers.values()  # type: ignore[attr-defined]
    assert buffer.nbytes == 3 * 4 * 10 * 32 * 4 and buffer.num_regions == 0


def test_partition_over_one_rank_is_a_no_op() -> None:
    checkpointing.configure(partition_activations=True)
    assert checkpointing.get_offload_counters() is None
    assert not differences(trained("Net", checkpointing.checkpoint), trained("Net", plainly))


def test_profile_logs_once_per_backward(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.configure(
        profile=True, contiguous_memory_optimization=True, number_checkpoints=3, min_offload_bytes=0
    )
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "windlass"):
            trained("Nested", checkpointing.checkpoint, steps=2)
    finally:
        logger.removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    for line in lines:
        assert "forward of 2 calls" in line, "a nested one is a part of the one around it"
        assert "recomputation of 4 calls" in line, "what it saves is computed when the one around it is over"
        assert "MB offloaded" in line


def test_rng_streams_are_equal_or_distinct_over_ranks() -> None:
    checkpointing.manual_seed(11)
    named = checkpointing.rng_tracker
    alike = torch.rand(4)
    with named.fork():
        apart = torch.rand(4)
    further = torch.rand(4)
    checkpointing.manual_seed(11)
    assert torch.equal(alike, torch.rand(4)) and torch.equal(further, torch.rand(4)), "a fork draws from its own"
    with named.fork():
        assert torch.equal(apart, torch.rand(4))
    assert not torch.equal(alike, apart)
    with pytest.raises(ModelError, match="other"), named.fork("other"):
        pass
    with pytest.raises(ModelError, match="seed 2729"):
        named.add("another", 11 + 2718)  # Megatron's offset, by which its layers draw the same weights
    named.reset()


_USES_TORCHSCRIPT = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def _fused(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + torch.nn.functional.dropout(torch.tanh(x + bias), p=0.25, training=True)


def _fails(x: torch.Tensor, again: bool) -> torch.Tensor:
    return x.view(7) if again else x * x


@_USES_TORCHSCRIPT
def test_torchscript_functions_are_recomputed() -> None:
    """Gradients are equal, although TorchScript saves other tensors in its first runs than in later ones."""
    fused = torch.jit.script(_fused)
    linear, bias = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(4))

    def block(x: torch.Tensor) -> torch.Tensor:
        return fused(linear(x), bias, x)

    found = []
    for call in (checkpointing.checkpoint, lambda function, x: function(x)):
        gradients = []
        for step in range(4):  # TorchScript optimizes from the second run on
            torch.manual_seed(step)
            x = torch.randn(3, 4, requires_grad=True)
            gradients.append(torch.autograd.grad(call(block, call(block, x)).sum(), [x, bias, *linear.parameters()]))
        found.append(gradients)
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain)


@_USES_TORCHSCRIPT
def test_an_error_of_a_torchscript_function_in_the_recomputation_is_raised() -> None:
    calls, fails = [], torch.jit.script(_fails)

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.sin(fails(x, len(calls) > 1))

    with pytest.raises(RuntimeError, match="is invalid for input"):
        checkpointing.checkpoint(block, torch.ones(2, requires_grad=True)).sum().backward()
