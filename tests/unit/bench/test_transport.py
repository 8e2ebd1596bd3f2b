"""Tests of `windlass bench transport`: the settings that it runs, and its verdicts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from windlass.base.errors import WindlassError
from windlass.cli.benches import transport_bench
from windlass.cli.benches.training_bench import BenchSizes

SIZES = BenchSizes(64, 1, 8, 2, 2, 3)


def test_gpu_settings_are_eight_distinct_nccl_environments() -> None:
    result = transport_bench.available_settings(4)
    nccl = [item for item in result if item.device == "cuda"]
    assert (
        len(nccl) == 8
        and len({tuple(item.env[name] for name in transport_bench.NCCL_DISABLE_VARIABLES) for item in nccl}) == 8
    )
    assert all(item.env["WINDLASS_TRANSPORT"] == "nccl" for item in nccl)
    assert nccl[0].label == "nccl" and set(nccl[0].env.values()) == {"nccl", "0"}
    assert nccl[-1].label == "nccl without IB, SHM, P2P"
    cpu = result[8:]
    assert [item.label for item in cpu] == ["shm", "gloo"] and all(
        item.env["CUDA_VISIBLE_DEVICES"] == "" for item in cpu
    )
    assert transport_bench.available_settings(4, cpu=False) == nccl


def test_without_gpus_shared_memory_and_gloo_are_run() -> None:
    for cpu in (True, False):
        result = transport_bench.available_settings(0, cpu=cpu)
        assert [(item.label, item.env) for item in result] == [
            (name, {"WINDLASS_TRANSPORT": name}) for name in ("shm", "gloo")
        ]


class Ranks:
    """Fake of `run_task` without processes. The setting `fails` fails, and those in `off` return other losses."""

    def __init__(self, fails: str = "", off: dict[str, float] | None = None) -> None:
        self.fails, self.off, self.calls = fails, off or {}, list[tuple[str, dict[str, str]]]()

    def __call__(self, work: Any, nproc: int, env: dict[str, str]) -> list[dict[str, Any]]:
        (label,) = work.configs
        assert work.rounds == 1 and not work.measure_memory
        self.calls.append((label, env))
        if label == self.fails:
            raise WindlassError("a rank of this experiment ended with exit code 1; its error is printed above")
        losses = [8.0, 7.5, 7.0, 6.5]
        return [
            {
                "seconds": {label: [0.5, 0.25 + rank / 4, 0.5]},
                "losses": {label: [loss + self.off.get(label, 0.0) for loss in losses]},
                "transport": {label: env["WINDLASS_TRANSPORT"]},
                "parameters": 1000,
            }
            for rank in range(nproc)
        ]


def run(
    monkeypatch: pytest.MonkeyPatch, ranks: Ranks, out: Path, settings: list[transport_bench.TransportSetting]
) -> tuple[bool, dict[str, Any]]:
    monkeypatch.setattr(transport_bench, "run_task", ranks)
    equal = transport_bench.run_transport_bench(settings, 2, SIZES, 3, out)
    return equal, json.loads((out / "transport.json").read_text())


def test_settings_alternate_and_the_slowest_rank_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    equal, written = run(monkeypatch, ranks, tmp_path, transport_bench.available_settings(2))
    labels = [label for label, _ in ranks.calls]
    assert equal and len(labels) == 20 and labels[10:] == labels[9::-1]
    row = written["rows"]["nccl without P2P"]
    assert row["seconds"] == [0.5] * 6 and row["samples_per_second"] == 2 * 2 / 0.5
    assert row["env"]["NCCL_P2P_DISABLE"] == "1" and row["env"]["NCCL_IB_DISABLE"] == "0"
    assert len(row["run_seconds_of_each"]) == 2 and len(row["losses"]) == 8
    assert "losses: equal" in written["verdicts"][0] and len(written["verdicts"]) == 10


@pytest.mark.parametrize(("label", "off", "equal"), [("gloo", 1e-4, True), ("nccl without IB", 1e-4, False)])
def test_losses_are_equal_on_a_device_and_close_between_them(
    label: str, off: float, equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, written = run(monkeypatch, Ranks(off={label: off}), tmp_path, transport_bench.available_settings(2))
    assert got == equal
    assert equal or f"NOT equal: {label} differs by 1.0e-04 (bound 1e-05)" in written["verdicts"][0]


@pytest.mark.parametrize("off", [1e-2, math.nan])
def test_transport_that_changes_the_losses_is_a_failure(
    off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not run(monkeypatch, Ranks(off={"gloo": off}), tmp_path, transport_bench.available_settings(0))[0]


def test_unusable_setting_is_reported_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(fails="nccl without IB, SHM, P2P")
    equal, written = run(monkeypatch, ranks, tmp_path, transport_bench.available_settings(2, cpu=False))
    assert equal and len(written["rows"]) == 7
    assert len(ranks.calls) == 15  # a setting that failed is not run again
    assert written["verdicts"][-1].startswith("nccl without IB, SHM, P2P: absent, a rank of this experiment ended")


def test_equality_fails_if_nothing_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = transport_bench.available_settings(0)[:1]
    equal, written = run(monkeypatch, Ranks(fails="shm"), tmp_path, settings)
    assert not equal and written["rows"] == {} and written["verdicts"][0] == "no setting ran"
