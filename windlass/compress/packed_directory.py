"""Writing of a directory of packed weights from a model's directory, one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from windlass.base.errors import ModelError, WeightFormatError
from windlass.comm.rank_group import RankGroup
from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.linear_directory import as_linear_directory
from windlass.compress.model_directory import ModelDirectory, build_empty, linear_layers, shared_parameters
from windlass.compress.partial_directory import (
    BOOKKEEPING,
    WrittenTensors,
    check_target,
    open_partial_directory,
)
from windlass.compress.quantization_config import describe_formats
from windlass.kernels.coded_formats import SAFE_MAGNITUDE, SCALE_DTYPE
from windlass.kernels.weight_format import PackedTensorForm, PackedWeight, WeightFormat, get_weight_format

FILE_BYTES = 5 * 10**9
WIDE_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Formats of plain floats, by their dtype. A directory with only these formats is an ordinary model directory."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")

PackLayer = Callable[[str, torch.Tensor, WeightFormat], PackedWeight]
"""Function that packs the weight of a layer, given the layer's name, its weight and its format."""


class TensorProducer(Protocol):
    """Source of the tensors of a packed directory."""

    def __call__(self, layers: Mapping[str, str], partial: WrittenTensors) -> Iterator[tuple[str, PackedWeight]]:
        """Yield the name of each source tensor that `partial` lacks, and the tensors to write for it, in any order.

        Args:
            layers: format of each packed layer.
        """
        ...


@dataclass(frozen=True)
class PackedReport:
    """Sizes of a packed directory.

    Attributes:
        layers: format of each packed layer.
        kept: reason for each linear layer that stayed unquantized.
        bytes_before, bytes_after: bytes of all tensors.
        packed_before, packed_after: bytes of the weights of the packed layers, in float32 and packed.
    """

    layers: dict[str, str]
    kept: dict[str, str]
    bytes_before: int
    bytes_after: int
    packed_before: int
    packed_after: int


def write_packed_directory(
    source: str | Path | ModelDirectory,
    target: str | Path,
    formats: str | Callable[[str], str | None],
    *,
    pack: PackLayer | None = None,
    produce: TensorProducer | None = None,
    method: Mapping[str, Any] | None = None,
    head: bool = False,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
    trust_remote_code: bool = False,
    group: RankGroup | None = None,
    rounds_inputs: bool = False,
    experts: bool = True,
    wide_dtype: torch.dtype | None = None,
) -> PackedReport:
    """Write the model of `source` with packed linear layers to the directory `target`, which appears complete or not at
    all. After an interruption, a call with the same arguments continues at the first incomplete layer.

    Memory: the largest tensor, its packed form, and the temporary memory of the rounding. Tokenizer and other small
    files are copied. A layer whose format has no scale for its largest weight is written as bfloat16, or as float16 if
    the source has it so, and `PackedReport.kept` has the reason.

    Args:
        formats: format of all linear layers; or a function that gets a layer's name in the files and returns its
            format, or None to leave the layer unquantized.
        pack: function that rounds and packs the weight of each layer; None: the format's own rounding.
        produce: source of all tensors, instead of `pack`.
        method: name and settings of `pack` or `produce`; only a call with an equal `method` continues an interrupted
            call.
        head: pack the output head too, if `formats` is a name. A head that shares the embedding stays unquantized.
        overwrite: replace an existing directory.
        file_bytes: maximum bytes of a file, unless the file has the tensors of a single source tensor.
        group: ranks that make the same call; `produce` is called on each rank, and the first rank writes.
        rounds_inputs: the written configuration sets int8 inputs for all layers with weights of 8-bit integers, not
            only for the format `int8`.
        experts: pack the matrices of experts that the model joins in stacked tensors; see [Note: split experts].
        wide_dtype: dtype of all floating-point tensors that stay unquantized; None: that of the source.

    Raises:
        ModelError: the source is not a model, is packed already or has no layer to pack, or the target exists or
            contains the source.
        WeightFormatError: a format does not exist or cannot be stored, a weight is not finite, or a weight does not fit
            its format for another reason than its magnitude.
    """
    directory, to = source if isinstance(source, ModelDirectory) else ModelDirectory(source), Path(target)
    directory.check_wide()
    directory = as_linear_directory(directory, trust_remote_code=trust_remote_code)
    check_target(to, [directory.path], overwrite=overwrite)
    model = build_empty(directory, trust_remote_code=trust_remote_code)
    layers, kept, renamed = _choose(directory, model, formats, head, experts)
    too_large = _find_too_large(directory, layers) if group is None or not group.index else {}
    if group is not None:
        too_large = group.broadcast_object(too_large)
    kept |= too_large
    packed = {layer: name for layer, name in layers.items() if layer not in too_large}
    if not packed:
        raise ModelError(f"{directory.path} has no linear layer to be packed: {kept or 'there is none'}")
    layers = {**packed, **{layer: _half_format(directory, layer, wide_dtype) for layer in too_large}}
    forms = _file_forms(directory, layers, wide_dtype)
    is_packed = any(name not in WIDE_FORMATS.values() for name in packed.values())
    if directory.has_linear_layers and not is_packed:
        raise ModelError(
            f"{directory.path} has Conv1D layers, which are written as linear ones only with packed weights; choose a "
            "weight format"
        )
    plan = {"layers": layers, "method": dict(method or {}), "source": source_state(directory)}
    if group is not None:
        group.barrier()  # the first rank creates the directory only after all ranks have checked the target
    if group is not None and group.index:
        followed = _FollowedDirectory(group.broadcast_object(None))
        for _ in (produce or _LayerProducer(directory, pack or _round))(layers, followed):
            pass
        group.barrier()
        return _report(directory, packed, kept, forms)
    with open_partial_directory(to, forms, plan, file_bytes) as partial:
        if group is not None:
            group.broadcast_object(set(partial.done))
        for name, tensors in (produce or _LayerProducer(directory, pack or _round))(layers, partial):
            partial.write(name, _cast_tensors(name, tensors, forms[name]))
            del tensors
        features = {layer: directory.places[f"{layer}.weight"].shape[1] for layer in packed}
        config = dict(directory.config)
        if wide_dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = str(wide_dtype).removeprefix("torch.")
        if is_packed:
            ignored = sorted({*kept, *(renamed[name] for name in kept if name in renamed)})
            entry = describe_formats(
                packed,
                features,
                ignored,
                renamed,
                of_conv1d=directory.has_linear_layers,
                rounds_inputs=rounds_inputs,
            )
            config["quantization_config"] = entry
        partial.finish(config, companion_files(directory.path))
    if group is not None:
        group.barrier()
    return _report(directory, packed, kept, forms)


def _choose(
    directory: ModelDirectory,
    model: torch.nn.Module,
    formats: str | Callable[[str], str | None],
    head: bool,
    experts: bool,
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return three dicts, by the names of layers in the files: the format of each layer to be packed; the reason for
    which each other matrix except embeddings stays unquantized (by its name in the model if the files have no separate
    tensor of a linear layer's weight); and the name in the model of each layer whose name in the files differs.
    """
    layers: dict[str, str] = {}
    kept: dict[str, str] = {}
    renamed: dict[str, str] = {}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    names = CheckpointNames(model, directory.places)
    if experts:
        names.split_experts()
    sources = names.source_of
    shared = shared_parameters(model)
    for module_name, module in linear_layers(model).items():
        source = sources.get(f"{module_name}.weight")
        if id(module.weight) in shared:
            kept[module_name] = "it shares another tensor"
            continue
        if source is None or not source.endswith(".weight"):
            kept[module_name] = "the files have no tensor of its weight alone"
            continue
        name, is_head = source.removesuffix(".weight"), module is output
        if name != module_name:
            renamed[name] = module_name
        chosen = formats(name) if callable(formats) else formats if head or not is_head else None
        if chosen is None:
            kept[name] = "the output head stays unquantized" if is_head else "no format was chosen"
        else:
            forms = get_weight_format(chosen).file_form(*directory.places[source].shape)
            if "weight_scale" not in forms and chosen not in WIDE_FORMATS.values():
                raise WeightFormatError(
                    f"format {chosen!r} has the tensors {', '.join(forms)}, and packed directories find the layer "
                    f"{name!r} by 'weight_scale'; name a tensor so, choose another format, or round at load with "
                    f"windlass.LLM(..., weights={chosen!r})"
                )
            layers[name] = chosen
    known = {*layers, *kept, *renamed.values()}
    others = _other_matrices(directory, model, names)
    kept |= {name: reason for name, reason in others.items() if name not in known}
    return layers, kept, renamed


def _other_matrices(directory: ModelDirectory, model: torch.nn.Module, names: CheckpointNames) -> dict[str, str]:
    """Return the reason for which each matrix in the files that is neither an embedding nor the weight of a linear
    layer stays unquantized."""
    found = {}
    for entry in names.converted.values():
        for source in entry.sources:
            found[source] = "the model joins it with other tensors"
    for source, name in names.renamed.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, torch.nn.Linear | torch.nn.Embedding):
            found[source] = f"{type(owner).__name__} is not a linear layer"
    wide = {source: reason for source, reason in found.items() if len(directory.places[source].shape) > 1}
    return {source.removesuffix(".weight"): reason for source, reason in sorted(wide.items())}


def _find_too_large(directory: ModelDirectory, layers: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each layer with a weight so large that the layer's format has no scale for it.

    All weights with 16-bit scales are read for this check, because the layout of the files is fixed before the first
    layer is packed.
    """
    found = {}
    for layer, name in layers.items():
        shape = directory.places[f"{layer}.weight"].shape
        scale = get_weight_format(name).file_form(*shape).get("weight_scale")
        if scale is None or scale.dtype != SCALE_DTYPE or not math.prod(shape):
            continue
        weight = directory.read(f"{layer}.weight")
        low, high = (float(one) for one in weight.aminmax())
        largest = max(-low, high)
        if math.isfinite(low + high) and largest > SAFE_MAGNITUDE:  # weights that are not finite are refused later
            try:
                get_weight_format(name).pack(weight)
            except WeightFormatError:
                found[layer] = (
                    f"{name} has no scale for its largest weight, {largest:.4g}; it is left in "
                    f"{_half_format(directory, layer, None)}"
                )
        del weight
    return found


def _half_format(directory: ModelDirectory, layer: str, wide_dtype: torch.dtype | None) -> str:
    """Return the format in which a layer is written if its format cannot store it: one of 16 bits. Weights that have no
    scale in float16 exceed its range unless they come from it."""
    dtype = directory.places[f"{layer}.weight"].dtype if wide_dtype is None else wide_dtype
    return WIDE_FORMATS[torch.float16 if dtype == torch.float16 else torch.bfloat16]


def _cast_tensors(source: str, tensors: PackedWeight, forms: Mapping[str, PackedTensorForm]) -> PackedWeight:
    """Return floating-point tensors in the dtypes of the files.

    Raises:
        WeightFormatError: a value is outside of the range of the dtype.
    """
    found = {}
    for name, tensor in tensors.items():
        wanted = forms[name].dtype if name in forms else tensor.dtype
        found[name] = tensor
        if wanted != tensor.dtype and wanted.is_floating_point and tensor.is_floating_point():
            found[name] = tensor.to(wanted)
            if bool((torch.isinf(found[name]) & torch.isfinite(tensor)).any()):
                raise WeightFormatError(
                    f"tensor {source!r} has values outside of the range of {wanted}; choose another dtype for tensors "
                    "that stay unquantized"
                )
    return found


def _file_forms(
    directory: ModelDirectory, layers: dict[str, str], wide_dtype: torch.dtype | None
) -> dict[str, dict[str, PackedTensorForm]]:
    """Return, by source tensor, the names of the tensors that are written for it, with their dtypes and shapes."""
    packed = {f"{layer}.weight": layer for layer in layers}
    forms: dict[str, dict[str, PackedTensorForm]] = {}
    for name, place in directory.places.items():
        if name not in packed:
            dtype = wide_dtype if wide_dtype is not None and place.dtype in WIDE_FORMATS else place.dtype
            forms[name] = {name: PackedTensorForm(dtype, place.shape)}
            continue
        layer = packed[name]
        parts = get_weight_format(layers[layer]).file_form(*place.shape)
        forms[name] = {f"{layer}.{part}": form for part, form in parts.items()}
    return forms


def _round(layer: str, weight: torch.Tensor, weight_format: WeightFormat) -> PackedWeight:
    return weight_format.pack(weight)


@dataclass
class _FollowedDirectory:
    """Placeholder on all ranks except the first, since only the first writes the directory."""

    done: set[str]

    def read(self, source: str) -> PackedWeight:
        raise AssertionError(f"only the first rank reads {source}")


@dataclass(frozen=True)
class _LayerProducer:
    """Producer that packs one layer at a time."""

    directory: ModelDirectory
    pack: PackLayer

    def __call__(self, layers: Mapping[str, str], partial: WrittenTensors) -> Iterator[tuple[str, PackedWeight]]:
        for source in self.directory.places:
            if source not in partial.done:
                yield source, pack_source(self.directory, source, layers, self.pack)


def pack_source(directory: ModelDirectory, source: str, layers: Mapping[str, str], pack: PackLayer) -> PackedWeight:
    """Return the tensors to write for a source tensor, by their names in the file.

    Raises:
        WeightFormatError: the weight does not fit its format; the message names the layer.
    """
    layer = source.removesuffix(".weight")
    if layer not in layers or source == layer:
        return {source: directory.read(source)}
    try:
        found = pack(layer, directory.read(source), get_weight_format(layers[layer]))
    except WeightFormatError as error:
        raise WeightFormatError(f"layer {layer!r} of {directory.path}: {error}") from error
    return name_tensors(layer, found)


def name_tensors(layer: str, packed: PackedWeight) -> PackedWeight:
    """Return the packed tensors of a layer by their names in the file."""
    return {f"{layer}.{part}": tensor for part, tensor in packed.items()}


def companion_files(source: Path) -> list[Path]:
    """Return the small files of a model: tokenizer, generation settings, chat template; empty for a GGUF file."""
    if not source.is_dir():
        return []
    return [
        path
        for path in sorted(source.iterdir())
        if path.is_file()
        and path.name != "config.json"
        and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHTS)
        and not path.name.startswith("compression.")  # reports of an earlier compression
        and path.name not in BOOKKEEPING
    ]


def source_state(directory: ModelDirectory) -> dict[str, list[int]]:
    """Return sizes and modification times of the weight files, by which a later run recognizes the model."""
    states = {path.name: path.stat() for path in {place.path for place in directory.places.values()}}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}


def _report(
    directory: ModelDirectory,
    layers: dict[str, str],
    kept: dict[str, str],
    forms: dict[str, dict[str, PackedTensorForm]],
) -> PackedReport:
    sizes = {name: sum(form.nbytes for form in parts.values()) for name, parts in forms.items()}
    before = {name: torch.Size(place.shape).numel() * place.dtype.itemsize for name, place in directory.places.items()}
    packed = [f"{layer}.weight" for layer in layers]
    wide = sum(4 * torch.Size(directory.places[name].shape).numel() for name in packed)
    return PackedReport(
        layers, kept, sum(before.values()), sum(sizes.values()), wide, sum(sizes[name] for name in packed)
    )
