"""Layout of queries, keys and values in a fused projection.

The layout does not follow from the sizes: the same matrix may hold all queries, then all keys, then all values, or
alternate head by head. Only known modules are therefore sharded automatically; others need an entry in the user's
table of layers to shard.
"""

from __future__ import annotations

from enum import Enum

from torch import nn

from windlass.parallel.tensor.linear_layers import LinearLayer


class FusedQkvLayout(Enum):
    """Order of features in a fused projection."""

    CONCATENATED = "all queries, then all keys, then all values"
    BY_HEAD = "for each key head its queries, its key, its value"


_CONCATENATED_CLASSES = ("GPT2Attention", "MptAttention", "Phi3Attention", "Phi4MultimodalAttention", "DbrxAttention")
_BY_HEAD_CLASSES = ("BloomAttention", "GPTNeoXAttention", "PersimmonAttention")

FUSED_GATE_UP_NAMES = ("gate_up_proj", "up_gate_proj", "gate_up", "gate_and_up_proj")
"""Layers with these names compute the gate and the features that it multiplies, one half of the output each."""


def find_fused_qkv_layout(module: nn.Module) -> FusedQkvLayout | None:
    """Return the layout of this attention module's fused projection, or None if it is unknown."""
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
    """Return the sizes of the consecutive queries, keys and values, or None if they do not divide into heads of one
    size.
    """
    size, rest = divmod(layer.out_features, query + 2 * key)
    return None if rest else (query * size, key * size, key * size)
