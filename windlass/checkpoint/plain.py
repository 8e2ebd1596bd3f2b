"""Plain data as JSON: what JSON lacks is tagged, tensors are set aside under names, and nothing is ever pickled."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import torch

from windlass.base.errors import CheckpointError

# A tagged value is an object with this one key: {"$": [kind, payload]}.
TAG = "$"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def encode(value: object, prefix: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Plain data as what `json.dumps` takes, and the tensors found in it by the names they are to be stored under.

    Tuples, sets, bytes, dtypes, arrays of numpy, dictionaries whose keys are not all strings, infinities and NaNs come
    back as they were, namespaces as argparse's, numbers of numpy as Python's, paths as text.

    Args:
        prefix: begins each tensor's name, such as `plain/`.

    Raises:
        CheckpointError: a value of any other type, with the path to it.
    """
    found: dict[str, torch.Tensor] = {}
    return _encode(value, "", prefix, found), found


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `encode`, with the tensors that were set aside.

    Raises:
        CheckpointError: an unknown tag or a tensor that is not there: the text was not written by `encode`.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind, payload = _tagged(value)
    if kind == "tuple" and isinstance(payload, list):
        return tuple(decode(item, tensors) for item in payload)
    if kind == "dict" and isinstance(payload, list):
        return {decode(key, tensors): decode(item, tensors) for key, item in payload}
    if kind == "float" and payload in ("inf", "-inf", "nan"):
        return float(payload)
    if kind == "tensor" and payload in tensors:
        return tensors[payload]
    if kind in _READ and isinstance(payload, _READ[kind][0]):
        try:
            return _READ[kind][1](decode(payload, tensors))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"plain data of the checkpoint holds {value!r:.200}: {error}") from error
    raise CheckpointError(f"plain data of the checkpoint holds {value!r:.200}, which this version cannot read")


def tensor_names(value: Any) -> list[str]:
    """The names of the tensors that encoded plain data refers to."""
    if isinstance(value, list):
        return [name for item in value for name in tensor_names(item)]
    if not isinstance(value, dict):
        return []
    if TAG in value:
        kind, payload = _tagged(value)
        return [str(payload)] if kind == "tensor" else tensor_names(payload)
    return [name for item in value.values() for name in tensor_names(item)]


def _array(parts: list[Any]) -> Any:
    """An array of numpy's: its type's code, its shape, its bytes."""
    import numpy

    code, shape, raw = parts
    if numpy.dtype(code).hasobject:
        raise ValueError("an array of objects")
    return numpy.ndarray(shape, code, bytearray(raw.numpy().tobytes()))


# kind -> what its payload is, and what is made of that
_READ: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "set": (list, set),
    "frozenset": (list, frozenset),
    "bytes": (str, bytes.fromhex),
    "dtype": (str, lambda name: _DTYPES[name]),
    "namespace": (dict, lambda values: Namespace(**values)),
    "array": (list, _array),
}


def _tagged(value: dict[str, Any]) -> tuple[Any, Any]:
    pair = value[TAG]
    if len(value) != 1 or not isinstance(pair, list) or len(pair) != 2:
        raise CheckpointError(f"plain data of the checkpoint holds {value!r:.200}, which this version cannot read")
    return pair[0], pair[1]


def _encode(value: object, path: str, prefix: str, found: dict[str, torch.Tensor]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TAG: ["float", str(float(value))]}
    if isinstance(value, torch.Tensor):
        name = f"{prefix}{len(found)}/{path}"
        found[name] = value
        return {TAG: ["tensor", name]}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, f"{path}[{at}]", prefix, found) for at, item in enumerate(value)]
        return items if isinstance(value, list) else {TAG: ["tuple", items]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, prefix, found)
    return _encode_other(value, path, prefix, found)


def _encode_other(value: object, path: str, prefix: str, found: dict[str, torch.Tensor]) -> Any:
    """What is plain and has no place in JSON; scripts put it into their client state."""
    if isinstance(value, (set, frozenset)):
        items = [_encode(item, f"{path} (an item)", prefix, found) for item in value]
        return {TAG: ["set" if isinstance(value, set) else "frozenset", items]}
    if isinstance(value, (bytes, bytearray)):
        return {TAG: ["bytes", value.hex()]}
    if isinstance(value, torch.dtype):
        return {TAG: ["dtype", str(value)]}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (Namespace, SimpleNamespace)):
        return {TAG: ["namespace", _encode(vars(value), path, prefix, found)]}
    numpy = sys.modules.get("numpy")  # a value of its kinds is there only if it is
    if numpy is not None and isinstance(value, numpy.generic) and isinstance(value.item(), (bool, int, float, str)):
        return _encode(value.item(), path, prefix, found)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcMmSU":
        raw = torch.tensor(bytearray(value.tobytes()), dtype=torch.uint8, device="cpu")
        return {TAG: ["array", [value.dtype.str, list(value.shape), _encode(raw, path, prefix, found)]]}
    raise CheckpointError(
        f"{path or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "hold: give None, bool, int, float, str, bytes, tensors, arrays of numpy, or lists, tuples, sets, dicts and "
        "namespaces of them (checkpoints are never pickled)"
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, prefix: str, found: dict[str, torch.Tensor]) -> Any:
    dotted = f"{path}." if path else ""
    items = [(key, _encode(item, f"{dotted}{key}", prefix, found)) for key, item in value.items()]
    if all(isinstance(key, str) for key, _ in items) and TAG not in value:
        return dict(items)
    return {TAG: ["dict", [[_encode(key, f"{dotted}{key} (a key)", prefix, found), item] for key, item in items]]}
