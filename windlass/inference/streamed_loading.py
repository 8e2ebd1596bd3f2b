"""Loading of a model with weights that stay in a weight file on disk. The file is made at the first load."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.inference.engine_options import EngineOptions
from windlass.inference.mapped_loading import LazyTensor, absent_tensor, lazy_loading, map_safetensors
from windlass.inference.model_forward import CausalForward, run_probe
from windlass.inference.model_loading import load_config, load_model, parse_dtype
from windlass.inference.streamed_modules import DiskUnits, MappedUnits, StreamedModules, WeightLender, store_units
from windlass.inference.weight_file import (
    MappedFile,
    StoredTensorPlace,
    StoredUnit,
    WeightFileWriter,
    WeightIndex,
    file_key,
    locked_directory,
    read_index,
    write_index,
)
from windlass.inference.weight_stream import WeightStream
from windlass.kernels.coded_formats import CodedWeightFormat
from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.weight_format import get_weight_format
from windlass.storage.disk_error_messages import format_bytes
from windlass.storage.safetensors_header import CODES

_FOLDER = "windlass-weights"  # folder in the model's directory


def load_streamed_model(
    path: str | Path,
    options: EngineOptions,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> tuple[nn.Module, StreamedModules]:
    """Load a causal language model of transformers, and leave the weights of its linear layers and experts in a file.

    The first load writes the file unit by unit, with the weights of only one unit in memory. Later loads use the file
    as long as the model's files and configuration, the dtype and the weight format are the same.

    Raises:
        ConfigError: the device is not the CPU, there are no native kernels, the model or an option rules out streaming,
            or `path` is not a directory and `weights_directory` is None.
        ModelError: the model cannot be loaded, see `load_model`; or its files are not safetensors.
        StorageError: the weight file cannot be written or read.
    """
    if torch.device(device).type != "cpu" or get_inference_path().module is None:
        raise ConfigError(
            f"weights_tier is {options.weights_tier!r}, which needs a model on the CPU and the native kernels (device "
            f"{device}, kernels {get_inference_path().name}); load with device='cpu', or weights_tier='device'"
        )
    if options.weights is not None and isinstance(get_weight_format(options.weights), CodedWeightFormat):
        raise ConfigError(
            f"weights is {options.weights!r} with weights_tier {options.weights_tier!r}; streamed weights take fp32, "
            "bf16, fp16, int8 and fp8; set weights_tier='device' for others"
        )
    return _StreamedLoad(path, options, dtype, trust_remote_code).run()


class _StreamedLoad:
    """One load of a model with weights in a file."""

    def __init__(
        self, path: str | Path, options: EngineOptions, dtype: str | torch.dtype, trust_remote_code: bool
    ) -> None:
        self._path, self._options, self._trusts = path, options, trust_remote_code
        self._dtype = _find_dtype(path, dtype, trust_remote_code)
        self._directory = _find_directory(path, options)
        self._held = ExitStack()
        self._key = ""
        self._index: WeightIndex | None = None

    def run(self) -> tuple[nn.Module, StreamedModules]:
        """Load the model; make the file if there is none."""
        with self._held:
            with lazy_loading(self._directory, self._find_tensors):
                model = load_model(self._path, dtype=self._dtype, trust_remote_code=self._trusts)
            if self._index is None:
                self._index = self._make_file(model)
        weights = self._weights_path
        lender: WeightLender
        if self._options.weights_tier == "host":
            lender = MappedUnits(weights, self._index.units)
        else:
            _copy_mapped(model)
            units = self._index.units
            sizes = [unit.nbytes for unit in units]
            lender = WeightStream(DiskUnits(weights, units), sizes, self._options.weights_buffer_bytes)
        streamed = StreamedModules(model, self._index, lender)
        size = format_bytes(self._index.streamed_bytes)
        if self._options.weights_tier == "host":
            logger.info("%s of weights are mapped from %s", size, weights)
        else:
            staging = format_bytes(streamed.staging_bytes)
            logger.info("%s of weights stay in %s; buffers of %s hold what is read ahead", size, weights, staging)
        return model, streamed

    @property
    def _weights_path(self) -> Path:
        return self._directory / f"{self._key}.weights"

    @property
    def _index_path(self) -> Path:
        return self._directory / f"{self._key}.json"

    def _find_tensors(self, model: nn.Module, files: list[Path]) -> tuple[dict[str, LazyTensor], bool]:
        """Return (tensors of the weight file, True), or (tensors of the model's files, False) if there is no weight
        file.
        """
        config: Any = model.config
        facts = {
            "config": {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")},
            "class": type(model).__name__,
            "dtype": str(self._dtype),
            "format": self._options.weights,
            "native": get_inference_path().module is not None,
        }
        self._key = file_key(files, facts)
        self._held.enter_context(locked_directory(self._directory, self._key))
        self._index = read_index(self._index_path, self._weights_path)
        if self._index is None:
            return map_safetensors(files), False
        mapped = MappedFile(self._weights_path)
        found = {name: _stored_tensor(mapped, unit, name) for name, unit in self._index.parameters.items()}
        found |= {n: absent_tensor(place.shape, place.torch_dtype) for n, place in self._index.absent.items()}
        return found, True

    def _make_file(self, model: nn.Module) -> WeightIndex:
        """Write the weight file of a model whose parameters are mapped from its files. Then free these parameters, or
        map them from the weight file.
        """
        logger.info("writing the weights of %s to %s, once", self._path, self._weights_path)
        self._index_path.unlink(missing_ok=True)
        forms = _parameter_forms(model)
        probe = partial(run_probe, CausalForward(model))
        writer = WeightFileWriter(self._weights_path)
        try:
            units = store_units(model, probe, writer, self._options.weights)
            left = {n: p for n, p in model.named_parameters(remove_duplicate=False) if not p.is_meta}
            # a tied parameter may stay under some of its names; transformers ties the others to the first of these
            kept = {names: next((name for name in names if name in left), None) for names in forms}
            resident = {name: left[name] for name in kept.values() if name is not None}
            stored = {n: writer.add([n], {n: p.detach()}) for n, p in resident.items()}
            persistent = {n: b for n, b in model.named_buffers() if n in model.state_dict()}
            stored |= {n: writer.add([n], {n: b}) for n, b in persistent.items()}
        except BaseException:
            self._weights_path.unlink(missing_ok=True)  # otherwise the incomplete file would keep the disk full
            raise
        finally:
            writer.close()
        absent = {names[0]: form for names, form in forms.items() if kept[names] is None}
        index = WeightIndex(tuple(units), stored, absent)
        write_index(self._index_path, index)
        mapped = MappedFile(self._weights_path)
        with torch.no_grad():
            for name, parameter in resident.items():
                if not parameter.untyped_storage().resizable():  # mapped from a file of the model or a temporary file
                    parameter.data = _stored_tensor(mapped, stored[name], name)[...]
        return index


def _copy_mapped(model: nn.Module) -> None:
    """Copy mapped parameters and buffers into memory: a failed read of a mapped page ends the process by SIGBUS."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and not tensor.untyped_storage().resizable():
            tensor.data = tensor.detach().clone()


def _parameter_forms(model: nn.Module) -> dict[tuple[str, ...], StoredTensorPlace]:
    """Return dtype and shape of each parameter by all of its names: a tied parameter has several."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return {tuple(names): StoredTensorPlace(CODES[p.dtype], tuple(p.shape), 0) for p, names in found.items()}


def _stored_tensor(mapped: MappedFile, unit: StoredUnit, name: str) -> LazyTensor:
    place = unit.tensors[name]
    memory = mapped.bytes[unit.offset : unit.offset + unit.nbytes]
    return LazyTensor(place.shape, place.torch_dtype, lambda: place.view(memory))


def _find_dtype(path: str | Path, dtype: str | torch.dtype, trust_remote_code: bool) -> str | torch.dtype:
    """Return `dtype`; for `auto`, the dtype in the model's configuration, or `auto` if it has none. float16 is replaced
    by float32.
    """
    wanted = parse_dtype(dtype)
    if wanted is None:
        config = load_config(path, trust_remote_code=trust_remote_code)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        wanted = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    return torch.float32 if wanted == torch.float16 else wanted or "auto"


def _find_directory(path: str | Path, options: EngineOptions) -> Path:
    if options.weights_directory is not None:
        return Path(options.weights_directory)
    if not Path(path).is_dir():
        raise ConfigError(
            f"weights_tier is {options.weights_tier!r}, and {path} is not a local directory, where the weight file "
            "would be written; give weights_directory, a directory on a fast disk"
        )
    return Path(path) / _FOLDER
