"""Tests of a minimal run of `windlass bench transport`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windlass.cli.bench import bench_app


@pytest.mark.slow  # `tests/unit/bench/test_transport.py` tests the parts
@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_are_equal_over_shared_memory_and_gloo(ranks: int, tmp_path: Path) -> None:
    small = {"--hidden": 64, "--layers": 1, "--length": 8, "--batch": 1, "--rounds": 1, "--steps": 2, "-n": ranks}
    arguments = [str(word) for pair in small.items() for word in pair]
    result = CliRunner().invoke(bench_app, ["transport", *arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "transport.json").read_text())
    assert {label: row["transport"] for label, row in written["rows"].items()} == {"shm": "shm", "gloo": "gloo"}
    losses = [row["losses"] for row in written["rows"].values()]
    assert losses[0] == losses[1] and len(losses[0]) == 3 and losses[0][2] < losses[0][0]
    assert all(row["samples_per_second"] > 0 and row["run_seconds"] > 0 for row in written["rows"].values())
    assert "losses: equal" in result.output and "samples/s" in result.output and "run time s" in result.output
    assert (tmp_path / "transport.png").stat().st_size > 1000
