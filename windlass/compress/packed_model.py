"""Loading of a model from a directory of packed weights, each tensor straight into its layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.bounded_json import parse_json
from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.compress.gptq_awq import find_packed_layers, read_packed_layer
from windlass.compress.model_directory import ModelDirectory, build_empty
from windlass.compress.quantization_config import read_formats
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import PackedWeight, get_weight_format

_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
_UNUSED = ("input_scale", "input_zero_point", "weight_g_idx")


def is_packed_directory(path: str | Path) -> bool:
    """Return True if a path is a model's directory whose configuration says that its weights are quantized."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return False
    try:
        found = parse_json(config.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and isinstance(found.get("quantization_config"), dict)


def load_packed_model(
    path: str | Path,
    model_class: Any = None,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load the model of a directory that `write_packed_directory`, compressed-tensors, GPTQ or AWQ wrote, in eval mode.

    Its packed linear layers are `PackedLinear`; the other tensors keep the dtype of the file.

    Args:
        model_class: of transformers; None: `AutoModelForCausalLM`.
        dtype: of the tensors that are not packed; None: that of the files.

    Raises:
        ModelError: the directory is damaged, lacks tensors, or has weights of a kind that no weight format is.
    """
    directory = ModelDirectory(path)
    entry = directory.quantization
    if entry is None:
        raise ModelError(
            f"{path} is not quantized: its config.json has no quantization_config; load it with transformers"
        )
    model = build_empty(directory, model_class, trust_remote_code=trust_remote_code)
    used: set[str] = set()
    if entry.get("quant_method") in ("gptq", "awq"):
        for layer in find_packed_layers(directory):
            name, tensors, read = read_packed_layer(directory, layer, entry)
            _place(model, directory, layer, name, tensors, dtype)
            used |= read
    else:
        layers = sorted({name.rpartition(".")[0] for name in directory.places if name.endswith(".weight_scale")})
        for layer, name in read_formats(entry, layers).items():
            read = {f"{layer}.{part}" for part in get_weight_format(name).file_form(1, 1)}
            tensors = {part.rpartition(".")[2]: directory.read(part) for part in sorted(read)}
            _place(model, directory, layer, name, tensors, dtype)
            used |= read | {f"{layer}.{part}" for part in _UNUSED}
    _load_rest(model, directory, used, dtype)
    loaded: nn.Module = model.eval()
    return loaded


def _place(
    model: nn.Module, directory: ModelDirectory, layer: str, name: str, tensors: PackedWeight, dtype: torch.dtype | None
) -> None:
    """Put a packed layer instead of a linear one."""
    try:
        linear = model.get_submodule(layer)
    except AttributeError as error:
        raise ModelError(f"{directory.path} has weights of a layer {layer!r} that the model lacks") from error
    if type(linear) is not nn.Linear:
        raise ModelError(f"layer {layer!r} of {directory.path} is packed, and the model's is a {type(linear).__name__}")
    form = get_weight_format(name)
    for part, wanted in form.file_form(linear.out_features, linear.in_features).items():
        if tensors[part].dtype != wanted.dtype and wanted.dtype.is_floating_point and wanted.dtype.itemsize > 1:
            tensors[part] = _exact_cast(tensors[part], wanted.dtype, f"{layer}.{part}")
        elif part == "weight_shape":
            tensors[part] = tensors[part].to(torch.int64)
    has_bias = linear.bias is not None
    packed = PackedLinear(linear.in_features, linear.out_features, has_bias, weight_format=form)
    packed.set_packed({part: tensors[part] for part in form.file_form(1, 1)})
    if has_bias:
        packed.bias = nn.Parameter(_cast(directory.read(f"{layer}.bias"), dtype), requires_grad=False)
    model.set_submodule(layer, packed)


def _exact_cast(scale: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    cast = scale.to(dtype)
    if not torch.equal(cast.to(torch.float64), scale.to(torch.float64)):
        logger.warning(
            "%s is %s and is rounded to %s; weights differ by up to 2^-11 of their value", name, scale.dtype, dtype
        )
    if not bool(torch.isfinite(cast).all()):
        raise ModelError(f"{name} has values outside of the range of {dtype}, which the weight format stores")
    return cast


def _load_rest(model: nn.Module, directory: ModelDirectory, used: set[str], dtype: torch.dtype | None) -> None:
    """Fill the parameters and buffers that are not packed."""
    packed = {id(p) for module in model.modules() if isinstance(module, PackedLinear) for p in module.parameters()}
    open_names = {name for name, parameter in model.named_parameters() if id(parameter) not in packed}
    buffers = dict(model.named_buffers())
    unknown = []
    for name in directory.places:
        if name in used or name.endswith(".bias") and isinstance(_owner(model, name), PackedLinear):
            continue
        if name in open_names:
            owner, _, leaf = name.rpartition(".")
            wanted = model.get_parameter(name)
            tensor = _cast(directory.read(name), dtype)
            if tensor.shape != wanted.shape:
                raise ModelError(
                    f"tensor {name!r} of {directory.path} has shape {tuple(tensor.shape)}, not {tuple(wanted.shape)}"
                )
            model.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
            open_names.discard(name)
        elif name in buffers:
            buffers[name].copy_(directory.read(name))
        else:
            unknown.append(name)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    missing = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    if missing:
        raise ModelError(f"{directory.path} lacks {len(missing)} tensors of the model: {', '.join(missing[:4])}")
    if unknown:
        logger.warning("%s has %d tensors that the model does not use: %s", directory.path, len(unknown), unknown[:4])


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return None


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.clone()
