"""Tiles of attention: rectangles of queries and keys that contain visible pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from windlass.attention.mask_pattern import MaskBand
from windlass.parallel.sequence.sequence_sharding import TokenRange
from windlass.parallel.sequence.visible_ranges import BatchMask, iterate_visible_rectangles

TileKind = Literal["full", "causal", "band"]
"""full: all pairs are visible; causal: a square with a visible lower triangle; band: `MaskBand` decides per pair."""

WINDOW_STRIP = 512
"""Number of queries in a tile at the edge of a sliding window. Such a tile has about the square of this number of
pairs, whose scores are all in memory."""


@dataclass(frozen=True)
class Tile:
    """Rectangle of queries and keys, as indices into the tokens that a rank holds.

    Attributes:
        samples: range of samples.
        queries, keys: ranges of local indices.
        kind: visible part of the rectangle.
        distance: position of the first query minus position of the first key, in the full sequence.
        query_start: position of the first query in the full sequence.
    """

    samples: TokenRange
    queries: TokenRange
    keys: TokenRange
    kind: TileKind
    distance: int
    query_start: int


def make_visible_tiles(
    mask: BatchMask,
    mask_band: MaskBand,
    queries: Sequence[TokenRange],
    keys: Sequence[TokenRange],
    max_tile_size: int | None = None,
) -> list[Tile]:
    """Return tiles that cover the visible pairs of `queries` and `keys`.

    Args:
        queries, keys: ranges of the full sequence, in the order of the local tokens.
        max_tile_size: bound of either side of a tile; None: no bound.
    """
    found = []
    before_q = 0
    for q_range in queries:
        before_k = 0
        for k_range in keys:
            for rows, q, k in iterate_visible_rectangles(mask, q_range, k_range):
                for (q0, q1), (k0, k1), kind in _visible_parts(mask_band, q, k, max_tile_size):
                    held_q = before_q + q0 - q_range[0], before_q + q1 - q_range[0]
                    held_k = before_k + k0 - k_range[0], before_k + k1 - k_range[0]
                    found.append(Tile(rows, held_q, held_k, kind, q0 - k0, q0))
            before_k += k_range[1] - k_range[0]
        before_q += q_range[1] - q_range[0]
    return found


def is_any_visible(
    mask: BatchMask, mask_band: MaskBand, queries: Sequence[TokenRange], keys: Sequence[TokenRange]
) -> bool:
    """Return True if a query of `queries` sees a key of `keys`."""
    return any(
        _is_band_visible(mask_band, q, k)
        for q_range in queries
        for k_range in keys
        for _, q, k in iterate_visible_rectangles(mask, q_range, k_range)
    )


def _is_band_visible(mask_band: MaskBand, q: TokenRange, k: TokenRange) -> bool:
    nearest, farthest = q[0] - (k[1] - 1), q[1] - 1 - k[0]
    return (mask_band.max_distance is None or nearest <= mask_band.max_distance) and (
        mask_band.min_distance is None or farthest >= mask_band.min_distance
    )


def _visible_parts(
    mask_band: MaskBand, q: TokenRange, k: TokenRange, max_tile_size: int | None
) -> Iterator[tuple[TokenRange, TokenRange, TileKind]]:
    """Yield the visible parts of a rectangle, in positions of the full sequence."""
    for strip in _strips(mask_band, q, k):
        for queries, keys, kind in _strip_parts(mask_band, strip, k):
            yield from _split_tiles(queries, keys, kind, max_tile_size)


def _strips(mask_band: MaskBand, q: TokenRange, k: TokenRange) -> Iterator[TokenRange]:
    """Yield strips of the queries.

    The queries are split where the diagonal enters and leaves the keys, and every `WINDOW_STRIP` rows at the edge of a
    window.
    """
    if not _is_band_visible(mask_band, q, k):
        return
    ends = {*q}
    if mask_band.min_distance == 0:
        ends |= {end for end in k if q[0] < end < q[1]}
    if (
        mask_band.max_distance is not None
        and q[1] - 1 - k[0] > mask_band.max_distance
        or mask_band.min_distance not in (None, 0)
    ):
        ends |= set(range(q[0], q[1], WINDOW_STRIP))
    yield from zip(sorted(ends), sorted(ends)[1:], strict=False)


def _strip_parts(
    mask_band: MaskBand, q: TokenRange, k: TokenRange
) -> Iterator[tuple[TokenRange, TokenRange, TileKind]]:
    (a, b), (c, d) = q, k
    if not _is_band_visible(mask_band, q, k):
        return
    far_any, far_all = (
        (c, c)
        if mask_band.max_distance is None
        else (max(c, a - mask_band.max_distance), max(c, b - 1 - mask_band.max_distance))
    )
    near_all, near_any = (
        (d, d)
        if mask_band.min_distance is None
        else (min(d, a - mask_band.min_distance + 1), min(d, b - mask_band.min_distance))
    )
    square = mask_band.min_distance == 0 and c <= a and b <= d and far_all <= a
    if square:
        near_all = a
    if far_all > near_all:  # no key is seen by all of these queries
        yield q, (far_any, near_any), "band"
        return
    if far_any < far_all:
        yield q, (far_any, far_all), "band"
    if far_all < near_all:
        yield q, (far_all, near_all), "full"
    if square:
        yield q, q, "causal"
    elif near_all < near_any:
        yield q, (near_all, near_any), "band"


def _split_tiles(
    q: TokenRange, k: TokenRange, kind: TileKind, max_tile_size: int | None
) -> Iterator[tuple[TokenRange, TokenRange, TileKind]]:
    """Split a rectangle into tiles of at most `max_tile_size` by `max_tile_size`."""
    if max_tile_size is None or (q[1] - q[0] <= max_tile_size and k[1] - k[0] <= max_tile_size):
        yield q, k, kind
        return
    for a in range(q[0], q[1], max_tile_size):
        for c in range(k[0], k[1], max_tile_size):
            part_q, part_k = (a, min(a + max_tile_size, q[1])), (c, min(c + max_tile_size, k[1]))
            if kind != "causal":
                yield part_q, part_k, kind
            elif c <= a:
                yield part_q, part_k, "causal" if a == c else "full"
