"""Commands that are given OUT of `windlass train` find the run's checkpoints, configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path

from windlass.cli.training.folder import checkpoints_of, companions_of, exported_of


def test_a_runs_folder(tmp_path: Path) -> None:
    out = tmp_path / "OUT"
    (out / "checkpoint" / "step20").mkdir(parents=True)
    assert checkpoints_of(out) == out and companions_of(out / "checkpoint") == ()
    (out / "run.json").write_text("{}")
    assert checkpoints_of(out) == out / "checkpoint"
    assert checkpoints_of(out / "checkpoint") == out / "checkpoint"
    for given in (out / "checkpoint", out / "checkpoint" / "step20"):
        assert companions_of(given) == (out / "hf", out / "tokenizer")
    assert exported_of(out) == out
    (out / "hf").mkdir()
    assert exported_of(out) == out / "hf" and exported_of(out / "hf") == out / "hf"
    assert companions_of(out) == () and companions_of(tmp_path / "elsewhere") == ()
