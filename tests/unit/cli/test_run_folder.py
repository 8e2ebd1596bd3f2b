"""Tests that commands given the output folder of `windlass train` find its checkpoints, configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path

from windlass.cli.training.run_folder import checkpoint_directory_of, export_directory_of, model_file_folders


def test_run_folder(tmp_path: Path) -> None:
    out = tmp_path / "OUT"
    (out / "checkpoint" / "step20").mkdir(parents=True)
    assert checkpoint_directory_of(out) == out and model_file_folders(out / "checkpoint") == ()
    (out / "run.json").write_text("{}")
    assert checkpoint_directory_of(out) == out / "checkpoint"
    assert checkpoint_directory_of(out / "checkpoint") == out / "checkpoint"
    for given in (out / "checkpoint", out / "checkpoint" / "step20"):
        assert model_file_folders(given) == (out / "hf", out / "tokenizer")
    assert export_directory_of(out) == out
    (out / "hf").mkdir()
    assert export_directory_of(out) == out / "hf" and export_directory_of(out / "hf") == out / "hf"
    assert model_file_folders(out) == () and model_file_folders(tmp_path / "elsewhere") == ()
