"""Tests that tiles cover each visible pair exactly once, and no invisible one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.attention.mask_pattern import BIDIRECTIONAL, CAUSAL, MaskBand
from windlass.parallel.sequence.attention_tiles import Tile, is_any_visible, make_visible_tiles
from windlass.parallel.sequence.sequence_sharding import SequenceShardPattern
from windlass.parallel.sequence.visible_ranges import BatchMask, make_document_mask, make_full_mask, make_padding_mask

BANDS = st.one_of(
    st.sampled_from([CAUSAL, BIDIRECTIONAL]),
    st.builds(lambda w: MaskBand(0, w - 1), st.integers(1, 12)),
    st.builds(lambda w: MaskBand(-w, w), st.integers(1, 9)),
)


def packed(ends: list[set[int]], length: int) -> torch.Tensor:
    """Return the positions of each sample, which restart at 0 at each of the document ends in `ends`."""
    rows = []
    for row in ends:
        marks = [0, *sorted(end for end in row if 0 < end < length), length]
        rows.append(torch.cat([torch.arange(b - a) for a, b in zip(marks, marks[1:], strict=False)]))
    return torch.stack(rows)


@st.composite
def sights(draw: st.DrawFn, length: int) -> tuple[BatchMask, torch.Tensor]:
    """Draw the mask description of a batch of two samples, and the dense mask `[samples, queries, keys]`."""
    kind = draw(st.sampled_from(["all", "packed", "padded"]))
    if kind == "all":
        return make_full_mask(2, length), torch.ones(2, length, length, dtype=torch.bool)
    if kind == "packed":
        ends = [draw(st.sets(st.integers(1, length), max_size=4)) for _ in range(2)]
        positions = packed(ends, length)
        number = (positions == 0).cumsum(1)
        return make_document_mask(positions, 2), number[:, :, None] == number[:, None, :]
    mask = torch.tensor([draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)) for _ in range(2)])
    return make_padding_mask(mask), (mask != 0)[:, None, :].expand(2, length, length)


def drawn(found: list[Tile], band: MaskBand, queries: int, keys: int) -> torch.Tensor:
    """Return the number of tiles in which each pair is visible, `[samples, queries, keys]`."""
    counts = torch.zeros(2, queries, keys, dtype=torch.int)
    for tile in found:
        (r0, r1), (q0, q1), (k0, k1) = tile.samples, tile.queries, tile.keys
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if tile.kind == "causal":
            assert q1 - q0 == k1 - k0 and tile.distance == 0
            seen = seen.tril()
        elif tile.kind == "band":
            seen = band.allows(torch.arange(q1 - q0)[:, None] - torch.arange(k1 - k0) + tile.distance)
        counts[r0:r1, q0:q1, k0:k1] += seen
    return counts


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_tiles_cover_exactly_the_visible_pairs(data: st.DataObject) -> None:
    ring = data.draw(st.integers(1, 4))
    length = data.draw(st.integers(ring, 24))
    band = data.draw(BANDS)
    sight, mask = data.draw(sights(length))
    largest = data.draw(st.sampled_from([None, 1, 3, 8]))
    cut = SequenceShardPattern(ring, 1, data.draw(st.booleans())).shard(length)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    expected = mask & band.allows(distance)
    for local in range(ring):
        for other in range(ring):
            q = [t for a, b in cut.group_ranges(local) for t in range(a, b)]
            k = [t for a, b in cut.group_ranges(other) for t in range(a, b)]
            actual = make_visible_tiles(sight, band, cut.group_ranges(local), cut.group_ranges(other), largest)
            part = expected[:, q][:, :, k].int()
            assert torch.equal(drawn(actual, band, len(q), len(k)), part)
            visible = is_any_visible(sight, band, cut.group_ranges(local), cut.group_ranges(other))
            assert visible == bool(part.any())
            if largest is not None:
                assert all(t.queries[1] - t.queries[0] <= largest for t in actual)
                assert all(t.keys[1] - t.keys[0] <= largest for t in actual)


def test_causal_sequence_is_one_tile_without_later_tokens() -> None:
    full = make_full_mask(3, 10)
    assert make_visible_tiles(full, CAUSAL, ((0, 10),), ((0, 10),)) == [Tile((0, 3), (0, 10), (0, 10), "causal", 0, 0)]
    assert make_visible_tiles(full, CAUSAL, ((0, 5),), ((5, 10),)) == []
    assert make_visible_tiles(full, CAUSAL, ((5, 10),), ((0, 5),)) == [Tile((0, 3), (0, 5), (0, 5), "full", 5, 5)]


def test_long_window_is_mostly_full_rectangles() -> None:
    """Only the edges of a window of 4096 in 65536 tokens use masked tiles; the rest are full rectangles."""
    result = make_visible_tiles(make_full_mask(1, 65536), MaskBand(0, 4095), ((0, 65536),), ((0, 65536),))
    area = {kind: 0 for kind in ("full", "causal", "band")}
    for tile in result:
        area[tile.kind] += (tile.queries[1] - tile.queries[0]) * (tile.keys[1] - tile.keys[0])
    assert area["band"] + area["causal"] < 0.3 * area["full"]
    assert sum(area.values()) < 1.2 * 65536 * 4096


def test_samples_with_equal_masks_share_tiles() -> None:
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[2, 4:] = 0
    assert [(rows.start, rows.stop) for rows in make_padding_mask(mask)] == [(0, 2), (2, 3), (3, 4)]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    assert [(rows.start, rows.stop) for rows in make_document_mask(positions, 4)] == [(0, 4)]


def test_padded_sample_has_no_tiles() -> None:
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    assert all(
        tile.samples == (1, 2) for tile in make_visible_tiles(make_padding_mask(mask), CAUSAL, ((0, 3),), ((0, 3),))
    )
