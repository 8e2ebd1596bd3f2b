"""Positions for layers that count tokens from the length of a cache.

[Note: counted positions] Some layers ignore `position_ids` and add `torch.arange(tokens)` to the length of the cache,
e.g. layers of Llama 4 without rotary embeddings, which scale queries by their positions. In a flat row of several
sequences, the sum counts tokens of the row, not of a sequence. So these layers get a stand-in for the cache, with a
tensor as length: the position of each token in its sequence minus its index in the row. The sum is then the position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from windlass.attention import get_active_backend
from windlass.inference.paged_backend import PagedAttention

_COUNTS_TOKENS = "get_seq_length(self.layer_idx)"
"""Expression in the forward of a layer that counts tokens from the length of its cache."""


class RowPositions:
    """Stand-in for a cache of keys and values: it has a length for each token of the row, and stores nothing.

    Args:
        positions: `[tokens]`, position of each token in its sequence.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return `[tokens]`: the position of each token minus its index in the row."""
        return self._positions - torch.arange(self._positions.shape[0], device=self._positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values unchanged: the attention backend stores them."""
        return key_states, value_states


def give_positions(model: nn.Module) -> Callable[[], None]:
    """Register hooks that pass the batch's positions to layers that count tokens from the length of a cache.

    Outside a paged step, and for a layer that gets a cache, the hooks do nothing.

    Returns:
        Function that removes the hooks from the layers.
    """
    handles = [
        module.register_forward_pre_hook(_pass_positions, with_kwargs=True) for module in _counting_layers(model)
    ]

    def restore() -> None:
        for handle in handles:
            handle.remove()

    return restore


def _pass_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    backend = get_active_backend()
    if isinstance(backend, PagedAttention) and kwargs.get("past_key_values") is None:
        kwargs = {**kwargs, "past_key_values": RowPositions(backend.positions)}
    return args, kwargs


def _counting_layers(model: nn.Module) -> Iterator[nn.Module]:
    counts: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        if not hasattr(module, "layer_idx"):
            continue
        if kind not in counts:
            counts[kind] = _COUNTS_TOKENS in _read_source(kind.forward)
        if counts[kind]:
            yield module


def _read_source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # a function without a source file
        return ""
