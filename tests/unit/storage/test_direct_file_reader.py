"""Tests that a reader closes its file where it cannot be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from windlass.base.errors import StorageError
from windlass.storage import direct_file_reader


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed by Linux")
def test_the_file_is_closed_if_memory_for_the_probe_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> NoReturn:
        raise StorageError("no memory")

    path = tmp_path / "weights"
    path.write_bytes(bytes(8192))
    monkeypatch.setattr(direct_file_reader, "aligned_buffer", refuse)
    monkeypatch.setattr(os, "O_DIRECT", os.O_NOATIME, raising=False)  # accepted by every file system
    with pytest.raises(StorageError, match="no memory"):
        direct_file_reader.DirectFileReader(path)
    links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert str(path) not in [os.readlink(link) for link in links if link.is_symlink()]
