"""Encoding of plain data as JSON, without pickle. Values that JSON lacks are tagged; tensors are stored apart."""

from __future__ import annotations

import math
import re
import reprlib
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.key_validation import KeyValidator
from windlass.checkpoint.stored_objects import UnknownObject, from_stored_object, to_stored_object

# a tagged value is an object with this one key: {"$": [kind, payload]}
TAG = "$"
MOST_DEPTH = 64  # maximum nesting depth of values
_MOST_BITS = 8000  # limit for integers: Python refuses to parse very large ones (over 4300 digits) from text
_ENCODED_DEPTH = 4 * MOST_DEPTH + 8  # a tagged dictionary takes four levels of JSON
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class UnknownEnumMember:
    """Placeholder for a stored enumeration member that no imported module defines when the checkpoint is read.

    Attributes:
        module: module that defines the enumeration.
        qualname: name of the enumeration in its module.
        name: name of the member.
    """

    module: str
    qualname: str
    name: str


@dataclass
class _FoundTensors:
    """Tensors found during encoding, by the names under which they are stored.

    Attributes:
        tensor_types: classes whose objects are stored as tensors.
        keys: validator of all keys, with the limits of a load, so that all saved data can be loaded.
    """

    prefix: str
    tensor_types: tuple[type[Any], ...]
    tensors: dict[str, Any] = field(default_factory=dict)
    keys: KeyValidator = field(default_factory=KeyValidator)


def encode(
    value: object, prefix: str, tensor_types: tuple[type[Any], ...] = (torch.Tensor,)
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Encode plain data for `json.dumps`.

    Return the encoded value, and the tensors found in it by the names under which they are stored.

    Tuples, sets, bytes, dtypes, numpy arrays, dictionaries with other keys than strings, infinities and NaNs are
    restored exactly. Namespaces are restored as `argparse.Namespace`, numpy numbers as Python's numbers, paths as text,
    bytearrays as bytes, named tuples as tuples, other mappings as dictionaries. Members of enumerations are stored by
    name, except that those of number and text types become plain numbers and texts. Objects of classes that a load may
    rebuild are stored as their state ([Note: stored objects]).

    Args:
        prefix: prefix of each tensor's name, such as `plain/`.
        tensor_types: classes whose objects are stored as tensors.

    Raises:
        CheckpointError: a value of any other type, with the path to it; an integer of more than 8000 bits; or values
            nested too deep to be read again, or that contain themselves.
    """
    found = _FoundTensors(prefix, tensor_types)
    return _encode(value, "", found, 0), found.tensors


def require_depth(value: Any) -> None:
    """Raise CheckpointError if encoded plain data is nested too deep to be read."""
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if depth > _ENCODED_DEPTH:
            raise CheckpointError(f"plain data is more than {MOST_DEPTH} values deep")
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
        stack.extend((one, depth + 1) for one in inner if isinstance(one, (dict, list)))


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode the result of `encode`, with its tensors.

    Raises:
        CheckpointError: an unknown tag or a missing tensor: the text was not written by `encode`.
    """
    return _decode(value, tensors, KeyValidator())


def _decode(value: Any, tensors: Mapping[str, torch.Tensor], keys: KeyValidator) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors, keys) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors, keys) for key, item in value.items()}
    kind, payload = _tagged(value)
    try:
        return _READ[kind](payload, tensors, keys)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"plain data of the checkpoint holds {_abbreviate(value)}, which cannot be read ({type(error).__name__}: "
            f"{error!s:.100})"
        ) from error


def tensor_names(value: Any) -> list[str]:
    """Return the names of the tensors that encoded plain data refers to. Raises CheckpointError for an invalid tag."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if TAG in value:
        kind, payload = _tagged(value)
        if kind == "tensor" and not isinstance(payload, str):
            raise CheckpointError(f"plain data of the checkpoint holds {_abbreviate(value)}, which names no tensor")
        return [payload] if kind == "tensor" else tensor_names(payload)
    return [name for item in value.values() for name in tensor_names(item)]


def _items(payload: Any, tensors: Mapping[str, torch.Tensor], keys: KeyValidator) -> list[Any]:
    if not isinstance(payload, list):
        raise TypeError("it has no list of items")
    return [_decode(item, tensors, keys) for item in payload]


def _keyed(payload: Any, tensors: Mapping[str, torch.Tensor], keys: KeyValidator) -> dict[Any, Any]:
    found = {}
    for key, item in _items(payload, tensors, keys):
        keys.require(key)
        found[key] = item
    return found


def _members(payload: Any, tensors: Mapping[str, torch.Tensor], keys: KeyValidator) -> list[Any]:
    found = _items(payload, tensors, keys)
    for item in found:
        keys.require(item)
    return found


def _special(payload: Any, tensors: Mapping[str, torch.Tensor], keys: KeyValidator) -> float:
    return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[payload]


def _namespace(payload: Any, tensors: Mapping[str, torch.Tensor], keys: KeyValidator) -> Namespace:
    values = _decode(payload, tensors, keys)
    if not isinstance(values, dict):
        raise TypeError("a namespace without names")
    return Namespace(**values)


def _array(payload: Any, tensors: Mapping[str, torch.Tensor], keys: KeyValidator) -> Any:
    """Decode a numpy array from its type code, shape and bytes."""
    import numpy

    code, shape, raw = _items(payload, tensors, keys)
    if not isinstance(code, str) or not _ARRAY_CODE.fullmatch(code):
        raise ValueError("an array of a type that contains neither numbers nor text")
    if not isinstance(raw, torch.Tensor) or raw.dtype is not torch.uint8:
        raise TypeError("an array without bytes")
    return numpy.ndarray(shape, code, bytearray(raw.numpy().tobytes()))


def _enum_member(payload: Any, tensors: Mapping[str, torch.Tensor], keys: KeyValidator) -> Any:
    """Look up a member of an enumeration in the modules that are imported already. Nothing is imported or called."""
    module, qualname, name = payload
    if not all(isinstance(part, str) for part in payload):
        raise TypeError("an enumeration without names")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    if isinstance(found, type) and issubclass(found, Enum) and name in found.__members__:
        return found.__members__[name]
    return UnknownEnumMember(module, qualname, name)


def _object(payload: Any, tensors: Mapping[str, torch.Tensor], keys: KeyValidator) -> Any:
    module, qualname, state = payload
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise TypeError("an object without the name of its class")
    return from_stored_object(UnknownObject(module, qualname, _decode(state, tensors, keys)))


_ARRAY_CODE = re.compile(r"[<>|=][biufcMmSU][0-9]{1,9}(\[[0-9a-zA-Z]{1,20}\])?")
# kind -> decoder of the payload
_READ: dict[str, Callable[[Any, Mapping[str, torch.Tensor], KeyValidator], Any]] = {
    "tuple": lambda payload, tensors, keys: tuple(_items(payload, tensors, keys)),
    "dict": _keyed,
    "float": _special,
    "tensor": lambda payload, tensors, keys: tensors[payload],
    "set": lambda payload, tensors, keys: set(_members(payload, tensors, keys)),
    "frozenset": lambda payload, tensors, keys: frozenset(_members(payload, tensors, keys)),
    "bytes": lambda payload, tensors, keys: bytes.fromhex(payload),
    "dtype": lambda payload, tensors, keys: _DTYPES[payload],
    "namespace": _namespace,
    "array": _array,
    "enum": _enum_member,
    "object": _object,
}


def _tagged(value: dict[str, Any]) -> tuple[Any, Any]:
    pair = value[TAG]
    if len(value) != 1 or not isinstance(pair, list) or len(pair) != 2:
        raise CheckpointError(
            f"plain data of the checkpoint holds {_abbreviate(value)}, which this version cannot read"
        )
    return pair[0], pair[1]


def _abbreviate(value: Any) -> str:
    """Return an abbreviated text of a value of any size, without building the full text."""
    return reprlib.repr(value)[:200]


def _encode(value: object, path: str, found: _FoundTensors, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return _check_integer(value, path)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: ["float", str(float(value))]}
    if isinstance(value, found.tensor_types):
        name = f"{found.prefix}{len(found.tensors)}/{path}".encode("utf-8", "replace").decode()
        found.tensors[name] = value
        return {TAG: ["tensor", name]}
    if depth >= MOST_DEPTH:
        raise CheckpointError(
            f"{path[:100]}...: values more than {MOST_DEPTH} deep, or that contain themselves, are not saved"
        )
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{path}[{at}]", found, depth + 1) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {TAG: ["tuple", items]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, found, depth)
    return _encode_other(value, path, found, depth)


def _check_integer(value: int, path: str) -> int:
    if value.bit_length() > _MOST_BITS:
        raise CheckpointError(f"{path or 'the value'} is an integer of {value.bit_length()} bits, which is not saved")
    return int(value)


def _encode_other(value: object, path: str, found: _FoundTensors, depth: int) -> Any:
    """Encode values without a JSON equivalent that scripts put into their client state."""
    if isinstance(value, (set, frozenset)):
        items = [_encode_key(item, f"{path} (an item)", found, depth) for item in value]
        return {TAG: ["set" if isinstance(value, set) else "frozenset", items]}
    if isinstance(value, (bytes, bytearray)):
        return {TAG: ["bytes", value.hex()]}
    if isinstance(value, torch.dtype):
        return {TAG: ["dtype", str(value)]}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return {TAG: ["enum", [type(value).__module__, type(value).__qualname__, value.name]]}
    if isinstance(value, UnknownEnumMember):
        return {TAG: ["enum", [value.module, value.qualname, value.name]]}
    if isinstance(value, (Namespace, SimpleNamespace)):
        return {TAG: ["namespace", _encode(vars(value), path, found, depth + 1)]}
    numpy = sys.modules.get("numpy")  # numpy values can only exist if numpy was imported
    if numpy is not None and isinstance(value, numpy.generic) and isinstance(value.item(), (bool, int, float, str)):
        return _encode(value.item(), path, found, depth)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcMmSU":
        raw = torch.tensor(bytearray(value.tobytes()), dtype=torch.uint8, device="cpu")
        name = f"{found.prefix}{len(found.tensors)}/{path}".encode("utf-8", "replace").decode()
        found.tensors[name] = raw
        return {TAG: ["array", [value.dtype.str, list(value.shape), {TAG: ["tensor", name]}]]}
    return _encode_object(value, path, found, depth)


def _encode_object(value: object, path: str, found: _FoundTensors, depth: int) -> Any:
    """Encode an object of a class that a load may rebuild."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        stored = to_stored_object(value)
    except ValueError as error:
        raise CheckpointError(f"{path or 'the value'} is a {name}, which a checkpoint cannot hold: {error}") from error
    if stored is not None:
        return {TAG: ["object", [stored.module, stored.qualname, _encode(stored.state, path, found, depth + 1)]]}
    raise CheckpointError(
        f"{path or 'the value'} is a {name}, which a checkpoint cannot "
        "hold: give None, bool, int, float, str, bytes, members of enumerations, tensors, arrays of numpy, or lists, "
        "tuples, sets, dicts and namespaces of them (checkpoints are never pickled). To save its objects as their "
        f"state, call torch.serialization.add_safe_globals([{type(value).__qualname__}]) before saving and loading"
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, found: _FoundTensors, depth: int) -> Any:
    dotted = f"{path}." if path else ""
    items = [(key, _encode(item, f"{dotted}{key}", found, depth + 1)) for key, item in value.items()]
    if all(isinstance(key, str) for key, _ in items) and TAG not in value:
        return dict(items)
    return {TAG: ["dict", [[_encode_key(key, f"{dotted}{key} (a key)", found, depth), item] for key, item in items]]}


def _encode_key(key: Any, path: str, found: _FoundTensors, depth: int) -> Any:
    """Encode a dictionary key or a set item."""
    encoded = _encode(key, path, found, depth + 1)
    try:
        # Keys inside of this one were counted when they were encoded.
        found.keys.require(decode(encoded, {}))
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return encoded
