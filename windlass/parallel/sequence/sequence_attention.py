"""Attention of tokens that are sharded over ranks: Ulysses, ring attention, or both."""

from __future__ import annotations

from dataclasses import replace

import torch

from windlass.attention.active_backend import BoundMask
from windlass.attention.mask_pattern import BIDIRECTIONAL, CAUSAL, MaskBand
from windlass.base.errors import ModelError
from windlass.parallel.sequence.attention_dropout import AttentionDropout
from windlass.parallel.sequence.attention_tiles import Tile, is_any_visible, make_visible_tiles
from windlass.parallel.sequence.ring_attention import RingContext, ring_attention
from windlass.parallel.sequence.sequence_shard import SequenceShard
from windlass.parallel.sequence.sequence_sharding import count_tokens
from windlass.parallel.sequence.tile_kernels import ScoreSpec, TileKernels
from windlass.parallel.sequence.ulysses_heads import UlyssesHeads, swap_heads_for_tokens, swap_tokens_for_heads


class SequenceMask:
    """Mask of a forward on sharded sequences, which replaces a dense mask.

    It is an argument of the layers, so a recomputed layer receives the mask of its forward. It has no `__dict__`, so
    that searches for tensors in arguments do not descend into it.

    Attributes:
        shard: distribution of the batch's tokens, with padding and packed documents.
        mask_band: visible distances of queries and keys.
        local: backend that computes the local heads of Ulysses, with its mask; None: the kernels of this package.
    """

    __slots__ = ("_tiles", "local", "mask_band", "shard")

    def __init__(self, shard: SequenceShard, mask_band: MaskBand, local: BoundMask | None = None) -> None:
        self.shard, self.mask_band, self.local = shard, mask_band, local
        self._tiles: dict[int | None, tuple[tuple[Tile, ...], ...]] = {}

    def tiles_by_step(self, max_tile_size: int | None) -> tuple[tuple[Tile, ...], ...]:
        """Return, for each ring step, the tiles (rectangles with visible pairs) of this group's queries and the keys
        that arrive.

        In step `i` the keys of the group `i` places before this group arrive. All ranks have the same number of steps.
        """
        if max_tile_size not in self._tiles:
            shard, sharding = self.shard, self.shard.sharding
            here = shard.axis.index // sharding.ulysses_degree
            blocks = [
                sharding.group_ranges((here - step) % sharding.num_ring_groups) for step in range(self._num_steps())
            ]
            found = [
                tuple(make_visible_tiles(shard.mask, self.mask_band, sharding.group_ranges(here), keys, max_tile_size))
                for keys in blocks
            ]
            self._tiles[max_tile_size] = tuple(found)
        return self._tiles[max_tile_size]

    def _num_steps(self) -> int:
        """Return the number of ring steps after which no group sees a key of the remaining blocks."""
        shard, sharding = self.shard, self.shard.sharding
        for step in range(sharding.num_ring_groups - 1, 0, -1):
            for group in range(sharding.num_ring_groups):
                if is_any_visible(
                    shard.mask,
                    self.mask_band,
                    sharding.group_ranges(group),
                    sharding.group_ranges((group - step) % sharding.num_ring_groups),
                ):
                    return step + 1
        return 1


def sequence_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> torch.Tensor:
    """Compute the attention of this rank's tokens to the tokens of all ranks. Collective along sp.

    Args:
        query: `[samples, heads, local tokens, features]`; key, value: the same with as many heads or fewer.
        scale: factor of the scores; None means `features ** -0.5`.
        softcap: bound `c` of the scores, which become `c * tanh(score / c)`; None: no bound.
        dropout: dropout of the attention weights of all heads of `query`.

    Returns:
        `[samples, heads, local tokens, value features]`; 0 for tokens that see no key.

    Raises:
        ModelError: the tensors do not have the samples and tokens of `mask`, or the key heads do not divide the query
            heads.
    """
    check_tokens(query, key, value, mask)
    shard, sharding = mask.shard, mask.shard.sharding
    heads = query.shape[1]
    here, place = divmod(shard.axis.index, sharding.ulysses_degree)
    counts = UlyssesHeads(heads, key.shape[1], sharding.ulysses_degree)
    if dropout is not None:
        dropout = replace(dropout, first_head=dropout.first_head + counts.query_range(place)[0])
    score = ScoreSpec(query.shape[-1] ** -0.5 if scale is None else scale, softcap, mask.mask_band, dropout)
    members = sharding.group_ranks(here)
    if sharding.ulysses_degree > 1:
        query, key, value = swap_tokens_for_heads(query, key, value, shard.axis, members, sharding.sizes)
    output = _group_attention(query, key, value, mask, counts.key_head_of(place), score)
    if sharding.ulysses_degree > 1:
        output = swap_heads_for_tokens(output, shard.axis, members, sharding.sizes, heads)
    return output


def _group_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SequenceMask,
    key_head_of: tuple[int, ...],
    score_spec: ScoreSpec,
) -> torch.Tensor:
    """Compute the attention of the tokens of a ring group, for this rank's heads."""
    shard, sharding = mask.shard, mask.shard.sharding
    here = shard.axis.index // sharding.ulysses_degree
    seen = mask.tiles_by_step(TileKernels(query, key, value, score_spec).max_tile_size) if key_head_of else ((),)
    held = tuple(
        count_tokens(sharding.group_ranges((here - step) % sharding.num_ring_groups)) for step in range(len(seen))
    )
    longest = max(count_tokens(sharding.group_ranges(group)) for group in range(sharding.num_ring_groups))
    context = RingContext(shard.axis, sharding.ulysses_degree, seen, held, longest, key_head_of, score_spec)
    full = (0, query.shape[0]), (0, query.shape[2]), (0, key.shape[2])
    plain = score_spec.softcap is None and score_spec.dropout is None
    if len(seen) == 1 and sharding.num_ring_groups == 1 and plain and _is_single_tile(mask, full):
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            context.repeat_kv_heads(key),
            context.repeat_kv_heads(value),
            is_causal=mask.mask_band == CAUSAL,
            scale=score_spec.scale,
        )
    return ring_attention(context, query, key, value)


def _is_single_tile(mask: SequenceMask, full_ranges: tuple[tuple[int, int], ...]) -> bool:
    """Return True if one tile covers the call, which torch's SDPA then computes without the merging of tiles."""
    found = mask.tiles_by_step(None)[0]
    if len(found) != 1 or mask.mask_band not in (CAUSAL, BIDIRECTIONAL) or found[0].kind == "band":
        return False
    return (found[0].samples, found[0].queries, found[0].keys) == full_ranges


def check_tokens(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SequenceMask) -> None:
    shard = mask.shard
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[2] != shard.local_tokens or tensor.shape[0] != shard.num_samples:
            raise ModelError(
                f"attention over {shard.axis.name} got a {name} of {tensor.shape[0]} samples and {tensor.shape[2]} "
                f"tokens; this rank's part of the batch has {shard.num_samples} and {shard.local_tokens}. Attention to "
                "other tokens (a cache, an encoder, prefix tuning) cannot be computed on sharded sequences; leave it "
                "out"
            )
    if query.shape[1] % key.shape[1]:
        raise ModelError(
            f"attention over {shard.axis.name}: {key.shape[1]} key heads do not divide {query.shape[1]} query heads; "
            "pass a number of key heads that divides the query heads"
        )
