"""Tests of processes killed during a save: a complete checkpoint always exists, and only later steps are lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.checkpoint import read_full, read_latest, read_plain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked, and end with their parent")

BENCH = Path(__file__).parents[2] / "bench"

HASTY = """
import sys, time
import torch
import windlass
from windlass.checkpoint.rank_file import RankFile

write = RankFile.write
def slow(file):
    time.sleep(1.0)
    return write(file)
RankFile.write = slow
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2},
          "checkpoint": {"async_save": True}}
engine, *_ = windlass.initialize(model=torch.nn.Linear(8, 8), config=config)
engine.backward(engine(torch.ones(2, 8)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1])
print("the end", flush=True)
"""


def test_kill_at_any_file_system_call_keeps_a_checkpoint(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCH / "kill_and_resume.py"),
        "--rounds",
        "2",
        "--launchers",
        "0",
        "--aimed",
        "--seed",
        "5",
    ]
    options = ["--path", str(tmp_path), "--results", str(tmp_path), "--name", "found"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["verdict"]["problems"] == [] and result["verdict"]["in_a_save"] == 2
    assert result["verdict"]["losses_compared"] >= 8
    assert [item["kept"] for item in result["rounds"]] == sorted(item["kept"] for item in result["rounds"])


def test_interpreter_exits_after_the_save_is_written(tmp_path: Path) -> None:
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", HASTY, str(tmp_path)], env={**os.environ, **single}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.endswith("the end\n"), done.stdout + done.stderr
    assert read_latest(tmp_path) == "global_step1"
    assert {name for name, _ in read_full(tmp_path)} >= {"param/weight", "param/bias"}
    assert read_plain(tmp_path)["engine"]["global_steps"] == 1
