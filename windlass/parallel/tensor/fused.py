"""How queries, keys and values lie in a projection that makes all of them.

Sizes don't tell: the same matrix may hold all queries, then all keys, then all values, or take turns head by head. So
only modules that are known are cut; for others the user's table says it.
"""

from __future__ import annotations

from enum import Enum

from torch import nn

from windlass.parallel.tensor.linear_layers import Linear


class Layout(Enum):
    """The order of features in a fused projection."""

    CONCATENATED = "all queries, then all keys, then all values"
    BY_HEAD = "for each key head its queries, its key, its value"


_CONCATENATED = ("GPT2Attention", "MptAttention", "Phi3Attention", "Phi4MultimodalAttention", "DbrxAttention")
_BY_HEAD = ("BloomAttention", "GPTNeoXAttention", "PersimmonAttention")

GATE_AND_UP = ("gate_up_proj", "up_gate_proj", "gate_up", "gate_and_up_proj")
"""Layers of this name make a gate and what it multiplies, the one after the other, each of half the features."""


def layout_of_fused(holder: nn.Module) -> Layout | None:
    """How the fused projection of this attention module lies; None: that isn't known."""
    kinds = [kind.__name__ for kind in type(holder).__mro__]
    if "FalconAttention" in kinds:
        several = getattr(holder, "new_decoder_architecture", False) or not getattr(holder, "multi_query", False)
        return Layout.BY_HEAD if several else Layout.CONCATENATED
    if "GPTBigCodeAttention" in kinds:
        return Layout.CONCATENATED if getattr(holder, "multi_query", False) else Layout.BY_HEAD
    if any(kind in _CONCATENATED for kind in kinds):
        return Layout.CONCATENATED
    return Layout.BY_HEAD if any(kind in _BY_HEAD for kind in kinds) else None


def sections_of(query: int, key: int, layer: Linear) -> tuple[int, ...] | None:
    """Sizes of queries, keys and values that lie one after another; None where heads of one size don't make them."""
    size, rest = divmod(layer.outputs, query + 2 * key)
    return None if rest else (query * size, key * size, key * size)
