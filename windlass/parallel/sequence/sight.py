"""Which tokens may see which: packed documents, padding, causal order and sliding windows, as ranges of a sequence.

No mask of all pairs is built anywhere: a sequence of 500,000 tokens has 250 billion of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from windlass.parallel.sequence.cut import Span


@dataclass(frozen=True)
class Band:
    """Queries see keys that are `lowest` to `highest` places before them; None: as far as there are any.

    Causal: `(0, None)`; a causal window of w keys: `(0, w - 1)`; both directions: `(None, None)`.
    """

    lowest: int | None
    highest: int | None

    def allows(self, distance: torch.Tensor) -> torch.Tensor:
        """For distances from key to query, whether the query sees the key."""
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.lowest is not None:
            seen &= distance >= self.lowest
        if self.highest is not None:
            seen &= distance <= self.highest
        return seen


CAUSAL = Band(0, None)
BOTH_WAYS = Band(None, None)


@dataclass(frozen=True)
class View:
    """These queries see these keys, as far as the band lets them; both are ranges of the whole sequence."""

    queries: Span
    keys: Span


@dataclass(frozen=True)
class Rows:
    """Samples `[start, stop)` of a batch, which have the same views."""

    start: int
    stop: int
    views: tuple[View, ...]


Sight = tuple[Rows, ...]
"""What a whole batch sees: all its samples, in order."""


def everything(samples: int, length: int) -> Sight:
    """Every token is seen."""
    return (Rows(0, samples, (View((0, length), (0, length)),)),)


def documents(position_ids: torch.Tensor, samples: int) -> Sight:
    """Packed documents, each of which sees itself alone: one begins where a position is not the one before plus one.

    Args:
        position_ids: `[samples, length]`, or `[1, length]` for all of them.
    """
    length = position_ids.shape[-1]
    views = []
    for begins in (position_ids.diff(dim=-1) != 1).cpu():
        ends = [0, *(begins.nonzero().flatten() + 1).tolist(), length]
        views.append(tuple(View(span, span) for span in zip(ends, ends[1:], strict=False) if span[0] < span[1]))
    return _grouped(views if len(views) == samples else views * samples)


def unpadded(attention_mask: torch.Tensor) -> Sight:
    """Every token sees the keys where `attention_mask` `[samples, length]` is not zero."""
    length = attention_mask.shape[-1]
    real = (attention_mask != 0).to(torch.int8).cpu()
    edges = torch.nn.functional.pad(real, (1, 1)).diff(dim=-1)
    views = []
    for row in edges:
        runs = zip((row == 1).nonzero().flatten().tolist(), (row == -1).nonzero().flatten().tolist(), strict=True)
        views.append(tuple(View((0, length), run) for run in runs))
    return _grouped(views)


def _grouped(views: list[tuple[View, ...]]) -> Sight:
    """Neighbouring samples that see the same, together."""
    found: list[Rows] = []
    for row, seen in enumerate(views):
        if found and found[-1].views == seen:
            found[-1] = Rows(found[-1].start, row + 1, seen)
        else:
            found.append(Rows(row, row + 1, seen))
    return tuple(found)


def rectangles(sight: Sight, queries: Span, keys: Span) -> Iterator[tuple[Span, Span, Span]]:
    """Samples, queries and keys of all views, as far as they lie in these queries and keys."""
    for rows in sight:
        for view in rows.views:
            q = max(view.queries[0], queries[0]), min(view.queries[1], queries[1])
            k = max(view.keys[0], keys[0]), min(view.keys[1], keys[1])
            if q[0] < q[1] and k[0] < k[1]:
                yield (rows.start, rows.stop), q, k
