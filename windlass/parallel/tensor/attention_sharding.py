"""The shares of an attention module's layers that follow from its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.parallel.placement import Ranges
from windlass.parallel.tensor.head_partition import HeadPartition
from windlass.parallel.tensor.linear_layers import LinearLayer
from windlass.parallel.tensor.rank_ranges import RankRanges, count_elements, join_sections, scale_ranges
from windlass.parallel.tensor.tensor_parallel_plan import ModuleShard, ShardStyle, make_cannot_shard_error


@dataclass(frozen=True)
class HeadProjection:
    """A layer that makes queries, keys or values.

    Attributes:
        layer: that it is.
        sections: sizes of what lies one after another in its output.
        heads: in each section: as many as there are query heads, or as key heads.
        by_head: keys and values lie with the queries that they serve, so that nothing is shared.
    """

    layer: LinearLayer
    sections: tuple[int, ...]
    section_heads: tuple[int, ...]
    is_interleaved: bool = False


def shard_attention(
    head_partition: HeadPartition, projections: Sequence[HeadProjection], row: LinearLayer
) -> list[ModuleShard]:
    """The cuts of all projections, and of the layer `row` that takes what attention makes.

    Raises:
        ModelError: features are no whole number of heads.
    """
    cuts = [_shard_projection(head_partition, projection, row.name) for projection in projections]
    grain = row.in_features // head_partition.num_query_heads
    return [
        *cuts,
        ModuleShard(
            row.name,
            ShardStyle.ROW,
            row.in_features,
            scale_ranges(head_partition.query_ranges, grain),
            f"{head_partition.num_query_heads} heads of {grain}",
            row.name,
        ),
    ]


def _shard_projection(head_partition: HeadPartition, projection: HeadProjection, chain: str) -> ModuleShard:
    layer = projection.layer
    for size, count in zip(projection.sections, projection.section_heads, strict=True):
        if count not in (head_partition.num_query_heads, head_partition.num_key_heads) or size % count:
            raise make_cannot_shard_error(
                layer.name,
                f"{size} features are no whole number of {count} heads, of {head_partition.num_query_heads} query and {head_partition.num_key_heads} key "
                f"heads in all",
                (layer.name, f"column of {head_partition.num_query_heads} heads"),
            )
    what = " + ".join(
        f"{count} heads of {size // count}"
        for size, count in zip(projection.sections, projection.section_heads, strict=True)
    )
    shares = join_sections(
        [
            (size, _section_ranges(head_partition, count, size // count))
            for size, count in zip(projection.sections, projection.section_heads, strict=True)
        ]
    )
    keys = any(
        count == head_partition.num_key_heads != head_partition.num_query_heads for count in projection.section_heads
    )
    if not (head_partition.has_shared_keys and keys):
        return ModuleShard(layer.name, ShardStyle.COLUMN, layer.out_features, shares, what, chain)
    picks = tuple(
        _repeated_features(head_partition, projection, rank) for rank in range(len(head_partition.query_ranges))
    )
    return ModuleShard(
        layer.name, ShardStyle.COLUMN_SHARED, layer.out_features, shares, what, chain, repeated_ranges=picks
    )


def _section_ranges(head_partition: HeadPartition, count: int, grain: int) -> RankRanges:
    if count == head_partition.num_query_heads:
        return scale_ranges(head_partition.query_ranges, grain)
    return scale_ranges([head_partition.key_range(rank) for rank in range(len(head_partition.query_ranges))], grain)


def _repeated_features(head_partition: HeadPartition, projection: HeadProjection, rank: int) -> Ranges:
    """What attention sees, of the features that a rank computed: key heads again for each query head that they serve,
    where those are not as many for each."""
    order = head_partition.repeated_keys(rank)
    found: list[tuple[int, int]] = []
    at = 0
    for size, count in zip(projection.sections, projection.section_heads, strict=True):
        grain = size // count
        computed = count_elements(_section_ranges(head_partition, count, grain)[rank])
        if count == head_partition.num_query_heads or order is None:
            found.append((at, at + computed))
        else:
            found += [(at + head * grain, at + (head + 1) * grain) for head in order]
        at += computed
    return tuple(found)
