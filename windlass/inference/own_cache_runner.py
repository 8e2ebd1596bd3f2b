"""Runner of models that keep their own cache: one sequence at a time, by the model's own generation methods."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.base.module_modes import evaluating
from windlass.inference.lora import LoraAdapters
from windlass.inference.model_forward import CausalForward, find_device, find_first_position, get_logits
from windlass.inference.packed_modules import PackedModules
from windlass.inference.step_batch import SavedBlocks, StepBatch
from windlass.inference.widened_products import multiplies_bf16_slowly, widened_products


@dataclass
class OwnCacheState:
    """State of one sequence.

    Attributes:
        token_ids: all tokens so far.
        num_computed: number of leading tokens in the cache.
        model_kwargs: arguments of the next forward, including the model's cache.
    """

    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    model_kwargs: dict[str, Any] = field(default_factory=dict)


class OwnCacheModelRunner:
    """Runner of any causal language model, each sequence in a forward of its own.

    A model of transformers with a cache for each sequence (keys and values, or a recurrent state) uses it as in
    `generate`. Any other module computes all tokens again in each step. Chunks of a prompt are collected and computed
    when logits are due, since recurrent layers cannot continue with several tokens.

    Args:
        block_size, num_blocks: numbers for the scheduler; no blocks are allocated.
        packed: packed weights, which are used inside of `run`.
        uses_cache: use the model's cache, if it has one.

    Attributes:
        keeps_cache: True if the model's cache is used.
    """

    computes_drafts = False
    is_asynchronous = False
    can_repeat = True
    block_nbytes = 0

    def __init__(
        self,
        model: nn.Module,
        *,
        block_size: int,
        num_blocks: int,
        packed: PackedModules | None = None,
        uses_cache: bool = True,
    ) -> None:
        self._packed = packed
        self.lora: LoraAdapters | None = None
        self.block_size, self.num_blocks = block_size, num_blocks
        self.model: Any = model
        self._forward = CausalForward(model)
        self.keeps_cache = uses_cache and _has_generation_cache(model)
        parameters = inspect.signature(model.forward).parameters
        only_mamba = "cache_params" in parameters and "past_key_values" not in parameters
        self._cache_name = "cache_params" if only_mamba else "past_key_values"
        self._positions = _PositionSource(model) if self.keeps_cache and "position_ids" in parameters else None
        self._states: dict[int, OwnCacheState] = {}
        self._is_slow_in_bf16 = multiplies_bf16_slowly(model)
        self.device = find_device(model)
        kept = "the model's own cache" if self.keeps_cache else "all tokens computed again in each step"
        self.description = f"{kept}, one sequence at a time"
        ids = torch.zeros(2, dtype=torch.long, device=self.device)
        with torch.inference_mode(), nullcontext() if packed is None else packed.without_values():
            self.vocab_size = self._recompute(ids, ids[:1]).shape[-1]

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Return the logits `[rows, vocab_size]` of `batch.logit_rows`, float32.

        Raises:
            ModelError: the model returns only the logits of the last token, and others are needed; or a sequence does
                not continue where its state ends.
        """
        starts = batch.query_start.tolist()
        rows, tokens = batch.logit_rows.tolist(), batch.token_ids.tolist()
        positions = batch.positions.tolist()
        found: dict[int, torch.Tensor] = {}
        active = nullcontext() if self._packed is None else self._packed.active()
        mode = evaluating(self.model) if self.model.training else nullcontext()
        with torch.inference_mode(), active, mode:
            for number, sequence_id in enumerate(batch.sequence_ids):
                start, stop = starts[number], starts[number + 1]
                state = self._states.setdefault(sequence_id, OwnCacheState())
                if len(state.token_ids) != positions[start]:
                    raise ModelError(
                        f"sequence {sequence_id} continues at token {positions[start]}, but its cache ends at "
                        f"{len(state.token_ids)}; report this as a bug"
                    )
                state.token_ids += tokens[start:stop]
                wanted = [row for row in rows if start <= row < stop]
                if wanted:
                    offset = positions[start] - start
                    adapter = batch.adapters[number] if batch.adapters else None
                    applied = nullcontext() if self.lora is None else self.lora.active_for_all(adapter)
                    with applied:
                        logits = self._advance(state, [row + offset for row in wanted])
                    found.update(zip(wanted, logits, strict=True))
        if not rows:  # the step has only parts of prompts, which need no logits
            return torch.empty(0, self.vocab_size, device=self.device)
        return torch.stack([found[row] for row in rows])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing: blocks have no content."""

    def use_idle_time(self) -> bool:
        """Return False: there is no idle work, since the model allocates its cache itself."""
        return False

    def save_blocks(self, blocks: Sequence[int]) -> SavedBlocks:
        """Raise a ModelError: there are no blocks. A preempted sequence is computed again."""
        raise ModelError("a model with its own cache has no blocks to save")

    def restore_blocks(self, blocks: Sequence[int], saved: SavedBlocks) -> None:
        """Raise a ModelError: there are no saved blocks."""
        raise ModelError("a model with its own cache has no blocks to restore")

    def release(self, sequence_id: int) -> None:
        """Free the cache of a sequence."""
        self._states.pop(sequence_id, None)

    def fork(self, sequence_id: int, new_ids: Sequence[int]) -> None:
        """Copy the cache of a sequence to new sequences."""
        for new_id in new_ids:
            self._states[new_id] = copy.deepcopy(self._states[sequence_id])

    def refresh_weights(self) -> None:
        """Pack the weights of a live module again, after they have changed."""
        if self._packed is not None:
            self._packed.refresh()

    def close(self) -> None:
        """Free all caches and packed weights."""
        self.free_cache()
        if self._packed is not None:
            self._packed.close()

    def free_cache(self) -> None:
        """Free all caches, but not the packed weights, which another runner may use."""
        self._states.clear()

    def _advance(self, state: OwnCacheState, wanted: list[int]) -> list[torch.Tensor]:
        """Compute all pending tokens; return the logits at the positions `wanted`."""
        ids = torch.tensor(state.token_ids, device=self.device)
        if not self.keeps_cache:
            return list(self._recompute(ids, torch.tensor(wanted, device=self.device)))
        found: dict[int, torch.Tensor] = {}
        while state.num_computed < len(ids):
            # compute the whole prompt at once, then one token at a time
            stop = len(ids) if state.num_computed == 0 else state.num_computed + 1
            logits = self._forward_with_cache(state, ids[:stop], only_last=wanted == [stop - 1])
            first = stop - logits.shape[0]
            found.update({place: logits[place - first] for place in wanted if first <= place < stop})
            state.num_computed = stop
        if missing := [place for place in wanted if place not in found]:
            raise ModelError(
                f"{type(self.model).__name__} returns only the logits of the last token, and those of the tokens "
                f"{missing[0]} to {missing[-1]} are needed; leave out prompt_logprobs"
            )
        return [found[place].float() for place in wanted]

    def _forward_with_cache(self, state: OwnCacheState, ids: torch.Tensor, *, only_last: bool) -> torch.Tensor:
        kwargs = state.model_kwargs
        if state.num_computed == 0:
            kwargs["use_cache"] = True
            kwargs["attention_mask"] = torch.ones(1, len(ids), dtype=torch.long, device=self.device)
            if self.model._supports_default_dynamic_cache():
                from transformers import DynamicCache

                kwargs[self._cache_name] = DynamicCache(config=self.model.config.get_text_config(decoder=True))
            if self._positions is not None and (positions := self._positions.make(ids, kwargs)) is not None:
                kwargs["position_ids"] = positions
            inputs = self.model.prepare_inputs_for_generation(ids[None], is_first_iteration=True, **kwargs)
        else:
            inputs = self.model.prepare_inputs_for_generation(ids[None], next_sequence_length=1, **kwargs)
        if "logits_to_keep" in self._forward.accepts:
            inputs["logits_to_keep"] = 1 if only_last else 0  # 0: logits of all tokens; models' defaults differ
        inputs["return_dict"] = True
        with widened_products(len(ids) - state.num_computed, enabled=self._is_slow_in_bf16):
            outputs = self.model(**inputs)
        state.model_kwargs = self.model._update_model_kwargs_for_generation(outputs, kwargs)
        return get_logits(outputs)[0]

    def _recompute(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with widened_products(len(ids), enabled=self._is_slow_in_bf16):
            return self._forward(ids, None, rows)


class _PositionSource:
    """Positions of a prompt, as `generate` passes them. Without positions, some models count from 0 in each forward."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._first = find_first_position(model)

    def make(self, ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the positions of `ids` `[tokens]`: `[1, tokens]`, with more dimensions for multimodal models; None if
        the model makes them.
        """
        prepare = getattr(self._model, "_prepare_position_ids_for_generation", None)
        if prepare is None:
            return torch.arange(len(ids), device=ids.device)[None] + self._first
        found: torch.Tensor | None = prepare(ids[None], model_kwargs)
        return None if found is None else found + self._first


def _has_generation_cache(model: Any) -> bool:
    """Return True if the model has the generation methods of a recent transformers, and a cache for each sequence."""
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None or not hasattr(model, "_update_model_kwargs_for_generation"):
        return False
    if not hasattr(model, "_supports_default_dynamic_cache"):
        return False
    if any(hasattr(module, "_setup_cache") for module in model.modules()):
        return False  # RecurrentGemma: layers keep the state of the last batch, whichever cache they get
    from transformers import GenerationMixin

    # older releases count cache positions in another way; with them, the runner computes all tokens again
    return "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
