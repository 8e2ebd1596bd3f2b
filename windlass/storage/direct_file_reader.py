"""Reader of parts of an existing file, with large direct-I/O blocks of which many are in flight at once."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from pathlib import Path

import torch

from windlass.base.errors import StorageError
from windlass.storage.disk_error_messages import error_name
from windlass.storage.extent_allocator import PAGE, page_up
from windlass.storage.io_engine import IoRequest, native_module, start_io_engine
from windlass.storage.staging_memory import aligned_buffer

_BLOCK = 1 << 20
_DEPTH = 32
_THREADS = 16
_LARGEST_REGION = 1 << 30  # maximum size of one registered buffer in the kernel


class FileRead:
    """Pending read of a part of a file.

    Args:
        advice: fix of a failed read, for the error message.
    """

    def __init__(self, path: Path, name: str, request: IoRequest, advice: str) -> None:
        self._path, self._name, self._request, self._advice = path, name, request, advice

    def poll(self) -> bool:
        """Return True once the bytes have arrived. Raises as `wait` does."""
        if not self._request.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until the bytes have arrived.

        Raises:
            StorageError: the disk failed, the file is too short, or the reader was closed.
        """
        self.finish()
        failure = self._request.failure()
        if failure is not None:
            number, _, offset, done = failure
            reason = "the file ends before it" if number == errno.ENODATA else error_name(number)
            raise StorageError(
                f"reading {self._name} of {self._path} failed at byte {offset + done}: {reason}; {self._advice}"
            )

    def finish(self) -> None:
        """Wait until the read no longer writes to its memory. Raises no error if the read failed."""
        while not self._request.wait(0.2):  # in slices, so that Ctrl-C is handled
            pass


class DirectFileReader:
    """Reader that bypasses the page cache where the file system allows it.

    Args:
        advice: fix of a failed read, for the error message.

    Raises:
        StorageError: the file cannot be opened, or the I/O engine named by WINDLASS_DISK_ENGINE does not work.
    """

    def __init__(self, path: Path, *, advice: str = "see dmesg for details") -> None:
        self.path, self._advice = path, advice
        self._file, self.is_direct = _open(path)
        try:
            module, _ = native_module()
            ask = None if module is None else module.direct_memory_alignment
            alignment = ((ask(self._file) if ask else 0) or PAGE) if self.is_direct else 1
            started = start_io_engine(
                [self._file],
                requested=None,
                queue_depth=_DEPTH,
                threads=_THREADS,
                block_size=_BLOCK,
                alignment=alignment,
            )
        except BaseException:
            os.close(self._file)
            raise
        self._engine = started.engine
        self._closer = weakref.finalize(self, _close, self._engine, self._file)

    def allocate_buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate `[nbytes]` uint8 memory for fast reads: whole pages, registered with the kernel if possible."""
        tensor, owner = aligned_buffer(nbytes)
        for first in range(0, page_up(nbytes), _LARGEST_REGION):
            size = min(_LARGEST_REGION, page_up(nbytes) - first)
            place = self._engine.add_region(tensor.data_ptr() + first, size)
            if place >= 0:
                weakref.finalize(owner, self._engine.remove_region, place).atexit = False
        return tensor

    def start(self, name: str, offset: int, into: torch.Tensor) -> FileRead:
        """Start to read the bytes at `offset`, as many as `into` has.

        Args:
            name: name of the content, for messages.
            offset: multiple of 4096.
            into: `[bytes]` uint8, page-aligned and of whole pages. Its memory must exist until the read has finished.

        Raises:
            StorageError: the reader is closed.
        """
        address, nbytes = into.data_ptr(), into.numel()
        spans = [
            (0, offset + at, address + at, min(_BLOCK, nbytes - at), 0)  # the last 0: no checksums to compare with
            for at in range(0, nbytes, _BLOCK)
        ]
        request = self._engine.submit(False, spans)
        if request is None:
            raise StorageError(f"{self.path} is closed, so {name} cannot be read; build the engine again")
        return FileRead(self.path, name, request, self._advice)

    def totals(self) -> tuple[int, float]:
        """Return the bytes read so far, and the seconds with reads outstanding."""
        read, _, seconds, _, _ = self._engine.totals()
        return read, seconds

    def close(self) -> None:
        """Cancel waiting reads and wait for those in flight. Closing again does nothing."""
        self._closer()


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    direct = getattr(os, "O_DIRECT", 0)
    try:
        if direct:
            with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
                file = os.open(path, flags | direct)
                opened.callback(os.close, file)
                if _accepts_direct_reads(file):
                    opened.pop_all()
                    return file, True
        return os.open(path, flags), False
    except OSError as error:
        raise StorageError(
            f"{path} cannot be opened: {error_name(error.errno or errno.EIO)}; pass a readable file"
        ) from error


def _accepts_direct_reads(file: int) -> bool:
    probe, _ = aligned_buffer(PAGE)  # some file systems accept O_DIRECT and refuse the I/O
    try:
        os.preadv(file, [probe.numpy().data], 0)
    except OSError as error:
        return error.errno != errno.EINVAL
    return True


def _close(engine: object, file: int) -> None:
    engine.close()  # type: ignore[attr-defined]
    os.close(file)
