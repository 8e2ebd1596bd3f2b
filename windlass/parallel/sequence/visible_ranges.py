"""Padding and packed documents of a batch, as ranges of visible queries and keys.

No mask of all pairs is built: a sequence of 500,000 tokens has 250 billion pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from windlass.parallel.sequence.sequence_sharding import TokenRange


@dataclass(frozen=True)
class VisibleRange:
    """Queries, and the keys that they may attend to unless the causal or sliding-window mask (`MaskBand`) forbids it.

    Both are ranges of the full sequence.
    """

    queries: TokenRange
    keys: TokenRange


@dataclass(frozen=True)
class SampleMask:
    """Visible ranges of the samples `[start, stop)` of a batch."""

    start: int
    stop: int
    visible_ranges: tuple[VisibleRange, ...]


BatchMask = tuple[SampleMask, ...]
"""Visible ranges of all samples of a batch, in order."""


def make_full_mask(samples: int, length: int) -> BatchMask:
    """Return the mask of a batch without padding and packing."""
    return (SampleMask(0, samples, (VisibleRange((0, length), (0, length)),)),)


def make_document_mask(position_ids: torch.Tensor, samples: int) -> BatchMask:
    """Return the mask of packed documents, whose tokens attend only to their own document.

    A document begins where a position is not its predecessor plus one, as in transformers.

    Args:
        position_ids: `[samples, length]`, or `[1, length]` for all samples.
    """
    length = position_ids.shape[-1]
    views = []
    for begins in (position_ids.diff(dim=-1) != 1).cpu():
        ends = [0, *(begins.nonzero().flatten() + 1).tolist(), length]
        views.append(tuple(VisibleRange(span, span) for span in zip(ends, ends[1:], strict=False) if span[0] < span[1]))
    return _merge_samples(views if len(views) == samples else views * samples)


def make_padding_mask(attention_mask: torch.Tensor) -> BatchMask:
    """Return the mask in which each query attends to the keys where `attention_mask` (`[samples, length]`) is not 0."""
    length = attention_mask.shape[-1]
    real = (attention_mask != 0).to(torch.int8).cpu()
    edges = torch.nn.functional.pad(real, (1, 1)).diff(dim=-1)
    views = []
    for row in edges:
        runs = zip((row == 1).nonzero().flatten().tolist(), (row == -1).nonzero().flatten().tolist(), strict=True)
        views.append(tuple(VisibleRange((0, length), run) for run in runs))
    return _merge_samples(views)


def _merge_samples(views: list[tuple[VisibleRange, ...]]) -> BatchMask:
    """Merge neighbouring samples that have equal visible ranges."""
    found: list[SampleMask] = []
    for row, seen in enumerate(views):
        if found and found[-1].visible_ranges == seen:
            found[-1] = SampleMask(found[-1].start, row + 1, seen)
        else:
            found.append(SampleMask(row, row + 1, seen))
    return tuple(found)


def iterate_visible_rectangles(
    mask: BatchMask, queries: TokenRange, keys: TokenRange
) -> Iterator[tuple[TokenRange, TokenRange, TokenRange]]:
    """Yield samples, queries and keys of all visible ranges, intersected with the given queries and keys."""
    for rows in mask:
        for view in rows.visible_ranges:
            q = max(view.queries[0], queries[0]), min(view.queries[1], queries[1])
            k = max(view.keys[0], keys[0]), min(view.keys[1], keys[1])
            if q[0] < q[1] and k[0] < k[1]:
                yield (rows.start, rows.stop), q, k
