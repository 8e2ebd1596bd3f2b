"""Samplers whose order is defined for all ranks together, so that a run can resume on another number of ranks.

[Note: sample order]
There is one global stream of sample ids. A micro-batch of all ranks takes the next `world_size * micro_batch` ids, and
each rank its own part of them. So the state is one number, the count of consumed samples: any number of ranks can
continue with the rest of the stream. A counter per rank would not allow that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_Words = np.ndarray[Any, np.dtype[np.uint64]]
_ROUNDS = 6
_WORD = 2**64


class Permutation:
    """Bijection of `range(length)` that computes elements on demand.

    It is a Feistel network over the smallest power of four that contains the range. A result outside the range is
    permuted again until it falls inside ("cycle walking": Black and Rogaway 2002), which keeps the map one-to-one.
    numpy's shuffles need memory proportional to the length, and their streams may change between releases.

    Raises:
        ValueError: `length` is below 1.
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


class StreamSampler:
    """Endless stream of permutations of the samples, one for each epoch.

    Over all ranks, every sample occurs exactly once in an epoch.
    """

    def __init__(self, length: int, seed: int, consumed: int = 0) -> None:
        self.length, self.seed, self.consumed = length, seed, consumed
        self._permutation = Permutation(length, seed, consumed // length)
        self._epoch = consumed // length

    @property
    def epoch(self) -> int:
        return self.consumed // self.length

    def next_batch(self, micro_batch: int, rank: int, world_size: int) -> np.ndarray:
        """Return this rank's next sample ids, `[micro_batch]` int64, and advance the stream by the batches of all
        ranks.
        """
        positions = self.consumed + rank * micro_batch + np.arange(micro_batch, dtype=np.int64)
        self.consumed += micro_batch * world_size
        samples = np.empty(micro_batch, dtype=np.int64)
        epochs = positions // self.length
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._permutation_of(int(epoch))(positions[here] % self.length)
        return samples

    def _permutation_of(self, epoch: int) -> Permutation:
        if epoch != self._epoch:
            self._permutation, self._epoch = Permutation(self.length, self.seed, epoch), epoch
        return self._permutation


class EpochSampler:
    """Sampler of one epoch at a time in the order of `torch.utils.data.DistributedSampler`, resumable inside an epoch.

    Rank r takes the ids at positions r, r + world_size, ... among those not yet consumed in the epoch. Their number is
    first made a multiple of the world size, by repeating ids from the beginning of the epoch, or with `drop_last` by
    dropping the last ids.
    """

    def __init__(
        self, length: int, rank: int, world_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.consumed = 0  # samples of this epoch that all ranks together have consumed

    def __len__(self) -> int:
        """Return the number of this rank's samples in a full epoch."""
        return self._samples_per_rank(self.length)

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.length)
        if self.shuffle:
            order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        remaining = order[self.consumed :]
        total = self._samples_per_rank(len(remaining)) * self.world_size
        if total > len(remaining):
            # Repeat ids from the beginning of the epoch, not of the remaining ids, as an uninterrupted epoch does.
            repeats = order.repeat(-(-total // self.length))
            remaining = torch.cat([remaining, repeats[: total - len(remaining)]])
        return iter(remaining[self.rank : total : self.world_size].tolist())

    def _samples_per_rank(self, samples: int) -> int:
        return samples // self.world_size if self.drop_last else -(-samples // self.world_size)

    def seek(self, epoch: int, consumed: int = 0) -> None:
        """Make the next iteration start in `epoch`, after its first `consumed` samples."""
        self.epoch, self.consumed = epoch, consumed
