"""Attention weights that are dropped: the same ones however a sequence is cut.

[Note: dropped weights] Whether a weight is dropped is a hash of a seed, the sample, the head, and the places of query
and key in the whole sequence. So no mask is kept or sent, the backward and a forward that is computed again find what
was dropped, and results do not depend on which rank computes what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from windlass.parallel.sequence.attention_tiles import Tile

DROPOUT_CONFIG_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
"""What configurations of transformers call the probability."""

_MASK, _FACTOR = (1 << 32) - 1, 0x45D9F3B


def has_attention_dropout(model: Any) -> bool:
    """Whether a model's config says that attention weights are dropped."""
    text = model.config.get_text_config()
    return any(isinstance(value := getattr(text, key, 0.0), float) and value > 0 for key in DROPOUT_CONFIG_KEYS)


@dataclass(frozen=True)
class AttentionDropout:
    """Of one attention layer in one forward.

    Attributes:
        probability: of a weight to be dropped; the others are divided by one minus that (Srivastava et al. 2014).
        seed: of this layer and forward, in [0, 2^31).
        head: the number in the whole layer of the first head that is computed.
    """

    probability: float
    seed: int
    first_head: int = 0

    def weight_factors(self, heads: int, tile: Tile, device: torch.device) -> torch.Tensor:
        """What the weights of a tile are multiplied by, `[samples, heads, queries, keys]`: 0 or `1 / (1 - p)`."""
        rows = torch.arange(*tile.samples, device=device)
        numbers = torch.arange(self.first_head, self.first_head + heads, device=device)
        queries = torch.arange(tile.query_start, tile.query_start + tile.queries[1] - tile.queries[0], device=device)
        first = tile.query_start - tile.distance
        keys = torch.arange(first, first + tile.keys[1] - tile.keys[0], device=device)
        lines = _hash32(_hash32(_hash32(rows + self.seed)[:, None] ^ numbers)[:, :, None] ^ queries)  # one a query
        drawn = _hash32(lines[..., None] ^ _hash32(keys + (1 << 20)))
        kept = drawn >= round(self.probability * (_MASK + 1))
        return kept.float().div_(1 - self.probability) if self.probability < 1 else kept.float()


def combine_seeds(*numbers: int) -> int:
    """One seed of several numbers, in [0, 2^31)."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (2**31 - 1)
    return seed


def _hash32(values: torch.Tensor) -> torch.Tensor:
    """32 bits, each of which hangs on all 32 of `values` (int64; products stay below 2^63)."""
    values = values & _MASK
    for _ in range(2):
        values = ((values >> 16) ^ values).mul_(_FACTOR).bitwise_and_(_MASK)
    return (values >> 16) ^ values
