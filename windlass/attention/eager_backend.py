"""Attention by matrix products that materialize the scores of all pairs, with soft caps, position biases and sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.attention.attention_backend import AttentionBackend, HeadSlice
from windlass.attention.attention_mask import AttentionMask
from windlass.attention.backend_registry import register_backend
from windlass.attention.sdpa_backend import repeat_kv_heads, resolve_mask


class EagerBackend(AttentionBackend):
    """Backend `"eager"`: the reference. Each tensor of scores has `samples * heads * queries * keys` elements.

    Subclasses override `bias_scores` for a bias that depends on heads and positions.
    """

    name = "eager"
    supported_arguments = frozenset({"is_causal", "softcap", "position_bias", "s_aux"})
    computes_local_heads = True

    def make_mask(self, mask: AttentionMask) -> torch.Tensor:
        """Return the dense mask."""
        return mask.to_dense()

    def bias_scores(self, scores: torch.Tensor, heads: HeadSlice) -> torch.Tensor:
        """Return `scores`, `[samples, heads, queries, keys]`, with the bias of `heads` added. By default there is
        no bias."""
        return scores

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
        """Compute attention; the softmax is in fp32 or better.

        Args:
            arguments: `softcap`, a number c: scores become `c * tanh(score / c)` before the mask (Gemma 2).
                `position_bias`, `[1 or samples, heads, queries, keys]`: added to the scores. `s_aux`, `[heads of the
                layer]`: one more score in each softmax, without a value (attention sinks of GPT-OSS). `is_causal`: see
                `resolve_mask`.
        """
        softcap, position_bias = arguments.get("softcap"), arguments.get("position_bias")
        key, value = repeat_kv_heads(key, query.shape[1]), repeat_kv_heads(value, query.shape[1])
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if position_bias is not None:
            scores = scores + position_bias
        scores = self.bias_scores(scores, heads)
        dense, causal = resolve_mask(module, query, mask, arguments.get("is_causal"))
        if causal:
            q, k = (torch.arange(length, device=query.device) for length in scores.shape[2:])
            dense = q[:, None] >= k
        if dense is not None:
            lowest = torch.finfo(scores.dtype).min  # not -inf: a row without visible keys must not become nan
            scores = torch.where(dense, scores, lowest) if dense.dtype == torch.bool else scores + dense
        wide = torch.promote_types(scores.dtype, torch.float32)
        sinks = arguments.get("s_aux")
        if sinks is not None:
            extra = sinks[heads.start : heads.stop].to(scores.dtype)[:, None, None]
            scores = torch.cat([scores, extra.expand(*scores.shape[:1], -1, scores.shape[2], 1)], dim=-1)
        weights = scores.softmax(dim=-1, dtype=wide).to(query.dtype)
        if sinks is not None:
            weights = weights[..., :-1]
        return nn.functional.dropout(weights, dropout) @ value


register_backend("eager", EagerBackend)
