"""Safetensors files with a crc32 per entry, written and read entry by entry."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType

import torch

from windlass.base.errors import CheckpointError
from windlass.base.native_memory import native_access_problem
from windlass.base.regular_file import open_regular
from windlass.checkpoint.checkpoint_directory import disk_errors
from windlass.checkpoint.checksum import crc32 as crc32_of
from windlass.storage import DirectFileWriter
from windlass.storage.safetensors_header import (
    CODES,
    DTYPES,
    SafetensorsEntry,
    SafetensorsHeaderError,
    encode_safetensors_header,
    read_safetensors_header,
)

# safetensors' own reader is not used: it maps the file, while `TensorFile` reads directly into the destination, checks
# the crc32 and holds one entry at a time. The files are ordinary safetensors files, which safetensors can read.
_CHECKSUM_CHUNK_BYTES = 1 << 22  # bytes per read that only computes a checksum
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def dtype_code(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype, such as `BF16`. Raises CheckpointError for an unsupported dtype."""
    if dtype not in CODES:
        raise CheckpointError(f"a checkpoint cannot hold tensors of dtype {dtype}; cast to one of {list(CODES)}")
    return CODES[dtype]


def dtype_from_code(code: str) -> torch.dtype:
    """Return the dtype of a safetensors name. Raises CheckpointError for an unknown name."""
    if code not in DTYPES:
        raise CheckpointError(f"the checkpoint holds tensors of dtype {code!r}, which this version cannot read")
    return DTYPES[code]


@dataclass(frozen=True)
class TensorEntry:
    """Dtype and shape of a tensor in a file that is to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFileWriter:
    """Writer of a safetensors file, entry by entry in any order. Use it in a `with` statement.

    If the statement ends without an error, the file is complete and durable.

    Args:
        entries: all tensors that the file will hold, by name.
        layout: `lay_out_entries(entries)`, if it is known.

    Raises:
        CheckpointError: the disk is full or the path cannot be written, or an entry is missing when the statement ends.
    """

    def __init__(
        self, path: Path, entries: Mapping[str, TensorEntry], layout: tuple[bytes, dict[str, int], int] | None = None
    ) -> None:
        self.path, self._entries = path, entries
        header, self._offsets, self.nbytes = layout if layout is not None else lay_out_entries(entries)
        self._unwritten = set(entries)
        with disk_errors(path, self.nbytes):
            self._file = DirectFileWriter(path, self.nbytes)
            self._file.submit(0, torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Write the entry `name` from `tensor` on any device, and return the crc32 of its bytes."""
        found = self.submit(name, tensor)
        self.wait()
        return found

    def submit(self, name: str, tensor: torch.Tensor) -> int:
        """Start to write the entry `name`, and return its crc32. A CPU tensor must not change before `wait`.

        Raises:
            CheckpointError: the tensor has another shape than the entry, the tensor's storage was freed, or the disk
                fails.
        """
        entry = self._entries[name]
        if tuple(tensor.shape) != entry.shape:
            raise CheckpointError(f"{name!r} was declared with shape {entry.shape} and has {tuple(tensor.shape)}")
        here = tensor.detach().resolve_conj().resolve_neg()  # the bytes of a lazy conjugate are not its values
        if here.device.type != "cpu" or here.dtype != entry.dtype or not here.is_contiguous():
            here = here.to(device="cpu", dtype=entry.dtype).contiguous()
        try:
            raw = tensor_bytes(here)
        except CheckpointError as error:
            raise CheckpointError(f"{name!r}: {error}") from error
        self.submit_bytes((name,), self._offsets[name], here.view(-1).view(torch.uint8) if len(raw) else _NOTHING)
        return crc32_of(raw)  # computed while the disk writes

    def submit_bytes(self, names: Iterable[str], offset: int, data: torch.Tensor) -> None:
        """Start to write `data` `[bytes]` at byte `offset` of the file. `data` holds the entries `names`."""
        with disk_errors(self.path, self.nbytes):
            self._file.submit(offset, data)
        self._unwritten.difference_update(names)

    def wait(self) -> None:
        """Wait until all submitted data is written."""
        with disk_errors(self.path, self.nbytes):
            self._file.wait()

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lacks = kind is None and bool(self._unwritten)
        with disk_errors(self.path, self.nbytes):
            self._file.__exit__(CheckpointError if lacks else kind, error, trace)
        if lacks:
            raise CheckpointError(f"{self.path} lacks {sorted(self._unwritten)[:8]}, which were never written")


class TensorFile:
    """Safetensors file for reading. Use it in a `with` statement, or close it; a later read reopens it.

    Args:
        root: the checkpoint's directory. Links that lead out of this directory are refused.

    Raises:
        CheckpointError: the file cannot be opened, is not a regular file, or is not a safetensors file.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self._root = path.parent if root is None else root
        self._file: BufferedReader | None = None
        self._verified_ranges: set[tuple[int, int]] = set()  # byte ranges whose crc32 was verified
        try:
            self._read_header(self._open())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file handle."""
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
                self._file = open_regular(self.path, self._root)
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint file {self.path} cannot be opened: {error.strerror or error}"
                ) from error
        return self._file

    def read_into(self, entry: str, tensor: torch.Tensor, crc32: int | None) -> None:
        """Fill `tensor`, contiguous and on the CPU, with the full entry, and check the crc32.

        Args:
            crc32: crc32 of the entry; None: check the file's own checksum, which covers the entry.

        Raises:
            CheckpointError: no such entry, another size, or damaged bytes. The tensor's values are then undefined.
        """
        self.check_size(entry, tensor.numel() * tensor.element_size())
        if crc32 is None:
            self.verify_checksum(entry, None)
        raw = self.read_part(entry, 0, tensor)
        self.compare_crc32(entry, crc32_of(raw), crc32)

    def read_part(self, entry: str, offset: int, tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
        """Fill `tensor`, contiguous and on the CPU, with the entry's bytes from byte `offset` on.

        Return the tensor's memory as bytes. They are not checked: pass the crc32 of the full entry to
        `compare_crc32` afterwards, or call `verify_checksum` first.

        Raises:
            CheckpointError: the file has fewer bytes, or cannot be read.
        """
        begin, _ = self.byte_range(entry)
        raw = tensor_bytes(tensor)
        self._read(begin + offset, raw, entry)
        if not tensor.is_inference():
            # writes to raw memory do not increment the version, by which autograd rejects stale saved tensors
            torch.autograd.graph.increment_version(tensor)
        return raw

    def read_run(self, begin: int, end: int, entry: str) -> ctypes.Array[ctypes.c_ubyte]:
        """Return bytes `[begin, end)` of the file, which hold consecutive entries, the first of them `entry`.

        The bytes are not checked, as in `read_part`.

        Raises:
            CheckpointError: the file has fewer bytes, or cannot be read.
        """
        raw = (ctypes.c_ubyte * (end - begin))()
        self._read(begin, raw, entry)
        return raw

    def verify_checksum(self, entry: str, crc32: int | None) -> None:
        """Read all bytes that the checksum of an entry covers, and compare the checksum, unless this was done before.

        Readers that read only a part of the entry call this method.

        Args:
            crc32: crc32 of the entry; None if the file itself has the checksum.

        Raises:
            CheckpointError: the bytes are damaged.
        """
        begin, end = self.byte_range(entry)
        if crc32 is None:
            begin, end, crc32 = self._checksum_range(entry)
        if (begin, end) in self._verified_ranges:
            return
        scratch = torch.empty(min(_CHECKSUM_CHUNK_BYTES, end - begin), dtype=torch.uint8, device="cpu")
        found = 0
        for first in range(begin, end, _CHECKSUM_CHUNK_BYTES):
            raw = tensor_bytes(scratch[: min(_CHECKSUM_CHUNK_BYTES, end - first)])
            self._read(first, raw, entry)
            found = crc32_of(raw, found)
        self.compare_crc32(entry, found, crc32)
        self._verified_ranges.add((begin, end))

    def _read(self, at: int, raw: ctypes.Array[ctypes.c_ubyte], entry: str) -> None:
        """Fill `raw` with the bytes of the file from `at` on."""
        if not len(raw):
            return
        try:
            file = self._open()
            file.seek(at)
            count = file.readinto(raw)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint file {self.path} cannot be read: {error.strerror or error}; restore it or load "
                "another checkpoint"
            ) from error
        if count != len(raw):
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: of {len(raw)} bytes of entry {entry!r} there are "
                f"{count}; restore it or load another checkpoint"
            )

    def check_entry(self, entry: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError unless the entry exists and has this dtype and shape."""
        found = self._entry(entry)
        if (found.dtype, found.shape) != (CODES[dtype], shape):
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: entry {entry!r} is {found.dtype} of shape {found.shape}, "
                f"the index has {CODES[dtype]} of shape {shape}; restore it or load another checkpoint"
            )

    def check_size(self, entry: str, size: int) -> None:
        """Raise CheckpointError unless the entry has `size` bytes."""
        begin, end = self.byte_range(entry)
        if end - begin != size:
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: entry {entry!r} has {end - begin} bytes, the index has "
                f"{size}; restore it or load another checkpoint"
            )

    def compare_crc32(self, entry: str, found: int, crc32: int | None) -> None:
        """Raise CheckpointError unless `found`, the crc32 of the bytes read, equals `crc32` (None: not checked)."""
        if crc32 is not None and found != crc32:
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: entry {entry!r} has crc32 {found:08x}, {crc32:08x} was "
                "written; restore it or load another checkpoint"
            )

    def byte_range(self, entry: str) -> tuple[int, int]:
        """Return the range of the entry's bytes in the file: the position of the first byte, and the end."""
        found = self._entry(entry)
        return self._header.data_offset + found.begin, self._header.data_offset + found.end

    def _entry(self, entry: str) -> SafetensorsEntry:
        if (found := self._header.entries.get(entry)) is None:
            raise CheckpointError(
                f"the checkpoint file {self.path} has no entry {entry!r}; restore it or load another checkpoint"
            )
        return found

    def _checksum_range(self, entry: str) -> tuple[int, int, int]:
        """Return the byte range that the file's own checksum covers, and that checksum. A plain safetensors file has
        none: this raises CheckpointError."""
        raise CheckpointError(f"the checkpoint file {self.path} has no checksum for entry {entry!r}")

    def _read_header(self, file: BufferedReader) -> None:
        try:
            self._header = read_safetensors_header(file)
        except (SafetensorsHeaderError, OSError) as error:
            raise CheckpointError(
                f"{self.path} is damaged or not a safetensors file: {error}; it was not read further. Restore it or "
                "load another checkpoint"
            ) from error


def lay_out_entries(entries: Mapping[str, TensorEntry]) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a file of these entries, the byte offset of each entry, and the file size in bytes."""
    # put wide dtypes first, so that every entry is aligned
    order = sorted(entries, key=lambda name: -entries[name].dtype.itemsize)
    at: dict[str, int] = {}
    position = 0
    for name in order:
        at[name] = position
        position += entries[name].nbytes
    header = build_header({name: entries[name] for name in order}, {})
    return header, {name: len(header) + start for name, start in at.items()}, len(header) + position


def build_header(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file of these entries, in this order. Raises CheckpointError for an unsupported name."""
    described = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    for dtype, _ in described.values():
        dtype_code(dtype)
    try:
        return encode_safetensors_header(described, metadata)
    except ValueError as error:
        raise CheckpointError(f"nothing is written: {error}") from error


def tensor_crc32(data: torch.Tensor) -> int:
    """Return the crc32 of `data` `[bytes]`, uint8 on the CPU."""
    return crc32_of(tensor_bytes(data))


def tensor_bytes(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the tensor's memory as a buffer, without numpy, which is optional. The caller keeps the tensor alive.

    Raises:
        CheckpointError: the tensor is not contiguous, not on the CPU, or its storage was freed.
    """
    if why := native_access_problem(tensor):
        raise CheckpointError(f"a {tensor.dtype} tensor of shape {list(tensor.shape)} can't be saved: it {why}")
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return (ctypes.c_ubyte * 0)()
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
