"""Patterns of attention masks: bands around the diagonal, chunks, and predicates.

A pattern depends on positions alone. Padding and packed documents are separate fields of an `AttentionMask`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MaskBand:
    """Band around the diagonal: a query attends to keys that are `min_distance` to `max_distance` positions before it.

    None means unbounded. Causal: `(0, None)`. Causal sliding window of w keys: `(0, w - 1)`. Bidirectional: `(None,
    None)`.
    """

    min_distance: int | None
    max_distance: int | None

    def allows(self, distance: torch.Tensor) -> torch.Tensor:
        """Return a bool tensor of the shape of `distance` (query position minus key position): True if visible."""
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.min_distance is not None:
            seen &= distance >= self.min_distance
        if self.max_distance is not None:
            seen &= distance <= self.max_distance
        return seen

    def visible(self, samples: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return a bool tensor, True where a query attends to a key. The index tensors broadcast against each other."""
        return self.allows(queries - keys)

    def intersect(self, other: MaskBand) -> MaskBand:
        """Return the band of the pairs that both bands allow."""
        lower = [one.min_distance for one in (self, other) if one.min_distance is not None]
        upper = [one.max_distance for one in (self, other) if one.max_distance is not None]
        return MaskBand(max(lower, default=None), min(upper, default=None))


CAUSAL = MaskBand(0, None)
BIDIRECTIONAL = MaskBand(None, None)


@dataclass(frozen=True, eq=False)
class ChunkedMask:
    """Chunked attention, as in Llama 4: tokens attend to tokens of their own chunk, as far as `band` allows.

    Attributes:
        chunk_size: tokens of a chunk.
        left_padding: `[samples]`, number of padding tokens before the first chunk; None means 0.
        band: the pairs that are allowed inside a chunk.
    """

    chunk_size: int
    left_padding: torch.Tensor | None = None
    band: MaskBand = CAUSAL

    def visible(self, samples: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return a bool tensor, True where a query attends to a key. The index tensors broadcast against each other."""
        first = 0 if self.left_padding is None else self.left_padding[samples]
        same_chunk = (queries - first) // self.chunk_size == (keys - first) // self.chunk_size
        return same_chunk & self.band.allows(queries - keys)


@dataclass(frozen=True, eq=False)
class MaskPredicate:
    """Predicate `function(sample, head, query, key)` of positions, for masks that are neither bands nor chunks.

    Attributes:
        function: takes index tensors that broadcast against each other, and returns a bool tensor.
        needs_vmap: `function` takes scalar tensors only, as custom mask functions of transformers do.
    """

    function: Callable[..., torch.Tensor]
    needs_vmap: bool = False


MaskPattern = MaskBand | ChunkedMask | MaskPredicate
