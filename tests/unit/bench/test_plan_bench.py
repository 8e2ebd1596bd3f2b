"""Tests of the benchmarks of predicted memory and of a profile's cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from tests.unit.bench.conftest import load_script


class Peaks:
    """Plan with 7 bytes of device memory and 5 of host memory."""

    def peak(self, place: str, moments: tuple[str, ...]) -> int:
        return {"device": 7, "host": 5}[place]


def test_rows_of_a_gpu_need_one_and_are_predicted_for_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load_script("plan")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.BadParameter, match="no CUDA device here; run on a host with a GPU"):
        bench.main(gpu=True, results=tmp_path)
    targets = []

    def plan(model: Any, config: Any, run: Any) -> Peaks:
        targets.append(run.target)
        return Peaks()

    monkeypatch.setattr(bench, "build_on_meta", lambda build, name: None)
    monkeypatch.setattr(bench, "enable_checkpointing", lambda model: None)
    monkeypatch.setattr(bench, "plan_memory", plan)
    stored = {case.name: {"measured_bytes": 7} for case in bench.GPU_CASES}
    (tmp_path / "plan_gpu.json").write_text(json.dumps({"rows": stored}))
    bench.main(gpu=True, predict=True, results=tmp_path)
    found = json.loads((tmp_path / "plan_gpu.json").read_text())
    assert [row["predicted_bytes"] for row in found["rows"].values()] == [7] * 8
    assert found["misses"] == found["not run"] == [] and all(target.has_own_memory for target in targets)


def test_the_cost_of_a_profile_counts_waits_at_their_own_cost() -> None:
    bench = load_script("profile_overhead")
    categories = ["windlass,wait"] * 4 + ["windlass,step"] * 6
    found = bench.share_when_off(categories, 2, (1e-6, 10e-6), 1e-3)
    assert found == {"ranges of a step": 3, "waits of a step": 2, "share": pytest.approx((3 + 20) * 1e-3)}
    range_cost, wait_cost = bench.costs_when_off()
    assert 0 < range_cost < wait_cost < 1e-3
