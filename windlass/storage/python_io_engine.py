"""I/O engine for installations without the native module: Python threads, each with one preadv or pwritev at a time.

It gives the guarantees of the native engines (windlass/kernels/native/disk_queue.hpp): reads and writes alternate; the
first failure of a request cancels the rest of it; closing cancels queued blocks and waits for those in flight. Page
checksums are zlib's. They never leave the process, so both kinds of engine need not use the same checksum.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence

from windlass.storage.extent_allocator import PAGE

BlockSpan = tuple[int, int, int, int, int]
"""File (index), offset in it, memory address, bytes, and address of an array with a 32-bit checksum for each page.

Offset and bytes are whole pages. A write sets the checksums, and a read compares them. An array address of 0 turns
checksums off.
"""


class PythonIoRequest:
    """Blocks that one `submit` started."""

    def __init__(self, write: bool, left: int, changed: threading.Condition) -> None:
        self.write, self.left = write, left
        self.error: tuple[int, int, int, int] | None = None
        self._changed = changed

    def done(self) -> bool:
        return self.left == 0

    def wait(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self.done, seconds)

    def failure(self) -> tuple[int, int, int, int] | None:
        return self.error


class _BusyTimer:
    """Stopwatch that runs while at least one request is outstanding."""

    def __init__(self) -> None:
        self._outstanding, self._total, self._since = 0, 0.0, 0.0

    def begin(self) -> None:
        if not self._outstanding:
            self._since = time.monotonic()
        self._outstanding += 1

    def end(self) -> None:
        self._outstanding -= 1
        if not self._outstanding:
            self._total += time.monotonic() - self._since

    def seconds(self) -> float:
        return self._total + (time.monotonic() - self._since if self._outstanding else 0.0)


class PythonIoEngine:
    """Engine that moves blocks between files and memory.

    Args:
        files: descriptors.
        threads: number of threads, hence blocks in flight at once.
        block_size: bytes of the largest block.
        alignment: alignment of addresses that the files need. Blocks at other addresses pass through a buffer.
    """

    def __init__(self, files: Sequence[int], threads: int, block_size: int, alignment: int) -> None:
        self._files, self._block_size, self._alignment = list(files), block_size, alignment
        self._changed = threading.Condition()
        self._waiting: tuple[deque[tuple[PythonIoRequest, BlockSpan]], ...] = (deque(), deque())  # reads, writes
        self._busy_timers = (_BusyTimer(), _BusyTimer(), _BusyTimer())  # reads, writes, either
        self._transferred_bytes = [0, 0]
        self._next_is_write, self._stopped = False, False
        # Daemon threads: at exit Python joins all non-daemon threads before it runs the finalizers that close the tier.
        self._threads = [
            threading.Thread(target=self._run_worker, name=f"windlass-disk-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, write: bool, spans: Sequence[BlockSpan]) -> PythonIoRequest | None:
        request = PythonIoRequest(write, len(spans), self._changed)
        with self._changed:
            if self._stopped:
                return None
            if spans:
                self._busy_timers[write].begin()
                self._busy_timers[2].begin()
            self._waiting[write].extend((request, span) for span in spans)
            self._changed.notify_all()
        return request

    def add_region(self, address: int, nbytes: int) -> int:
        return -errno.ENOTSUP

    def remove_region(self, place: int) -> None:
        """Do nothing, since `add_region` never registers memory."""

    def totals(self) -> tuple[int, int, float, float, float]:
        with self._changed:
            reads, writes, either = (busy.seconds() for busy in self._busy_timers)
            return self._transferred_bytes[0], self._transferred_bytes[1], reads, writes, either

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            for waiting in self._waiting:
                for request, (file, offset, *_) in waiting:
                    self._finish(request, (errno.ECANCELED, file, offset, 0))
                waiting.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run_worker(self) -> None:
        bounce: mmap.mmap | None = None
        while (job := self._next()) is not None:
            request, span = job
            try:
                if span[2] % self._alignment and bounce is None:
                    bounce = mmap.mmap(-1, self._block_size)
                error, done = self._run_block(request.write, span, bounce)
            except (OSError, MemoryError) as failure:  # no memory for the buffer
                error, done = getattr(failure, "errno", None) or errno.ENOMEM, 0
            file, offset = span[:2]
            with self._changed:
                self._transferred_bytes[request.write] += done
                self._finish(request, (error, file, offset, done) if error else None)

    def _run_block(self, write: bool, span: BlockSpan, bounce: mmap.mmap | None) -> tuple[int, int]:
        """Move one block, through `bounce` if its address is not aligned. Return the errno (0: success) and the number
        of bytes done.
        """
        file, offset, address, nbytes, sums = span
        memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        aligned = address % self._alignment == 0
        target = memory if aligned or bounce is None else memoryview(bounce)[:nbytes]
        if not aligned and write:
            target[:] = memory
        noted = (ctypes.c_uint32 * (nbytes // PAGE)).from_address(sums) if sums else None
        if write and noted is not None:
            noted[:] = [zlib.crc32(memory[at : at + PAGE]) for at in range(0, nbytes, PAGE)]
        error, done = self._transfer_block(write, file, offset, target)
        if not write and noted is not None and not error:
            error, done = _verify_checksums(target, noted)
        if not aligned and not write and not error:
            memory[:] = target
        return error, done

    def _transfer_block(self, write: bool, file: int, offset: int, memory: memoryview) -> tuple[int, int]:
        """Return the errno (0: success; ENODATA: the file ended) and the number of bytes done."""
        move, done = os.pwritev if write else os.preadv, 0
        while done < len(memory):
            try:
                got = move(self._files[file], [memory[done:]], offset + done)
            except OSError as error:
                return error.errno or errno.EIO, done
            done += got
            if got == 0 or (done < len(memory) and done % PAGE):
                return errno.ENODATA, done
        return 0, done

    def _next(self) -> tuple[PythonIoRequest, BlockSpan] | None:
        with self._changed:
            while True:
                while any(self._waiting):
                    self._next_is_write = (
                        not self._next_is_write if self._waiting[not self._next_is_write] else self._next_is_write
                    )
                    request, span = self._waiting[self._next_is_write].popleft()
                    if request.error is None:
                        return request, span
                    self._finish(request, None)
                if self._stopped:
                    return None
                self._changed.wait()

    def _finish(self, request: PythonIoRequest, error: tuple[int, int, int, int] | None) -> None:
        request.error = request.error or error
        request.left -= 1
        if not request.left:
            self._busy_timers[request.write].end()
            self._busy_timers[2].end()
            self._changed.notify_all()


def _verify_checksums(memory: memoryview, sums: ctypes.Array[ctypes.c_uint32]) -> tuple[int, int]:
    """Return EBADMSG and the number of bytes before the first page with a wrong checksum, or 0 and the total."""
    for page, at in enumerate(range(0, len(memory), PAGE)):
        if zlib.crc32(memory[at : at + PAGE]) != sums[page]:
            return errno.EBADMSG, at
    return 0, len(memory)
