"""Tensors of a model's directory, read one at a time."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.atomic_file import write_atomically
from windlass.base.bounded_json import parse_json
from windlass.base.errors import ModelError
from windlass.base.regular_file import open_regular
from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.conv1d_layers import make_linear
from windlass.compress.pruned_config import apply_entries
from windlass.kernels.mapped_bytes import MappedBytes, map_bytes
from windlass.storage.safetensors_header import DTYPES, SafetensorsHeaderError, read_safetensors_header

_MAPPED_BYTES = 1 << 14
_ADAPTER = "adapter_config.json"
LINEAR_ENTRY = "linear_layers"  # key of quantization_config
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class TensorPlace:
    """File, dtype and shape of a tensor of a directory, and the offset of its bytes in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class ModelDirectory:
    """Directory with `config.json` and safetensors files. Headers are read at construction, tensors on demand.

    Raises:
        ModelError: there is no such directory, or one of its files is missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            if (self.path / _ADAPTER).is_file():
                raise ModelError(
                    f"{path} is an adapter of peft, not a full model; merge it into its base (merge_and_unload), and "
                    "give the directory of the result"
                )
            raise ModelError(
                f"{path} is not a model: it has no config.json; give a directory that save_pretrained wrote"
            )
        self.config: dict[str, Any] = self._read_json(self.path / "config.json")
        self.places: dict[str, TensorPlace] = {}
        for file in self._files():
            self._read_header(file)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """Entry `quantization_config` of the configuration, if there is one."""
        found = self.config.get("quantization_config")
        return found if isinstance(found, dict) else None

    @property
    def has_linear_layers(self) -> bool:
        """True if weights of `Conv1D` layers have the layout of `nn.Linear` in the files."""
        return bool((self.quantization or {}).get(LINEAR_ENTRY))

    @property
    def is_language_model(self) -> bool:
        """False if `config.json` names another class than a causal language model, e.g. a classifier."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or "auto_map" in self.config:
            return True
        from transformers.models.auto import modeling_auto

        known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return any(name in known for name in names)

    def transformers_config(self, *, trust_remote_code: bool = False) -> Any:
        """Return the configuration as an object of transformers."""
        import transformers

        return transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=trust_remote_code)

    def check_wide(self) -> None:
        """Check that the directory is a full model whose weights are not packed.

        Raises:
            ModelError: the model is quantized, or its directory has an adapter too.
        """
        if self.quantization is not None:
            method = self.quantization.get("quant_method")
            raise ModelError(f"{self.path} is quantized already ({method}); give the unquantized model")
        if (self.path / _ADAPTER).is_file():
            raise ModelError(
                f"{self.path} has an adapter beside the model ({_ADAPTER}), which would be left out; merge it "
                "(merge_and_unload) and save the result, or move it away"
            )

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor.

        Raises:
            ModelError: no tensor has this name, or it cannot be read.
        """
        if name not in self.places:
            raise ModelError(f"{self.path} has no tensor {name!r}; copy the model again")
        place = self.places[name]
        memory = torch.empty(place.nbytes, dtype=torch.uint8)  # not mapped: mapped pages would need memory too
        try:
            with open(place.path, "rb", buffering=0) as file:
                file.seek(place.offset)
                left = memory.numpy().data
                while len(left):
                    count = file.readinto(left)
                    if not count:
                        raise OSError("the file ends inside the tensor")
                    left = left[count:]
        except OSError as error:
            raise ModelError(f"tensor {name!r} of {place.path} cannot be read: {error}; copy the file again") from error
        return memory.view(place.dtype).view(place.shape)

    def map(self, name: str) -> tuple[torch.Tensor, MappedBytes]:
        """Return a tensor whose memory is the file, and its mapping; see [Note: dropped pages].

        Raises:
            ModelError: the tensor cannot be mapped.
        """
        place = self.places[name]
        content, pages = map_bytes(place.path, place.offset, place.nbytes)
        return content.view(place.dtype).view(place.shape), pages

    def can_map(self, name: str) -> bool:
        """Return True if a tensor is better mapped than copied: it is large, and its elements are aligned in the
        file."""
        place = self.places[name]
        return place.nbytes >= _MAPPED_BYTES and place.offset % place.dtype.itemsize == 0

    def _files(self) -> list[Path]:
        index = self.path / INDEX
        if (self.path / SINGLE).is_file():  # before the index, as in transformers: the index may be outdated
            return [self.path / SINGLE]
        if not index.is_file():
            raise ModelError(f"{self.path} has neither {SINGLE} nor {INDEX}; save the model as safetensors")
        names = self._read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ModelError(f"{index} has no weight_map from tensors to files; copy it again")
        return [self.path / name for name in sorted(set(names.values()))]

    def _read_header(self, path: Path) -> None:
        try:
            with open_regular(path) as file:
                header = read_safetensors_header(file)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}; copy the file again") from error
        except SafetensorsHeaderError as error:
            raise ModelError(f"{path} is truncated or damaged: {error}; copy the file again") from error
        for name, entry in header.entries.items():
            if entry.dtype not in DTYPES:
                raise ModelError(f"tensor {name!r} of {path} has dtype {entry.dtype!r}, which torch does not have")
            offset = header.data_offset + entry.begin
            self.places[name] = TensorPlace(path, DTYPES[entry.dtype], entry.shape, offset)

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            found = parse_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as JSON: {error}; copy the file again") from error
        if not isinstance(found, dict):
            raise ModelError(f"{path} is not a JSON object; copy the file again")
        return found


def build_empty(directory: ModelDirectory, model_class: Any = None, *, trust_remote_code: bool = False) -> Any:
    """Build the model of a directory with its parameters on the meta device and its buffers on the CPU.

    Its layers fit the tensors in the files: narrower, low-rank, or `nn.Linear` in place of `Conv1D`. A head in the
    files that differs from the embedding to which the configuration ties it is not tied, as in transformers, and
    `directory.config` is corrected.

    Args:
        model_class: class of transformers; None: `AutoModelForCausalLM`.

    Raises:
        ModelError: transformers is missing, or cannot build the model.
    """
    try:
        import transformers
    except ImportError as error:
        raise ModelError("models of a directory need transformers: pip install 'windlass[hf]'") from error
    config, model = _build(directory, model_class or transformers.AutoModelForCausalLM, trust_remote_code)
    if _stores_other_head(directory, model):
        directory.config["tie_word_embeddings"] = False
        config, model = _build(directory, model_class or transformers.AutoModelForCausalLM, trust_remote_code)
    apply_entries(model, config)
    if directory.has_linear_layers:
        make_linear(model)
    return model


def _build(directory: ModelDirectory, source: Any, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the configuration of a directory, and the model that a class of transformers builds from it."""
    config = directory.transformers_config(trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if "tie_word_embeddings" in directory.config:  # a subclass may have untied the head in memory
        config.tie_word_embeddings = directory.config["tie_word_embeddings"]
    with _parameters_on_meta():
        try:
            if hasattr(source, "from_config"):
                model = source.from_config(config, trust_remote_code=trust_remote_code)
            else:
                model = source(config)
        except (ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")  # further lines list all classes of transformers
            raise ModelError(
                f"transformers cannot build the model of {directory.path}: {reason}; give a causal language model"
            ) from error
    return config, model


def _stores_other_head(directory: ModelDirectory, model: Any) -> bool:
    """Return True if the files have an output head with other values than the embedding to which it is tied. False for
    a model that shares other parameters too, since the configuration unties all of them or none."""
    weight = getattr(getattr(model, "get_output_embeddings", lambda: None)(), "weight", None)
    names = [name for name, one in model.named_parameters(remove_duplicate=False) if one is weight]
    if len(names) < 2 or shared_parameters(model) != {id(weight)}:
        return False
    sources = CheckpointNames(model, directory.places).source_of
    stored = [sources[name] for name in names if name in sources]
    return any(not _are_equal(directory, stored[0], other) for other in stored[1:])


def _are_equal(directory: ModelDirectory, name: str, other: str) -> bool:
    one, two = (directory.map(n)[0] if directory.can_map(n) else directory.read(n) for n in (name, other))
    return one.shape == two.shape and torch.equal(one.to(two.dtype), two)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when it is registered. Its memory was not written, so it never took
    pages."""
    before = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        before(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = before  # type: ignore[method-assign]


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model by name."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that several modules hold, e.g. of a head that shares the embedding."""
    held = Counter(id(one) for module in model.modules() for one in module._parameters.values() if one is not None)
    return {number for number, count in held.items() if count > 1}


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in the format of transformers: sorted keys, an indentation of 2."""
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
