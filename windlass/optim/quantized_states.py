"""Resharding of 8-bit optimizer states: decode with the old blocks, encode with the new ones.

[Note: 8-bit states of another sharding] Each block of 256 elements has one scale. Blocks are counted from the start
of a span, a range of the state's elements that a rank holds. A checkpoint therefore stores the codes by element, and
separately the scales of each saved span. A loaded span reads the codes of its elements and the scales that encoded
them. A block of the loaded span that is also a block of the saved span is copied unchanged, codes and scale, so
training continues bit for bit with the same sharding. Values of all other blocks are decoded, and encoded again with
the scale of the new block. Both scales are powers of two, so the values are the same, except those far below the
largest value of the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from windlass.base.errors import CheckpointError
from windlass.kernels import reference
from windlass.kernels.update_tensors import SCALE_BLOCK, count_scales

_CHUNK_ELEMENTS = 1 << 18  # elements decoded at a time; a multiple of the block size
_ROUND_TO_NEAREST = 1 << 19  # the noise value with which quantize_blockwise rounds to nearest


@dataclass(frozen=True)
class BlockScales:
    """Scales of a span of a state.

    Args:
        start, stop: the span is the elements `[start, stop)` of the state.
        first_block: index, in the span, of the block to which `values[0]` belongs.
        values: fp32, one per block. Blocks that a load does not need may be missing at the start and at the end.
    """

    start: int
    stop: int
    first_block: int
    values: torch.Tensor


def blocks_between(start: int, stop: int, begin: int, end: int) -> tuple[int, int]:
    """Return the blocks `[first, last)` of the span `[start, stop)` that have elements in `[begin, end)`; possibly
    none.
    """
    begin, end = max(begin, start), min(end, stop)
    return ((begin - start) // SCALE_BLOCK, count_scales(end - start)) if begin < end else (0, 0)


def quantize_state(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> None:
    """Encode flat fp32 `values` `[n]`, rounded to nearest, into `codes` `[n]` and `scales` `[ceil(n / 256)]`."""
    for first in range(0, values.numel(), _CHUNK_ELEMENTS):
        part = values[first : first + _CHUNK_ELEMENTS]
        noise = torch.full(part.shape, _ROUND_TO_NEAREST, dtype=torch.int64)
        coded, scaled = reference.quantize_blockwise(part.to(torch.float32), noise, signed)
        codes[first : first + part.numel()].copy_(coded)
        scales[first // SCALE_BLOCK : first // SCALE_BLOCK + scaled.numel()].copy_(scaled)


def dequantize_state(
    codes: torch.Tensor, start: int, saved: list[BlockScales], signed: bool, out: torch.Tensor
) -> None:
    """Decode `codes` `[n]`, the elements `[start, start + n)` of a state, into `out` `[n]` of any floating dtype."""
    for first in range(0, codes.numel(), _CHUNK_ELEMENTS):
        part = codes[first : first + _CHUNK_ELEMENTS]
        out[first : first + part.numel()].copy_(_dequantize(part, start + first, saved, signed))


def requantize_state(
    codes: torch.Tensor, start: int, saved: list[BlockScales], signed: bool, out: torch.Tensor, scales: torch.Tensor
) -> None:
    """Decode `codes` as `dequantize_state` does, and encode the values again into the codes `out` `[n]` and `scales`
    `[ceil(n / 256)]`, with blocks counted from `start`.
    """
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
    """Check that the spans of a checkpoint cover the elements `[start, stop)` exactly once.

    Raises:
        CheckpointError: the spans overlap or leave elements out.
    """
    position = start
    for first, last in sorted(spans):
        if last <= start or first >= stop:
            continue
        if max(first, start) != position:
            break
        position = min(last, stop)
    if position != stop:
        raise CheckpointError(
            f"the checkpoint has no scales, or several, for element {position} of {state_name}; load another one"
        )


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
    """Return the blocks `[first, last)` of the span `[start, stop)` that are also blocks of the saved span; possibly
    none.
    """
    begin, end = max(start, saved.start), min(stop, saved.stop)
    if begin >= end or (start - saved.start) % SCALE_BLOCK:
        return 0, 0
    full = stop == saved.stop  # both spans end here, so a short last block is the same in both
    last = count_scales(end - start) if full else (end - start) // SCALE_BLOCK
    return (begin - start) // SCALE_BLOCK, max(last, (begin - start) // SCALE_BLOCK)
