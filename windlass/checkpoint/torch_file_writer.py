"""Writer of files for `torch.load` that does not use `torch.save`: it writes one part of one tensor at a time."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from windlass.base.atomic_file import open_new
from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_directory import disk_errors
from windlass.checkpoint.pickle_writer import PlannedTensor, write_pickle
from windlass.checkpoint.safetensors_file import tensor_bytes

_ALIGNED = 64  # bytes; torch's alignment, for readers that memory-map the file
_SMALL = 1 << 31  # size in bytes from which a record uses zip's 64-bit format
_HEADER = 30  # bytes of a record's header, without name and extra field


def write_torch_file(path: Path, value: Any) -> None:
    """Write `value` (see `pickle_writer`) durably, with the plain data and at most one part of a tensor in memory.

    Raises:
        CheckpointError: the disk is full, the path cannot be written, `value` contains other values than plain
            data and tensors, or parts do not add up to their tensor.
    """
    with TorchFileWriter(path, value) as file:
        for tensor in file.tensors:
            file.write(tensor, tensor.parts())


class TorchFileWriter:
    """Writer of a file whose plain data is written first, then its tensors in any order.

    Use it in a `with` statement.

    If the statement ends without an error, the file is complete and durable.

    Args:
        value: the full contents, with a `PlannedTensor` (or a tensor) for each tensor.

    Attributes:
        tensors: the tensors to be written, each once.

    Raises:
        CheckpointError: as `write_torch_file`.
    """

    def __init__(self, path: Path, value: Any) -> None:
        text, self.tensors = write_pickle(value)
        self._path = path
        self._numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._unwritten = set(self._numbers)
        self._nbytes = len(text) + sum(tensor.numel * tensor.dtype.itemsize for tensor in self.tensors)
        with disk_errors(path, self._nbytes):
            self._raw = open_new(path, "wb")  # closed by `__exit__`
            self._zip = zipfile.ZipFile(self._raw, "w", zipfile.ZIP_STORED)
            order = sys.byteorder.encode()
            try:
                self._write_record("data.pkl", [text], len(text))
                self._write_record("byteorder", [order], len(order))
            except BaseException:
                self._close()
                raise

    def write(self, tensor: PlannedTensor, parts: Iterable[torch.Tensor]) -> None:
        """Write one of `tensors` from its flat parts, which are converted to its dtype."""
        self._unwritten.remove(id(tensor))
        nbytes = tensor.numel * tensor.dtype.itemsize
        with disk_errors(self._path, self._nbytes):
            self._write_record(f"data/{self._numbers[id(tensor)]}", _bytes(parts, tensor.dtype), nbytes)

    def _write_record(self, name: str, chunks: Iterable[Any], nbytes: int) -> None:
        info = zipfile.ZipInfo(f"{self._path.stem}/{name}")
        wide = nbytes >= _SMALL
        begin = self._zip.start_dir + _HEADER + len(info.filename.encode()) + 20 * wide + 4
        padding = -begin % _ALIGNED
        info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        written = 0
        with self._zip.open(info, "w", force_zip64=wide) as record:
            for chunk in chunks:
                written += record.write(memoryview(chunk))
        if written != nbytes:
            raise CheckpointError(f"{self._path}: the record {name!r} should have {nbytes} bytes, and has {written}")

    def __enter__(self) -> TorchFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._unwritten:
                    raise CheckpointError(f"{self._path}: {len(self._unwritten)} tensors were not written")
                with disk_errors(self._path, self._nbytes):
                    self._write_record("version", [b"3\n"], 2)
                    self._zip.close()
                    self._raw.flush()
                    os.fsync(self._raw.fileno())
        finally:
            self._close()

    def _close(self) -> None:
        with suppress(OSError, ValueError):  # the file is incomplete or closed already
            self._zip.close()
        self._raw.close()


def _bytes(parts: Iterable[torch.Tensor], dtype: torch.dtype) -> Iterator[Any]:
    for part in parts:
        # The memory of a conjugated or negated view has the values before the conjugation or negation.
        plain = part.detach().resolve_conj().resolve_neg()
        here = plain.to(device="cpu", dtype=dtype).contiguous()  # keeps the bytes alive while they are written
        yield tensor_bytes(here)
