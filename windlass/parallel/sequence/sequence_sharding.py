"""Distribution of a sequence's tokens over the ranks along sp. Pure arithmetic.

[Note: positions of tokens] A rank's tokens are one or two ranges of the sequence, in local order. In attention,
`ulysses_degree` neighbouring ranks swap tokens for heads. Each of them then holds all tokens of this group of ranks,
for some of the heads. The groups form a ring and pass keys and values round. If a causal sequence were split into equal
parts, the last group would attend to all keys, and the first group only to its own. To balance the work, the sequence
is split into twice as many parts as there are groups, and each group gets one part from each end (zig-zag, as in
Llama 3, arXiv 2407.21783, section 3.3.2). Only this file computes the distribution; other files use a
`SequenceSharding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from windlass.parallel.placement import compute_shard_range

TokenRange = tuple[int, int]
"""Range `[start, stop)` of a sequence."""


@dataclass(frozen=True)
class SequenceSharding:
    """Distribution of one sequence over the ranks.

    Attributes:
        ranges: token ranges of each rank, in local order.
        ulysses_degree: number of neighbouring ranks that swap tokens for heads.
    """

    ranges: tuple[tuple[TokenRange, ...], ...]
    ulysses_degree: int = 1

    @cached_property
    def sizes(self) -> list[int]:
        """Number of tokens of each rank."""
        return [count_tokens(ranges) for ranges in self.ranges]

    @property
    def length(self) -> int:
        """Number of tokens of the full sequence."""
        return sum(self.sizes)

    @property
    def num_ring_groups(self) -> int:
        """Number of groups on the ring."""
        return len(self.ranges) // self.ulysses_degree

    @property
    def mode(self) -> str:
        """Sequence-parallel mode: "ulysses", "ring" or "ulysses+ring"."""
        if self.num_ring_groups == 1:
            return "ulysses"
        return "ring" if self.ulysses_degree == 1 else "ulysses+ring"

    @cached_property
    def is_contiguous(self) -> bool:
        """True if the tokens of the ranks, concatenated in rank order, are the sequence."""
        return len(merge_ranges(span for ranges in self.ranges for span in ranges)) <= 1

    def group_ranks(self, group: int) -> range:
        """Return the ranks of a ring group, as indices along sp."""
        return range(group * self.ulysses_degree, (group + 1) * self.ulysses_degree)

    def group_ranges(self, group: int) -> tuple[TokenRange, ...]:
        """Return the token ranges of a ring group, in the order of its ranks."""
        return self._group_ranges[group]

    @cached_property
    def _group_ranges(self) -> list[tuple[TokenRange, ...]]:
        return [
            merge_ranges(span for rank in self.group_ranks(g) for span in self.ranges[rank])
            for g in range(self.num_ring_groups)
        ]

    def local_shard(self, tensor: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """Return the part of `rank` from a tensor that has the full sequence along `dim`."""
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def restore_order(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Reorder the parts of all ranks, concatenated along `dim`, into the full sequence."""
        if self.is_contiguous:
            return tensor
        places, at = {}, 0
        for start, stop in (span for ranges in self.ranges for span in ranges):
            places[start, stop] = tensor.narrow(dim, at, stop - start)
            at += stop - start
        return torch.cat([places[span] for span in sorted(places)], dim)


@dataclass(frozen=True)
class SequenceShardPattern:
    """Rule that distributes sequences of any length over the ranks.

    Attributes:
        ranks: number of ranks along sp.
        ulysses_degree: number of neighbouring ranks that swap tokens for heads; a divisor of `ranks`.
        zigzag: True if the sequence is cut into twice as many parts as there are ring groups, and group i gets part i
            from the start and part i from the end.
    """

    ranks: int
    ulysses_degree: int
    zigzag: bool = False

    @property
    def num_ring_groups(self) -> int:
        """Number of groups on the ring."""
        return self.ranks // self.ulysses_degree

    def shard(self, length: int) -> SequenceSharding:
        """Return the distribution of `length` tokens. If equal parts are not possible, the first parts have one token
        more."""
        return _shard_sequence(self, length)


def make_sharding_from_sizes(sizes: Sequence[int], ulysses_degree: int) -> SequenceSharding:
    """Return the distribution of a sequence of which each rank i holds `sizes[i]` consecutive tokens."""
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return SequenceSharding(tuple(((end - size, end),) for size, end in zip(sizes, ends, strict=True)), ulysses_degree)


@lru_cache(maxsize=256)
def _shard_sequence(pattern: SequenceShardPattern, length: int) -> SequenceSharding:
    if not pattern.zigzag or pattern.num_ring_groups == 1:
        ranges = tuple((compute_shard_range(length, pattern.ranks, rank),) for rank in range(pattern.ranks))
        return SequenceSharding(ranges, pattern.ulysses_degree)
    parts = [
        compute_shard_range(length, 2 * pattern.num_ring_groups, part) for part in range(2 * pattern.num_ring_groups)
    ]
    found: list[tuple[TokenRange, ...]] = []
    for group in range(pattern.num_ring_groups):
        held = merge_ranges((parts[group], parts[-1 - group]))
        found += [
            select_range(held, compute_shard_range(count_tokens(held), pattern.ulysses_degree, rank))
            for rank in range(pattern.ulysses_degree)
        ]
    return SequenceSharding(tuple(found), pattern.ulysses_degree)


def count_tokens(ranges: Sequence[TokenRange]) -> int:
    """Return the total number of tokens in the ranges."""
    return sum(stop - start for start, stop in ranges)


def merge_ranges(ranges: object) -> tuple[TokenRange, ...]:
    """Merge adjacent ranges and keep the order; `((0, 0),)` if there are no tokens."""
    found: list[TokenRange] = []
    for start, stop in ranges:  # type: ignore[attr-defined]
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found) or ((0, 0),)


def select_range(ranges: Sequence[TokenRange], part: TokenRange) -> tuple[TokenRange, ...]:
    """Concatenate `ranges`, and return the ranges of the tokens at indices `[part[0], part[1])` of the result."""
    found, at = [], 0
    for start, stop in ranges:
        first, last = max(part[0] - at, 0), min(part[1] - at, stop - start)
        if first < last:
            found.append((start + first, start + last))
        at += stop - start
    return tuple(found) or ((0, 0),)
