"""Seeded permutation of any length in constant memory, equal on every machine and version."""

from __future__ import annotations

from typing import Any

import numpy as np

_Words = np.ndarray[Any, np.dtype[np.uint64]]
_ROUNDS = 6
_WORD = 2**64


class Permutation:
    """Bijection of `range(length)` that computes elements on demand.

    It is a Feistel network over the smallest power of four that contains the range. A result outside the range is
    permuted again until it falls inside ("cycle walking": Black and Rogaway 2002), which keeps the map one-to-one.
    numpy's shuffles need memory proportional to the length, and their streams may change between releases.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        if length < 1:
            raise ValueError(f"a permutation needs at least one element, not {length}")
        self.length = length
        self._half_bits = np.uint64(max((length - 1).bit_length() + 1, 2) // 2)
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        key = _splitmix64(np.array([seed % _WORD], dtype=np.uint64)) ^ np.uint64(epoch)
        self._keys = [_splitmix64(key + np.uint64(number + 1))[0] for number in range(_ROUNDS)]

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the elements at `positions` (`[n]`, each in `range(length)`), as `[n]` int64."""
        values = self._permute_once(positions.astype(np.uint64))
        while (outside := values >= self.length).any():
            values[outside] = self._permute_once(values[outside])
        return values.astype(np.int64)

    def _permute_once(self, values: _Words) -> _Words:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_splitmix64(right + key) & self._mask)
        return (left << self._half_bits) | right


def _splitmix64(values: _Words) -> _Words:
    """Apply the finalizer of splitmix64 (Steele et al. 2014) elementwise to uint64 values, modulo 2^64."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
