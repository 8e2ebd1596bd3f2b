"""Small files that appear whole: written under a name of their own beside the target, then renamed."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

PARTIAL_SUFFIX = ".part"


def temporary_path_beside(path: Path) -> Path:
    """A hidden name in the directory of `path` that no other process uses. Create it exclusively (mode "x", O_EXCL)."""
    stem = path.name.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")
    return path.with_name(f".{stem}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")


def write_atomically(path: Path, data: str | bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write `path`, which is replaced at once by all of `data`. A link at `path` is replaced, never written through.

    Args:
        mode: permissions, from which the umask is taken.
        durable: return when the bytes are on the disk; the name needs `sync_directory` besides.

    Raises:
        OSError: it cannot be written; `path` is as it was.
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
        with suppress(OSError):  # the error that ended the writing is the one to tell
            temporary.unlink()
        raise
