"""Ring attention: keys and values pass round, each rank adds up what its own queries see of them.

H. Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889. Results of blocks are merged by their
log-sum-exp, in fp32. The backward passes keys and values round once more, and behind them their gradients, which every
rank adds its part to. A rank receives `2 N k (R - 1) / R` elements in the forward, for N tokens of k features of keys
and as many of values on a ring of R; in the backward the same, and the gradients, in fp32, R times. What nobody sees is
neither computed nor, where the sight ends early (a sliding window), sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from windlass.comm.axis import Axis
from windlass.parallel.sequence.block import Kernels, Score
from windlass.parallel.sequence.passing import Passing
from windlass.parallel.sequence.tiles import Tile


@dataclass(frozen=True)
class Round:
    """One attention, as a rank of a ring sees it.

    Attributes:
        axis: along which the ring lies; neighbours on the ring are `stride` places apart.
        tiles: what its queries see of the block of the rank that is 0, 1, ... places before it on the ring. As many
            blocks on all ranks.
        held: tokens of each of these blocks; they are sent as if they had `longest`.
        served_by: for each head of queries the head of keys that it uses.
    """

    axis: Axis
    stride: int
    tiles: tuple[tuple[Tile, ...], ...]
    held: tuple[int, ...]
    longest: int
    served_by: tuple[int, ...]
    score: Score

    def heads_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys or values, one head for each head of queries."""
        each = self._each(keys.shape[1])
        if each is not None:
            return keys if each == 1 else keys.repeat_interleave(each, dim=1)
        return keys.index_select(1, torch.tensor(self.served_by, device=keys.device))

    def added_up(self, gradient: torch.Tensor, heads: int) -> torch.Tensor:
        """The transpose of `heads_of`, for keys of so many heads."""
        each = self._each(heads)
        if each is not None:
            return gradient if each == 1 else gradient.unflatten(1, (heads, each)).sum(dim=2)
        total = gradient.new_zeros((gradient.shape[0], heads, *gradient.shape[2:]))
        return total.index_add_(1, torch.tensor(self.served_by, device=gradient.device), gradient)

    def _each(self, heads: int) -> int | None:
        """How many heads of queries each of `heads` heads of keys serves; None where they differ."""
        each = len(self.served_by) // max(heads, 1)
        return each if self.served_by == tuple(head for head in range(heads) for _ in range(each)) else None

    def pass_on(self, tensors: Sequence[torch.Tensor], by: int = 1) -> Passing:
        """Send tensors to the rank `by` places further on the ring."""
        return Passing(self.axis, tensors, by * self.stride)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, turn: Round, kernels: Kernels, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        whole = _Merged(query, value.shape[-1])
        for step, (k, v, tiles, _) in enumerate(_blocks(turn, key, value)):
            if not tiles:
                continue
            k, v = turn.heads_of(k[:, :, : turn.held[step]]), turn.heads_of(v[:, :, : turn.held[step]])
            for tile in tiles:
                parts = _cut(query, tile, "q"), _cut(k, tile, "k"), _cut(v, tile, "k")
                whole.add(tile, *kernels.of(tile).forward(*parts, tile, turn.score))
        output = whole.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, whole.lse)
        ctx.turn, ctx.kernels = turn, kernels
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        turn, kernels = ctx.turn, ctx.kernels
        query, key, value, output, lse = ctx.saved_tensors
        to_query = _zeros(query)
        under_way: Passing | None = None
        arrived: list[torch.Tensor] = []
        for step, (k, v, tiles, last) in enumerate(_blocks(turn, key, value)):
            to_key, to_value = _zeros(k), _zeros(v)
            k_all, v_all = (turn.heads_of(k), turn.heads_of(v)) if tiles else (k, v)
            for tile in tiles:
                rows, (q0, q1), (k0, k1) = slice(*tile.rows), tile.queries, tile.keys
                dq, dk, dv = kernels.of(tile).backward(
                    _cut(gradient, tile, "q"),
                    _cut(query, tile, "q"),
                    _cut(k_all, tile, "k"),
                    _cut(v_all, tile, "k"),
                    _cut(output, tile, "q"),
                    lse[rows, :, q0:q1],
                    tile,
                    turn.score,
                )
                to_query[rows, :, q0:q1] += dq
                to_key[rows, :, k0:k1] += turn.added_up(dk.to(to_key.dtype), key.shape[1])
                to_value[rows, :, k0:k1] += turn.added_up(dv.to(to_value.dtype), key.shape[1])
            if under_way is not None:  # what the ranks before this one added, of the same block
                before = under_way.wait()
                to_key, to_value = to_key.add_(before[0]), to_value.add_(before[1])
            arrived = [to_key, to_value]
            under_way = turn.pass_on(arrived, -step if last else 1)
        if under_way is not None:
            arrived = under_way.wait()
        own = key.shape[2]
        return (
            None,
            None,
            to_query.to(query.dtype),
            arrived[0][:, :, :own].to(key.dtype),
            arrived[1][:, :, :own].to(value.dtype),
        )


def ring_attention(turn: Round, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What this rank's queries see on the whole ring. Collective where that has more than one rank.

    Args:
        query: `[samples, heads, own tokens, features]`; key and value the same with as many heads or fewer.

    Returns:
        `[samples, heads, own tokens, features of values]`; 0 for queries that see nothing.
    """
    kernels = Kernels(query, key, value, turn.score)
    output: torch.Tensor = _Ring.apply(turn, kernels, query, key, value)
    return output


def _blocks(
    turn: Round, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[Tile, ...], bool]]:
    """Each block of keys and values while it is here, its tiles, and whether it is the last; the next is on its way."""
    steps = len(turn.tiles)
    block = [key, value]
    if steps > 1:
        block = [_padded(tensor, turn.longest) for tensor in block]
    for step, tiles in enumerate(turn.tiles):
        coming = turn.pass_on(block) if step + 1 < steps else None
        yield block[0], block[1], tiles, coming is None
        if coming is not None:
            block = coming.wait()


class _Merged:
    """Results of tiles, added up."""

    def __init__(self, query: torch.Tensor, features: int) -> None:
        self.output = _zeros(query, features)
        self.lse = torch.full(query.shape[:3], -torch.inf, dtype=self.output.dtype, device=query.device)

    def add(self, tile: Tile, output: torch.Tensor, lse: torch.Tensor) -> None:
        place = slice(*tile.rows), slice(None), slice(*tile.queries)
        before, more = self.lse[place], lse.to(self.lse.dtype)
        both = torch.logaddexp(before, more)
        finite = both.masked_fill(both == -torch.inf, 0)
        kept = self.output[place] * (before - finite).exp_().unsqueeze(-1)
        self.output[place] = kept.add_(output * (more - finite).exp_().unsqueeze(-1))
        self.lse[place] = both


def _cut(tensor: torch.Tensor, tile: Tile, side: str) -> torch.Tensor:
    start, stop = tile.queries if side == "q" else tile.keys
    return tensor[slice(*tile.rows), :, start:stop]


def _zeros(tensor: torch.Tensor, features: int | None = None) -> torch.Tensor:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    shape = (*tensor.shape[:3], tensor.shape[3] if features is None else features)
    return torch.zeros(shape, dtype=wide, device=tensor.device)


def _padded(tensor: torch.Tensor, longest: int) -> torch.Tensor:
    short = longest - tensor.shape[2]
    return tensor if short == 0 else torch.nn.functional.pad(tensor, (0, 0, 0, short))
