"""Export of any checkpoint's weights as Hugging Face safetensors files, in one process and little memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.base.atomic_file import make_directory, replace_directory, temporary_path_beside, write_atomically
from windlass.base.dtypes import is_castable
from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.base.regular_file import read_regular
from windlass.checkpoint.checkpoint_directory import (
    disk_errors,
    fsync_directory,
    is_any_checkpoint,
    require_space,
)
from windlass.checkpoint.safetensors_file import TensorEntry
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint, split_checkpoint_path
from windlass.checkpoint.streamed_safetensors import stream_tensors
from windlass.kernels.packed_linear import is_packed_parameter

# files that a model's directory may hold besides weights; copied if the checkpoint's directory has them
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class ExportResult:
    """Result of an export.

    Attributes:
        tensors, nbytes: number of tensors, and their bytes.
        files: names of the safetensors files.
        tied: name of the stored tensor, by alias, for tensors that are stored once.
        companions: further files that were copied.
        absent: parameters that the checkpoint does not hold.
    """

    tensors: int
    nbytes: int
    files: tuple[str, ...]
    tied: dict[str, str]
    companions: tuple[str, ...]
    absent: tuple[str, ...]


def export_safetensors(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_size: int = 5 * 10**9,
    allow_partial: bool = False,
    overwrite: bool = False,
    companion_dirs: Sequence[Path] = (),
) -> ExportResult:
    """Write parameters and buffers of a checkpoint to the directory `target`, which appears atomically.

    Memory: some megabytes, for any size of a tensor, if windlass wrote the checkpoint. A tied parameter is stored once,
    under its first name; its aliases are in the files' header, as `safetensors.torch.save_model` writes them.

    Args:
        checkpoint: DIRECTORY/TAG, or a checkpoint directory, whose latest checkpoint is exported.
        dtype: dtype of all floating-point tensors; None: each in its compute dtype.
        shard_size: maximum bytes of a file with more than one tensor.
        allow_partial: export a checkpoint without frozen parameters; False: this raises.
        overwrite: replace an existing directory.
        companion_dirs: more directories to search for the model's configuration and tokenizer.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, lacks parameters or holds packed weights, or the
            target exists, contains checkpoints or cannot be written.
    """
    directory, tag = split_checkpoint_path(checkpoint)
    root = Path(target)
    if not overwrite and root.exists() and not (root.is_dir() and not any(root.iterdir())):
        raise CheckpointError(f"{root} exists; choose another directory, or overwrite it (--overwrite)")
    with StoredCheckpoint(directory, tag) as stored:
        _refuse_checkpoint_target(root, stored.path)
        if any((one / "config.json").is_file() for one in (stored.path, stored.path.parent, *companion_dirs)):
            _refuse_packed(stored)
        absent = missing_parameters(stored)
        if absent and not allow_partial:
            shown = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
            raise CheckpointError(
                f"{stored.path} holds only trained parameters; {len(absent)} of the model are missing: {shown}. They "
                "are in the base model; export the trained ones with allow_partial=True (--partial), and load them "
                "over the base model"
            )
        staging = temporary_path_beside(root.absolute())
        try:
            with disk_errors(staging, 0):
                make_directory(staging, exist_ok=False)
            exported = _write(stored, staging, dtype, shard_size, absent, companion_dirs)
            with disk_errors(root, 0):
                fsync_directory(staging)
                replace_directory(staging, root)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return exported


def _refuse_checkpoint_target(target: Path, exported: Path) -> None:
    """Refuse to overwrite a directory with checkpoints at any depth: overwriting removes it."""
    here = target.resolve()
    if exported.resolve().is_relative_to(here) or any(
        is_any_checkpoint(Path(folder)) for folder, _, _ in os.walk(here)
    ):
        raise CheckpointError(f"{target} holds checkpoints, which would be removed; choose another directory")


def _refuse_packed(stored: StoredCheckpoint) -> None:
    """Refuse to write the bytes of packed layers next to a model's config.json: from_pretrained would ignore them, and
    fill the layers with random values."""
    for name, where in stored_names(stored).items():
        dtype = stored.meta_tensor(where).dtype
        if is_packed_parameter(name, dtype):
            raise CheckpointError(
                f"{stored.path} holds packed weights, e.g. {name!r} ({dtype}), which from_pretrained cannot load; load "
                "the checkpoint into the model, replace each PackedLinear by its to_linear(), and save the model"
            )


def missing_parameters(stored: StoredCheckpoint) -> tuple[str, ...]:
    """Return the names of the model's parameters that the checkpoint lacks because they were not trained.

    Raises:
        CheckpointError: parameters are missing, and the checkpoint does not record their names (an old checkpoint
            without frozen parameters).
    """
    if not stored.engine_data.get("trainable_only"):
        return ()
    absent = stored.engine_data.get("absent")
    if absent is None:
        raise CheckpointError(
            f"{stored.path} holds only trained parameters, and does not record which are missing; load it into an "
            "engine and save again, or use engine.save_16bit_model"
        )
    return tuple(absent)


def stored_names(stored: StoredCheckpoint) -> dict[str, str]:
    """Return the stored name of each parameter and buffer, by its name in the model."""
    return {name.partition("/")[2]: name for name in (*stored.names("param/"), *stored.names("buffer/"))}


def stored_param_dtype(stored: StoredCheckpoint, name: str) -> torch.dtype:
    """Return the compute dtype of the parameter stored as `name`, whose master weights may be wider, or the dtype of a
    buffer."""
    recorded_dtype = (
        stored.engine_data.get("dtypes", {}).get(name.partition("/")[2]) if name.startswith("param/") else None
    )
    dtype = getattr(torch, recorded_dtype, None) if isinstance(recorded_dtype, str) else None
    return dtype if isinstance(dtype, torch.dtype) else stored.meta_tensor(name).dtype


def _write(
    stored: StoredCheckpoint,
    staging: Path,
    dtype: torch.dtype | None,
    shard_size: int,
    absent: tuple[str, ...],
    companion_dirs: Sequence[Path],
) -> ExportResult:
    held = stored_names(stored)
    entries: dict[str, TensorEntry] = {}
    for name, where in held.items():
        like = stored.meta_tensor(where)
        chosen = dtype if dtype is not None and is_castable(like.dtype) else stored_param_dtype(stored, where)
        entries[name] = TensorEntry(chosen, tuple(like.shape))
    total = sum(entry.nbytes for entry in entries.values())
    require_space(staging, total)
    tied = {
        alias: name for alias, name in stored.engine_data.get("tied", {}).items() if name in held and alias not in held
    }
    shards = _split_into_files(entries, shard_size)
    names = [_SINGLE] if len(shards) == 1 else _shard_file_names(len(shards))
    for file_name, shard in zip(names, shards, strict=True):
        # put wide dtypes first, so that every tensor is aligned
        shard = dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize))
        remarks = {alias: name for alias, name in tied.items() if name in shard}
        stream_tensors(staging / file_name, shard, (stored.iter_parts(held[name]) for name in shard), remarks)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        _write_json(staging / _INDEX, {"metadata": {"total_size": total, **tied}, "weight_map": weight_map})
    used = {entry.dtype for entry in entries.values() if is_castable(entry.dtype)}
    companions = _copy_companions(
        (stored.path, stored.path.parent, *companion_dirs), staging, used.pop() if len(used) == 1 else None
    )
    return ExportResult(len(entries), total, tuple(names), tied, companions, absent)


def _split_into_files(entries: Mapping[str, TensorEntry], max_shard_bytes: int) -> list[dict[str, TensorEntry]]:
    """Group consecutive tensors into files of at most `max_shard_bytes` bytes, at least one tensor each."""
    shards: list[dict[str, TensorEntry]] = [{}]
    size = 0
    for name, entry in entries.items():
        if shards[-1] and size + entry.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += entry.nbytes
    return shards


def _shard_file_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _copy_companions(folders: Sequence[Path], staging: Path, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Copy configuration and tokenizer files, each from the first folder that has it."""
    found = []
    for name in COMPANIONS:
        text = next((text for folder in folders if (text := _read_companion(folder, name)) is not None), None)
        if text is None:
            continue
        found.append(name)
        with disk_errors(staging / name, len(text)):
            write_atomically(staging / name, text)
        if name == "config.json" and dtype is not None:
            _set_config_dtype(staging / name, dtype)
    return tuple(found)


def _read_companion(directory: Path, name: str) -> bytes | None:
    """Read a companion file. A link out of the directory is not followed and causes a warning."""
    try:
        return read_regular(directory / name, directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("%s is not copied: %s", directory / name, error.strerror or error)
        return None


def _set_config_dtype(path: Path, dtype: torch.dtype) -> None:
    """Set the dtype in the model's configuration to the files' dtype; otherwise a load would convert weights back."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name} beside the checkpoint is not JSON ({error}); repair or remove it"
        ) from error
    if not isinstance(config, dict):
        return
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(dtype).removeprefix("torch.")
    _write_json(path, config)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    with disk_errors(path, len(text)):
        write_atomically(path, text)
