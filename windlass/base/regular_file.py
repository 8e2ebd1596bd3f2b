"""Safe opening of untrusted paths: regular files only, without blocking."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_SPECIAL_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(path: Path, root: Path | None = None) -> BufferedReader:
    """Open the regular file `path` for reading.

    Args:
        root: directory that must contain the resolved path; None: symbolic links may lead anywhere.

    Raises:
        OSError: the file can't be opened, is not a regular file (a pipe is refused without blocking), or resolves to a
            path outside `root`. `strerror` gives the reason.
    """
    real = path if root is None else resolve_within(path, root)
    _require_regular(os.stat(real).st_mode, path)  # check before opening, since opening a device can have side effects
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(real, flags if root is None else flags | getattr(os, "O_NOFOLLOW", 0))
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, root: Path | None = None) -> bytes:
    """Return the bytes of a regular file. Raises OSError as `open_regular` does."""
    with open_regular(path, root) as file:
        return file.read()


def resolve_within(path: Path, root: Path) -> Path:
    """Resolve all symbolic links of `path`. Raises OSError if the result is outside `root`."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(root)):
        raise OSError(errno.ELOOP, f"it is a link to {real}, outside of {root}", str(path))
    return real


def _require_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _SPECIAL_KINDS if is_kind(mode)), "a special file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
