"""Plain data as JSON: what JSON lacks is tagged, tensors are set aside under names, and nothing is ever pickled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from windlass.base.errors import CheckpointError

# A tagged value is an object with this one key: {"$": [kind, payload]}.
TAG = "$"


def encode(value: object, prefix: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Plain data as what `json.dumps` takes, and the tensors found in it by the names they are to be stored under.

    Tuples, dictionaries whose keys are not all strings, infinities and NaNs come back as they were.

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
    raise CheckpointError(
        f"{path or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "hold: give None, bool, int, float, str, tensors, or lists, tuples and dicts of them (checkpoints are never "
        "pickled)"
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, prefix: str, found: dict[str, torch.Tensor]) -> Any:
    dotted = f"{path}." if path else ""
    items = [(key, _encode(item, f"{dotted}{key}", prefix, found)) for key, item in value.items()]
    if all(isinstance(key, str) for key, _ in items) and TAG not in value:
        return dict(items)
    return {TAG: ["dict", [[_encode(key, f"{dotted}{key} (a key)", prefix, found), item] for key, item in items]]}
