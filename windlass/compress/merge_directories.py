"""Merging of models from disk to disk, with one tensor of each model in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.compress.distillation import check_tokenizers
from windlass.compress.merge_configurations import (
    same_labels_in_other_order,
    settings_of_places,
    ties_head,
    with_defaults,
)
from windlass.compress.merge_models import check_merge, merge_tensors
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_directory import FILE_BYTES, companion_files, source_state
from windlass.compress.partial_directory import check_target, open_partial_directory
from windlass.data.tokenizer import load_tokenizer
from windlass.kernels.weight_format import PackedTensorForm

_TOKENIZER = "tokenizer.json"
_BOOKKEEPING = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


def merge_directories(
    sources: Sequence[str | Path],
    target: str | Path,
    method: str = "linear",
    *,
    weights: Sequence[float] | None = None,
    base: str | Path | None = None,
    density: float = 0.5,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Merge the models in some directories as `merge_models` does, and write the result with configuration, tokenizer
    and dtypes of the first. The directory appears complete or not at all; the same call continues an interrupted one.

    Args:
        method, weights, base, density, seed: as for `merge_models`; the base is a directory.
        progress: called with the number of finished tensors and of all tensors.

    Returns:
        The number of tensors.

    Raises:
        ConfigError: the options do not fit together, or two models have different tokenizers.
        ModelError: a model is quantized, a tensor is missing or has another shape in one model, activation
            functions or numbers of heads differ, classifiers have labels in another order, merged values are not
            finite, or the target exists or contains a source.
    """
    check_merge(len(sources), method, weights, base is not None, density)
    models = [ModelDirectory(source) for source in sources]
    start = None if base is None else ModelDirectory(base)
    everyone = [*models, *([] if start is None else [start])]
    _drop_copies(everyone)
    for one in everyone:
        _check_fits(one, models[0])
    to = Path(target)
    check_target(to, [one.path for one in everyone], overwrite=overwrite)
    values = list(weights) if weights is not None else [1.0] * len(models)
    places = models[0].places
    copies = _stored_copies(models[0])
    forms = {name: {name: PackedTensorForm(place.dtype, place.shape)} for name, place in places.items()}
    plan = {
        "merge": {"method": method, "weights": values, "density": density, "seed": seed},
        "sources": [[str(one.path.absolute()), source_state(one)] for one in everyone],
    }
    with open_partial_directory(to, forms, plan, FILE_BYTES) as partial:
        for name in places:
            if name not in partial.done:
                tensors: list[Tensor] = [one.read(name) for one in models]
                first = None if start is None else start.read(name)
                same = copies.get(name, name)  # dare draws by name: a copy must get the draws of its original
                partial.write(name, {name: merge_tensors(same, tensors, method, values, first, density, seed)})
            progress(len(partial.done), len(places))
        partial.finish(models[0].config, companion_files(models[0].path))
    return len(places)


def _check_fits(one: ModelDirectory, first: ModelDirectory) -> None:
    if one.quantization is not None:
        raise ModelError(f"{one.path} is quantized ({one.quantization.get('quant_method')}); merge unquantized models")
    other = {name: place.shape for name, place in one.places.items()}
    for name, place in first.places.items():
        if other.get(name) != place.shape:
            found = "missing" if name not in other else f"of shape {other[name]}"
            raise ModelError(
                f"tensor {name!r} is {found} in {one.path} and of shape {place.shape} in {first.path}; merge models of "
                "one architecture"
            )
    unknown = sorted(set(other) - set(first.places))
    if unknown:
        raise ModelError(
            f"{one.path} has tensor {unknown[0]!r}, which {first.path} lacks; merge models of one architecture"
        )
    _check_configurations(one, first)
    if all((directory.path / _TOKENIZER).is_file() for directory in (one, first)):
        try:
            check_tokenizers(load_tokenizer(first.path).backend, load_tokenizer(one.path).backend)
        except ConfigError as error:
            raise ConfigError(f"{one.path} and {first.path} have different tokenizers: {error}") from error


def _check_configurations(one: ModelDirectory, first: ModelDirectory) -> None:
    """Raise ModelError if the same place in a tensor has different meanings in two models, e.g. reordered labels.
    Log a warning about all other different settings, which the merged model takes from the first model."""
    configs = [with_defaults(directory.config) for directory in (one, first)]
    own, other = (dict(settings_of_places(config)) for config in configs)
    for key in sorted({*own, *other}):
        if own.get(key) != other.get(key):
            raise ModelError(
                f"{one.path} has {key} {own.get(key)!r} and {first.path} {other.get(key)!r}, so that equal places of "
                "their tensors do not mean the same; merge models of one architecture"
            )
    if same_labels_in_other_order(*configs):
        raise ModelError(
            f"{one.path} has id2label {configs[0]['id2label']} and {first.path} {configs[1]['id2label']}, so that the "
            "outputs of their classifiers do not mean the same; reorder those of one"
        )
    differing = [
        key
        for key in sorted({*configs[0], *configs[1]} - {*_BOOKKEEPING})
        if configs[0].get(key) != configs[1].get(key)
    ]
    if differing:
        logger.warning(
            "%s and %s differ in %s of config.json; the merged model has those of the latter",
            one.path,
            first.path,
            ", ".join(differing),
        )


def _drop_copies(models: Sequence[ModelDirectory]) -> None:
    """Leave out stored copies of a tied head that another model's directory does not store."""
    common = set.intersection(*(set(one.places) for one in models))
    for one in models:
        if ties_head(one.config):
            for name in sorted(set(one.places) - common):
                if any(_is_copy(one, name, other) for other in common):
                    del one.places[name]


def _stored_copies(model: ModelDirectory) -> dict[str, str]:
    """Return the stored copies of a tied head by name, with the name of the tensor that they equal."""
    if not ties_head(model.config):
        return {}
    rows = model.config.get("vocab_size")
    tables = [name for name, place in model.places.items() if place.shape[:1] == (rows,)]
    return {name: tables[0] for name in tables[1:] if _is_copy(model, name, tables[0])}


def _is_copy(model: ModelDirectory, name: str, other: str) -> bool:
    one, two = model.places[name], model.places[other]
    return (
        len(one.shape) == 2
        and (one.shape, one.dtype) == (two.shape, two.dtype)
        and torch.equal(model.read(name), model.read(other))
    )
