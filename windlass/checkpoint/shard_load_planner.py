"""Which parts of stored boxes fill this rank's boxes, from any other cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import sub
from typing import NamedTuple

import torch

from windlass.checkpoint.checkpoint_index import CheckpointIndex, ChunkRecord
from windlass.checkpoint.checkpoint_state import HeldBox, HeldTensor, LazyStorage
from windlass.checkpoint.safetensors_file import dtype_from_code


class Wanted(NamedTuple):
    """A part of a stored box, and the memory that it fills.

    Attributes:
        chunk, dtype: the box.
        offsets, sizes: the part, counted from the box's first element.
        into: gives that memory `[sizes]` on any device and of any dtype, while the drawer is open.
        done: called with it once it is filled.
    """

    chunk: ChunkRecord
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    into: Callable[[], torch.Tensor]
    drawer: LazyStorage | None = None
    done: Callable[[torch.Tensor], object] | None = None

    @property
    def whole(self) -> bool:
        """It is all of the box."""
        return self.sizes == self.chunk.sizes


def wanted(held: Mapping[str, HeldTensor], index: CheckpointIndex) -> Iterator[Wanted]:
    """What of a checkpoint fills `held`, every name of which it must hold in its shape: in the order of the pieces, in
    which drawers are opened."""
    for name, holding in held.items():
        record = index.tensors[name]
        dtype = dtype_from_code(record.dtype)
        for piece in holding.boxes:
            yield from _read_items(piece, record.chunks, dtype)


def _read_items(box: HeldBox, chunks: Iterable[ChunkRecord], dtype: torch.dtype) -> Iterator[Wanted]:
    """The parts of stored boxes that fill a piece."""
    for chunk in chunks:
        if chunk.offsets == box.offsets and chunk.sizes == box.sizes:  # the same cut
            if 0 not in chunk.sizes:
                yield Wanted(chunk, dtype, (0,) * len(chunk.sizes), chunk.sizes, box.get, box.storage)
            continue
        low = tuple(map(max, box.offsets, chunk.offsets))
        ends = zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, low, strict=True)
        sizes = tuple(min(a + n, b + m) - begin for a, n, b, m, begin in ends)
        if all(size > 0 for size in sizes):
            begins = tuple(map(sub, low, box.offsets))
            into = partial(_part_of, box, begins, sizes)
            yield Wanted(chunk, dtype, tuple(map(sub, low, chunk.offsets)), sizes, into, box.storage)


def _part_of(piece: HeldBox, begins: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    view = piece.get()
    for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, begin, size)
    return view
