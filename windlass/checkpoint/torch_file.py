"""A file of `torch.save`, read without executing anything: plain data, and tensors as ranges of its bytes.

[Note: pickles that others wrote] Such a file is a zip archive: one pickle, and each storage as bytes. A pickle names
functions and classes for its reader to call. Ours knows a short list of names, and for each it has an inert thing of
its own: what rebuilds a tensor only notes where its bytes lie, a class of DeepSpeed's is a bag of attributes. Any other
name is an error that says it, and what it names is never looked up. So values come from the bytes, never from code.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.bag import Array, Bag, LossScaler, Namespace, ZeroStage
from windlass.checkpoint.tensor_file import TensorFile, bytes_of

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
}
_LITERAL = "literal:"


@dataclass(frozen=True)
class _Storage:
    """Bytes `[begin, end)` of the file."""

    path: Path
    dtype: torch.dtype
    begin: int
    end: int


class StoredTensor(torch.Tensor):
    """A tensor without memory (on `meta`) that knows where its bytes lie: from byte `begin` of the file `path`."""

    path: Path
    begin: int = 0

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a tensor with a state of its own")


def read_torch_file(path: Path) -> Any:
    """The plain data of a file that `torch.save` wrote, in which each tensor is a `StoredTensor`: where it lies.

    Raises:
        CheckpointError: it is no such file, it is damaged, or it asks for something to be called that is neither tensor
            nor plain data; nothing was called.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as raw:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "data.pkl" not in records:
                raise CheckpointError(f"{path} is no file of torch.save: it has no data.pkl")
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise CheckpointError(f"{path} was written on a big-endian machine, which cannot be read here")
            text = archive.read(records["data.pkl"])
            value = _Unpickler(path, text, lambda key: _place(records, key, raw)).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"the checkpoint file {path} cannot be read: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is damaged, or an old file of torch.save that is one pickle ({error}); load it with what wrote it "
            "and save it again"
        ) from error
    except Exception as error:  # a damaged pickle raises whatever its opcodes come upon
        raise CheckpointError(
            f"{path} is damaged: its pickle cannot be read ({type(error).__name__}: {error})"
        ) from error
    return value


def entry_of(tensor: StoredTensor) -> str:
    """The entry of a `TorchFile` that is this tensor."""
    return f"{tensor.begin}:{tensor.begin + tensor.numel() * tensor.element_size()}"


def entry_within(tensor: StoredTensor, start: int, stop: int) -> str:
    """The entry that is elements `[start, stop)` of this tensor, flat."""
    size = tensor.element_size()
    return f"{tensor.begin + start * size}:{tensor.begin + stop * size}"


def literal(tensor: torch.Tensor) -> str:
    """An entry that is these very bytes, for what a file has as a plain number."""
    return _LITERAL + bytes(bytes_of(tensor)).hex()


class TorchFile(TensorFile):
    """A file of `torch.save` as entries that are ranges of its bytes. It has no checksums to compare with."""

    def _read_header(self) -> tuple[dict[str, dict[str, list[int]]], int]:
        return {}, 0

    def span(self, entry: str) -> tuple[int, int]:
        """As `TensorFile`."""
        if entry.startswith(_LITERAL):
            return 0, (len(entry) - len(_LITERAL)) // 2
        begin, _, end = entry.partition(":")
        return int(begin), int(end)

    def read_part(self, entry: str, offset: int, tensor: torch.Tensor) -> ctypes.Array[ctypes.c_ubyte]:
        """As `TensorFile`."""
        if not entry.startswith(_LITERAL):
            return super().read_part(entry, offset, tensor)
        raw = bytes_of(tensor)
        raw[:] = list(bytes.fromhex(entry[len(_LITERAL) :])[offset : offset + len(raw)])
        return raw


def damaged_record(path: Path) -> str:
    """The first record of a file of `torch.save` whose bytes are not those that its own checksum is of; empty: none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() or ""
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"the checkpoint file {path} is damaged: {error}; load another one") from error


def open_tensors(path: Path) -> TensorFile:
    """The data file `path` for reading, of either kind."""
    return TorchFile(path) if path.suffix == ".pt" else TensorFile(path)


class _Inert:
    """A function that a pickle may call, and can change in no way."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *given: Any) -> Any:
        return self._function(*given)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("a pickle that changes its reader")


class _Unpickler(pickle.Unpickler):
    """See [Note: pickles that others wrote]."""

    def __init__(self, path: Path, text: bytes, place: Callable[[str], tuple[int, int]]) -> None:
        super().__init__(BytesIO(text))
        self._path, self._place = path, place

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name here."""
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise CheckpointError(
            f"{self._path} is refused: it asks for {module}.{name}, which is neither a tensor nor plain data; nothing "
            "of it was executed. If you trust who wrote it, load it with what wrote it, and save without that object"
        )

    def persistent_load(self, key: Any) -> _Storage:
        """A storage: `("storage", type, record, location, elements)`."""
        kind, dtype, record, _, numel = key
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self._path} is damaged: it has a storage of an unknown type")
        begin, end = self._place(str(record))
        if end - begin < int(numel) * dtype.itemsize:
            raise CheckpointError(f"{self._path} is damaged: the record of storage {record} is too short")
        return _Storage(self._path, dtype, begin, end)


def _place(records: Mapping[str, zipfile.ZipInfo], key: str, raw: Any) -> tuple[int, int]:
    """Where a storage's bytes lie in the file."""
    info = records[f"data/{key}"]
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"the record {info.filename} is compressed, which torch.save never does")
    raw.seek(info.header_offset)
    name, extra = struct.unpack("<26xHH", raw.read(30))
    begin = info.header_offset + 30 + name + extra
    return begin, begin + info.file_size


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor without storage")
    shape, strides = tuple(int(n) for n in size), tuple(int(n) for n in stride)
    if min((*shape, *strides, int(offset)), default=0) < 0:
        raise ValueError("a negative size")
    found = torch.empty_strided(shape, strides, dtype=storage.dtype, device="meta").as_subclass(StoredTensor)
    found.path, found.begin = storage.path, storage.begin + int(offset) * storage.dtype.itemsize
    last = sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) + 1 if math.prod(shape) else 0
    if found.begin + last * storage.dtype.itemsize > storage.end:
        raise ValueError("a tensor that reaches beyond its storage")
    return found


def _from_type(make: Any, kind: Any, args: Any, state: Any) -> Any:
    if not isinstance(make, _Inert):
        raise TypeError("a tensor made by something else")
    return make(*args)


def _parameter(data: Any, *_: Any) -> Any:
    if not isinstance(data, torch.Tensor):
        raise TypeError("a parameter without data")
    return data


def _bytes(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":
        raise ValueError("bytes in another encoding")
    return bytes(str(text), "latin1")


def _text(*parts: Any) -> str:
    return "/".join(map(str, parts)).replace("//", "/")


def _items(found: Any = ()) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else []


def _number(dtype: Any, raw: Any = b"") -> Any:
    """A number of numpy's."""
    code = dtype.given[0] if isinstance(dtype, Bag) and dtype.given else None
    form = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "b1": "?", "u1": "B"}
    form |= {"u8": "Q", "u4": "I", "u2": "H"}
    if not isinstance(code, str) or code not in form or not isinstance(raw, bytes):
        raise TypeError(f"a number of numpy's type {code!r}")
    return struct.unpack("<" + form[code], raw)[0]


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _Inert(_tensor),
    ("torch._utils", "_rebuild_parameter"): _Inert(_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): _Inert(_from_type),
    ("torch", "Tensor"): Bag,
    ("torch.nn.parameter", "Parameter"): Bag,
    ("torch", "Size"): tuple,
    ("torch", "device"): _Inert(_text),
    ("builtins", "set"): _Inert(lambda found=(): set(_items(found))),
    ("__builtin__", "set"): _Inert(lambda found=(): set(_items(found))),
    ("__builtin__", "frozenset"): _Inert(lambda found=(): frozenset(_items(found))),
    ("builtins", "frozenset"): _Inert(lambda found=(): frozenset(_items(found))),
    ("builtins", "bytes"): _Inert(lambda: b""),
    ("__builtin__", "bytes"): _Inert(lambda: b""),
    ("_codecs", "encode"): _Inert(_bytes),
    ("argparse", "Namespace"): Namespace,
    ("pathlib", "PosixPath"): _Inert(_text),
    ("pathlib._local", "PosixPath"): _Inert(_text),
    ("numpy", "dtype"): Bag,
    ("numpy", "ndarray"): Array,
    ("numpy.core.multiarray", "_reconstruct"): _Inert(lambda *_: Array()),
    ("numpy._core.multiarray", "_reconstruct"): _Inert(lambda *_: Array()),
    ("numpy.core.multiarray", "scalar"): _Inert(_number),
    ("numpy._core.multiarray", "scalar"): _Inert(_number),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): LossScaler,
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): LossScaler,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): ZeroStage,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): Bag,
}
