"""The order in which samples are drawn, defined for all ranks at once, so that it survives another world size.

[Note: sample order]
There is one global stream of sample ids. A micro-batch of all ranks takes the next `world_size * micro_batch` of it,
and each rank its own part of those. The whole state is therefore one number, the samples consumed: whatever number of
ranks goes on from it, what remains is the rest of the stream. A counter per rank would not have this property.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from windlass.data.permutation import Permutation


class StreamSampler:
    """An endless stream: one permutation of the samples after the other, each a new epoch.

    No sample is left out of an epoch, and none is seen twice in it, on any rank.
    """

    def __init__(self, length: int, seed: int, consumed: int = 0) -> None:
        self.length, self.seed, self.consumed = length, seed, consumed
        self._permutation = Permutation(length, seed, consumed // length)
        self._epoch = consumed // length

    @property
    def epoch(self) -> int:
        return self.consumed // self.length

    def next_batch(self, micro_batch: int, rank: int, world_size: int) -> np.ndarray:
        """This rank's next sample ids, [micro_batch] int64; the stream moves on by the batches of all ranks."""
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
    """One epoch at a time, in the order of `torch.utils.data.DistributedSampler`, that can go on inside an epoch.

    Rank r takes the ids at r, r + world_size, ... of what remains of the epoch, which is first brought to a multiple of
    the world size: by repeating its beginning, or with `drop_last` by leaving out its end.
    """

    def __init__(
        self, length: int, rank: int, world_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        self.length, self.rank, self.world_size = length, rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.consumed = 0  # samples of this epoch that all ranks together have seen

    def __len__(self) -> int:
        """How many samples a whole epoch has for this rank."""
        return self._samples_per_rank(self.length)

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self.length)
        if self.shuffle:
            order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        remaining = order[self.consumed :]
        total = self._samples_per_rank(len(remaining)) * self.world_size
        if total > len(remaining):
            # The beginning of the epoch, not of the remainder: that is what fills an uninterrupted epoch, too.
            repeats = order.repeat(-(-total // self.length))
            remaining = torch.cat([remaining, repeats[: total - len(remaining)]])
        return iter(remaining[self.rank : total : self.world_size].tolist())

    def _samples_per_rank(self, samples: int) -> int:
        return samples // self.world_size if self.drop_last else -(-samples // self.world_size)

    def seek(self, epoch: int, consumed: int = 0) -> None:
        """The next iteration is of `epoch`, after the first `consumed` samples of it."""
        self.epoch, self.consumed = epoch, consumed
