"""Sequences of an engine that run or wait, and the KV blocks that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from windlass.inference.block_manager import BlockManager
from windlass.inference.engine_options import EngineOptions
from windlass.inference.generation_request import GenerationSequence
from windlass.inference.outputs import EngineStats
from windlass.inference.preempted_blocks import PreemptedBlocks
from windlass.inference.scheduler import SequenceSnapshot, seniority
from windlass.inference.step_batch import ModelRunner
from windlass.inference.step_cost import StepCost


class SequenceTable:
    """Running sequences, which hold KV blocks, and waiting ones, which hold none.

    Args:
        stats: counters of the engine, which are updated here.

    Attributes:
        running, waiting: sequences by their ids.
        blocks: blocks of the KV cache.
        admits: False if sequences waited, the last plan admitted none of them, and no sequence was queued or freed
            since.
        cost: model of the time of a step; the step planner corrects it by measured times.
        fair_clock: virtual clock of the scheduler; see [Note: fair shares].
    """

    def __init__(self, runner: ModelRunner, options: EngineOptions, cost: StepCost, stats: EngineStats) -> None:
        self._runner, self._stats = runner, stats
        self.blocks = BlockManager(
            runner.num_blocks, runner.block_size, prefix_caching=options.prefix_caching and runner.block_nbytes > 0
        )
        self._saved = PreemptedBlocks(runner, options)
        self.cost = cost
        self.running: dict[int, GenerationSequence] = {}
        self.waiting: dict[int, GenerationSequence] = {}
        self.admits = True
        self.fair_clock = 0.0

    def queue(self, sequence: GenerationSequence) -> None:
        """Add a new sequence to the waiting ones."""
        sequence.fair_start = self.fair_clock
        self.waiting[sequence.sequence_id] = sequence
        self.admits = True

    def admit(self, sequence: GenerationSequence, now: float) -> bool:
        """Make a waiting sequence a running one: allocate blocks for its known tokens, and use its saved keys and
        values, or those in the prefix cache. Return False if too few blocks are free by now.
        """
        saved = None
        if sequence.saved is not None:
            if self.blocks.blocks_for(sequence.num_known) > self.blocks.num_free:
                return False
            saved = self._saved.read(sequence)
            if saved is None:
                self._saved.drop(sequence)
                sequence.num_computed = 0
        if saved is not None:
            sequence.blocks = self.blocks.allocate(self.blocks.blocks_for(sequence.num_known))
            self._saved.restore(sequence, saved)
        else:
            keys = self._cacheable_keys(sequence)
            cached, used = self.blocks.find_cached(keys)
            if self.blocks.blocks_for(sequence.num_known) - len(used) > self.blocks.num_free:
                return False
            sequence.blocks = self.blocks.acquire_cached(keys)
            sequence.num_registered = cached
            sequence.num_computed = cached * self.blocks.block_size
            sequence.blocks += self.blocks.allocate(self.blocks.blocks_for(sequence.num_known) - cached)
            self._count_lookup(sequence, len(keys))
        metrics = sequence.request.metrics
        if metrics.scheduled_time is None:
            metrics.scheduled_time = now
        del self.waiting[sequence.sequence_id]
        self.running[sequence.sequence_id] = sequence
        return True

    def grow(self, sequence: GenerationSequence, tokens: int, copies: list[tuple[int, int]]) -> None:
        """Extend a running sequence's blocks to `tokens` tokens. If the block of the next token is shared, replace it
        by a new block, and add (shared block, new block) to `copies`.
        """
        place = sequence.num_computed // self.blocks.block_size
        if place < len(sequence.blocks):
            block = sequence.blocks[place]
            writable = self.blocks.make_writable(block)
            if writable != block:
                sequence.blocks[place] = writable
                copies.append((block, writable))
        missing = self.blocks.blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.blocks.allocate(missing)

    def preempt(self, sequence: GenerationSequence) -> None:
        request = sequence.request
        request.metrics.num_preemptions += 1
        self._stats.num_preemptions += 1
        sequence.drafts = []
        self._saved.save(sequence, self.cost)
        self.free(sequence)
        del self.running[sequence.sequence_id]
        self.waiting[sequence.sequence_id] = sequence

    def preempt_all(self) -> None:
        """Preempt every running sequence, and drop all keys and values, including saved and cached ones."""
        for sequence in list(self.running.values()):
            self.preempt(sequence)
        for sequence in self.waiting.values():
            self._saved.drop(sequence)
            sequence.num_computed = 0
        self.blocks.clear_cache()

    def add_candidates(self, sequence: GenerationSequence, others: Sequence[GenerationSequence]) -> None:
        """Let new sequences continue from the computed tokens of `sequence` and share its blocks."""
        self.register_blocks(sequence)
        for other in others:
            other.num_computed, other.num_registered = sequence.num_computed, sequence.num_registered
            other.fair_start = sequence.fair_start
            other.blocks, other.block_keys = self.blocks.fork(sequence.blocks), list(sequence.block_keys)
            self.running[other.sequence_id] = other
        self._runner.fork(sequence.sequence_id, [other.sequence_id for other in others])

    def remove(self, sequence: GenerationSequence) -> None:
        """Remove a finished sequence. Its full blocks stay in the prefix cache."""
        if sequence.saved is None:  # a preempted sequence with saved blocks holds no KV blocks
            self.register_blocks(sequence)
        self._saved.drop(sequence)
        self.free(sequence)
        self.running.pop(sequence.sequence_id, None)
        self.waiting.pop(sequence.sequence_id, None)

    def free(self, sequence: GenerationSequence) -> None:
        self.admits = True
        if sequence.in_flight:
            return  # a started step still writes to these blocks; they are freed when the step is finished
        self.blocks.release(sequence.blocks)
        self._runner.release(sequence.sequence_id)
        sequence.blocks, sequence.num_registered = [], 0
        if sequence.saved is None:
            sequence.num_computed = 0

    def register_blocks(self, sequence: GenerationSequence) -> None:
        """Add the blocks that became full of accepted tokens to the prefix cache."""
        if not self.blocks.prefix_caching:
            return
        size = self.blocks.block_size
        full = min(sequence.num_computed, len(sequence.token_ids)) // size
        if full > sequence.num_registered:
            keys = sequence.keys_until(full, size)
            for place in range(sequence.num_registered, full):
                self.blocks.register(sequence.blocks[place], keys[place])
            sequence.num_registered = full

    def snapshot_running(
        self, sequences: Sequence[GenerationSequence], *, counts_freed: bool
    ) -> tuple[list[SequenceSnapshot], dict[int, int]]:
        """Return the snapshots of running sequences, and a dict from a block to the id of the sequence whose
        preemption frees the block. The dict is empty unless `counts_freed`.
        """
        snapshots = [self._snapshot_one(sequence) for sequence in sequences]
        freed_by: dict[int, int] = {}
        if not counts_freed:
            return snapshots, freed_by
        # the least senior sequence is preempted first, so a shared block is freed by its most senior holder
        holders: Counter[int] = Counter()
        counted = []
        for snapshot in sorted(snapshots, key=seniority, reverse=True):
            blocks = self.running[snapshot.sequence_id].blocks
            holders.update(blocks)
            freed = [block for block in blocks if holders[block] == self.blocks.references(block)]
            freed_by.update(dict.fromkeys(freed, snapshot.sequence_id))
            counted.append(replace(snapshot, num_freed=len(freed)))
        return counted, freed_by

    def _snapshot_one(self, sequence: GenerationSequence) -> SequenceSnapshot:
        last = sequence.num_computed // self.blocks.block_size
        return sequence.snapshot(
            num_computed=sequence.num_computed,
            num_blocks=len(sequence.blocks),
            num_freed=0,
            copies_block=last < len(sequence.blocks) and self.blocks.references(sequence.blocks[last]) > 1,
            now_candidates=count_candidates(sequence),
        )

    def snapshot_waiting(self, sequence: GenerationSequence, freed_by: Mapping[int, int]) -> SequenceSnapshot:
        """Return the snapshot of a waiting sequence; `freed_by` is the second result of `snapshot_running`."""
        computed, used = sequence.num_computed, list[int]()
        if sequence.saved is None:
            cached, used = self.blocks.find_cached(self._cacheable_keys(sequence))
            computed = cached * self.blocks.block_size
        snapshot = sequence.snapshot(
            num_computed=computed,
            num_blocks=len(used),
            num_freed=0,
            copies_block=False,
            now_candidates=count_candidates(sequence),
        )
        if not used:
            return snapshot
        return replace(snapshot, shared=Counter(freed_by[block] for block in used if block in freed_by))

    def close(self) -> None:
        """Remove the files of preempted sequences."""
        self._saved.close()

    def _cacheable_keys(self, sequence: GenerationSequence) -> list[bytes]:
        """Return the keys of the blocks that may be taken from the prefix cache: full blocks before the last token,
        which is always computed. The list is empty if log-probabilities of the prompt are requested, which need
        all tokens, or if prefix caching is off.
        """
        if not self.blocks.prefix_caching or sequence.request.params.prompt_logprobs is not None:
            return []
        size = self.blocks.block_size
        return sequence.keys_until((len(sequence.token_ids) - 1) // size, size)

    def _count_lookup(self, sequence: GenerationSequence, blocks: int) -> None:
        size = self.blocks.block_size
        if not sequence.has_sampled and sequence.request.metrics.num_preemptions == 0:
            sequence.request.metrics.num_cached_tokens = sequence.num_computed
        self._stats.prefix_cache_queries += blocks * size
        self._stats.prefix_cache_hits += sequence.num_computed


def count_candidates(sequence: GenerationSequence) -> int:
    """Return the number of sequences that a sequence becomes once its prompt is computed; 1 after that."""
    return 1 if sequence.has_sampled else sequence.request.params.num_candidates
