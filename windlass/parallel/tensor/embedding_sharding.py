"""Embedding sharded along the vocabulary (Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import reduce_from_parallel_region
from windlass.parallel.hidden_states import get_input
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard


def shard_embedding(module: nn.Embedding, shard: ModuleShard, axis: MeshAxis) -> None:
    """Hook an embedding with a sharded weight so that it looks up this rank's tokens, and all-reduces the result."""
    ((start, stop),) = shard.rank_ranges[axis.index]
    module.num_embeddings = stop - start
    if module.padding_idx is not None:
        module.padding_idx = module.padding_idx - start if start <= module.padding_idx < stop else None
    lookup = VocabShardLookup(axis, start, stop, shard.sharded_size)
    module.register_forward_pre_hook(lookup.pre_forward)
    module.register_forward_hook(lookup.post_forward)


class VocabShardLookup:
    """Hooks around the forward of an embedding that holds the tokens `[start, stop)` of `size`.

    Other tokens are looked up in the first row and their vectors are set to zero, so their gradient is zero too.
    """

    def __init__(self, axis: MeshAxis, start: int, stop: int, size: int) -> None:
        self._axis, self._start, self._stop, self._size = axis, start, stop, size
        self._outside_shard: torch.Tensor | None = None

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens = get_input(module, args)
        torch._assert_async(
            ((tokens >= 0) & (tokens < self._size)).all(), "a token is outside the vocabulary; check the tokenizer"
        )
        elsewhere = (tokens < self._start) | (tokens >= self._stop)
        self._outside_shard = elsewhere
        return (tokens - self._start).masked_fill(elsewhere, 0), *args[1:]

    def post_forward(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        elsewhere, self._outside_shard = self._outside_shard, None
        assert elsewhere is not None
        return reduce_from_parallel_region(output.masked_fill(elsewhere.unsqueeze(-1), 0), self._axis)
