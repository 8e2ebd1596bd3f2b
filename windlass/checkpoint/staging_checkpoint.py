"""Checkpoint under construction in a staging directory, and removal of staging directories whose writer died."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import secrets
import sys
import time
import weakref
from pathlib import Path

from windlass.base.atomic_file import make_directory
from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.base.regular_file import read_regular
from windlass.checkpoint.checkpoint_directory import (
    LATEST,
    disk_errors,
    fsync_directory,
    is_checkpoint,
    release_lock,
    remove_tag,
    rename_lock,
    replaced_path,
    to_printable,
)
from windlass.storage.process_directory import process_start_time

_SUFFIX = ".writing"
_LOCK = ".writer"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_ATTEMPTS = 8


class StagingCheckpoint:
    """Hidden directory `.TAG.XXXXXXXX.writing`, initially empty, which becomes `TAG` or is removed.

    [Note: abandoned staging checkpoints] Every attempt has a unique name, so that a rank of a dead run cannot affect
    the next one. Rank 0 locks a file in its staging directory while its process runs. If another process can take that
    lock, the writer has ended, whichever host it ran on, and the process removes the directory. A locked one stays. If
    the file system has no locks, the file records its writer, so that writers that died on this host are recognized.

    Args:
        directory: directory of all checkpoints; created if missing.

    Raises:
        CheckpointError: the directory cannot be created, `tag` exists and is not a checkpoint, or another job is saving
            the tag.
    """

    def __init__(self, directory: Path, tag: str) -> None:
        self._directory, self._tag = directory, tag
        final, former = directory / tag, replaced_path(directory, tag)
        with disk_errors(directory / f".{tag}{_SUFFIX}", 0):
            make_directory(directory)
            if final.exists() and not is_checkpoint(final) and not (final.is_dir() and not any(final.iterdir())):
                raise CheckpointError(
                    f"{final} exists and is not a windlass checkpoint; remove it or choose another tag"
                )
            if is_checkpoint(former) and not is_checkpoint(final):
                with rename_lock(directory):  # wait: the save that moved the old checkpoint away may still be running
                    _restore_replaced(former, final)
            _warn_concurrent_writers(directory, tag, remove_stale_staging(directory))
            self.path, lock = _create_staging(directory, tag)
        self._release = weakref.finalize(self, _close, lock, os.getpid())

    def commit(self) -> Path:
        """Rename the directory to the tag, and return the path.

        An earlier checkpoint of that tag stays intact until then. If the tag is a symbolic link, the link is replaced,
        and its target stays.
        """
        final, former = self._directory / self._tag, replaced_path(self._directory, self._tag)
        with disk_errors(final, 0), rename_lock(self._directory):
            fsync_directory(self.path)
            if moved := os.path.lexists(final):
                os.rename(final, former)
            try:
                os.rename(self.path, final)
            except OSError:
                if moved:
                    os.rename(former, final)
                raise
            # remove the lock file after the rename: without it, another run would take this writer for dead
            (final / _LOCK).unlink(missing_ok=True)
            fsync_directory(self._directory)
        if moved:
            _remove(former)
        self._release()
        return final

    def discard(self) -> None:
        """Remove the directory after a failed save. A failure of the removal is only logged."""
        _remove(self.path)
        self._release()


def remove_stale_staging(directory: Path) -> list[Path]:
    """Remove staging directories whose writer is gone, and leftovers of replaced checkpoints.

    Return the staging directories of live writers.
    """
    living: list[Path] = []
    for path in directory.glob(".*.replaced"):
        if (path.is_dir() or path.is_symlink()) and is_checkpoint(directory / path.name[1 : -len(".replaced")]):
            _remove(path)
    for path in [path for path in directory.iterdir() if path.name.startswith(".") and path.name.endswith(_SUFFIX)]:
        if not path.is_dir() or path.is_symlink():
            continue
        lock: int | None = None
        try:
            if (lock := _try_lock(path)) is None:
                living.append(path)
                continue
        except FileNotFoundError:  # finished meanwhile, or removed by another run
            continue
        except OSError as error:
            if error.errno not in _NO_LOCKS or not _writer_died_here(path):
                logger.warning("%s is not removed, because the process that writes it may still run: %s", path, error)
                continue
        try:
            if _remove(path):
                logger.info("removed %s, left behind by a run that died", path)
        finally:
            _close(lock, os.getpid())
    return living


def _restore_replaced(former: Path, final: Path) -> None:
    """Rename the replaced checkpoint `former` back to its tag, unless the save that replaced it has completed."""
    if is_checkpoint(former) and not is_checkpoint(final):
        if final.is_symlink():
            final.unlink()
        elif final.exists():
            final.rmdir()  # an empty directory
        os.rename(former, final)


_WARNED_WRITERS: set[str] = set()


def _warn_concurrent_writers(directory: Path, tag: str, others: list[Path]) -> None:
    """Log a warning for other jobs that save into the same directory now, once for each.

    Raises:
        CheckpointError: another job is saving the same tag.
    """
    for path in others:
        process, other = _read_writer(path)
        if process == _process_identity().strip():
            continue
        if re.fullmatch(rf"\.{re.escape(tag)}\.\w{{8}}{re.escape(_SUFFIX)}", path.name):
            raise CheckpointError(
                f"another job is saving the checkpoint {directory / tag} now: {other}. Nothing was written; end that "
                "job, or give each job a directory of its own"
            )
        if other not in _WARNED_WRITERS:
            _WARNED_WRITERS.add(other)
            logger.warning(
                "another job saves into %s too: %s. Both write %r there, and the later one counts; give each job a "
                "directory of its own",
                directory,
                other,
                LATEST,
            )


def _read_writer(staging: Path) -> tuple[str, str]:
    """Return the identity and the description of the process that writes a staging directory."""
    try:
        process, _, description = read_regular(staging / _LOCK, staging).decode("utf-8", "replace").partition("\n")
    except OSError:
        process, description = "", ""
    return process.strip(), to_printable(description.strip()) or f"the writer of {staging.name}"


def _remove(path: Path) -> bool:
    """Remove a directory, or a link to one, that is no longer needed. A failure is logged and not raised."""
    try:
        remove_tag(path)
    except FileNotFoundError:  # removed by another run
        return False
    except OSError as error:
        logger.warning("%s is no longer needed, but could not be removed (%s); remove it by hand", path, error)
        return False
    return True


def _create_staging(directory: Path, tag: str) -> tuple[Path, int | None]:
    """Create a staging directory and take its lock; the lock is None if the file system has none."""
    for _ in range(_ATTEMPTS):
        path = directory / f".{tag}.{secrets.token_hex(4)}{_SUFFIX}"
        make_directory(path, exist_ok=False)
        try:
            lock = _try_lock(path)
        except FileNotFoundError:  # another run removed it before it was locked
            continue
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.debug("%s: no locks on this file system (%s)", path, error)
            (path / _LOCK).write_text(_process_identity() + _describe_process())
            return path, None
        if lock is not None and (path / _LOCK).exists():
            os.write(lock, (_process_identity() + _describe_process()).encode("utf-8", "replace"))
            return path, lock
        _close(lock, os.getpid())
    raise CheckpointError(
        f"{directory}: other runs keep removing the staging directory of {tag!r}; save to another directory"
    )


def _try_lock(staging: Path) -> int | None:
    """Return a descriptor that holds the lock of a staging directory; None if its writer is running."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(staging / _LOCK, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock


def _process_identity() -> str:
    """Return a unique identity of this process: boot id of the host, pid namespace, pid and start time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {process_start_time(os.getpid())}\n"
    except OSError:  # systems other than Linux
        return ""


def _describe_process() -> str:
    """Describe this process for users, in one line without control characters."""
    command = to_printable(" ".join(sys.argv))
    return f"process {os.getpid()} on {platform.node()} ({command}), since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"


def _writer_died_here(staging: Path) -> bool:
    """Return True if the writer of a staging directory ran on this host and is gone."""
    try:
        text, newline, _ = read_regular(staging / _LOCK, staging).decode("utf-8", "replace").partition("\n")
        *place, number, began = text.split()
        return bool(newline) and _process_identity().split()[:2] == place and process_start_time(int(number)) != began
    except (OSError, ValueError):
        return False


def _close(lock: int | None, owner: int) -> None:
    if lock is not None:
        release_lock(lock, owner)
