"""Tests of staging checkpoints: the next save removes those of dead runs, and never those of running ones."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint import SavedState, checkpoint_directory, load, read_full, save, staging_checkpoint
from windlass.checkpoint.checkpoint_directory import find_checkpoint, rename_lock
from windlass.checkpoint.retention import remove_old_checkpoints
from windlass.checkpoint.staging_checkpoint import StagingCheckpoint
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint

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
    assert sorted(os.listdir(tmp_path / "t")) == ["checkpoint.json", "rank_00000.safetensors"]


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
    shutil.copytree(tmp_path / "t", tmp_path / ".gone.replaced")  # the only copy of the tag `gone`
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


def test_child_forked_under_the_lock_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_directory, "_LOCK_TIMEOUT_S", 0.1)
    end, start = os.pipe()
    with rename_lock(tmp_path):
        if not (child := os.fork()):  # as a worker of a DataLoader
            os.close(start)
            os.read(end, 1)
            os._exit(0)
    try:
        with rename_lock(tmp_path) as alone:
            assert alone
    finally:
        os.close(start)
        os.close(end)
        os.waitpid(child, 0)


@pytest.mark.parametrize("target", ["a", "gone"])
def test_tag_that_is_a_link_is_replaced_and_its_target_kept(tmp_path: Path, target: str) -> None:
    save(tmp_path, "a", STATE)
    (tmp_path / "best").symlink_to(target)
    for value in (2.0, 3.0):
        save(tmp_path, "best", SavedState(tensors={"x": torch.full((3,), value)}))
        assert sorted(os.listdir(tmp_path)) == ["a", "best", "latest"]
        assert dict(read_full(tmp_path, "best"))["x"].tolist() == [value] * 3
    assert not (tmp_path / "best").is_symlink() and dict(read_full(tmp_path, "a"))["x"].all()


def test_rotation_of_a_link_removes_the_link_alone(tmp_path: Path) -> None:
    save(tmp_path, "a", STATE)
    (tmp_path / "global_step1").symlink_to("a")
    save(tmp_path, "global_step2", STATE)
    assert remove_old_checkpoints(tmp_path, 1, "global_step2", []) == ["global_step1"]
    assert sorted(os.listdir(tmp_path)) == ["a", "global_step2", "latest"]


def test_reader_and_next_save_wait_for_a_save_between_its_two_renames(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "t", STATE)
    new = StagingCheckpoint(tmp_path, "elsewhere").path
    shutil.copytree(tmp_path / "t", new, dirs_exist_ok=True)
    found: list[object] = []
    with rename_lock(tmp_path):
        os.rename(tmp_path / "t", tmp_path / ".t.replaced")
        readers = [
            threading.Thread(target=lambda: found.append(find_checkpoint(tmp_path, "t"))),
            threading.Thread(target=lambda: found.append(StagingCheckpoint(tmp_path, "t"))),
        ]
        for reader in readers:
            reader.start()
            reader.join(0.1)
            assert reader.is_alive()
        os.rename(new, tmp_path / "t")
    for reader in readers:
        reader.join()
    assert ("t", tmp_path / "t") in found and len(found) == 2
    assert "died" not in caplog.text


def test_checkpoint_replaced_while_it_is_loaded_is_an_error_that_says_so(tmp_path: Path) -> None:
    save(tmp_path, "t", STATE)
    opened = StoredCheckpoint(tmp_path, "t")
    save(tmp_path, "t", SavedState(tensors={"x": torch.zeros(3), "y": torch.zeros(1)}))
    into = SavedState(tensors={"x": torch.full((3,), 7.0)})
    with pytest.raises(
        CheckpointError, match="t was replaced or removed by another save while it was read; load again"
    ):
        load(tmp_path, "t", into, opened=opened)
    assert (into.tensors["x"] == 7).all(), "nothing was overwritten"


def test_read_of_a_replaced_checkpoint_is_not_reported_as_damage(tmp_path: Path) -> None:
    save(tmp_path, "t", STATE)
    said = r"replaced or removed by another save while it was read.*rank_00000"
    with pytest.raises(CheckpointError, match=said), StoredCheckpoint(tmp_path, "t") as stored:
        save(tmp_path, "t", SavedState(tensors={"y": torch.zeros(2)}))
        stored.read_full("x")
