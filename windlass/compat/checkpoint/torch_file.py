"""Reader of files of `torch.save` that executes no code: plain data, and tensors as ranges of the file's bytes.

[Note: foreign pickles] The file is a zip archive with one pickle, and one record of bytes for each storage. A pickle
names functions and classes for its reader to call. This reader has a short list of names and replaces each by an
inert object of its own: the function that rebuilds a tensor only records the tensor's byte range, and a class of
DeepSpeed becomes a stand-in with attributes. Any other name raises an error with the name, which is never imported. So
values come from the bytes, never from code. See [Note: reading pickles] in safe_unpickler.py.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from sys import getsizeof
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.base.regular_file import open_regular
from windlass.checkpoint.key_validation import KeyValidator
from windlass.checkpoint.safetensors_file import TensorFile, tensor_bytes
from windlass.compat.checkpoint.pickle_stand_ins import (
    LossScalerStandIn,
    NamespaceStandIn,
    NumpyArrayStandIn,
    NumpyDtypeStandIn,
    PickleStandIn,
    ZeroStageStandIn,
)
from windlass.compat.checkpoint.safe_unpickler import AllowedFunction, MemoryBudget, SafeUnpickler
from windlass.compat.checkpoint.zip_records import NotZipError, ZipError, ZipRecord, ZipRecords

_STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_LITERAL = "literal:"
_FLOOR = 16 << 20  # bytes of memory allowed for the plain data of any file
_TIMES = 3  # further memory allowed, as a multiple of the file size
_LONGEST_PICKLE = 1 << 30
_MOST_DIMS = 64


@dataclass(frozen=True, slots=True)
class _Storage:
    """Storage in a file: the zip record that holds its bytes, and the dtype of its elements."""

    dtype: torch.dtype
    record: ZipRecord

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a storage accepts no state")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in a file. It begins at byte `begin` of `path`, inside `record`. `strides` count elements."""

    path: Path
    record: ZipRecord
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a tensor accepts no state")

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def is_contiguous(self) -> bool:
        """Return True if its elements are consecutive in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return not self.numel()
            expected *= size
        return True


def read_torch_file(path: Path, root: Path | None = None) -> Any:
    """Read the plain data of a file that `torch.save` wrote, with a `StoredTensor` for each tensor.

    Memory: some megabytes and at most five times the size of the file (reached with tensors of a few elements).

    Args:
        root: the checkpoint's directory, by default the file's. Links that lead out of it are refused.

    Raises:
        CheckpointError: the file cannot be read, is not one of `torch.save`, is damaged, or names a function or class
            that is neither a tensor nor plain data, which is not called.
    """
    try:
        with open_regular(path, path.parent if root is None else root) as file:
            return _read_pickle(path, file)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint file {path} cannot be read: {error.strerror or error}; check path and rights"
        ) from error
    except NotZipError as error:
        raise CheckpointError(
            f"{path} is damaged, or an old file of torch.save that is one pickle ({error}); load it with the program "
            "that wrote it and save it again"
        ) from error
    except ZipError as error:
        raise CheckpointError(f"{path} is damaged: {error}; restore it or load another checkpoint") from error
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged: its pickle cannot be read ({type(error).__name__}: {error!s:.300}); restore it or "
            "load another checkpoint"
        ) from error


def _read_pickle(path: Path, file: BufferedReader) -> Any:
    records = ZipRecords(file)
    pickled, order = records.get("data.pkl"), records.get("byteorder")
    if pickled is None:
        raise CheckpointError(f"{path} is not a file of torch.save: it has no data.pkl; load another checkpoint")
    if order is not None and records.read(order, 16) != b"little":
        raise CheckpointError(
            f"{path} has big-endian bytes, which are not supported; save it on a little-endian machine"
        )
    text = records.read(pickled, _LONGEST_PICKLE)
    budget = MemoryBudget(_FLOOR + _TIMES * path.stat().st_size)
    tensors = _PickleResolver(path, records)
    return SafeUnpickler(text, budget, tensors.resolve_name, tensors.resolve_storage).load()


def entry_of_elements(tensor: StoredTensor, start: int, stop: int) -> str:
    """Return the `TorchFile` entry for elements `[start, stop)` of this flat tensor."""
    size = tensor.dtype.itemsize
    return f"{tensor.begin + start * size}:{tensor.begin + stop * size}"


def crc32_of_elements(tensor: StoredTensor, start: int, stop: int) -> int | None:
    """Return the checksum of these elements if they are a full record, else None: the file has none for a part."""
    size, record = tensor.dtype.itemsize, tensor.record
    whole = (tensor.begin + start * size, tensor.begin + stop * size) == (record.begin, record.end)
    return record.crc32 if whole else None


def literal_entry(tensor: torch.Tensor) -> str:
    """Return an entry that contains the bytes themselves, for a value that the file stores as a plain number."""
    return _LITERAL + bytes(tensor_bytes(tensor)).hex()


class TorchFile(TensorFile):
    """File of `torch.save`. An entry is a byte range inside one record, and the record's checksum covers it."""

    def byte_range(self, entry: str) -> tuple[int, int]:
        """Return the byte range `(begin, end)` of an entry in the file; `(0, length)` for a literal entry.

        Raises:
            CheckpointError: no record contains the bytes.
        """
        if entry.startswith(_LITERAL):
            return 0, (len(entry) - len(_LITERAL)) // 2
        begin, _, end = entry.partition(":")
        first, last = int(begin), int(end)
        if first < last and self._records.record_covering(first, last) is None:
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: no record contains the bytes {entry}; load another "
                "checkpoint"
            )
        return first, last

    def check_entry(self, entry: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Check the entry as `TensorFile` does, except the dtype, which only the pickle records."""
        self.check_size(entry, math.prod(shape) * dtype.itemsize)

    def read_part(self, entry: str, offset: int, tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
        """Fill `tensor` with the entry's bytes from byte `offset` on, also for a literal entry."""
        if not entry.startswith(_LITERAL):
            return super().read_part(entry, offset, tensor)
        raw = tensor_bytes(tensor)
        raw[:] = list(bytes.fromhex(entry[len(_LITERAL) :])[offset : offset + len(raw)])
        return raw

    def verify_checksum(self, entry: str, crc32: int | None) -> None:
        """Verify the checksum as `TensorFile` does. Literal entries have none."""
        if not entry.startswith(_LITERAL):
            super().verify_checksum(entry, crc32)

    def first_damaged_record(self) -> str:
        """Return the name of the first record whose checksum does not match; an empty text if there is none."""
        self._records = self._records_of(self._open())
        return next((record.name for record in self._records if not self._records.has_valid_crc32(record)), "")

    def _checksum_range(self, entry: str) -> tuple[int, int, int]:
        begin, end = self.byte_range(entry)
        record = self._records.record_covering(begin, end)
        if record is None:  # an empty entry
            return begin, end, 0
        return record.begin, record.end, record.crc32

    def _read_header(self, file: BufferedReader) -> None:
        self._records = self._records_of(file)

    def _records_of(self, file: BufferedReader) -> ZipRecords:
        try:
            return ZipRecords(file)
        except (ZipError, OSError) as error:
            raise CheckpointError(
                f"the checkpoint file {self.path} is damaged: {error}; load another checkpoint"
            ) from error


def find_damaged_record(path: Path) -> str:
    """Return the name of the first record of a `torch.save` file whose checksum does not match; empty if none."""
    file = TorchFile(path)
    with file:
        return file.first_damaged_record()


class _PickleResolver:
    """Resolver of the names (of functions and classes) and the persistent IDs (of storages) in one file's pickle."""

    def __init__(self, path: Path, records: ZipRecords) -> None:
        self._path, self._records = path, records
        self._storages: dict[tuple[str, torch.dtype], _Storage] = {}
        self._known = {**_KNOWN, ("torch._utils", "_rebuild_tensor_v2"): AllowedFunction(self._rebuild_tensor)}

    def resolve_name(self, module: str, name: str) -> Any:
        """Return the object for a name. Raises CheckpointError for a name that is not allowed."""
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in self._known:
            return self._known[module, name]
        raise CheckpointError(
            f"{self._path} is refused: it requests {module:.100}.{name:.100}, which is neither a tensor nor plain "
            "data; nothing was executed. If you trust its author, load it with the program that wrote it, and save "
            "without that object"
        )

    def resolve_storage(self, key: Any) -> _Storage:
        """Return the storage for a key `("storage", type, record, location, elements)`.

        Raises:
            ValueError, CheckpointError: the key is malformed, or its record is missing or too short.
        """
        if type(key) is not tuple or len(key) != 5:
            raise ValueError("a storage without its type, record, place and size")
        kind, dtype, name, _, numel = key
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(name) is not str or type(numel) is not int:
            raise CheckpointError(f"{self._path} is damaged: a storage has an unknown type; load another checkpoint")
        found = self._storages.get((name, dtype))
        if found is None:
            record = self._records.get(f"data/{name}")
            if record is None:
                raise CheckpointError(
                    f"{self._path} is damaged: it has no record of storage {name!r:.100}; load another checkpoint"
                )
            found = self._storages[name, dtype] = _Storage(dtype, record)
        if found.record.end - found.record.begin < numel * dtype.itemsize:
            raise CheckpointError(
                f"{self._path} is damaged: the record of storage {name!r:.100} is too short; load another checkpoint"
            )
        return found

    def _rebuild_tensor(
        self, budget: MemoryBudget, storage: Any, offset: Any, size: Any, stride: Any, *_: Any
    ) -> StoredTensor:
        if not isinstance(storage, _Storage):
            raise TypeError("a tensor without storage")
        if type(size) is not tuple or type(stride) is not tuple or not len(size) == len(stride) <= _MOST_DIMS:
            raise ValueError("a tensor whose sizes and strides are not tuples")
        if any(type(number) is not int or not 0 <= number < 1 << 63 for number in (*size, *stride, offset)):
            raise ValueError("a tensor whose sizes, strides or offset are not valid")
        budget.charge(128 + 8 * len(size))
        record, width = storage.record, storage.dtype.itemsize
        found = StoredTensor(self._path, record, record.begin + offset * width, storage.dtype, size, stride)
        last = sum((length - 1) * step for length, step in zip(size, stride, strict=True)) + 1 if found.numel() else 0
        if found.begin + last * width > record.end:
            raise ValueError("a tensor that reaches beyond its storage")
        return found


def _from_type(budget: MemoryBudget, make: Any, kind: Any, args: Any, state: Any) -> Any:
    if not isinstance(make, AllowedFunction) or type(args) is not tuple or len(args) > _MOST_DIMS:
        raise TypeError("a tensor made by an unknown function")
    return make.function(budget, *args)


def _parameter(budget: MemoryBudget, data: Any, *_: Any) -> Any:
    if not isinstance(data, StoredTensor):
        raise TypeError("a parameter without data")
    return data


def _bytes(budget: MemoryBudget, text: Any = None, encoding: Any = None) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("bytes in another encoding")
    budget.charge(len(text) + 64)
    return bytes(text, "latin1")


def _text(budget: MemoryBudget, *parts: Any) -> str:
    if not all(type(part) in (str, int) for part in parts):
        raise TypeError("a path or device that is not made of strings")
    texts = [str(part) for part in parts]
    budget.charge(2 * sum(len(text) + 64 for text in texts))
    return "/".join(texts).replace("//", "/")


def _dictionary(budget: MemoryBudget, items: Any = ()) -> dict[Any, Any]:
    if items != () and items != []:
        raise TypeError("an ordered dictionary made from arguments")  # a pickle sets the items later, one by one
    budget.charge(64)
    return {}


def _size(budget: MemoryBudget, numbers: Any = ()) -> tuple[Any, ...]:
    if not isinstance(numbers, (list, tuple)) or len(numbers) > _MOST_DIMS:
        raise ValueError("a torch.Size that is not a few numbers")
    budget.charge(getsizeof(numbers))
    return tuple(numbers)


def _set(budget: MemoryBudget, items: Any = ()) -> set[Any]:
    if not isinstance(items, (list, tuple)):
        raise TypeError("a set that is not made from a list")
    keys = KeyValidator()
    for item in items:
        keys.require(item)
    budget.charge(216 + 96 * len(items))
    return set(items)


def _number(budget: MemoryBudget, dtype: Any, raw: Any = b"") -> Any:
    """Return a numpy scalar as a Python number."""
    code = dtype.dtype_code() if isinstance(dtype, NumpyDtypeStandIn) else ""
    form = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "b1": "?", "u1": "B"}
    form |= {"u8": "Q", "u4": "I", "u2": "H"}
    if code not in form or not isinstance(raw, bytes):
        raise TypeError(f"a number of numpy's type {code!r:.100}")
    if len(raw) != struct.calcsize("<" + form[code]):
        raise ValueError(f"a number of numpy's type {code!r} of {len(raw)} bytes")
    budget.charge(32)
    return struct.unpack("<" + form[code], raw)[0]


def _array(budget: MemoryBudget, *_: Any) -> NumpyArrayStandIn:
    budget.charge(200)
    return NumpyArrayStandIn()


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): AllowedFunction(_dictionary),
    ("torch._utils", "_rebuild_parameter"): AllowedFunction(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): AllowedFunction(_from_type),
    ("torch", "Tensor"): PickleStandIn,
    ("torch.nn.parameter", "Parameter"): PickleStandIn,
    ("torch", "Size"): AllowedFunction(_size),
    ("torch", "device"): AllowedFunction(_text),
    ("builtins", "set"): AllowedFunction(_set),
    ("__builtin__", "set"): AllowedFunction(_set),
    ("__builtin__", "frozenset"): AllowedFunction(lambda budget, items=(): frozenset(_set(budget, items))),
    ("builtins", "frozenset"): AllowedFunction(lambda budget, items=(): frozenset(_set(budget, items))),
    ("builtins", "bytes"): AllowedFunction(lambda budget: b""),
    ("__builtin__", "bytes"): AllowedFunction(lambda budget: b""),
    ("_codecs", "encode"): AllowedFunction(_bytes),
    ("argparse", "Namespace"): NamespaceStandIn,
    ("pathlib", "PosixPath"): AllowedFunction(_text),
    ("pathlib._local", "PosixPath"): AllowedFunction(_text),
    ("numpy", "dtype"): NumpyDtypeStandIn,
    ("numpy", "ndarray"): NumpyArrayStandIn,
    ("numpy.core.multiarray", "_reconstruct"): AllowedFunction(_array),
    ("numpy._core.multiarray", "_reconstruct"): AllowedFunction(_array),
    ("numpy.core.multiarray", "scalar"): AllowedFunction(_number),
    ("numpy._core.multiarray", "scalar"): AllowedFunction(_number),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): LossScalerStandIn,
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): LossScalerStandIn,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): ZeroStageStandIn,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): PickleStandIn,
}
