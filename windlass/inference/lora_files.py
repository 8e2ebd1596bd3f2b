"""Reading of LoRA adapters that peft has saved, and refusal of the kinds that are more than low-rank products."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.errors import ModelError

_WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."

# Keys of peft's LoraConfig that do not change what a saved adapter computes, or that are read here.
_KNOWN = frozenset(
    (
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
        *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config"),
        *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
        *("runtime_config", "target_modules", "task_type", "use_rslora", "velora_config"),
    )
)
# Initializations that change the base weights, so that the saved adapter does not fit the original ones.
_CHANGES_BASE = re.compile("pissa|olora|corda|loftq|lora_ga", re.IGNORECASE)


@dataclass(frozen=True)
class LowRankWeight:
    """Change of one linear layer: `x @ a.T @ b.T`.

    Attributes:
        a: float32 `[rank, in_features]`.
        b: float32 `[out_features, rank]`, multiplied by the adapter's scaling.
    """

    a: torch.Tensor
    b: torch.Tensor


def read_lora(name: str, directory: str | Path) -> dict[str, LowRankWeight]:
    """Read an adapter that peft's `save_pretrained` wrote (Hu et al. 2021, LoRA).

    Only JSON and safetensors are read: no code of the directory can run.

    Args:
        name: name of the adapter, for messages.

    Returns:
        The changes, by the path of the module that each belongs to.

    Raises:
        ModelError: a file is missing or damaged, the adapter is more than low-rank products of linear layers, or its
            initialization has changed the base weights (e.g. PiSSA).
    """
    where = f"adapter {name!r} in {directory}"
    config = _read_config(where, Path(directory) / _CONFIG_FILE)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in _read_tensors(where, Path(directory) / _WEIGHTS_FILE).items():
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", key.removeprefix(_PREFIX))
        if match is None:
            raise ModelError(f"{where} has the tensor {key!r}; {_describe(key)}")
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise ModelError(f"{where} has no tensors; save it again by peft's save_pretrained")
    return {path: _make_weight(where, path, sides, config) for path, sides in found.items()}


def _make_weight(where: str, path: str, sides: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> LowRankWeight:
    missing = sorted({"A", "B"} - set(sides))
    if missing:
        raise ModelError(f"{where} lacks lora_{missing[0]} of {path}; save it again by peft's save_pretrained")
    a, b = sides["A"], sides["B"]
    rank = _pattern_value(config, "rank_pattern", path, config.get("r", 8))
    if a.dim() != 2 or b.dim() != 2 or not a.shape[0] == b.shape[1] == rank:
        raise ModelError(
            f"{where}: {path} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, and {_CONFIG_FILE} has "
            f"a rank of {rank}; save the adapter again, with shapes [rank, in] and [out, rank]"
        )
    alpha = _pattern_value(config, "alpha_pattern", path, config.get("lora_alpha", 8))
    # rsLoRA (Kalajdzievski 2023) divides by the root of the rank
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRankWeight(a.float(), b.float() * scaling)


def _pattern_value(config: Mapping[str, Any], name: str, path: str, default: Any) -> Any:
    """Return the value of the first pattern in `config[name]` that matches `path` by peft's rule; else `default`."""
    for pattern, value in (config.get(name) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def _read_config(where: str, path: Path) -> dict[str, Any]:
    try:
        config = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{where}: there is no {path.name}; give a directory that peft's save_pretrained wrote") from (
            error
        )
    except (OSError, JsonError) as error:
        raise ModelError(f"{where}: {path.name} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{where}: {path.name} is not a JSON object; save the adapter again")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{where}: peft_type is {kind!r}, and only LORA is served; merge the adapter into its model")
    for key, value in config.items():
        if key not in _KNOWN and value not in (None, False, [], {}):
            raise ModelError(
                f"{where}: {key} is {value!r}, which is not served; merge the adapter into its model by peft's "
                "merge_and_unload and serve the result"
            )
    if config.get("bias", "none") != "none":
        raise ModelError(f"{where}: bias is {config['bias']!r}, which is not served; merge the adapter into its model")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and _CHANGES_BASE.match(init):
        raise ModelError(
            f"{where}: init_lora_weights is {init!r}, so the adapter belongs to other base weights; convert it "
            "by save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    _check_numbers(where, config)
    return config


def _check_numbers(where: str, config: Mapping[str, Any]) -> None:
    numbers = {"r": config.get("r", 8), "lora_alpha": config.get("lora_alpha", 8)}
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise ModelError(f"{where}: {name} is {patterns!r}; write an object from patterns to numbers")
        for pattern, value in patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ModelError(
                    f"{where}: {name} has {pattern!r}, which is not a regular expression ({error}); correct the pattern"
                ) from error
            numbers[f"{name}[{pattern}]"] = value
    for name, value in numbers.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        scales = name.startswith(("lora_alpha", "alpha_pattern"))
        if not number or (not scales and (value <= 0 or value != int(value))):
            raise ModelError(f"{where}: {name} is {value!r}; write a {'number' if scales else 'positive integer'}")


def _read_tensors(where: str, path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise ModelError(f"{where}: there is no {path.name}; pickled adapters are not read; save it as safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is not a dict
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{where}: {path.name} cannot be read: {error}") from error


def _describe(key: str) -> str:
    """Return the end of the error message for an unsupported tensor: its kind and the fix."""
    if ".base_layer." in key:
        return "this is a copy of a base weight, which peft adds for embeddings: save with save_embedding_layers=False"
    if "lora_magnitude_vector" in key:
        kind = "a magnitude of DoRA"
    elif "lora_embedding" in key:
        kind = "a change of an embedding"
    elif ".lora_" in key:
        kind = "an unknown part of an adapter"
    else:
        kind = "a whole weight (modules_to_save)"
    return f"this is {kind}, which is not served: merge the adapter by peft's merge_and_unload and serve the result"
