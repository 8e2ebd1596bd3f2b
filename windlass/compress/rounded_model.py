"""Loading of an unquantized model whose linear layers are packed while they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.base.errors import ModelError, WeightFormatError
from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.conv1d_layers import make_linear
from windlass.compress.linear_directory import linear_view
from windlass.compress.model_directory import ModelDirectory, build_empty
from windlass.compress.packed_model import fill_wide
from windlass.compress.save_refusal import refuse_packed_saves
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
    """Load the model of a directory in eval mode, with all linear layers except the output head rounded to nearest and
    packed.

    Of the tensors to pack, one at a time is in memory unpacked, so the float32 weights of the model need not fit into
    memory.

    Args:
        weight_format: a weight format, or its registered name, e.g. `int4_g64`.
        everything: pack the head and embeddings too. A layer that the format cannot pack is then left unquantized.
        model_class: class of transformers; None: `AutoModelForCausalLM`.
        dtype: dtype of the tensors that are not packed; None: the dtype in the files.

    Raises:
        WeightFormatError: the format does not exist, or a weight does not fit it.
        ModelError: the directory is quantized, or lacks a tensor of the model.
    """
    form = get_weight_format(weight_format) if isinstance(weight_format, str) else weight_format
    directory = ModelDirectory(path)
    if directory.quantization is not None:
        raise ModelError(f"{path} is quantized already; load it without weights={form.name!r}")
    model = build_empty(directory, model_class, trust_remote_code=trust_remote_code)
    directory = linear_view(directory, model)
    make_linear(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = (nn.Linear, nn.Embedding) if everything else (nn.Linear,)
    chosen = {
        name: module
        for name, module in model.named_modules()
        if type(module) in kinds and (misfit(form, module) is None if everything else module is not head)
    }
    # a weight that an unpacked module holds too stays unquantized, e.g. that of an embedding which scales its outputs
    places = {id(module) for module in chosen.values()}
    kept = {id(one) for module in model.modules() if id(module) not in places for one in module._parameters.values()}
    chosen = {name: module for name, module in chosen.items() if id(module.get_parameter("weight")) not in kept}
    names = CheckpointNames(model, directory.places)
    holders: dict[int, list[str]] = {}  # all names of each parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    made: dict[int, PackedMatrix] = {}  # packed modules by id of the weight
    weights = {name: module.get_parameter("weight") for name, module in chosen.items()}
    sources: dict[int, str] = {}
    for name, weight in weights.items():
        if (source := names.source_of.get(f"{name}.weight")) is not None:
            sources.setdefault(id(weight), source)
    used: set[str] = set()
    for name, module in chosen.items():
        weight = weights[name]
        if id(weight) not in sources:
            raise ModelError(f"{path} lacks the tensor '{name}.weight' of the model; copy its files again")
        source = sources[id(weight)]
        packed = empty_packed(module, form, dtype or directory.places[source].dtype)
        if id(weight) in made:
            packed.share(made[id(weight)])
        else:
            try:
                tensors = form.pack(directory.read(source))
            except WeightFormatError as error:
                raise WeightFormatError(f"layer {name!r}: {error}") from error
            packed.set_packed(tensors)
            made[id(weight)] = packed
        used |= {source, names.source_of.get(f"{name}.weight", source)}
        if isinstance(packed, PackedLinear) and packed.bias is not None:
            sharers = next(known for known in holders.values() if f"{name}.bias" in known)
            bias = next((names.source_of[one] for one in (f"{name}.bias", *sharers) if one in names.source_of), None)
            if bias is None:
                raise ModelError(f"{path} lacks the tensor '{name}.bias' of the model; copy its files again")
            packed.bias = nn.Parameter(_cast(directory.read(bias), dtype), requires_grad=False)
            for one in sharers:  # e.g. the module around a head
                owner, _, leaf = one.rpartition(".")
                model.get_submodule(owner).register_parameter(leaf, packed.bias)
            used.add(bias)
        model.set_submodule(name, packed)
    fill_wide(model, directory, names, used, dtype, ties=len(made) == len(chosen))
    refuse_packed_saves()
    loaded: nn.Module = model.eval()
    return loaded


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor.clone()
