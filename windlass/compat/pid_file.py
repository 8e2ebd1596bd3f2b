"""File with the process id of the launcher, as DeepSpeed's `--save_pid` writes it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from windlass.base.atomic_file import write_atomically
from windlass.launch.launch_errors import LaunchError


@contextlib.contextmanager
def pid_file(wanted: bool) -> Iterator[None]:
    """Keep a file `PID.deepspeed` in the directory for temporary files during the `with` block, if `wanted`.

    Raises:
        LaunchError: the file cannot be written.
    """
    if not wanted:
        yield
        return
    path = Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    try:
        # Another user can guess the name and put a link there: it is replaced, not followed.
        write_atomically(path, str(os.getpid()))
    except OSError as error:
        raise LaunchError(
            f"--save_pid: {path} cannot be written ({error.strerror}); if it is another user's, set TMPDIR to a "
            "directory of your own, or leave --save_pid out"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
