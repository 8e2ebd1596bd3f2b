"""Full weights from checkpoints of DeepSpeed and of windlass, under the function names of DeepSpeed's `zero_to_fp32`.

Values equal those of `zero_to_fp32`: trained parameters from their float32 master weights, floating-point buffers in
float32, frozen parameters as saved. Writing files needs a few megabytes of memory, for any model size.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.dtypes import is_castable
from windlass.base.errors import CheckpointError, WindlassError
from windlass.base.log import logger
from windlass.checkpoint.checkpoint_directory import (
    INDEX_FILE,
    LATEST,
    is_any_checkpoint,
    read_latest,
)
from windlass.checkpoint.safetensors_export import missing_parameters, stored_names, stored_param_dtype
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.compat.checkpoint.consolidated_files import (
    StoredWeight,
    parse_output_dtype,
    parse_shard_size,
    write_weights,
)
from windlass.compat.checkpoint.torch_file import read_torch_file


class NotZeroCheckpointError(CheckpointError, ValueError):
    """Error for a file that DeepSpeed's ZeRO did not write, or for a missing tag."""


@dataclass(frozen=True)
class GatheredTensor:
    """Tensor that is read on demand.

    Attributes:
        dtype, shape: dtype and shape of the tensor.
    """

    dtype: torch.dtype
    shape: torch.Size
    _read: Callable[[], torch.Tensor]

    def contiguous(self) -> torch.Tensor:
        """Return the full tensor on the CPU."""
        return self._read()

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """Return the path of DeepSpeed's file of model states in a tag's directory; at stage 3, of rank 0's file.

    Raises:
        FileNotFoundError: the directory or the file does not exist.
        ValueError: unknown stage.
    """
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"unknown zero stage {zero_stage}; pass 0, 1, 2 or 3")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
    path = _require_directory(checkpoint_dir) / name
    if not path.is_file():
        raise FileNotFoundError(
            f"can't find the model states file {str(path)!r}; pass a tag's directory, and its stage"
        )
    return str(path)


def get_checkpoint_files(checkpoint_dir: str | os.PathLike[str], glob_pattern: str) -> list[str]:
    """Return the files of a tag's directory that match `glob_pattern`, ordered by the numbers in their names.

    Raises FileNotFoundError if the directory does not exist or no file matches.
    """
    root = _require_directory(checkpoint_dir)
    found = sorted((str(path) for path in root.glob(glob_pattern)), key=_natural_sort_key)
    if not found:
        raise FileNotFoundError(
            f"can't find {glob_pattern} files in the directory {str(root)!r}; pass a tag's directory"
        )
    return found


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the paths of DeepSpeed's optimizer state files in rank order.

    Raises FileNotFoundError if there is none.
    """
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """Return the paths of DeepSpeed's model state files in rank order. Raises FileNotFoundError if there is none."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return a checkpoint's state dictionary for `model.load_state_dict`, on the CPU, with all names of tied weights.

    Args:
        tag: tag of a checkpoint in `checkpoint_dir`; None: the tag in the file `latest`.
        exclude_frozen_parameters: leave out parameters that are not trained.
        lazy_mode: return a `GatheredTensor` instead of each tensor; its method `contiguous` reads the values.

    Raises:
        ValueError: `tag` is None and there is no `latest`, a file was not written by ZeRO, or its stage is unknown.
        FileNotFoundError: the tag's directory or one of DeepSpeed's files does not exist.
        CheckpointError: a file is damaged.
    """
    path = _tag_directory(checkpoint_dir, tag)
    found: dict[str, Any] = OrderedDict()
    for name, weight in _stored_weights(path, exclude_frozen_parameters).items():
        if weight.name in found:  # one tensor object for all names of a tied parameter
            found[name] = found[weight.name]
        elif lazy_mode:
            found[name] = GatheredTensor(weight.dtype, torch.Size(weight.shape), weight.read_full)
        else:
            found[name] = weight.read_full()
    return found


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write a checkpoint's weights to `output_dir` as `pytorch_model.bin` or `model.safetensors`.

    If the weights exceed `max_shard_size`, several numbered files and an index are written. A tied parameter is stored
    once; a `.bin` file lists it under each of its names.

    Args:
        dtype: dtype of all floating-point tensors: float32, float16 or bfloat16, as a dtype or its name.
        max_shard_size: maximum bytes of a file with more than one tensor, such as "5GB"; None: one file.
        safe_serialization: write safetensors.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: cases of `get_fp32_state_dict_from_zero_checkpoint`; also an
            invalid dtype or size (ValueError), or an output that cannot be written (CheckpointError).
    """
    chosen, most = parse_output_dtype(dtype), parse_shard_size(max_shard_size)
    path = _tag_directory(checkpoint_dir, tag)
    write_weights(
        Path(output_dir), _stored_weights(path, exclude_frozen_parameters), chosen, most, safetensors=safe_serialization
    )


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Call `convert_zero_checkpoint_to_state_dict` with float32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move the plain `model` to the CPU, load a checkpoint's weights with `strict=False`, and return the model."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def zero_to_fp32(argv: Sequence[str] | None = None, prog: str = "zero_to_fp32.py") -> int:
    """Run the command `zero_to_fp32` and return its exit code."""
    return _run_command(prog, argv, with_dtype=False)


def zero_to_torch(argv: Sequence[str] | None = None, prog: str = "zero_to_torch.py") -> int:
    """Run the command `zero_to_torch` and return its exit code."""
    return _run_command(prog, argv, with_dtype=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `zero_to_fp32` and return its exit code."""
    return zero_to_fp32(argv)


@exit_quietly_on_broken_pipe()
def _run_command(prog: str, argv: Sequence[str] | None, *, with_dtype: bool) -> int:
    parser = argparse.ArgumentParser(prog, description="Write the full weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the directory of the checkpoints, with the file `latest`")
    parser.add_argument("output_dir", help="the directory to write to")
    if with_dtype:
        names = ("float32", "fp32", "float16", "fp16", "bfloat16", "bf16")
        parser.add_argument("--dtype", required=True, choices=sorted(names), help="dtype of floating-point tensors")
    parser.add_argument(
        "--max_shard_size", default="5GB", help="maximum size of a file, such as 5GB or 500MB (%(default)s)"
    )
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, not .bin")
    parser.add_argument("-t", "--tag", help="tag of the checkpoint; by default the one in `latest`")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out frozen parameters")
    parser.add_argument("-d", "--debug", action="store_true", help="log more, and show tracebacks")
    args = parser.parse_args(argv)
    if args.debug:
        logger.setLevel(logging.DEBUG)
    try:
        convert_zero_checkpoint_to_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            dtype=args.dtype if with_dtype else torch.float32,
            max_shard_size=args.max_shard_size,
            safe_serialization=args.safe_serialization,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
        )
    except (WindlassError, ValueError, OSError) as error:
        if args.debug:
            raise
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    print(f"{args.output_dir}: weights of {args.checkpoint_dir}")
    return 0


def _tag_directory(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> Path:
    """Return the directory of a tag."""
    root = Path(checkpoint_dir)
    tag = read_latest(root) if tag is None else tag
    if tag is None:
        if not root.is_dir():
            raise NotZeroCheckpointError(f"the directory {str(root)!r} does not exist; check the path")
        whole = is_any_checkpoint(root)
        hint = (
            f"{root} is a checkpoint itself: give its parent, and the tag {root.absolute().name!r}"
            if whole
            else "give a tag"
        )
        raise NotZeroCheckpointError(f"unable to find the file {LATEST!r} at {root / LATEST}; {hint}")
    return _require_directory(root / tag)


def _require_directory(path: str | os.PathLike[str]) -> Path:
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"the directory {str(root)!r} does not exist; check the path and the tag")
    return root


def _natural_sort_key(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _stored_weights(path: Path, exclude_frozen: bool) -> dict[str, StoredWeight]:
    """Return parameters and buffers of a checkpoint by name; a tied parameter is under each of its names."""
    if not (path / INDEX_FILE).is_file():
        _require_zero(path)
    stored = StoredCheckpoint.from_path(path)
    if absent := missing_parameters(stored) if not exclude_frozen else ():
        logger.warning(
            "%s was saved without frozen parameters; take these from the base model: %s", path, ", ".join(absent)
        )
    held = stored_names(stored)
    trained = _trained_names(stored, held)
    found: dict[str, StoredWeight] = OrderedDict()
    for name, where in sorted(held.items(), key=lambda item: item[1].startswith("param/")):
        is_buffer, like = where.startswith("buffer/"), stored.meta_tensor(where)
        if exclude_frozen and not is_buffer and name not in trained:
            continue
        widened = is_castable(like.dtype) and (is_buffer or name in trained)
        dtype = torch.float32 if widened else stored_param_dtype(stored, where)
        found[name] = StoredWeight(name, dtype, tuple(like.shape), stored, where)
    for alias, name in stored.engine_data.get("tied", {}).items():
        if name in found and alias not in found:
            found[alias] = found[name]
    return found


def _trained_names(stored: StoredCheckpoint, held: Mapping[str, str]) -> set[str]:
    """Return the names of the trained parameters. Names of buffers may be among them.

    If a checkpoint does not record the frozen parameters, the trained ones are those in the optimizer's groups.
    """
    if (frozen := stored.engine_data.get("frozen")) is not None:
        return set(held) - set(frozen)
    return {name for group in stored.engine_data.get("groups", []) for name in group["parameters"]}


def _require_zero(path: Path) -> None:
    """Raise unless a directory has the files that DeepSpeed's stages 1 to 3 write."""
    for file in get_model_state_files(path)[:1]:
        value = read_torch_file(Path(file))
        if not isinstance(value, dict) or "buffer_names" not in value:
            raise NotZeroCheckpointError(
                f"{file} is not a model state checkpoint of DeepSpeed; give one of stage 1, 2 or 3"
            )
    files = get_optim_files(path)
    value = read_torch_file(Path(files[0]))
    inner = value.get("optimizer_state_dict") if isinstance(value, dict) else None
    if not isinstance(inner, dict) or not ({"zero_stage", "single_partition_of_fp32_groups"} & set(inner)):
        raise NotZeroCheckpointError(f"{files[0]} is not a zero checkpoint; give one of stage 1, 2 or 3")
    recorded_stage = inner.get("zero_stage", 1)
    stage = (
        recorded_stage if isinstance(recorded_stage, int) else (getattr(recorded_stage, "arguments", None) or (1,))[0]
    )
    if stage not in (1, 2, 3):
        raise NotZeroCheckpointError(f"{files[0]}: unknown zero stage {stage}; give a checkpoint of stage 1, 2 or 3")
    count = inner.get("partition_count", len(files))
    ranks = max(count) if isinstance(count, list) else count
    if ranks != len(files):
        raise NotZeroCheckpointError(
            f"{ranks} '*_optim_states.pt' files are expected in {path}, but there are {len(files)}: some ranks did not "
            "save, or another checkpoint was written to the same directory; give another tag"
        )
