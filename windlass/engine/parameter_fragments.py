"""Parts of parameters that this rank saves or loads: from its update chunks, and from its shards of untrained units."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from windlass.checkpoint import FlatShard, LazyFlatTensor, LazyStorage
from windlass.engine.offloaded_storage import OffloadedChunkStorage, OffloadedShardStorage
from windlass.zero.core.unit import Unit
from windlass.zero.core.unit_layout import LayoutPiece
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.master_weights import MasterWeights
from windlass.zero.update.update_chunk import UpdateChunk


class ChunkSaveStorage:
    """Lazy storage handle of a chunk whose master weights and states are saved."""

    def __init__(self, master_weights: MasterWeights, chunk: UpdateChunk) -> None:
        self._master_weights, self._chunk = master_weights, chunk

    @property
    def is_resident(self) -> bool:
        """True if the closed handle's values are in memory and will not move or change."""
        return self._chunk.master is not None

    def open(self) -> AbstractContextManager[Any]:
        """Return a context in which the values are in memory."""
        return self._master_weights.opened(self._chunk, changes=False)


class UnitShardStorage:
    """Lazy storage handle of this rank's shard of an untrained unit.

    Args:
        write_back: write the values to the unit's tier when the handle is closed.
    """

    def __init__(self, model: ShardedModel, unit: Unit, *, write_back: bool) -> None:
        self._unit, self._write_back, self._health = unit, write_back, model.disk_health
        group = unit.dp_group.group
        self._span = unit.layout.shard_range(group.index, group.size) if unit.reshards else (0, unit.layout.padded)
        self._values: torch.Tensor | None = None

    @property
    def is_resident(self) -> bool:
        """True if the closed handle's values are in memory and will not move or change."""
        slot = self._unit.shard_slot
        return not self._unit.reshards or slot is None or slot.tensor is not None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Keep the values in memory inside the context."""
        unit = self._unit
        self._values = unit.read_local_shard() if unit.reshards else unit.full
        self._health.raise_local_failure()
        yield
        if self._write_back and unit.reshards:
            unit.write_local_shard(self._values)
        self._values = None

    def fragments(self) -> Iterator[LayoutPiece]:
        """Yield the fragments of parameters in the shard."""
        return self._unit.layout.pieces(*self._span)

    def get(self, fragment: LayoutPiece) -> torch.Tensor:
        """Return the values `[fragment.numel]`, while the handle is open."""
        assert self._values is not None
        return self._values.narrow(0, fragment.offset, fragment.numel)


def parameter_fragments(
    model: ShardedModel,
    units: Iterable[Unit],
    storage_of: Callable[[UpdateChunk], LazyStorage],
    *,
    write_back: bool,
    deferred: bool = False,
    excluded: Collection[str] = (),
) -> Iterator[FlatShard]:
    """Yield this rank's fragments of all parameters of `units`, from master weights where these exist.

    Args:
        storage_of: returns the lazy storage handle of a chunk.
        write_back: True for a load, which overwrites the values.
        deferred: True if another thread reads the offloaded values later.
        excluded: names of parameters to leave out.
    """
    for unit in units:
        out = {index for index, name in enumerate(unit.names) if name in excluded}
        chunks = model.masters.chunks_of(unit)
        dtype = chunks[0].dtype if chunks else unit.dtype
        for chunk in chunks:
            for piece in chunk.pieces():
                if piece.index in out:
                    continue
                handle = storage_of(chunk)
                yield _flat_shard(unit, piece, dtype, handle, partial(_chunk_values, handle, chunk, piece))
        if not chunks:
            storage = UnitShardStorage(model, unit, write_back=write_back)
            extent = unit.shard_slot.extent if deferred and unit.reshards and unit.shard_slot is not None else None
            offloaded = OffloadedShardStorage(unit, extent) if extent is not None else None
            for piece in storage.fragments():
                if piece.index in out:
                    continue
                if offloaded is None:
                    yield _flat_shard(unit, piece, dtype, storage, partial(storage.get, piece))
                else:
                    yield _flat_shard(unit, piece, dtype, offloaded, partial(_offloaded_shard_values, offloaded, piece))
        for index, numel in enumerate(unit.layout.numels):
            if numel == 0 and index not in out:
                none = torch.empty(0, dtype=dtype)
                yield FlatShard(
                    f"param/{unit.names[index]}", tuple(unit.shapes[index]), 0, none, unit.placements[index]
                )


def _flat_shard(
    unit: Unit, fragment: LayoutPiece, dtype: torch.dtype, storage: LazyStorage, get: Callable[[], torch.Tensor]
) -> FlatShard:
    resting = LazyFlatTensor(fragment.numel, dtype, storage, get)
    name, shape = unit.names[fragment.index], tuple(unit.shapes[fragment.index])
    return FlatShard(f"param/{name}", shape, fragment.start, resting, unit.placements[fragment.index])


def _chunk_values(storage: LazyStorage, chunk: UpdateChunk, fragment: LayoutPiece) -> torch.Tensor:
    values = storage.master_weights() if isinstance(storage, OffloadedChunkStorage) else chunk.values()
    return values.narrow(0, fragment.offset, fragment.numel)


def _offloaded_shard_values(storage: OffloadedShardStorage, fragment: LayoutPiece) -> torch.Tensor:
    return storage.values().narrow(0, fragment.offset, fragment.numel)
