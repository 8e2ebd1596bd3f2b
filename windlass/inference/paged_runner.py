"""Runner of models that take their attention function from transformers' `AttentionInterface`: flat batches over a
paged KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from windlass.attention import install_attention, use_backend
from windlass.base.errors import ModelError
from windlass.base.module_modes import evaluating
from windlass.inference.cache_population import CachePopulation
from windlass.inference.decode_graphs import Capture, DecodeGraphs
from windlass.inference.lora import LoraAdapters
from windlass.inference.model_forward import CausalForward, find_device, rope_settings
from windlass.inference.packed_modules import PackedModules
from windlass.inference.paged_backend import LayerKey, LayerShape, PagedAttention
from windlass.inference.row_positions import give_positions
from windlass.inference.stage_link import StageForward
from windlass.inference.step_batch import SavedBlocks, StepBatch
from windlass.inference.step_program import StepProgram
from windlass.inference.step_recording import NotRecordableError
from windlass.inference.widened_products import multiplies_bf16_slowly, widened_products
from windlass.kernels.paged_attention import PagedKVCache, make_kv_cache

_PROBE_TOKENS = 4

PAGEABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Values of `config.layer_types` for layers that keep no state but keys and values."""

_attention_before: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""For each module with a runner: the name of the attention function that it used before its first runner."""

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Types of rotary embeddings with frequencies that change beyond some number of tokens."""


class PagedModelRunner:
    """Runner of a model with the attention backend `"paged"`.

    The module gets another attention function, and hooks that do nothing outside of `run`. Outside of `run` the
    module computes as before, so the module of a training engine can be served between steps.

    Args:
        model: model in eval mode, on one device.
        block_size: tokens of a block.
        num_blocks: function from the bytes of one block to the number of blocks of the KV cache.
        kv_dtype: dtype of the cache; None: bfloat16 if the keys are bfloat16, else float32.
        packed: packed weights, which are used inside of `run`.
        forward: forward of the model; None: `CausalForward`.
        has_scratch: allocate one more block, which recorded decode steps need.
        max_model_len: tokens of the longest sequence; None: not known.

    Raises:
        ModelError: the model cannot be run with a paged cache. The message has the reason.
    """

    computes_drafts = True
    can_repeat = True
    graphs: DecodeGraphs | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        block_size: int,
        num_blocks: Callable[[int], int],
        kv_dtype: torch.dtype | None = None,
        packed: PackedModules | None = None,
        forward: CausalForward | StageForward | None = None,
        has_scratch: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        check_pageable(model, max_model_len)
        self._forward = CausalForward(model) if forward is None else forward
        if not self._forward.takes_positions:
            raise ModelError(
                f"{type(model).__name__}.forward takes no position_ids, so sequences cannot be computed in one row"
            )
        self.model, self.kv_dtype, self._packed = model, kv_dtype, packed
        self.lora: LoraAdapters | None = None
        self.block_size, self.num_blocks = block_size, 1
        self._scratch_blocks = 0
        self._restore_attention, self._take_positions = _install(model), give_positions(model)
        self._attention = _attention_of(model)
        self.device = find_device(model)
        self.program: StepProgram | None = None
        try:
            self._allocate(num_blocks, has_scratch=has_scratch)
        except BaseException:  # restore the model: the caller may build another runner for it
            self._restore_model()
            raise

    def _allocate(self, num_blocks: Callable[[int], int], *, has_scratch: bool) -> None:
        """Record the layers of the model, and allocate their caches."""
        probe = PagedAttention(self._make_cache)
        self.vocab_size = self._probe(probe)
        if not probe.shapes:
            raise ModelError(f"{type(self.model).__name__} has no layer that computes attention through the registry")
        self._backend = PagedAttention()
        # With packed weights, the few products of torch that are left keep the same bits in any batch.
        self._is_slow_in_bf16 = self._packed is None and multiplies_bf16_slowly(self.model)
        self.block_nbytes = sum(cache.block_nbytes for cache in probe.caches.values())
        self.num_blocks = num_blocks(self.block_nbytes)
        self._scratch_blocks = int(has_scratch)
        for layer, shape in probe.shapes.items():
            self._backend.caches[layer] = self._make_cache(layer, shape)
        on_cpu = self.device.type == "cpu"
        self._population = CachePopulation(self._cache_tensors() if on_cpu else [], self.block_size)
        self.description = f"paged KV cache of {self.num_blocks} blocks of {self.block_size} tokens"

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Return the logits `[rows, vocab_size]` of `batch.logit_rows`, float32, valid until the next call."""
        if not self._population.has_all:
            self._population.reach(int(batch.values.block_table.max()))
        # The recorded forward has no adapters. While adapters are loaded, all steps run the modules, so that results
        # have the same bits whether or not another sequence of the step uses an adapter.
        adapted = self.lora is not None and self.lora.names
        batch = batch.to(self.device)
        if self.graphs is not None and not adapted and self.graphs.takes(batch):
            return self.graphs.run(batch)
        if self.program is None or adapted:
            return self._run_modules(batch)
        if batch.num_tokens <= self.program.max_tokens:
            return self._replay(self.program, batch)
        # A prompt that the scheduler did not split may exceed `max_tokens`. Replay it in parts: the model's modules
        # would return results with other rounding errors.
        return torch.cat([self._replay(self.program, part).clone() for part in batch.split(self.program.max_tokens)])

    def _replay(self, program: StepProgram, batch: StepBatch) -> torch.Tensor:
        if not program.takes(batch):
            return self._run_modules(batch)
        if self._packed is not None:
            self._packed.begin_forward()
        return program.run(batch)

    def compile(self, max_tokens: int, max_blocks: int) -> str | None:
        """Record the forward and replay it from now on, without the modules.

        Args:
            max_tokens: largest number of tokens of a step.
            max_blocks: largest number of KV blocks of a sequence.

        Returns:
            The reason if the forward cannot be recorded, else None.
        """
        values = nullcontext() if self._packed is None else self._packed.without_values()
        try:
            with values:
                self.program = StepProgram(
                    self._run_modules,
                    self._backend,
                    max_tokens=max_tokens,
                    max_blocks=max_blocks,
                    vocabulary=self.vocab_size,
                )
        except NotRecordableError as error:
            return str(error)
        return None

    @property
    def is_asynchronous(self) -> bool:
        """True if `run` returns before the logits are computed."""
        return self.device.type == "cuda"

    def record_decodes(self, capture: Capture, max_sequences: int, max_blocks: int) -> None:
        """Record decode steps of each size of `bucket_sizes` at its first use, and replay them from then on.

        The runner must be built with `has_scratch`.

        Args:
            capture: recorder of a step on the device.
            max_sequences: largest number of sequences of a batch.
            max_blocks: largest number of KV blocks of a sequence.
        """
        self.graphs = DecodeGraphs(
            self._run_modules,
            capture,
            max_sequences=max_sequences,
            max_blocks=max_blocks,
            scratch_block=self.num_blocks,
            block_size=self.block_size,
            device=self.device,
        )

    def _run_modules(self, batch: StepBatch) -> torch.Tensor:
        if _attention_of(self.model) != self._attention:
            # closing another engine has restored the module's attention function, or the caller has set another one
            self._restore_attention = _install(self.model)
        self._backend.begin(batch)
        active = nullcontext() if self._packed is None else self._packed.active()
        adapters = nullcontext() if self.lora is None else self.lora.active(batch)
        # between two steps, the module of a training script may be in training mode
        mode = evaluating(self.model) if self.model.training else nullcontext()
        wide = widened_products(batch.num_tokens, enabled=self._is_slow_in_bf16)
        with torch.no_grad(), use_backend(self._backend), active, adapters, mode, wide:
            return self._forward(batch.token_ids, batch.positions, batch.logit_rows)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as pairs of source and destination."""
        sources, destinations = (torch.tensor(side, device=self.device) for side in zip(*pairs, strict=True))
        for tensor in self._cache_tensors():
            tensor[destinations] = tensor[sources]

    def save_blocks(self, blocks: Sequence[int]) -> SavedBlocks:
        """Return copies of blocks in host memory."""
        index = torch.tensor(blocks, device=self.device)
        return [tensor[index].cpu() for tensor in self._cache_tensors()]

    def restore_blocks(self, blocks: Sequence[int], saved: SavedBlocks) -> None:
        """Write saved values into blocks, not necessarily the blocks from which they were saved."""
        index = torch.tensor(blocks, device=self.device)
        for tensor, content in zip(self._cache_tensors(), saved, strict=True):
            tensor[index] = content.to(tensor.device)

    def release(self, sequence_id: int) -> None:
        """Do nothing: a sequence has no state here besides its blocks."""

    def fork(self, sequence_id: int, new_ids: Sequence[int]) -> None:
        """Do nothing: forked sequences share blocks through their block tables."""

    def use_idle_time(self) -> bool:
        """Allocate pages of the KV cache; return False if none are left. See [Note: pages of the cache]."""
        return self._population.advance()

    def refresh_weights(self) -> None:
        """Pack the weights of a live module again, after they have changed."""
        if self._packed is not None:
            self._packed.refresh()

    def close(self) -> None:
        """Free the KV cache, close the packed weights, and restore the model's attention function."""
        self.free_cache()
        if self._packed is not None:
            self._packed.close()

    def free_cache(self) -> None:
        """Free the KV cache, and restore the model's attention function. The packed weights stay usable."""
        self.program = None
        if self.graphs is not None:
            self.graphs.close()
        self._population.close()
        self._backend.caches.clear()
        self._restore_model()

    def _restore_model(self) -> None:
        self._take_positions()
        self._restore_attention()

    def _cache_tensors(self) -> list[torch.Tensor]:
        return [tensor for cache in self._backend.caches.values() for tensor in cache.tensors]

    def _make_cache(self, layer: LayerKey, shape: LayerShape) -> PagedKVCache:
        dtype = self.kv_dtype or (torch.bfloat16 if shape.dtype == torch.bfloat16 else torch.float32)
        blocks = self.num_blocks + self._scratch_blocks
        shapes = shape.kv_heads, shape.key_dim, shape.value_dim
        return make_kv_cache(blocks, self.block_size, *shapes, dtype, device=self.device)

    def _probe(self, backend: PagedAttention) -> int:
        """Run a few tokens in a cache of one block to record the layers; return the size of the vocabulary."""
        count = min(_PROBE_TOKENS, self.block_size)
        places = torch.arange(count, device=self.device)
        batch = StepBatch(
            token_ids=places * 0,
            positions=places,
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_lengths=torch.tensor([count], dtype=torch.int32),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            slots=places,
            logit_rows=places[-1:],
            sequence_ids=[0],
        ).to(self.device)
        backend.begin(batch)
        values = nullcontext() if self._packed is None else self._packed.without_values()
        with torch.inference_mode(), use_backend(backend), values:
            return self._forward(batch.token_ids, batch.positions, batch.logit_rows).shape[-1]


def check_pageable(model: Any, max_model_len: int | None = None) -> None:
    """Raise a ModelError if a sequence has more state than the keys and values of its tokens, or if its keys depend on
    the longest sequence of a batch.

    Args:
        max_model_len: tokens of the longest sequence; None: not known.
    """
    config = getattr(model, "config", None)
    name = type(model).__name__
    if config is None:
        return
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if others := sorted(kinds - PAGEABLE_LAYERS):
        raise ModelError(f"{name} has layers of the types {others}, whose state is not keys and values of tokens")
    if getattr(model, "_is_stateful", False) and not kinds:  # listed types decide: a hybrid may have only attention
        raise ModelError(f"{name} keeps a recurrent state, not keys and values of tokens")
    for rope in rope_settings(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in _LENGTH_DEPENDENT_ROPE:
            continue
        limit = _find_rope_limit(config, rope, kind)
        if limit is None or max_model_len is None or max_model_len > limit:
            advice = "" if limit is None else f"; with max_model_len up to {limit} they do not"
            raise ModelError(
                f"the rotary frequencies of {name} depend on the longest sequence of a batch ({kind}){advice}"
            )


def _find_rope_limit(config: Any, rope: dict[str, Any], kind: str) -> int | None:
    """Return the number of tokens up to which all sequences have the same rotary frequencies; None: not known."""
    if kind == "dynamic":
        return getattr(config, "max_position_embeddings", None)
    name = "original_max_position_embeddings"
    return rope.get(name) or getattr(config, name, None)


def _install(model: Any) -> Callable[[], None]:
    """Route the attention of a transformers model through windlass; return a function that restores its previous
    attention. Do nothing for other modules.
    """
    before = _attention_of(model)
    if before is None:
        return lambda: None  # another kind of module: its code calls windlass.attention, or the probe finds no layer
    _attention_before[model] = before = _attention_before.get(model, before)
    install_attention(model)

    def restore() -> None:
        _attention_before.pop(model, None)
        model.set_attn_implementation(before)

    return restore


def _attention_of(model: Any) -> str | None:
    """Return the name of the attention function of a transformers model; None for other modules."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        return None
    name: str = config._attn_implementation
    return name
