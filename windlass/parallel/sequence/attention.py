"""Attention of tokens that lie on several ranks: swapped for heads, passed round a ring, or both."""

from __future__ import annotations

from dataclasses import replace

import torch

from windlass.base.errors import ModelError
from windlass.parallel.sequence.block import Kernels, Score
from windlass.parallel.sequence.cut import tokens_of
from windlass.parallel.sequence.dropout import Dropout
from windlass.parallel.sequence.heads import Heads, to_heads, to_tokens
from windlass.parallel.sequence.ring import Round, ring_attention
from windlass.parallel.sequence.share import Share
from windlass.parallel.sequence.sight import BOTH_WAYS, CAUSAL, Band
from windlass.parallel.sequence.tiles import Tile, sees_any, tiles


class SequenceMask:
    """What a model's layers get where they expect a mask: which tokens see which, and where those lie.

    It goes with the layers' arguments, so that a layer computed again in the backward sees what it saw. Like a `Share`
    it is not looked into.
    """

    __slots__ = ("_tiles", "band", "share")

    def __init__(self, share: Share, band: Band) -> None:
        self.share, self.band = share, band
        self._tiles: dict[int | None, tuple[tuple[Tile, ...], ...]] = {}

    def tiles(self, largest: int | None) -> tuple[tuple[Tile, ...], ...]:
        """What this rank's group sees of the block of the group 0, 1, ... places before it; as many on all ranks."""
        if largest not in self._tiles:
            share, cut = self.share, self.share.cut
            here = share.axis.index // cut.ulysses
            blocks = [cut.of_group((here - step) % cut.ring) for step in range(self._steps())]
            found = [tuple(tiles(share.sight, self.band, cut.of_group(here), keys, largest)) for keys in blocks]
            self._tiles[largest] = tuple(found)
        return self._tiles[largest]

    def _steps(self) -> int:
        """How many blocks have to come by before no group sees anything of those left."""
        share, cut = self.share, self.share.cut
        for step in range(cut.ring - 1, 0, -1):
            for group in range(cut.ring):
                if sees_any(share.sight, self.band, cut.of_group(group), cut.of_group((group - step) % cut.ring)):
                    return step + 1
        return 1


def sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    *,
    scale: float | None = None,
    cap: float | None = None,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """Attention of this rank's tokens to those of all ranks. Collective along sp.

    Args:
        query: `[samples, heads, own tokens, features]`; key, value: the same with as many heads or fewer.
        scale: of scores; `features ** -0.5` by default.
        cap: bends scores to `cap * tanh(score / cap)`.
        dropout: which weights are dropped, of all heads of `query`.

    Returns:
        `[samples, heads, own tokens, features of values]`; 0 for tokens that see nothing.

    Raises:
        ModelError: these are not the tokens that `mask` is of, or heads of keys don't divide those of queries.
    """
    _check(query, key, value, mask)
    share, cut = mask.share, mask.share.cut
    heads = query.shape[1]
    here, place = divmod(share.axis.index, cut.ulysses)
    counts = Heads(heads, key.shape[1], cut.ulysses)
    if dropout is not None:
        dropout = replace(dropout, head=dropout.head + counts.of_queries(place)[0])
    score = Score(query.shape[-1] ** -0.5 if scale is None else scale, cap, mask.band, dropout)
    members = cut.members(here)
    if cut.ulysses > 1:
        query, key, value = to_heads(query, key, value, share.axis, members, cut.sizes)
    output = _of_group(query, key, value, mask, counts.served_by(place), score)
    if cut.ulysses > 1:
        output = to_tokens(output, share.axis, members, cut.sizes, heads)
    return output


def _of_group(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    served_by: tuple[int, ...],
    score: Score,
) -> torch.Tensor:
    """Attention of what a group of the ring holds, for this rank's heads."""
    share, cut = mask.share, mask.share.cut
    here = share.axis.index // cut.ulysses
    seen = mask.tiles(Kernels(query, key, value, score).largest) if served_by else ((),)
    held = tuple(tokens_of(cut.of_group((here - step) % cut.ring)) for step in range(len(seen)))
    longest = max(tokens_of(cut.of_group(group)) for group in range(cut.ring))
    turn = Round(share.axis, cut.ulysses, seen, held, longest, served_by, score)
    whole = (0, query.shape[0]), (0, query.shape[2]), (0, key.shape[2])
    plain = score.cap is None and score.dropout is None
    if len(seen) == 1 and cut.ring == 1 and plain and _is_one(mask, whole):
        return torch.nn.functional.scaled_dot_product_attention(
            query, turn.heads_of(key), turn.heads_of(value), is_causal=mask.band == CAUSAL, scale=score.scale
        )
    return ring_attention(turn, query, key, value)


def _is_one(mask: SequenceMask, whole: tuple[tuple[int, int], ...]) -> bool:
    """Whether all of it is one tile, for which torch has kernels with a backward of their own."""
    found = mask.tiles(None)[0]
    if len(found) != 1 or mask.band not in (CAUSAL, BOTH_WAYS) or found[0].kind == "band":
        return False
    return (found[0].rows, found[0].queries, found[0].keys) == whole


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SequenceMask) -> None:
    share = mask.share
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[2] != share.tokens or tensor.shape[0] != share.samples:
            raise ModelError(
                f"attention over {share.axis.name} got a {name} of {tensor.shape[0]} samples and {tensor.shape[2]} "
                f"tokens; this rank's part of the batch has {share.samples} and {share.tokens}. Attention to other "
                "tokens (a cache, an encoder, prefix tuning) can't be computed on a part of the sequence"
            )
    if query.shape[1] % key.shape[1]:
        raise ModelError(
            f"attention over {share.axis.name}: {key.shape[1]} heads of keys don't divide {query.shape[1]} of queries"
        )
