"""`windlass check` as a command: everything wrong at once, the resolved table, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

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


def test_a_good_configuration_prints_the_resolved_table(tmp_path: Path) -> None:
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
        "parameter bf16, compute bf16, accumulate fp32, reduce fp32, master fp32, state fp32",
        "parameters device, optimizer states device",
        "reduce 500,000,000",
        "AdamW weight_decay=0.0, lr=0.1",
        "optimizer.params.torch_adam: ",
    ):
        assert words in text, words


def test_everything_wrong_is_printed_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"train_batch_size": 3, "zero_optimisation": {}, "fp16": {"enabled": true, "hysteresis": 1.5},\n'
        '"bf16": {"enabled": true}, "flops_profiler": {"enabled": true}, "zero_optimization": {"mics_shard_size": 3}}',
    )
    code, text = run(path, world="2")
    assert code == 1
    for words in (
        "unknown key (1)",
        "zero_optimisation: unknown key; nearest is zero_optimization (line 1)",
        "fp16.hysteresis: 1.5 does not fit",
        "contradiction (1)",
        "flops_profiler.enabled = true: not yet built",
        "train_batch_size 3 is not divisible",
        "WORLD_SIZE in the environment",
        "mics_shard_size = 3 does not divide the world size 2",
        "6 to mend",
        "stage       0",
    ):
        assert words in text, words


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_what_cannot_be_read_is_one_message(tmp_path: Path, text: str | None) -> None:
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


def test_disks_are_looked_at_and_left_as_they_are(tmp_path: Path) -> None:
    code, text = run(write(tmp_path, _offloaded(tmp_path / "new" / "deep")))
    assert code == 0
    assert f"disk        {tmp_path}/new/deep (" in text and " free" in text
    assert not (tmp_path / "new").exists()


def test_a_path_that_is_a_file_is_to_be_mended(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, text = run(write(tmp_path, _offloaded(tmp_path, tmp_path / "file", tmp_path / "file" / "below")))
    assert code == 1
    assert "disks that this machine cannot use (2)" in text and "2 to mend" in text
    assert f"no disk tier at {tmp_path}/file: ENOTDIR" in text and "name a directory (nvme_path)" in text


def test_a_path_that_may_not_be_written_to_is_to_be_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    code, text = run(write(tmp_path, _offloaded(tmp_path)))
    assert code == 1 and f"no disk tier at {tmp_path}: EACCES" in text and "may write to" in text


def test_memory_that_looks_like_a_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.storage.prospect.filesystem_of", lambda path: "tmpfs")
    code, text = run(write(tmp_path, _offloaded(tmp_path)))
    assert code == 0 and "tmpfs" in text and "this is memory" in text
