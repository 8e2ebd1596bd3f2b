"""Attention cut into rectangles of queries and keys, of which those that nobody sees are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from windlass.parallel.sequence.cut import Span
from windlass.parallel.sequence.sight import Band, Sight, rectangles

Kind = Literal["full", "causal", "band"]
"""All keys are seen; a square of which the lower triangle is; something else, told by the distances."""

STRIP = 512
"""Queries for which the edge of a sliding window is computed at once: so many by as many pairs take memory."""


@dataclass(frozen=True)
class Tile:
    """Some queries and some keys, counted within what a rank holds of each.

    Attributes:
        rows: samples.
        kind: what of it is seen.
        distance: from the first key to the first query, in the whole sequence.
        at: the place of the first query there.
    """

    rows: Span
    queries: Span
    keys: Span
    kind: Kind
    distance: int
    at: int


def tiles(
    sight: Sight, band: Band, queries: Sequence[Span], keys: Sequence[Span], largest: int | None = None
) -> list[Tile]:
    """What `queries` see of `keys`, both as ranges of the whole sequence in the order in which they are held.

    Args:
        largest: of either side of a tile; None: as large as they come.
    """
    found = []
    before_q = 0
    for q_range in queries:
        before_k = 0
        for k_range in keys:
            for rows, q, k in rectangles(sight, q_range, k_range):
                for (q0, q1), (k0, k1), kind in _seen(band, q, k, largest):
                    held_q = before_q + q0 - q_range[0], before_q + q1 - q_range[0]
                    held_k = before_k + k0 - k_range[0], before_k + k1 - k_range[0]
                    found.append(Tile(rows, held_q, held_k, kind, q0 - k0, q0))
            before_k += k_range[1] - k_range[0]
        before_q += q_range[1] - q_range[0]
    return found


def sees_any(sight: Sight, band: Band, queries: Sequence[Span], keys: Sequence[Span]) -> bool:
    """Whether any of `queries` sees any of `keys`."""
    return any(
        _any(band, q, k) for q_range in queries for k_range in keys for _, q, k in rectangles(sight, q_range, k_range)
    )


def _any(band: Band, q: Span, k: Span) -> bool:
    nearest, farthest = q[0] - (k[1] - 1), q[1] - 1 - k[0]
    return (band.highest is None or nearest <= band.highest) and (band.lowest is None or farthest >= band.lowest)


def _seen(band: Band, q: Span, k: Span, largest: int | None) -> Iterator[tuple[Span, Span, Kind]]:
    """The parts of a rectangle that are seen, in places of the whole sequence."""
    for strip in _strips(band, q, k):
        for queries, keys, kind in _parts(band, strip, k):
            yield from _small(queries, keys, kind, largest)


def _strips(band: Band, q: Span, k: Span) -> Iterator[Span]:
    """Queries in strips: cut where the diagonal enters and leaves the keys, and by the window where there is one."""
    if not _any(band, q, k):
        return
    ends = {*q}
    if band.lowest == 0:
        ends |= {end for end in k if q[0] < end < q[1]}
    if band.highest is not None and q[1] - 1 - k[0] > band.highest or band.lowest not in (None, 0):
        ends |= set(range(q[0], q[1], STRIP))
    yield from zip(sorted(ends), sorted(ends)[1:], strict=False)


def _parts(band: Band, q: Span, k: Span) -> Iterator[tuple[Span, Span, Kind]]:
    (a, b), (c, d) = q, k
    if not _any(band, q, k):
        return
    far_any, far_all = (c, c) if band.highest is None else (max(c, a - band.highest), max(c, b - 1 - band.highest))
    near_all, near_any = (d, d) if band.lowest is None else (min(d, a - band.lowest + 1), min(d, b - band.lowest))
    square = band.lowest == 0 and c <= a and b <= d and far_all <= a
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


def _small(q: Span, k: Span, kind: Kind, largest: int | None) -> Iterator[tuple[Span, Span, Kind]]:
    """The same in tiles that are no larger than `largest`."""
    if largest is None or (q[1] - q[0] <= largest and k[1] - k[0] <= largest):
        yield q, k, kind
        return
    for a in range(q[0], q[1], largest):
        for c in range(k[0], k[1], largest):
            part_q, part_k = (a, min(a + largest, q[1])), (c, min(c + largest, k[1]))
            if kind != "causal":
                yield part_q, part_k, kind
            elif c <= a:
                yield part_q, part_k, "causal" if a == c else "full"
