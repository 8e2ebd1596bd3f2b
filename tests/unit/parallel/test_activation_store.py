"""Tests of offloading to host memory of a device with its own memory, simulated by late and counted copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.parallel.checkpointed_models import differences, plainly, trained
from windlass import checkpointing
from windlass.parallel import activation_checkpoint_api, activation_store, nvme_activation_store
from windlass.parallel.activation_store import DeviceStore
from windlass.parallel.checkpoint_profiler import CheckpointProfiler
from windlass.parallel.recompute import RecomputeSettings, recompute
from windlass.parallel.saved_tensor_offload import SavedTensorOffloader


class LateCopy:
    """Copy that is made at `wait` or at the second `poll`."""

    def __init__(self, source: torch.Tensor, value: torch.Tensor) -> None:
        self.value, self._source, self._looks = value, source, 0

    def poll(self) -> bool:
        self._looks += 1
        if self._looks > 1:
            self.wait()
        return self._source is None

    def wait(self) -> None:
        if self._source is not None:
            self.value.copy_(self._source)
            self._source = None


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the bytes copied in each direction between the two memories."""
    total = {"out": 0, "back": 0}

    def to_host(tensor: torch.Tensor, into: torch.Tensor | None = None) -> LateCopy:
        total["out"] += tensor.nbytes
        return LateCopy(tensor, torch.full_like(tensor, 99) if into is None else into)

    def to_device(tensor: torch.Tensor, device: torch.device) -> LateCopy:
        total["back"] += tensor.nbytes
        return LateCopy(tensor, torch.full_like(tensor, 98))

    for module in (activation_checkpoint_api, activation_store, nvme_activation_store):
        monkeypatch.setattr(module, "has_separate_memory", lambda device: True)
    for module in (activation_store, nvme_activation_store):
        monkeypatch.setattr(module, "start_copy_to_host", to_host)
        monkeypatch.setattr(module, "start_copy_to_device", to_device)
    monkeypatch.setattr(activation_checkpoint_api, "_options", None)
    monkeypatch.setattr(activation_checkpoint_api, "_configured", False)
    monkeypatch.setattr(activation_checkpoint_api, "_settings", None)
    monkeypatch.setattr(activation_checkpoint_api, "_offloaders", {})
    return total


HIDDEN = 4 * 10 * 32 * 4


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("name", ["Net", "Nested", "Arguments", "Shapes"])
def test_inputs_round_trip_through_the_host(name: str, buffer: bool, copied: dict[str, int]) -> None:
    more: dict[str, Any] = {"contiguous_memory_optimization": True, "number_checkpoints": 3} if buffer else {}
    checkpointing.configure(cpu_checkpointing=True, min_offload_bytes=0, **more)
    assert not differences(trained(name, checkpointing.checkpoint), trained(name, plainly))
    counts = checkpointing.get_offload_counters()
    assert counts is not None and counts.offloaded_bytes == copied["out"] > 0
    assert 0 < copied["back"] <= copied["out"]
    if name == "Net":
        assert copied["out"] == 2 * 3 * HIDDEN, "two steps of three layers, and nothing else"


def test_region_round_trips_through_the_host(copied: dict[str, int]) -> None:
    def through(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        with checkpointing.offload_saved_tensors("cpu", min_offload_bytes=0):
            return function(*args, **kwargs)

    assert not differences(trained("Twice", through), trained("Twice", plainly))
    assert 0 < copied["back"] <= copied["out"]


@pytest.mark.filterwarnings("ignore:.*tmpfs.*")
def test_file_store_stages_through_the_host(tmp_path: Path, copied: dict[str, int]) -> None:
    checkpointing.configure(nvme_path=str(tmp_path), min_offload_bytes=0)
    assert not differences(trained("Net", checkpointing.checkpoint), trained("Net", plainly))
    assert copied["out"] == 2 * 3 * HIDDEN and 0 < copied["back"] <= copied["out"]


def test_sources_are_freed_in_the_forward(copied: dict[str, int]) -> None:
    checkpointing.configure(cpu_checkpointing=True, min_offload_bytes=0)
    refs = []
    x = torch.randn(10, requires_grad=True) * 1.0
    for _ in range(8):
        refs.append(StorageWeakRef(x.untyped_storage()))
        x = checkpointing.checkpoint(torch.sin, x)
    alive = [number for number, ref in enumerate(refs) if not ref.expired()]
    assert set(alive) <= {6, 7}, "only what is on its way still takes memory of the device"
    x.sum().backward()


def test_tensor_kept_beyond_its_checkpoint_is_unchanged() -> None:
    """A tensor that outlives its checkpoint keeps its values.

    A function that stores its inputs must not see later inputs in their memory after the buffer is reused.
    """
    manner = RecomputeSettings(
        SavedTensorOffloader(DeviceStore(2), min_offload_bytes=0),
        CheckpointProfiler(log_times=False, synchronize=False),
    )
    remembered: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        remembered.append(x)
        return x.sin()

    for step in range(3):
        x = torch.full((100,), float(step), requires_grad=True)
        recompute(manner, function, (x * 1.0,), {}).sum().backward()
    assert [float(x.detach().mean()) for x in remembered] == [0, 0, 1, 1, 2, 2]
