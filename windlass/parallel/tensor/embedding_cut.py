"""An embedding of which each rank has some tokens (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.comm.axis import Axis
from windlass.parallel.exchanges import leave
from windlass.parallel.tensor.plan import Cut


def adapt_embedding(module: nn.Embedding, cut: Cut, axis: Axis) -> None:
    """Have an embedding whose weight is cut look up the tokens of this rank, and add up what all ranks found."""
    ((start, stop),) = cut.shares[axis.index]
    module.num_embeddings = stop - start
    if module.padding_idx is not None:
        module.padding_idx = module.padding_idx - start if start <= module.padding_idx < stop else None
    lookup = Lookup(axis, start, stop, cut.size)
    module.register_forward_pre_hook(lookup.before)
    module.register_forward_hook(lookup.after)


class Lookup:
    """Before and after the forward of an embedding that has the tokens `[start, stop)` of `size`.

    Other tokens are looked up in its first row, and their vectors emptied; so their gradient is empty too.
    """

    def __init__(self, axis: Axis, start: int, stop: int, size: int) -> None:
        self._axis, self._start, self._stop, self._size = axis, start, stop, size
        self._elsewhere: torch.Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens = args[0]
        torch._assert_async(((tokens >= 0) & (tokens < self._size)).all(), "a token lies outside of the vocabulary")
        elsewhere = (tokens < self._start) | (tokens >= self._stop)
        self._elsewhere = elsewhere
        return (tokens - self._start).masked_fill(elsewhere, 0), *args[1:]

    def after(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        elsewhere, self._elsewhere = self._elsewhere, None
        assert elsewhere is not None
        return leave(output.masked_fill(elsewhere.unsqueeze(-1), 0), self._axis)
