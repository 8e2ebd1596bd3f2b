"""File of a model's packed weights, made once from its safetensors files.

Each streamed unit ([Note: streamed weights]) is one range of bytes, as is each other parameter and persistent buffer.
The index `<key>.json` next to the weight file `<key>.weights` is written last: without the index, the weight file is
incomplete and is made again. The key is a hash of the names, sizes and modification times of the model's files, and of
the configuration and options that determine the packed bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import resource
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.base.atomic_file import make_directory, write_atomically
from windlass.base.errors import StorageError
from windlass.storage.disk_error_messages import error_name
from windlass.storage.extent_allocator import page_up
from windlass.storage.safetensors_header import CODES, DTYPES

_VERSION = 2  # version of the choice of units, of the file's layout, and of the layout of packed weights
_ALIGNMENT = 64  # bytes: a cache line
_WRITTEN_AT_ONCE = 64 << 20


@dataclass(frozen=True)
class StoredTensorPlace:
    """Place of a tensor in its unit: dtype code of safetensors, shape, and offset in bytes from the start of the
    unit."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the memory `[bytes]` of its unit."""
        flat = memory[self.offset : self.offset + self.nbytes]
        return flat.view(self.torch_dtype).view(self.shape)


@dataclass(frozen=True)
class StoredUnit:
    """Weights that are read together.

    Attributes:
        modules: names of the modules that use the weights; or the name of a parameter or buffer that is not streamed.
        offset: offset in the file in bytes, a multiple of the page size.
        nbytes: bytes in the file, a multiple of the page size.
        tensors: places of the unit's tensors, by name.
        details: facts from which the modules are rebuilt, such as the weight format.
    """

    modules: tuple[str, ...]
    offset: int
    nbytes: int
    tensors: dict[str, StoredTensorPlace]
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name for messages."""
        return ", ".join(self.modules)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in the memory `[bytes]` of the unit."""
        return {name: place.view(memory) for name, place in self.tensors.items()}


@dataclass(frozen=True)
class WeightIndex:
    """Content of a weight file.

    Attributes:
        units: units in the order of their first use.
        parameters: all other parameters and persistent buffers, each a unit of its own.
        absent: shapes and dtypes of the parameters whose values are only in `units`, in packed form.
    """

    units: tuple[StoredUnit, ...]
    parameters: dict[str, StoredUnit]
    absent: dict[str, StoredTensorPlace]

    @property
    def streamed_bytes(self) -> int:
        """Bytes of all streamed units."""
        return sum(unit.nbytes for unit in self.units)


class WeightFileWriter:
    """Writer of a new weight file, which replaces an existing one.

    Raises:
        StorageError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise _write_error(path, error) from error

    def add(
        self, modules: Sequence[str], tensors: Mapping[str, torch.Tensor], details: Mapping[str, Any] | None = None
    ) -> StoredUnit:
        """Append the tensors of a unit.

        Raises:
            StorageError: the disk is full or fails.
        """
        start, places, at = self._end, {}, 0
        try:
            for name, tensor in tensors.items():
                at = -(-at // _ALIGNMENT) * _ALIGNMENT
                places[name] = StoredTensorPlace(CODES[tensor.dtype], tuple(tensor.shape), at)
                at += self._write(start + at, tensor)
            self._end = start + page_up(max(at, 1))
            os.ftruncate(self._file, self._end)
        except OSError as error:
            raise _write_error(self.path, error) from error
        return StoredUnit(tuple(modules), start, self._end - start, places, dict(details or {}))

    def _write(self, offset: int, tensor: torch.Tensor) -> int:
        if not tensor.numel():
            return 0
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done : done + _WRITTEN_AT_ONCE], offset + done)
            # drop written pages: they are not read soon, and a large model needs their memory
            with contextlib.suppress(OSError, AttributeError):
                os.fdatasync(self._file)
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        return len(data)

    def close(self) -> None:
        """Make the file durable and close it.

        Raises:
            StorageError: the disk is full or fails.
        """
        try:
            os.fsync(self._file)
        except OSError as error:
            raise _write_error(self.path, error) from error
        finally:
            os.close(self._file)


class MappedFile:
    """File mapped for reading; its pages stay in the page cache while memory is free.

    Raises:
        StorageError: the file cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise StorageError(f"{path} cannot be mapped: {error}") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the memory is read-only
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._faults = -1
        self._left = 0  # bytes to request before the next count of page faults

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Let the system read a range before it is used.

        A request takes time for each page of the range. So after requests for as many bytes as the file has, further
        calls do nothing until the process has had more major page faults.
        """
        if self._left <= 0:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            if faults == self._faults:
                return
            self._faults, self._left = faults, len(self._memory)
        self._left -= nbytes
        self._memory.madvise(mmap.MADV_WILLNEED, offset, nbytes)


def file_key(files: Sequence[Path], facts: Mapping[str, Any]) -> str:
    """Return the key of a weight file: a hash of names, sizes and modification times of the files, and of `facts`."""
    listed = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    text = json.dumps([_VERSION, listed, sorted(facts.items())], default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def locked_directory(directory: Path, key: str) -> Iterator[None]:
    """Hold the lock of a weight file inside the `with` block, so that one process makes the file while others wait.

    Raises:
        StorageError: the directory cannot be written.
    """
    try:
        make_directory(directory)
        lock = os.open(directory / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _write_error(directory, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:  # a child forked meanwhile shares the lock, so closing the file is not enough
            fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        os.close(lock)


def write_index(path: Path, index: WeightIndex) -> None:
    """Write the index, which makes the weight file valid.

    Raises:
        StorageError: the index cannot be written.
    """
    try:
        write_atomically(path, json.dumps(asdict(index)), durable=True)
    except OSError as error:
        raise _write_error(path, error) from error


def read_index(path: Path, weights: Path) -> WeightIndex | None:
    """Return the index of a weight file; None if the index or the file is missing or incomplete."""
    try:
        fields = json.loads(path.read_bytes())
        index = WeightIndex(
            tuple(_unit(unit) for unit in fields["units"]),
            {name: _unit(unit) for name, unit in fields["parameters"].items()},
            {name: _place(place) for name, place in fields["absent"].items()},
        )
        everything = (*index.units, *index.parameters.values())
        if weights.stat().st_size < max((unit.offset + unit.nbytes for unit in everything), default=0):
            return None
        return index
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _unit(fields: Mapping[str, Any]) -> StoredUnit:
    tensors = {name: _place(place) for name, place in fields["tensors"].items()}
    return StoredUnit(tuple(fields["modules"]), fields["offset"], fields["nbytes"], tensors, fields["details"])


def _place(fields: Mapping[str, Any]) -> StoredTensorPlace:
    return StoredTensorPlace(fields["dtype"], tuple(fields["shape"]), fields["offset"])


def _write_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the weight file {path} cannot be written: {error_name(error.errno or errno.EIO)}; give weights_directory, a "
        "directory on a disk with room for the weights"
    )
