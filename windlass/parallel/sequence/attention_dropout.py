"""Attention dropout that does not depend on the sharding of the sequence.

[Note: dropped weights] A hash of the seed, the sample, the head, and the positions of query and key in the full
sequence decides if a weight is dropped. So no mask is saved or sent, the backward and a recomputed forward drop the
same weights, and the result does not depend on the rank that computes a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from windlass.parallel.sequence.attention_tiles import Tile

DROPOUT_CONFIG_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
"""Names of the dropout probability in configurations of transformers."""

_MASK, _FACTOR = (1 << 32) - 1, 0x45D9F3B


def has_attention_dropout(model: Any) -> bool:
    """Return True if the config of a model has a dropout probability of attention weights above 0."""
    text = model.config.get_text_config()
    return any(isinstance(value := getattr(text, key, 0.0), float) and value > 0 for key in DROPOUT_CONFIG_KEYS)


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of one attention layer in one forward.

    Attributes:
        probability: probability `p` of dropping a weight; kept weights are divided by `1 - p` (Srivastava et al. 2014).
        seed: seed of this layer and forward, in [0, 2^31).
        first_head: number, among all heads of the layer, of the first head that this rank computes.
    """

    probability: float
    seed: int
    first_head: int = 0

    def weight_factors(self, heads: int, tile: Tile, device: torch.device) -> torch.Tensor:
        """Return the factors of a tile's weights, `[samples, heads, queries, keys]`: 0 or `1 / (1 - p)`."""
        rows = torch.arange(*tile.samples, device=device)
        numbers = torch.arange(self.first_head, self.first_head + heads, device=device)
        queries = torch.arange(tile.query_start, tile.query_start + tile.queries[1] - tile.queries[0], device=device)
        first = tile.query_start - tile.distance
        keys = torch.arange(first, first + tile.keys[1] - tile.keys[0], device=device)
        # One hash for each sample, head and query. The next line combines it with each key.
        lines = _hash32(_hash32(_hash32(rows + self.seed)[:, None] ^ numbers)[:, :, None] ^ queries)
        drawn = _hash32(lines[..., None] ^ _hash32(keys + (1 << 20)))
        kept = drawn >= round(self.probability * (_MASK + 1))
        return kept.float().div_(1 - self.probability) if self.probability < 1 else kept.float()


def combine_seeds(*numbers: int) -> int:
    """Combine numbers into one seed in [0, 2^31)."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (2**31 - 1)
    return seed


def _hash32(values: torch.Tensor) -> torch.Tensor:
    """Mix the low 32 bits of `values` (int64), so that each result bit depends on all; products stay below 2^63."""
    values = values & _MASK
    for _ in range(2):
        values = ((values >> 16) ^ values).mul_(_FACTOR).bitwise_and_(_MASK)
    return (values >> 16) ^ values
