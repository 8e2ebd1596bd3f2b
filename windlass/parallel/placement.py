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
class Box:
    """A rectangular part of a local tensor, and where it lies in the whole one; one entry a dimension."""

    local: tuple[int, ...]
    whole: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """What parameters have in common that are cut, reduced and counted alike; see `Placement`."""

    cut: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    stages: tuple[int, ...] = ()
    expert: bool = False


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

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    cut: frozenset[str] = field(default_factory=frozenset)
    parts: frozenset[str] = field(default_factory=frozenset)
    expert: bool = False
    stages: tuple[int, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.ranges) != len(self.shape):
            raise ValueError(f"{len(self.ranges)} dimensions of ranges for a parameter of shape {self.shape}")
        for size, ranges in zip(self.shape, self.ranges, strict=True):
            ends = [0, *(end for span in ranges for end in span), size]
            if ends != sorted(ends):
                raise ValueError(f"ranges {ranges} do not ascend within a dimension of {size} elements")

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what lies here."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def kind(self) -> Kind:
        """What decides who reduces it."""
        return Kind(self.cut, self.parts, self.stages, self.expert)

    @cached_property
    def whole(self) -> bool:
        """All of it lies here."""
        return self.local_shape == self.shape

    @property
    def begins(self) -> bool:
        """The first element of the whole is here: of the ranks that have parts, this one speaks for all."""
        return all(
            not size or (ranges and ranges[0][0] == 0) for size, ranges in zip(self.shape, self.ranges, strict=True)
        )

    def boxes(self) -> Iterator[Box]:
        """What lies here, as boxes."""
        along = []
        for ranges in self.ranges:
            at, spans = 0, []
            for start, stop in ranges:
                spans.append((at, start, stop - start))
                at += stop - start
            along.append(spans)
        for one in product(*along):
            yield Box(tuple(span[0] for span in one), tuple(span[1] for span in one), tuple(span[2] for span in one))


def everything(shape: Sequence[int]) -> tuple[Ranges, ...]:
    """Ranges that keep all of a parameter of this shape."""
    return tuple(((0, size),) for size in shape)


def along(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> tuple[Ranges, ...]:
    """Ranges that keep only `ranges` along `dim`."""
    found = list(everything(shape))
    found[dim] = tuple((start, stop) for start, stop in ranges)
    return tuple(found)


def spread(total: int, count: int, index: int, *, grain: int = 1) -> tuple[int, int]:
    """`[start, stop)` of `total` that the `index`-th of `count` has, in whole grains: the first ones have one more
    where it doesn't divide.

    Raises:
        ValueError: `total` is no multiple of `grain`.
    """
    grains, rest = divmod(total, grain)
    if rest:
        raise ValueError(f"{total} is no multiple of {grain}")
    each, more = divmod(grains, count)
    start = index * each + min(index, more)
    return start * grain, (start + each + (index < more)) * grain


_placements: WeakIdKeyDictionary = WeakIdKeyDictionary()


def place(parameter: nn.Parameter, placement: Placement) -> None:
    """Say what of the whole parameter `parameter` is.

    Raises:
        ValueError: it has another shape.
    """
    if tuple(parameter.shape) != placement.local_shape:
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} can't be a part of {placement.local_shape}")
    _placements[parameter] = placement


def placement_of(parameter: nn.Parameter) -> Placement:
    """What of the whole parameter it is: all, where nobody said otherwise."""
    found = _placements.get(parameter)
    return found if found is not None else Placement(tuple(parameter.shape), everything(parameter.shape))


def is_placed(parameter: nn.Parameter) -> bool:
    """Whether anybody said what of a whole parameter it is."""
    return parameter in _placements


def name_of(parameter: nn.Parameter, here: str) -> str:
    """The name of a parameter in the whole model, which is called `here` in this rank's."""
    found = _placements.get(parameter)
    return here if found is None or not found.name else str(found.name)


def numel_of_whole(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter."""
    found = _placements.get(parameter)  # no placement is built: this is asked of every parameter several times
    return math.prod(parameter.shape if found is None else found.shape)
