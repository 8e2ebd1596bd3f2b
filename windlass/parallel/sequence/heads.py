"""Ulysses: each rank's part of the tokens, with all heads, swapped for all tokens, with a part of the heads.

S. A. Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509. A rank receives `4 N h / P (P - 1) / P` elements a layer for
N tokens of h features on P ranks, and as many in the backward. Heads need not divide: the first ranks have one more,
and ranks may have none. Of keys and values each rank gets the heads that its queries use, so that some go to several
ranks where there are fewer than ranks; their gradients are added up where they came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windlass.comm.axis import Axis
from windlass.parallel.exchanges import swap
from windlass.parallel.placement import spread
from windlass.parallel.sequence.cut import Span


@dataclass(frozen=True)
class Heads:
    """Which heads each of `ranks` ranks computes.

    Attributes:
        queries: heads of queries; `keys` divides it.
        keys: heads of keys and values.
    """

    queries: int
    keys: int
    ranks: int

    @property
    def group(self) -> int:
        """Heads of queries that share one of keys."""
        return self.queries // self.keys

    def of_queries(self, rank: int) -> Span:
        """Heads of queries of `rank`."""
        return spread(self.queries, self.ranks, rank)

    def of_keys(self, rank: int) -> Span:
        """Heads of keys and values that they use."""
        start, stop = self.of_queries(rank)
        return (start // self.group, (stop - 1) // self.group + 1) if start < stop else (0, 0)

    def served_by(self, rank: int) -> tuple[int, ...]:
        """For each head of queries of `rank`, which of its heads of keys serves it."""
        first = self.of_keys(rank)[0]
        return tuple(head // self.group - first for head in range(*self.of_queries(rank)))


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: Axis, members: range, tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Swap tokens for heads among `members` of the axis, in one all-to-all. Collective over the whole axis.

    Args:
        query: `[samples, heads, own tokens, features]`; key and value: `[samples, fewer heads, own tokens, features]`.
        members: this rank's group.
        tokens: of each rank of the axis.

    Returns:
        The same three of all tokens of the group in the order of its ranks, of this rank's heads.
    """
    heads = Heads(query.shape[1], key.shape[1], len(members))
    here = axis.index - members.start

    def spans(rank: int) -> tuple[Span, Span, Span]:
        return heads.of_queries(rank), heads.of_keys(rank), heads.of_keys(rank)

    given = (query, key, value)
    flat, sends = [], [0] * axis.size
    for place, rank in enumerate(members):
        parts = [x[:, start:stop].reshape(-1) for x, (start, stop) in zip(given, spans(place), strict=True)]
        sends[rank] = sum(part.numel() for part in parts)
        flat += parts
    row = sum((stop - start) * x.shape[0] * x.shape[3] for x, (start, stop) in zip(given, spans(here), strict=True))
    receives = [row * tokens[rank] if rank in members else 0 for rank in range(axis.size)]
    received = swap(torch.cat(flat), axis, sends, receives).split([receives[rank] for rank in members])
    found: list[list[torch.Tensor]] = [[], [], []]
    for rank, part in zip(members, received, strict=True):
        shapes = [
            (x.shape[0], stop - start, tokens[rank], x.shape[3])
            for x, (start, stop) in zip(given, spans(here), strict=True)
        ]
        pieces = part.split([samples * n * s * d for samples, n, s, d in shapes])
        for of_one, piece, shape in zip(found, pieces, shapes, strict=True):
            of_one.append(piece.view(shape))
    q, k, v = (torch.cat(parts, dim=2) for parts in found)
    return q, k, v


def to_tokens(output: torch.Tensor, axis: Axis, members: range, tokens: Sequence[int], heads: int) -> torch.Tensor:
    """The way back. Collective over the whole axis.

    Args:
        output: `[samples, own heads, tokens of the group, features]`.
        heads: of queries in all.

    Returns:
        `[samples, heads, own tokens, features]`.
    """
    samples, _, _, features = output.shape
    shares = [spread(heads, len(members), place) for place in range(len(members))]
    parts = [part.reshape(-1) for part in output.split([tokens[rank] for rank in members], dim=2)]
    sends, receives = [0] * axis.size, [0] * axis.size
    for rank, part, (start, stop) in zip(members, parts, shares, strict=True):
        sends[rank], receives[rank] = part.numel(), samples * (stop - start) * tokens[axis.index] * features
    received = swap(torch.cat(parts), axis, sends, receives).split([receives[rank] for rank in members])
    return torch.cat(
        [
            part.view(samples, stop - start, tokens[axis.index], features)
            for part, (start, stop) in zip(received, shares, strict=True)
        ],
        dim=1,
    )
