"""Plans of steps: which sequences compute how many tokens, their blocks, and the batch for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from windlass.inference.engine_options import EngineOptions
from windlass.inference.generation_request import GenerationSequence
from windlass.inference.scheduler import Policy, SchedulerLimits, StepPlan, lateness, schedule
from windlass.inference.sequence_table import SequenceTable, count_candidates
from windlass.inference.step_batch import ModelRunner, StepBatch
from windlass.inference.step_cost import StepCost
from windlass.inference.token_draw import upload

_SCALE_WEIGHT = 0.1  # weight of the latest step in the moving average of actual time / predicted time
_SCALE_RANGE = (0.5, 4.0)  # bounds of one step's ratio, so that an exceptional step changes little


@dataclass(frozen=True)
class PlannedStep:
    """Step that can be started.

    Attributes:
        chosen: sequences, each with its number of tokens in the step.
        rows: for each sequence, its rows of the logits; empty for a step of `plan_next`.
        predicted: predicted seconds of the step, without the correction by `StepCost.scale`.
        has_prompts: True if the step computes parts of prompts, or recomputes answers after a preemption.
    """

    batch: StepBatch
    chosen: list[tuple[GenerationSequence, int]]
    rows: list[list[int]]
    predicted: float
    has_prompts: bool


class StepPlanner:
    """Planner of the steps of one engine.

    Args:
        depth: largest number of started steps that are not finished.

    Attributes:
        limits: limits of the scheduler.
        alone: ids of requests that run next in a step without other requests, in order; see [Note: failed steps].
    """

    def __init__(self, runner: ModelRunner, options: EngineOptions, table: SequenceTable, depth: int) -> None:
        self._runner, self._table, self._depth = runner, table, depth
        self.limits = SchedulerLimits(
            options.policy,
            options.max_tokens_per_step,
            options.max_sequences,
            runner.block_size,
            runner.num_blocks,
            None if options.max_gap_ms is None else options.max_gap_ms / 1e3,
            options.max_wait_seconds,
        )
        self.alone: dict[str, None] = {}

    @property
    def cost(self) -> StepCost:
        """Model of the time of a step, corrected by measured times."""
        return self._table.cost

    def set_policy(self, policy: Policy) -> None:
        """Schedule by another policy from the next step on."""
        self.limits = replace(self.limits, policy=policy)

    def plan(self, now: float, *, has_started: bool) -> PlannedStep | None:
        """Schedule a step: preempt and admit sequences, allocate blocks, and copy shared blocks. Return None if
        no sequence can run now.

        Args:
            has_started: True if some started steps are not finished.

        Raises:
            RuntimeError: no sequence can run although all started steps are finished, which is a bug.
        """
        share = self._find_share()
        plan = self._schedule(now, share)
        if plan.preempted and share is not None:
            if has_started:
                return None  # plan again when no started step is left: only then can every sequence be preempted
            plan = self._schedule(now, None)
        self._table.admits = bool(plan.admitted) or not self._table.waiting
        for sequence_id in plan.preempted:
            self._table.preempt(self._table.running[sequence_id])
        chosen: list[tuple[GenerationSequence, int]] = []
        copies: list[tuple[int, int]] = []
        for sequence_id, count in plan.num_tokens.items():
            running = self._table.running.get(sequence_id)
            if running is not None:
                dropped = max(count - 1, 0)
                if running.drafts and count < running.num_known - running.num_computed:
                    running.drafts = running.drafts[:dropped]
                self._table.grow(running, running.num_computed + count, copies)
                chosen.append((running, count))
        for sequence_id in plan.admitted:
            sequence = self._table.waiting[sequence_id]
            if self._table.admit(sequence, now) and sequence_id in plan.num_tokens:
                left = sequence.num_known - sequence.num_computed
                chosen.append((sequence, min(plan.num_tokens[sequence_id], left)))
        if not chosen:
            if self.alone:  # the request waits for blocks of other requests, which must run to free them
                self.alone.clear()
            elif not plan.preempted and not plan.admitted and not has_started:
                raise RuntimeError("no sequence can run, although the KV cache has room for each; report this as a bug")
            return None
        self._count_prompt_work(chosen)
        if copies:
            self._runner.copy_blocks(copies)
        batch, rows = self._make_batch(chosen)
        has_prompts = any(one.is_prompt for one, _ in chosen)
        return PlannedStep(batch, chosen, rows, self._predict(chosen), has_prompts)

    def plan_next(self, last: Sequence[GenerationSequence], ids: torch.Tensor) -> PlannedStep | None:
        """Plan a decode step while the tokens of the previous step are only on the device; see [Note: one step ahead].

        Args:
            last: all sequences of the previous step.
            ids: int64 `[sequences]`, tokens of these sequences on the device.

        Returns:
            The step; None if no sequence continues, or if the step may need other sequences: one has ended, requests
            can be admitted, prompts are being computed, or blocks have run out.
        """
        chosen = [sequence for sequence in last if not sequence.output.finished()]
        others = len(self._table.running) > len(chosen) or (self._table.waiting and self._table.admits)
        rows = [row for row, s in enumerate(chosen) if len(s.generated) + s.in_flight < s.request.max_tokens]
        going = [chosen[row] for row in rows]
        totals = [sequence.num_computed + sequence.in_flight + 1 for sequence in going]
        blocks = self._table.blocks
        missing = sum(
            max(blocks.blocks_for(total) - len(sequence.blocks), 0)
            for sequence, total in zip(going, totals, strict=True)
        )
        if others or not going or len(chosen) < len(last) or missing > blocks.num_free:
            return None
        if len(going) < len(chosen):
            ids = ids[upload(torch.tensor(rows), ids.device)]
        for sequence, total in zip(going, totals, strict=True):
            self._table.grow(sequence, total, [])
        decodes = [(sequence, 1) for sequence in going]
        return PlannedStep(self._make_next_batch(going, totals, ids), decodes, [], self._predict(decodes), False)

    def _count_prompt_work(self, chosen: Sequence[tuple[GenerationSequence, int]]) -> None:
        """Add the step's work to `fair_start` of its prompts, and advance the clock; see [Note: fair shares]."""
        work = 0.0
        for sequence, count in chosen:
            if sequence.is_prompt:
                part = self.cost.prompt_work(count, sequence.num_computed)
                sequence.fair_start += part
                work += part
        if work:
            prompts = sum(sequence.is_prompt for sequence in self._table.running.values())
            self._table.fair_clock += work / (prompts + len(self._table.waiting))

    def predict_lateness(self, sequence: GenerationSequence, now: float) -> float:
        """Return the `lateness` in seconds that the queue would have with `sequence` in it."""
        running, _ = self._table.snapshot_running(list(self._table.running.values()), counts_freed=False)
        queued = [*self._table.waiting.values(), sequence]
        waiting = [self._table.snapshot_waiting(one, {}) for one in queued]
        return lateness(running, waiting, self.limits, self.cost, now)

    def correct_cost(self, seconds: float, predicted: float) -> None:
        """Correct later predictions by the measured time of a step with prompts: the machine may have become slower,
        e.g. because other processes use its cores.
        """
        if predicted > 0:
            least, most = _SCALE_RANGE
            ratio = min(max(seconds / predicted, least), most)
            scale = self.cost.scale + _SCALE_WEIGHT * (ratio - self.cost.scale)
            self._table.cost = replace(self.cost, scale=scale)

    def _find_share(self) -> int | None:
        """Return the limit on a step's sequences that leaves some for the steps of other stages; None: no limit."""
        if self._depth == 1:
            return None
        total = len(self._table.running) + (len(self._table.waiting) if self._table.admits else 0)
        return max(1, -(-min(total, self.limits.max_sequences) // self._depth))

    def _schedule(self, now: float, share: int | None) -> StepPlan:
        """Plan a step of at most `share` running sequences, the least recently computed ones; None: no limit."""
        # Count the blocks that preemptions would free only if `schedule` may preempt: counting reads every block.
        drafts = max((len(sequence.drafts) for sequence in self._table.running.values()), default=0)
        enough = len(self._table.running) * (2 + drafts // self._table.blocks.block_size + 1)
        idle = [sequence for sequence in self._table.running.values() if not sequence.in_flight]
        waiting = list(self._table.waiting.values())
        if self.alone:
            alone = next(iter(self.alone))
            idle = [sequence for sequence in idle if sequence.request.request_id == alone]
            waiting = [sequence for sequence in waiting if sequence.request.request_id == alone]
        if share is not None:
            idle = sorted(idle, key=lambda sequence: sequence.last_step)[:share]
        places = sum(count_candidates(sequence) for sequence in self._table.running.values())
        waiting = self._find_admissible(waiting, places)
        counts = bool(waiting) or self._table.blocks.num_free < enough
        running, freed_by = self._table.snapshot_running(idle, counts_freed=counts)
        return schedule(
            running,
            [self._table.snapshot_waiting(sequence, freed_by) for sequence in waiting],
            self._table.blocks.num_free,
            self.limits,
            self.cost,
            now,
            elsewhere=places - sum(count_candidates(sequence) for sequence in idle),
            share=share,
        )

    def _find_admissible(self, waiting: list[GenerationSequence], places: int) -> list[GenerationSequence]:
        """Return the waiting sequences, or none of them if `schedule` would admit none.

        Snapshots of thousands of waiting sequences would take longer than all other work of a plan.

        Args:
            places: number of the batch's `max_sequences` places that running sequences and their candidates take.
        """
        running, blocks = self._table.running, self._table.blocks
        # An admission needs one block, and one free block per running sequence; see the scheduler's `_lacks_blocks`.
        lacks_blocks = blocks.num_free < min(1 + len(running), blocks.num_blocks)
        if not running or not waiting or (places < self.limits.max_sequences and not lacks_blocks):
            return waiting
        last = max(sequence.request.priority for sequence in running.values())
        may_preempt = any(sequence.request.priority < last for sequence in waiting)
        return waiting if may_preempt else []

    def _predict(self, chosen: Sequence[tuple[GenerationSequence, int]]) -> float:
        """Return the predicted seconds of a step, without the correction by earlier steps."""
        cached, pairs = 0, 0.0
        for sequence, count in chosen:
            if sequence.is_prompt:
                pairs += count * (sequence.num_computed + count / 2)
            else:
                cached += sequence.num_computed
        return self.cost.step_seconds(sum(count for _, count in chosen), cached, pairs) / self.cost.scale

    def _make_batch(self, chosen: Sequence[tuple[GenerationSequence, int]]) -> tuple[StepBatch, list[list[int]]]:
        size = self._table.blocks.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths = [0], []
        logit_rows: list[int] = []
        rows_of: list[list[int]] = []
        for sequence, count in chosen:
            first, stop = sequence.num_computed, sequence.num_computed + count
            tokens = sequence.token_ids
            new = tokens[first:stop]
            if sequence.drafts and stop > len(tokens):
                new = new + sequence.drafts[: stop - len(tokens)]
            rows = _logit_positions(sequence, first, stop)
            rows_of.append(list(range(len(logit_rows), len(logit_rows) + len(rows))))
            logit_rows += [len(ids) + position - first for position in rows]
            ids += new
            positions += range(first, stop)
            blocks = sequence.blocks
            slots += [blocks[place // size] * size + place % size for place in range(first, stop)]
            starts.append(len(ids))
            lengths.append(stop)
        batch = StepBatch(
            np.array(ids, dtype=np.int64),
            np.array(positions, dtype=np.int64),
            np.array(starts, dtype=np.int32),
            np.array(lengths, dtype=np.int32),
            _make_table([sequence for sequence, _ in chosen]),
            np.array(slots, dtype=np.int64),
            np.array(logit_rows, dtype=np.int64),
            [sequence.sequence_id for sequence, _ in chosen],
            [sequence.request.lora_name for sequence, _ in chosen],
        )
        return batch, rows_of

    def _make_next_batch(
        self, sequences: Sequence[GenerationSequence], totals: Sequence[int], ids: torch.Tensor
    ) -> StepBatch:
        """Return the batch of a decode step whose input tokens are `ids`, which are on the device.

        Args:
            totals: number of computed tokens of each sequence after the step.
        """
        size = self._table.blocks.block_size
        count = len(sequences)
        slots = [
            sequence.blocks[(total - 1) // size] * size + (total - 1) % size
            for sequence, total in zip(sequences, totals, strict=True)
        ]
        return StepBatch(
            ids,
            np.array(totals, dtype=np.int64) - 1,
            np.arange(count + 1, dtype=np.int32),
            np.array(totals, dtype=np.int32),
            _make_table(sequences),
            np.array(slots, dtype=np.int64),
            np.arange(count, dtype=np.int64),
            [sequence.sequence_id for sequence in sequences],
            [sequence.request.lora_name for sequence in sequences],
        )


def wants_prompt_logprobs(sequence: GenerationSequence) -> bool:
    """Return True if log-probabilities of prompt tokens are still to be reported."""
    logprobs = sequence.request.prompt_logprobs
    return logprobs is not None and not sequence.has_sampled and len(logprobs) < len(sequence.request.prompt_ids)


def _logit_positions(sequence: GenerationSequence, first: int, stop: int) -> range:
    """Return the positions in `[first, stop)` that need logits."""
    known = len(sequence.token_ids)
    if wants_prompt_logprobs(sequence):
        return range(first, stop)
    return range(max(known - 1, first), stop)


def _make_table(sequences: Sequence[GenerationSequence]) -> npt.NDArray[np.int32]:
    """Return the block table of a batch."""
    widest = max(len(sequence.blocks) for sequence in sequences)
    rows = [sequence.blocks + [0] * (widest - len(sequence.blocks)) for sequence in sequences]
    return np.array(rows, dtype=np.int32)
