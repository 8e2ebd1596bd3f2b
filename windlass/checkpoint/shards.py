"""Which parts of stored boxes fill this rank's boxes, from any other cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import sub
from typing import NamedTuple

import torch

from windlass.checkpoint.index import Chunk, Index
from windlass.checkpoint.state import Drawer, Holding, Piece
from windlass.checkpoint.tensor_file import dtype_of


class Wanted(NamedTuple):
    """A part of a stored box, and the memory that it fills.

    Attributes:
        chunk, dtype: the box.
        offsets, sizes: the part, counted from the box's first element.
        into: gives that memory `[sizes]` on any device and of any dtype, while the drawer is open.
        done: called with it once it is filled.
    """

    chunk: Chunk
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    into: Callable[[], torch.Tensor]
    drawer: Drawer | None = None
    done: Callable[[torch.Tensor], object] | None = None

    @property
    def whole(self) -> bool:
        """It is all of the box."""
        return self.sizes == self.chunk.sizes


def wanted(held: Mapping[str, Holding], index: Index) -> Iterator[Wanted]:
    """What of a checkpoint fills `held`, every name of which it must hold in its shape: in the order of the pieces, in
    which drawers are opened."""
    for name, holding in held.items():
        record = index.tensors[name]
        dtype = dtype_of(record.dtype)
        for piece in holding.pieces:
            yield from _parts(piece, record.chunks, dtype)


def _parts(piece: Piece, chunks: Iterable[Chunk], dtype: torch.dtype) -> Iterator[Wanted]:
    """The parts of stored boxes that fill a piece."""
    for chunk in chunks:
        if chunk.offsets == piece.offsets and chunk.sizes == piece.sizes:  # the same cut
            if 0 not in chunk.sizes:
                yield Wanted(chunk, dtype, (0,) * len(chunk.sizes), chunk.sizes, piece.get, piece.drawer)
            continue
        low = tuple(map(max, piece.offsets, chunk.offsets))
        ends = zip(piece.offsets, piece.sizes, chunk.offsets, chunk.sizes, low, strict=True)
        sizes = tuple(min(a + n, b + m) - begin for a, n, b, m, begin in ends)
        if all(size > 0 for size in sizes):
            begins = tuple(map(sub, low, piece.offsets))
            into = partial(_part_of, piece, begins, sizes)
            yield Wanted(chunk, dtype, tuple(map(sub, low, chunk.offsets)), sizes, into, piece.drawer)


def _part_of(piece: Piece, begins: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    view = piece.get()
    for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, begin, size)
    return view
