"""How queries, keys and values lie in a projection that makes all of them.

Sizes don't tell: the same matrix may hold all queries, then all keys, then all values, or take turns head by head. So
only modules that are known are cut; for others the user's table says it.
"""

from __future__ import annotations

from enum import Enum

from torch import nn

from windlass.parallel.tensor.linear_layers import LinearLayer


class FusedQkvLayout(Enum):
    """The order of features in a fused projection."""

    CONCATENATED = "all queries, then all keys, then all values"
    BY_HEAD = "for each key head its queries, its key, its value"


_CONCATENATED_CLASSES = ("GPT2Attention", "MptAttention", "Phi3Attention", "Phi4MultimodalAttention", "DbrxAttention")
_BY_HEAD_CLASSES = ("BloomAttention", "GPTNeoXAttention", "PersimmonAttention")

FUSED_GATE_UP_NAMES = ("gate_up_proj", "up_gate_proj", "gate_up", "gate_and_up_proj")
"""Layers of this name make a gate and what it multiplies, the one after the other, each of half the features."""


def find_fused_qkv_layout(module: nn.Module) -> FusedQkvLayout | None:
    """How the fused projection of this attention module lies; None: that isn't known."""
    kinds = [kind.__name__ for kind in type(module).__mro__]
    if "FalconAttention" in kinds:
        several = getattr(module, "new_decoder_architecture", False) or not getattr(module, "multi_query", False)
        return FusedQkvLayout.BY_HEAD if several else FusedQkvLayout.CONCATENATED
    if "GPTBigCodeAttention" in kinds:
        return FusedQkvLayout.CONCATENATED if getattr(module, "multi_query", False) else FusedQkvLayout.BY_HEAD
    if any(kind in _CONCATENATED_CLASSES for kind in kinds):
        return FusedQkvLayout.CONCATENATED
    return FusedQkvLayout.BY_HEAD if any(kind in _BY_HEAD_CLASSES for kind in kinds) else None


def compute_qkv_sections(query: int, key: int, layer: LinearLayer) -> tuple[int, ...] | None:
    """Sizes of queries, keys and values that lie one after another; None where heads of one size don't make them."""
    size, rest = divmod(layer.out_features, query + 2 * key)
    return None if rest else (query * size, key * size, key * size)
