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
from windlass.kernels.update_tensors import SCALE_BLOCK, count_scales

_CHUNK_ELEMENTS = 1 << 18  # elements decoded at a time, a whole number of blocks
_ROUND_TO_NEAREST = 1 << 19  # the noise with which `encode` rounds to nearest


@dataclass(frozen=True)
class BlockScales:
    """Scales of a span of a state.

    Args:
        start, stop: the elements of the span.
        first: which of its blocks `values` begins with.
        values: fp32, one a block; blocks that nobody asks for may be left out at either end.
    """

    start: int
    stop: int
    first_block: int
    values: torch.Tensor


def blocks_between(start: int, stop: int, begin: int, end: int) -> tuple[int, int]:
    """Which blocks of the span `[start, stop)` have elements in `[begin, end)`: `[first, last)`, maybe none."""
    begin, end = max(begin, start), min(end, stop)
    return ((begin - start) // SCALE_BLOCK, count_scales(end - start)) if begin < end else (0, 0)


def quantize_state(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:
    """Code flat fp32 `values` `[n]` to nearest into `codes` `[n]` and `scales` `[n / 256]`."""
    for first in range(0, values.numel(), _CHUNK_ELEMENTS):
        part = values[first : first + _CHUNK_ELEMENTS]
        noise = torch.full(part.shape, _ROUND_TO_NEAREST, dtype=torch.int64)
        coded, scaled = reference.quantize_blockwise(part.to(torch.float32), noise, signed)
        codes[first : first + part.numel()].copy_(coded)
        scales[first // SCALE_BLOCK : first // SCALE_BLOCK + scaled.numel()].copy_(scaled)


def dequantize_state(
    codes: torch.Tensor, start: int, saved: list[BlockScales], signed: bool, out: torch.Tensor
) -> None:
    """Decode `codes` `[n]`, elements `[start, start + n)` of a state, into `into` `[n]` of any floating dtype."""
    for first in range(0, codes.numel(), _CHUNK_ELEMENTS):
        part = codes[first : first + _CHUNK_ELEMENTS]
        out[first : first + part.numel()].copy_(_dequantize(part, start + first, saved, signed))


def requantize_state(
    codes: torch.Tensor, start: int, saved: list[BlockScales], signed: bool, out: torch.Tensor, scales: torch.Tensor
) -> None:
    """As `read`, but code again, into `into` `[n]` and `scales` `[n / 256]`, whose blocks count from `start`."""
    stop = start + codes.numel()
    for first in range(0, codes.numel(), _CHUNK_ELEMENTS):
        part = slice(first, min(first + _CHUNK_ELEMENTS, codes.numel()))
        blocks = slice(first // SCALE_BLOCK, count_scales(part.stop))
        quantize_state(_dequantize(codes[part], start + first, saved, signed), out[part], scales[blocks], signed)
    for one in saved:
        first, last = _aligned_blocks(start, stop, one)
        there = first + (start - one.start) // SCALE_BLOCK - one.first_block
        part = slice(first * SCALE_BLOCK, min(last * SCALE_BLOCK, stop - start))
        scales[first:last].copy_(one.values[there : there + last - first])
        out[part].copy_(codes[part])


def check_coverage(spans: Iterable[tuple[int, int]], start: int, stop: int, state_name: str) -> None:
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
        raise CheckpointError(f"the checkpoint has no scales for element {position} of {state_name}; load another one")


def _dequantize(codes: torch.Tensor, start: int, saved: list[BlockScales], signed: bool) -> torch.Tensor:
    stop, done = start + codes.numel(), 0
    values = torch.empty(codes.numel(), dtype=torch.float32)
    for one in saved:
        begin, end = max(start, one.start), min(stop, one.stop)
        if begin >= end:
            continue
        first, last = blocks_between(one.start, one.stop, begin, end)
        into_block = begin - one.start - first * SCALE_BLOCK
        padded = torch.nn.functional.pad(codes[begin - start : end - start], (into_block, 0))
        found = reference.dequantize_blockwise(
            padded, one.values[first - one.first_block : last - one.first_block], signed
        )
        values[begin - start : end - start] = found[into_block:]
        done += end - begin
    assert done == codes.numel(), f"scales were saved for {done} of {codes.numel()} elements"
    return values


def _aligned_blocks(start: int, stop: int, saved: BlockScales) -> tuple[int, int]:
    """Which blocks of the span `[start, stop)` are blocks of the saved one: `[first, last)`, maybe none."""
    begin, end = max(start, saved.start), min(stop, saved.stop)
    if begin >= end or (start - saved.start) % SCALE_BLOCK:
        return 0, 0
    whole = stop == saved.stop  # the last block of both may be a short one
    last = count_scales(end - start) if whole else (end - start) // SCALE_BLOCK
    return (begin - start) // SCALE_BLOCK, max(last, (begin - start) // SCALE_BLOCK)
