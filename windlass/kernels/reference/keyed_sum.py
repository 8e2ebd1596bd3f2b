"""Keyed sum of words: a hash of memory that can be computed in pieces, in any order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

_BLOCK = 4096  # elements that share a key factor; the other factor depends on the position in the block
_ROWS = 16  # blocks at a time: bounds the scratch memory at 512 KiB
_KEY_STEP = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads neighbouring positions


def keyed_sum(words: torch.Tensor, start: int, seed: int) -> torch.Tensor:
    """Compute the sum of `words[i] * key(start + i, seed)` modulo 2^64, where every key is odd.

    Args:
        words: `[n]` int8, int16, int32 or int64, on any device.
        start: position of the first word in the hashed memory.
        seed: seed of the keys, int64.

    Returns:
        int64 `[]` on the device of `words`.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    table = _key_table(words.device)
    scratch = torch.empty(min(words.numel(), _ROWS * _BLOCK), dtype=torch.int64, device=words.device)
    for first, last in _block_runs(start, start + words.numel()):
        part = scratch[: last - first].copy_(words[first - start : last - start])
        row, column = divmod(first, _BLOCK)
        if last - first >= _BLOCK:
            blocks = torch.arange(row, last // _BLOCK, device=words.device)
            total += (part.view(-1, _BLOCK).mul_(table).sum(1) * _odd_key(blocks * _to_int64(_KEY_STEP) + seed)).sum()
        else:
            block = torch.full((), row, device=words.device)
            inner = part.mul_(table[column : column + last - first]).sum()
            total += inner * _odd_key(block * _to_int64(_KEY_STEP) + seed)
    return total


def _block_runs(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """Split `[start, stop)` into runs of full blocks, of bounded length, and partial blocks at both ends."""
    while start < stop:
        last = min(stop, (start // _BLOCK + 1) * _BLOCK)
        if start % _BLOCK == 0 and stop - start >= _BLOCK:
            last = start + min((stop - start) // _BLOCK, _ROWS) * _BLOCK
        yield start, last
        start = last


@cache
def _key_table(device: torch.device) -> torch.Tensor:
    return _odd_key(torch.arange(1, _BLOCK + 1, device=device) * _to_int64(_KEY_STEP))


def _odd_key(values: torch.Tensor) -> torch.Tensor:
    """Return odd keys: the finalizer of splitmix64 (Steele et al. 2014) of int64 `values`, modulo 2^64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * _to_int64(factor)
    return (values ^ ((values >> 31) & ((1 << 33) - 1))) | 1


def _to_int64(value: int) -> int:
    """Return the int64 with the bits of a number in `[0, 2^64)`."""
    return value - (1 << 64) if value >> 63 else value
