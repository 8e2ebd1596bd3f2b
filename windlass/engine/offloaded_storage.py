"""Lazy storage handles of data on NVMe, for an async save whose thread reads it during training.

See [Note: saving while training goes on].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from windlass.checkpoint.checkpoint_state import OffloadedStorage
from windlass.storage.extent_transfer import Extent
from windlass.zero.core.unit import Unit
from windlass.zero.update.optimizer_state_offload import StateRecordOnDisk


class OffloadedExtentStorage(OffloadedStorage):
    """Handle of a file extent that is not overwritten until it was copied."""

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self._extent = extent

    def block_writers(self) -> None:
        self._extent.wait_until_writable = self.wait_until_released

    def release_writers(self) -> None:
        self._extent.wait_until_writable = None
        super().release_writers()


class OffloadedChunkStorage(OffloadedExtentStorage):
    """Handle of a chunk whose master weights and states are on NVMe."""

    def __init__(self, record: StateRecordOnDisk) -> None:
        super().__init__(record.extent)
        self._record = record
        self._loaded: dict[tuple[nn.Parameter | None, str], torch.Tensor] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        self._loaded = self._record.read()
        try:
            yield
        finally:
            self._loaded = {}

    def master_weights(self) -> torch.Tensor:
        """Return the master weights `[elements of the chunk]`, while the handle is open."""
        return self._loaded[None, ""]

    def state(self, state_key: Any, key: str) -> torch.Tensor:
        """Return one state of one state entry as a flat tensor, while the handle is open."""
        return self._loaded[state_key, key].reshape(-1)


class OffloadedShardStorage(OffloadedExtentStorage):
    """Handle of the local shard of an untrained unit on NVMe."""

    def __init__(self, unit: Unit, extent: Extent) -> None:
        super().__init__(extent)
        self._unit = unit
        self._values: torch.Tensor | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        slot = self._unit.shard_slot
        assert slot is not None
        values = torch.empty(slot.numel, dtype=slot.dtype, device="cpu")
        slot.read_unguarded(values)
        self._values = values
        try:
            yield
        finally:
            self._values = None

    def values(self) -> torch.Tensor:
        """Return the values `[elements of the shard]`, while the handle is open."""
        assert self._values is not None
        return self._values
