"""Tests of `windlass merge`: equal to `merge_models`, interruptions, and models that do not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.causal_models import build
from windlass.base.errors import ModelError
from windlass.cli import compression_figures
from windlass.cli.main import main
from windlass.compress.merge_directories import merge_directories
from windlass.compress.merge_models import merge_models, merge_tensors
from windlass.data.tokenizer import train_tokenizer

LINES = [f"the {a} {b} {n}" for n in range(12) for a, b in (("fox", "sees"), ("cat", "is"))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("merge")
    found: dict[str, Any] = {"folder": folder}
    for seed, name in enumerate(("one", "two", "base")):
        torch.manual_seed(seed)
        found[name] = build("llama")
        with torch.no_grad():
            for parameter in found[name].parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        found[name].save_pretrained(folder / name)
        train_tokenizer(LINES, 300, folder / name)
    return found


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["merge", *map(str, arguments)])
    return int(ended.value.code or 0)


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("method", ["linear", "slerp", "ties", "dare"])
def test_the_command_writes_the_merged_model(
    method: str, models: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, base = models["folder"], method in ("ties", "dare")
    options = ["--method", method, "--weights", "0.7,0.3", *(["--base", folder / "base"] if base else [])]
    assert command(folder / "one", folder / "two", tmp_path / "out", *options, "--density", 0.4) == 0
    assert f"of 2 models by {method}, in" in capsys.readouterr().out
    expected = merge_models(
        [models["one"], models["two"]],
        method,
        weights=[0.7, 0.3],
        base=models["base"] if base else None,
        density=0.4,
    )
    found = load(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not list(tmp_path.glob(".out*"))


def test_an_interrupted_merge_continues(
    models: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Any, done: int, total: int) -> None:
        self.done = done
        if done == 5:
            raise KeyboardInterrupt

    folder = models["folder"]
    with monkeypatch.context() as patch:
        patch.setattr(compression_figures.StageProgress, "__call__", interrupt)
        assert command(folder / "one", folder / "two", tmp_path / "out") == 130
    assert "interrupted after 5 tensors; the same" in capsys.readouterr().err and not (tmp_path / "out").exists()
    merged: list[str] = []

    def record(name: str, *arguments: Any) -> Any:
        merged.append(name)
        return merge_tensors(name, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[merge_directories.__module__], "merge_tensors", record)
        assert command(folder / "one", folder / "two", tmp_path / "out") == 0
    expected = merge_models([models["one"], models["two"]])
    assert len(merged) == len(expected) - 5
    found = load(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_models_that_do_not_fit_are_refused(
    models: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = models["folder"], tmp_path / "out"

    def refused(*arguments: object) -> str:
        assert command(*arguments) == 1
        return capsys.readouterr().err

    assert "needs base, the model" in refused(folder / "one", folder / "two", out, "--method", "ties")
    assert "'a,b'; write numbers" in refused(folder / "one", folder / "two", out, "--weights", "a,b")
    assert "weights are [1.0] for 2 models" in refused(folder / "one", folder / "two", out, "--weights", "1")
    assert "takes several models" in refused(folder / "one")
    assert "is not a model" in refused(folder / "one", tmp_path, out)
    other: Any = build("llama", intermediate_size=80)
    other.save_pretrained(tmp_path / "other")
    message = refused(folder / "one", tmp_path / "other", out)
    assert "mlp.down_proj.weight' is of shape" in message and "one architecture" in message
    build("llama", vocab_size=45).save_pretrained(tmp_path / "larger")
    message = refused(folder / "one", tmp_path / "larger", out)
    assert "'lm_head.weight' is of shape (45, 32)" in message and "and of shape (41, 32) in" in message
    assert "weights are [nan, 1.0] for 2 models" in refused(folder / "one", folder / "two", out, "--weights", "nan,1")
    build("llama", head_dim=4, num_attention_heads=8, num_key_value_heads=4).save_pretrained(tmp_path / "heads")
    message = refused(folder / "one", tmp_path / "heads", out)
    assert "has head_dim 4 and" in message and "do not mean the same" in message
    models["two"].save_pretrained(tmp_path / "words")
    train_tokenizer([line.upper() for line in LINES], 300, tmp_path / "words")
    assert "have different tokenizers: " in refused(folder / "one", tmp_path / "words", out)
    assert command(folder / "one", folder / "two", folder / "base") == 1
    assert "base exists; choose another directory" in capsys.readouterr().err and not out.exists()


def test_values_that_are_no_numbers_are_named(
    models: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    broken: Any = build("llama", rms_norm_eps=1e-3)
    with torch.no_grad():
        broken.model.norm.weight[3] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    assert command(models["folder"] / "one", tmp_path / "broken", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "tensor 'model.norm.weight' of model 2 has NaN values" in error
    assert not (tmp_path / "out").exists()
    assert "differ in rms_norm_eps of config.json; the merged model has those of the latter" in caplog.text
    large: Any = build("llama").half()
    with torch.no_grad():
        large.model.norm.weight.fill_(6e4)
    large.save_pretrained(tmp_path / "large")
    options = ("--method", "ties", "--base", models["folder"] / "base", "--density", 1, "--weights", "2,2")
    assert command(tmp_path / "large", tmp_path / "large", tmp_path / "out", "--method", "dare", *options[2:]) == 1
    assert "'model.norm.weight' has values outside of the range of torch.float16" in capsys.readouterr().err
    assert command(tmp_path / "large", tmp_path / "large", tmp_path / "out", *options) == 0
    assert next(load(tmp_path / "out").parameters()).dtype == torch.float16


def edited(folder: Path, **changes: Any) -> Path:
    """Change the configuration of a directory; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def test_configurations_are_compared_by_their_meaning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("one", "two"):
        build("llama", num_key_value_heads=4).save_pretrained(tmp_path / name)
    one, two = tmp_path / "one", tmp_path / "two"
    edited(two, head_dim=None, num_key_value_heads=None, hidden_act="swish", head_dropout=0.1, activation_dropout=0.1)
    assert merge_directories([one, two], tmp_path / "out") == 21
    assert "differ in activation_dropout, head_dropout, hidden_act of config.json" in caplog.text
    for part in (one, two):
        edited(part, vision_config={"num_heads": 4 if part == one else 8})
    with pytest.raises(ModelError, match="has vision_config.num_heads 8 and .*one 4, so that"):
        merge_directories([one, two], tmp_path / "no")
    edited(one, vision_config=None, id2label={"0": "no", "1": "yes"}, label2id={"no": 0, "yes": 1})
    edited(two, vision_config=None, id2label={"0": "yes", "1": "no"}, label2id={"no": 1, "yes": 0})
    with pytest.raises(ModelError, match="the outputs of their classifiers do not mean the same"):
        merge_directories([one, two], tmp_path / "no")


@pytest.mark.parametrize("stored", [[], ["one"], ["two"], ["one", "two", "base"]])
def test_stored_copies_of_tied_heads_do_not_matter(stored: list[str], tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two", "base")):
        build("llama", seed, tie_word_embeddings=True).save_pretrained(tmp_path / name)
        if name in stored:
            file = tmp_path / name / "model.safetensors"
            state = load_file(file)
            copied = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
            save_file(copied, file, metadata={"format": "pt"})
    folders, base = [tmp_path / "one", tmp_path / "two"], tmp_path / "base"
    merge_directories(folders, tmp_path / "out", "dare", base=base)
    expected = merge_models([load(one) for one in folders], "dare", base=load(base))
    assert torch.equal(expected["lm_head.weight"], expected["model.embed_tokens.weight"])
    found = load_file(tmp_path / "out" / "model.safetensors")
    head = found.pop("lm_head.weight", None)
    assert (head is None) == (len(stored) < 3) and found.keys() == expected.keys() - {"lm_head.weight"}
    if head is not None:
        assert torch.equal(head, found.pop("model.embed_tokens.weight"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
