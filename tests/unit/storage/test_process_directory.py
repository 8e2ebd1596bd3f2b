"""Tests of scanning a folder while other processes create and remove their directories."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from windlass.storage import process_directory


def test_directory_removed_concurrently_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = process_directory.ProcessDirectory(tmp_path, "peer")
    entries = list(os.scandir(tmp_path))
    assert len(entries) == 1
    there.release()
    monkeypatch.setattr(os, "scandir", lambda folder: entries)
    process_directory.remove_stale_directories(tmp_path)


@pytest.mark.parametrize("what", ["nothing", "a file", "a link", "another directory"])
def test_replacement_at_the_path_is_kept(what: str, tmp_path: Path) -> None:
    ours, kept = process_directory.ProcessDirectory(tmp_path / "disk", "x"), tmp_path / "kept"
    kept.mkdir()
    (kept / "theirs").write_text("theirs")
    ours.path.rmdir()
    if what == "a file":
        ours.path.write_text("theirs")
    elif what == "a link":
        ours.path.symlink_to(kept)
    elif what == "another directory":
        kept.rename(ours.path)
    ours.release()
    ours.release()
    assert ours.path.exists() == (what != "nothing")
    assert [path.read_text() for path in tmp_path.rglob("theirs")] == ["theirs"]


def test_vanished_device_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: Path) -> None:
        raise OSError(errno.EIO, "gone")

    ours = process_directory.ProcessDirectory(tmp_path, "x")
    reported: list[str] = []
    monkeypatch.setattr(process_directory.logger, "warning", lambda text, *values: reported.append(text % values))
    monkeypatch.setattr(shutil, "rmtree", gone)
    ours.release()
    assert len(reported) == 1 and str(ours.path) in reported[0] and "EIO" in reported[0]
