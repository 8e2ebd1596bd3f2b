"""Classes of `deepspeed.runtime.checkpoint_engine`, for scripts that derive from them, replace methods, or save files.

windlass's engine reads and writes its own files and does not use these classes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class CheckpointCommitInfo:
    """Tag and directory of one checkpoint."""

    tag: str
    save_dir: str
    is_local: bool = True


class CheckpointEngine(ABC):
    """Base class of classes that store the files of a checkpoint."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin the checkpoint `info`."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> Any:
        """Write one file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the contents of one file."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """End the checkpoint `info`: all its files are written."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a directory and its parents."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return True for the rank that writes the data that all data-parallel ranks share."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return False: `save` returns when the file is written."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Return True: a file contains the full storage of each tensor, as with `torch.save`."""
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """Storage of files by `torch.save` and `torch.load`, with torch's default of `weights_only`."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "TorchCheckpointEngine"

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: a file needs no preparation."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write `state_dict` to `path`."""
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the contents of `path`."""
        return torch.load(path, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: files are complete when `save` returns."""
        return True
