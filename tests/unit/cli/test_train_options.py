"""Tests of turning options into a training plan: defaults, "auto", earlier runs, and every impossible request."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windlass.base.errors import CheckpointError, ConfigError, DataError, ModelError, WindlassError
from windlass.cli.training import train_options
from windlass.cli.training.default_recipe import default_config, fill_auto
from windlass.cli.training.model_builder import declared_vocab_size
from windlass.cli.training.train_options import TrainOptions, make_training_plan, read_config
from windlass.cli.training.training_plan import read_plan
from windlass.data.tokenizer import train_tokenizer

pytest.importorskip("tokenizers")


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {index} of some text\n" for index in range(400)))
    return TrainOptions(out=tmp_path / "run", data=[str(text)], vocab_size=260, steps=40, nproc=2)


def config_of(tmp_path: Path, **values: Any) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_plan_round_trips_through_its_folder(options: TrainOptions) -> None:
    plan = make_training_plan(options)
    assert plan.config["zero_optimization"]["stage"] == 2 and plan.config["optimizer"]["type"] == "AdamW"
    assert plan.eval_every == 10 and plan.token_file.is_file()
    assert read_plan(plan.plan_file) == plan


def test_auto_values_are_filled_and_explicit_values_kept() -> None:
    given = {
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "eps": 1e-7}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 7}},
    }
    before = json.dumps(given)
    filled = fill_auto(given, steps=300, lr=0.01)
    assert filled["optimizer"]["params"] == {"lr": 0.01, "eps": 1e-7}
    assert filled["scheduler"]["params"] == {"total_num_steps": 300, "warmup_num_steps": 7}
    assert json.dumps(given) == before


def test_default_configuration_has_no_auto_left() -> None:
    assert "auto" not in json.dumps(fill_auto(default_config(), 10, 1e-3))


def test_a_configuration_without_optimizer_gets_one(tmp_path: Path) -> None:
    read = read_config(config_of(tmp_path, train_batch_size=4), steps=5, lr=0.5)
    assert read["optimizer"]["params"]["lr"] == 0.5
    read = read_config(config_of(tmp_path, train_batch_size=4, optimizer=None), steps=5, lr=0.5)
    assert read["optimizer"]["params"]["lr"] == 0.5


def test_a_run_without_a_schedule_is_resumed_for_more_steps(options: TrainOptions, tmp_path: Path) -> None:
    config = config_of(tmp_path, train_micro_batch_size_per_gpu=1, scheduler=None)
    make_training_plan(replace(options, config=config))
    assert make_training_plan(TrainOptions(out=options.out, resume=True, steps=70)).steps == 70


def test_a_configuration_can_come_from_a_pipe(options: TrainOptions) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, json.dumps({"train_micro_batch_size_per_gpu": 3}).encode())
    os.close(theirs)
    try:
        plan = make_training_plan(replace(options, config=f"/dev/fd/{ours}"))
    finally:
        os.close(ours)
    assert plan.config["train_micro_batch_size_per_gpu"] == 3 and plan.config["optimizer"]["type"] == "AdamW"


def test_a_prompt_that_no_tokenizer_can_read_is_refused_before_the_training(options: TrainOptions) -> None:
    prompt = os.fsdecode(b"caf\xe9")  # the argument of a terminal with Latin-1
    with pytest.raises(ConfigError, match="--prompt .* is not valid UTF-8"):
        make_training_plan(replace(options, prompt=prompt))
    assert make_training_plan(replace(options, prompt="café \U0001f600")).prompt == "café \U0001f600"


def test_resume_takes_everything_from_the_run_and_needs_no_data(options: TrainOptions) -> None:
    first = make_training_plan(options)
    Path(options.data[0]).unlink()  # type: ignore[index]
    again = make_training_plan(TrainOptions(out=options.out, resume=True))
    assert again == replace(first, resume=True)
    assert make_training_plan(TrainOptions(out=options.out, resume=True, nproc=3, steps=50)).steps == 50


def test_resume_trusts_remote_code_only_by_its_own_flag(options: TrainOptions) -> None:
    assert make_training_plan(replace(options, trust_remote_code=True)).trust_remote_code
    assert not make_training_plan(TrainOptions(out=options.out, resume=True)).trust_remote_code
    assert make_training_plan(TrainOptions(out=options.out, resume=True, trust_remote_code=True)).trust_remote_code


def test_moved_run_is_resumed_at_its_new_path(options: TrainOptions, tmp_path: Path) -> None:
    make_training_plan(options)
    moved = options.out.rename(tmp_path / "moved")
    plan = make_training_plan(TrainOptions(out=moved, resume=True))
    assert Path(plan.tokenizer) == moved / "tokenizer" and plan.token_file == moved / "tokens.bin"


def test_a_run_is_not_overwritten_unless_asked(options: TrainOptions) -> None:
    make_training_plan(options)
    (options.out / "checkpoint").mkdir()
    with pytest.raises(CheckpointError, match="--overwrite"):
        make_training_plan(options)
    make_training_plan(replace(options, overwrite=True))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"data": ["/does/not/exist"]}, DataError, "/does/not/exist"),
        ({"data": None}, DataError, "--data"),
        ({"config": "/no/ds.json"}, ConfigError, "/no/ds.json"),
        ({"tokenizer": Path("/no/tokenizer")}, DataError, "/no/tokenizer"),
        ({"model": "/no/model"}, ModelError, "/no/model"),
        ({"steps": 0}, ConfigError, "--steps 0"),
        ({"nproc": 0}, ConfigError, "nproc"),
        ({"seq_len": 1}, ConfigError, "--seq-len 1"),
        ({"vocab_size": 100}, ConfigError, "--vocab-size 100 must be at least 258"),
        ({"vocab_size": 0}, ConfigError, "--vocab-size 0"),
        ({"seed": -1}, ConfigError, "--seed -1"),
        ({"lr": 0.0}, ConfigError, "--lr 0.0"),
        ({"lr": float("nan")}, ConfigError, "--lr nan"),
        ({"resume": True, "data": None, "vocab_size": None}, CheckpointError, "nothing to resume"),
    ],
)
def test_invalid_options_raise_one_error(
    options: TrainOptions, change: dict[str, Any], kind: type[WindlassError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make_training_plan(replace(options, **change))


def test_a_world_size_that_divides_nothing_is_refused_before_the_corpus_is_packed(
    options: TrainOptions, tmp_path: Path
) -> None:
    config = config_of(tmp_path, train_batch_size=8, gradient_accumulation_steps=1)
    with pytest.raises(ConfigError, match="8"):
        make_training_plan(replace(options, config=config, nproc=3))
    assert not options.out.exists()


def test_resume_refuses_changed_options_by_name(options: TrainOptions) -> None:
    make_training_plan(options)
    with pytest.raises(ConfigError, match="--data, --seq-len"):
        make_training_plan(TrainOptions(out=options.out, resume=True, data=["x"], seq_len=64))
    with pytest.raises(ConfigError, match="--seed"):
        make_training_plan(TrainOptions(out=options.out, resume=True, seed=0))
    with pytest.raises(ConfigError, match="--lr"):
        make_training_plan(TrainOptions(out=options.out, resume=True, lr=0.1))


def test_a_damaged_corpus_is_not_resumed(options: TrainOptions) -> None:
    plan = make_training_plan(options)
    data = bytearray(plan.token_file.read_bytes())
    data[-1] ^= 1
    plan.token_file.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        make_training_plan(TrainOptions(out=options.out, resume=True))


def test_the_vocabulary_is_read_from_the_model_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 512}')
    assert declared_vocab_size(str(tmp_path)) == declared_vocab_size(str(tmp_path / "config.json")) == 512
    assert declared_vocab_size("tiny") is None
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="config.json"):
        declared_vocab_size(str(tmp_path))


def test_another_tokenizer_is_not_resumed(options: TrainOptions) -> None:
    plan = make_training_plan(options)
    train_tokenizer(["another text altogether"] * 9, 280, Path(plan.tokenizer))
    with pytest.raises(DataError, match="packed with 260"):
        make_training_plan(TrainOptions(out=options.out, resume=True))


def test_steps_beyond_the_schedule_are_warned_about(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    make_training_plan(options)
    reported: list[str] = []
    monkeypatch.setattr(train_options.logger, "warning", lambda text, *values: reported.append(text % values))
    make_training_plan(TrainOptions(out=options.out, resume=True))
    assert not reported
    make_training_plan(TrainOptions(out=options.out, resume=True, steps=70))
    assert len(reported) == 1 and "ends at step 40 of 70" in reported[0]
