"""Test of `windlass profile` as a program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.dist.test_profile import SCRIPT
from tests.process.test_verify_command import DEEPSPEED_SCRIPT
from windlass.base.errors import ConfigError
from windlass.cli.main import app, main


@pytest.mark.slow
def test_a_script_is_profiled_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 2},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            }
        )
    )
    out = tmp_path / "trace.json.gz"
    options = ["--config", str(tmp_path / "ds.json"), "--nproc", "2", "--steps", "2", "--out", str(out), "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["profile", str(tmp_path / "train.py"), *options, "--", "100"])
    assert ended.value.code == 0
    found = json.loads(capfd.readouterr().out)
    assert found["steps"] == 2 and [one["rank"] for one in found["ranks"]] == [0, 1]
    assert out.stat().st_size > 0


def test_engine_of_a_deepspeed_script_is_profiled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(DEEPSPEED_SCRIPT)
    options = ["--skip", "0", "--steps", "1", "--no-operators", "--out", str(tmp_path / "trace.json"), "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["profile", str(tmp_path / "train.py"), *options])
    assert ended.value.code == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to profile"),
        (["missing.py"], "no such script: missing.py"),
        (["--stepz", "3"], "no such option: --stepz"),
        ([__file__, "--out", "/nonexistent/folder/trace.json"], "cannot write a trace"),
    ],
)
def test_bad_options_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["profile", *words], catch_exceptions=False)
