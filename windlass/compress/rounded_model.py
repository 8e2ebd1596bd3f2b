"""Loading of a wide model whose linear layers are packed while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ModelError, WeightFormatError
from windlass.compress.model_directory import ModelDirectory, build_empty
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import get_weight_format


def load_rounded_model(
    path: str | Path,
    weight_format: str,
    model_class: Any = None,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load the model of a directory in eval mode, its linear layers but the output head rounded to nearest and packed.

    One tensor is wide at a time, so that a model whose float32 weights do not fit into memory is loaded too.

    Args:
        weight_format: registered name, e.g. `int4_g64`.
        model_class: class of transformers; None: `AutoModelForCausalLM`.
        dtype: dtype of the tensors that are not packed; None: that of the files.

    Raises:
        WeightFormatError: the format does not exist, or a weight does not fit it.
        ModelError: the directory is quantized, or lacks a tensor of the model.
    """
    form, directory = get_weight_format(weight_format), ModelDirectory(path)
    if directory.quantization is not None:
        raise ModelError(f"{path} is quantized already; load it without weights={weight_format!r}")
    model = build_empty(directory, model_class, trust_remote_code=trust_remote_code)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    packed = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head
    }
    for name, linear in packed.items():
        if f"{name}.weight" not in directory.places:
            raise ModelError(f"{path} lacks the tensor '{name}.weight' of the model")
        try:
            tensors = form.pack(directory.read(f"{name}.weight"))
        except WeightFormatError as error:
            raise WeightFormatError(f"layer {name!r}: {error}") from error
        layer = PackedLinear(linear.in_features, linear.out_features, False, weight_format=form)
        layer.set_packed(tensors)
        if linear.bias is not None:
            layer.bias = nn.Parameter(_cast(directory.read(f"{name}.bias"), dtype), requires_grad=False)
        model.set_submodule(name, layer)
    buffers = dict(model.named_buffers())
    for name in [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        if name in directory.places:
            owner, _, leaf = name.rpartition(".")
            values = nn.Parameter(_cast(directory.read(name), dtype), requires_grad=False)
            model.get_submodule(owner).register_parameter(leaf, values)
    for name in buffers.keys() & directory.places.keys():
        buffers[name].copy_(directory.read(name))
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    missing = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} tensors of the model: {', '.join(missing[:4])}")
    loaded: nn.Module = model.eval()
    return loaded


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.clone()
