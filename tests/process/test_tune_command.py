"""Tests of `windlass tune` and `--autotuning` as programs, with real training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.base.errors import ConfigError
from windlass.cli.tune import tune

SCRIPT = """
import argparse
import torch
import windlass
from torch import nn

parser = windlass.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)], nn.Linear(64, 1))
engine, *_ = windlass.initialize(args=args, model=model)
for step in range(10_000 if engine.zero_optimization_stage() != 3 else 4):
    rows = torch.randn(engine.train_micro_batch_size_per_gpu(), 64)
    engine.backward(engine(rows).square().mean())
    engine.step()
print("trained at stage", engine.zero_optimization_stage())
"""


def start(folder: Path, *words: str, **config: Any) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    raw = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **config}
    (folder / "ds.json").write_text(json.dumps(raw))
    command = [sys.executable, "-m", *words, "train.py", "--deepspeed_config", "ds.json"]
    env = {key: value for key, value in os.environ.items() if key != "RANK"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=200)


@pytest.mark.parametrize("value", ['{"stage":1}', "[1]", "1,NaN"])
def test_a_choice_is_a_single_value(value: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match="is not a single value; name the keys inside of it"):
        tune([str(tmp_path / "train.py")], config="{}", search=[f"zero_optimization={value}"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": ["zero_optimization.stage=1", "zero_optimization.stage=2"]}, "stage is given twice; write it once"),
        ({"memory": "0"}, "--memory 0 is not above 0"),
        ({"sampler": "optuna", "exhaustive": True}, "--sampler optuna .* with --exhaustive; leave one of them out"),
        ({"trials": 5, "exhaustive": True}, "--trials 5 has no effect with --exhaustive; leave one of them out"),
        ({"sampler": "optuna", "ray": "auto"}, "--sampler optuna .* with --ray; leave one of them out"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError, match=message):
        tune([str(tmp_path / "train.py")], config="{}", **options)


@pytest.mark.slow
def test_a_script_is_tuned_unchanged(tmp_path: Path) -> None:
    done = start(
        tmp_path,
        *("windlass", "tune", "--nproc", "2", "--json", "--memory", "4GB", "--warmup", "1", "--steps", "2"),
        zero_optimization={"stage": [0, 2]},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "train.py").read_text() == SCRIPT
    given = json.loads((tmp_path / "ds.json").read_text())
    assert given["zero_optimization"] == {"stage": [0, 2]}, "the user's configuration is not written"
    found = json.loads(done.stdout)
    trials = {trial["name"]: trial for trial in found["trials"]}
    times = {name: trial["measured"]["step_s"] for name, trial in trials.items() if trial["status"] == "measured"}
    assert found["best"] == min(times, key=times.__getitem__) and found["step_s"] == times[found["best"]] > 0
    assert found["throughput"] == pytest.approx(2 * 4 / found["step_s"])  # two ranks of four samples
    assert found["config"]["zero_optimization"]["stage"] == int(found["best"][1:])
    assert set(trials) == {"z0", "z2"} and {trial["status"] for trial in trials.values()} <= {"measured", "slow"}
    for trial in trials.values():
        assert 0.5 < trial["predicted_bytes"] / trial["measured"]["peak_host"] < 2
    assert json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text()) == found["config"]


@pytest.mark.slow
def test_autotuning_of_the_deepspeed_command(tmp_path: Path) -> None:
    refused = start(tmp_path, "windlass.compat.deepspeed_command", "--autotuning", "run")
    assert refused.returncode == 1 and '"autotuning": {"enabled": true}' in refused.stderr
    done = start(
        tmp_path,
        *("windlass.compat.deepspeed_command", "--num_gpus", "1", "--autotuning", "run"),
        zero_optimization={"stage": [3]},
        train_micro_batch_size_per_gpu=[2, 4],
        autotuning={"enabled": True, "start_profile_step": 2, "end_profile_step": 3, "results_dir": "found"},
    )
    assert done.returncode == 0, done.stderr
    assert "trained at stage 3" in done.stdout, "the best configuration was started"
    assert (tmp_path / "found" / "z3_mbs4_gas1" / "metrics.json").is_file()
    assert (tmp_path / "autotuning_exps" / "z3_mbs2_gas1.json").is_file()
