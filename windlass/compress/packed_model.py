"""Loading of a model from a directory of packed weights, each tensor straight into its layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.bounded_json import parse_json
from windlass.base.errors import ModelError
from windlass.base.log import logger
from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.gguf_model import GgufDirectory, is_gguf_file
from windlass.compress.gptq_awq import find_packed_layers, read_packed_layer
from windlass.compress.low_rank_config import RANKS_ENTRY
from windlass.compress.model_directory import ModelDirectory, build_empty, linear_layers, shared_parameters
from windlass.compress.pruned_config import PRUNING_ENTRY
from windlass.compress.quantization_config import read_formats, rounds_inputs
from windlass.compress.save_refusal import refuse_packed_saves
from windlass.kernels.bit_packing import unpack_words
from windlass.kernels.coded_formats import SCALE_DTYPE, CodedWeightFormat, fits_scale_dtype
from windlass.kernels.mapped_bytes import MappedBytes, set_pages
from windlass.kernels.ordered_formats import OrderedWeightFormat, sorts
from windlass.kernels.packed_linear import PackedLinear, PackedMatrix
from windlass.kernels.weight_format import Int8WeightFormat, PackedWeight, get_weight_format

_QUANTIZATION = "quantization_config"
_OWN = (PRUNING_ENTRY, RANKS_ENTRY)  # keys in config.json of models that transformers cannot build
_ORDER = "weight_g_idx"
_HALF_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_UNUSED = ("input_scale", "input_zero_point", _ORDER)


def is_packed_directory(path: str | Path) -> bool:
    """Return True if a path is a GGUF file, or a model's directory that `load_packed_model` loads: its weights are
    quantized, or it has widths or layers that transformers does not build ([Note: widths of pruned models], [Note:
    ranks in the configuration])."""
    if is_gguf_file(path):
        return True
    config = Path(path) / "config.json"
    if not config.is_file():
        return False
    try:
        found = parse_json(config.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and any(isinstance(found.get(key), dict) for key in (_QUANTIZATION, *_OWN))


def load_packed_model(
    path: str | Path,
    model_class: Any = None,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a model in eval mode from a GGUF file ([Note: GGUF as a directory]), from a directory that
    `write_packed_directory`, compressed-tensors, GPTQ or AWQ wrote, or from the directory of a pruned or factorized
    model that only windlass can build.

    Its packed linear layers are `PackedLinear`. Packed layers that the model joins with others are unpacked to floats.
    All parameters are frozen if the directory is quantized; otherwise no parameter is frozen.

    Args:
        model_class: class of transformers; None: `AutoModelForCausalLM`.
        dtype: dtype of the tensors that are not packed; None: the dtype in the files.

    Raises:
        ModelError: the directory is not quantized, pruned or factorized, is damaged, lacks tensors, or has weights in a
            format that windlass does not have.
    """
    directory = GgufDirectory(path) if is_gguf_file(path) else ModelDirectory(path)
    entry = directory.quantization
    if entry is None and not any(key in directory.config for key in _OWN):
        raise ModelError(
            f"{path} is not quantized: its config.json has no quantization_config; load it with transformers"
        )
    model = build_empty(directory, model_class, trust_remote_code=trust_remote_code)
    used: set[str] = set()
    # Format of each packed layer, and a function that reads the layer. So only one layer at a time is in memory twice.
    packed: dict[str, tuple[str, _ReadParts]] = {}
    if entry is None:
        layers = []
    elif isinstance(directory, GgufDirectory):
        for layer, name in directory.formats.items():
            packed[layer] = name, partial(_read_blocks, directory, layer)
            used.add(f"{layer}.weight")
    elif entry.get("quant_method") in ("gptq", "awq"):
        for layer in find_packed_layers(directory):
            name, tensors, read = read_packed_layer(directory, layer, entry)
            packed[layer] = name, partial(_in_memory, tensors)
            used |= read
    else:
        layers = sorted({name.rpartition(".")[0] for name in directory.places if name.endswith(".weight_scale")})
        for layer, name in read_formats(entry, layers).items():
            groups = _scattered_groups(directory, layer, name)
            ordered = None if groups is None else _ordered_format(directory, layer, name, groups)
            if groups is None:
                groups = _groups_of_wide_scales(directory, layer, name)
            if name == Int8WeightFormat.name and f"{layer}.weight_packed" in directory.places:
                packed[layer] = name, partial(_read_packed_bytes, directory, layer)
                used |= {f"{layer}.weight_packed", f"{layer}.weight_shape"}
            elif groups is None:
                packed[layer] = name, partial(_read_parts, directory, layer, name)
            elif ordered is not None:
                packed[layer] = ordered.name, partial(_read_ordered, directory, layer, ordered, groups)
            else:
                packed[layer] = "fp32", partial(_read_values, directory, layer, name, groups)
            used |= {f"{layer}.{part}" for part in (*get_weight_format(name).file_form(1, 1), *_UNUSED)}
    weights = {f"{layer}.weight" for layer in packed}
    names = CheckpointNames(model, (set(directory.places) - used) | weights)
    names.split_experts(packed)
    if dtype is None:
        packed |= _narrow_layers(model, directory, names, used)
    unpacked: dict[str, torch.Tensor] = {}
    inputs = entry is not None and rounds_inputs(entry)
    for layer in list(packed):
        name, read_parts = packed.pop(layer)
        tensors, pages = read_parts()
        module = names.module_of(layer)
        if module is not None:
            _place(model, directory, layer, module, name, tensors, pages, dtype, inputs)
            used |= {f"{layer}.weight", f"{layer}.bias"}
        else:  # e.g. an expert whose matrices have a form that `split_experts` does not know
            unpacked[f"{layer}.weight"] = get_weight_format(name).unpack(_as_formed(tensors, name, layer))
    if unpacked:
        logger.warning(
            "%s has %d packed layers that the model joins with others, as %s; these are held as floats",
            directory.path,
            len(unpacked),
            min(unpacked),
        )
    fill_wide(model, directory, names, used, dtype, unpacked=unpacked, trains=entry is None)
    refuse_packed_saves()
    loaded: nn.Module = model.eval()
    return loaded


def _narrow_layers(
    model: nn.Module, directory: ModelDirectory, names: CheckpointNames, used: set[str]
) -> dict[str, tuple[str, _ReadParts]]:
    """Return the wide linear layers whose weights have 16 bits in a directory with wider tensors, to be held in a
    format of their dtype, which multiplies inputs of every dtype."""
    wide = {place.dtype for name, place in directory.places.items() if name not in used}
    if torch.float32 not in wide:
        return {}
    found: dict[str, tuple[str, _ReadParts]] = {}
    shared = shared_parameters(model)
    for name, module in linear_layers(model).items():
        source = names.source_of.get(f"{name}.weight")
        if source is None or source in used or source not in directory.places or id(module.weight) in shared:
            continue
        form = _HALF_FORMATS.get(directory.places[source].dtype)
        if form is not None and source.endswith(".weight"):
            layer = source.removesuffix(".weight")
            found[layer] = form, partial(_read_parts, directory, layer, form)
    return found


def _place(
    model: nn.Module,
    directory: ModelDirectory,
    layer: str,
    module: str,
    name: str,
    tensors: PackedWeight,
    pages: Mapping[str, MappedBytes],
    dtype: torch.dtype | None,
    inputs: bool,
) -> None:
    """Replace a linear layer by a packed one."""
    try:
        linear = model.get_submodule(module)
    except AttributeError as error:
        raise ModelError(
            f"{directory.path} has weights of a layer {layer!r} that {type(model).__name__} lacks; load "
            "the directory with the class and config.json that it was compressed with"
        ) from error
    if type(linear) is not nn.Linear:
        raise ModelError(
            f"layer {layer!r} of {directory.path} is packed, and {type(model).__name__} has a "
            f"{type(linear).__name__} there, not an nn.Linear; load the directory with the class that was compressed"
        )
    form = get_weight_format(name)
    has_bias = linear.bias is not None
    packed = PackedLinear(linear.in_features, linear.out_features, has_bias, weight_format=form)
    formed = _as_formed(tensors, name, layer)
    kept = [part for part in pages if formed[part] is tensors[part]]  # a converted part is a copy, not mapped
    packed.set_packed(formed, {part: (formed[part].view(-1).view(torch.uint8), pages[part]) for part in kept})
    packed.rounds_inputs = inputs and form.name.startswith("int8")
    if has_bias:
        packed.bias = nn.Parameter(_cast(directory.read(f"{layer}.bias"), dtype), requires_grad=False)
    model.set_submodule(module, packed)


_ReadParts = Callable[[], tuple[PackedWeight, dict[str, MappedBytes]]]


def _in_memory(tensors: PackedWeight) -> tuple[PackedWeight, dict[str, MappedBytes]]:
    return tensors, {}


def _read_blocks(directory: GgufDirectory, layer: str) -> tuple[PackedWeight, dict[str, MappedBytes]]:
    return directory.read_packed(layer), {}


def _read_parts(directory: ModelDirectory, layer: str, name: str) -> tuple[PackedWeight, dict[str, MappedBytes]]:
    """Return the packed tensors of a layer, and the mappings of its large tensors, which are not read yet."""
    tensors: PackedWeight = {}
    pages: dict[str, MappedBytes] = {}
    for part in get_weight_format(name).file_form(1, 1):
        name_in_file = f"{layer}.{part}"
        if name_in_file not in directory.places or not directory.can_map(name_in_file):
            tensors[part] = directory.read(f"{layer}.{part}")
        else:
            tensors[part], pages[part] = directory.map(f"{layer}.{part}")
    return tensors, pages


def _read_packed_bytes(directory: ModelDirectory, layer: str) -> tuple[PackedWeight, dict[str, MappedBytes]]:
    """Return the tensors of `int8` from codes of 8 bits in words, as `pack-quantized` files hold them."""
    columns = int(directory.read(f"{layer}.weight_shape")[1])
    codes = unpack_words(directory.read(f"{layer}.weight_packed"), 8, columns)
    scale = directory.read(f"{layer}.weight_scale").float()
    return {"weight": (codes.to(torch.int16) - 128).to(torch.int8), "weight_scale": scale}, {}


def _scattered_groups(directory: ModelDirectory, layer: str, name: str) -> torch.Tensor | None:
    """Return the group number of each input feature of a layer if its groups are scattered (`actorder: group` of
    compressed-tensors); None if each group is a range of features."""
    form = get_weight_format(name)
    if f"{layer}.{_ORDER}" not in directory.places or not isinstance(form, CodedWeightFormat) or form.group is None:
        return None
    order = directory.read(f"{layer}.{_ORDER}").to(torch.int64)
    straight = torch.arange(len(order)) // form.group
    if bool((order < 0).any()) or torch.equal(order, straight):  # -1: the file has no order
        return None
    return order


def _ordered_format(
    directory: ModelDirectory, layer: str, name: str, groups: torch.Tensor
) -> OrderedWeightFormat | None:
    """Return the format of a layer with scattered groups; None if it is held in float32, because its groups have
    several sizes, or scales outside of the range of `SCALE_DTYPE`."""
    form = get_weight_format(name)
    assert isinstance(form, CodedWeightFormat) and form.group is not None
    if sorts(groups, form.group) and fits_scale_dtype(directory.read(f"{layer}.weight_scale")):
        return OrderedWeightFormat(form)
    logger.warning("layer %s has scattered groups (actorder) that are not packed, and is held in float32", layer)
    return None


def _read_ordered(
    directory: ModelDirectory, layer: str, form: OrderedWeightFormat, groups: torch.Tensor
) -> tuple[PackedWeight, dict[str, MappedBytes]]:
    """Return the packed tensors of a layer with scattered groups."""
    tensors = _read_parts(directory, layer, form.inner.name)[0]
    return form.pack_codes(form.inner.unpack_codes(tensors), groups), {}


def _groups_of_wide_scales(directory: ModelDirectory, layer: str, name: str) -> torch.Tensor | None:
    """Return the group number of each input feature if a scale in the file is outside the range of `SCALE_DTYPE`, so
    that the layer is held in float32. None if all scales fit, or if a scale is not finite."""
    form, place = get_weight_format(name), directory.places[f"{layer}.weight_scale"]
    if not isinstance(form, CodedWeightFormat) or place.dtype == SCALE_DTYPE:
        return None
    scale = directory.read(f"{layer}.weight_scale")
    if fits_scale_dtype(scale) or not bool(torch.isfinite(scale).all()):
        return None
    logger.warning("layer %s has scales outside of %s, and is held in float32", layer, SCALE_DTYPE)
    columns = int(directory.read(f"{layer}.weight_shape")[1])
    return torch.arange(columns) // (form.group or columns)


def _read_values(
    directory: ModelDirectory, layer: str, name: str, groups: torch.Tensor
) -> tuple[PackedWeight, dict[str, MappedBytes]]:
    """Return the values of a layer that has no packed form, given the group number of each input feature."""
    form = get_weight_format(name)
    assert isinstance(form, CodedWeightFormat)
    coded = form.unpack_codes(_read_parts(directory, layer, name)[0])
    zero = form.zero if coded.zero is None else coded.zero.float()[:, groups]
    return {"weight": (coded.codes.float() - zero) * coded.scale.float()[:, groups]}, {}


def _as_formed(tensors: PackedWeight, name: str, layer: str) -> PackedWeight:
    """Return the tensors of a layer with the dtypes of its format."""
    form = get_weight_format(name)
    found = {}
    for part, wanted in form.file_form(1, 1).items():
        found[part] = tensors[part]
        if tensors[part].dtype != wanted.dtype and wanted.dtype.is_floating_point and wanted.dtype.itemsize > 1:
            found[part] = _exact_cast(tensors[part], wanted.dtype, f"{layer}.{part}")
        elif part == "weight_shape":
            found[part] = tensors[part].to(torch.int64)
    return found


def _exact_cast(scale: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    cast = scale.to(dtype)
    if not torch.equal(cast.to(torch.float64), scale.to(torch.float64)):
        logger.warning(
            "%s is %s and is rounded to %s; weights differ by up to 2^-11 of their value", name, scale.dtype, dtype
        )
    if not bool(torch.isfinite(cast).all()):
        raise ModelError(f"{name} has values outside of the range of {dtype}, which the weight format stores")
    return cast


def fill_wide(
    model: nn.Module,
    directory: ModelDirectory,
    names: CheckpointNames,
    used: set[str],
    dtype: torch.dtype | None,
    *,
    unpacked: dict[str, torch.Tensor] | None = None,
    ties: bool = True,
    trains: bool = False,
) -> None:
    """Fill the parameters and buffers that are not packed from the files; see [Note: checkpoint names].

    Args:
        used: names in the files of the tensors to leave out, because they are in packed layers.
        dtype: dtype of the values; None: the dtype in the files.
        unpacked: values of packed layers that the model joins with others, by their names in the files.
        ties: tie the weights that the configuration of the model ties; False: some of these are packed, so that only
            the others are tied.
        trains: True: floating-point parameters require gradients.

    Raises:
        ModelError: a tensor is missing, or has another shape.
    """
    unpacked = {} if unpacked is None else unpacked
    packed = {id(p) for module in model.modules() if isinstance(module, PackedMatrix) for p in module.parameters()}
    open_names = {name for name, parameter in model.named_parameters() if id(parameter) not in packed}
    holders: dict[int, list[str]] = {}  # all names of each parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    buffers = dict(model.named_buffers())
    mapped: dict[str, MappedBytes] = {}

    def read(source: str) -> torch.Tensor:
        found = unpacked.pop(source, None)
        return directory.read(source) if found is None else found

    def open_tensor(source: str) -> torch.Tensor:
        place = directory.places.get(source)
        if source in unpacked or place is None or dtype not in (None, place.dtype) or not directory.can_map(source):
            return read(source)
        tensor, pages = directory.map(source)
        mapped[source] = pages
        return tensor

    first_of = {name: known[0] for known in holders.values() for name in known}
    stored = {name for source, name in names.renamed.items() if source in unpacked or source not in used}

    def fill(name: str, tensor: torch.Tensor, source: str) -> None:
        if name in buffers:
            buffers[name].copy_(tensor)
        first = first_of.get(name, name)
        if first not in open_names or name != first and first in stored:
            return
        wanted = model.get_parameter(first)
        if tensor.shape != wanted.shape:
            raise ModelError(
                f"tensor {source!r} of {directory.path} has shape {tuple(tensor.shape)}, and the model built from its "
                f"config.json needs {tuple(wanted.shape)}; copy config.json and the tensors from the same model"
            )
        value = nn.Parameter(_cast(tensor, dtype), requires_grad=trains and tensor.is_floating_point())
        if source in mapped:
            set_pages(value, mapped.pop(source))
        for one in holders[id(wanted)]:  # the files may have any of the names of a shared parameter
            owner, _, leaf = one.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, value)
        open_names.discard(first)

    for source, name in names.renamed.items():
        if source in unpacked or source not in used:
            fill(name, open_tensor(source), source)
    for entry in names.converted.values():
        for name, tensor in names.convert(entry, read).items():
            fill(name, tensor, entry.sources[0])
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None and ties:
        tie()
    if not ties:
        for first, *others in holders.values():
            for name in others:
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner).register_parameter(leaf, model.get_parameter(first))
    missing = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    if missing:
        raise ModelError(
            f"{directory.path} lacks {len(missing)} tensors of the model: {', '.join(missing[:4])}; copy its "
            "files again, or save the model again"
        )
    unknown = [source for source in names.unknown if source not in used]
    if unknown:
        logger.warning("%s has %d tensors that the model does not use: %s", directory.path, len(unknown), unknown[:4])


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
