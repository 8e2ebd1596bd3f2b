"""Weights of `deepspeed.init_inference(checkpoint=...)`: files listed in JSON, a single file, or a directory."""

from __future__ import annotations

import copy
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from windlass.base.bounded_json import parse_json
from windlass.base.errors import ConfigError, ModelError
from windlass.base.text import one_line
from windlass.checkpoint.torch_state_dicts import read_checkpoint
from windlass.config.config_source import read_source

_WRAPPERS = ("module", "model", "state_dict")  # keys under which files of training scripts hold the weights
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def load_inference_checkpoint(
    module: nn.Module, checkpoint: str | dict[str, Any], base_dir: str, dtype: torch.dtype
) -> list[str]:
    """Load weights into a module in place, also into one on the meta device. Each rank reads all weights.

    Args:
        module: any module. For a model of transformers, the files may have tensor names of older versions.
        checkpoint: a description `{"type", "checkpoints", "version"}` or the path of its JSON file, a file of weights,
            a directory of a transformers model, or a checkpoint directory of DeepSpeed or windlass.
        base_dir: directory of the files with relative names; `base_dir` of the description takes precedence.
        dtype: dtype of the parameters of a model of transformers on the meta device. Any other module on the meta
            device takes the dtypes of the files.

    Returns:
        Names of the checkpoint's tensors that the module lacks.

    Raises:
        ConfigError: the description is wrong or lists tensor-parallel shards, or files disagree on a tensor's values.
        ModelError: a file cannot be read, or the checkpoint lacks weights of the module or has them in other shapes.
        CheckpointError: a directory has no complete checkpoint.
    """
    values, source = _read_values(checkpoint, base_dir)
    loaded = _load_by_transformers(module, values, dtype) if _is_pretrained(module) else _load_by_name(module, values)
    missing, unexpected, mismatched = loaded
    if missing or mismatched:
        problems = [f"lacks {_some(missing)}"] if missing else []
        problems += [f"has other shapes for {_some(mismatched)}"] if mismatched else []
        raise ModelError(
            f"init_inference: checkpoint = {source} {' and '.join(problems)} of {type(module).__name__}; list all its "
            "files, and build the model from their configuration"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"init_inference: buffer {name} of {type(module).__name__} is on the meta device, and no checkpoint "
                "holds it, since it is not persistent; build the module outside of OnDevice"
            )
    return unexpected


def _read_values(checkpoint: str | dict[str, Any], base_dir: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return all tensors by name, and a name of the checkpoint for error messages."""
    if isinstance(checkpoint, dict):
        return _read_files(_listed_files(checkpoint, base_dir)), "the given description"
    path = Path(checkpoint)
    if path.is_dir():
        files = _model_files(path)
        values = _read_files(files) if files else read_checkpoint(path).model_state_dict()
    elif path.suffix in _SUFFIXES:
        values = _read_files([path])
    else:
        values = _read_files(_listed_files(read_source(checkpoint).data, base_dir))
    return values, str(checkpoint)


def _listed_files(data: dict[str, Any], base_dir: str) -> list[Path]:
    """Return the files that a checkpoint description lists.

    Raises:
        ConfigError: a key is wrong, or the files hold tensor-parallel shards.
    """
    names = data.get("checkpoints")
    if isinstance(names, dict) or data.get("parallelization", "pp") != "pp" or data.get("mp_size", 0) not in (0, 1):
        raise ConfigError(
            "init_inference: checkpoint lists parts of tensors (parallelization 'tp', or mp_size), in the layout of "
            "DeepSpeed's own layers; list files with whole tensors, which tp splits over any number of ranks"
        )
    known = str(data.get("type", "")).lower() in ("bloom", "ds_model", "megatron")
    if not known or not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        raise ConfigError(
            f"init_inference: checkpoint has type {data.get('type')!r} and checkpoints {one_line(repr(names), 100)}; "
            'write {"type": "ds_model", "checkpoints": ["FILE", ...], "version": 1.0}; types: BLOOM, ds_model, Megatron'
        )
    return [Path(os.path.join(data.get("base_dir") or base_dir, one)) for one in names]


def _model_files(directory: Path) -> list[Path]:
    """Return the files of a model that `save_pretrained` wrote; none in other directories."""
    for index in (directory / name for name in _INDEXES):
        if index.is_file():
            try:
                return [directory / name for name in sorted(set(parse_json(index.read_bytes())["weight_map"].values()))]
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise ModelError(f"{index} is not an index of weights ({error}); save the model again") from error
    return [directory / name for name in _SINGLE if (directory / name).is_file()][:1]


def _read_files(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    origin: dict[str, Path] = {}
    for path in files:
        for name, tensor in _read_file(path).items():
            if name in found and not torch.equal(found[name], tensor):
                raise ConfigError(
                    f"init_inference: {origin[name]} and {path} have different values of {name}, so they hold parts of "
                    "tensors, or different models; merge the parts first, e.g. with windlass export"
                )
            found[name], origin[name] = tensor, path
    return found


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise ModelError(f"init_inference: there is no file {path}, which checkpoint lists; check it and base_dir")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"init_inference: {path} cannot be read: {one_line(str(error), 200)}; save it again"
        ) from error
    except Exception as error:  # pickle's own error type; torch's hint to load without `weights_only` is dropped
        reason = str(error).split("WeightsUnpickler error:")[-1]
        raise ModelError(
            f"init_inference: {path} contains objects that are not tensors: {one_line(reason, 200)}; save only "
            "model.state_dict() in it"
        ) from error
    inner = next((data[key] for key in _WRAPPERS if isinstance(data, dict) and isinstance(data.get(key), dict)), data)
    if not isinstance(inner, dict) or not all(isinstance(one, torch.Tensor) for one in inner.values()):
        kinds = sorted({type(one).__name__ for one in inner.values()}) if isinstance(inner, dict) else type(inner)
        raise ModelError(f"init_inference: {path} holds {kinds}, not tensors by name; save model.state_dict() in it")
    return dict(inner)


_Loaded = tuple[list[str], list[str], list[str]]  # missing names, unexpected names, names of tensors with other shapes


def _is_pretrained(module: nn.Module) -> bool:
    """Return True for a model of transformers. It may have tables that no file contains, e.g. of rotary embeddings."""
    return hasattr(type(module), "from_pretrained") and hasattr(module, "config")


def _load_by_transformers(module: Any, values: dict[str, torch.Tensor], dtype: torch.dtype) -> _Loaded:
    """Load the values with transformers, which maps names of older versions and tied names,
    and move the loaded tensors to `module`."""
    own = next((one.dtype for one in module.parameters() if one.is_floating_point() and not one.is_meta), dtype)
    loaded, facts = type(module).from_pretrained(
        None,
        config=copy.deepcopy(module.config),
        state_dict=values,
        dtype=own,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # no exception: `facts` lists the mismatched keys
        trust_remote_code=False,
    )
    mismatched = [one[0] for one in facts["mismatched_keys"]]
    missing = sorted(set(facts["missing_keys"]) - set(mismatched))
    if not missing and not mismatched:
        _move_tensors(loaded, module)
    return missing, sorted(facts["unexpected_keys"]), mismatched


def _move_tensors(source: nn.Module, target: nn.Module) -> None:
    """Assign the tensors of `source` to `target`, a model of the same class and configuration."""
    parts = dict(source.named_modules())
    for name, part in target.named_modules():
        other = parts.get(name)
        if other is None or type(other) is not type(part):
            found = "missing" if other is None else f"a {type(other).__name__}"
            raise ModelError(
                f"init_inference: {name} is a {type(part).__name__}, and {found} in a new model of the same "
                "configuration; call init_inference before layers are replaced"
            )
        part._parameters, part._buffers = other._parameters, other._buffers
        for key, value in vars(other).items():
            if isinstance(value, torch.Tensor):
                setattr(part, key, value)


def _load_by_name(module: nn.Module, values: dict[str, torch.Tensor]) -> _Loaded:
    """Load tensors under the module's own names."""
    state = module.state_dict(keep_vars=True)
    by_tensor = {id(tensor): name for name, tensor in state.items() if name in values}
    tied = {name: by_tensor[id(one)] for name, one in state.items() if name not in values and id(one) in by_tensor}
    values = {**values, **{name: values[other] for name, other in tied.items()}}
    mismatched = [name for name, one in values.items() if name in state and state[name].shape != one.shape]
    if mismatched:
        return [], [], mismatched
    absent = any(one.is_meta for one in state.values())
    found = module.load_state_dict(values, strict=False, assign=absent)
    if absent:
        _tie(module, tied)
    return list(found.missing_keys), list(found.unexpected_keys), []


def _tie(module: nn.Module, tied: dict[str, str]) -> None:
    """Assign each tied parameter under its other names too: loading has replaced it under one name only."""
    for name, other in tied.items():
        path, _, key = name.rpartition(".")
        module.get_submodule(path)._parameters[key] = module.get_parameter(other)


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} tensors ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
