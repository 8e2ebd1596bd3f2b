"""The shares of an attention module's layers that follow from its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.parallel.placement import Ranges
from windlass.parallel.tensor.heads import Heads
from windlass.parallel.tensor.linear_layers import Linear
from windlass.parallel.tensor.plan import Cut, Style, refused
from windlass.parallel.tensor.shares import Shares, joined, length, scaled


@dataclass(frozen=True)
class Projection:
    """A layer that makes queries, keys or values.

    Attributes:
        layer: that it is.
        sections: sizes of what lies one after another in its output.
        heads: in each section: as many as there are query heads, or as key heads.
        by_head: keys and values lie with the queries that they serve, so that nothing is shared.
    """

    layer: Linear
    sections: tuple[int, ...]
    heads: tuple[int, ...]
    by_head: bool = False


def attention_cuts(heads: Heads, projections: Sequence[Projection], row: Linear) -> list[Cut]:
    """The cuts of all projections, and of the layer `row` that takes what attention makes.

    Raises:
        ModelError: features are no whole number of heads.
    """
    cuts = [_projection(heads, projection, row.name) for projection in projections]
    grain = row.inputs // heads.query
    return [
        *cuts,
        Cut(row.name, Style.ROW, row.inputs, scaled(heads.spans, grain), f"{heads.query} heads of {grain}", row.name),
    ]


def _projection(heads: Heads, projection: Projection, chain: str) -> Cut:
    layer = projection.layer
    for size, count in zip(projection.sections, projection.heads, strict=True):
        if count not in (heads.query, heads.key) or size % count:
            raise refused(
                layer.name,
                f"{size} features are no whole number of {count} heads, of {heads.query} query and {heads.key} key "
                f"heads in all",
                (layer.name, f"column of {heads.query} heads"),
            )
    what = " + ".join(
        f"{count} heads of {size // count}" for size, count in zip(projection.sections, projection.heads, strict=True)
    )
    shares = joined(
        [
            (size, _section(heads, count, size // count))
            for size, count in zip(projection.sections, projection.heads, strict=True)
        ]
    )
    keys = any(count == heads.key != heads.query for count in projection.heads)
    if not (heads.shared and keys):
        return Cut(layer.name, Style.COLUMN, layer.outputs, shares, what, chain)
    picks = tuple(_picks(heads, projection, rank) for rank in range(len(heads.spans)))
    return Cut(layer.name, Style.SHARED, layer.outputs, shares, what, chain, picks=picks)


def _section(heads: Heads, count: int, grain: int) -> Shares:
    if count == heads.query:
        return scaled(heads.spans, grain)
    return scaled([heads.needed(rank) for rank in range(len(heads.spans))], grain)


def _picks(heads: Heads, projection: Projection, rank: int) -> Ranges:
    """What attention sees, of the features that a rank computed: key heads again for each query head that they serve,
    where those are not as many for each."""
    order = heads.order(rank)
    found: list[tuple[int, int]] = []
    at = 0
    for size, count in zip(projection.sections, projection.heads, strict=True):
        grain = size // count
        computed = length(_section(heads, count, grain)[rank])
        if count == heads.query or order is None:
            found.append((at, at + computed))
        else:
            found += [(at + head * grain, at + (head + 1) * grain) for head in order]
        at += computed
    return tuple(found)
