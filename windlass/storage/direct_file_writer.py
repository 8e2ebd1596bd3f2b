"""Writer of a new file of known size, with large direct-I/O blocks of which many are in flight at once."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import torch

from windlass.storage.extent_allocator import PAGE, page_up, split_at_pages
from windlass.storage.io_engine import IoRequest, native_module, start_io_engine
from windlass.storage.staging_memory import aligned_buffer
from windlass.storage.striped_files import enable_direct_io

_BLOCK = 1 << 20
_DEPTH = 16
_SPAN = 16 * PAGE


class DirectFileWriter:
    """Writer that accepts every byte of a file once, in any order.

    Leaving its `with` statement without an error writes the remaining bytes and syncs the file to disk.

    Whole spans of 64 KiB are written from the caller's memory. Bytes of incomplete spans are copied into buffers until
    the span is complete, so that many small pieces become a few large writes. On file systems that refuse direct I/O
    the same blocks pass through the page cache.

    Args:
        nbytes: size of the file. Where the file system allows it, all space is allocated first, so that a full
            disk fails before any write.

    Raises:
        OSError: a system call failed. `wait` and the end of the `with` statement raise it for failed writes.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self._nbytes = path, nbytes
        # Buffer of each incomplete span, and the number of bytes in it so far, by offset of the span.
        self._spans: dict[int, tuple[torch.Tensor, int]] = {}
        self._in_flight: list[tuple[IoRequest, torch.Tensor]] = []
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
        try:
            direct = enable_direct_io(self._file)
            _preallocate(self._file, nbytes)
            module, _ = native_module()
            ask = None if module is None else module.direct_memory_alignment
            alignment = ((ask(self._file) if ask else 0) or PAGE) if direct else 1
            self._engine = start_io_engine(
                [self._file], requested=None, queue_depth=_DEPTH, threads=_DEPTH, block_size=_BLOCK, alignment=alignment
            ).engine
        except BaseException:
            os.close(self._file)
            raise

    def submit(self, offset: int, data: torch.Tensor) -> None:
        """Start to write `data` `[bytes]`, contiguous uint8 on the CPU, at byte `offset`.

        `data` must not change before `wait` returns.
        """
        first, last = offset, offset + data.numel()
        if first == last:
            return
        if first // _SPAN == (last - 1) // _SPAN:  # within one span: a small piece
            self._fill_page(first, data)
            return
        parts, (body, end) = split_at_pages(first, last, _SPAN)
        for low, high in parts:
            self._fill_page(low, data[low - first : high - first])
        self._submit_blocks(body, end, data[body - first : end - first])

    def wait(self) -> None:
        """Wait until all submitted data is written. Incomplete spans stay in their buffers."""
        for request, _ in self._in_flight:
            while not request.wait(0.2):  # in slices, so that Ctrl-C is handled
                pass
        over, self._in_flight = self._in_flight, []
        for request, _ in over:
            if (failure := request.failure()) is not None:
                number = errno.EIO if failure[0] == errno.ENODATA else failure[0]
                raise OSError(number, os.strerror(number), str(self.path))

    def __enter__(self) -> DirectFileWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                for offset in list(self._spans):
                    self._send_span(offset)
                self.wait()
                os.ftruncate(self._file, self._nbytes)
                os.fsync(self._file)
        finally:
            self._engine.close()  # before the buffers of writes in flight are freed
            self._in_flight, self._spans = [], {}
            os.close(self._file)

    def _fill_page(self, first: int, part: torch.Tensor) -> None:
        offset = first // _SPAN * _SPAN
        size = min(_SPAN, self._nbytes - offset)
        span, filled = self._spans.get(offset) or (aligned_buffer(page_up(size))[0], 0)
        # memmove is ten times faster than copy_ for small pieces
        ctypes.memmove(span.data_ptr() + first - offset, part.data_ptr(), part.numel())
        self._spans[offset] = span, filled + part.numel()
        if filled + part.numel() == size:
            self._send_span(offset)

    def _send_span(self, offset: int) -> None:
        span, _ = self._spans.pop(offset)
        self._submit_blocks(offset, offset + span.numel(), span)

    def _submit_blocks(self, first: int, last: int, memory: torch.Tensor) -> None:
        if first == last:
            return
        start = memory.data_ptr()
        places = range(first, last, _BLOCK)
        spans = [(0, at, start + at - first, min(_BLOCK, last - at), 0) for at in places]
        request = self._engine.submit(True, spans)
        if request is None:
            raise OSError(errno.ECANCELED, "the file was closed", str(self.path))
        self._in_flight.append((request, memory))


def _preallocate(file: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(file, 0, page_up(max(nbytes, 1)))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
