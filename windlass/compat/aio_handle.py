"""DeepSpeed's `aio_handle`: synchronous and asynchronous file reads and writes of tensors, in threads."""

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
    """Reader and writer of tensors, in blocks that `intra_op_parallelism` threads move.

    Data go through the system's page cache, so buffers and sizes need no alignment. Asynchronous calls return at once;
    `wait` waits for all of them.

    Args:
        block_size: bytes of one read or write.
        queue_depth, single_submit, overlap_events: only stored and returned by their getters; the operating system
            orders the requests.
        intra_op_parallelism: number of threads that share one tensor.

    Raises:
        StorageError: the block size, the queue depth or the number of threads is below 1.
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
        """Return the alignment in bytes recommended for the size of a tensor that the threads share."""
        return _ALIGNMENT * self._threads

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill `buffer` from a file. Return 1 when done.

        Raises:
            StorageError: the buffer is not contiguous in host memory, or the file is too short.
            OSError: the file cannot be read.
        """
        return self._run_sync(False, buffer, filename, file_offset)

    def sync_pwrite(
        self, buffer: torch.Tensor, filename: str | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Write `buffer` to a path, creating the file if needed, or to an open file descriptor. Return 1 when done.

        Raises:
            StorageError: the buffer is not contiguous in host memory, or neither `filename` nor `fd` is passed.
            OSError: the file cannot be written.
        """
        return self._run_sync(True, buffer, _file_path(filename, fd), file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Start `sync_pread` in the background. Return 0. The buffer must not be accessed before `wait`."""
        return self._run_async(False, buffer, filename, file_offset)

    def async_pwrite(
        self, buffer: torch.Tensor, filename: str | int | None = None, file_offset: int = 0, *, fd: int | None = None
    ) -> int:
        """Start `sync_pwrite` in the background. Return 0. The buffer must not be accessed before `wait`."""
        return self._run_async(True, buffer, _file_path(filename, fd), file_offset)

    def pread(
        self, buffer: torch.Tensor, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0
    ) -> int:
        """Call `async_pread` or `sync_pread`. The length is checked even without `validate`."""
        return (self.async_pread if asynchronous else self.sync_pread)(buffer, filename, file_offset)

    def pwrite(
        self, buffer: torch.Tensor, filename: str, validate: bool, asynchronous: bool, file_offset: int = 0
    ) -> int:
        """Call `async_pwrite` or `sync_pwrite`."""
        return (self.async_pwrite if asynchronous else self.sync_pwrite)(buffer, filename, file_offset)

    def read(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Read like `sync_pread`. Return the number of bytes."""
        self.sync_pread(buffer, filename, file_offset)
        return buffer.nbytes

    def write(self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Write like `sync_pwrite`. Return the number of bytes."""
        self.sync_pwrite(buffer, filename, file_offset)
        return buffer.nbytes

    def wait(self) -> int:
        """Wait for all asynchronous calls. Return their number.

        Raises:
            OSError, StorageError: the first failure among them.
        """
        started, self._in_flight = self._in_flight, []
        try:
            for parts, _ in started:
                for part in parts:
                    part.result()
        finally:
            for parts, file in started:
                for part in parts:
                    with contextlib.suppress(Exception):  # the first failure is already propagating
                        part.result()
                os.close(file)
        return len(started)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Allocate host memory `[num_elem]` of the example's dtype, page-locked if there is a GPU."""
        return torch.empty(num_elem, dtype=example_tensor.dtype, pin_memory=torch.cuda.is_available())

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Return True: the memory is freed with its tensor."""
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
    """Fill a tensor from a file. Return 1."""
    return aio_handle(block_size).sync_pread(buffer, filename)


def aio_write(buffer: torch.Tensor, filename: str, block_size: int = 1 << 20, *ignored: object) -> int:
    """Write a tensor to a file. Return 1."""
    return aio_handle(block_size).sync_pwrite(buffer, filename)


def _file_path(name: str | int | None, number: int | None) -> str:
    """Return a path for `name`, a path or file descriptor, or for the descriptor `number`.

    A descriptor is reopened through `/proc/self/fd`, because it may be open with O_DIRECT, which needs aligned data.

    Raises:
        StorageError: both are None.
    """
    given = name if number is None else number
    if given is None:
        raise StorageError("aio_handle: no file is given; pass filename or fd")
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
            raise StorageError(
                f"{name} ends at byte {offset + done}, but the tensor needs {len(data) - done} bytes more; pass a "
                "smaller tensor, or restore the file"
            )
        done += got
    return done


def _write_all(file: int, data: memoryview, offset: int, name: str) -> int:
    done = 0
    while done < len(data):
        done += os.pwritev(file, [data[done:]], offset + done)
    return done
