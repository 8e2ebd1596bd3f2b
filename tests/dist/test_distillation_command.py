"""Test of `windlass train` with a teacher: two ranks that share its shards, and a run from its cache alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import run_ranks
from windlass.base.errors import ConfigError, DataError
from windlass.cli.training.run_metrics import read_rows
from windlass.cli.training.stop_signals import StopSignals
from windlass.cli.training.train_options import TrainOptions, make_training_plan
from windlass.cli.training.train_rank import train_on_rank
from windlass.cli.training.training_plan import TrainingPlan, read_plan


def model_config(path: Path, vocab: int, width: int, layers: int) -> Path:
    path.mkdir()
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    (path / "config.json").write_text(json.dumps(settings))
    return path


def run(plan_file: str) -> bool:
    return train_on_rank(read_plan(Path(plan_file)), StopSignals(Path(plan_file).with_name("failure")))


def plan_of(folder: Path, out: str, corpus: Path, model: Path, **distillation: Any) -> TrainingPlan:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "distillation": distillation}
    (folder / f"{out}.json").write_text(json.dumps(config))
    options = TrainOptions(
        out=folder / out,
        config=str(folder / f"{out}.json"),
        model=str(model),
        data=[str(corpus)],
        vocab_size=300,
        nproc=2,
        steps=3,
        seq_len=16,
        eval_bytes=2000,
        sample_tokens=0,
    )
    return make_training_plan(options)


def losses(plan: TrainingPlan) -> list[float]:
    return [row.loss for row in read_rows(plan.metrics_file) if row.loss is not None]


def test_the_command_distils_and_exports_a_plain_model(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"line {number} of a corpus, {number * number % 977}\n" for number in range(3000)))
    small = model_config(tmp_path / "small", 300, 16, 1)
    teacher = model_config(tmp_path / "teacher", 300, 24, 2)
    with pytest.raises(DataError, match="no tokenizer at"):
        plan_of(tmp_path, "first", corpus, small, teacher=str(teacher))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(teacher)).save_pretrained(teacher)
    for file in (tmp_path / "first" / "tokenizer").iterdir():
        shutil.copy(file, teacher)
    terms = {"hidden": 0.5, "attention": 0.5, "task": 0.5}
    plan = plan_of(tmp_path, "first", corpus, small, teacher=str(teacher), **terms)
    assert run_ranks(run, 2, str(plan.plan_file), transport="gloo") == [True, True]
    assert len(losses(plan)) == 3
    assert set(AutoModelForCausalLM.from_pretrained(plan.export_folder).state_dict()) == set(
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small)).state_dict()
    )

    cache = str(tmp_path / "cache")
    filled = plan_of(tmp_path, "second", corpus, small, teacher=str(teacher), cache=cache, cache_top_k=8)
    assert run_ranks(run, 2, str(filled.plan_file), transport="gloo") == [True, True]
    alone = plan_of(tmp_path, "third", corpus, small, cache=cache, cache_top_k=8)
    assert run_ranks(run, 2, str(alone.plan_file), transport="gloo") == [True, True]
    assert losses(alone) == losses(filled)

    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another tokenizer: token 'a' has id"):
        plan_of(tmp_path, "fourth", corpus, small, teacher=str(teacher))
    with pytest.raises(ConfigError, match="distillation.teacher is missing"):
        plan_of(tmp_path, "fifth", corpus, small, temperature=2.0)
