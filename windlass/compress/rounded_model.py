"""Loading of a wide model whose linear layers are packed while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ModelError, WeightFormatError
from windlass.compress.model_directory import ModelDirectory, build_empty
from windlass.compress.weight_quantization import empty_packed, misfit
from windlass.kernels.packed_linear import PackedLinear, PackedMatrix
from windlass.kernels.weight_format import WeightFormat, get_weight_format


def load_rounded_model(
    path: str | Path,
    weight_format: str | WeightFormat,
    model_class: Any = None,
    *,
    everything: bool = False,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load the model of a directory in eval mode, its linear layers but the output head rounded to nearest and packed.

    One tensor is wide at a time, so that a model whose float32 weights do not fit into memory is loaded too.

    Args:
        weight_format: a weight format, or its registered name, e.g. `int4_g64`.
        everything: pack the head and embeddings too, and leave layers wide that the format cannot pack.
        model_class: class of transformers; None: `AutoModelForCausalLM`.
        dtype: dtype of the tensors that are not packed; None: that of the files.

    Raises:
        WeightFormatError: the format does not exist, or a weight does not fit it.
        ModelError: the directory is quantized, or lacks a tensor of the model.
    """
    form = get_weight_format(weight_format) if isinstance(weight_format, str) else weight_format
    directory = ModelDirectory(path)
    if directory.quantization is not None:
        raise ModelError(f"{path} is quantized already; load it without weights={form.name!r}")
    model = build_empty(directory, model_class, trust_remote_code=trust_remote_code)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = (nn.Linear, nn.Embedding) if everything else (nn.Linear,)
    chosen = {
        name: module
        for name, module in model.named_modules()
        if type(module) in kinds and (misfit(form, module) is None if everything else module is not head)
    }
    made: dict[int, PackedMatrix] = {}  # by the id of a weight, which the head and embeddings may share
    sources = {id(m.weight): f"{name}.weight" for name, m in chosen.items() if f"{name}.weight" in directory.places}
    weights = {name: module.get_parameter("weight") for name, module in chosen.items()}
    for name, module in chosen.items():
        weight = weights[name]
        if id(weight) not in sources:
            raise ModelError(f"{path} lacks the tensor '{name}.weight' of the model")
        packed = empty_packed(module, form, dtype or directory.places[sources[id(weight)]].dtype)
        if id(weight) in made:
            packed.share(made[id(weight)])
        else:
            try:
                tensors = form.pack(directory.read(sources[id(weight)]))
            except WeightFormatError as error:
                raise WeightFormatError(f"layer {name!r}: {error}") from error
            packed.set_packed(tensors)
            made[id(weight)] = packed
        if isinstance(packed, PackedLinear) and packed.bias is not None:
            packed.bias = nn.Parameter(_cast(directory.read(f"{name}.bias"), dtype), requires_grad=False)
        model.set_submodule(name, packed)
    buffers = dict(model.named_buffers())
    for name in [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        if name in directory.places:
            owner, _, leaf = name.rpartition(".")
            values = nn.Parameter(_cast(directory.read(name), dtype), requires_grad=False)
            model.get_submodule(owner).register_parameter(leaf, values)
    for name in buffers.keys() & directory.places.keys():
        buffers[name].copy_(directory.read(name))
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None and len(made) == len(chosen):
        tie()
    missing = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    if missing:
        raise ModelError(f"{path} lacks {len(missing)} tensors of the model: {', '.join(missing[:4])}")
    loaded: nn.Module = model.eval()
    return loaded


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.clone()
