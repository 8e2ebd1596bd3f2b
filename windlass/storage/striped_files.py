"""Files of a disk tier, one on each path, over which the tier's bytes are striped block by block."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from windlass.base.errors import StorageError
from windlass.base.log import logger
from windlass.storage.disk_error_messages import advice_for, error_name, format_bytes
from windlass.storage.extent_allocator import PAGE
from windlass.storage.process_directory import ProcessDirectory, unusable_path_error

_DIRECT = getattr(os, "O_DIRECT", 0)
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")


class StripeSpan(NamedTuple):
    """Range of one file that holds a part of a range of the tier. `start` is the offset of the part in that range."""

    file: int
    offset: int
    start: int
    nbytes: int


@dataclass
class _StripeFile:
    directory: ProcessDirectory
    path: Path
    descriptor: int
    is_direct: bool
    size: int = 0


class StripedFiles:
    """Files that together hold the bytes 0, 1, 2, ...: block `b` is in file `b % len(paths)`.

    [Note: unlinked files] Each file is unlinked as soon as it is open. The kernel frees its space when the process
    ends, for whatever reason, and no other user can open it. The directory stays, so that an administrator can see
    which process uses the disk.

    Args:
        paths: one directory per disk.
        block_size: bytes of a block, a multiple of the page size.
        label: part of the directories' names.

    Raises:
        StorageError: a path can't be used. The message gives the path, the reason and advice. No files are left behind.
    """

    def __init__(self, paths: Sequence[Path], block_size: int, label: str) -> None:
        self._block = block_size
        self._files: list[_StripeFile] = []
        self._end = 0
        try:
            for path in paths:
                self._files.append(_open_stripe(path, label))
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> list[int]:
        return [file.descriptor for file in self._files]

    @property
    def path_names(self) -> list[str]:
        """Paths of the directories, for messages."""
        return [str(file.path) for file in self._files]

    @property
    def directories(self) -> list[Path]:
        """Directories of this process, one on each path."""
        return [file.directory.path for file in self._files]

    @property
    def is_direct(self) -> bool:
        """True if the I/O of all files bypasses the page cache."""
        return all(file.is_direct for file in self._files)

    def memory_alignment(self, ask: Callable[[int], int] | None) -> int:
        """Return the alignment in bytes of addresses that I/O on these files needs; 1 if no file has direct I/O.

        `ask` returns the alignment for a descriptor; 0 if it is unknown.
        """
        direct = [file.descriptor for file in self._files if file.is_direct]
        return max([(ask(descriptor) if ask else 0) or PAGE for descriptor in direct], default=1)

    def locate(self, first: int, last: int) -> list[StripeSpan]:
        """Return the ranges of the files that hold `[first, last)`, in order, split at block boundaries."""
        pieces, at = [], first
        while at < last:
            block, within = divmod(at, self._block)
            end = min(last, at - within + self._block)
            stripe, file = divmod(block, len(self._files))
            pieces.append(StripeSpan(file, stripe * self._block + within, at - first, end - at))
            at = end
        return pieces

    def tier_offset(self, file: int, offset: int) -> int:
        """Return the offset in the tier of the byte at `offset` of a file; the inverse of `locate`."""
        stripe, within = divmod(offset, self._block)
        return (stripe * len(self._files) + file) * self._block + within

    def resize(self, end: int, what: str) -> None:
        """Resize the files to hold exactly `[0, end)`, with all space allocated where the file system supports it.

        Raises:
            StorageError: a disk has too little space or fails. The files keep their sizes.
        """
        if end == self._end:
            return
        sizes = [self._size(index, end) for index in range(len(self._files))]
        self._check_free(sizes, what)
        before = [file.size for file in self._files]
        try:
            for file, size in zip(self._files, sizes, strict=True):
                _resize(file, size)
        except OSError as error:
            number = error.errno or errno.EIO
            for changed, size in zip(self._files, before, strict=True):
                os.ftruncate(changed.descriptor, size)
                changed.size = size
            grown = sum(sizes) - sum(before)
            raise self._no_space_error(file, what, grown, f"{error_name(number)}; {advice_for(number)}") from error
        self._end = end

    def close(self) -> None:
        """Free the space and remove the directories. Closing again does nothing."""
        for file in self._files:
            with contextlib.suppress(OSError):  # the device may be gone
                os.ftruncate(file.descriptor, 0)  # frees the space even if io_uring holds the file longer
            os.close(file.descriptor)
            file.directory.release()
        self._files = []

    def _size(self, index: int, end: int) -> int:
        blocks, rest = divmod(end, self._block)
        turns, more = divmod(blocks, len(self._files))
        return (turns + (index < more)) * self._block + (rest if index == more else 0)

    def _check_free(self, sizes: list[int], what: str) -> None:
        requested: dict[int, int] = defaultdict(int)  # by device, because two paths may be on one disk
        for file, size in zip(self._files, sizes, strict=True):
            disk = os.fstat(file.descriptor).st_dev
            requested[disk] += max(0, size - file.size)
            state = os.fstatvfs(file.descriptor)
            if requested[disk] > state.f_bavail * state.f_frsize:
                raise self._no_space_error(file, what, requested[disk], advice_for(errno.ENOSPC))

    def _no_space_error(self, file: _StripeFile, what: str, asked: int, reason: str) -> StorageError:
        state = os.fstatvfs(file.descriptor)
        free = format_bytes(state.f_bavail * state.f_frsize)
        return StorageError(
            f"no space for {what}: {format_bytes(asked)} more needed on {file.path}, {free} free; {reason}"
        )


def filesystem_of(path: Path) -> str:
    """Return the type of the file system of `path`, e.g. `ext4`; `unknown` if the system does not provide it."""
    where, best, found = os.path.realpath(path), -1, "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            mount = left.split()[4].replace("\\040", " ")
            if len(mount) >= best and (where == mount or where.startswith(mount.rstrip("/") + "/")):
                best, found = len(mount), right.split()[0]
    return found


def _open_stripe(path: Path, label: str) -> _StripeFile:
    claim = ProcessDirectory(path, label)
    name, flags = claim.path / "stripe", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, 0o600)
    except OSError as error:
        claim.release()
        raise unusable_path_error(path, error) from error
    try:
        os.unlink(name)
        file = _StripeFile(claim, path, descriptor, enable_direct_io(descriptor))
    except OSError as error:
        os.close(descriptor)
        claim.release()
        raise unusable_path_error(path, error) from error
    _warn_about_filesystem(file)
    return file


def enable_direct_io(descriptor: int) -> bool:
    """Enable direct I/O, which bypasses the page cache, for an empty file. Return False if the system does not support
    it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        os.pwrite(descriptor, mmap.mmap(-1, PAGE), 0)  # some file systems accept the flag and refuse the I/O
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    os.ftruncate(descriptor, 0)
    return bool(_DIRECT)


def _warn_about_filesystem(file: _StripeFile) -> None:
    kind = filesystem_of(file.path)
    if kind in MEMORY_FILESYSTEMS:
        logger.warning(
            "%s is a %s: this is memory, so offloading to it saves none; name a directory on a disk (nvme_path)",
            file.path,
            kind,
        )
    elif not file.is_direct:
        logger.warning(
            "%s (%s) refuses direct I/O: offloaded tensors also pass through the page cache, which takes memory"
            " and time; name a directory on another file system (nvme_path)",
            file.path,
            kind,
        )


def _resize(file: _StripeFile, size: int) -> None:
    if size <= file.size:
        os.ftruncate(file.descriptor, size)
    else:
        try:
            os.posix_fallocate(file.descriptor, file.size, size - file.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(file.descriptor, size)  # can't preallocate here: a full disk fails a later write
    file.size = size
