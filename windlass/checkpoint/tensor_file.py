"""One safetensors file, written front to back and read entry by entry, with a crc32 for each entry."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.checksum import crc32 as crc32_of
from windlass.checkpoint.directory import disk_errors
from windlass.storage import NewFile

# safetensors' own reader is not used: it maps the file, where this one reads straight into the destination, knows the
# bytes' crc32 and holds one entry at a time. The files are ordinary safetensors files (a test reads them with it).
_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
# safetensors' own limit on its header, which keeps a damaged length from asking for all memory.
_LONGEST_HEADER = 100_000_000


def code_of(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype, such as `BF16`. Raises CheckpointError for one that it cannot store."""
    if dtype not in _CODES:
        raise CheckpointError(f"a checkpoint cannot hold tensors of dtype {dtype}; cast to one of {list(_CODES)}")
    return _CODES[dtype]


def dtype_of(code: str) -> torch.dtype:
    """The dtype that safetensors names so. Raises CheckpointError for a name that is not known."""
    if code not in _DTYPES:
        raise CheckpointError(f"the checkpoint holds tensors of dtype {code!r}, which this version cannot read")
    return _DTYPES[code]


@dataclass(frozen=True)
class Entry:
    """One tensor of a file that is to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFileWriter:
    """A safetensors file that is being written, entry by entry in any order. Use it in a `with` statement: left without
    an error, the file is whole and durable.

    Args:
        entries: all that it will hold, by name.

    Raises:
        CheckpointError: the disk is full or the path cannot be written.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        self.path, self._entries = path, entries
        header, self._at, self.nbytes = laid_out(entries)
        self._left = set(entries)
        with disk_errors(path, self.nbytes):
            self._file = NewFile(path, self.nbytes)
            self._file.send(0, torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Writes the entry `name`, which is `tensor` on any device, and returns the crc32 of its bytes."""
        found = self.send(name, tensor)
        self.settle()
        return found

    def send(self, name: str, tensor: torch.Tensor) -> int:
        """As `write`, but a tensor on the CPU may not change before `settle`."""
        entry = self._entries[name]
        if tuple(tensor.shape) != entry.shape:
            raise CheckpointError(f"{name!r} was said to have shape {entry.shape} and has {tuple(tensor.shape)}")
        here = tensor.detach().to(device="cpu", dtype=entry.dtype).contiguous()
        flat = here.reshape(-1).view(torch.uint8) if here.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
        self.send_bytes([name], self._at[name], flat)
        return crc32(flat)  # while the disk is at work

    def send_bytes(self, names: Iterable[str], offset: int, data: torch.Tensor) -> None:
        """Start to write what lies at byte `offset` of the file: `data` `[bytes]`, which holds the entries `names`."""
        with disk_errors(self.path, self.nbytes):
            self._file.send(offset, data)
        self._left.difference_update(names)

    def settle(self) -> None:
        """Wait until what was sent is written."""
        with disk_errors(self.path, self.nbytes):
            self._file.settle()

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lacks = kind is None and bool(self._left)
        with disk_errors(self.path, self.nbytes):
            self._file.__exit__(CheckpointError if lacks else kind, error, trace)
        if lacks:
            raise CheckpointError(f"{self.path} lacks {sorted(self._left)[:8]}, which nobody wrote")


class TensorFile:
    """A safetensors file for reading. Use it in a `with` statement, or close it; a read opens it again.

    Raises:
        CheckpointError: it cannot be opened, or is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BufferedReader | None = None
        try:
            self._entries, self._data = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the file handle back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> BufferedReader:
        if self._file is None:
            try:
                self._file = open(self.path, "rb")  # noqa: SIM115 (closed by `close`)
            except OSError as error:
                raise CheckpointError(f"the checkpoint file {self.path} cannot be opened: {error.strerror}") from error
        return self._file

    def read_into(self, entry: str, tensor: torch.Tensor, crc32: int | None) -> None:
        """Fills `tensor`, contiguous and on the CPU, with the whole entry, whose bytes must have this crc32 (if any).

        Raises:
            CheckpointError: no such entry, another size, or other bytes than were written. The tensor's values are
                then undefined.
        """
        self.check_size(entry, tensor.numel() * tensor.element_size())
        raw = self.read_part(entry, 0, tensor)
        self.check_sum(entry, crc32_of(raw), crc32)

    def read_part(self, entry: str, offset: int, tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
        """Fills `tensor`, contiguous and on the CPU, with the entry's bytes from byte `offset` on, unchecked; returns
        its memory as bytes. Raises CheckpointError where the file has fewer."""
        begin, _ = self.span(entry)
        raw = bytes_of(tensor)
        if len(raw):
            file = self._open()
            file.seek(self._data + begin + offset)
            if (count := file.readinto(raw)) != len(raw):
                raise CheckpointError(
                    f"the checkpoint file {self.path} is damaged: of {len(raw)} bytes of entry {entry!r} there are "
                    f"{count}; restore it or load another checkpoint"
                )
        if not tensor.is_inference():
            # Reading into the memory goes past autograd, which must know that what it saved is stale.
            torch.autograd.graph.increment_version(tensor)
        return raw

    def check_size(self, entry: str, size: int) -> None:
        """Raises CheckpointError unless the entry has `size` bytes."""
        begin, end = self.span(entry)
        if end - begin != size:
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: entry {entry!r} has {end - begin} bytes, the index says "
                f"{size}; restore it or load another checkpoint"
            )

    def check_sum(self, entry: str, found: int, crc32: int | None) -> None:
        """Raises CheckpointError unless `found`, the crc32 of all bytes that were read, is that of the index, where it
        has one."""
        if crc32 is not None and found != crc32:
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: entry {entry!r} has crc32 {found:08x}, {crc32:08x} was "
                "written; restore it or load another checkpoint"
            )

    def span(self, entry: str) -> tuple[int, int]:
        """Where the entry lies among the data: its first byte, and the one after its last."""
        try:
            begin, end = map(int, self._entries[entry]["data_offsets"])
            if not 0 <= begin <= end:
                raise ValueError(f"bytes {begin} to {end}")
            return begin, end
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint file {self.path} has no entry {entry!r} that can be read; restore it or load another "
                "checkpoint"
            ) from error

    def _read_header(self) -> tuple[dict[str, dict[str, list[int]]], int]:
        file = self._open()
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _LONGEST_HEADER else b""
        try:
            entries = json.loads(text)
        except ValueError:
            entries = None
        if len(text) != length or not isinstance(entries, dict):
            raise CheckpointError(
                f"{self.path} is damaged or not a safetensors file; it was not read further. Restore it or load "
                "another checkpoint"
            )
        return entries, 8 + length


def laid_out(entries: Mapping[str, Entry]) -> tuple[bytes, dict[str, int], int]:
    """How a file of these entries begins, at which byte of it each of them lies, and its size in bytes."""
    # Wide dtypes first, so that every entry is aligned.
    order = sorted(entries, key=lambda name: -entries[name].dtype.itemsize)
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at: dict[str, int] = {}
    position = 0
    for name in order:
        at[name], start = position, position
        position += entries[name].nbytes
        shape = list(entries[name].shape)
        fields[name] = {"dtype": code_of(entries[name].dtype), "shape": shape, "data_offsets": [start, position]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in at.items()}, len(header) + position


def crc32(data: torch.Tensor) -> int:
    """Of `data` `[bytes]`, uint8 on the CPU."""
    return crc32_of(bytes_of(data))


def bytes_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """The tensor's memory as a buffer, without numpy, which is optional; the caller keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return (ctypes.c_ubyte * 0)()
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
