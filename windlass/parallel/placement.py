"""Parts of full parameters that this rank holds, recorded in a side table so that parameters stay plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ShardBox:
    """Rectangular part of a local tensor, and its position in the full tensor. Tuples have one entry per dimension."""

    local_offsets: tuple[int, ...]
    global_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class PlacementKey:
    """Properties that decide how a parameter is sharded, reduced and counted; see `Placement`."""

    sharded_axes: frozenset[str] = frozenset()
    partial_axes: frozenset[str] = frozenset()
    shared_stages: tuple[int, ...] = ()
    is_expert: bool = False


@dataclass(frozen=True)
class Placement:
    """Part of a full parameter that this rank holds.

    The local tensor consists of the elements of the full tensor whose index is, along each dimension, in `ranges`, in
    that order. A fused QKV matrix, for example, has three ranges along its rows.

    Attributes:
        global_shape: shape of the full parameter.
        ranges: for each dimension, the ranges `[start, stop)` of the full tensor that are local. They ascend and do not
            overlap.
        sharded_axes: mesh axes whose ranks hold different parts ("tp", "ep"). Along all other axes the parameter is
            replicated.
        partial_axes: axes along which the parameter is replicated but each rank computes only a part of its gradient;
            the parts are summed (norms between tensor-parallel layers with a sequence-sharded input).
        is_expert: True if the parameter belongs to an expert. Ranks along "ep" hold different experts, so its gradient
            is reduced over the expert data-parallel group.
        shared_stages: positions along the pipeline axis of the ranks that hold this same parameter, if several do (tied
            embeddings). The gradients of these ranks are summed.
        global_name: name in the full model, if the local name differs (an embedding that serves only as the head on
            this stage).

    Raises:
        ValueError: `ranges` do not have the dimensions of `global_shape`, or do not ascend within them.
    """

    global_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    sharded_axes: frozenset[str] = field(default_factory=frozenset)
    partial_axes: frozenset[str] = field(default_factory=frozenset)
    is_expert: bool = False
    shared_stages: tuple[int, ...] = ()
    global_name: str = ""

    def __post_init__(self) -> None:
        if len(self.ranges) != len(self.global_shape):
            raise ValueError(f"{len(self.ranges)} ranges for a parameter of shape {self.global_shape}")
        for size, ranges in zip(self.global_shape, self.ranges, strict=True):
            ends = [0, *(end for span in ranges for end in span), size]
            if ends != sorted(ends):
                raise ValueError(f"ranges {ranges} do not ascend within a dimension of {size} elements")

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local part."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def key(self) -> PlacementKey:
        """Properties that decide over which ranks the parameter is reduced."""
        return PlacementKey(self.sharded_axes, self.partial_axes, self.shared_stages, self.is_expert)

    @cached_property
    def is_full(self) -> bool:
        """True if the local part is the full parameter."""
        return self.local_shape == self.global_shape

    @property
    def is_first_shard(self) -> bool:
        """True if the local part contains the first element of the full parameter. Exactly one of the ranks with
        different parts has that element.
        """
        return all(
            not size or (ranges and ranges[0][0] == 0)
            for size, ranges in zip(self.global_shape, self.ranges, strict=True)
        )

    def shard_boxes(self) -> Iterator[ShardBox]:
        """Yield the rectangular parts of the local tensor, one for each combination of `ranges`."""
        along = []
        for ranges in self.ranges:
            at, spans = 0, []
            for start, stop in ranges:
                spans.append((at, start, stop - start))
                at += stop - start
            along.append(spans)
        for one in product(*along):
            yield ShardBox(
                tuple(span[0] for span in one), tuple(span[1] for span in one), tuple(span[2] for span in one)
            )


def make_full_ranges(shape: Sequence[int]) -> tuple[Ranges, ...]:
    """Return ranges that cover a full parameter of this shape."""
    return tuple(((0, size),) for size in shape)


def make_ranges_along(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> tuple[Ranges, ...]:
    """Return ranges that keep only `ranges` along `dim`, and everything along the other dimensions."""
    found = list(make_full_ranges(shape))
    found[dim] = tuple((start, stop) for start, stop in ranges)
    return tuple(found)


def compute_shard_range(size: int, num_shards: int, index: int, *, grain: int = 1) -> tuple[int, int]:
    """Return the range `[start, stop)` of shard `index` if `size` elements are divided into `num_shards` shards.

    Bounds are multiples of `grain`. If the number of grains is not a multiple of `num_shards`, the first shards have
    one grain more.

    Raises:
        ValueError: `size` is not a multiple of `grain`.
    """
    grains, rest = divmod(size, grain)
    if rest:
        raise ValueError(f"{size} elements are not a multiple of the grain {grain}; pass a divisor of them")
    each, more = divmod(grains, num_shards)
    start = index * each + min(index, more)
    return start * grain, (start + each + (index < more)) * grain


_placements: WeakIdKeyDictionary = WeakIdKeyDictionary()


def set_placement(parameter: nn.Parameter, placement: Placement) -> None:
    """Record the placement of a parameter: the part of the full parameter that `parameter` holds.

    Raises:
        ValueError: the shape of `parameter` differs from `placement.local_shape`.
    """
    if tuple(parameter.shape) != placement.local_shape:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} doesn't match the placement's local shape "
            f"{placement.local_shape}"
        )
    _placements[parameter] = placement


def get_placement(parameter: nn.Parameter) -> Placement:
    """Return the placement of a parameter. A parameter without a recorded placement counts as full."""
    found = _placements.get(parameter)
    return found if found is not None else Placement(tuple(parameter.shape), make_full_ranges(parameter.shape))


def has_placement(parameter: nn.Parameter) -> bool:
    """Return True if a placement was set for the parameter."""
    return parameter in _placements


def get_global_name(parameter: nn.Parameter, local_name: str) -> str:
    """Return the name in the full model of a parameter that this rank's model calls `local_name`."""
    found = _placements.get(parameter)
    return local_name if found is None or not found.global_name else found.global_name


def get_global_numel(parameter: nn.Parameter) -> int:
    """Return the number of elements of the full parameter."""
    found = _placements.get(parameter)  # builds no default Placement: this runs several times for every parameter
    return math.prod(parameter.shape if found is None else found.global_shape)
