"""Ulysses all-to-all: swaps some tokens with all heads for all tokens with some heads, and back.

S. A. Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509. A rank receives `4 (N h / P) (P - 1) / P` elements per layer
for N tokens of h features on P ranks, and as many in the backward. If the number of heads is not a multiple of the
number of ranks, the first ranks have one head more, and some ranks may have no head. A rank gets the heads of keys
and values that its queries use. With fewer key heads than ranks, a key head goes to several ranks, and its gradients
are summed on the ranks that hold the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.autograd_collectives import all_to_all
from windlass.parallel.placement import compute_shard_range
from windlass.parallel.sequence.sequence_sharding import TokenRange


@dataclass(frozen=True)
class UlyssesHeads:
    """Distribution of the heads of a layer over ranks.

    Attributes:
        num_query_heads: number of query heads, a multiple of `num_key_heads`.
        num_key_heads: number of heads of keys, and of values.
        num_ranks: number of ranks over which the heads are distributed.
    """

    num_query_heads: int
    num_key_heads: int
    num_ranks: int

    @property
    def queries_per_key(self) -> int:
        """Number of query heads that share a key head."""
        return self.num_query_heads // self.num_key_heads

    def query_range(self, rank: int) -> TokenRange:
        """Return the range of the query heads of `rank`."""
        return compute_shard_range(self.num_query_heads, self.num_ranks, rank)

    def key_range(self, rank: int) -> TokenRange:
        """Return the range of the key heads that the query heads of `rank` use."""
        start, stop = self.query_range(rank)
        return (start // self.queries_per_key, (stop - 1) // self.queries_per_key + 1) if start < stop else (0, 0)

    def key_head_of(self, rank: int) -> tuple[int, ...]:
        """Return, for each query head of `rank`, the local index of its key head."""
        first = self.key_range(rank)[0]
        return tuple(head // self.queries_per_key - first for head in range(*self.query_range(rank)))


def swap_tokens_for_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    axis: MeshAxis,
    group_ranks: range,
    tokens_per_rank: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Swap tokens for heads among a group of ranks, in one all-to-all. Collective over all ranks of the axis.

    Args:
        query: `[samples, heads, local tokens, features]`.
        key, value: `[samples, key heads, local tokens, features]`.
        group_ranks: ranks of this rank's group, as indices along the axis.
        tokens_per_rank: number of tokens of each rank of the axis.

    Returns:
        Query, key and value with all tokens of the group, in the order of its ranks, and this rank's heads.
    """
    heads = UlyssesHeads(query.shape[1], key.shape[1], len(group_ranks))
    here = axis.index - group_ranks.start

    def spans(rank: int) -> tuple[TokenRange, TokenRange, TokenRange]:
        return heads.query_range(rank), heads.key_range(rank), heads.key_range(rank)

    given = (query, key, value)
    flat, sends = [], [0] * axis.size
    for place, rank in enumerate(group_ranks):
        parts = [x[:, start:stop].reshape(-1) for x, (start, stop) in zip(given, spans(place), strict=True)]
        sends[rank] = sum(part.numel() for part in parts)
        flat += parts
    row = sum((stop - start) * x.shape[0] * x.shape[3] for x, (start, stop) in zip(given, spans(here), strict=True))
    receives = [row * tokens_per_rank[rank] if rank in group_ranks else 0 for rank in range(axis.size)]
    received = all_to_all(torch.cat(flat), axis, sends, receives).split([receives[rank] for rank in group_ranks])
    found: list[list[torch.Tensor]] = [[], [], []]
    for rank, part in zip(group_ranks, received, strict=True):
        shapes = [
            (x.shape[0], stop - start, tokens_per_rank[rank], x.shape[3])
            for x, (start, stop) in zip(given, spans(here), strict=True)
        ]
        pieces = part.split([samples * n * s * d for samples, n, s, d in shapes])
        for of_one, piece, shape in zip(found, pieces, shapes, strict=True):
            of_one.append(piece.view(shape))
    q, k, v = (torch.cat(parts, dim=2) for parts in found)
    return q, k, v


def swap_heads_for_tokens(
    output: torch.Tensor, axis: MeshAxis, group_ranks: range, tokens_per_rank: Sequence[int], heads: int
) -> torch.Tensor:
    """Swap heads for tokens, the inverse of `swap_tokens_for_heads`. Collective over all ranks of the axis.

    Args:
        output: `[samples, local heads, tokens of the group, features]`.
        heads: number of query heads of the layer.

    Returns:
        `[samples, heads, local tokens, features]`.
    """
    samples, _, _, features = output.shape
    shares = [compute_shard_range(heads, len(group_ranks), place) for place in range(len(group_ranks))]
    parts = [part.reshape(-1) for part in output.split([tokens_per_rank[rank] for rank in group_ranks], dim=2)]
    sends, receives = [0] * axis.size, [0] * axis.size
    for rank, part, (start, stop) in zip(group_ranks, parts, shares, strict=True):
        sends[rank], receives[rank] = part.numel(), samples * (stop - start) * tokens_per_rank[axis.index] * features
    received = all_to_all(torch.cat(parts), axis, sends, receives).split([receives[rank] for rank in group_ranks])
    return torch.cat(
        [
            part.view(samples, stop - start, tokens_per_rank[axis.index], features)
            for part, (start, stop) in zip(received, shares, strict=True)
        ],
        dim=1,
    )
