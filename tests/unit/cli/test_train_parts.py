"""Tests of the parts of a training run: metrics that survive a resume, log lines, the plot, failures, stop requests."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from windlass.base.atomic_file import replace_directory
from windlass.base.errors import CheckpointError, ConfigError, DataError, LossError, ModelError, RequestError
from windlass.cli import train as command
from windlass.cli.training import run_metrics as metrics_module
from windlass.cli.training.loss_agreement import all_reduce_losses, all_reduce_sum
from windlass.cli.training.loss_plot import plot_loss, smooth
from windlass.cli.training.progress_display import ProgressDisplay, describe_row, format_duration
from windlass.cli.training.run_failure import (
    TrainingRunError,
    describe_failure,
    read_failure,
    record_failure,
    stopped_marker_path,
)
from windlass.cli.training.run_metrics import MetricsLog, MetricsRow, perplexity, read_rows
from windlass.cli.training.stop_signals import StopSignals
from windlass.cli.training.text_continuation import generate_continuation
from windlass.cli.training.train_rank import export_model
from windlass.cli.training.training_plan import TrainingPlan
from windlass.comm.bootstrap import init_distributed
from windlass.data.tokenizer import train_tokenizer
from windlass.launch.exit_status import LaunchExitStatus, RankFailure


def row(step: int) -> MetricsRow:
    return MetricsRow(step=step, loss=2.0, perplexity=perplexity(2.0), learning_rate=1e-3, tokens_per_second=1234.5)


def test_metrics_round_trip_and_a_resume_drops_repeated_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first = MetricsLog(path, None, after_step=0)
    for step in range(1, 6):
        first.append(row(step))
    first.append(MetricsRow(step=5, held_out_bits_per_byte=1.5))
    first.close()
    second = MetricsLog(path, None, after_step=3)
    second.append(row(4))
    second.close()
    assert read_rows(path) == [row(step) for step in range(1, 5)]


def test_partial_row_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first = MetricsLog(path, None, after_step=0)
    first.append(row(1))
    first.close()
    with open(path, "a") as stream:
        stream.write("2,1.9")
    assert read_rows(path) == [row(1)]
    MetricsLog(path, None, after_step=2).close()
    assert read_rows(path) == [row(1)]


@pytest.mark.parametrize("line", ["1,x,,,,,,", "0" * 200_000, "\x00" * 200_000])
def test_a_damaged_metrics_file_is_one_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.csv"
    MetricsLog(path, None, after_step=0).close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"metrics\.csv .*; move it away"):
        read_rows(path)


def test_a_fresh_run_starts_a_fresh_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("of another run")
    MetricsLog(path, None, after_step=0).close()
    assert read_rows(path) == []


def test_missing_tensorboard_logs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[str]]
) -> None:
    def missing(folder: Path) -> None:
        raise metrics_module.ConfigError("not installed")

    monkeypatch.setattr(metrics_module, "TensorBoardWriter", missing)
    metrics = MetricsLog(tmp_path / "metrics.csv", tmp_path / "events", after_step=0)
    metrics.append(row(1))
    metrics.close()
    assert len(logged()) == 1 and "TensorBoard is not installed" in logged()[0]
    assert read_rows(tmp_path / "metrics.csv") == [row(1)]


@pytest.fixture
def logged() -> Any:
    """Return the messages that the package's logger emitted since the test began."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logging.getLogger("windlass").addHandler(handler)
    yield lambda: lines
    logging.getLogger("windlass").removeHandler(handler)


def test_progress_without_a_terminal_is_a_few_lines(logged: Callable[[], list[str]]) -> None:
    for total in (3, 1000):
        before = len(logged())
        display = ProgressDisplay(total, 0, Console(file=io.StringIO()))
        for step in range(1, total + 1):
            display.show_step(row(step))
        display.close()
        assert 3 <= len(logged()) - before <= 6
    assert "step 1000/1000  loss 2.000  ppl 7.4  1,234 tok/s  lr 1.00e-03  left 0:00" in logged()[-1]


def test_progress_on_a_terminal_is_one_live_line(logged: Callable[[], list[str]]) -> None:
    screen = io.StringIO()
    display = ProgressDisplay(10, 4, Console(file=screen, force_terminal=True, width=200))
    display.show_step(row(5))
    display.show_note("held out [1.2]")
    display.close()
    assert "loss 2.000" in screen.getvalue() and "held out [1.2]" in screen.getvalue() and not logged()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (59.6, "1:00"), (7205, "2:00:05")])
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_unmeasured_values_are_hidden_and_overflow_is_infinite() -> None:
    assert describe_row(MetricsRow(step=1, loss=1.0)) == "loss 1.000"
    assert perplexity(1e4) == float("inf")


def test_smoothing_keeps_a_constant_and_has_no_bias_to_zero() -> None:
    assert smooth([3.0] * 5) == pytest.approx([3.0] * 5)


def test_plot_is_a_png_and_missing_matplotlib_logs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[str]]
) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(step) for step in range(1, 30)] + [
        MetricsRow(0, held_out_bits_per_byte=3.0),
        MetricsRow(29, held_out_bits_per_byte=2.0),
    ]
    assert plot_loss(rows, tmp_path / "loss.png", 3.4, "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert not plot_loss(rows, tmp_path / "none.png", 3.4, "title")
    assert len(logged()) == 1 and "windlass[plot]" in logged()[0]


def test_first_failure_is_kept_and_reported_once(tmp_path: Path) -> None:
    path = tmp_path / "failure"
    assert record_failure(path, describe_failure(LossError("not finite at step 3"), rank=1))
    assert not record_failure(path, "what followed from it")
    assert read_failure(path) == "not finite at step 3"
    assert read_failure(path) is None


def test_a_failure_that_could_not_be_written_leaves_room_for_the_next(tmp_path: Path) -> None:
    path, limits = tmp_path / "failure", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # writes fail as on a full disk
    try:
        assert not record_failure(path, "the loss is not finite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    assert record_failure(path, "what followed from it")
    assert [one.name for one in tmp_path.iterdir()] == ["failure"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "/x/y"), ["disk is full", "/x/y"]),
        (MemoryError("no"), ["rank 3 ran out of memory", "smaller micro-batch"]),
        (ZeroDivisionError("by zero"), ["rank 3", "ZeroDivisionError: by zero", "--debug"]),
    ],
)
def test_failure_messages_name_cause_and_fix(error: BaseException, words: list[str]) -> None:
    assert all(word in describe_failure(error, rank=3) for word in words)


def test_first_signal_requests_a_stop_and_its_duplicates_are_ignored() -> None:
    interrupt = StopSignals()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        interrupt.install()
        assert not interrupt.stop_requested
        for number in (
            signal.SIGINT,
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGHUP,
        ):  # the terminal's signals, and the launcher's copies of them
            os.kill(os.getpid(), number)
        assert interrupt.stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_sigterm_after_a_peer_failed_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    interrupt = StopSignals(tmp_path / "failure")
    interrupt._on_signal(signal.SIGTERM, None)
    assert interrupt.stop_requested and not ended
    (tmp_path / "failure").touch()
    interrupt._on_signal(signal.SIGTERM, None)
    assert ended == [1]


@pytest.fixture
def one_rank() -> Any:
    started = not torch.distributed.is_initialized()
    init_distributed()
    yield
    if started:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_ranks_agree_on_the_mean_loss_and_on_the_first_bad_one(one_rank: None, bad: float) -> None:
    fine = [torch.tensor(1.0), torch.tensor(3.0)]
    assert (
        all_reduce_losses(fine, stop_requested=False).loss == 2.0
        and all_reduce_losses(fine, stop_requested=False).first_non_finite is None
    )
    assert (
        all_reduce_losses(fine, stop_requested=True).stop_requested
        and not all_reduce_losses(fine, stop_requested=False).stop_requested
    )
    assert all_reduce_losses([*fine, torch.tensor(bad), torch.tensor(bad)], stop_requested=False).first_non_finite == (
        0,
        2,
    )
    assert all_reduce_sum([0.5, 2.0], torch.device("cpu")) == [0.5, 2.0]


def plan_in(folder: Path) -> TrainingPlan:
    folder.mkdir(exist_ok=True)
    return TrainingPlan(
        out=str(folder), config={}, model="tiny", data=[], tokenizer="", nproc=1, steps=1, seq_len=2, eval_every=1,
        save_every=0, seed=0, prompt=None, sample_tokens=0,
    )  # fmt: skip


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TrainingPlan, Path], Any]], int]:
    """Return a function that runs the parent process. Its argument fakes the ranks and returns their exit status."""
    from windlass.cli.training import train_options

    def launch_of(ranks: Callable[[TrainingPlan, Path], Any]) -> Callable[[TrainingPlan, Path], LaunchExitStatus]:
        def launch(plan: TrainingPlan, failure: Path) -> LaunchExitStatus:
            result = ranks(plan, failure)
            return result if isinstance(result, LaunchExitStatus) else LaunchExitStatus(int(result))

        return launch

    def run(ranks: Callable[[TrainingPlan, Path], Any]) -> int:
        monkeypatch.setattr(train_options, "make_training_plan", lambda options: plan_in(tmp_path / "run"))
        monkeypatch.setattr(command, "_launch_ranks", launch_of(ranks))
        return command.run_training(train_options.TrainOptions(out=tmp_path / "run"))

    return run


def test_parent_reports_the_failure_of_a_rank(parent: Any) -> None:
    with pytest.raises(TrainingRunError, match="^the loss is not finite$"):
        parent(lambda plan, failure: record_failure(failure, "the loss is not finite") * 1)
    with pytest.raises(TrainingRunError, match="exit code 9"):
        parent(lambda plan, failure: 9)


@pytest.mark.parametrize("has_result", [True, False])
def test_a_signal_does_not_hide_a_failure(has_result: bool, parent: Any) -> None:
    def ranks(plan: TrainingPlan, failure: Path) -> LaunchExitStatus:
        if has_result:
            plan.result_file.write_text("{}")
        return LaunchExitStatus(7, (RankFailure(0, 7, 0),), interrupted_by=signal.SIGINT)

    with pytest.raises(TrainingRunError, match="exit code 7"):
        parent(ranks)


def test_stopped_run_exits_with_130_and_prints_the_resume_command(
    parent: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def ranks(plan: TrainingPlan, failure: Path) -> int:
        stopped_marker_path(failure).touch()
        return 1

    assert parent(ranks) == 130
    assert "--resume --out" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_exit_code_is_that_of_the_signal(
    parent: Any, number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def saved(plan: TrainingPlan, failure: Path) -> LaunchExitStatus:
        stopped_marker_path(failure).touch()
        return LaunchExitStatus(code, interrupted_by=number)

    assert parent(saved) == code
    assert "--resume --out" in capsys.readouterr().err
    assert parent(lambda plan, failure: LaunchExitStatus(code, interrupted_by=number)) == code
    text = capsys.readouterr().err
    assert "nothing was saved" in text and "--resume" not in text


def test_signal_before_a_save_names_the_existing_checkpoint(parent: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def ranks(plan: TrainingPlan, failure: Path) -> LaunchExitStatus:
        plan.checkpoint_folder.mkdir()
        (plan.checkpoint_folder / "latest").write_text("step3")
        return LaunchExitStatus(130, interrupted_by=signal.SIGINT)

    assert parent(ranks) == 130
    assert "last checkpoint with: windlass train --resume" in capsys.readouterr().err


def test_last_lines_are_the_score_and_the_output_paths(parent: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def ranks(plan: TrainingPlan, failure: Path) -> int:
        result = {"bits_before": 3.456, "bits_after": 1.7, "checkpoint": "c", "picture": "p", "exported": "e"}
        plan.result_file.write_text(json.dumps(result | {"prompt": "def ", "sample": "f():"}))
        return 0

    assert parent(ranks) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4] == "held-out bits per byte 3.46 -> 1.70"
    assert [line.split()[-1] for line in lines[-3:]] == ["c", "p", "e"]


def test_result_of_an_earlier_run_is_not_reported(parent: Any) -> None:
    def ranks(plan: TrainingPlan, failure: Path) -> int:
        assert not plan.result_file.exists()
        return 3

    with pytest.raises(TrainingRunError):
        parent(lambda plan, failure: plan.result_file.write_text("{}") and 3)
    with pytest.raises(TrainingRunError):
        parent(ranks)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tiny model with tied embeddings, and its tokenizer directory."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer(["def f(x): return x"] * 3, 270, folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True, eos_token_id=tokenizer.eos,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), folder


def test_exported_model_loads_with_equal_logits_and_generates_text(llama: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer_dir = llama
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export_model(model, state, tokenizer_dir, tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("def f(x)", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    first = generate_continuation(tmp_path / "hf", "def", max_new_tokens=8, seed=1)
    assert first == generate_continuation(tmp_path / "hf", "def", max_new_tokens=8, seed=1)
    assert generate_continuation(tmp_path / "hf", "", max_new_tokens=100, temperature=0) is not None


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that collects the token ids of every prompt that the test generates from."""
    from windlass.inference.llm import LLM

    seen: list[list[int]] = []
    generate = LLM.generate

    def recorded(llm: LLM, prompts: Any, params: Any) -> Any:
        seen.extend(prompts)
        return generate(llm, prompts, params)

    monkeypatch.setattr(LLM, "generate", recorded)
    return seen


def test_an_answer_is_shortened_to_the_room_that_the_prompt_leaves(
    llama: Any, tmp_path: Path, prompts: list[list[int]], logged: Callable[[], list[str]]
) -> None:
    model, tokenizer_dir = llama
    export_model(model, dict(model.state_dict()), tokenizer_dir, tmp_path / "hf")
    prompt = "xyz" * 8  # no merge applies: 24 tokens in a window of 32
    fitting = generate_continuation(tmp_path / "hf", prompt, max_new_tokens=8, seed=3)
    assert not any("the text ends" in line for line in logged())
    assert generate_continuation(tmp_path / "hf", prompt, max_new_tokens=100, seed=3) == fitting
    assert any("the text ends after 8 of 100 new tokens" in line for line in logged())
    assert [len(ids) for ids in prompts] == [24, 24]
    with pytest.raises(RequestError, match="the prompt has 32 tokens; the model takes 32"):
        generate_continuation(tmp_path / "hf", "yyyy" * 8, max_new_tokens=1)


def test_an_answer_that_ends_by_an_error_raises_it(llama: Any, tmp_path: Path) -> None:
    model, tokenizer_dir = llama
    broken = {name: torch.full_like(tensor, math.nan) for name, tensor in model.state_dict().items()}
    export_model(model, broken, tokenizer_dir, tmp_path / "hf")
    with pytest.raises(ModelError, match="the highest logit of the model is nan"):
        generate_continuation(tmp_path / "hf", "def", max_new_tokens=2, check_at_load=False)


def test_a_prompt_begins_with_the_tokens_that_the_tokenizer_adds(
    llama: Any, tmp_path: Path, prompts: list[list[int]]
) -> None:
    model, tokenizer_dir = llama
    export_model(model, dict(model.state_dict()), tokenizer_dir, tmp_path / "hf")
    generate_continuation(tmp_path / "hf", "def", max_new_tokens=1)
    file = tmp_path / "hf" / "tokenizer.json"
    begins = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}
    token = {"id": "<|pad|>", "ids": [1], "tokens": ["<|pad|>"]}
    template = {"type": "TemplateProcessing", "single": [begins, {"Sequence": {"id": "A", "type_id": 0}}]}
    template |= {"pair": [begins, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<|pad|>": token}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": template}))
    for prompt in ("def", ""):
        generate_continuation(tmp_path / "hf", prompt, max_new_tokens=1)
    assert prompts[1:] == [[1, *prompts[0]], [1]]


def test_weights_that_do_not_fit_are_not_exported(llama: Any, tmp_path: Path) -> None:
    model, tokenizer_dir = llama
    state = dict(model.state_dict())
    del state["model.norm.weight"]
    with pytest.raises(CheckpointError, match="model.norm.weight"):
        export_model(model, state, tokenizer_dir, tmp_path / "hf")
    assert not any(tmp_path.iterdir())


def test_failed_export_keeps_the_former_export(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer_dir = llama
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "old").touch()

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(CheckpointError, match=r"No space left.*free some space"):
        export_model(model, dict(model.state_dict()), tokenizer_dir, tmp_path / "hf")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["hf", "old"]


def test_an_error_of_the_model_is_not_reported_as_a_full_disk(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer_dir = llama

    def wrong(*arguments: Any, **options: Any) -> None:
        raise TypeError("an attribute of the configuration is not JSON")

    monkeypatch.setattr(type(model), "save_pretrained", wrong)
    with pytest.raises(TypeError, match="not JSON"):
        export_model(model, dict(model.state_dict()), tokenizer_dir, tmp_path / "hf")
    assert not any(tmp_path.iterdir())


def test_directory_replaces_another(tmp_path: Path) -> None:
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}").touch()
    replace_directory(tmp_path / "new", tmp_path / "target")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["of_new", "target"]


def test_a_directory_replaces_another_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(path: Path) -> None:
        raise OSError(39, "Directory not empty")

    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of_{name}").touch()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", busy)
        replace_directory(tmp_path / "new", tmp_path / "target")
    assert os.listdir(tmp_path / "target") == ["of_new"]
    assert ".target.previous is no longer needed, but could not be removed" in caplog.text


def test_the_only_copy_of_a_directory_survives_a_replacement_that_fails(tmp_path: Path) -> None:
    """A process was stopped between a replacement's two renames, and the next replacement has no source to rename."""
    (tmp_path / ".target.previous").mkdir()
    (tmp_path / ".target.previous" / "only").touch()
    with pytest.raises(FileNotFoundError):
        replace_directory(tmp_path / "missing", tmp_path / "target")
    assert os.listdir(tmp_path / "target") == ["only"]


def test_generation_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        generate_continuation(tmp_path, "x", max_new_tokens=1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_packing_unwinds(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.cli.training import train_options

    inherited = signal.signal(number, signal.SIG_DFL)  # a process keeps SIGHUP ignored if it was, e.g. by nohup
    cleaned: list[bool] = []

    def packing(options: Any) -> TrainingPlan:
        try:
            os.kill(os.getpid(), number)
            time.sleep(30)
        finally:
            cleaned.append(True)
        return plan_in(tmp_path)

    monkeypatch.setattr(train_options, "make_training_plan", packing)
    try:
        with pytest.raises(SystemExit) as ended:
            command.run_training(train_options.TrainOptions(out=tmp_path))
        assert ended.value.code == 128 + number and cleaned
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, inherited)


def test_killed_rank_is_reported_without_secondary_failures(parent: Any) -> None:
    def ranks(plan: TrainingPlan, failure: Path) -> LaunchExitStatus:
        record_failure(failure, "connection reset by peer")
        return LaunchExitStatus(137, (RankFailure(1, -9, 0), RankFailure(0, 1, 0)))

    with pytest.raises(TrainingRunError, match="^rank 1 was ended by SIGKILL .*memory"):
        parent(ranks)
    with pytest.raises(TrainingRunError, match="SIGSEGV, a crash"):
        parent(lambda plan, failure: LaunchExitStatus(139, (RankFailure(0, -11, 0),)))


def test_failing_rank_sends_its_reason_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails reports the failure to the watchdog.

    The rank exits without the exception hook, so without its own report the others would count it as killed.
    """
    from windlass.cli.training import train_rank

    results: list[str] = []
    monkeypatch.setattr(train_rank.watchdog, "report_failure", lambda error: results.append(type(error).__name__))
    assert train_rank.run_rank(tmp_path / "no plan", tmp_path / "failure") == 1
    assert results == ["CheckpointError"]


@pytest.mark.parametrize(
    ("option", "value"), [("temperature", -1.0), ("temperature", float("nan")), ("max_new_tokens", 0), ("top_p", 2.0)]
)
def test_sampling_option_out_of_range_is_named(option: str, value: float, tmp_path: Path) -> None:
    requested: dict[str, Any] = {"max_new_tokens": 8, option: value}
    with pytest.raises(ConfigError) as raised:
        generate_continuation(tmp_path, "def", **requested)
    text = str(raised.value)
    assert text.startswith(f"{option} (--{option.replace('_', '-')}) is {value}") and "write " in text
    assert text.count("--") == 1, "the others are well"
