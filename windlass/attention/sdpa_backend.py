"""Plain attention by `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.attention.attention_backend import AttentionBackend, HeadSlice
from windlass.attention.attention_mask import AttentionMask
from windlass.attention.backend_registry import register_backend
from windlass.attention.mask_pattern import BIDIRECTIONAL, CAUSAL
from windlass.base.errors import ModelError


class SdpaBackend(AttentionBackend):
    """Backend `"sdpa"`: torch's fused kernels, with a dense mask unless the mask is causal or hides nothing."""

    name = "sdpa"
    supported_arguments = frozenset({"is_causal"})
    computes_local_heads = True

    def make_mask(self, mask: AttentionMask) -> AttentionMask | torch.Tensor:
        """Return `mask` itself if a flag of torch's kernels expresses it, else the dense mask."""
        return mask if _needs_no_tensor(mask) else mask.to_dense()

    def attend(
        self,
        module: nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        *,
        scaling: float | None,
        dropout: float,
        heads: HeadSlice,
        **arguments: Any,
    ) -> torch.Tensor:
        """Compute attention with torch's kernels. `is_causal` applies to a mask of None; see `resolve_mask`."""
        tensor, causal = resolve_mask(module, query, mask, arguments.get("is_causal"))
        return nn.functional.scaled_dot_product_attention(
            query,
            repeat_kv_heads(key, query.shape[1]),
            repeat_kv_heads(value, query.shape[1]),
            attn_mask=tensor,
            dropout_p=dropout,
            is_causal=causal,
            scale=scaling,
        )


def resolve_mask(
    module: nn.Module | None, query: torch.Tensor, mask: Any, is_causal: bool | None
) -> tuple[torch.Tensor | None, bool]:
    """Return the dense mask (None: no mask tensor), and True if attention is causal.

    Args:
        mask: an `AttentionMask` that needs no dense tensor, a tensor, or None. None means the same as in transformers:
            causal if `is_causal` or, by default, `module.is_causal`, unless there is a single query.

    Raises:
        ModelError: the mask has another type.
    """
    if isinstance(mask, AttentionMask):
        return None, mask.pattern == CAUSAL and mask.q_length > 1
    if mask is not None:
        if not isinstance(mask, torch.Tensor):
            raise ModelError(
                f"attention got a mask of type {type(mask).__name__}; give it a tensor, an AttentionMask or None"
            )
        return mask, False
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return None, bool(causal) and query.shape[2] > 1


def repeat_kv_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the heads of keys or values, `[samples, key heads, tokens, features]`, to `heads` query heads.

    Raises:
        ModelError: `heads` is not a multiple of the key heads.
    """
    if tensor.shape[1] == heads:
        return tensor
    if tensor.shape[1] == 0 or heads % tensor.shape[1]:
        raise ModelError(
            f"{heads} query heads are not a multiple of {tensor.shape[1]} key heads; pass a number of key heads that "
            "divides the query heads"
        )
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _needs_no_tensor(mask: AttentionMask) -> bool:
    if mask.sequence_ids is not None or (mask.padding is not None and not bool((mask.padding != 0).all())):
        return False
    if mask.pattern == CAUSAL:
        aligned = isinstance(mask.q_offset, int) and mask.q_offset == mask.kv_offset
        return aligned and mask.q_length == mask.kv_length
    return mask.pattern == BIDIRECTIONAL


register_backend("sdpa", SdpaBackend)
