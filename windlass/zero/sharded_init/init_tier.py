"""Tiers that hold shards between construction and `initialize`: device memory, host memory, or a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

from windlass.base.atomic_file import make_directory
from windlass.base.compute_device import local_device
from windlass.base.device_memory import device_has_own_memory
from windlass.base.errors import CheckpointError, ConfigError
from windlass.zero.sharded_init.initial_shard import ShardInMemory, ShardStorage, StoreShard

_DEVICES = (None, "none", "cpu", "nvme")


def init_tier(remote_device: str | None, pin_memory: bool, config: Any) -> tuple[StoreShard, bool]:
    """Return the function that stores a shard on its tier, and True if that tier is not the device.

    Args:
        remote_device: None, "none", "cpu" or "nvme". None: `offload_param.device` of the configuration, or host memory
            if `offload` chooses tiers later; without a configuration, the device.
        pin_memory: Pin host memory, if there is an accelerator.
        config: A `Config`, or None.

    Raises:
        ConfigError: the device is unknown, or it is nvme without a usable path.
    """
    if remote_device not in _DEVICES:
        raise ConfigError(f"remote_device={remote_device!r}; use None, 'none', 'cpu' or 'nvme'")
    section = config.zero_optimization.offload_param if config is not None else None
    chosen_later = config is not None and config.offload is not None  # `initialize` moves shards from host memory
    where = remote_device or ("cpu" if chosen_later else section.device if section is not None else "none")
    if where == "nvme":
        path = section.nvme_path if section is not None else None
        if not path:
            origin = "remote_device" if remote_device else "zero_optimization.offload_param.device"
            raise ConfigError(f"{origin}='nvme' needs zero_optimization.offload_param.nvme_path; name a directory")
        return ShardFile(Path(path[0])).put, True
    device = local_device()
    if where == "none":
        return (lambda shard: ShardInMemory(shard, device)), False
    pins = pin_memory and torch.cuda.is_available()
    return (lambda shard: ShardInMemory(shard.cpu().pin_memory() if pins else shard.cpu())), device_has_own_memory(
        device
    )


class ShardFile:
    """File for all shards of a rank. It has no name, so the system deletes it when the process ends in any way.

    Args:
        directory: Directory of the file. Only this user can read the file.

    Raises:
        ConfigError: no file can be created there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            make_directory(directory)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (closed by finalize)
        except OSError as error:
            raise ConfigError(
                f"offload_param.nvme_path: no file can be created in {directory}: {error.strerror}; name a directory "
                "that this user may write to"
            ) from error
        finalize(self, self._file.close)
        self._end = 0
        self._free: dict[int, list[int]] = {}  # offsets of freed shards, by size in bytes

    def put(self, shard: torch.Tensor) -> ShardStorage:
        """Write a shard to the file, in the space of a freed one if possible, and return its storage.

        Raises:
            CheckpointError: the shard cannot be written, e.g. because the disk is full.
        """
        flat = shard.detach().cpu().contiguous()
        size = flat.numel() * flat.element_size()
        free = self._free.setdefault(size, [])
        begin = free.pop() if free else self._end
        self._end = max(self._end, begin + size)
        raw = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        position = begin
        try:
            while raw:
                count = os.pwrite(self._file.fileno(), raw[: 1 << 30], position)
                raw, position = raw[count:], position + count
        except OSError as error:
            raise CheckpointError(
                f"a parameter's shard of {size} bytes cannot be written to "
                f"{self.directory}: {error.strerror}; free some space or name another nvme_path"
            ) from error
        piece = _InFile(self, begin, flat.numel(), flat.dtype)
        finalize(piece, free.append, begin)
        return piece

    def get(self, begin: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Read the shard of `numel` elements at byte `begin`.

        Raises:
            CheckpointError: the disk failed, or another process truncated the file.
        """
        flat = torch.empty(numel, dtype=dtype)
        raw = flat.view(torch.uint8).numpy().data if numel else memoryview(b"")
        while raw:
            try:
                count = os.preadv(self._file.fileno(), [raw[: 1 << 30]], begin)
            except OSError as error:
                raise CheckpointError(
                    f"a parameter's shard of {flat.nbytes} bytes cannot be read from "
                    f"{self.directory}: {error.strerror}; see dmesg, or name another nvme_path, and build the model "
                    "again"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"the file of parameters in {self.directory} was truncated by another process; build the model "
                    "again"
                )
            raw, begin = raw[count:], begin + count
        return flat


class _InFile:
    """Shard in a `ShardFile`."""

    def __init__(self, file: ShardFile, begin: int, numel: int, dtype: torch.dtype) -> None:
        self._file, self._begin, self._numel, self._dtype = file, begin, numel, dtype

    def load(self) -> torch.Tensor:
        return self._file.get(self._begin, self._numel, self._dtype)
