"""Opening of files that others may have planted: regular files only, and nothing that makes the reader wait."""

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
        within: the directory that a link may not lead out of; None: links are followed anywhere.

    Raises:
        OSError: it cannot be opened, is no regular file (a pipe is refused, never waited for), or is a link that leads
            out of `within`. `strerror` says which.
    """
    real = path if root is None else resolve_within(path, root)
    _require_regular(os.stat(real).st_mode, path)  # first, since to open a device can have effects of its own
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(real, flags if root is None else flags | getattr(os, "O_NOFOLLOW", 0))
    try:
        _require_regular(os.fstat(descriptor).st_mode, path)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, root: Path | None = None) -> bytes:
    """The bytes of a regular file. Raises OSError as `open_regular` does."""
    with open_regular(path, root) as file:
        return file.read()


def resolve_within(path: Path, root: Path) -> Path:
    """The file that `path` is, with all links resolved. Raises OSError where that lies outside of `within`."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(root)):
        raise OSError(errno.ELOOP, f"it is a link to {real}, outside of {root}", str(path))
    return real


def _require_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _SPECIAL_KINDS if is_kind(mode)), "a special file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
