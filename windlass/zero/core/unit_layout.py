"""Unit layout: offset of each parameter in a unit's flat buffer, and range of each rank's shard. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGN = 16  # in elements: 64 bytes of float32, one cache line and the widest vector
_ALIGN_FROM = 1024  # in elements: aligning smaller parameters has no benefit and would add mostly padding


@dataclass(frozen=True)
class LayoutPiece:
    """Part of parameter `index` inside a span: elements `[start, stop)` of the parameter, at `offset` in the span."""

    index: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class UnitLayout:
    """Layout of a unit's parameters in model order, with padding to align large parameters and to equalize shards.

    Args:
        numels: Number of elements of each parameter; zero is allowed.
        ranks: Maximum number of shards. The buffer can also be divided into any number of shards that divides `ranks`.
    """

    numels: tuple[int, ...]
    ranks: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each parameter in the buffer, in elements."""
        offsets, end = [], 0
        for numel in self.numels:
            if numel >= _ALIGN_FROM:
                end = -(-end // ALIGN) * ALIGN
            offsets.append(end)
            end += numel
        return tuple(offsets)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return sum(self.numels)

    @cached_property
    def padded(self) -> int:
        """Number of elements of the buffer, a multiple of `ranks * ALIGN`."""
        end = max((o + n for o, n in zip(self.offsets, self.numels, strict=True)), default=0)
        step = self.ranks * ALIGN
        return -(-end // step) * step

    def shard_range(self, index: int, count: int) -> tuple[int, int]:
        """Return the range `[start, stop)` of the buffer that the `index`-th of `count` ranks owns.

        Raises:
            ValueError: `count` does not divide `ranks`.
        """
        if self.ranks % count:
            raise ValueError(f"a layout for {self.ranks} ranks cannot be divided into {count} shards; use a divisor")
        size = self.padded // count
        return index * size, (index + 1) * size

    def pieces(self, start: int, stop: int) -> Iterator[LayoutPiece]:
        """Yield the parts of parameters in the span `[start, stop)` of the buffer. Empty parameters have none."""
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            first, last = max(start, offset), min(stop, offset + numel)
            if first < last:
                yield LayoutPiece(index, first - offset, last - offset, first - start)

    def gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the padding in the span `[start, stop)`, as ranges `[first, last)` of the buffer."""
        end = start
        for piece in self.pieces(start, stop):
            if start + piece.offset > end:
                yield end, start + piece.offset
            end = start + piece.offset + piece.numel
        if end < stop:
            yield end, stop


def layout_of(shapes: Sequence[Sequence[int]], ranks: int) -> UnitLayout:
    """Return the layout of parameters with these shapes."""
    return UnitLayout(tuple(math.prod(shape) for shape in shapes), ranks)
