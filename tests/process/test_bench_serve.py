"""Tests of minimal runs of `windlass bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from windlass.base.errors import ModelError
from windlass.cli.bench import bench_app
from windlass.cli.benches import fastgen_bench
from windlass.cli.benches.load_bench import LoadSettings, run_load_bench
from windlass.cli.benches.service_level import LoadRequest
from windlass.inference.outputs import CompletionOutput, RequestMetrics, RequestOutput

SMALL = ["--hidden", "64", "--layers", "1", "--clients", "2,1", "--requests", "8", "--prompt", "40", "--answer", "8"]


@pytest.mark.parametrize("raw", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_policies_give_the_same_tokens_under_fastgens_levels(raw: bool, tmp_path: Path) -> None:
    arguments = ["serve", *SMALL, "--out", str(tmp_path), *(["--raw"] if raw else [])]
    result = CliRunner().invoke(bench_app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "fastgen.json").read_text())
    assert [(run["policy"], run["clients"]) for run in written["runs"]] == [
        (policy, clients) for policy in ("splitfuse", "prefill-first", "orca") for clients in (1, 2)
    ]
    for run in written["runs"]:
        assert run["requests"] == 8 and run["requests_per_second"] > 0 and run["gap_p95_ms"] >= run["gap_p50_ms"] >= 0
        assert 0 <= run["share"]["R6"] <= run["share"]["R4"] <= run["share"]["R2"] <= 1
    assert set(written["requests_per_second_without_level"]) == {"splitfuse", "prefill-first", "orca"}
    assert "tokens: equal under all policies" in written["verdicts"]
    assert (tmp_path / "fastgen.png").stat().st_size > 1000


def test_unknown_workloads_and_clients_are_refused() -> None:
    for wrong in (["--workload", "rain"], ["--clients", "1,zero"], ["--hidden", "65"]):
        result = CliRunner().invoke(bench_app, ["serve", *wrong])
        assert result.exit_code == 2 and wrong[1] in result.output


def test_the_width_is_not_checked_if_a_model_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.cli.benches.fastgen_bench.run_fastgen_bench", lambda settings, out: True)
    result = CliRunner().invoke(bench_app, ["serve", "--model", "trained", "--hidden", "65"])
    assert result.exit_code == 0, result.output


def test_a_failed_request_ends_the_measurement() -> None:
    """A request without tokens has no times."""

    def step() -> list[RequestOutput]:
        answer = CompletionOutput(0, "", [], finish_reason="error")
        return [RequestOutput("0", None, [5, 6], None, [answer], True, RequestMetrics(0.0), error="a logit is nan")]

    engine: Any = SimpleNamespace(use_idle_time=lambda: False, add_request=lambda *given, **options: None, step=step)
    with pytest.raises(ModelError, match="request 0 of the load failed: a logit is nan"):
        fastgen_bench._StepDriver(engine).run([LoadRequest([5, 6], 4)], 1, None)


@pytest.mark.slow  # `tests/serving/test_served_model.py` has the same law in one process
def test_a_server_loses_nothing_under_load(tmp_path: Path) -> None:
    settings = LoadSettings(hidden=64, layers=1, requests=36, clients=6, short_requests=2, long_prompt=300)
    assert run_load_bench(settings, tmp_path)
    written = json.loads((tmp_path / "load.json").read_text())
    assert written["outcomes"] == {"whole": 23, "cancelled": 10, "refused": 3}
    assert not written["lost"] and written["kv_blocks_left"] == 0 and written["exit_code"] == 0
    assert len(written["first_token_alone_ms"]) == len(written["first_token_beside_long_ms"]) == 2
    assert (tmp_path / "load.png").stat().st_size > 1000
