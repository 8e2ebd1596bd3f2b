"""Atomic writes of small files: a file is written under a temporary name beside its target and then renamed."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

PARTIAL_SUFFIX = ".part"


def temporary_path_beside(path: Path) -> Path:
    """Return a hidden path in the directory of `path` that no other process uses.

    Create it exclusively (mode "x", O_EXCL).
    """
    stem = path.name.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")
    return path.with_name(f".{stem}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")


def write_atomically(path: Path, data: str | bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write `data` to `path` atomically. A symbolic link at `path` is replaced, not followed.

    Args:
        mode: permissions before the umask is applied.
        durable: return after the bytes are on the disk. To make the name durable, sync the directory too.

    Raises:
        OSError: the file can't be written; `path` is unchanged.
    """
    temporary = temporary_path_beside(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    try:
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # raise the error of the write, not that of the cleanup
            temporary.unlink()
        raise
