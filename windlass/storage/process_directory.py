"""Private directory of one process on one disk, and removal of directories that dead processes left behind."""

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

from windlass.base.atomic_file import make_directory
from windlass.base.errors import StorageError
from windlass.base.log import logger
from windlass.storage.disk_error_messages import advice_for, error_name

_NAME = re.compile(r"windlass-(\d+)-(.+)-(\d+)-(\d+)-([A-Za-z0-9._]+)-(\w+)")


class ProcessDirectory:
    """Directory `windlass-<user>-<host>-<process>-<start time>-<label>-<random>` in a folder, with mode 0700.

    The process holds a lock on the directory until it ends. Another process that gets the lock can conclude that the
    owner has ended, even in another container, where the same process number means another process.

    Args:
        folder: created if it does not exist.
        label: purpose of the tier.

    Raises:
        StorageError: the folder is a file or not writable.
    """

    def __init__(self, folder: Path, label: str) -> None:
        try:
            make_directory(folder)
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
        """Remove the directory, whose files are already unlinked. Releasing again does nothing.

        Another directory that is now at the path stays. A missing directory is not an error; other failures are
        logged.
        """
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
            logger.warning("%s could not be removed: %s; %s", self.path, error_name(number), advice_for(number))
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _is_ours(self) -> bool:
        """Return True if the path still refers to the directory that this object created.

        Without a lock, compare only the owner.
        """
        found = os.stat(self.path, follow_symlinks=False)
        if self._lock is not None:
            return os.path.samestat(found, os.fstat(self._lock))
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def unusable_path_error(path: Path, error: OSError) -> StorageError:
    """Return the error for a path at which nothing can be stored, with advice."""
    number = error.errno or errno.EIO
    return StorageError(f"no disk tier at {path}: {error_name(number)}; {advice_for(number)}")


def remove_stale_directories(folder: Path) -> None:
    """Remove directories in `folder` that killed processes of this user on this host left behind."""
    for entry in os.scandir(folder):
        found = _NAME.fullmatch(entry.name)
        if found is None or not entry.is_dir(follow_symlinks=False):
            continue
        user, host, pid, started = found[1], found[2], int(found[3]), found[4]
        try:
            owner = entry.stat(follow_symlinks=False).st_uid
        except FileNotFoundError:  # removed meanwhile, by its process or another rank
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
        except FileNotFoundError:  # another rank removed it first
            continue
        finally:
            os.close(lock)


def process_start_time(pid: int) -> str:
    """Return the start time in kernel ticks, which with `pid` identifies a process; `0` if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "0"
    return text.rpartition(")")[2].split()[19]


def _host() -> str:
    return _sanitize(platform.node())


def _sanitize(name: str) -> str:
    """Replace characters that are not allowed in a part of the directory's name."""
    return re.sub(r"[^A-Za-z0-9.]", "_", name) or "unknown"


def _lock(path: Path) -> int | None:
    """Lock a directory and return a descriptor that holds the lock. None: it is locked already, or can't be locked."""
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
