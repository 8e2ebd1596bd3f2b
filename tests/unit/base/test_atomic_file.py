"""Tests that new files and directories are not world-writable, under any umask, and of paths that users name."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.base.atomic_file import make_directory, open_new, write_atomically, write_output


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


def test_output_reaches_a_pipe_or_device_and_does_not_replace_it(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_output(pipe, "text")
    assert pipe.is_fifo(), "a rename has replaced the pipe"
    reader.join()
    assert found == [b"text"]
    (tmp_path / "null").symlink_to("/dev/null")
    write_output(tmp_path / "null", b"text")
    assert (tmp_path / "null").is_symlink()
    with open(tmp_path / "redirected", "wb") as stream:  # as /dev/stdout, which links to the file of a redirection
        write_output(Path(f"/dev/fd/{stream.fileno()}"), "text")
    (tmp_path / "file").symlink_to(tmp_path / "redirected")
    write_output(tmp_path / "file", "other")
    assert [(tmp_path / name).read_text() for name in ("redirected", "file")] == ["text", "other"]


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
