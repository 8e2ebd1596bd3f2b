"""Structured pruning of the causal language model of a directory, in memory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from windlass.base.errors import ModelError
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_directory import companion_files
from windlass.compress.packed_model import is_packed_directory, load_packed_model
from windlass.compress.prune_model import PruningReport, prune_model


def load_wide_model(directory: ModelDirectory, *, trust_remote_code: bool = False) -> nn.Module:
    """Return the model of a directory that is not quantized, in float32 and eval mode.

    Raises:
        ModelError: it is quantized, or transformers cannot load it.
    """
    if directory.quantization is not None:
        raise ModelError(f"{directory.path} is quantized already; give the wide model")
    if is_packed_directory(directory.path):
        return load_packed_model(directory.path, dtype=torch.float32, trust_remote_code=trust_remote_code)
    import transformers

    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            directory.path, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"cannot load the model of {directory.path}: {reason}") from error
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
    """Write a model with fewer units to `target`, an existing empty directory, in the dtype of its files.

    Args:
        shares, importance, batches: as for `prune_model`.

    Raises:
        ConfigError, ModelError: as for `prune_model`, or the model is quantized.
    """
    directory = ModelDirectory(source)
    model = load_wide_model(directory, trust_remote_code=trust_remote_code)
    report = prune_model(model, shares, importance=importance, batches=batches)
    model.to(common_dtype(directory))
    model.save_pretrained(target)  # type: ignore[operator]
    for path in companion_files(directory.path):
        shutil.copyfile(path, Path(target) / path.name)
    return report
