"""`aio_handle`: tensors to files and back, at once or beside the computation, by threads of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from windlass.base.errors import StorageError
from windlass.base.native_memory import native_access_problem

_ALIGNMENT = 512


class aio_handle:
    """Reads and writes whole tensors in blocks, several at once.

    Data go through the system's page cache, so nothing need be aligned. Calls that are asynchronous return at once;
    `wait` waits for all of them.

    Args:
        block_size: bytes of one read or write.
        queue_depth, single_submit, overlap_events: kept and given back; the system orders its own queue.
        intra_op_parallelism: threads that share one tensor.

    Raises:
        StorageError: a size that is not positive.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        if min(block_size, queue_depth, intra_op_parallelism) < 1:
            raise StorageError(
                f"aio_handle: block_size {block_size}, queue_depth {queue_depth} and intra_op_parallelism "
                f"{intra_op_parallelism} must each be at least 1"
            )
        self._block_size, self._queue_depth = block_size, queue_depth
        self._single_submit, self._overlap_events = single_submit, overlap_events
        self._threads = intra_op_parallelism
        self._pool = ThreadPoolExecutor(intra_op_parallelism, thread_name_prefix="windlass-aio")
        self._in_flight: list[tuple[list[Future[int]], int]] = []

    def get_block_size(self) -> int:
        return self._block_size

    def get_queue_depth(self) -> int:
        return self._queue_depth

    def get_single_submit(self) -> bool:
        return self._single_submit

    def get_overlap_events(self) -> bool:
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._threads

    def get_alignment(self) -> int:
        """What the size of a tensor to be shared by the threads should be a multiple of, in bytes."""
        return _ALIGNMENT * self._threads

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill `buffer` from a file; 1 when it is done.

        Raises:
            StorageError: the buffer is not contiguous in host memory, or the file is shorter.
        """
        return self._run_sync(False, buffer, filename, file_offset)

    def sync_pwrite(
        self, buffer: torch.Tensor, filename: str | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Write `buffer` into a file, which is made if need be, or is open under a number; 1 when it is done."""
        return self._run_sync(True, buffer, _file_path(filename, fd), file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start what `sync_pread` does; 0. The buffer is not to be touched before `wait`."""
        return self._run_async(False, buffer, filename, file_offset)

    def async_pwrite(
        self, buffer: torch.Tensor, filename: str | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Start what `sync_pwrite` does; 0. The buffer is not to be touched before `wait`."""
        return self._run_async(True, buffer, _file_path(filename, fd), file_offset)

    def pread(
        self, buffer: torch.Tensor, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0
    ) -> int:
        """`async_pread` or `sync_pread`; the length is always checked."""
        return (self.async_pread if asynchronous else self.sync_pread)(buffer, filename, file_offset)

    def pwrite(
        self, buffer: torch.Tensor, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0
    ) -> int:
        """`async_pwrite` or `sync_pwrite`."""
        return (self.async_pwrite if asynchronous else self.sync_pwrite)(buffer, filename, file_offset)

    def read(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """As `sync_pread`; the number of bytes."""
        self.sync_pread(buffer, filename, file_offset)
        return buffer.nbytes

    def write(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """As `sync_pwrite`; the number of bytes."""
        self.sync_pwrite(buffer, filename, file_offset)
        return buffer.nbytes

    def wait(self) -> int:
        """Wait for all that was started; how many calls that were.

        Raises:
            OSError, StorageError: what one of them failed with.
        """
        started, self._in_flight = self._in_flight, []
        try:
            for parts, _ in started:
                for part in parts:
                    part.result()
        finally:
            for parts, file in started:
                for part in parts:
                    with contextlib.suppress(Exception):  # the first failure is on its way already
                        part.result()
                os.close(file)
        return len(started)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Host memory `[num_elem]` of the example's dtype, page-locked where there is a GPU."""
        return torch.empty(num_elem, dtype=example_tensor.dtype, pin_memory=torch.cuda.is_available())

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """True: its memory goes with it."""
        return True

    def _run_sync(self, write: bool, buffer: torch.Tensor, filename: str, offset: int) -> int:
        parts, file = self._submit(write, buffer, filename, offset)
        try:
            failures = [failure for part in parts if (failure := part.exception()) is not None]
        finally:
            os.close(file)
        if failures:
            raise failures[0]
        return 1

    def _run_async(self, write: bool, buffer: torch.Tensor, filename: str, offset: int) -> int:
        self._in_flight.append(self._submit(write, buffer, filename, offset))
        return 0

    def _submit(self, write: bool, buffer: torch.Tensor, filename: str, offset: int) -> tuple[list[Future[int]], int]:
        data = _buffer_bytes(buffer, filename)
        flags = os.O_WRONLY | os.O_CREAT if write else os.O_RDONLY
        file = os.open(filename, flags | os.O_CLOEXEC, 0o644)
        move = _write_all if write else _read_all
        blocks = _block_ranges(len(data), self._block_size)
        return [
            self._pool.submit(move, file, data[first:last], offset + first, filename) for first, last in blocks
        ], file


def aio_read(buffer: torch.Tensor, filename: str, block_size: int = 1 << 20, *ignored: object) -> int:
    """Fill a tensor from a file; 1."""
    return aio_handle(block_size).sync_pread(buffer, filename)


def aio_write(buffer: torch.Tensor, filename: str, block_size: int = 1 << 20, *ignored: object) -> int:
    """Write a tensor to a file; 1."""
    return aio_handle(block_size).sync_pwrite(buffer, filename)


def _file_path(name: str | int | None, number: int | None) -> str:
    """A file by its name, or by the number under which it is open; that one may be open for aligned data alone."""
    given = name if number is None else number
    if given is None:
        raise StorageError("aio_handle: no file was named; pass filename, or fd")
    return f"/proc/self/fd/{given}" if isinstance(given, int) else given


def _buffer_bytes(buffer: torch.Tensor, filename: str) -> memoryview:
    if why := native_access_problem(buffer):
        raise StorageError(f"the tensor for {filename} of shape {tuple(buffer.shape)} {why}")
    return buffer.detach().view(-1).view(torch.uint8).numpy().data


def _block_ranges(nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, nbytes, size):
        yield first, min(nbytes, first + size)


def _read_all(file: int, data: memoryview, offset: int, name: str) -> int:
    done = 0
    while done < len(data):
        got = os.preadv(file, [data[done:]], offset + done)
        if got == 0:
            raise StorageError(f"{name} ends at byte {offset + done}, {len(data) - done} bytes before the tensor does")
        done += got
    return done


def _write_all(file: int, data: memoryview, offset: int, name: str) -> int:
    done = 0
    while done < len(data):
        done += os.pwritev(file, [data[done:]], offset + done)
    return done
