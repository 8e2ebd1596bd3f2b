"""Tests of `windlass compress`: a table of what was won and lost, and messages for input that it can't use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.causal_models import build
from windlass.cli.compress import choose_method, figure_lines, format_name
from windlass.cli.main import main
from windlass.compress.calibration_text import bits_per_byte, read_calibration_text
from windlass.compress.packed_model import load_packed_model
from windlass.data.tokenizer import train_tokenizer

LINES = [
    f"the {a} {b} the {c} number {n}" for n in range(12) for a, b, c in (("fox", "sees", "dog"), ("cat", "is", "hen"))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny model with a tokenizer, and a text beside it."""
    folder = tmp_path_factory.mktemp("compress")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64, "vocab_size": 300}
    build("llama", **sizes).save_pretrained(folder / "wide")
    train_tokenizer(LINES, 300, folder / "wide")
    (folder / "text.txt").write_text("\n".join(LINES * 4))
    return folder / "wide"


def failed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["compress", *map(str, arguments)])
    assert ended.value.code in (1, 2)
    return capsys.readouterr().err


def test_a_model_is_compressed_and_measured(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = model.parent / "text.txt"
    with pytest.raises(SystemExit) as ended:
        main(["compress", str(model), str(tmp_path / "out"), "--group", "32", "--data", str(text), "--sequences", "8"])
    assert not ended.value.code
    out, err = capsys.readouterr()
    assert "14 layers as int4_g32 by gptq" in out and "not packed: lm_head: the output head stays wide" in out
    assert "largest error of a layer's outputs" in out
    ratio = float(out.partition("packed weights: ")[2].partition("x smaller than float32")[0])
    assert ratio == pytest.approx(32 / 4.5, rel=0.01)
    assert "14 of 14 layers" in err
    found = read_calibration_text([str(text)], model, sequences=8, length=64)
    assert all(batch.shape[1] == 64 for batch in found.batches) and found.tokens <= 8 * 64
    line = next(line for line in out.splitlines() if "held-out bits per byte" in line)
    wide = bits_per_byte(load(model), found.held_out)
    assert float(line.split()[-4]) == pytest.approx(wide, abs=1e-3)
    assert "tokens/s, one request" in out and "all tensors" in out
    assert torch.isfinite(load_packed_model(tmp_path / "out")(torch.arange(8)[None]).logits).all()
    message = failed(capsys, model, tmp_path / "out")
    assert f"{tmp_path / 'out'} exists; choose another directory" in message


def load(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    found: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path)
    return found


def test_an_interruption_is_continued(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.cli import compress

    monkeypatch.setattr(compress._Progress, "__call__", interrupt)
    arguments = ["compress", str(model), str(tmp_path / "out"), "--no-measure", "--weights", "int4_g32_zp"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 130 and "interrupted after 3 layers; the same command" in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(SystemExit):
        main(arguments)
    out = capsys.readouterr().out
    assert "14 layers as int4_g32_zp by hqq" in out and "held-out" not in out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]


def interrupt(self: object, done: int, total: int) -> None:
    self.done = done  # type: ignore[attr-defined]
    if done == 3:
        raise KeyboardInterrupt


def test_bad_input_is_refused_with_the_reason(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "rounding a trained model to so few bits" in failed(capsys, model, out, "--weights", "int2")
    assert "format 'int4_g48', which does not exist" in failed(capsys, model, out, "--group", "48")
    assert "needs a calibration text" in failed(capsys, model, out, "--method", "gptq", "--no-measure")
    assert "smoothing of int8 activations needs" in failed(capsys, model, out, "--activations", "int8")
    assert "has no integers to choose" in failed(capsys, model, out, "--weights", "fp8", "--method", "awq")
    assert "is no model" in failed(capsys, tmp_path, out)
    (tmp_path / "one.txt").write_text("ab")
    assert "tokens; give at least 8" in failed(capsys, model, out, "--data", tmp_path / "one.txt")
    assert not out.exists() and not (tmp_path / ".out.partial").exists()


def test_groups_that_do_not_divide_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("llama", intermediate_size=96, hidden_size=64).save_pretrained(tmp_path / "wide")
    with pytest.raises(SystemExit):
        main(["compress", str(tmp_path / "wide"), str(tmp_path / "out"), "--group", "64", "--no-measure"])
    assert "groups of 64 do not divide the 96 input features of 2 layers like model" in capsys.readouterr().out


def test_names_of_formats_and_methods() -> None:
    assert format_name("int4", None) == "int4_g128" and format_name("int4_zp", 32) == "int4_g32_zp"
    assert format_name("int8", None) == "int8" and format_name("int8", 64) == "int8_g64"
    assert format_name("int3", 0) == "int3" and format_name("ternary", 0) == "ternary"
    assert format_name("int4_g64_zp", None) == "int4_g64_zp" and format_name("fp8", None) == "fp8"
    assert choose_method("auto", "int8", has_text=True) == choose_method("auto", "fp8", has_text=True) == "rtn"
    assert choose_method("auto", "int4_g128", has_text=True) == "gptq"
    assert choose_method("auto", "int4_g128", has_text=False) == "hqq"
    assert choose_method("rtn", "ternary", has_text=False) == "rtn"


def test_the_table() -> None:
    from windlass.cli.compress import ModelFigures

    lines = figure_lines(ModelFigures(8_000_000, 1.25, 10.0), ModelFigures(2_000_000, 1.3, 25.0))
    assert [line.split() for line in lines] == [
        ["before", "after"],
        ["all", "tensors", "8.0", "MB", "2.0", "MB", "4.00x", "smaller"],
        ["held-out", "bits", "per", "byte", "1.2500", "1.3000", "+4.00", "%"],
        ["tokens/s,", "one", "request", "10.0", "25.0", "2.50x"],
    ]
