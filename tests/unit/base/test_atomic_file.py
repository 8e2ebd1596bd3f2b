"""Tests that new files and directories are writable by no other user, under any umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.base.atomic_file import make_directory, open_new, write_atomically


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_nothing_is_world_writable(umask: int, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    make_directory(folder)
    with open_new(folder / "new") as file:
        file.write(b"1")
    write_atomically(folder / "small", "text")
    for path in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o775 & ~umask
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o664 & ~umask


def test_existing_directories_and_files(tmp_path: Path) -> None:
    make_directory(tmp_path)
    make_directory(Path("."))
    for path, exist_ok in ((tmp_path, False), (tmp_path / "file", True)):
        (tmp_path / "file").touch()
        with pytest.raises(FileExistsError):
            make_directory(path, exist_ok=exist_ok)
    with pytest.raises(FileExistsError):
        open_new(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        make_directory(tmp_path / "file" / "below")
