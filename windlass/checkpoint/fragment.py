"""Arithmetic of a flat range of a row-major tensor: at most 2N-1 boxes that lie contiguously in it, in order."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor whose elements are neighbours in row-major order.

    `offsets` and `sizes` have one entry a dimension (none for a 0-dimensional tensor); `start` is the flat position of
    the first element.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.sizes)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cuts the flat range [start, stop) of a tensor of `shape` into boxes, in order, without gap or overlap.

    A range of an N-dimensional tensor needs at most 2N-1 of them: partial rows that rise to the outermost dimension,
    whole rows of it, partial rows that fall again. A range that is empty needs none.

    Raises:
        ValueError: the range does not lie inside the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"the range [{start}, {stop}) does not lie in a tensor of shape {shape} ({numel} elements)")
    strides = _strides(shape)
    cut: list[Box] = []
    position = start
    while position < stop:
        box = _largest_box(shape, strides, position, stop)
        cut.append(box)
        position = box.stop
    return cut


def flat_start(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """The flat position of the element at `offsets` in a row-major tensor of `shape`."""
    return sum(offset * stride for offset, stride in zip(offsets, _strides(shape), strict=True))


def is_contiguous(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether a box of `sizes` in a row-major tensor of `shape` is one flat range: 1s, then any size, then whole."""
    outermost = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return sizes[outermost + 1 :] == shape[outermost + 1 :]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _largest_box(shape: tuple[int, ...], strides: tuple[int, ...], position: int, stop: int) -> Box:
    """The largest box that begins at `position`: whole rows of the outermost dimension at whose boundary it lies."""
    offsets = tuple(position // stride % size for stride, size in zip(strides, shape, strict=True))
    for dim, stride in enumerate(strides):
        if position % stride == 0 and position + stride <= stop:
            rows = min((stop - position) // stride, shape[dim] - offsets[dim])
            return Box(offsets, (1,) * dim + (rows, *shape[dim + 1 :]), position)
    return Box(offsets, (), position)
