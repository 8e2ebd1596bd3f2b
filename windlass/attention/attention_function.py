"""Attention function for user-defined modules, as a replacement for `F.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.attention.active_backend import BoundMask, get_active_backend, make_bound_mask
from windlass.attention.attention_backend import HeadSlice, compute_attention, get_layer_heads
from windlass.attention.attention_mask import AttentionMask
from windlass.attention.mask_pattern import BIDIRECTIONAL, CAUSAL
from windlass.attention.sdpa_backend import SdpaBackend
from windlass.base.errors import ModelError

_plain = SdpaBackend()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask | BoundMask | torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scaling: float | None = None,
    dropout: float = 0.0,
    module: nn.Module | None = None,
    heads: HeadSlice | None = None,
    **arguments: Any,
) -> torch.Tensor:
    """Compute attention with the active backend; with torch's fused kernels where none is active.

    Args:
        query: `[samples, heads, queries, features]`.
        key, value: `[samples, key heads, keys, features]`; the number of heads is a multiple of the number of key
            heads.
        mask: None for all keys, or for causal attention with `is_causal`; an `AttentionMask`; a mask that `bind_mask`
            made once for all layers; or a tensor as for `F.scaled_dot_product_attention`, if the backend supports it.
        scaling: factor of the scores; None means `features ** -0.5`.
        dropout: probability of dropping an attention weight; give 0 in eval mode.
        module: the calling layer, for backends with state per layer.
        heads: the heads of the layer that `query` holds, if not all; for backends in which a head's computation depends
            on its index.
        arguments: further arguments that the backend supports, e.g. `softcap`.

    Returns:
        `[samples, heads, queries, value features]`.

    Raises:
        ModelError: mask and `is_causal` are both given, the backend does not support an argument, or returns another
            shape.
    """
    if is_causal and mask is not None:
        raise ModelError(
            "attention got a mask and is_causal=True; put the causal order into the mask, or leave the mask out"
        )
    if mask is None:
        mask = AttentionMask(
            query.shape[0],
            query.shape[2],
            key.shape[2],
            CAUSAL if is_causal else BIDIRECTIONAL,
            device=query.device,
        )
    if isinstance(mask, AttentionMask):
        mask = bind_mask(mask)
    if isinstance(mask, BoundMask):
        backend, made = mask.backend, mask.mask
    else:
        backend, made = get_active_backend() or _plain, mask
    unsupported = [name for name in arguments if name not in backend.supported_arguments]
    if unsupported:
        raise ModelError(
            f'attention got {unsupported}, which the backend "{backend.name}" does not support; it supports '
            f"{sorted(backend.supported_arguments)}"
        )
    return compute_attention(
        backend,
        module,
        query,
        key,
        value,
        made,
        scaling=scaling,
        dropout=dropout,
        heads=heads or get_layer_heads(backend, module, query),
        **arguments,
    )


def bind_mask(mask: AttentionMask) -> BoundMask:
    """Make the mask of the active backend once, for several calls of `attention`.

    A layer that receives the mask as an argument can be checkpointed: the recomputation uses the same backend.

    Raises:
        ModelError: the backend cannot compute this pattern.
    """
    backend = get_active_backend()
    return BoundMask(_plain, _plain.make_mask(mask)) if backend is None else make_bound_mask(backend, mask)
