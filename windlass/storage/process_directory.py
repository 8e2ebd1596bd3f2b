"""The private directory of one process on one disk, and the removal of those that dead processes left."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import shutil
import stat
import tempfile
from pathlib import Path

from windlass.base.errors import StorageError
from windlass.base.log import logger
from windlass.storage.disk_error_messages import advice_for, error_name

_NAME = re.compile(r"windlass-(\d+)-(.+)-(\d+)-(\d+)-([A-Za-z0-9._]+)-(\w+)")


class ProcessDirectory:
    """`windlass-<user>-<host>-<process>-<start time>-<label>-<random>` under a directory, mode 0700.

    While it lives, the directory is locked: whoever can take the lock knows that its process is gone, also from
    another container, where the same process number means another process.

    Args:
        folder: made if it is not there.
        label: what the tier is for.

    Raises:
        StorageError: the folder is a file, or may not be written to.
    """

    def __init__(self, folder: Path, label: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_stale_directories(folder)
            prefix = (
                f"windlass-{os.getuid()}-{_host()}-{os.getpid()}-{process_start_time(os.getpid())}-{_sanitize(label)}-"
            )
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        except OSError as error:
            raise unusable_path_error(folder, error) from error
        self._lock = _lock(self.path)
        self._released = False

    def release(self) -> None:
        """Remove the directory, which its files have left by now. What somebody else put in its place stays; a device
        that went away, and the directory with it, is no error. Releasing again does nothing."""
        if self._released:
            return
        self._released = True
        try:
            if self._is_ours():
                shutil.rmtree(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            number = error.errno or errno.EIO
            logger.warning("%s stays behind: %s; %s", self.path, error_name(number), advice_for(number))
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _is_ours(self) -> bool:
        """Whether what has the directory's name is still that directory."""
        found = os.stat(self.path, follow_symlinks=False)
        if self._lock is not None:
            return os.path.samestat(found, os.fstat(self._lock))
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def unusable_path_error(path: Path, error: OSError) -> StorageError:
    """The error that says that nothing can be stored at `path`, and what to do."""
    number = error.errno or errno.EIO
    return StorageError(f"no disk tier at {path}: {error_name(number)}; {advice_for(number)}")


def remove_stale_directories(folder: Path) -> None:
    """Remove what processes of this user on this host left in `folder` when they were killed; nobody else's."""
    for entry in os.scandir(folder):
        found = _NAME.fullmatch(entry.name)
        if found is None or not entry.is_dir(follow_symlinks=False):
            continue
        user, host, pid, started = found[1], found[2], int(found[3]), found[4]
        try:
            owner = entry.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:  # its process ended, or another rank was quicker
            continue
        ours = int(user) == os.getuid() == owner and host == _host()
        if not ours or process_start_time(pid) == started:
            continue
        lock = _lock(Path(entry.path))
        if lock is None:
            continue
        try:
            shutil.rmtree(entry.path)
            logger.info("removed %s, which process %d left when it was killed", entry.path, pid)
        except FileNotFoundError:  # another rank was quicker
            continue
        finally:
            os.close(lock)


def process_start_time(pid: int) -> str:
    """When a process began, in the kernel's ticks: with its number, it names a process for good. `0`: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "0"
    return text.rpartition(")")[2].split()[19]


def _host() -> str:
    return _sanitize(platform.node())


def _sanitize(name: str) -> str:
    """Without what a part of the directory's name may not hold."""
    return re.sub(r"[^A-Za-z0-9.]", "_", name) or "unknown"


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a directory; None if somebody else does, or the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
