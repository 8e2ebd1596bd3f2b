"""Tests of the command `windlass check`: all errors at once, the resolved table, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from windlass.base.errors import ConfigError
from windlass.cli.check import check

app = typer.Typer()
app.command()(check)


def run(*arguments: str, world: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"WORLD_SIZE": world}, catch_exceptions=False)
    return result.exit_code, result.output


def write(folder: Path, text: str) -> str:
    path = folder / "ds.json"
    path.write_text(text)
    return str(path)


def test_valid_configuration_prints_the_resolved_table(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"train_batch_size": 32, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "mics_shard_size": 2},'
        ' "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": true}}}',
    )
    code, text = run(path, "--world-size", "4")
    assert code == 0
    for words in (
        "world size  4 (--world-size)",
        "batch       32 = micro 8 x accumulation 1 x 4 ranks",
        "axes        pp 1 x dp_replicate 2 x dp_shard 2 x ep 1 x sp 1 x tp 1",
        "stage       3",
        "param_dtype bf16, compute_dtype bf16, accumulation_dtype fp32, reduce_dtype fp32, "
        "master_dtype fp32, state_dtype fp32",
        "parameters device, optimizer states device",
        "reduce 500,000,000",
        "AdamW weight_decay=0.0, lr=0.1",
        "optimizer.params.torch_adam: ",
    ):
        assert words in text, words


def test_all_errors_are_printed_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"train_batch_size": 3, "zero_optimisation": {}, "fp16": {"enabled": true, "hysteresis": 1.5},\n'
        '"bf16": {"enabled": true}, "amp": {"enabled": true}, "zero_optimization": {"mics_shard_size": 3}}',
    )
    code, text = run(path, world="2")
    assert code == 1
    for words in (
        "unknown key (1)",
        "zero_optimisation: unknown key; nearest is zero_optimization (line 1)",
        "fp16.hysteresis: 1.5 does not fit",
        "contradiction (1)",
        "amp.enabled = true: retired",
        "train_batch_size 3 is not divisible",
        "WORLD_SIZE in the environment",
        "mics_shard_size = 3 does not divide the world size 2",
        "6 to fix",
        "stage       0",
    ):
        assert words in text, words


@pytest.mark.parametrize("world", ["two", "8.0"])
def test_a_world_size_of_the_environment_is_not_replaced_by_one(world: str, tmp_path: Path) -> None:
    path = write(tmp_path, '{"train_batch_size": 4}')
    with pytest.raises(ConfigError, match=rf"WORLD_SIZE = '{world}' .* correct or unset it, or give --world-size"):
        run(path, world=world)
    assert run(path, "--world-size", "2", world=world)[0] == 0


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_unreadable_file_is_one_message(tmp_path: Path, text: str | None) -> None:
    path = write(tmp_path, text) if text is not None else str(tmp_path / "missing.json")
    code, output = run(path)
    assert code == 1
    assert path in output and "Traceback" not in output


def test_a_world_of_no_ranks_is_a_message(tmp_path: Path) -> None:
    path = write(tmp_path, '{"train_batch_size": 4}')
    for arguments, world in ((("--world-size", "0"), ""), ((), "0")):
        code, text = run(path, *arguments, world=world)
        assert code == 1 and "the world size 0 is not positive" in text


def _offloaded(*paths: Path) -> str:
    listed = ", ".join(f'"{path}"' for path in paths)
    section = f'{{"device": "nvme", "nvme_path": [{listed}]}}'
    return f'{{"train_batch_size": 1, "zero_optimization": {{"stage": 2, "offload_optimizer": {section}}}}}'


def test_disks_are_inspected_without_changes(tmp_path: Path) -> None:
    code, text = run(write(tmp_path, _offloaded(tmp_path / "new" / "deep")))
    assert code == 0
    assert f"disk        {tmp_path}/new/deep (" in text and " free" in text
    assert not (tmp_path / "new").exists()


def test_path_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, text = run(write(tmp_path, _offloaded(tmp_path, tmp_path / "file", tmp_path / "file" / "below")))
    assert code == 1
    assert "disks that this machine cannot use (2)" in text and "2 to fix" in text
    assert f"no disk tier at {tmp_path}/file: ENOTDIR" in text and "name a directory (nvme_path)" in text


def test_unwritable_path_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write to any path
    code, text = run(write(tmp_path, _offloaded(tmp_path)))
    assert code == 1 and f"no disk tier at {tmp_path}: EACCES" in text and "may write to" in text


def test_tmpfs_path_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.storage.disk_path_info.filesystem_of", lambda path: "tmpfs")
    code, text = run(write(tmp_path, _offloaded(tmp_path)))
    assert code == 0 and "tmpfs" in text and "this is memory" in text


CONFIGS = {
    "trainer": '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"},'
    ' "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": "auto"},'
    ' "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}',
    "accelerate": '{"train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": true},'
    ' "zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}}',
}


def test_trainer_file_passes_and_lists_the_auto_values(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIGS["trainer"])
    for arguments in ((), ("--client", "trainer")):
        code, text = run(path, *arguments)
        assert code == 0, text
        assert ("guessed" in text) == (not arguments)
        for words in (
            "filled in by transformers' Trainer (6)",
            "train_batch_size: ranks x per_device_train_batch_size x gradient_accumulation_steps",
            "optimizer.params.betas: [adam_beta1, adam_beta2]",
            "zero_optimization.reduce_bucket_size: hidden_size x hidden_size of the model",
            'at "auto", left at the default (1)\n  zero_optimization.overlap_comm',
            "batch       filled in by transformers' Trainer",
            ": fine",
        ):
            assert words in text, words
    code, text = run(path, "--client", "none")
    assert code == 1 and 'optimizer.params.lr = "auto": no program filled it in' in text and "bf16.enabled" in text
    code, text = run(path, "--client", "accelerate")
    assert code == 1 and 'optimizer.params.betas = "auto": accelerate fails here' in text
    assert 'zero_optimization.overlap_comm = "auto": accelerate fails here' in text and "2 to fix" in text


def test_accelerate_file_is_detected(tmp_path: Path) -> None:
    code, text = run(write(tmp_path, CONFIGS["accelerate"]))
    assert code == 0 and "filled in by accelerate (4)" in text
    assert "zero_optimization.stage: zero_stage of the DeepSpeedPlugin" in text
    code, text = run(write(tmp_path, '{"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "auto"}}}'))
    assert code == 1 and "transformers' Trainer does not fill it in" in text


def test_single_auto_value_identifies_no_client(tmp_path: Path) -> None:
    code, text = run(write(tmp_path, '{"train_batch_size": 4, "train_micro_batch_size_per_gpu": "auto"}'))
    assert code == 0 and "filled in by" not in text and "4 = micro 4 x accumulation 1 x 1 rank" in text


@pytest.mark.parametrize(
    "text",
    [
        '{\n  "train_batch_size": 4,\n}',
        '{\n  "train_batch_size": 4\n  "steps_per_print": 1\n}',
        '{"train_batch_size": 4} // more',
        '\ufeff{"train_batch_size": 4}',
    ],
)
def test_syntax_that_json_load_refuses_is_a_warning(tmp_path: Path, text: str) -> None:
    code, printed = run(write(tmp_path, text))
    with pytest.raises(json.JSONDecodeError) as refused:
        json.loads(text)
    place = f"line {refused.value.lineno}, column {refused.value.colno}"
    assert code == 0 and "fine (1 warning)" in printed
    assert "not strict JSON: " in printed and ("byte order mark" if text[0] == "\ufeff" else place) in printed
    assert "transformers, accelerate and DeepSpeed read it with json.load" in printed


def test_comments_are_removed_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from windlass.config import load_config

    path = write(
        tmp_path,
        '{"_comment": "a", "//": 1, "comment": [], "$schema": "x", "train_batch_size": 4, "zero_optimization":'
        ' {"_why": {}, "stage": 1}, "optimizer": {"type": "AdamW", "params": {"_note": 1, "lr": 0.1}}}',
    )
    code, text = run(path)
    assert code == 0 and "comments, ignored (6)" in text
    config = load_config(path)
    assert config.comments == (
        *("_comment", "//", "comment", "$schema", "zero_optimization._why", "optimizer.params._note"),
    )
    assert config.optimizer is not None and config.optimizer.params == {"lr": 0.1}


@pytest.mark.parametrize(
    ("total", "lost"), [(15, "nothing will be compressed"), (50, "no step will be without messages"), (500, "")]
)
def test_a_freeze_after_the_end_of_the_schedule_is_a_warning(tmp_path: Path, total: int, lost: str) -> None:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": 100}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": total}},
    }
    code, text = run(write(tmp_path, json.dumps(config)))
    assert code == 0 and ("fine (1 warning)" in text) == bool(lost)
    found = f"var_freeze_step is 100, and scheduler.params.total_num_steps is {total}: {lost} in this run" in text
    assert found == bool(lost)


@pytest.mark.parametrize(("stage", "warns"), [(0, True), (1, False)])
def test_an_offload_without_effect_is_a_warning(tmp_path: Path, stage: int, warns: bool) -> None:
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    code, text = run(write(tmp_path, json.dumps({"train_batch_size": 4, "zero_optimization": zero})))
    assert code == 0 and ("fine (1 warning)" in text) == warns
    assert ('offload_optimizer.device is "cpu" at stage 0' in text and "nothing is offloaded" in text) == warns
    assert f"optimizer states {'device' if warns else 'host'}" in text


def test_features_that_exclude_each_other_are_named_by_their_keys(tmp_path: Path) -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "delayed_update": True}}
    config = {"train_batch_size": 4, "optimizer": {"type": "OneBitAdam"}, "zero_optimization": zero}
    code, text = run(write(tmp_path, json.dumps(config)))
    assert code == 1
    assert "optimizer.type with zero_optimization.offload_optimizer.delayed_update = " in text
    assert "a delayed step cannot send compressed messages; change one of the two" in text
