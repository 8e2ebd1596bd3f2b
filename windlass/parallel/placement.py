"""Which part of a parameter of the whole model a rank has: a side table, so that parameters stay plain tensors."""

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
    """A rectangular part of a local tensor, and where it lies in the whole one; one entry a dimension."""

    local_offsets: tuple[int, ...]
    global_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class PlacementKey:
    """What parameters have in common that are cut, reduced and counted alike; see `Placement`."""

    sharded_axes: frozenset[str] = frozenset()
    partial_axes: frozenset[str] = frozenset()
    shared_stages: tuple[int, ...] = ()
    is_expert: bool = False


@dataclass(frozen=True)
class Placement:
    """What of a whole parameter lies here.

    The local tensor is what remains of the whole one when along each dimension only the elements in `ranges` are kept,
    in that order (a fused QKV matrix has three ranges along its rows).

    Attributes:
        shape: of the whole parameter.
        ranges: for each dimension, `[start, stop)` of the whole that are kept; they ascend and do not overlap.
        cut: axes of the mesh whose ranks hold other parts ("tp", "ep"). Along all others ranks hold the same.
        parts: axes along which ranks hold the same, but each sees only a part of the gradient, to be added up (norms
            between tensor-parallel layers that are cut along the sequence).
        expert: it belongs to experts: along "ep" ranks hold other ones, so it is reduced over `EXPERT_DATA`.
        stages: of a pipeline that hold this same parameter, if several do (tied embeddings): their gradients are added
            up.
        name: in the whole model, where it has another one here (an embedding that is only the head on this stage).
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
            raise ValueError(f"{len(self.ranges)} dimensions of ranges for a parameter of shape {self.global_shape}")
        for size, ranges in zip(self.global_shape, self.ranges, strict=True):
            ends = [0, *(end for span in ranges for end in span), size]
            if ends != sorted(ends):
                raise ValueError(f"ranges {ranges} do not ascend within a dimension of {size} elements")

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what lies here."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def key(self) -> PlacementKey:
        """What decides who reduces it."""
        return PlacementKey(self.sharded_axes, self.partial_axes, self.shared_stages, self.is_expert)

    @cached_property
    def is_full(self) -> bool:
        """All of it lies here."""
        return self.local_shape == self.global_shape

    @property
    def is_first_shard(self) -> bool:
        """The first element of the whole is here: of the ranks that have parts, this one speaks for all."""
        return all(
            not size or (ranges and ranges[0][0] == 0)
            for size, ranges in zip(self.global_shape, self.ranges, strict=True)
        )

    def shard_boxes(self) -> Iterator[ShardBox]:
        """What lies here, as boxes."""
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
    """Ranges that keep all of a parameter of this shape."""
    return tuple(((0, size),) for size in shape)


def make_ranges_along(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> tuple[Ranges, ...]:
    """Ranges that keep only `ranges` along `dim`."""
    found = list(make_full_ranges(shape))
    found[dim] = tuple((start, stop) for start, stop in ranges)
    return tuple(found)


def compute_shard_range(size: int, num_shards: int, index: int, *, grain: int = 1) -> tuple[int, int]:
    """`[start, stop)` of `total` that the `index`-th of `count` has, in whole grains: the first ones have one more
    where it doesn't divide.

    Raises:
        ValueError: `total` is no multiple of `grain`.
    """
    grains, rest = divmod(size, grain)
    if rest:
        raise ValueError(f"{size} is no multiple of {grain}")
    each, more = divmod(grains, num_shards)
    start = index * each + min(index, more)
    return start * grain, (start + each + (index < more)) * grain


_placements: WeakIdKeyDictionary = WeakIdKeyDictionary()


def set_placement(parameter: nn.Parameter, placement: Placement) -> None:
    """Say what of the whole parameter `parameter` is.

    Raises:
        ValueError: it has another shape.
    """
    if tuple(parameter.shape) != placement.local_shape:
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} can't be a part of {placement.local_shape}")
    _placements[parameter] = placement


def get_placement(parameter: nn.Parameter) -> Placement:
    """What of the whole parameter it is: all, where nobody said otherwise."""
    found = _placements.get(parameter)
    return found if found is not None else Placement(tuple(parameter.shape), make_full_ranges(parameter.shape))


def has_placement(parameter: nn.Parameter) -> bool:
    """Whether anybody said what of a whole parameter it is."""
    return parameter in _placements


def get_global_name(parameter: nn.Parameter, local_name: str) -> str:
    """The name of a parameter in the whole model, which is called `here` in this rank's."""
    found = _placements.get(parameter)
    return local_name if found is None or not found.global_name else found.global_name


def get_global_numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter."""
    found = _placements.get(parameter)  # no placement is built: this is asked of every parameter several times
    return math.prod(parameter.shape if found is None else found.global_shape)
