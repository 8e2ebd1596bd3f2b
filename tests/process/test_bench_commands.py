"""Tests of small runs of `windlass bench disk` and `windlass bench transport --collectives`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windlass.cli.bench import bench_app
from windlass.cli.main import app
from windlass.config import load_config
from windlass.simulate.hardware_parts import parse_rate


def test_disk_writes_the_best_section(tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    words = ["--size", "64K", "--block-sizes", "4K,8K", "--queue-depths", "2", "--threads", "1", "--rounds", "1"]
    result = CliRunner().invoke(bench_app, ["disk", "--folder", str(disk), *words, "--out", str(out)])
    assert result.exit_code == 0, result.output
    section = json.loads((out / "aio.json").read_text())
    written = json.loads((out / "disk.json").read_text())
    assert len(written["rows"]) == 2 and written["best"] == section
    assert load_config({"train_batch_size": 1, **section}).aio.queue_depth == 2
    measured = tomllib.loads((out / "cluster.toml").read_text())["host"]
    assert set(measured) == {"disk_read", "disk_write"}
    assert min(parse_rate(rate, "") for rate in measured.values()) > 1e5
    assert "read GB/s" in result.output and "best" in result.output


@pytest.mark.slow  # starts ranks; `tests/dist/test_collective_benchmark.py` tests the measurement
def test_collectives(tmp_path: Path) -> None:
    words = [
        "--collectives",
        "all_reduce,pt2pt",
        "--sizes",
        "1K,4K",
        "--dtypes",
        "fp32,bf16",
        "--trials",
        "2",
        "-n",
        "2",
    ]
    result = CliRunner().invoke(bench_app, ["transport", *words, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "collectives.json").read_text())
    assert written["backend"] == "gloo" and len(written["rows"]) == 8
    assert all(row["seconds"] > 0 and row["bus_gbps"] > 0 for row in written["rows"])
    assert (tmp_path / "collectives.png").stat().st_size > 1000
    # the files of all experiments become one cluster file, with which a step can be simulated
    assert CliRunner().invoke(bench_app, ["device", "--size", "64", "--out", str(tmp_path)]).exit_code == 0
    cluster = str(tmp_path / "cluster.toml")
    words = [
        "--shape",
        "hidden=64,layers=2,heads=2,vocabulary=256",
        "--cluster",
        cluster,
        "--world-size",
        "2",
        "--json",
    ]
    result = CliRunner().invoke(app, ["simulate", *words])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["seconds"] > 0


def test_unknown_operation_is_one_message() -> None:
    result = CliRunner().invoke(bench_app, ["transport", "--collectives", "gossip", "-n", "2"])
    assert result.exit_code == 1 and "'gossip' is not an operation" in str(result.exception)
