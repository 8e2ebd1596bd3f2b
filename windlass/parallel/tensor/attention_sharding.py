"""Shards of an attention module's linear layers, derived from its partition of heads."""

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
    """Linear layer that computes queries, keys or values.

    Attributes:
        layer: the layer.
        sections: sizes of the consecutive sections of its output.
        section_heads: number of heads in each section: all query heads or all key heads.
        is_interleaved: True if keys and values are stored next to the queries that use them, so that ranks cannot share
            a key head.
    """

    layer: LinearLayer
    sections: tuple[int, ...]
    section_heads: tuple[int, ...]
    is_interleaved: bool = False


def shard_attention(
    head_partition: HeadPartition, projections: Sequence[HeadProjection], row: LinearLayer
) -> list[ModuleShard]:
    """Return the shards of all projections, and of the output layer `row`.

    Raises:
        ModelError: a layer's features are not a whole number of heads.
    """
    shards = [_shard_projection(head_partition, projection, row.name) for projection in projections]
    grain = row.in_features // head_partition.num_query_heads
    return [
        *shards,
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
                f"{size} features do not divide into {count} heads, of {head_partition.num_query_heads} query "
                f"and {head_partition.num_key_heads} key "
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
    """Return the features of the local projection that the local attention uses, in order.

    If the local key heads serve unequal numbers of query heads, the key head of each query head is repeated.
    """
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
