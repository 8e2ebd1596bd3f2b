"""Tests of the part of a tuning trial that runs inside the program, on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import run_ranks
from windlass.engine.trial_job import VARIABLE, TrialJob

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": True,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def train_in_trial(as_deepspeed: bool, steps: int) -> tuple[int, int, list[int]]:
    """Train until the trial ends. Return the ZeRO stage, the number of steps, and the batch and micro-batch sizes."""
    import windlass
    from windlass.compat.deepspeed_initialize import initialize as deepspeed_initialize
    from windlass.engine import trial_run
    from windlass.engine.initialize_observer import InitializeObserver, install_observer

    torch.manual_seed(dist.get_rank())
    with ExitStack() as stack:
        stack.callback(install_observer, install_observer(InitializeObserver()))
        stack.enter_context(mock.patch.object(trial_run, "exit_later"))
        build = deepspeed_initialize if as_deepspeed else windlass.initialize
        engine = build(model=torch.nn.Linear(8, 1), config=dict(CONFIG))[0]
        batch = [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()]
        done = 0
        try:
            for _ in range(steps):
                for _ in range(engine.gradient_accumulation_steps()):
                    engine.backward(engine(torch.randn(batch[1], 8)).square().mean())
                    engine.step()
                done += 1
        except trial_run.TrialFinished:
            done += 1
        stage = engine.zero_optimization_stage()
        engine.destroy()
        return stage, done, batch


@pytest.mark.parametrize("as_deepspeed", [False, True])
def test_a_trial_changes_keys_times_steps_and_ends_the_program(tmp_path: Path, as_deepspeed: bool) -> None:
    result = tmp_path / "result.json"
    values = {"zero_optimization.stage": 2, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    job = TrialJob(str(result), values, warmup=1, steps=3)
    runs = run_ranks(train_in_trial, 2, as_deepspeed, 50, env=job.environment())
    assert runs == [(2, 4, [12, 3])] * 2, "every rank ends in the same step"
    found = json.loads(result.read_text())
    assert len(found["steps"]) == 3 and 0 < found["forward_s"] + found["update_s"] < 2 * found["step_s"]
    assert (found["train_batch"], found["micro"], found["accumulation"], found["world_size"]) == (12, 3, 2, 2)
    assert found["fed_shape"] == [3, 8] and found["parameters"] == 9 and found["peak_host"] > 2**20
    assert not found["ended_early"]


def test_a_slow_trial_ends_after_two_steps(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    job = TrialJob(str(result), {"zero_optimization.stage": 3}, warmup=1, steps=9, slow_s=1e-9)
    assert [run[1] for run in run_ranks(train_in_trial, 2, False, 50, env=job.environment())] == [3, 3]
    assert json.loads(result.read_text())["ended_early"]


def train_after_an_evaluation() -> None:
    """Evaluate larger batches than those of the training, and train along sp until the trial ends."""
    import windlass
    from tests.causal_models import build, language
    from windlass.engine import trial_run
    from windlass.engine.initialize_observer import InitializeObserver, install_observer

    with ExitStack() as stack:
        stack.callback(install_observer, install_observer(InitializeObserver()))
        stack.enter_context(mock.patch.object(trial_run, "exit_later"))
        engine = windlass.initialize(model=build("llama"), config={**CONFIG, "parallel": {"sp": 2}})[0]
        with torch.no_grad():
            engine(**language(0, samples=5, length=9))
        try:
            while True:
                engine.backward(engine(**language(1, samples=2, length=12)).loss)
                engine.step()
        except trial_run.TrialFinished:
            engine.destroy()


def test_a_trial_reports_the_batch_that_the_program_feeds_to_the_training(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    run_ranks(train_after_an_evaluation, 2, env=TrialJob(str(result), {}, warmup=1, steps=1).environment())
    assert json.loads(result.read_text())["fed_shape"] == [2, 12], "all tokens, not only those of rank 0"


def record_arguments(path: str, *_: Any, **__: Any) -> Callable[[int, tuple[Any, ...], dict[str, Any]], None]:
    """Return a forecast that writes the arguments of the first forward."""

    def record(micro: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = {name: list(value.shape) for name, value in kwargs.items()}
        Path(path).write_text(json.dumps([micro, len(args), shapes]))

    return record


def train_pipeline() -> None:
    """Train on two pipeline stages until the trial ends."""
    import windlass
    from tests.causal_models import build, language
    from windlass.engine import trial_run
    from windlass.engine.initialize_observer import InitializeObserver, install_observer

    with ExitStack() as stack:
        stack.callback(install_observer, install_observer(InitializeObserver()))
        stack.enter_context(mock.patch.object(trial_run, "exit_later"))
        config = {**CONFIG, "zero_optimization": {"stage": 0}, "parallel": {"pp": 2}}
        engine = windlass.initialize(model=build("llama"), config=config)[0]
        try:
            while True:
                engine.train_batch(iter([language(1, samples=2, length=12)]))
        except trial_run.TrialFinished:
            engine.destroy()


def test_the_forecast_of_a_pipeline_gets_the_labels_of_its_last_stage(tmp_path: Path) -> None:
    names = {
        "forecast": "tests.dist.test_tuning_trial:record_arguments",
        "forecast_order": str(tmp_path / "order.json"),
    }
    job = TrialJob(str(tmp_path / "result.json"), {}, warmup=1, steps=1, **names)
    run_ranks(train_pipeline, 2, env=job.environment())
    assert json.loads(Path(names["forecast_order"]).read_text()) == [2, 0, {"input_ids": [2, 12], "labels": [2, 12]}]


def test_another_value_of_the_variable_is_refused() -> None:
    from windlass.base.errors import ConfigError
    from windlass.engine.trial_job import trial_from_environment

    assert trial_from_environment({}) is None
    job = TrialJob("r", {"a": 1})
    assert trial_from_environment(job.environment()) == job
    with pytest.raises(ConfigError, match=f"{VARIABLE} = '1' is not a job of `windlass tune`"):
        trial_from_environment({VARIABLE: "1"})
