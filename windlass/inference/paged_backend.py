"""Attention backend that reads keys and values from a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from windlass.attention import AttentionBackend, AttentionMask, ChunkedMask, HeadSlice, MaskBand, MaskPredicate
from windlass.base.errors import ModelError
from windlass.inference.step_batch import StepBatch
from windlass.inference.step_recording import NotRecordableError, get_recorder
from windlass.kernels.paged_attention import PagedKVCache, paged_attention, read_kv, write_kv

LayerKey = tuple[int, int]
"""Identity of an attention module and the number of its call in the forward: a module used twice has two caches."""


@dataclass(frozen=True)
class LayerShape:
    """Shape of the keys and values of one attention layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class PagedMask:
    """Visible keys of a query, by positions in its sequence.

    Attributes:
        sliding_window: number of latest positions that a query attends to, its own included; None: all up to its own.
        chunk_size: number of positions of a chunk; a query attends only to its own chunk. None: no chunks.
        predicate: any other pattern, evaluated for every pair of query and key; None: there is none.
    """

    sliding_window: int | None = None
    chunk_size: int | None = None
    predicate: MaskPredicate | None = None


@dataclass(frozen=True)
class AttentionCall:
    """Attention of one layer in a recorded step ([Note: recorded steps]). `paged_attention` explains the attributes."""

    layer: LayerKey
    scaling: float
    sliding_window: int | None
    chunk_size: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class PagedAttention(AttentionBackend):
    """Backend `"paged"`: each forward is one flat row of tokens of several sequences.

    The pattern of the model's mask applies to positions in a sequence. In transformers, positions that restart separate
    packed documents; here they separate the sequences of the batch.

    Args:
        make_cache: function that allocates the cache of a layer, called at the layer's first attention. None: a layer
            without a cache raises ModelError.

    Attributes:
        shapes: shape of each layer that had no cache at its first attention.
        caches: cache of each layer.
    """

    name = "paged"
    supported_arguments = frozenset({"softcap", "s_aux"})

    def __init__(self, make_cache: Callable[[LayerKey, LayerShape], PagedKVCache] | None = None) -> None:
        self._make_cache = make_cache
        self._batch: StepBatch | None = None
        self._calls: dict[int, int] = {}
        self.shapes: dict[LayerKey, LayerShape] = {}
        self.caches: dict[LayerKey, PagedKVCache] = {}

    def begin(self, batch: StepBatch) -> None:
        """Set the batch of the next forward."""
        self._batch = batch
        self._calls.clear()

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the batch's tokens in their sequences, `[tokens]`."""
        assert self._batch is not None
        return self._batch.positions

    def make_mask(self, mask: AttentionMask) -> PagedMask:
        """Return the pattern of a mask. A predicate is not checked.

        Raises:
            ModelError: the mask is not causal: queries attend to later keys, which a cache does not have; or the mask
                excludes the query's own key.
        """
        pattern = mask.pattern
        if isinstance(pattern, MaskPredicate):
            return PagedMask(predicate=pattern)
        band = pattern if isinstance(pattern, MaskBand) else pattern.band
        if band.min_distance is not None and band.min_distance > 0:
            raise ModelError(
                f"a layer's attention is limited to keys {band.min_distance} or more positions before the query, so it "
                "excludes the query's own key, which paged attention includes; the model cannot run with a paged cache"
            )
        if band.min_distance != 0:
            raise ModelError(
                "a layer's attention is not causal: queries see later tokens, which a KV cache does not have; the "
                "model cannot run with a paged cache"
            )
        window = None if band.max_distance is None else band.max_distance + 1
        return PagedMask(window, pattern.chunk_size if isinstance(pattern, ChunkedMask) else None)

    def attend(
        self,
        module: nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        *,
        scaling: float | None,
        dropout: float,
        heads: HeadSlice,
        **arguments: Any,
    ) -> torch.Tensor:
        """Store keys and values of the batch's tokens, and attend to the tokens of their sequences that `mask` allows.

        `arguments` may have `softcap`, which turns a score into `softcap * tanh(score / softcap)` (Gemma 2), and
        `s_aux` `[heads]`, one more logit in each softmax (GPT-OSS).

        Raises:
            ModelError: `query` or `key` does not have the batch's tokens, the model made `mask` itself, or the layer
                has no cache.
            NotRecordableError: the step is being recorded ([Note: recorded steps]), and `mask` has no native kernel.
        """
        batch = self._batch
        if batch is None or query.shape[0] != 1 or query.shape[2] != batch.num_tokens or key.shape[2] != query.shape[2]:
            raise ModelError(
                f"{type(module).__name__} computes attention of queries {tuple(query.shape)} and keys "
                f"{tuple(key.shape)}, which are not the tokens of the batch; the model cannot run with a paged cache"
            )
        if not isinstance(mask, PagedMask):
            raise ModelError(
                f"{type(module).__name__} makes its own attention mask, so its pattern is not known; the model cannot "
                "run with a paged cache"
            )
        recorder = get_recorder()
        if recorder is None:
            output, _ = self._attend(module, query, key, value, mask, scaling, arguments)
        else:
            with recorder.paused():
                output, call = self._attend(module, query, key, value, mask, scaling, arguments)
            if call is None:
                raise NotRecordableError(f"{type(module).__name__} has an attention mask without a native kernel")
            recorder.add_native("attention", call, [query, key, value], output)
        return output.transpose(0, 1)[None]

    def _attend(
        self,
        module: nn.Module | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: PagedMask,
        scaling: float | None,
        arguments: dict[str, Any],
    ) -> tuple[torch.Tensor, AttentionCall | None]:
        """Return the output `[tokens, heads, features]`, and the `AttentionCall`; None if no native kernel fits."""
        batch = self._batch
        assert batch is not None
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        layer, cache = self._cache_of(module, keys, values)
        write_kv(cache, keys, values, batch.slots)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        softcap, sinks = arguments.get("softcap"), arguments.get("s_aux")
        if mask.predicate is not None:
            return _attend_by_predicate(queries, cache, batch, mask.predicate, scale, softcap, sinks), None
        sinks = None if sinks is None else sinks.detach().float().contiguous()
        call = AttentionCall(layer, scale, mask.sliding_window, mask.chunk_size, softcap, sinks)
        output = paged_attention(
            queries,
            cache,
            batch.block_table,
            batch.query_start,
            batch.context_lengths,
            scaling=scale,
            sliding_window=mask.sliding_window,
            chunk_size=mask.chunk_size,
            softcap=softcap,
            sinks=sinks,
        )
        return output, call

    def _cache_of(
        self, module: nn.Module | None, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[LayerKey, PagedKVCache]:
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        layer = (id(module), call)
        cache = self.caches.get(layer)
        if cache is None:
            shape = LayerShape(keys.shape[1], keys.shape[2], values.shape[2], keys.dtype)
            self.shapes[layer] = shape
            if self._make_cache is None:
                raise ModelError(
                    f"{type(module).__name__} has no KV cache: it did not run for the tokens with which the model was "
                    "loaded, and a paged cache needs every layer to run for every input"
                )
            cache = self.caches[layer] = self._make_cache(layer, shape)
        return layer, cache


def _attend_by_predicate(
    queries: torch.Tensor,
    cache: PagedKVCache,
    batch: StepBatch,
    predicate: MaskPredicate,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the attention of one sequence at a time, with a mask over all pairs of tokens."""
    outputs = []
    starts, lengths = batch.query_start.tolist(), batch.context_lengths.tolist()
    groups = queries.shape[1] // cache.kv_heads
    for number, length in enumerate(lengths):
        rows = slice(starts[number], starts[number + 1])
        places = torch.arange(length, device=queries.device)
        blocks = batch.block_table[number].long()
        slots = blocks[places // cache.block_size] * cache.block_size + places % cache.block_size
        keys, values = (tensor.repeat_interleave(groups, dim=1).transpose(0, 1) for tensor in read_kv(cache, slots))
        positions = batch.positions[rows]
        scores = queries[rows].float().transpose(0, 1) @ keys.transpose(1, 2) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        dense = AttentionMask(1, len(positions), length, predicate, q_offset=int(positions[0])).to_dense()[0]
        dense = dense.to(scores.device)
        scores = scores.masked_fill(~dense, torch.finfo(scores.dtype).min)
        if sinks is not None:
            extra = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, extra], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        outputs.append((weights @ values).transpose(0, 1))
    return torch.cat(outputs).to(queries.dtype)
