"""Planning of a load: which parts of the stored boxes fill this rank's boxes, for any sharding of file and model.

A box is a rectangular part of a tensor: an offset and a size in each dimension.
"""

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
    """Part of a stored box, and the memory that it fills.

    Attributes:
        chunk, dtype: the stored box, and its dtype.
        offsets, sizes: the part, counted from the box's first element.
        into: returns the memory `[sizes]`, on any device and of any dtype, while `handle` is open.
        handle: storage handle of the memory; None if the memory is always present.
        done: called with the memory once it is filled.
    """

    chunk: ChunkRecord
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    into: Callable[[], torch.Tensor]
    handle: LazyStorage | None = None
    done: Callable[[torch.Tensor], object] | None = None

    @property
    def whole(self) -> bool:
        """True if the part is the full box."""
        return self.sizes == self.chunk.sizes


def wanted(held: Mapping[str, HeldTensor], index: CheckpointIndex) -> Iterator[Wanted]:
    """Yield the parts of a checkpoint that fill `held`, in the order of the boxes in `held`.

    The checkpoint must hold every name in `held` with its shape.
    """
    for name, holding in held.items():
        record = index.tensors[name]
        dtype = dtype_from_code(record.dtype)
        for piece in holding.boxes:
            yield from _read_items(piece, record.chunks, dtype)


def _read_items(box: HeldBox, chunks: Iterable[ChunkRecord], dtype: torch.dtype) -> Iterator[Wanted]:
    """Yield the parts of stored boxes that fill one held box."""
    for chunk in chunks:
        if chunk.offsets == box.offsets and chunk.sizes == box.sizes:  # saved with the same sharding
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
