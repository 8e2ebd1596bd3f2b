"""Drafts of a smaller model, for speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from windlass.inference.block_manager import BlockKey, BlockManager, hash_block
from windlass.inference.engine_options import EngineOptions
from windlass.inference.model_forward import find_device
from windlass.inference.model_loading import DEFAULT_LENGTH, find_max_length
from windlass.inference.packed_modules import find_other_dtype
from windlass.inference.runner_factory import make_runner
from windlass.inference.step_batch import StepBatch
from windlass.inference.token_draw import greatest


@dataclass(eq=False)
class DraftSequence:
    """Tokens of a sequence in the cache of the draft model.

    Attributes:
        tokens: tokens with keys and values, drafts included.
        num_known: number of leading tokens that are not drafts.
        blocks: KV blocks in order.
        keys: prefix-cache keys of the full blocks of known tokens.
    """

    tokens: list[int] = field(default_factory=list)
    num_known: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)


@dataclass(eq=False)
class _Draft:
    sequence_id: int
    state: DraftSequence
    pending: list[int]  # tokens to compute
    room: int
    found: list[int] = field(default_factory=list)


class DraftModelProposer:
    """Proposer of the likeliest tokens of a smaller model.

    The keys and values of each sequence stay in the cache of the draft model: a step of the large model costs the draft
    model one forward for the accepted tokens of all sequences, and one for each further draft.

    Args:
        owned: True if nothing else uses the model, so that its weights may be packed and its steps recorded
            as CUDA graphs.
    """

    def __init__(self, model: nn.Module, options: EngineOptions, *, owned: bool = False) -> None:
        window = find_max_length(model) or options.max_model_len or DEFAULT_LENGTH
        # max_model_len limits only the large model; the draft model's cache has the draft model's maximum length
        own = options.replace(
            speculative=None,
            lora=None,
            max_model_len=None,
            weights=options.weights if owned else None,
            weights_tier="device",  # a draft model is small enough for the device
            weights_directory=None,
            weights_buffer_bytes=None,
            # drafts do not change the output, so matrix products of the draft model may differ between batches
            deterministic=options.deterministic and find_other_dtype(model) is None,
        )
        self._runner = make_runner(model.eval(), own, window, owned=owned)
        size = self._runner.block_size
        self._length = min(window, self._runner.num_blocks * size)
        self._pages = self._runner.block_nbytes > 0
        self._blocks = BlockManager(self._runner.num_blocks, size, prefix_caching=self._pages)
        self._budget = options.max_tokens_per_step
        self._device = find_device(model)
        self._states: dict[int, DraftSequence] = {}  # by sequence id, the least recently used first
        self.vocab_size = self._runner.vocab_size

    def propose(self, sequences: Sequence[tuple[int, list[int]]], count: int) -> list[list[int]]:
        """Return at most `count` drafts for each sequence, given its id and its tokens."""
        busy = {sequence_id for sequence_id, _ in sequences}
        drafts: dict[int, _Draft] = {}
        for sequence_id, tokens in sequences:
            # the last draft has no forward of its own, so its position needs no place in the cache
            room = min(count, self._length - len(tokens) + 1)
            if room > 0:
                state = self._begin(sequence_id, tokens)
                if self._grow(state, len(tokens) + room - 1, busy):
                    pending = tokens[len(state.tokens) :]
                    drafts[sequence_id] = _Draft(sequence_id, state, pending, room)
                else:
                    self.release(sequence_id)
        self._catch_up(list(drafts.values()))
        for depth in range(1, count):
            deeper = [draft for draft in drafts.values() if draft.room > depth]
            for draft in deeper:
                draft.pending = draft.found[-1:]
            self._catch_up(deeper)
        return [drafts[sequence_id].found if sequence_id in drafts else [] for sequence_id, _ in sequences]

    def release(self, sequence_id: int) -> None:
        """Free the blocks of a sequence. Their content stays until the blocks are allocated again."""
        state = self._states.pop(sequence_id, None)
        if state is not None:
            self._blocks.release(state.blocks)
            self._runner.release(sequence_id)

    def close(self) -> None:
        """Free the KV cache."""
        self._runner.close()

    def _begin(self, sequence_id: int, tokens: list[int]) -> DraftSequence:
        """Return the state of a sequence, truncated at the first token that differs from `tokens`: a rejected draft.

        A new state begins with blocks of the prefix cache. At least one token is left to compute.
        """
        state = self._states.pop(sequence_id, None)
        if state is None:
            state = DraftSequence()
            keys = self._extend_keys(state, tokens[: len(tokens) - 1])
            state.blocks = self._blocks.acquire_cached(keys)
            del state.keys[len(state.blocks) :]
            state.tokens = tokens[: len(state.blocks) * self._blocks.block_size]
        equal = min(state.num_known, len(state.tokens))
        while equal < min(len(state.tokens), len(tokens) - 1) and state.tokens[equal] == tokens[equal]:
            equal += 1
        if equal < len(state.tokens) and not self._pages:
            self._runner.release(sequence_id)  # the model's own cache cannot be truncated
            equal = 0
        state.tokens, state.num_known = state.tokens[:equal], len(tokens)
        self._states[sequence_id] = state
        return state

    def _extend_keys(self, state: DraftSequence, known: list[int]) -> list[BlockKey]:
        size = self._blocks.block_size
        while self._pages and (len(state.keys) + 1) * size <= len(known):
            start = len(state.keys) * size
            state.keys.append(hash_block(state.keys[-1] if state.keys else b"", known[start : start + size]))
        return state.keys

    def _grow(self, state: DraftSequence, tokens: int, busy: set[int]) -> bool:
        """Extend a sequence's blocks to `tokens` tokens, taking blocks of sequences outside `busy` if necessary.

        Returns:
            False if there are not enough blocks.
        """
        missing = self._blocks.blocks_for(tokens) - len(state.blocks)
        while missing > self._blocks.num_free:
            idle = next((other for other in self._states if other not in busy), None)
            if idle is None:
                return False
            self.release(idle)
        if missing > 0:
            state.blocks += self._blocks.allocate(missing)
        return True

    def _catch_up(self, drafts: Sequence[_Draft]) -> None:
        """Compute the pending tokens, at most `max_tokens_per_step` in a forward, and append the likeliest next token
        to each draft's `found`.
        """
        left = [draft for draft in drafts if draft.pending]
        while left:
            budget, chosen = self._budget, []
            for draft in left:
                part = draft.pending[:budget]
                if part:
                    chosen.append((draft, part))
                    budget -= len(part)
            best = greatest(self._runner.run(self._make_batch(chosen)))[1]
            for (draft, part), token in zip(chosen, best, strict=True):
                state = draft.state
                state.tokens = state.tokens + part
                draft.pending = draft.pending[len(part) :]
                if not draft.pending:
                    draft.found.append(token)
                    self._register(state)
            left = [draft for draft in left if draft.pending]

    def _register(self, state: DraftSequence) -> None:
        before = len(state.keys)
        keys = self._extend_keys(state, state.tokens[: state.num_known])
        for place in range(before, len(keys)):
            self._blocks.register(state.blocks[place], keys[place])

    def _make_batch(self, chosen: Sequence[tuple[_Draft, list[int]]]) -> StepBatch:
        size = self._blocks.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        table = torch.zeros(len(chosen), max(len(draft.state.blocks) for draft, _ in chosen), dtype=torch.int32)
        for row, (draft, part) in enumerate(chosen):
            blocks, first = draft.state.blocks, len(draft.state.tokens)
            places = range(first, first + len(part))
            ids += part
            positions += places
            slots += [blocks[place // size] * size + place % size for place in places]
            starts.append(len(ids))
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        lengths = [len(draft.state.tokens) + len(part) for draft, part in chosen]
        return StepBatch(
            torch.tensor(ids, device=self._device),
            torch.tensor(positions, device=self._device),
            torch.tensor(starts, dtype=torch.int32, device=self._device),
            torch.tensor(lengths, dtype=torch.int32, device=self._device),
            table.to(self._device),
            torch.tensor(slots, device=self._device),
            torch.tensor(starts[1:], device=self._device) - 1,
            [draft.sequence_id for draft, _ in chosen],
        )
