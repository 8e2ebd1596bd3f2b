"""Tests of staging checkpoints: the next save removes those of dead runs, and never those of running ones."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint import SavedState, read_full, save, staging_checkpoint
from windlass.checkpoint.staging_checkpoint import StagingCheckpoint

STATE = SavedState(tensors={"x": torch.ones(3)})


def test_staging_checkpoints_of_older_versions_and_any_tag_are_removed(tmp_path: Path) -> None:
    for name in (".a.writing", ".b.12345678.writing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_00000.safetensors").write_text("half")
    (tmp_path / ".notes").mkdir()
    (tmp_path / ".file.writing").write_text("no directory")
    (tmp_path / ".link.writing").symlink_to(tmp_path / ".notes")
    save(tmp_path, "t", STATE)
    assert sorted(os.listdir(tmp_path)) == [".file.writing", ".link.writing", ".notes", "latest", "t"]
    assert (
        os.listdir(tmp_path / "t") == ["checkpoint.json", "rank_00000.safetensors"]
        or len(os.listdir(tmp_path / "t")) == 2
    )


def test_staging_checkpoint_removed_before_its_lock_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, seen = staging_checkpoint._try_lock, list[Path]()

    def swept(path: Path) -> int | None:
        seen.append(path)
        if len(seen) == 1:
            shutil.rmtree(path)
        return lock(path)

    monkeypatch.setattr(staging_checkpoint, "_try_lock", swept)
    made = StagingCheckpoint(tmp_path, "t")
    assert len(seen) == 2 and made.path == seen[1] != seen[0] and made.path.is_dir()
    monkeypatch.setattr(staging_checkpoint, "_try_lock", lambda path: shutil.rmtree(path) or lock(path))
    with pytest.raises(CheckpointError, match="other runs keep removing the staging directory of 'u'"):
        StagingCheckpoint(tmp_path, "u")


def test_without_locks_only_staging_checkpoints_of_dead_local_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(staging_checkpoint.fcntl, "flock", refused)
    own = StagingCheckpoint(tmp_path, "own")
    host, space, number, began = (own.path / ".writer").read_text().splitlines()[0].split()
    writers = {
        "unknown": "",
        "elsewhere": f"other {space} {number} 1\n",
        "contained": f"{host} pid:[1] {number} 1\n",
        "half": f"{host} {space} {number} 1",
        "died": f"{host} {space} {number} 1\n",
    }
    for name, text in writers.items():
        (tmp_path / f".{name}.12345678.writing").mkdir()
        (tmp_path / f".{name}.12345678.writing" / ".writer").write_text(text)
    save(tmp_path, "t", STATE)
    left = sorted(path.name.split(".")[1] for path in tmp_path.glob(".*"))
    assert left == ["contained", "elsewhere", "half", "own", "unknown"]
    assert os.listdir(own.commit()) == []


def test_next_save_removes_checkpoints_replaced_by_a_dead_run(tmp_path: Path) -> None:
    save(tmp_path, "t", STATE)
    shutil.copytree(tmp_path / "t", tmp_path / ".t.replaced")
    shutil.copytree(tmp_path / "t", tmp_path / ".gone.replaced")  # the only copy of that tag
    save(tmp_path, "u", STATE)
    assert sorted(os.listdir(tmp_path)) == [".gone.replaced", "latest", "t", "u"]


def test_unremovable_former_checkpoint_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(13, "not yours")

    save(tmp_path, "t", STATE, save_latest=False)
    monkeypatch.setattr(shutil, "rmtree", refused)
    with caplog.at_level("WARNING", logger="windlass"):
        save(tmp_path, "t", SavedState(tensors={"x": torch.zeros(3)}))
    assert ".t.replaced is no longer needed, but could not be removed" in caplog.text
    assert (tmp_path / "latest").read_text() == "t" and not dict(read_full(tmp_path))["x"].any()


def test_failed_rename_keeps_the_former_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refused(old: Path, new: Path) -> None:
        if Path(old).name.endswith(".writing"):
            raise OSError(errno.EIO, "Input/output error")
        rename(old, new)

    save(tmp_path, "t", STATE)
    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(CheckpointError, match="t cannot be written"):
        save(tmp_path, "t", SavedState(tensors={"x": torch.zeros(3)}))
    assert sorted(os.listdir(tmp_path)) == ["latest", "t"] and dict(read_full(tmp_path))["x"].all()
