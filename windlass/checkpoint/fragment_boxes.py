"""Arithmetic of flat ranges of row-major tensors: their boxes, and their position in a larger tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from windlass.parallel.placement import Placement


@dataclass(frozen=True)
class FlatBox:
    """Rectangular part of a tensor whose elements are consecutive in row-major order.

    `offsets` and `sizes` have one entry per dimension (none for a 0-dimensional tensor); `start` is the flat position
    of the first element.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.sizes)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[FlatBox]:
    """Split the flat range [start, stop) of a tensor of `shape` into boxes, in order, without gap or overlap.

    A range of an N-dimensional tensor needs at most 2N-1 boxes: partial rows of inner to outer dimensions, full rows of
    the outermost one, and partial rows of outer to inner dimensions. An empty range needs none.

    Raises:
        ValueError: the range does not lie inside the tensor.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"the range [{start}, {stop}) does not lie in a tensor of shape {shape} ({numel} elements)")
    if start == 0 and 0 < stop == numel:  # fast path for full tensors; most small tensors are full
        return [FlatBox((0,) * len(shape), shape, 0)]
    strides = _strides(shape)
    boxes: list[FlatBox] = []
    position = start
    while position < stop:
        box = _largest_box(shape, strides, position, stop)
        boxes.append(box)
        position = box.stop
    return boxes


def flat_start(shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """Return the flat position of the element at `offsets` in a row-major tensor of `shape`."""
    return sum(offset * stride for offset, stride in zip(offsets, _strides(shape), strict=True))


def is_contiguous(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return True if a box of `sizes` in a tensor of `shape` is one flat range.

    Its sizes are then 1 in the first dimensions, any size in the next one, and full sizes in the others.
    """
    outermost = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return sizes[outermost + 1 :] == shape[outermost + 1 :]


@dataclass(frozen=True)
class BoxPart:
    """Box of a global tensor, and the place of its elements in a flat range of a rank's local part of that tensor.

    The flat range consists of boxes of the local part; the containing box is the one that contains this box.

    Attributes:
        offsets, sizes: position and sizes in the global tensor.
        containing_start, containing_sizes: first element of the containing box in the flat range, and its sizes.
        starts_in_box: position of this box inside the containing box.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    containing_start: int
    containing_sizes: tuple[int, ...]
    starts_in_box: tuple[int, ...]

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements of this box as a view of `flat`, the range `[n]`, in the box's shape."""
        numel = math.prod(self.containing_sizes)
        if numel != flat.numel():
            flat = flat[self.containing_start : self.containing_start + numel]
        view = flat.view(self.containing_sizes)
        for dim, (start, size) in enumerate(zip(self.starts_in_box, self.sizes, strict=True)):
            if size != self.containing_sizes[dim]:
                view = view.narrow(dim, start, size)
        return view


def place_range(placement: Placement, start: int, stop: int) -> Iterator[BoxPart]:
    """Yield the boxes of the global tensor that the flat range `[start, stop)` of the local tensor covers."""
    if placement.is_full:
        for box in boxes_of_range(placement.global_shape, start, stop):
            yield BoxPart(box.offsets, box.sizes, box.start - start, box.sizes, (0,) * len(box.sizes))
        return
    ranges = list(placement.shard_boxes())
    for box in boxes_of_range(placement.local_shape, start, stop):
        for place in ranges:
            low = tuple(max(a, b) for a, b in zip(box.offsets, place.local_offsets, strict=True))
            ends = zip(box.offsets, box.sizes, place.local_offsets, place.sizes, strict=True)
            high = tuple(min(a + n, b + m) for a, n, b, m in ends)
            if all(a < b for a, b in zip(low, high, strict=True)):
                sizes = tuple(b - a for a, b in zip(low, high, strict=True))
                offsets = tuple(
                    a - b + c for a, b, c in zip(low, place.local_offsets, place.global_offsets, strict=True)
                )
                starts = tuple(a - b for a, b in zip(low, box.offsets, strict=True))
                yield BoxPart(offsets, sizes, box.start - start, box.sizes, starts)


def flat_ranges_of_box(
    shape: tuple[int, ...], offsets: tuple[int, ...], values: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the elements of a box of a tensor of `shape` as flat ranges.

    Yields:
        The flat position of the range's first element in the tensor, and the values `[n]`.
    """
    if not values.numel():
        return
    if is_contiguous(shape, tuple(values.shape)):
        yield flat_start(shape, offsets), values.reshape(-1)
        return
    for index in range(values.shape[0]):
        at, step = offsets[0] + index, math.prod(shape[1:])
        for start, flat in flat_ranges_of_box(shape[1:], offsets[1:], values[index]):
            yield at * step + start, flat


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _largest_box(shape: tuple[int, ...], strides: tuple[int, ...], position: int, stop: int) -> FlatBox:
    """Return the largest box that begins at `position`: full rows of the outermost dimension that allows them."""
    offsets = tuple(position // stride % size for stride, size in zip(strides, shape, strict=True))
    for dim, stride in enumerate(strides):
        if position % stride == 0 and position + stride <= stop:
            rows = min((stop - position) // stride, shape[dim] - offsets[dim])
            return FlatBox(offsets, (1,) * dim + (rows, *shape[dim + 1 :]), position)
    return FlatBox(offsets, (), position)
