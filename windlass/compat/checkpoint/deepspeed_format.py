"""DeepSpeed's checkpoint format, as `windlass.checkpoint` reads and exports it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_index import CheckpointIndex
from windlass.checkpoint.foreign_formats import ExportSource, ParameterOrder
from windlass.checkpoint.safetensors_file import TensorFile
from windlass.compat.checkpoint.deepspeed_export import write_deepspeed_files
from windlass.compat.checkpoint.deepspeed_index import read_deepspeed_index
from windlass.compat.checkpoint.deepspeed_target import build_deepspeed_target
from windlass.compat.checkpoint.recovery_scripts import write_recovery_scripts
from windlass.compat.checkpoint.torch_file import TorchFile, find_damaged_record


class DeepSpeedFormat:
    """Checkpoint format of DeepSpeed 0.19; see [Note: DeepSpeed's files]."""

    name = "deepspeed"

    def recognizes(self, path: Path) -> bool:
        """Return True if the directory has files of model states."""
        return any(path.glob("*mp_rank_*_model_states.pt"))

    def read_index(self, path: Path, parameter_order: ParameterOrder | None) -> CheckpointIndex:
        """Return the index of DeepSpeed's files in `path`; see `deepspeed_index`."""
        return read_deepspeed_index(path, parameter_order)

    def open_file(self, path: Path) -> TensorFile:
        """Open a file of `torch.save`."""
        return TorchFile(path)

    def find_damage(self, path: Path, indexed_files: Collection[str]) -> str:
        """Compare every record with its checksum. Return a description of the first damage; empty if there is none."""
        for file in sorted(path.glob("*_states.pt")):
            indexed = file.name in indexed_files
            try:
                record = find_damaged_record(file)
            except CheckpointError as error:
                return str(error)
            if record and indexed:
                return f"the checkpoint file {file} is damaged: record {record!r}; load another checkpoint"
            if record:
                return (
                    f"the file {file} is damaged: record {record!r}; load the checkpoint with windlass, which needs no "
                    "tensor of this file"
                )
        return ""

    def plan_export(self, source: ExportSource) -> Callable[[Path, int], None]:
        """Return a function of path and rank that writes one rank's files, as the equivalent DeepSpeed engine does."""
        target = build_deepspeed_target(source)
        return lambda path, rank: write_deepspeed_files(path, target, rank)

    def write_tools(self, directory: Path) -> None:
        """Write `zero_to_fp32.py` and `zero_to_torch.py`."""
        write_recovery_scripts(directory)
