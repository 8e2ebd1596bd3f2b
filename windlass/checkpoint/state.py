"""What a checkpoint holds: named tensors, cut over ranks or whole, and plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.fragment import boxes

# Tensors found inside plain data are stored under these prefixes, so no other tensor may use them.
RESERVED = ("plain/", "rank/")


@dataclass(frozen=True)
class FlatShard:
    """This rank's flat range of a named tensor: elements [start, start + tensor.numel()) of `shape`, row-major.

    Args:
        name: the tensor's name in the checkpoint, such as `param/lm_head.weight` or `state/lm_head.weight/exp_avg`.
        shape: the shape of the whole tensor.
        start: the flat position of this range's first element.
        tensor: [elements of the range], contiguous; read by a save, filled in place by a load. It may be empty.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.tensor.dim() != 1 or not self.tensor.is_contiguous():
            raise CheckpointError(
                f"the shard of {self.name!r} must be a contiguous 1-D tensor, got shape {tuple(self.tensor.shape)}, "
                f"strides {self.tensor.stride()}; pass the flat range itself"
            )
        if not 0 <= self.start <= self.stop <= math.prod(self.shape):
            raise CheckpointError(
                f"the shard of {self.name!r} covers elements [{self.start}, {self.stop}), but shape {self.shape} has "
                f"{math.prod(self.shape)}; pass the range without padding"
            )

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


@dataclass
class SavedState:
    """One rank's share of a state, to be saved or (its tensors) to be filled by a load.

    Args:
        shards: this rank's flat ranges. Over all ranks they must cover each named tensor; ranks that hold the same
            range (replicas) are fine, one of them writes it.
        tensors: whole tensors that every rank which names them holds equal.
        plain: None, bool, int, float, str, tensors, and lists, tuples and dicts of them. Rank 0's is kept.
        rank_plain: likewise, but each rank's own is kept: random states, loader positions.
    """

    shards: Sequence[FlatShard] = ()
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    rank_plain: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedState:
    """What a load found besides the tensors that it filled in place.

    `rank_plain` is None where the checkpoint was saved by fewer ranks than this rank's number; `saved_world_size` says
    how many saved it. `missing` were asked for and are not in the checkpoint, `unexpected` are in it and no rank asked.
    """

    tag: str
    path: Path
    plain: dict[str, Any]
    rank_plain: dict[str, Any] | None
    saved_world_size: int
    matched: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """One box of a named tensor and the memory that holds it, shaped as the box."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor


@dataclass
class Holding:
    """All that this rank holds of one named tensor; no piece at all where its ranges are empty."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)


def holdings(shards: Iterable[FlatShard], tensors: Mapping[str, torch.Tensor]) -> dict[str, Holding]:
    """This rank's tensors as boxes, by name; the pieces are views, nothing is copied.

    Raises:
        CheckpointError: a reserved name, a name with two shapes or dtypes, an element held twice.
    """
    held: dict[str, Holding] = {}
    ends: dict[str, list[tuple[int, int]]] = {}
    for shard in shards:
        known = held.setdefault(_allowed(shard.name), Holding(shard.shape, shard.dtype))
        if (known.shape, known.dtype) != (shard.shape, shard.dtype):
            raise CheckpointError(
                f"{shard.name!r} is given twice with different shapes or dtypes: {known.shape} {known.dtype} and "
                f"{shard.shape} {shard.dtype}; one name means one tensor"
            )
        known.pieces += _pieces(shard)
        ends.setdefault(shard.name, []).append((shard.start, shard.stop))
    for name, ranges in ends.items():
        _check_disjoint(name, ranges)
    for name, tensor in tensors.items():
        if _allowed(name) in held:
            raise CheckpointError(f"{name!r} is given as a shard and as a whole tensor; give it once")
        shape = tuple(tensor.shape)
        held[name] = Holding(shape, tensor.dtype, [Piece((0,) * len(shape), shape, tensor.detach())])
    return held


def _allowed(name: str) -> str:
    if not name or name.startswith(RESERVED):
        raise CheckpointError(f"{name!r} cannot name a tensor: names are not empty and begin with none of {RESERVED}")
    return name


def _pieces(shard: FlatShard) -> list[Piece]:
    data = shard.tensor.detach()
    if math.prod(shard.shape) == 0:
        # An empty tensor has no elements to hold, yet must be found again: one box of no elements stands for it.
        return [Piece((0,) * len(shard.shape), shard.shape, data.view(shard.shape))]
    return [
        Piece(box.offsets, box.sizes, data[box.start - shard.start : box.stop - shard.start].view(box.sizes))
        for box in boxes(shard.shape, shard.start, shard.stop)
    ]


def _check_disjoint(name: str, ranges: list[tuple[int, int]]) -> None:
    ranges = sorted(span for span in ranges if span[0] < span[1])
    for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False):
        if start < stop:
            raise CheckpointError(f"one rank gives element {start} of {name!r} twice; its ranges must not overlap")
