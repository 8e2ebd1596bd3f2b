"""This rank's parameters as a checkpoint holds them: pieces that rest in chunks, or in the cut of an untrained unit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from windlass.checkpoint import Drawer, FlatShard, Resting
from windlass.engine.away import ChunkAway, CutAway
from windlass.zero.chunk import Chunk
from windlass.zero.layout import Piece
from windlass.zero.masters import Masters
from windlass.zero.sharded import ShardedModel
from windlass.zero.unit import Unit


class ChunkToRead:
    """A chunk whose masters and states are saved."""

    def __init__(self, masters: Masters, chunk: Chunk) -> None:
        self._masters, self._chunk = masters, chunk

    @property
    def stays(self) -> bool:
        """As `Drawer`."""
        return self._chunk.master is not None

    def open(self) -> AbstractContextManager[Any]:
        """As `Drawer`."""
        return self._masters.opened(self._chunk, changes=False)


class UnitCut:
    """What this rank keeps of an untrained unit.

    Args:
        keep: what is changed while it is open goes home.
    """

    def __init__(self, model: ShardedModel, unit: Unit, *, keep: bool) -> None:
        self._unit, self._keep, self._health = unit, keep, model.health
        group = unit.family.group
        self._span = unit.layout.cut(group.index, group.size) if unit.released else (0, unit.layout.padded)
        self._values: torch.Tensor | None = None

    @property
    def stays(self) -> bool:
        """As `Drawer`."""
        rests = self._unit.rests
        return not self._unit.released or rests is None or rests.tensor is not None

    @contextmanager
    def open(self) -> Iterator[None]:
        """As `Drawer`."""
        unit = self._unit
        self._values = unit.read_cut() if unit.released else unit.full
        self._health.stop_here()
        yield
        if self._keep and unit.released:
            unit.write_cut(self._values)
        self._values = None

    def pieces(self) -> Iterator[Piece]:
        """The parts of parameters in it."""
        return self._unit.layout.pieces(*self._span)

    def get(self, piece: Piece) -> torch.Tensor:
        """`[piece.numel]`, while it is open."""
        assert self._values is not None
        return self._values.narrow(0, piece.offset, piece.numel)


def parameters(
    model: ShardedModel,
    units: Iterable[Unit],
    drawer_of: Callable[[Chunk], Drawer],
    *,
    keep: bool,
    later: bool = False,
    without: Collection[str] = (),
) -> Iterator[FlatShard]:
    """This rank's pieces of all parameters of `units`, masters where there are some.

    Args:
        drawer_of: where a chunk is opened.
        keep: they are loaded over.
        later: what rests on disk is read by another thread.
        without: names of parameters of trained units that are left out.
    """
    for unit in units:
        out = {index for index, name in enumerate(unit.names) if name in without}
        chunks = model.masters.of(unit)
        dtype = chunks[0].dtype if chunks else unit.dtype
        for chunk in chunks:
            for piece in chunk.pieces():
                if piece.index in out:
                    continue
                drawer = drawer_of(chunk)
                yield _shard(unit, piece, dtype, drawer, partial(_of_chunk, drawer, chunk, piece))
        if not chunks:
            cut = UnitCut(model, unit, keep=keep)
            extent = unit.rests.extent if later and unit.released and unit.rests is not None else None
            away = CutAway(unit, extent) if extent is not None else None
            for piece in cut.pieces():
                if away is None:
                    yield _shard(unit, piece, dtype, cut, partial(cut.get, piece))
                else:
                    yield _shard(unit, piece, dtype, away, partial(_of_cut, away, piece))
        for index, numel in enumerate(unit.layout.numels):
            if numel == 0 and index not in out:
                none = torch.empty(0, dtype=dtype)
                yield FlatShard(
                    f"param/{unit.names[index]}", tuple(unit.shapes[index]), 0, none, unit.placements[index]
                )


def _shard(unit: Unit, piece: Piece, dtype: torch.dtype, drawer: Drawer, get: Callable[[], torch.Tensor]) -> FlatShard:
    resting = Resting(piece.numel, dtype, drawer, get)
    name, shape = unit.names[piece.index], tuple(unit.shapes[piece.index])
    return FlatShard(f"param/{name}", shape, piece.start, resting, unit.placements[piece.index])


def _of_chunk(drawer: Drawer, chunk: Chunk, piece: Piece) -> torch.Tensor:
    values = drawer.masters() if isinstance(drawer, ChunkAway) else chunk.values()
    return values.narrow(0, piece.offset, piece.numel)


def _of_cut(away: CutAway, piece: Piece) -> torch.Tensor:
    return away.values().narrow(0, piece.offset, piece.numel)
