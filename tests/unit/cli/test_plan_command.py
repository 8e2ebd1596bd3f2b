"""Command `windlass plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from windlass.base.errors import ConfigError, ModelError
from windlass.cli.main import app

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    )
    return str(tmp_path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_json_and_picture(model: str, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    options = ["--config", f"{model}/ds.json", "--world-size", "4", "--length", "16", "--gpu", "h200"]
    code, text = run(model, *options, "--json", "--picture", str(picture))
    found: dict[str, Any] = json.loads(text)
    assert code == 0 and found["missing"] == {} and found["micro_batch"] == 2 and found["world_size"] == 4
    assert list(found["moments"]) == ["init", "load", "forward", "backward", "step", "save"]
    held = found["moments"]["step"]["device"]
    assert held["master weights"] * 4 >= 4 * found["parameters"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_ladder_prints_its_choice_or_what_is_missing(model: str) -> None:
    code, text = run(model, "--length", "16", "--world-size", "2", "--host-memory", "1GB", "--choose")
    assert code == 0 and "chosen: stage 0" in text and '"stage": 0' in text
    code, text = run(model, "--length", "16", "--world-size", "2", "--host-memory", "10K", "--choose")
    assert code == 1 and "no configuration fits; the nearest is stage" in text and "missing:" in text


def test_wrong_options_name_the_fix(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give MODEL or --shape"):
        run(model, "--shape", "7b")
    with pytest.raises(ConfigError, match="--choose needs a limit"):
        run(model, "--choose")
    with pytest.raises(ModelError, match="no model at .*missing"):
        run(str(tmp_path / "missing"))
