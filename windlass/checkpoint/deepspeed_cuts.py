"""Tensors whose elements lie cut in several of DeepSpeed's files, as boxes; see [Note: DeepSpeed's files]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.fragment import boxes
from windlass.checkpoint.index import Chunk, TensorRecord
from windlass.checkpoint.tensor_file import code_of
from windlass.checkpoint.torch_file import StoredTensor, crc32_within, entry_within
from windlass.checkpoint.torch_file import literal as entry_of_bytes


@dataclass
class Cuts:
    """Tensors by name, as the index of a checkpoint has them.

    Args:
        path: the directory of the files.
    """

    path: Path
    tensors: dict[str, TensorRecord] = field(default_factory=dict)

    def cut_in_parts(self, name: str, shape: tuple[int, ...], parts: Iterable[tuple[StoredTensor, int]]) -> None:
        """A tensor of which each rank has an equal part, `at` in something flat of its own."""
        found = list(parts)
        size, numel = -(-math.prod(shape) // len(found)), math.prod(shape)
        ranges = []
        for rank, (flat, at) in enumerate(found):
            start, stop = min(rank * size, numel), min((rank + 1) * size, numel)
            self.check(flat.numel() >= at + stop - start, f"rank {rank}'s part of {name!r}")
            ranges.append((start, stop, flat, at))
        self.add(name, shape, found[0][0].dtype, ranges)

    def cut_in_a_row(
        self, name: str, shape: tuple[int, ...], flats: Sequence[StoredTensor], part: int, at: int
    ) -> None:
        """A tensor that is elements `[at, ...)` of something flat of which each rank has `part` elements."""
        numel = math.prod(shape)
        ranges = []
        for rank, flat in enumerate(flats):
            first, last = max(at, rank * part), min(at + numel, (rank + 1) * part)
            if first < last:
                self.check(flat.numel() >= last - rank * part, f"rank {rank}'s part of {name!r}")
                ranges.append((first - at, last - at, flat, first - rank * part))
        self.add(name, shape, flats[0].dtype, ranges or [(0, 0, flats[0], 0)])

    def whole(self, name: str, tensor: StoredTensor, shape: tuple[int, ...] | None = None) -> None:
        """A tensor that is stored as it is; `shape` is what it must have."""
        shape = tuple(tensor.shape) if shape is None else shape
        self.check(tuple(tensor.shape) == shape, f"the shape of {name!r}")
        self.add(name, shape, tensor.dtype, [(0, tensor.numel(), tensor, 0)])

    def add(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, ranges: list[tuple[int, int, StoredTensor, int]]
    ) -> None:
        """A tensor whose elements `[start, stop)` are those from `at` on of a stored one, for each of `ranges`."""
        chunks = []
        for start, stop, flat, at in ranges:
            if flat.dtype != dtype:
                raise CheckpointError(f"{self.path}: {name!r} is {dtype} on one rank and {flat.dtype} on another")
            if not flat.is_contiguous():
                raise CheckpointError(
                    f"{self.path}: {name!r} was saved with strides {flat.strides}, and only tensors that lie in one "
                    "piece are read; save it from contiguous parameters"
                )
            if math.prod(shape) == 0:
                chunks.append(_chunk((0,) * len(shape), shape, flat.path, entry_within(flat, 0, 0), 0))
            for box in boxes(shape, start, stop):
                first, last = at + box.start - start, at + box.stop - start
                entry, crc32 = entry_within(flat, first, last), crc32_within(flat, first, last)
                chunks.append(_chunk(box.offsets, box.sizes, flat.path, entry, crc32))
        covered = sum(math.prod(chunk.sizes) for chunk in chunks)
        self.check(covered == math.prod(shape), f"{covered} of {math.prod(shape)} elements of {name!r}")
        self.tensors[name] = TensorRecord(shape, code_of(dtype), tuple(chunks))

    def literal(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor that is none in the files, but a plain number or bytes."""
        file = next(iter(sorted(self.path.glob("*model_states.pt"))))
        shape = tuple(tensor.shape)
        chunk = _chunk((0,) * len(shape), shape, file, entry_of_bytes(tensor), None)
        self.tensors[name] = TensorRecord(shape, code_of(tensor.dtype), (chunk,))

    def check(self, fits: Any, what: str) -> None:
        """Raises CheckpointError unless what the files say fits together."""
        if not fits:
            raise CheckpointError(
                f"{self.path}: {what} does not fit what the other files say; a file is damaged, missing or of another "
                "version of DeepSpeed (0.19 is read)"
            )


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], file: Path, entry: str, crc32: int | None) -> Chunk:
    return Chunk(offsets, sizes, file.name, entry, crc32)
