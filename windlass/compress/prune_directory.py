"""Structured pruning of the causal language model of a directory, in memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from windlass.base.errors import ModelError
from windlass.compress.conv1d_layers import use_linear_class
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_directory import companion_files
from windlass.compress.packed_model import is_packed_directory, load_packed_model
from windlass.compress.prune_model import PruningReport, prune_model


def load_wide_model(directory: ModelDirectory, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the unquantized model of a directory, in float32 and eval mode.

    Raises:
        ModelError: the model is quantized, has an adapter, is of another kind than a causal language model, or
            transformers cannot load it.
    """
    directory.check_wide()
    if not directory.is_language_model:  # AutoModelForCausalLM would replace the model's head by a random one
        raise ModelError(
            f"{directory.path} is a {directory.config['architectures'][0]}, and only causal language models are "
            "pruned, distilled or compressed to a budget from a directory; prune it in memory by "
            "windlass.compress.prune_model.prune_model"
        )
    if is_packed_directory(directory.path):
        own = load_packed_model(directory.path, dtype=torch.float32, trust_remote_code=trust_remote_code)
        return own.requires_grad_(True)
    import transformers

    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            directory.path, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"cannot load the model of {directory.path}: {reason}") from error
    use_linear_class(model)
    return model.eval()


def common_dtype(directory: ModelDirectory) -> torch.dtype:
    """Return the floating-point dtype of most tensors of a directory."""
    dtypes = [place.dtype for place in directory.places.values() if place.dtype.is_floating_point]
    return max(set(dtypes), key=dtypes.count)


def prune_directory(
    source: str | Path,
    target: str | Path,
    shares: Mapping[str, float],
    *,
    importance: str = "activation",
    batches: Sequence[Tensor] = (),
    trust_remote_code: bool = False,
) -> PruningReport:
    """Write a model with fewer units to `target`, an existing empty directory, in the dtype of most tensors of the
    source.

    Args:
        shares, importance, batches: see `prune_model`.

    Raises:
        ConfigError, ModelError: as for `prune_model`, or the model is quantized.
    """
    directory = ModelDirectory(source)
    model = load_wide_model(directory, trust_remote_code=trust_remote_code)
    report = prune_model(model, shares, importance=importance, batches=batches)
    model.to(common_dtype(directory))
    save_wide_model(model, directory, Path(target))
    return report


def save_wide_model(model: Any, directory: ModelDirectory, target: Path) -> None:
    """Write a changed model to an existing directory, with its source directory's companion files (e.g. tokenizer).

    Raises:
        ModelError: the disk fails or is full.
    """
    try:
        model.save_pretrained(target)
        for path in companion_files(directory.path):
            shutil.copyfile(path, target / path.name)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{target} cannot be written: {error}; free some space and run the command again, or choose another "
            "directory"
        ) from error
