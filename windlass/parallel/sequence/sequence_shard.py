"""Shard of the sequences of one batch, and the shard of the running forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import all_gather
from windlass.parallel.sequence.sequence_sharding import SequenceSharding
from windlass.parallel.sequence.visible_ranges import BatchMask


class SequenceShard:
    """This rank's part of the sequences of one batch.

    It holds no tensors and has no `__dict__`, so that searches for tensors in arguments do not descend into it. So a
    mask may refer to a shard.

    Args:
        sharding: tokens of each rank.
        mask: padding and packed documents of the batch.
        axis: the mesh axis sp.
        full_length: number of tokens of each sequence as the caller passed it, without padding added for sharding.
        gathers_outputs: True if the model's outputs are all-gathered, by default for a batch of full sequences.

    Attributes:
        dropout_seed: seed of the attention dropout of this forward, equal along sp; None: no dropout.
    """

    __slots__ = ("axis", "dropout_seed", "full_length", "gathers_outputs", "mask", "sharding")

    def __init__(
        self,
        sharding: SequenceSharding,
        mask: BatchMask,
        axis: MeshAxis,
        *,
        full_length: int,
        gathers_outputs: bool,
    ) -> None:
        self.sharding, self.mask, self.axis, self.full_length, self.gathers_outputs = (
            sharding,
            mask,
            axis,
            full_length,
            gathers_outputs,
        )
        self.dropout_seed: int | None = None

    @property
    def local_tokens(self) -> int:
        """Number of tokens of each sequence on this rank."""
        return self.sharding.sizes[self.axis.index]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-gather full sequences along dimension 1. Collective; the backward sums the gradients of all ranks."""
        return self.sharding.restore_order(all_gather(tensor, self.axis, 1, self.sharding.sizes))[:, : self.full_length]

    @property
    def num_samples(self) -> int:
        """Number of sequences in the batch."""
        return self.mask[-1].stop if self.mask else 0


_current_shard: ContextVar[SequenceShard | None] = ContextVar("windlass_sequence_shard", default=None)


def get_current_shard() -> SequenceShard | None:
    """Return the shard of the forward that runs in this thread; None if no forward on sharded sequences runs."""
    return _current_shard.get()


@contextmanager
def set_current_shard(shard: SequenceShard | None) -> Iterator[None]:
    """Make a shard current inside the `with` block. `use_shard` activates its attention backend as well."""
    token = _current_shard.set(shard)
    try:
        yield
    finally:
        _current_shard.reset(token)
