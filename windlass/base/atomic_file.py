"""New files and directories that only their owner and group may write, and atomic writes of small files.

A file is written under a temporary name in the directory of its target and then renamed.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from windlass.base.log import logger

PARTIAL_SUFFIX = ".part"
# Permissions before the umask is applied: only the owner and the group can write, even under umask 000.
_FILE_MODE, _DIRECTORY_MODE = 0o664, 0o775
_TOKEN_BYTES = 8


def make_directory(path: Path, *, exist_ok: bool = True) -> None:
    """Make a directory and its missing parents.

    Args:
        exist_ok: True: do nothing if the directory exists; False: raise.

    Raises:
        OSError: the directory cannot be made.
    """
    missing = [directory for directory in path.parents if not directory.is_dir()]
    for one in reversed(missing):
        one.mkdir(_DIRECTORY_MODE, exist_ok=True)
    path.mkdir(_DIRECTORY_MODE, exist_ok=exist_ok)


def open_new(path: str | os.PathLike[str], mode: str = "xb", **options: Any) -> Any:
    """Open a file for writing as `open` does. Only owner and group can write a new file, even under umask 000."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, _FILE_MODE), **options)


def temporary_path_beside(path: Path) -> Path:
    """Return a hidden path in the directory of `path` that no other process uses.

    The caller must create it exclusively (mode "x", O_EXCL), so that an existing file is never overwritten.
    """
    return path.with_name(f".{_stem(path)}.{secrets.token_hex(_TOKEN_BYTES)}{PARTIAL_SUFFIX}")


def temporary_paths_beside(path: Path) -> list[Path]:
    """Return the files in the directory of `path` that `temporary_path_beside(path)` named."""
    token = "[0-9a-f]" * (2 * _TOKEN_BYTES)
    return list(path.parent.glob(f".{glob.escape(_stem(path))}.{token}{PARTIAL_SUFFIX}"))


def _stem(path: Path) -> str:
    return path.name.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")


def write_atomically(path: Path, data: str | bytes, *, mode: int = _FILE_MODE, durable: bool = False) -> None:
    """Write `data` to `path` atomically. A symbolic link at `path` is replaced, not followed.

    Args:
        mode: permissions before the umask is applied.
        durable: True: return only once the bytes are on the disk. To make the name durable, sync the directory too.

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


def write_output(path: Path, data: str | bytes) -> None:
    """Write `data` to a path that the user named: atomically to a file, and in place to a pipe or a device, which a
    rename would replace.

    Raises:
        OSError: the data can't be written.
    """
    if path.exists() and not path.is_file():
        with open(path, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
        return
    is_link_of_system = path.absolute().parts[1:2] in (("dev",), ("proc",))  # /dev/stdout while it is sent to a file
    write_atomically(path.resolve() if is_link_of_system else path, data)


def replace_directory(source: Path, target: Path) -> None:
    """Rename a complete directory to `target`, and remove the former directory of this name.

    The name never refers to an incomplete directory. A directory cannot be exchanged atomically, so the
    former one is moved away first, and back if the renaming fails.

    Raises:
        OSError: a directory cannot be renamed, or the files of a stopped process cannot be removed.
    """
    # Avoid the name `.NAME.replaced`, which may be the only copy of a checkpoint that is being replaced.
    old = target.absolute().with_name(f".{target.name}.previous")
    if os.path.lexists(target):
        _remove(old)  # left by a process that was stopped
        os.replace(target, old)
    try:
        os.replace(source, target)
    except OSError:
        if os.path.lexists(old):
            os.replace(old, target)
        raise
    try:
        _remove(old)
    except OSError as error:  # e.g. on NFS, while a process maps a file in `old`
        logger.warning("%s is no longer needed, but could not be removed: %s", old, error)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
