"""What rests on disk, as a save that does not block finds it: read by its thread while training goes on.

See [Note: saving while training goes on].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from windlass.checkpoint.state import AwayDrawer
from windlass.storage.transfer import Extent
from windlass.zero.residence import RecordOnDisk
from windlass.zero.unit import Unit


class Away(AwayDrawer):
    """An extent that is not written over until it was copied."""

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self._extent = extent

    def hold(self) -> None:
        self._extent.guard = self.wait

    def over(self) -> None:
        self._extent.guard = None
        super().over()


class ChunkAway(Away):
    """A chunk whose masters and states rest on disk."""

    def __init__(self, record: RecordOnDisk) -> None:
        super().__init__(record.extent)
        self._record = record
        self._found: dict[tuple[nn.Parameter | None, str], torch.Tensor] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        self._found = self._record.read()
        try:
            yield
        finally:
            self._found = {}

    def masters(self) -> torch.Tensor:
        """`[elements of the chunk]`, while it is open."""
        return self._found[None, ""]

    def state(self, tenant: Any, key: str) -> torch.Tensor:
        """A state of one of its tenants as a flat tensor, while it is open."""
        return self._found[tenant, key].reshape(-1)


class CutAway(Away):
    """The cut of an untrained unit that rests on disk."""

    def __init__(self, unit: Unit, extent: Extent) -> None:
        super().__init__(extent)
        self._unit = unit
        self._values: torch.Tensor | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        rests = self._unit.rests
        assert rests is not None
        values = torch.empty(rests.numel, dtype=rests.dtype, device="cpu")
        rests.read_now(values)
        self._values = values
        try:
            yield
        finally:
            self._values = None

    def values(self) -> torch.Tensor:
        """`[elements of the cut]`, while it is open."""
        assert self._values is not None
        return self._values
