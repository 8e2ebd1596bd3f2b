"""Module `deepspeed.io`: file objects for `torch.save` that count calls and bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_NO_DESCRIPTOR = -1  # makes torch write through `write`, so that every byte is counted


class BaseFileWriter:
    """Base class of writers. It counts the calls of each method, bytes and seconds."""

    def __init__(self, file_path: str | Path) -> None:
        self._file_path = file_path
        self._stats: dict[str, Any] = {
            "close": 0,
            "fileno": 0,
            "flush": 0,
            "write": 0,
            "bytes": 0,
            "write_secs": 0.0,
            "write_GB/s": 0.0,
        }

    def file_path(self) -> str | Path:
        """Return the path of the file."""
        return self._file_path

    def fileno(self) -> int:
        """Return -1, so that all data pass through `write`."""
        self._stats["fileno"] += 1
        return _NO_DESCRIPTOR

    def write(self, buffer: Any) -> int:
        """Write a buffer. Return its number of bytes."""
        data = memoryview(buffer).cast("B")
        begun = time.perf_counter()
        self._write_bytes(data)
        self._stats["write_secs"] += time.perf_counter() - begun
        self._stats["write"] += 1
        self._stats["bytes"] += len(data)
        return len(data)

    def flush(self) -> None:
        """Count the call. `PyFileWriter` also passes buffered data to the system."""
        self._stats["flush"] += 1

    def close(self) -> None:
        """Count the call. Writers of a file also write the remaining data and close the file."""
        self._stats["close"] += 1

    def __enter__(self) -> BaseFileWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _write_bytes(self, data: memoryview) -> None:
        """Consume bytes, which are valid only during this call."""

    def _dump_state(self) -> None:
        """Print the statistics."""
        if self._stats["write_secs"] > 0:
            self._stats["write_GB/s"] = self._stats["bytes"] / self._stats["write_secs"] / (1 << 30)
        print(f"stats = {self._stats | {'path': str(self._file_path)}}")


class PyFileWriter(BaseFileWriter):
    """Writer to a file object of `open`."""

    def __init__(self, file_path: str | Path) -> None:
        super().__init__(file_path)
        self._file = open(file_path, "wb")  # noqa: SIM115  closed by close()

    def _write_bytes(self, data: memoryview) -> None:
        self._file.write(data)

    def flush(self) -> None:
        super().flush()
        self._file.flush()

    def close(self) -> None:
        super().close()
        self._file.close()


class MockFileWriter(BaseFileWriter):
    """Writer that counts data and drops them, to measure only the serialization. The file stays empty."""

    def __init__(self, file_path: str | Path) -> None:
        super().__init__(file_path)
        Path(file_path).write_bytes(b"")
        self._stats |= {"save_storage": 0, "save_storage_bytes": 0}

    def save_torch_storage_object_list(self, storage_obj_list: list[Any], save_size: bool) -> int:
        """Count storages as if they were written. Return their number of bytes."""
        total = 0
        for storage in storage_obj_list:
            nbytes = storage.nbytes()
            self._stats["save_storage"] += 1
            self._stats["save_storage_bytes"] += nbytes
            total += nbytes + (8 if save_size else 0)
        self._stats["bytes"] += total
        return total


@dataclass
class FastFileWriterConfig:
    """Configuration of a `FastFileWriter`.

    Args:
        dnvme_handle: an `aio_handle`.
        pinned_tensor: host memory used as write buffer.
        double_buffer: fill one half of the buffer while the other half is written.
        num_parallel_writers, writer_rank, global_rank: stored only; each writer writes its full file.
    """

    dnvme_handle: Any
    pinned_tensor: torch.Tensor
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(BaseFileWriter):
    """Writer that copies data to a host buffer, which an `aio_handle` writes in the background."""

    def __init__(self, file_path: str | Path, config: FastFileWriterConfig) -> None:
        super().__init__(file_path)
        Path(file_path).write_bytes(b"")
        self._handle = config.dnvme_handle
        memory = config.pinned_tensor.view(-1).view(torch.uint8)
        self._buffers = list(memory.chunk(2)) if config.double_buffer and memory.numel() > 1 else [memory]
        self._active_buffer, self._filled, self._offset, self._write_in_flight = 0, 0, 0, False
        self._stats |= {"aio_bytes": 0, "aio_write_secs": 0.0, "fill_buffer_count": 0}

    def _write_bytes(self, data: memoryview) -> None:
        place = 0
        while place < len(data):
            half = self._buffers[self._active_buffer]
            size = min(len(data) - place, half.numel() - self._filled)
            half[self._filled : self._filled + size].copy_(_as_tensor(data[place : place + size]))
            self._filled, place = self._filled + size, place + size
            if self._filled == half.numel():
                self._flush_buffer()

    def _flush_buffer(self) -> None:
        """Start writing the active buffer after the previous write has finished."""
        begun = time.perf_counter()
        self._wait_for_write()
        if self._filled:
            full = self._buffers[self._active_buffer][: self._filled]
            self._handle.async_pwrite(full, str(self._file_path), self._offset)
            self._write_in_flight, self._offset = True, self._offset + self._filled
            self._stats["aio_bytes"] += self._filled
            self._stats["fill_buffer_count"] += 1
            self._filled, self._active_buffer = 0, (self._active_buffer + 1) % len(self._buffers)
            # A single buffer must be written before it can be filled again.
            if len(self._buffers) == 1:
                self._wait_for_write()
        self._stats["aio_write_secs"] += time.perf_counter() - begun

    def _wait_for_write(self) -> None:
        if self._write_in_flight:
            self._handle.wait()
            self._write_in_flight = False

    def flush(self) -> None:
        super().flush()

    def close(self) -> None:
        """Write the remaining data, and wait for completion."""
        super().close()
        self._flush_buffer()
        self._wait_for_write()


def _as_tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
