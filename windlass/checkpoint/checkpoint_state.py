"""State in a checkpoint: named tensors, sharded or full, and plain data, i.e. values that are stored as JSON."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint.fragment_boxes import BoxPart, place_range
from windlass.parallel.placement import Placement, make_full_ranges
from windlass.storage.safetensors_header import require_tensor_name

# Tensors inside plain data are stored under these prefixes, so no other tensor may use them.
RESERVED_PREFIXES = ("plain/", "rank/")


# [Note: stored ranges] Offloaded values are not brought to memory all at once for a save or a load. A shard may refer
# to a lazy storage handle in place of a tensor. Save and load open one handle at a time and copy all its values to or
# from the checkpoint's files.


class LazyStorage(Protocol):
    """Handle of ranges that are stored together. All of them are in memory while the handle is open."""

    @property
    def is_resident(self) -> bool:
        """True if, while the handle is closed, its values are in memory and will not move or change."""

    def open(self) -> AbstractContextManager[Any]:
        """Return a context in which the values are in memory. Leaving the context stores loaded values."""


class OffloadedStorage:
    """Handle of offloaded values that a save's thread opens later. Until then, updates of these values wait.

    Attributes:
        has_waiter: True once an update waits.
    """

    def __init__(self) -> None:
        self.has_waiter = False
        self._released = threading.Event()

    @property
    def is_resident(self) -> bool:
        return False

    def open(self) -> AbstractContextManager[Any]:
        """Return a context in which a copy of the values is in memory. May be called in any thread."""
        raise NotImplementedError

    def block_writers(self) -> None:
        """Make updates of these values wait from now on."""

    def release_writers(self) -> None:
        """Let updates continue, because the values were copied or will not be copied."""
        self._released.set()

    def wait_until_released(self) -> None:
        """Wait until the values are released."""
        self.has_waiter = True
        self._released.wait()


@dataclass(frozen=True)
class LazyFlatTensor:
    """Placeholder for a tensor `[numel]` that `get` returns while its storage handle is open."""

    numel: int
    dtype: torch.dtype
    storage: LazyStorage
    get: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class FlatShard:
    """This rank's flat range of a named tensor: elements [start, start + numel) of `shape`, row-major.

    Args:
        name: the tensor's name in the checkpoint, such as `param/lm_head.weight` or `state/lm_head.weight/exp_avg`.
        shape: the shape of the full tensor, or of the part that `part_placement` describes.
        start: the flat position of this range's first element.
        tensor: `[numel]`, contiguous; read by a save, filled in place by a load. It may be empty, or a lazy tensor.
        part_placement: the part of the full tensor that has `shape`; None: all of it.

    Raises:
        CheckpointError: `tensor` is not a contiguous 1-D tensor, or the range exceeds `shape`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor | LazyFlatTensor
    part_placement: Placement | None = None
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if isinstance(self.tensor, torch.Tensor):
            self._check_flat(self.tensor)
            object.__setattr__(self, "numel", self.tensor.numel())
        else:
            object.__setattr__(self, "numel", self.tensor.numel)
        if not 0 <= self.start <= self.stop <= math.prod(self.shape):
            raise CheckpointError(
                f"the shard of {self.name!r} covers elements [{self.start}, {self.stop}), but shape {self.shape} has "
                f"{math.prod(self.shape)}; pass the range without padding"
            )

    @property
    def placement(self) -> Placement:
        """Part of the full tensor that has `shape`."""
        return (
            self.part_placement
            if self.part_placement is not None
            else Placement(self.shape, make_full_ranges(self.shape))
        )

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def storage(self) -> LazyStorage | None:
        """Lazy storage handle of the values; None if `tensor` is not lazy."""
        return None if isinstance(self.tensor, torch.Tensor) else self.tensor.storage

    def values(self) -> torch.Tensor:
        """Return the values `[numel]` without a copy. Lazy values require an open storage handle.

        Raises:
            CheckpointError: a lazy tensor's values are not contiguous, or differ from its declared size or dtype.
        """
        if isinstance(self.tensor, torch.Tensor):
            return self.tensor.detach()
        found = self.tensor.get().detach()
        self._check_flat(found)
        if (found.numel(), found.dtype) != (self.numel, self.dtype):
            raise CheckpointError(
                f"the shard of {self.name!r} was declared with {self.numel} elements of {self.dtype}, and has "
                f"{found.numel()} of {found.dtype}"
            )
        return found

    def _check_flat(self, tensor: torch.Tensor) -> None:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise CheckpointError(
                f"the shard of {self.name!r} must be a contiguous 1-D tensor, got shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}; pass the flat range itself"
            )


@dataclass
class SavedState:
    """One rank's part of a state. A save writes it; a load fills its tensors.

    Args:
        shards: this rank's flat ranges. In a save, the ranges of all ranks must cover each named tensor. Several ranks
            may hold the same range (replicas); one of them writes it.
        tensors: full tensors; ranks that list the same name hold equal values.
        plain: plain data by name, of the types that `plain_data.encode` supports. Only rank 0's is stored.
        rank_plain: plain data that is stored for each rank, such as random states and loader positions.
    """

    shards: Sequence[FlatShard] = ()
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    rank_plain: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadedState:
    """Result of a load, besides the tensors that it filled in place.

    `rank_plain` is None if the checkpoint was saved by too few ranks to have data for this one; `saved_world_size` is
    the number of ranks that saved it. Names in `missing` were requested and are not in the checkpoint; names in
    `unexpected` are in it, no rank requested them, and `ignore` does not exclude them.
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
class HeldBox:
    """One box (rectangular part) of a named tensor. `get` returns its memory, in its shape, while `storage` is open."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    get: Callable[[], torch.Tensor]
    storage: LazyStorage | None = None


@dataclass
class HeldTensor:
    """Boxes (rectangular parts) of one named tensor that this rank holds; none if its ranges are empty."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[HeldBox] = field(default_factory=list)


def hold_full_tensor(tensor: torch.Tensor) -> HeldTensor:
    """Return the HeldTensor of a tensor that this rank holds in full."""
    shape, data = tuple(tensor.shape), tensor.detach()
    return HeldTensor(shape, tensor.dtype, [HeldBox((0,) * len(shape), shape, lambda: data)])


def hold_tensors(
    shards: Iterable[FlatShard], tensors: Mapping[str, torch.Tensor], *, allow_overlap: bool = False
) -> dict[str, HeldTensor]:
    """Return this rank's tensors as boxes, by name. Boxes are views; nothing is copied.

    Args:
        allow_overlap: an element may be held twice, as in a load.

    Raises:
        CheckpointError: an empty, reserved or invalid name, a name with two shapes or dtypes, a name of both a shard
            and a full tensor, an element held twice.
    """
    held: dict[str, HeldTensor] = {}
    ends: dict[str, list[tuple[int, int]]] = {}
    for shard in shards:
        known = held.setdefault(_check_name(shard.name), HeldTensor(shard.placement.global_shape, shard.dtype))
        if (known.shape, known.dtype) != (shard.placement.global_shape, shard.dtype):
            raise CheckpointError(
                f"{shard.name!r} is given twice with different shapes or dtypes: {known.shape} {known.dtype} and "
                f"{shard.placement.global_shape} {shard.dtype}; one name means one tensor"
            )
        known.boxes += _held_boxes(shard)
        ends.setdefault(shard.name, []).append((shard.start, shard.stop))
    for name, ranges in ends.items() if not allow_overlap else ():
        _check_disjoint(name, ranges)
    for name, tensor in tensors.items():
        if _check_name(name) in held:
            raise CheckpointError(f"{name!r} is given as a shard and as a full tensor; give it once")
        held[name] = hold_full_tensor(tensor)
    return held


def _check_name(name: str) -> str:
    if not name or name.startswith(RESERVED_PREFIXES):
        raise CheckpointError(
            f"{name!r} cannot name a tensor: names must not be empty or begin with any of {RESERVED_PREFIXES}"
        )
    try:
        require_tensor_name(name)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return name


def _held_boxes(shard: FlatShard) -> list[HeldBox]:
    placement = shard.placement
    if math.prod(placement.global_shape) == 0:
        # A tensor without elements is stored as one empty box, so that a load finds its name.
        return [HeldBox((0,) * len(shard.shape), shard.shape, lambda: shard.values().view(shard.shape), shard.storage)]
    return [
        HeldBox(part.offsets, part.sizes, partial(_box_values, shard, part), shard.storage)
        for part in place_range(placement, shard.start, shard.stop)
    ]


def _box_values(shard: FlatShard, part: BoxPart) -> torch.Tensor:
    return part.view_of(shard.values())


def _check_disjoint(name: str, ranges: list[tuple[int, int]]) -> None:
    ranges = sorted(span for span in ranges if span[0] < span[1])
    for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False):
        if start < stop:
            raise CheckpointError(f"one rank gives element {start} of {name!r} twice; its ranges must not overlap")
