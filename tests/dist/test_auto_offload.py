"""Tests that training with a tier chosen for each unit equals plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen, start, whole_params
from tests.dist.harness import run_ranks
from tests.dist.test_offload import LATE, hold
from tests.models import Place
from tests.oracle import Recipe
from windlass.base import device_memory
from windlass.optim.cpu_optimizer import CPUOptimizer

RECIPE = Recipe(ranks=2, accumulation=2, steps=2, optimizer="AdamW", optimizer_params=ADAMW)


def limits(folder: Any, **more: Any) -> tuple[tuple[str, Any], ...]:
    """Return memory limits under which each tier gets a part of the model."""
    return (("offload", {"nvme_path": str(folder), "device_memory": "5200K", "host_memory": "2500K", **more}),)


def test_mixed_tiers_train_as_the_oracle(tmp_path: Path) -> None:
    settings = [
        Setting(stage=3, config=limits(tmp_path)),
        Setting(stage=2, config=(("offload", {"device_memory": "6M"}),)),
    ]
    hold("four_blocks", RECIPE, settings, LATE)


def state_tiers(config: dict[str, Any]) -> set[str]:
    """Return the tiers of the states of a model under `config`."""
    engine = start(specimen("four_blocks"), config)
    found = {one.state.value for one in engine._sharded.settings.tiers.of_units}
    update = engine._sharded.update
    assert all(isinstance(update._inner_of([chunk]), CPUOptimizer) for chunk in update.chunks)
    engine.destroy()
    return found


def test_memory_and_disk_of_a_cpu_train_as_the_oracle(tmp_path: Path) -> None:
    """Without emulated device memory, the device and host tiers are one, and the native update steps all states."""
    section = {"nvme_path": str(tmp_path), "host_memory": "5300K"}
    setting = Setting(stage=3, transport="shm", config=(("offload", section),))
    hold("four_blocks", RECIPE, [setting], {})
    assert run_ranks(state_tiers, 2, ds_config(RECIPE, setting), env={})[0] == {"device", "nvme"}


def resumes(folder: str, transport: str) -> dict[str, Any]:
    """Train and save with chosen tiers, and continue; load with everything on the device, and continue."""
    subject = specimen("four_blocks")

    def train(engine: Any, micros: range) -> dict[str, torch.Tensor]:
        for micro in micros:
            subject.train(engine, subject.batch(Place(micro, 0, torch.distributed.get_rank())), engine.backward)
            engine.step()
        return whole_params(engine.module)

    engine = start(
        subject, ds_config(RECIPE, Setting(stage=3, config=(*limits(folder), ("comm", {"transport": transport}))))
    )
    place = device_memory.emulated_device_memory()
    assert place is not None
    place.peak = place.used
    saved, update = train(engine, range(4)), engine._sharded.update
    found: dict[str, Any] = {
        "peak": place.peak,
        "slots": engine.report()["slots"],
        "units": [(one.param.value, one.state.value) for one in engine._sharded.settings.tiers.of_units],
        "native": (isinstance(update._inner, CPUOptimizer), isinstance(update._on_device, CPUOptimizer)),
    }
    engine.save_checkpoint(folder)
    continued = train(engine, range(4, 6))
    engine.destroy()
    engine = start(subject, ds_config(RECIPE, Setting(stage=2)))
    engine.load_checkpoint(folder)
    found["loaded"] = all(torch.equal(v, saved[k]) for k, v in whole_params(engine.module).items())
    apart = ((v - continued[k]).abs().max() for k, v in train(engine, range(4, 6)).items())
    found["apart"] = float(max(apart))
    engine.destroy()
    return found


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_each_tier_is_used_and_a_checkpoint_loads_with_other_tiers(tmp_path: Path, transport: str) -> None:
    first, second = run_ranks(resumes, 2, str(tmp_path), transport, env=LATE)
    assert first["units"] == second["units"]
    for found in (first, second):
        assert {tier for _, tier in found["slots"]} == {"device", "host", "nvme"}
        assert found["peak"] <= 5200 << 10
        assert found["loaded"]
        assert found["native"] == (True, False)
        assert found["apart"] < 1e-6


def shared_bytes() -> tuple[int, int]:
    """Return the device bytes that this rank counts for sharded parameters, and the bytes of the full parameters."""
    engine = start(
        specimen("four_blocks"), ds_config(RECIPE, Setting(stage=3, config=(("comm", {"transport": "shm"}),)))
    )
    held = engine._sharded.ledger._bytes_of_holder
    counted = sum(nbytes for holder, nbytes in held.items() if str(holder).startswith("parameters of"))
    whole = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    engine.destroy()
    return counted, whole


def test_a_rank_counts_its_part_of_shared_parameters() -> None:
    for counted, whole in run_ranks(shared_bytes, 2, env=LATE):
        assert whole / 2 <= counted < 0.55 * whole


def too_small() -> str:
    subject = specimen("mlp")
    try:
        start(subject, ds_config(replace(RECIPE), Setting(stage=3, config=(("offload", {"device_memory": 1000}),))))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_no_placement_fits_is_an_error_on_all_ranks() -> None:
    for text in run_ranks(too_small, 2, env=LATE):
        assert text.startswith("ConfigError") and "offload.device_memory" in text and "lacks" in text
