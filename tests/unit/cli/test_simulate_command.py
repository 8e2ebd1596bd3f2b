"""Tests of `windlass simulate`: its output, its files and refused options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from windlass.base.errors import ConfigError
from windlass.cli.main import app
from windlass.cli.simulate_report import format_time

SHAPE = "hidden=64,layers=4,heads=4,vocabulary=96"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_table_trace_and_picture(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    )
    (tmp_path / "slow.json").write_text(
        json.dumps(
            {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 9}}}
        )
    )
    one_bit = ["--shape", SHAPE, "--config", str(tmp_path / "slow.json"), "--world-size", "2", "--length", "16"]
    code, text = run(*one_bit, "--step", "10")
    assert code == 0 and "kinds of steps of the optimizer" in text and "only at its start" in text
    assert "gradients are sent as: compressed" in text
    kinds = json.loads(run(*one_bit, "--json")[1])["kinds"]
    assert [(one["kind"], one["step"]) for one in kinds] == [("in full", 1), ("compressed", 10)]
    trace, picture = tmp_path / "step.json", tmp_path / "step.png"
    options = ["--config", str(tmp_path / "ds.json"), "--world-size", "8,64", "--length", "16"]
    code, text = run("--shape", SHAPE, *options, "--trace", str(trace), "--picture", str(picture), "--device-mtbf", "9")
    assert code == 0 and "64 ranks: where the step waits" in text and "received along data: gather" in text
    assert "a failure every" in text and "parameters, gradients and states of a rank" in text
    assert json.loads(trace.read_text())["traceEvents"] and picture.read_bytes().startswith(b"\x89PNG")


def test_json_of_a_model_directory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, **sizes})
    )
    code, text = run(str(tmp_path), "--world-size", "2", "--length", "16", "--cluster", "cpu", "--json")
    found: dict[str, Any] = json.loads(text)
    assert code == 0 and found["world_size"] == 2 and found["tokens"] == 32 and found["goodput"] is None
    assert found["seconds"] > 0 and found["state_bytes"] > 0 and found["waits"]


def test_states_that_do_not_fit_end_with_code_1(tmp_path: Path) -> None:
    shape = ["--shape", "7b", "--cluster", "dgx-a100", "--length", "16"]  # 7 x 16 bytes of bf16 training, 80 GB devices
    code, text = run(*shape, "--world-size", "2")
    assert code == 1 and "do not fit into" in text and "take more ranks, a higher ZeRO stage" in text
    code, text = run(*shape, "--world-size", "2", "--json")
    found = json.loads(text)
    assert code == 1 and not found["states_fit"] and found["state_bytes"] > found["device_memory"]
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    )
    code, text = run(*shape, "--config", str(tmp_path / "ds.json"), "--world-size", "1,8")
    (row,) = [line for line in text.splitlines() if "model states" in line]
    assert code == 0 and row.split("│")[2:4] == [" do not fit ", "        fit "]


def test_wrong_options_name_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give MODEL or --shape"):
        run()
    with pytest.raises(ConfigError, match="--world-size '8,x' is not a list"):
        run("--shape", SHAPE, "--world-size", "8,x")
    with pytest.raises(ConfigError, match="--checkpointing 'some' does not exist; write one of none, full, selective"):
        run("--shape", SHAPE, "--checkpointing", "some")
    with pytest.raises(ConfigError, match="--shape '9b' is unknown"):
        run("--shape", "9b")
    path = tmp_path / "lab.toml"
    path.write_text('cluster = "dgx-h100"\nhosts = 2\n[[links]]\nfrom = "host 0"\nto = "leaf"\nrate = "100Gbps"\n')
    with pytest.raises(ConfigError, match=r"links\[0\].to = 'leaf' is neither a host nor a switch; write a host from"):
        run("--shape", SHAPE, "--cluster", str(path), "--world-size", "16")


def test_a_checkpoint_takes_the_disks_of_the_hosts_in_use(tmp_path: Path) -> None:
    host = 'name = "lab"\n[device]\npart = "h100"\n[host]\npart = "dgx-h100"\n'
    found = []
    for hosts in (1, 64):
        (tmp_path / "lab.toml").write_text(host.replace("[device]", f"hosts = {hosts}\n[device]"))
        options = ["--cluster", str(tmp_path / "lab.toml"), "--world-size", "8", "--device-mtbf", "9", "--json"]
        found.append(json.loads(run("--shape", SHAPE, *options)[1])["goodput"])
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match=r"--checkpoint-time '0s' is not above 0; write e\.g\. 30s"):
        run("--shape", SHAPE, "--world-size", "8", "--device-mtbf", "9", "--checkpoint-time", "0s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3e-6, "3.0 us"),
        (0.5, "500.00 ms"),
        (119.0, "119.00 s"),
        (6000.0, "100.0 min"),
        (9000.0, "2.5 h"),
        (1e6, "11.6 d"),
    ],
)
def test_times_have_the_unit_in_which_they_are_read(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
