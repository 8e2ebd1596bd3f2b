"""Tests of the I/O engine in Python threads."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from windlass.storage import python_io_engine
from windlass.storage.extent_allocator import PAGE
from windlass.storage.python_io_engine import PythonIoEngine


@pytest.mark.parametrize(
    ("error", "number"), [(OSError(errno.EAGAIN, "no map"), errno.EAGAIN), (MemoryError(), errno.ENOMEM)]
)
def test_a_block_without_memory_for_its_buffer_fails(
    error: Exception, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread survives the error, and reads the next block, for which there is memory."""
    path = tmp_path / "blocks"
    path.write_bytes(b"a" * PAGE)
    memory = mmap.mmap(-1, 3 * PAGE)
    address = _address(memory) + 1  # not aligned, so it needs the buffer
    file = os.open(path, os.O_RDONLY)
    engine = PythonIoEngine([file], threads=1, block_size=PAGE, alignment=PAGE)
    try:

        def refuse(*_: Any) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(python_io_engine.mmap, "mmap", refuse)
            failed = engine.submit(False, [(0, 0, address, PAGE, 0)])
            assert failed is not None and failed.wait(30)
        assert failed.failure() == (number, 0, 0, 0)
        read = engine.submit(False, [(0, 0, address, PAGE, 0)])
        assert read is not None and read.wait(30) and read.failure() is None
        assert memory[1 : 1 + PAGE] == b"a" * PAGE
    finally:
        engine.close()
        os.close(file)


def _address(memory: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
