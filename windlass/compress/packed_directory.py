"""Writing of a directory of packed weights from a model's directory, one tensor in memory at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.base.atomic_file import make_directory, open_new, temporary_path_beside
from windlass.base.errors import ModelError
from windlass.compress.model_directory import INDEX, SINGLE, ModelDirectory, build_empty, linear_layers, write_json
from windlass.compress.quantization_config import describe_formats
from windlass.kernels.weight_format import PackedTensorForm, PackedWeight, WeightFormat, get_weight_format
from windlass.storage.safetensors_header import encode_safetensors_header

FILE_BYTES = 5 * 10**9
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", INDEX)

PackLayer = Callable[[str, torch.Tensor, WeightFormat], PackedWeight]
"""Packs the weight of a layer, given its name, its weight and its format."""


@dataclass(frozen=True)
class PackedReport:
    """Sizes of a packed directory.

    Attributes:
        layers: format of each packed layer.
        kept: linear layers that stayed wide, with the reason.
        bytes_before, bytes_after: of all tensors.
        packed_before, packed_after: of the weights of the packed layers, those before in float32.
    """

    layers: dict[str, str]
    kept: dict[str, str]
    bytes_before: int
    bytes_after: int
    packed_before: int
    packed_after: int


def write_packed_directory(
    source: str | Path,
    target: str | Path,
    formats: str | Callable[[str], str | None],
    *,
    pack: PackLayer | None = None,
    head: bool = False,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
    trust_remote_code: bool = False,
) -> PackedReport:
    """Write the model of `source` with packed linear layers to the directory `target`, which appears complete or not at
    all.

    Memory: the largest tensor, its packed form, and what rounding takes. Tokenizer and other small files are copied.

    Args:
        formats: format of all linear layers, or a function from a layer's name to its format, or None to leave it wide.
        pack: another rounding than the format's own, with the same packed tensors.
        head: pack the output head too, where `formats` is a name. A head that shares the embedding stays wide.
        overwrite: replace an existing directory.
        file_bytes: of a file with more than one tensor, at most.

    Raises:
        ModelError: the source is no model, is packed already, or the target exists.
        WeightFormatError: a weight does not fit its format.
    """
    directory, to = ModelDirectory(source), Path(target)
    if directory.quantization is not None:
        raise ModelError(
            f"{source} is quantized already ({directory.quantization.get('quant_method')}); give the wide model"
        )
    if to.exists() and not overwrite and not (to.is_dir() and not any(to.iterdir())):
        raise ModelError(f"{to} exists; choose another directory, or overwrite it")
    model = build_empty(directory, trust_remote_code=trust_remote_code)
    layers, kept = _choose(directory, model, formats, head)
    forms = _file_forms(directory, layers)
    staging = temporary_path_beside(to.absolute())
    try:
        make_directory(staging, exist_ok=False)
        _write_files(directory, layers, forms, staging, pack or _round, file_bytes)
        features = {layer: directory.places[f"{layer}.weight"].shape[1] for layer in layers}
        config = {**directory.config, "quantization_config": describe_formats(layers, features, sorted(kept))}
        write_json(staging / "config.json", config)
        _copy_companions(directory.path, staging)
        if to.exists():
            shutil.rmtree(to)
        os.replace(staging, to)
    except OSError as error:
        raise ModelError(f"{to} cannot be written: {error}; free some space or choose another directory") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return _report(directory, layers, kept, forms)


def _choose(
    directory: ModelDirectory, model: torch.nn.Module, formats: str | Callable[[str], str | None], head: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the format of each layer to be packed, and the reason for each other linear layer."""
    layers: dict[str, str] = {}
    kept: dict[str, str] = {}
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in linear_layers(model).items():
        is_head = module is output
        chosen = formats(name) if callable(formats) else formats if head or not is_head else None
        if f"{name}.weight" not in directory.places:
            kept[name] = "it shares another tensor"
        elif chosen is None:
            kept[name] = "the output head stays wide" if is_head else "no format was chosen"
        else:
            get_weight_format(chosen)
            layers[name] = chosen
    if not layers:
        raise ModelError(f"{directory.path} has no linear layer to be packed: {kept or 'there is none'}")
    return layers, kept


def _file_forms(directory: ModelDirectory, layers: dict[str, str]) -> dict[str, dict[str, PackedTensorForm]]:
    """Return the tensors that each tensor of the source becomes, by the source's name."""
    packed = {f"{layer}.weight": layer for layer in layers}
    forms: dict[str, dict[str, PackedTensorForm]] = {}
    for name, place in directory.places.items():
        if name not in packed:
            forms[name] = {name: PackedTensorForm(place.dtype, place.shape)}
            continue
        layer = packed[name]
        parts = get_weight_format(layers[layer]).file_form(*place.shape)
        forms[name] = {f"{layer}.{part}": form for part, form in parts.items()}
    return forms


def _round(layer: str, weight: torch.Tensor, weight_format: WeightFormat) -> PackedWeight:
    return weight_format.pack(weight)


def _write_files(
    directory: ModelDirectory,
    layers: dict[str, str],
    forms: dict[str, dict[str, PackedTensorForm]],
    staging: Path,
    pack: PackLayer,
    file_bytes: int,
) -> None:
    files: list[list[str]] = [[]]
    size = 0
    for name, parts in forms.items():
        here = sum(form.nbytes for form in parts.values())
        if size + here > file_bytes and files[-1]:
            files.append([])
            size = 0
        files[-1].append(name)
        size += here
    names = [SINGLE]
    if len(files) > 1:
        names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    for file_name, sources in zip(names, files, strict=True):
        written = {part: form for source in sources for part, form in forms[source].items()}
        head = encode_safetensors_header({part: (form.dtype, form.shape) for part, form in written.items()}, {})
        with open_new(staging / file_name) as file:
            file.write(head)
            for source in sources:
                tensors = _tensors_of(directory, source, layers, pack)
                for part, form in forms[source].items():
                    tensor = tensors.pop(part)
                    if tensor.dtype != form.dtype or tuple(tensor.shape) != form.shape:
                        raise ModelError(f"tensor {part!r} is {tensor.dtype} {tuple(tensor.shape)}, not {form}")
                    file.write(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().data)
                    del tensor
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        places = zip(names, files, strict=True)
        weight_map = {part: file for file, sources in places for source in sources for part in forms[source]}
        total = sum(form.nbytes for parts in forms.values() for form in parts.values())
        write_json(staging / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _tensors_of(
    directory: ModelDirectory, source: str, layers: dict[str, str], pack: PackLayer
) -> dict[str, torch.Tensor]:
    """Return the tensors that a tensor of the source becomes, by their names."""
    layer = source.removesuffix(".weight")
    if layer not in layers or source == layer:
        return {source: directory.read(source)}
    found = pack(layer, directory.read(source), get_weight_format(layers[layer]))
    return {f"{layer}.{part}": tensor for part, tensor in found.items()}


def _copy_companions(source: Path, staging: Path) -> None:
    """Copy the small files of a model: tokenizer, generation settings, chat template."""
    for path in source.iterdir():
        if (
            path.is_file()
            and path.name != "config.json"
            and not path.name.startswith(".")
            and not path.name.endswith(_WEIGHTS)
        ):
            with path.open("rb") as file, open_new(staging / path.name) as copy:
                shutil.copyfileobj(file, copy)


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
