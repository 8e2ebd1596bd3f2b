"""Which parts of stored boxes fill this rank's boxes, from any other cut."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from operator import sub

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from windlass.base.errors import CheckpointError
from windlass.checkpoint.index import Chunk, Index
from windlass.checkpoint.state import Drawer, Holding, Piece

Where = tuple[str, tuple[int, ...]]
"""A stored box: the name of its tensor, its offsets."""


class ShardLoadPlanner(LoadPlanner):
    """Says what of a checkpoint fills a `dict[str, Holding]`, every name of which it must hold, in its shape.

    One of torch's planners, since our storage reader serves those too. It is not given to torch's own `load`, whose
    exchange of plans takes much longer than the arithmetic, and which no rank needs: each reads by itself.

    Args:
        held: what is filled.
        index: of the checkpoint.
    """

    def __init__(self, held: dict[str, Holding], index: Index) -> None:
        self._held, self._index = held, index

    def set_up_planner(
        self, state_dict: dict[str, Holding], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: all is known."""

    def create_local_plan(self) -> LoadPlan:
        """Parts in the order of the pieces, in which drawers are opened."""
        return LoadPlan(
            [
                item
                for name, held in self._held.items()
                for number, piece in enumerate(held.pieces)
                for item in _parts(name, number, piece, self._index.tensors[name].chunks)
            ]
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is not stored as a tensor; give a tensor only for tensors")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of this rank's memory that the item fills: a view."""
        view = self._piece(read_item).get()
        if read_item.lengths != view.shape:
            for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
                view = view.narrow(dim, offset, length)
        return view

    def drawer_of(self, read_item: ReadItem) -> Drawer | None:
        """What must be open for `resolve_tensor`."""
        return self._piece(read_item).drawer

    def _piece(self, read_item: ReadItem) -> Piece:
        index = read_item.dest_index
        assert index.index is not None
        return self._held[index.fqn].pieces[index.index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: `resolve_tensor` gave the memory itself."""


def _parts(name: str, number: int, piece: Piece, chunks: Iterable[Chunk]) -> Iterator[ReadItem]:
    """The parts of stored boxes that fill a piece."""
    for chunk in chunks:
        if chunk.offsets == piece.offsets and chunk.sizes == piece.sizes:  # the same cut
            low, sizes = piece.offsets, piece.sizes
        else:
            low = tuple(map(max, piece.offsets, chunk.offsets))
            ends = zip(piece.offsets, piece.sizes, chunk.offsets, chunk.sizes, low, strict=True)
            sizes = tuple(min(a + n, b + m) - begin for a, n, b, m, begin in ends)
        if all(size > 0 for size in sizes):
            yield ReadItem(
                LoadItemType.TENSOR,
                MetadataIndex(name, None, number),
                torch.Size(map(sub, low, piece.offsets)),
                MetadataIndex(name, torch.Size(chunk.offsets)),
                torch.Size(map(sub, low, chunk.offsets)),
                torch.Size(sizes),
            )
