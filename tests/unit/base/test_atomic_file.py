"""Tests that new files and directories are not world-writable, under any umask."""

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


def test_files_of_monitors_and_reports_are_not_world_writable(umask: int, tmp_path: Path) -> None:
    """A script that no command of windlass started has the caller's umask, which may allow writing by others."""
    from windlass.compat.flops_profiler import _write_lines
    from windlass.compat.rank_logging import print_json_dist
    from windlass.compat.runtime_functions import ensure_directory_exists
    from windlass.observe.monitor_writers import TensorBoardWriter

    pytest.importorskip("tensorboard")
    root = tmp_path / "out"
    TensorBoardWriter(root / "a" / "events").close()
    _write_lines(["1"], str(root / "b" / "report.txt"))
    ensure_directory_exists(str(root / "c" / "name"))
    print_json_dist({}, ranks=[-1], path=str(root / "json"))
    written = [root, *root.rglob("*")]
    assert len(written) == 8
    assert not any(path.stat().st_mode & stat.S_IWOTH for path in written)
