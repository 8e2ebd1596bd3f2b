"""Tests of `windlass compress --distill`: trained codes, pruned models, interruptions, and teachers that do not fit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.causal_models import build
from tests.compress.test_compress_command import LINES, failed, load, model, run  # noqa: F401
from windlass.base.errors import ConfigError
from windlass.cli import compression_distillation, compression_stages
from windlass.cli.compression_distillation import LOSS_TERMS, parse_losses
from windlass.cli.compression_figures import StageProgress
from windlass.cli.main import main
from windlass.compress.distillation import check_tokenizers
from windlass.compress.format_rounding import format_values
from windlass.compress.packed_model import load_packed_model
from windlass.data.tokenizer import train_tokenizer
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import get_weight_format


@pytest.fixture
def text(model: Path) -> list[object]:  # noqa: F811
    return ["--data", model.parent / "text.txt", "--sequences", 4, "--length", 32, "--rows", 2, "--no-measure"]


def test_trained_codes_are_packed_as_the_loss_saw_them(
    model: Path,  # noqa: F811
    text: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained: dict[str, torch.Tensor] = {}
    inner = compression_distillation._train

    def recording(student: torch.nn.Module, *arguments: Any) -> tuple[float, float]:
        found = inner(student, *arguments)
        trained.update({name: value.detach().clone() for name, value in student.state_dict().items()})
        return found

    monkeypatch.setattr(compression_distillation, "_train", recording)
    options = ["--weights", "int2", "--group", 32, "--distill", model, "--steps", 12, "--rate", 0.003, *text]
    run(model, tmp_path / "out", *options, "--distill-loss", "logits=1,hidden=0.5,attention=0.1")
    out = capsys.readouterr().out
    assert "14 layers as int2_g32 by training" in out and "12 steps, as int2_g32: loss " in out
    first, last = (float(one.strip("\n")) for one in out.partition("loss ")[2].split("\n")[0].split(" -> "))
    assert last < first
    packed = load_packed_model(tmp_path / "out")
    form, wide = get_weight_format("int2_g32"), load(model).state_dict()
    layers = {name: module for name, module in packed.named_modules() if isinstance(module, PackedLinear)}
    assert len(layers) == 14
    for name, module in layers.items():
        latent = trained[f"{name}.weight"]
        assert torch.equal(module.unpack().float(), format_values(form, latent))
        assert not torch.equal(latent, wide[f"{name}.weight"]), "trained"
    assert torch.equal(packed.get_parameter("model.norm.weight"), trained["model.norm.weight"])
    assert not list(tmp_path.glob(".out*")) and not dist.is_initialized(), "no traces"
    report = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert any("distilled from" in note for note in report["notes"]) and report["settings"]["steps"] == "12"


def test_an_interrupted_training_continues_with_the_same_numbers(
    model: Path,  # noqa: F811
    text: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--weights", "wide", "--prune", "ffn=0.25", "--distill", model, "--steps", 8, *text]
    run(model, tmp_path / "whole", *options)
    whole: Any = load(tmp_path / "whole")
    assert whole.config.intermediate_size == 96 and (tmp_path / "whole" / "tokenizer.json").is_file()

    class Received:
        numbers: list[int] = []

    progress = StageProgress.__call__

    def stop_after_three(self: Any, done: int, total: int) -> None:
        progress(self, done, total)
        if self.stage == "distilling" and done == 3:
            Received.numbers.append(signal.SIGTERM)

    class Capture:
        def __init__(self, names: Any) -> None: ...

        def __enter__(self) -> type[Received]:
            return Received

        def __exit__(self, *_: object) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(compression_stages, "capture_signals", Capture)
        patch.setattr(StageProgress, "__call__", stop_after_three)
        with pytest.raises(SystemExit) as ended:
            main(["compress", *map(str, [model, tmp_path / "out", *options])])
    assert ended.value.code == 143 and not (tmp_path / "out").exists()
    assert "interrupted after 3 steps; the same command continues there" in capsys.readouterr().err
    steps: list[int] = []

    def record(self: Any, done: int, total: int) -> None:
        progress(self, done, total)
        if self.stage == "distilling":
            steps.append(done)

    with monkeypatch.context() as patch:
        patch.setattr(StageProgress, "__call__", record)
        run(model, tmp_path / "out", *options)
    assert steps == [4, 5, 6, 7, 8]
    found = load(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())


def test_a_signal_after_the_last_step_ends_the_command_too(
    model: Path,  # noqa: F811
    text: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--weights", "int4_g32", "--distill", model, "--steps", 2, *text, "--no-measure"]
    save = compression_distillation.save_wide_model

    def save_and_signal(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        save(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(compression_distillation, "save_wide_model", save_and_signal)
        with pytest.raises(SystemExit) as ended:
            main(["compress", *map(str, [model, tmp_path / "out", *options])])
    assert ended.value.code == 130 and not (tmp_path / "out").exists()
    assert "interrupted after 2 steps; the same command continues there" in capsys.readouterr().err
    monkeypatch.setattr(compression_stages, "distil_directory", None)  # a complete training is not repeated
    run(model, tmp_path / "out", *options)
    assert not list(tmp_path.glob(".out*"))


def test_teachers_and_options_that_do_not_fit_are_refused(
    model: Path,  # noqa: F811
    text: list[object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    teacher: Any = build("llama", vocab_size=300)
    teacher.save_pretrained(tmp_path / "teacher")
    train_tokenizer([line.upper() for line in LINES], 300, tmp_path / "teacher")
    other = failed(capsys, model, out, "--distill", tmp_path / "teacher", "--steps", 2, *text)
    assert "the teacher has another tokenizer: token " in other
    merges = json.loads((model / "tokenizer.json").read_text())
    merges["model"]["merges"].reverse()  # the same vocabulary
    (tmp_path / "teacher" / "tokenizer.json").write_text(json.dumps(merges))
    other = failed(capsys, model, out, "--distill", tmp_path / "teacher", "--steps", 2, *text)
    assert "the teacher has another tokenizer: the vocabularies are equal, but model.merges differs: entry 0" in other
    assert "needs steps" in failed(capsys, model, out, "--distill", model, *text)
    assert "needs text to train on" in failed(capsys, model, out, "--distill", model, "--steps", 2)
    assert "give --distill TEACHER" in failed(capsys, model, out, "--steps", 2, *text)
    wrong = failed(capsys, model, out, "--distill", model, "--steps", 2, "--distill-loss", "logit=1", *text)
    assert f"has 'logit=1'; write weights of {', '.join(LOSS_TERMS)}" in wrong
    both = failed(capsys, model, out, "--distill", model, "--steps", 2, "--sparsity", "0.5", *text)
    assert "compression_training.sparse_pruning" in both
    rotated = failed(capsys, model, out, "--distill", model, "--steps", 2, "--rotate", *text)
    assert "rotate (--rotate) changes weights after" in rotated
    assert "is not a model" in failed(capsys, model, out, "--distill", tmp_path / "none", "--steps", 2, *text)
    assert not out.exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("model", {"merges": "reversed"}, r"model\.merges differs: entry 0 is \["),
        ("model", {"ignore_merges": True}, r"model\.ignore_merges"),
        ("normalizer", {"type": "Lowercase"}, r"normalizer differs: None in the model's and \{'type': 'Lowercase'"),
        ("pre_tokenizer", {"use_regex": False}, r"pre_tokenizer differs: .*use_regex is True in the model's and False"),
        ("added_tokens", {"lstrip": True}, r"added_tokens differs: .* 'lstrip': False"),
        ("decoder", {"add_prefix_space": False}, None),
        ("post_processor", None, None),
    ],
)
def test_tokenizers_of_one_vocabulary_may_differ(
    part: str,
    change: dict[str, Any] | None,
    message: str | None,
    model: Path,  # noqa: F811
) -> None:
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = json.loads(own.to_str())
    if part == "added_tokens":
        found[part] = [{**one, **(change or {})} for one in found[part]]
    elif change == {"merges": "reversed"}:
        found[part]["merges"].reverse()
    else:
        found[part] = None if change is None else {**(found[part] or {}), **change}
    other = Tokenizer.from_str(json.dumps(found))
    assert own.get_vocab() == other.get_vocab()
    check_tokenizers(own, Tokenizer.from_str(own.to_str()))
    if message is None:
        check_tokenizers(own, other)
        return
    for one, two in ((own, other), (other, own)):
        with pytest.raises(ConfigError, match="the teacher has another tokenizer: the vocabularies are equal, but"):
            check_tokenizers(one, two)
    with pytest.raises(ConfigError, match=message):
        check_tokenizers(own, other)


def test_losses_are_read() -> None:
    assert parse_losses(None) == {} and parse_losses("logits=1,hidden=0.5") == {"logits": 1.0, "hidden": 0.5}
