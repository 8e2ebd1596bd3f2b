"""States in 8 bits that come to be cut elsewhere: decoded from the old blocks, coded in the new ones.

[Note: codes that are cut elsewhere] Blocks of 256 elements count from where a span starts, so a checkpoint keeps codes
by element, and beside them the scales of each span as it was saved. A span that is loaded gets its own codes and
looks up the scales that they were coded under. Where a block of it is a block that was saved, codes and scale are
taken as they are, so training goes on bit by bit in the same cut. Elsewhere values are decoded and coded again under
the new block's scale, a power of two as the old one: the same values, but for those far below the largest of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from windlass.base.errors import CheckpointError
from windlass.kernels import reference
from windlass.kernels.piece import BLOCK, scales_of

_AT_ONCE = 1 << 18  # elements decoded at a time, a whole number of blocks
_NEAREST = 1 << 19  # the noise with which `encode` rounds to nearest


@dataclass(frozen=True)
class Scales:
    """Scales of a span of a state.

    Args:
        start, stop: the elements of the span.
        first: which of its blocks `values` begins with.
        values: fp32, one a block; blocks that nobody asks for may be left out at either end.
    """

    start: int
    stop: int
    first: int
    values: torch.Tensor


def blocks_between(start: int, stop: int, begin: int, end: int) -> tuple[int, int]:
    """Which blocks of the span `[start, stop)` have elements in `[begin, end)`: `[first, last)`, maybe none."""
    begin, end = max(begin, start), min(end, stop)
    return ((begin - start) // BLOCK, scales_of(end - start)) if begin < end else (0, 0)


def write(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:
    """Code flat fp32 `values` `[n]` to nearest into `codes` `[n]` and `scales` `[n / 256]`."""
    for first in range(0, values.numel(), _AT_ONCE):
        part = values[first : first + _AT_ONCE]
        noise = torch.full(part.shape, _NEAREST, dtype=torch.int64)
        coded, scaled = reference.encode(part.to(torch.float32), noise, signed)
        codes[first : first + part.numel()].copy_(coded)
        scales[first // BLOCK : first // BLOCK + scaled.numel()].copy_(scaled)


def read(codes: torch.Tensor, start: int, saved: list[Scales], signed: bool, into: torch.Tensor) -> None:
    """Decode `codes` `[n]`, elements `[start, start + n)` of a state, into `into` `[n]` of any floating dtype."""
    for first in range(0, codes.numel(), _AT_ONCE):
        part = codes[first : first + _AT_ONCE]
        into[first : first + part.numel()].copy_(_decoded(part, start + first, saved, signed))


def recode(
    codes: torch.Tensor, start: int, saved: list[Scales], signed: bool, into: torch.Tensor, scales: torch.Tensor
) -> None:
    """As `read`, but code again, into `into` `[n]` and `scales` `[n / 256]`, whose blocks count from `start`."""
    stop = start + codes.numel()
    for first in range(0, codes.numel(), _AT_ONCE):
        part = slice(first, min(first + _AT_ONCE, codes.numel()))
        blocks = slice(first // BLOCK, scales_of(part.stop))
        write(_decoded(codes[part], start + first, saved, signed), into[part], scales[blocks], signed)
    for one in saved:
        first, last = _same_blocks(start, stop, one)
        there = first + (start - one.start) // BLOCK - one.first
        part = slice(first * BLOCK, min(last * BLOCK, stop - start))
        scales[first:last].copy_(one.values[there : there + last - first])
        into[part].copy_(codes[part])


def require_covered(spans: Iterable[tuple[int, int]], start: int, stop: int, what: str) -> None:
    """Check that spans, as a checkpoint says them, cover elements `[start, stop)` once. Raises CheckpointError where
    they do not."""
    position = start
    for first, last in sorted(spans):
        if last <= start or first >= stop:
            continue
        if max(first, start) != position:
            break
        position = min(last, stop)
    if position != stop:
        raise CheckpointError(f"the checkpoint has no scales for element {position} of {what}; load another one")


def _decoded(codes: torch.Tensor, start: int, saved: list[Scales], signed: bool) -> torch.Tensor:
    stop, done = start + codes.numel(), 0
    values = torch.empty(codes.numel(), dtype=torch.float32)
    for one in saved:
        begin, end = max(start, one.start), min(stop, one.stop)
        if begin >= end:
            continue
        first, last = blocks_between(one.start, one.stop, begin, end)
        into_block = begin - one.start - first * BLOCK
        padded = torch.nn.functional.pad(codes[begin - start : end - start], (into_block, 0))
        found = reference.decode(padded, one.values[first - one.first : last - one.first], signed)
        values[begin - start : end - start] = found[into_block:]
        done += end - begin
    assert done == codes.numel(), f"scales were saved for {done} of {codes.numel()} elements"
    return values


def _same_blocks(start: int, stop: int, saved: Scales) -> tuple[int, int]:
    """Which blocks of the span `[start, stop)` are blocks of the saved one: `[first, last)`, maybe none."""
    begin, end = max(start, saved.start), min(stop, saved.stop)
    if begin >= end or (start - saved.start) % BLOCK:
        return 0, 0
    whole = stop == saved.stop  # the last block of both may be a short one
    last = scales_of(end - start) if whole else (end - start) // BLOCK
    return (begin - start) // BLOCK, max(last, (begin - start) // BLOCK)
