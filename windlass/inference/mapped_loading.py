"""Loading of a transformers model whose large parameters are views of mapped files, or absent.

transformers fills a model from tensors by name, converts them (e.g. joins experts) and sets them on the modules.
`lazy_loading` patches transformers: the tensors are views of mapped files, they are converted one at a time, and each
large result that is not a view of a file moves to a temporary file. So at most one converted parameter is in memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError, ModelError, StorageError
from windlass.inference.weight_file import MappedFile
from windlass.storage.safetensors_header import DTYPES, SafetensorsHeaderError, read_safetensors_header

_LOADER = "_load_pretrained_model"
_SEQUENTIAL = "HF_DEACTIVATE_ASYNC_LOAD"  # variable that makes transformers convert one parameter at a time
_SMALL = 1 << 16  # bytes; smaller parameters are copied into memory


class LazyTensor:
    """Stand-in for a tensor, which calls `open_tensor` when transformers indexes it."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, open_tensor: Callable[[], torch.Tensor]) -> None:
        self.shape, self.dtype, self._open = torch.Size(shape), dtype, open_tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._open()[index]

    def get_shape(self) -> list[int]:
        """Return the shape, as a slice of safetensors does."""
        return list(self.shape)


def absent_tensor(shape: Sequence[int], dtype: torch.dtype) -> LazyTensor:
    """Return a tensor without memory, which becomes a parameter on the meta device."""
    return LazyTensor(shape, dtype, lambda: torch.zeros(1, dtype=dtype).expand(tuple(shape)))


def map_safetensors(files: Sequence[Path]) -> dict[str, LazyTensor]:
    """Return the tensors of safetensors files as views of the mapped files.

    Raises:
        ModelError: a file cannot be read, is damaged or of another kind, or has a tensor of an unsupported dtype.
        StorageError: a file cannot be mapped.
    """
    found: dict[str, LazyTensor] = {}
    for path in files:
        if path.suffix != ".safetensors":
            raise ModelError(
                f"{path} is not a safetensors file, and only those can be streamed; save the model again with "
                "save_pretrained(..., safe_serialization=True)"
            )
        try:
            with open(path, "rb") as file:
                header = read_safetensors_header(file)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        except SafetensorsHeaderError as error:
            raise ModelError(f"{path} is truncated or damaged: {error}; download the model again") from error
        mapped = MappedFile(path)
        for name, entry in header.entries.items():
            if entry.dtype not in DTYPES:
                raise ModelError(
                    f"tensor {name!r} of {path} has dtype {entry.dtype!r}, which cannot be streamed; set "
                    "weights_tier='device'"
                )
            begin, end = header.data_offset + entry.begin, header.data_offset + entry.end
            dtype = DTYPES[entry.dtype]
            found[name] = LazyTensor(entry.shape, dtype, _opener(mapped, begin, end, dtype, entry.shape))
    return found


def _opener(
    mapped: MappedFile, begin: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    def open_tensor() -> torch.Tensor:
        flat = mapped.bytes[begin:end]
        if begin % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(shape)

    return open_tensor


@contextmanager
def lazy_loading(
    directory: Path, find_tensors: Callable[[Any, list[Path]], tuple[Mapping[str, LazyTensor], bool]]
) -> Iterator[None]:
    """Let `from_pretrained` fill models from lazy tensors inside the `with` block.

    Args:
        directory: directory for temporary files of converted parameters.
        find_tensors: function of a model without values and the paths of its files. Returns the tensors by name, and
            True if their names and layouts are those of the model, so that transformers converts nothing.

    Raises:
        ConfigError: this version of transformers loads models in another way, or the model is quantized.
    """
    import transformers

    base: Any = transformers.PreTrainedModel
    original = vars(base).get(_LOADER)
    if not isinstance(original, staticmethod) or not hasattr(base, "_move_missing_keys_from_meta_to_device"):
        raise ConfigError(
            f"weights_tier needs a newer transformers than {transformers.__version__}: pip install 'transformers>=5'"
        )

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *more: Any, **named: Any) -> Any:
        if getattr(load_config, "hf_quantizer", None) is not None:
            raise ConfigError("a quantized model cannot be streamed; give the plain model, and weights='int8'")
        tensors, converted = find_tensors(model, [Path(file) for file in checkpoint_files or ()])
        if converted:
            load_config = replace(load_config, weight_mapping=None)
            _keep_untied(model, tensors)
        with _parameters_in_files(directory):
            return original.__func__(model, dict(tensors), checkpoint_files, load_config, *more, **named)

    before = os.environ.get(_SEQUENTIAL)
    os.environ[_SEQUENTIAL] = "1"
    setattr(base, _LOADER, staticmethod(load))
    try:
        yield
    finally:
        setattr(base, _LOADER, original)
        if before is None:
            del os.environ[_SEQUENTIAL]
        else:
            os.environ[_SEQUENTIAL] = before


def _keep_untied(model: Any, tensors: Mapping[str, LazyTensor]) -> None:
    """Remove pairs of which both names have tensors from the weights that transformers ties.

    Such a pair has different values in the model's files, although the configuration ties it. transformers would
    compare the values again, and one of them may be absent here.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in list(tied.items()):
        if target in tensors and source in tensors:
            del tied[target]


@contextmanager
def _parameters_in_files(directory: Path) -> Iterator[None]:
    """Replace CPU parameters that are registered inside the `with` block by the results of `_without_memory`."""
    register = nn.Module.register_parameter

    def replaced(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type == "cpu":
            value = _without_memory(param.detach(), directory)
            if value is not None:
                kept = nn.Parameter(value, requires_grad=False)
                kept.__dict__.update(param.__dict__)  # transformers' mark of a loaded parameter
                param = kept
        register(self, name, param)

    nn.Module.register_parameter = replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _without_memory(tensor: torch.Tensor, directory: Path) -> torch.Tensor | None:
    """Return a replacement of a parameter: on the meta device if the parameter is absent, a copy if it is small, else a
    view of a temporary file. None if the parameter is a view of a file already.
    """
    if tensor.numel() > 1 and not any(tensor.stride()):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if tensor.nbytes < _SMALL:
        return tensor.clone()  # a view would keep its file mapped
    if tensor.untyped_storage().resizable():
        return write_to_temporary_file(tensor, directory)
    return None


def write_to_temporary_file(tensor: torch.Tensor, directory: Path) -> torch.Tensor:
    """Write a tensor to a temporary file; return a view of the mapped file. The last view frees the disk space.

    Raises:
        StorageError: the file cannot be written, e.g. because the disk is full.
    """
    try:
        with tempfile.NamedTemporaryFile(prefix="windlass-weights-", dir=directory) as file:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            return MappedFile(Path(file.name)).bytes.view(tensor.dtype).view(tensor.shape)
    except OSError as error:
        raise StorageError(
            f"a parameter of {tensor.nbytes} bytes cannot be written to {directory}: {error.strerror}; give "
            "weights_directory, a directory on a disk with room for the weights"
        ) from error
