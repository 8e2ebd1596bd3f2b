"""Tensors whose elements are spread over several of DeepSpeed's files; see [Note: DeepSpeed's files].

Each tensor is described as boxes (index ranges along every dimension), with the place of each box in a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_index import ChunkRecord, TensorRecord
from windlass.checkpoint.fragment_boxes import boxes_of_range
from windlass.checkpoint.safetensors_file import dtype_code
from windlass.compat.checkpoint.torch_file import StoredTensor, crc32_of_elements, entry_of_elements
from windlass.compat.checkpoint.torch_file import literal_entry as entry_of_bytes


@dataclass
class DeepSpeedShards:
    """Tensor records by name. A record has the places of the tensor's elements in the files.

    Args:
        path: the directory of the files.
    """

    path: Path
    tensors: dict[str, TensorRecord] = field(default_factory=dict)

    def add_per_parameter_shards(
        self, name: str, shape: tuple[int, ...], shards: Iterable[tuple[StoredTensor, int]]
    ) -> None:
        """Add a tensor that is stored in equal parts, one for each rank.

        Args:
            shards: for each rank, a flat tensor and the offset of the rank's part in it.
        """
        found = list(shards)
        size, numel = -(-math.prod(shape) // len(found)), math.prod(shape)
        ranges = []
        for rank, (flat, at) in enumerate(found):
            start, stop = min(rank * size, numel), min((rank + 1) * size, numel)
            self.require(flat.numel() >= at + stop - start, f"rank {rank}'s part of {name!r}")
            ranges.append((start, stop, flat, at))
        self.add_ranges(name, shape, found[0][0].dtype, ranges)

    def add_concatenated_shards(
        self, name: str, shape: tuple[int, ...], flats: Sequence[StoredTensor], part_numel: int, at: int
    ) -> None:
        """Add a tensor that is stored at offset `at` of the concatenated `flats`.

        Each of `flats` has `part_numel` elements, padding included.
        """
        numel = math.prod(shape)
        ranges = []
        for rank, flat in enumerate(flats):
            first, last = max(at, rank * part_numel), min(at + numel, (rank + 1) * part_numel)
            if first < last:
                self.require(flat.numel() >= last - rank * part_numel, f"rank {rank}'s part of {name!r}")
                ranges.append((first - at, last - at, flat, first - rank * part_numel))
        self.add_ranges(name, shape, flats[0].dtype, ranges or [(0, 0, flats[0], 0)])

    def add_full_tensor(self, name: str, tensor: StoredTensor, shape: tuple[int, ...] | None = None) -> None:
        """Add a tensor that is stored in full; `shape` is its expected shape."""
        shape = tuple(tensor.shape) if shape is None else shape
        self.require(tuple(tensor.shape) == shape, f"the shape of {name!r}")
        self.add_ranges(name, shape, tensor.dtype, [(0, tensor.numel(), tensor, 0)])

    def add_ranges(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, ranges: list[tuple[int, int, StoredTensor, int]]
    ) -> None:
        """Add a tensor. A range `(start, stop, flat, at)`: its elements `[start, stop)` begin at index `at` of `flat`.

        Raises:
            CheckpointError: a range has another dtype or is not contiguous, or the ranges do not cover the tensor.
        """
        chunks = []
        for start, stop, flat, at in ranges:
            if flat.dtype != dtype:
                raise CheckpointError(
                    f"{self.path}: {name!r} is {dtype} on one rank and {flat.dtype} on another; load another checkpoint"
                )
            if not flat.is_contiguous():
                raise CheckpointError(
                    f"{self.path}: {name!r} was saved with strides {flat.strides}, and only contiguous tensors "
                    "are supported; save it from contiguous parameters"
                )
            if math.prod(shape) == 0:
                chunks.append(_chunk_record((0,) * len(shape), shape, flat.path, entry_of_elements(flat, 0, 0), 0))
            for box in boxes_of_range(shape, start, stop):
                first, last = at + box.start - start, at + box.stop - start
                entry, crc32 = entry_of_elements(flat, first, last), crc32_of_elements(flat, first, last)
                chunks.append(_chunk_record(box.offsets, box.sizes, flat.path, entry, crc32))
        covered = sum(math.prod(chunk.sizes) for chunk in chunks)
        self.require(
            covered == math.prod(shape), f"the elements of {name!r}, of which {covered} of {math.prod(shape)} exist"
        )
        self.tensors[name] = TensorRecord(shape, dtype_code(dtype), tuple(chunks))

    def add_literal(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor for a plain number or bytes that the files do not store as a tensor."""
        file = next(iter(sorted(self.path.glob("*model_states.pt"))))
        shape = tuple(tensor.shape)
        chunk = _chunk_record((0,) * len(shape), shape, file, entry_of_bytes(tensor), None)
        self.tensors[name] = TensorRecord(shape, dtype_code(tensor.dtype), (chunk,))

    def require(self, fits: Any, what: str) -> None:
        """Raise CheckpointError unless `fits`. The message states that the files disagree about `what`."""
        if not fits:
            raise CheckpointError(
                f"{self.path}: its files disagree about {what}; a file is damaged, missing or of another version of "
                "DeepSpeed (0.19 is supported). Copy all files again, or load another checkpoint"
            )


def _chunk_record(
    offsets: tuple[int, ...], sizes: tuple[int, ...], file: Path, entry: str, crc32: int | None
) -> ChunkRecord:
    return ChunkRecord(offsets, sizes, file.name, entry, crc32)
