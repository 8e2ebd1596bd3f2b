"""What of a batch's sequences a rank has in one forward, and the forward that runs now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from windlass.comm.axis import Axis
from windlass.parallel.exchanges import gather
from windlass.parallel.sequence.cut import Cut
from windlass.parallel.sequence.sight import Sight


class Share:
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

    __slots__ = ("axis", "cut", "length", "seed", "sight", "whole")

    def __init__(self, cut: Cut, sight: Sight, axis: Axis, *, length: int, whole: bool) -> None:
        self.cut, self.sight, self.axis, self.length, self.whole = cut, sight, axis, length, whole
        self.seed: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of each sequence that this rank has."""
        return self.cut.sizes[self.axis.index]

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole sequences along dimension 1, of all ranks' parts. Collective; gradients of all ranks add up."""
        return self.cut.restore(gather(tensor, self.axis, 1, self.cut.sizes))[:, : self.length]

    @property
    def samples(self) -> int:
        """Sequences in the batch."""
        return self.sight[-1].stop if self.sight else 0


_now: ContextVar[Share | None] = ContextVar("windlass_sequence_share", default=None)


def current_share() -> Share | None:
    """The share of the forward that runs in this thread; None where none runs, or not on a part of a sequence."""
    return _now.get()


@contextmanager
def sharing(share: Share | None) -> Iterator[None]:
    """Inside, masks are made for this share."""
    token = _now.set(share)
    try:
        yield
    finally:
        _now.reset(token)
