"""Tests of the arithmetic of the benchmark of losses with compressed optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from tests.unit.bench.conftest import load_script


def test_losses_are_compared_with_those_of_the_same_seeds() -> None:
    bench = load_script("compressed_training")
    runs = [
        bench.Run("AdamW", 0, {"0": 8.0, "90": 2.5, "100": 2.0}),
        bench.Run("AdamW", 1, {"100": 4.0}),
        bench.Run("1-bit Adam", 0, {"100": 2.04}),
        bench.Run("1-bit Adam", 1, {"100": 4.08}),
        bench.Run("DiLoCo, 2 replicas", 1, {"100": 4.1}),
        bench.Run("DiLoCo, 4 replicas", 2, {"100": 9.0}),
    ]
    found = bench.judged(runs)
    assert found["above"] == pytest.approx({"1-bit Adam": 0.02, "DiLoCo, 2 replicas": 0.025})
    assert found["missed"] == ["1-bit Adam: +2.00% held-out bits per byte against AdamW, not 1%"]
    assert bench.missing_runs([("AdamW", 1), ("AdamW", 2)], runs) == [("AdamW", 2)]


def test_every_method_has_the_same_sequences_in_a_step() -> None:
    bench = load_script("compressed_training")
    for method in bench.METHODS.values():
        config = method.config(640)
        assert config["train_micro_batch_size_per_gpu"] * method.ranks == bench.SEQUENCES
    params = bench.METHODS["1-bit Adam"].config(640)["optimizer"]["params"]
    assert params["freeze_step"] == 192 and params["lr"] == "auto"


def test_stored_runs_have_the_same_steps(tmp_path: Path) -> None:
    bench, path = load_script("compressed_training"), tmp_path / "runs.json"
    assert bench.stored_runs(path, 8) == []
    path.write_text('{"steps": 8, "runs": [{"method": "AdamW", "seed": 0, "held_out": {"8": 2.0}}]}')
    assert bench.stored_runs(path, 8) == [bench.Run("AdamW", 0, {"8": 2.0})]
    with pytest.raises(typer.BadParameter, match="runs of 8 steps, and --steps is 9"):
        bench.stored_runs(path, 9)
