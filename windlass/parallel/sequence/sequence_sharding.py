"""Which tokens of a sequence each rank along sp has: arithmetic alone.

[Note: places of tokens] A rank's tokens are one or two ranges of the sequence, in the order in which it has them.
Neighbouring ranks (`ulysses` of them) swap tokens for heads in attention, so that they hold the tokens of all of them
together, each for its own heads; such groups then stand on a ring and pass keys and values round. Of a causal sequence
cut into equal parts the last group would see all of it and the first only itself, so groups on a ring are balanced:
the sequence is cut into twice as many parts as there are groups, and each has one from either end (zig-zag, as in
Llama 3, arXiv 2407.21783, section 3.3.2). Ranks are told apart only here: all others ask a `Cut`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from windlass.parallel.placement import compute_shard_range

TokenRange = tuple[int, int]
"""`[start, stop)` of a sequence."""


@dataclass(frozen=True)
class SequenceSharding:
    """The places of all tokens of a sequence of `length` tokens.

    Attributes:
        ranges: of each rank.
        ulysses: how many neighbouring ranks swap tokens for heads.
    """

    ranges: tuple[tuple[TokenRange, ...], ...]
    ulysses_degree: int = 1

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each rank."""
        return [count_tokens(ranges) for ranges in self.ranges]

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.sizes)

    @property
    def num_ring_groups(self) -> int:
        """Groups that pass keys and values on."""
        return len(self.ranges) // self.ulysses_degree

    @property
    def mode(self) -> str:
        """Sequence-parallel mode: "ulysses", "ring" or "ulysses+ring"."""
        if self.num_ring_groups == 1:
            return "ulysses"
        return "ring" if self.ulysses_degree == 1 else "ulysses+ring"

    @cached_property
    def is_contiguous(self) -> bool:
        """Ranks' tokens laid end to end are the sequence."""
        return len(merge_ranges(span for ranges in self.ranges for span in ranges)) <= 1

    def group_ranks(self, group: int) -> range:
        """The ranks of a group of the ring."""
        return range(group * self.ulysses_degree, (group + 1) * self.ulysses_degree)

    def group_ranges(self, group: int) -> tuple[TokenRange, ...]:
        """The tokens that a group holds together, in the order of its ranks."""
        return self._group_ranges[group]

    @cached_property
    def _group_ranges(self) -> list[tuple[TokenRange, ...]]:
        return [
            merge_ranges(span for rank in self.group_ranks(g) for span in self.ranges[rank])
            for g in range(self.num_ring_groups)
        ]

    def local_shard(self, tensor: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """What `rank` has of `tensor`, which is of the whole sequence along `dim`."""
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def restore_order(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The whole sequence, of the parts of all ranks laid end to end along `dim`."""
        if self.is_contiguous:
            return tensor
        places, at = {}, 0
        for start, stop in (span for ranges in self.ranges for span in ranges):
            places[start, stop] = tensor.narrow(dim, at, stop - start)
            at += stop - start
        return torch.cat([places[span] for span in sorted(places)], dim)


@dataclass(frozen=True)
class SequenceShardPattern:
    """How sequences are cut over `ranks` ranks, whatever their length.

    Attributes:
        ulysses: how many neighbouring ranks swap tokens for heads; it divides `ranks`.
        balanced: groups on the ring have a part from either end of the sequence.
    """

    ranks: int
    ulysses_degree: int
    zigzag: bool = False

    @property
    def num_ring_groups(self) -> int:
        """Groups that pass keys and values on."""
        return self.ranks // self.ulysses_degree

    def shard(self, length: int) -> SequenceSharding:
        """A sequence of `length` tokens; where parts can't be equal, the first ones have one more."""
        return _shard_sequence(self, length)


def make_sharding_from_sizes(sizes: Sequence[int], ulysses_degree: int) -> SequenceSharding:
    """The cut of a sequence whose ranks have `sizes` tokens, one after the other."""
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
    """Tokens in all of them."""
    return sum(stop - start for start, stop in ranges)


def merge_ranges(ranges: object) -> tuple[TokenRange, ...]:
    """The same tokens in the same order, ranges that meet as one; `((0, 0),)` where there are none."""
    found: list[TokenRange] = []
    for start, stop in ranges:  # type: ignore[attr-defined]
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return tuple(found) or ((0, 0),)


def select_range(ranges: Sequence[TokenRange], part: TokenRange) -> tuple[TokenRange, ...]:
    """Of the tokens in `ranges` laid end to end those at `[part)`."""
    found, at = [], 0
    for start, stop in ranges:
        first, last = max(part[0] - at, 0), min(part[1] - at, stop - start)
        if first < last:
            found.append((start + first, start + last))
        at += stop - start
    return tuple(found) or ((0, 0),)
