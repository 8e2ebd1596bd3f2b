"""What of a batch's sequences a rank has in one forward, and the forward that runs now."""

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
    """This rank's share of the sequences of one batch. It holds no tensors, and is not looked into by who searches
    arguments for some, so that it may go wherever a mask goes.

    Args:
        cut: which tokens of the sequences each rank has.
        sight: which tokens see which, but for causal order and windows.
        axis: sp.
        length: tokens of the sequences as they came; they may have been padded.
        whole: the batch was whole and is cut here; else it came as this rank's part.

    Attributes:
        seed: of what this forward drops, the same along sp; None: nothing was drawn.
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
        """Tokens of each sequence that this rank has."""
        return self.sharding.sizes[self.axis.index]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole sequences along dimension 1, of all ranks' parts. Collective; gradients of all ranks add up."""
        return self.sharding.restore_order(all_gather(tensor, self.axis, 1, self.sharding.sizes))[:, : self.full_length]

    @property
    def num_samples(self) -> int:
        """Sequences in the batch."""
        return self.mask[-1].stop if self.mask else 0


_current_shard: ContextVar[SequenceShard | None] = ContextVar("windlass_sequence_share", default=None)


def get_current_shard() -> SequenceShard | None:
    """The share of the forward that runs in this thread; None where none runs, or not on a part of a sequence."""
    return _current_shard.get()


@contextmanager
def set_current_shard(shard: SequenceShard | None) -> Iterator[None]:
    """Inside, masks are made for this share."""
    token = _current_shard.set(shard)
    try:
        yield
    finally:
        _current_shard.reset(token)
