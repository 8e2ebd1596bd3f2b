"""Header of a safetensors file, checked before any tensor is allocated: https://github.com/huggingface/safetensors"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
METADATA_KEY = "__metadata__"  # key of the header that no tensor can have as its name
_LONGEST_HEADER = 100_000_000  # limit of safetensors, in bytes
_MOST_DIMS = 64
_LARGEST = 1 << 63


class SafetensorsHeaderError(ValueError):
    """Error for a damaged or forged header."""


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Location of one tensor: bytes `[begin, end)` of the data.

    `dtype` is the name of a dtype in safetensors. windlass may lack this dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """All tensors of a file by name, the file offset at which the data begins, and the metadata."""

    entries: dict[str, SafetensorsEntry]
    data_offset: int
    metadata: dict[str, str]


def read_safetensors_header(file: BufferedReader) -> SafetensorsHeader:
    """Read and check the header of an open file.

    Raises:
        SafetensorsHeaderError: the header is invalid, a tensor is outside the file or overlaps another one, or its
            number of bytes does not match its shape and supported dtype.
        OSError: the file can't be read.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(_LONGEST_HEADER, size - 8):
        raise SafetensorsHeaderError(f"its header of {length} bytes does not fit in the file of {size} bytes")
    try:
        fields = json.loads(file.read(length).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SafetensorsHeaderError(f"its header is not JSON: {type(error).__name__}: {str(error)[:200]}") from error
    if not isinstance(fields, dict):
        raise SafetensorsHeaderError("its header is not a JSON object")
    remarks = fields.pop(METADATA_KEY, None) or {}
    if not isinstance(remarks, dict) or not all(isinstance(value, str) for value in remarks.values()):
        raise SafetensorsHeaderError(f"its {METADATA_KEY} is not an object of strings")
    data = 8 + length
    entries = {name: _entry(name, one, size - data) for name, one in fields.items()}
    end = 0
    for name, one in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if one.begin < end:
            raise SafetensorsHeaderError(f"tensor {name!r} overlaps another one, at byte {one.begin}")
        end = one.end
    return SafetensorsHeader(entries, data, remarks)


def encode_safetensors_header(
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Encode the header of a file whose tensors are stored in the order of `entries`.

    Args:
        metadata: entries of the file's metadata, in addition to `format`.

    Raises:
        ValueError: no safetensors file can hold a name, or `metadata` has `format`. The message gives the name.
        KeyError: a dtype is not in `CODES`.
    """
    for name in (*entries, *metadata):
        require_tensor_name(name)
    if "format" in metadata:
        raise ValueError("'format' is a key of the file's own metadata; rename the parameter")
    fields: dict[str, object] = {METADATA_KEY: {"format": "pt", **metadata}}
    position = 0
    for name, (dtype, shape) in entries.items():
        span = [position, position + math.prod(shape) * dtype.itemsize]
        fields[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": span}
        position = span[1]
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def require_tensor_name(name: str) -> None:
    """Raise ValueError for a name that no safetensors file can hold."""
    if name == METADATA_KEY:
        raise ValueError(f"{name!r} cannot name a tensor: safetensors uses the name for its metadata; rename it")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name!r} cannot name a tensor: it has a lone surrogate, which JSON cannot represent; rename it"
        ) from error


def _entry(name: str, fields: Any, data: int) -> SafetensorsEntry:
    try:
        code, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise SafetensorsHeaderError(f"its entry for tensor {name!r} is {fields!r:.200}") from error
    sizes = (*shape, begin, end)
    if not isinstance(code, str) or any(type(number) is not int or not 0 <= number < _LARGEST for number in sizes):
        raise SafetensorsHeaderError(f"its entry for tensor {name!r} is {fields!r:.200}")
    if not begin <= end <= data:
        raise SafetensorsHeaderError(
            f"tensor {name!r} has bytes {begin} to {end} of {data}: the file is truncated or damaged"
        )
    if len(shape) > _MOST_DIMS:
        raise SafetensorsHeaderError(f"tensor {name!r} has {len(shape)} dimensions")
    if code in DTYPES and math.prod(shape) * DTYPES[code].itemsize != end - begin:
        raise SafetensorsHeaderError(f"tensor {name!r} of shape {shape} and dtype {code} has {end - begin} bytes")
    return SafetensorsEntry(code, shape, begin, end)
