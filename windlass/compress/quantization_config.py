"""Entry `quantization_config` of a model's `config.json`, in compressed-tensors' schema if that describes the
format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from windlass.base.errors import ModelError
from windlass.compress.model_directory import LINEAR_ENTRY
from windlass.kernels.coded_formats import CodedWeightFormat, IntegerWeightFormat, TernaryWeightFormat
from windlass.kernels.weight_format import get_weight_format, list_weight_formats

_KEY = "quantization_config"
_OWN = "windlass"  # `quant_method` of formats that compressed-tensors does not describe
_PACKED, _INTEGERS, _FLOATS = "pack-quantized", "int-quantized", "float-quantized"
# vLLM needs `token` (one scale per token) to multiply int8 inputs; windlass has one per 128 features of a token
_INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def describe_formats(
    layers: Mapping[str, str],
    features: Mapping[str, int],
    ignored: list[str],
    renamed: Mapping[str, str] | None = None,
    *,
    of_conv1d: bool = False,
    rounds_inputs: bool = False,
) -> dict[str, Any]:
    """Return the entry for packed layers, in compressed-tensors' schema if possible.

    That schema does not describe `ternary` and the binary formats, and excludes rows that groups do not divide.

    Args:
        layers: format of each packed layer, by the layer's name.
        features: input features of each packed layer.
        ignored: linear layers that are not packed.
        renamed: names of layers in the model, which other readers use, by their names in the files; only layers whose
            two names differ.
        of_conv1d: some layers are transformers' `Conv1D`, which other readers do not recognize as linear layers.
        rounds_inputs: inputs of all layers with 8-bit integer weights are rounded to int8, not only of those with the
            format `int8`.
    """
    names: dict[str, list[str]] = {}
    for layer, name in layers.items():
        names.setdefault(name, []).append(layer)
    groups = {name: _scheme(name, rounds_inputs) for name in names}
    divides = all(features[layer] % (_group_of(name) or features[layer]) == 0 for layer, name in layers.items())
    if of_conv1d or not divides or any(scheme is None for scheme in groups.values()):
        own: dict[str, Any] = {"quant_method": _OWN, "formats": names, "ignore": ignored}
        if rounds_inputs and any(name.startswith("int8") for name in names):
            own["input_activations"] = dict(_INT8_INPUTS)
        return {**own, LINEAR_ENTRY: True} if of_conv1d else own
    kinds = {str(scheme["format"]) for scheme in groups.values() if scheme is not None}
    schemes = {
        f"group_{number}": {
            **(scheme or {}),
            "targets": ["Linear"] if len(groups) == 1 else _with_renamed(names[name], renamed or {}),
        }
        for number, (name, scheme) in enumerate(groups.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": schemes,
        "ignore": ignored,
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
    }


def _with_renamed(layers: list[str], renamed: Mapping[str, str]) -> list[str]:
    return [*layers, *(renamed[layer] for layer in layers if layer in renamed)]


def read_formats(entry: Mapping[str, Any], layers: list[str]) -> dict[str, str]:
    """Return the format of each packed layer.

    Args:
        entry: `quantization_config`.
        layers: names of layers whose tensors are packed.

    Raises:
        ModelError: the entry has a method or format that windlass does not have, or lacks the format of a layer.
    """
    method = entry.get("quant_method")
    if method == _OWN:
        found = {layer: name for name, names in entry.get("formats", {}).items() for layer in names}
        unknown = set(found.values()) - set(list_weight_formats())
        if unknown or not set(layers) <= set(found):
            raise ModelError(
                f"{_KEY}.formats names no known format for {sorted(set(layers) - set(found))[:4] or sorted(unknown)}; "
                f"formats are {', '.join(list_weight_formats())}"
            )
        return {layer: found[layer] for layer in layers}
    if method != "compressed-tensors":
        raise ModelError(f"{_KEY}.quant_method is {method!r}; windlass reads compressed-tensors, gptq, awq and its own")
    groups = list(entry.get("config_groups", {}).values())
    if not groups:
        raise ModelError(f"{_KEY}.config_groups is empty, so that no format of the packed layers is known")
    formats = {}
    for layer in layers:
        group = _group_of_layer(layer, groups)
        formats[layer] = _format_of(group.get("weights") or {}, group.get("format") or entry.get("format"))
    return formats


def _group_of_layer(layer: str, groups: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the config group of compressed-tensors that targets a layer. A target equal to the layer's name takes
    precedence over a regular expression (`re:...`) that matches the beginning of the name; a target equal to the
    layer's class comes last.

    Raises:
        ModelError: no target matches the layer, or one is not a valid regular expression.
    """
    for matches in (_is_name, _is_expression, _is_class):
        for group in groups:
            if any(matches(layer, str(target)) for target in group.get("targets", ("Linear",))):
                return group
    raise ModelError(
        f"{_KEY}.config_groups has no target for the packed layer {layer!r}; targets are its name, re: and an "
        "expression, or Linear"
    )


def _is_name(layer: str, target: str) -> bool:
    return target == layer


def _is_expression(layer: str, target: str) -> bool:
    if not target.startswith("re:"):
        return False
    try:
        return re.match(target.removeprefix("re:"), layer) is not None
    except re.error as error:
        raise ModelError(
            f"{_KEY}.config_groups has the target {target!r}, which is not a regular expression: {error}"
        ) from error


def _is_class(layer: str, target: str) -> bool:
    return target == "Linear"


def rounds_inputs(entry: Mapping[str, Any]) -> bool:
    """Return True if the entry rounds the inputs of 8-bit layers to int8 (W8A8).

    Args:
        entry: `quantization_config`.
    """
    groups = entry.get("config_groups")
    parts = [entry, *groups.values()] if isinstance(groups, Mapping) else [entry]
    found = [one.get("input_activations") for one in parts]
    return any(isinstance(one, Mapping) and one.get("num_bits") == 8 and one.get("type") == "int" for one in found)


def _group_of(name: str) -> int | None:
    form = get_weight_format(name)
    return form.group if isinstance(form, CodedWeightFormat) else None


def _scheme(name: str, rounds_inputs: bool) -> dict[str, Any] | None:
    """Return the config group of compressed-tensors for a format, without targets; None if the schema does not describe
    the format."""
    form = get_weight_format(name)
    weights: dict[str, Any] = {"type": "int", "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = None
    if isinstance(form, (IntegerWeightFormat, TernaryWeightFormat)):
        kind = _PACKED
        weights |= {"num_bits": form.bits, "symmetric": not form.has_zeros}
        weights |= {"strategy": "channel"} if form.group is None else {"strategy": "group", "group_size": form.group}
        inputs = dict(_INT8_INPUTS) if rounds_inputs and form.bits == 8 else None
    elif name == "int8":
        kind = _INTEGERS
        weights |= {"num_bits": 8, "strategy": "channel"}
        inputs = dict(_INT8_INPUTS)
    elif name == "fp8":
        kind = _FLOATS
        weights |= {"num_bits": 8, "type": "float", "strategy": "channel"}
    else:
        return None
    return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": kind}


def _format_of(weights: Mapping[str, Any], kind: Any) -> str:
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    zeros = "" if weights.get("symmetric", True) else "_zp"
    if kind == _PACKED:
        group = f"_g{weights.get('group_size')}" if strategy == "group" else ""
        name = f"int{bits}{group}{zeros}" if weights.get("type", "int") == "int" else ""
    elif strategy == "channel" and bits == 8 and not zeros:
        name = {_INTEGERS: "int8", _FLOATS: "fp8"}.get(str(kind), "")
    else:
        name = ""
    if name not in list_weight_formats():
        raise ModelError(
            f"{_KEY}: no weight format has {bits} bits, type {weights.get('type')!r}, strategy {strategy!r}, group "
            f"size {weights.get('group_size')} and file format {kind!r}; formats are {', '.join(list_weight_formats())}"
        )
    return name
