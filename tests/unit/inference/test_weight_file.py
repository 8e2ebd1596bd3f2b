"""Tests of the lock under which one of several processes makes a weight file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from windlass.inference.weight_file import locked_directory


def test_child_forked_under_the_lock_does_not_keep_it(tmp_path: Path) -> None:
    end, start = os.pipe()
    with locked_directory(tmp_path, "key"):
        if not (child := os.fork()):
            os.close(start)
            os.read(end, 1)
            os._exit(0)
    try:
        with open(tmp_path / "key.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(start)
        os.close(end)
        os.waitpid(child, 0)
