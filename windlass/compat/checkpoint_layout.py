"""Layout of a directory of DeepSpeed's files: pipeline, tensor and data ranks (`get_model_3d_descriptor`)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NoReturn

from windlass.base.errors import CheckpointError
from windlass.compat import checkpoint_constants as names
from windlass.compat.checkpoint.torch_file import read_torch_file
from windlass.compat.checkpoint_reshape import model_3d_desc
from windlass.compat.not_built import NotBuiltError


class LayoutError(CheckpointError, RuntimeError):
    """Error: the files of a directory do not make up one layout. DeepSpeed raises RuntimeError for this."""


def get_model_3d_descriptor(dir: str | os.PathLike[str]) -> model_3d_desc:
    """Return the layout stored in the model-state files, or else the layout inferred from the number of files.

    Raises:
        LayoutError: only some files store a layout, files store different layouts, a stored size is not a positive
            integer, or the number of files does not fit the stored layout.
    """
    files = [path for path in Path(dir).rglob("*") if path.is_file()]
    models = _with_prefix(files, names.MODEL_FILE_PREFIX)
    optimizers = _optimizer_files(files)
    named = {path: _named_by(path) for path in models}
    silent = [path.name for path, layout in named.items() if layout is None]
    found = {layout for layout in named.values() if layout is not None}
    if not found:
        first_layer = len(_with_prefix(files, f"{names.LAYER_FILE_PREFIX}01"))
        tensor = max(first_layer or len(models), 1)
        stages = max(len(models) // tensor, 1) if first_layer else 1
    else:
        key = names.CHECKPOINT_PARALLEL_DIMS
        if silent:
            raise LayoutError(
                f"{key} is missing from model-state files of {dir}: {', '.join(silent)}; keep files of one checkpoint"
            )
        if len(found) > 1:
            raise LayoutError(
                f"{key} disagrees across model-state files of {dir}: {sorted(found)}; keep files of one checkpoint"
            )
        stages, tensor = found.pop()
        if len(models) != stages * tensor or len(optimizers) % (stages * tensor):
            raise LayoutError(
                f"{dir} has {len(models)} model-state files and {len(optimizers)} optimizer files, which do not make "
                f"up {stages} stages x {tensor} tensor ranks; copy the whole directory"
            )
    return model_3d_desc(stages, tensor, max(1, len(optimizers) // (stages * tensor)))


class ZeROCheckpoint:
    """Optimizer-state files in a directory, by the ranks that wrote them.

    Raises:
        LayoutError: the directory has no optimizer-state files, or as for `get_model_3d_descriptor`.
    """

    def __init__(self, dir: str | os.PathLike[str], source_3d: model_3d_desc | None = None) -> None:
        self.dir = dir
        self.file_list = [str(path) for path in _optimizer_files([path for path in Path(dir).rglob("*")])]
        self.num_files = len(self.file_list)
        if not self.file_list:
            raise LayoutError(f"there are no ZeRO files in {dir}; name the directory of one tag")
        self.src_3d = get_model_3d_descriptor(dir) if source_3d is None else source_3d
        self.reshape(self.src_3d)

    def get_src_world_size(self) -> int:
        """Return the number of ranks that wrote the checkpoint."""
        return self.src_3d.world_size()

    def get_src_tp_degree(self) -> int:
        """Return the number of tensor-parallel ranks that wrote the checkpoint."""
        return self.src_3d.tp_degree

    def get_src_pp_degree(self) -> int:
        """Return the number of pipeline stages that wrote the checkpoint."""
        return self.src_3d.pp_degree

    def get_src_dp_degree(self) -> int:
        """Return the number of data-parallel ranks that wrote the checkpoint."""
        return self.src_3d.dp_degree

    def reshape(self, target_3d_desc: model_3d_desc) -> None:
        """Set the target layout that later queries refer to."""
        self.target_3d = target_3d_desc
        self._maps = self.src_3d.reshape(target_3d_desc)

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Return the indices in `file_list` of the files that make up a rank's states."""
        assert dp_index < len(self._maps), f"dp_index is {dp_index}; pass a number below {len(self._maps)}"
        return self._maps[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        """Return the files that make up a rank's states."""
        return [self.file_list[index] for index in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)]

    def get_state_for_rank(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotBuiltError, which names alternatives."""
        raise NotBuiltError("ZeROCheckpoint.get_state_for_rank: not built; use load_checkpoint or zero_to_fp32")


def _with_prefix(files: list[Path], prefix: str) -> list[Path]:
    return sorted(path for path in files if path.name.startswith(prefix))


def _optimizer_files(files: list[Path]) -> list[Path]:
    """Return the optimizer-state files, sorted by data rank, then by the combined stage and tensor rank."""
    for prefix in (names.ZERO_FILE_PREFIX, names.FP16_ZERO_FILE_PREFIX, names.BF16_ZERO_FILE_PREFIX):
        numbers = re.compile(rf"{prefix}(\d+)_{names.MODEL_FILE_PREFIX}(\d+)")
        found = [(tuple(map(int, match.groups())), path) for path in files if (match := numbers.match(path.name))]
        if found:
            return [path for _, path in sorted(found)]
    return []


def _named_by(path: Path) -> tuple[int, int] | None:
    """Return the numbers of stages and tensor ranks stored in a model-state file; None if it stores none.

    Raises:
        LayoutError: a size is not a positive integer.
    """
    key = names.CHECKPOINT_PARALLEL_DIMS
    given = read_torch_file(path).get(key)
    if given is None:
        return None
    sizes = [given.get(name) for name in (names.CHECKPOINT_PP_DEGREE, names.CHECKPOINT_TP_DEGREE)]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise LayoutError(f"{path}: {key} is {given}; it must name two positive integers")
    return sizes[0], sizes[1]
