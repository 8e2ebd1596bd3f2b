"""Loading of pretrained transformers models, sharded over the ranks while they are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.bounded_json import parse_json
from windlass.base.errors import CheckpointError, ModelError
from windlass.base.remote_code import needs_remote_code, remote_code_refusal
from windlass.compress.gguf_model import is_gguf_file
from windlass.compress.packed_model import is_packed_directory, load_packed_model
from windlass.compress.rounded_model import load_rounded_model
from windlass.compress.weight_quantization import initial_format
from windlass.config import load_config
from windlass.zero import Init
from windlass.zero.sharded_init.weight_files import header

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def from_pretrained(
    cls: Any,
    path: str | Path,
    *,
    config: Any = None,
    weights: str | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `cls.from_pretrained(path, **kwargs)` with each rank reading only its own shards. Collective.

    Packed weights come from a GGUF file, from a directory (`quantization_config` of compressed-tensors, GPTQ, AWQ or
    windlass), or from rounding to the format `weights`. Packed layers are frozen `PackedLinear` modules; to build
    them, each rank reads all files and keeps its shard.

    Pass the result to `windlass.initialize`. The model's values equal those of the unsharded call with rank 0's seed.
    This includes parameters that are missing in the files and are initialized.

    Args:
        cls: a model class of transformers, or one of its `AutoModel...` classes.
        path: a directory with `config.json` and safetensors files, a GGUF file, or a name on the hub.
        config: the configuration that `initialize` will get: dict, path or base64 text. It sets the tier of the shards
            (`offload_param`); stage and optimizer do not matter here. Pass the model's own configuration as
            `model_config=`, because this name is taken.
        weights: weight format, e.g. `int4_g64`, to which linear layers are rounded while they are read. None: the
            format in `weight_quantization.quantized_initialization` of `config`, if it is set; embeddings are then
            rounded too.
        trust_remote_code: run Python files that come with the model.
        kwargs: arguments of `cls.from_pretrained`: `dtype`, `ignore_mismatched_sizes`, ...

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or a tensor's shape differs from the model's.
        ModelError: `cls` has no `from_pretrained`, the model needs `trust_remote_code`, or an argument does not apply
            to packed weights.
    """
    if not callable(getattr(cls, "from_pretrained", None)):
        raise ModelError(
            f"{cls!r} has no from_pretrained; pass a model class of transformers, such as AutoModelForCausalLM"
        )
    if "model_config" in kwargs:
        kwargs["config"] = kwargs.pop("model_config")
    directory = Path(path)
    if is_gguf_file(directory):
        if weights is not None:
            raise ModelError(
                f"{path} is a GGUF file, whose weights are quantized already; leave weights={weights!r} out"
            )
    elif directory.is_dir():
        _check_directory(directory, needs_config="config" not in kwargs)
    elif directory.is_absolute() or str(path).startswith("."):
        raise CheckpointError(
            f"{path} is not a directory; pass one with config.json and safetensors files, or a GGUF file"
        )
    form = initial_format(load_config(config).weight_quantization) if weights is None and config is not None else None
    if weights is not None or form is not None or is_packed_directory(directory):
        dtype = _plain_dtype(kwargs)
        has_ranks = dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1
        with Init(config_dict_or_path=config, enabled=has_ranks):
            if weights is not None:
                return load_rounded_model(directory, weights, cls, dtype=dtype, trust_remote_code=trust_remote_code)
            if form is not None and not is_packed_directory(directory):
                return load_rounded_model(
                    directory, form, cls, dtype=dtype, everything=True, trust_remote_code=trust_remote_code
                )
            return load_packed_model(directory, cls, dtype=dtype, trust_remote_code=trust_remote_code)
    with Init(config_dict_or_path=config):
        try:
            return cls.from_pretrained(path, trust_remote_code=trust_remote_code, **kwargs)
        except ValueError as error:
            if needs_remote_code(error):
                raise ModelError(remote_code_refusal(path)) from error
            raise


def _plain_dtype(arguments: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype of the tensors that are not packed.

    Raises:
        ModelError: `arguments` contains an argument other than `dtype`, or the dtype is not a `torch.dtype`.
    """
    dtype = arguments.pop("dtype", arguments.pop("torch_dtype", None))
    if arguments or not (dtype is None or isinstance(dtype, torch.dtype)):
        raise ModelError(
            "from_pretrained of a directory of packed weights takes no argument but dtype, a torch.dtype such as "
            f"torch.float32, and got {', '.join(sorted(arguments)) or repr(dtype)}; correct or remove it"
        )
    return dtype


def _check_directory(directory: Path, *, needs_config: bool) -> None:
    """Check that the required files exist, before every rank builds a model."""
    if needs_config and not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json; save the model there with save_pretrained")
    if (directory / _SINGLE).is_file():
        header(directory / _SINGLE)
    elif (directory / _INDEX).is_file():
        for name in _files_in_index(directory / _INDEX):
            if not (directory / name).is_file():
                raise CheckpointError(f"{directory / name} is missing, but {_INDEX} lists it; download the model again")
            header(directory / name)


def _files_in_index(index: Path) -> list[str]:
    try:
        return sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index} is not an index of safetensors files ({error}); download the model again"
        ) from error
