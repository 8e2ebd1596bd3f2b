"""Engine of continuous batching: requests in, one step at a time, outputs out."""

from __future__ import annotations

import itertools
import operator
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import EngineOverloadedError, ModelError, RequestError
from windlass.base.log import logger
from windlass.base.model_updates import count_updates
from windlass.base.text import one_line
from windlass.inference.block_manager import BlockManager
from windlass.inference.detokenizer import Detokenizer, find_stop, held_back
from windlass.inference.engine_options import EngineOptions
from windlass.inference.generation_request import GenerationRequest, GenerationSequence
from windlass.inference.lora import LoraAdapters
from windlass.inference.outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from windlass.inference.preempted_blocks import PreemptedBlocks
from windlass.inference.sampler import (
    PendingTokens,
    SampledToken,
    SequenceSampler,
    can_draw_later,
    draw_later,
    sample,
    take_logprobs,
)
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.scheduler import Policy, SchedulerLimits, SequenceSnapshot, ServiceLevel, StepPlan, schedule
from windlass.inference.speculation import DraftProposer
from windlass.inference.step_batch import ModelRunner, PipelinedRunner, StepBatch
from windlass.inference.step_cost import StepCost
from windlass.inference.structured_output import OutputConstraint, StructuredOutputCompiler
from windlass.inference.token_draw import upload

_MAX_FAILURES = 2  # requests in a row that may fail alone before the engine is at fault


@dataclass
class _StartedStep:
    """Step whose logits are not computed, or have not arrived, so far.

    Attributes:
        chosen: sequences with their numbers of tokens.
        rows: rows of the logits of each.
        began: time of the start.
        predicted: seconds of the step, on a machine as fast as at the measurement.
        pending: tokens that the device draws; None: the step runs when it is finished, or on other ranks.
    """

    batch: StepBatch
    chosen: list[tuple[GenerationSequence, int]]
    rows: list[list[int]]
    began: float
    predicted: float
    pending: PendingTokens | None = None


_SCALE_WEIGHT = 0.1  # of the latest step in the ratio of actual to predicted times
_SCALE_RANGE = (0.5, 4.0)  # a step that was held up, or ran alone for once, changes little


class LLMEngine:
    """Scheduler, KV blocks, model and sampler of one model.

    Not thread-safe: one thread adds requests and runs steps. `windlass.inference.async_engine` wraps it for servers.

    Args:
        runner: the model.
        tokenizer: of transformers; None: prompts are token ids and outputs have no text.
        eos_ids: tokens that end an answer.
        max_model_len: tokens of a sequence.
        cost: predicts the time of a step.
        proposer: source of drafts.
        clock: time in seconds.
    """

    def __init__(
        self,
        runner: ModelRunner,
        options: EngineOptions,
        *,
        tokenizer: Any = None,
        eos_ids: Iterable[int] = (),
        max_model_len: int,
        cost: StepCost | None = None,
        proposer: DraftProposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.options, self.tokenizer = runner, options, tokenizer
        self.eos_ids, self.max_model_len = frozenset(eos_ids), max_model_len
        self.cost = cost or StepCost()
        self._proposer = proposer if runner.computes_drafts else None
        self._pipelined = runner if isinstance(runner, PipelinedRunner) and runner.depth > 1 else None
        self._looks_ahead = self._pipelined is None and runner.is_asynchronous and self._proposer is None
        self._started: deque[_StartedStep] = deque()
        self._finished_at = 0.0
        self._admits = True  # the last step admitted waiting sequences, if there were any
        self._clock = clock
        self._blocks = BlockManager(
            runner.num_blocks, runner.block_size, prefix_caching=options.prefix_caching and runner.block_nbytes > 0
        )
        self._limits = SchedulerLimits(
            options.policy,
            options.max_tokens_per_step,
            options.max_sequences,
            runner.block_size,
            runner.num_blocks,
            None if options.max_gap_ms is None else options.max_gap_ms / 1e3,
            options.max_wait_seconds,
        )
        self._requests: dict[str, GenerationRequest] = {}
        self._running: dict[int, GenerationSequence] = {}
        self._waiting: dict[int, GenerationSequence] = {}
        self._numbers = itertools.count()
        self._seeds = random.Random(options.seed)
        self.constraints = StructuredOutputCompiler(tokenizer, runner.vocab_size, self.eos_ids)
        self._preempted = PreemptedBlocks(runner, options, self.cost)
        self._stats = EngineStats(kv_blocks=runner.num_blocks)
        self._finished_counts: dict[str, int] = {}
        self._updates = count_updates(runner.model)
        self._changed: dict[str, GenerationRequest] = {}
        self._token_texts: dict[int, str] = {}  # at most one for each token of the vocabulary
        self._failed: list[str] = []  # requests of the steps that the last call of `step` could not finish
        self._alone: dict[str, None] = {}  # requests that run alone once; see [Note: failed steps]
        self._failures = 0  # requests in a row that failed alone

    # requests

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        level: ServiceLevel | None = None,
        lora_name: str | None = None,
        arrival: float | None = None,
        streams: bool = False,
        constraint: OutputConstraint | None = None,
    ) -> None:
        """Queue a request.

        Args:
            prompt: text, or token ids.
            priority: lower values run first.
            level: service level that the request declares.
            lora_name: name of the adapter.
            arrival: time of the engine's clock; None: now.
            streams: `step` reports the request at every token, not at its end alone.
            constraint: that of `params`, compiled by `constraints`; None: it is compiled here.

        Raises:
            RequestError: the request cannot be served. Others go on.
            EngineOverloadedError: the queue is full.
        """
        if request_id in self._requests:
            raise RequestError(f"a request {request_id!r} is running already; use another id", parameter="request_id")
        limit = self.options.max_queued
        if limit is not None and len(self._waiting) >= limit:
            raise EngineOverloadedError(f"{limit} requests are waiting, which is the limit; try again later")
        text, ids = self.encode(prompt)
        self._check_prompt(ids, params)
        salt = b""
        if lora_name is not None:
            adapters = self._adapters()
            adapters.check_name(lora_name)
            salt = adapters.cache_salt(lora_name)
        room = self.max_model_len - len(ids)
        now = self._clock() if arrival is None else arrival
        request = GenerationRequest(
            request_id,
            text,
            ids,
            params,
            room if params.max_tokens is None else min(params.max_tokens, room),
            RequestMetrics(now),
            priority,
            level,
            lora_name,
            streams,
            salt,
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        sequence = self._make_sequence(request, constraint=constraint)
        request.sequences.append(sequence)
        self._requests[request_id] = request
        self._waiting[sequence.sequence_id] = sequence
        self._admits = True

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request with the finish reason `abort`, free its blocks and return its last state; None for an unknown
        id.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, "abort")
        self._forget(request)
        self._changed.pop(request_id, None)
        return request.to_output()

    def has_requests(self) -> bool:
        """Return True if a request is unfinished, or has outputs that `step` has not returned."""
        return bool(self._running or self._waiting or self._started or self._changed)

    def encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        """Return text and token ids of a prompt.

        Raises:
            RequestError: the prompt is neither, or a text without a tokenizer.
        """
        if not isinstance(prompt, str):
            ids = _token_ids(prompt)
            wrong = next((token for token in ids if not 0 <= token < self.runner.vocab_size), None)
            if wrong is not None:
                raise RequestError(
                    f"token {wrong} of the prompt is not in the vocabulary of {self.runner.vocab_size} tokens",
                    parameter="prompt",
                )
            return None, ids
        if self.tokenizer is None:
            raise RequestError("the engine has no tokenizer; give the prompt as token ids", parameter="prompt")
        try:
            return prompt, list(self.tokenizer(prompt).input_ids)
        except (TypeError, UnicodeError) as error:  # a lone surrogate, e.g. of bytes that are no UTF-8
            raise RequestError(f"the prompt is no valid Unicode text: {error}", parameter="prompt") from error

    @property
    def lora_names(self) -> list[str]:
        """Names of the loaded LoRA adapters."""
        return [] if self.runner.lora is None else self.runner.lora.names

    def add_lora(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter of peft, between steps.

        Raises:
            ModelError: it cannot be read, or does not fit the model; or the model takes none.
            RequestError: an adapter of this name is loaded.
        """
        self._adapters().add(name, directory)

    def remove_lora(self, name: str) -> None:
        """Forget a LoRA adapter.

        Raises:
            RequestError: there is none of this name, or unfinished requests use it.
        """
        adapters = self._adapters()
        adapters.check_name(name)
        users = sum(request.lora_name == name for request in self._requests.values())
        if users:
            raise RequestError(
                f"{users} unfinished requests use the adapter {name!r}; wait for their end or cancel them",
                parameter="lora_name",
            )
        adapters.remove(name)

    def _adapters(self) -> LoraAdapters:
        if self.runner.lora is None:
            raise RequestError("this engine takes no LoRA adapters; start it with tp=1", parameter="lora_name")
        return self.runner.lora

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        used = self._blocks.num_blocks - self._blocks.num_free
        return replace(
            self._stats,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=used / max(self._blocks.num_blocks, 1),
            finished=dict(self._finished_counts),
        )

    def set_policy(self, policy: Policy) -> None:
        """Schedule by another policy from the next step on."""
        self._limits = replace(self._limits, policy=policy)

    def clear_prefix_cache(self) -> None:
        """Forget cached prefixes, after the weights have changed."""
        self.finish_started()
        self._blocks.clear_cache()

    def close(self) -> None:
        """Cancel all requests and free the KV cache."""
        for request_id in list(self._requests):
            self.cancel(request_id)
        self._preempted.close()
        if self._proposer is not None:
            self._proposer.close()
        self.runner.close()

    # steps

    def step(self) -> list[RequestOutput]:
        """Run one forward; return the requests that have finished, and those that stream and have new tokens.

        With stages on several ranks, steps of other sequences are started before the oldest one is finished.

        Raises:
            Exception: an error of the model; `recover` tells whether requests can go on.
        """
        self._failed = []
        if self.has_requests():
            self._check_weights()
            try:
                self._run_step()
            except BaseException:
                self._failed = list(
                    dict.fromkeys(s.request.request_id for step in self._started for s, _ in step.chosen)
                )
                self._drop_started()
                raise
        return self._take_outputs()

    def recover(self, error: Exception) -> list[RequestOutput]:
        """End the request whose forward made `step` raise `error`, and return its output; the others go on.

        [Note: failed steps] The requests of a failed step run alone, one after the other. What a failed step computed
        is computed again. A request that fails alone ends with the finish reason `error`.

        Raises:
            Exception: `error` itself, if no request is at fault: it does not come from a step, several ranks have taken
                part in it, or the third request in a row has failed alone.
        """
        failed = [request_id for request_id in self._failed if request_id in self._requests]
        if not failed or self._pipelined is not None or not self.runner.can_repeat:
            raise error
        if len(failed) > 1:
            logger.warning("a step of %d requests failed (%s); each runs alone now", len(failed), one_line(str(error)))
            self._alone = dict.fromkeys(failed)
            return []
        self._failures += 1
        if self._failures > _MAX_FAILURES:
            raise error
        logger.error("request %s ends by an error of its forward", failed[0], exc_info=error)
        self._alone.pop(failed[0], None)
        cause = ModelError(f"the forward of this request failed with {type(error).__name__}: {one_line(str(error))}")
        self._end(self._requests[failed[0]], "error", cause)
        return self._take_outputs()

    def use_idle_time(self) -> bool:
        """Do some milliseconds of work that makes later steps faster; return False if there is none."""
        return self.runner.use_idle_time()

    def _take_outputs(self) -> list[RequestOutput]:
        outputs = []
        for request in self._changed.values():
            if request.finished:
                self._forget(request)
            if request.finished or request.streams:
                outputs.append(request.to_output())
        self._changed = {}
        return outputs

    def _run_step(self) -> None:
        """Start as many steps as can be in flight, and finish the oldest one."""
        depth = 1 if self._pipelined is None else self._pipelined.depth
        while len(self._started) < depth and self._start_step():
            pass
        if self._looks_ahead and self._started:
            self._start_next(self._started[-1])
        if self._started:
            self._finish_step()

    def finish_started(self) -> None:
        """Finish the steps that were started; the next `step` returns their outputs."""
        try:
            while self._started:
                self._finish_step()
        except BaseException:
            self._drop_started()
            raise

    def _drop_started(self) -> None:
        """Forget started steps after an error; what they computed is computed again if their requests go on."""
        for step in self._started:
            for sequence, _ in step.chosen:
                sequence.in_flight = 0
                if sequence.output.finished():
                    self._free(sequence)
        self._started.clear()

    def _start_step(self) -> bool:
        """Plan and start a step of sequences that no unfinished step contains. Return False if there are none."""
        if not (self._running or self._waiting):
            return False
        began = self._clock()
        batch, chosen, rows = self._prepare(began)
        if not chosen:
            return False
        for sequence, _ in chosen:
            sequence.in_flight, sequence.last_step = sequence.in_flight + 1, self._stats.steps
        self._started.append(_StartedStep(batch, chosen, rows, began, self._predict(chosen)))
        if self._pipelined is not None:
            self._pipelined.start(batch)
        elif self._looks_ahead and self._draws_later(batch, chosen):
            self._run_later(self._started[-1])
        return True

    def _draws_later(self, batch: StepBatch, chosen: Sequence[tuple[GenerationSequence, int]]) -> bool:
        """Return True if each sequence gets one token that is drawn by its logits alone."""
        return batch.is_decode and all(
            sequence.num_known - sequence.num_computed == 1
            and self._candidates(sequence) == 1
            and can_draw_later(sequence.sampler)
            and not self._wants_prompt_logprobs(sequence)
            for sequence, _ in chosen
        )

    def _run_later(self, step: _StartedStep) -> None:
        """Queue a step and the draw of its tokens on the device."""
        logits = self.runner.run(step.batch)
        step.pending = draw_later(logits, [sequence.sampler for sequence, _ in step.chosen])

    def _start_next(self, last: _StartedStep) -> None:
        """Queue the step after the last one, whose tokens are on the device alone, so that the device does not wait.

        [Note: one step ahead] A sequence that the last step ends is computed once more; the result is ignored, and its
        blocks are freed after that. Nothing is queued if the step could be another one: if requests can be admitted,
        prompts are being computed, or blocks have run out.
        """
        chosen = [s for s, _ in last.chosen if not s.output.finished()]
        others = len(self._running) > len(chosen) or (self._waiting and self._admits)
        if last.pending is None or others or len(self._started) > 1:
            return
        rows = [row for row, s in enumerate(chosen) if len(s.generated) + s.in_flight < s.request.max_tokens]
        going = [chosen[row] for row in rows]
        totals = [sequence.num_computed + sequence.in_flight + 1 for sequence in going]
        missing = sum(
            max(self._blocks.blocks_for(total) - len(sequence.blocks), 0)
            for sequence, total in zip(going, totals, strict=True)
        )
        if not going or len(chosen) < len(last.chosen) or missing > self._blocks.num_free:
            return
        ids = last.pending.ids
        if len(going) < len(chosen):
            ids = ids[upload(torch.tensor(rows), ids.device)]
        for sequence, total in zip(going, totals, strict=True):
            self._grow(sequence, total, [])
            sequence.in_flight += 1
        decodes = [(sequence, 1) for sequence in going]
        batch = self._make_next_batch(going, totals, ids)
        step = _StartedStep(batch, decodes, [], self._clock(), self._predict(decodes))
        self._run_later(step)
        self._started.append(step)

    def _make_next_batch(
        self, sequences: Sequence[GenerationSequence], totals: Sequence[int], ids: torch.Tensor
    ) -> StepBatch:
        """Return the decode step after which the sequences have `totals` tokens; `ids` are on the device."""
        size = self._blocks.block_size
        count = len(sequences)
        slots = [
            sequence.blocks[(total - 1) // size] * size + (total - 1) % size
            for sequence, total in zip(sequences, totals, strict=True)
        ]
        return StepBatch(
            ids,
            torch.tensor([total - 1 for total in totals]),
            torch.arange(count + 1, dtype=torch.int32),
            torch.tensor(totals, dtype=torch.int32),
            _make_table(sequences),
            torch.tensor(slots),
            torch.arange(count),
            [sequence.sequence_id for sequence in sequences],
            [sequence.request.lora_name for sequence in sequences],
        )

    def _finish_step(self) -> None:
        step = self._started[0]
        if step.pending is not None:
            tokens = step.pending.wait()
            self._started.popleft()
            self._take_tokens(step.chosen, tokens)
        else:
            before = self._clock()
            logits = self.runner.run(step.batch) if self._pipelined is None else self._pipelined.finish()
            self._stats.forward_seconds += self._clock() - before
            self._started.popleft()
            self._take_logits(step.chosen, step.rows, logits)
        self._failures = 0
        for sequence, _ in step.chosen:
            self._alone.pop(sequence.request.request_id, None)
        self._propose_drafts()
        now = self._clock()
        seconds = now - max(step.began, self._finished_at)
        self._count_step(step.batch.num_tokens, seconds)
        self._correct_cost(seconds, step.predicted)
        self._finished_at = now

    def _check_weights(self) -> None:
        """Drop keys and values that were computed with other weights: those of a training engine change."""
        updates = count_updates(self.runner.model)
        if updates != self._updates:
            if self.options.deterministic:
                raise ModelError(
                    "the weights of the model have changed, and deterministic=True packed a copy of them; build the "
                    "engine with deterministic=False"
                )
            self._updates = updates
            self.finish_started()
            for sequence in list(self._running.values()):
                self._preempt(sequence)
            for sequence in self._waiting.values():
                self._preempted.drop(sequence)
                sequence.num_computed = 0
            self._blocks.clear_cache()

    def _prepare(self, now: float) -> tuple[Any, list[tuple[GenerationSequence, int]], list[list[int]]]:
        """Schedule a step and give its sequences blocks; return the batch, the sequences with their numbers of tokens,
        and the rows of the logits of each."""
        share = self._find_share()
        plan = self._schedule(now, share)
        if plan.preempted and share is not None:
            if self._started:
                return None, [], []  # all sequences are candidates for preemption once no step computes them
            plan = self._schedule(now, None)
        self._admits = bool(plan.admitted) or not self._waiting
        for sequence_id in plan.preempted:
            self._preempt(self._running[sequence_id])
        chosen: list[tuple[GenerationSequence, int]] = []
        copies: list[tuple[int, int]] = []
        for sequence_id, count in plan.num_tokens.items():
            running = self._running.get(sequence_id)
            if running is not None:
                dropped = max(count - 1, 0)
                if running.drafts and count < running.num_known - running.num_computed:
                    running.drafts = running.drafts[:dropped]
                self._grow(running, running.num_computed + count, copies)
                chosen.append((running, count))
        for sequence_id in plan.admitted:
            sequence = self._waiting[sequence_id]
            if self._admit(sequence, now) and sequence_id in plan.num_tokens:
                left = sequence.num_known - sequence.num_computed
                chosen.append((sequence, min(plan.num_tokens[sequence_id], left)))
        if not chosen:
            if self._alone:  # the request waits for blocks of others
                self._alone.clear()
            elif not plan.preempted and not plan.admitted and not self._started:
                raise RuntimeError("no sequence can run, although the KV cache holds each; report this as a bug")
            return None, [], []
        if copies:
            self.runner.copy_blocks(copies)
        batch, rows = self._make_batch(chosen)
        return batch, chosen, rows

    def _find_share(self) -> int | None:
        """Return the number of sequences of a step with which all stages have work; None: all of them."""
        if self._pipelined is None:
            return None
        total = len(self._running) + (len(self._waiting) if self._admits else 0)
        return max(1, -(-min(total, self._limits.max_sequences) // self._pipelined.depth))

    def _schedule(self, now: float, share: int | None) -> StepPlan:
        """Plan a step of at most `share` running sequences, those first that have waited longest."""
        # blocks that a preemption frees are counted where one is possible: it takes a look at every block
        drafts = max((len(sequence.drafts) for sequence in self._running.values()), default=0)
        enough = len(self._running) * (2 + drafts // self._blocks.block_size + 1)
        counts = bool(self._waiting) or self._blocks.num_free < enough
        idle = [sequence for sequence in self._running.values() if not sequence.in_flight]
        waiting = list(self._waiting.values())
        while self._alone and (alone := next(iter(self._alone))) not in self._requests:
            del self._alone[alone]
        if self._alone:
            idle = [sequence for sequence in idle if sequence.request.request_id == alone]
            waiting = [sequence for sequence in waiting if sequence.request.request_id == alone]
        if share is not None:
            idle = sorted(idle, key=lambda sequence: sequence.last_step)[:share]
        places = sum(self._candidates(sequence) for sequence in self._running.values())
        return schedule(
            [self._snapshot_running(sequence, counts_freed=counts) for sequence in idle],
            [self._snapshot_waiting(sequence) for sequence in waiting],
            self._blocks.num_free,
            self._limits,
            self.cost,
            now,
            elsewhere=places - sum(self._candidates(sequence) for sequence in idle),
            share=share,
        )

    def _predict(self, chosen: Sequence[tuple[GenerationSequence, int]]) -> float:
        """Return the time of a step, without the correction by earlier ones."""
        cached, pairs = 0, 0.0
        for sequence, count in chosen:
            if sequence.has_sampled:
                cached += sequence.num_computed
            else:
                pairs += count * (sequence.num_computed + count / 2)
        return self.cost.step_seconds(sum(count for _, count in chosen), cached, pairs) / self.cost.scale

    def _correct_cost(self, seconds: float, predicted: float) -> None:
        """Let the next predictions follow the speed of the machine, e.g. while others use its cores."""
        if predicted > 0:
            least, most = _SCALE_RANGE
            ratio = min(max(seconds / predicted, least), most)
            self.cost = replace(self.cost, scale=self.cost.scale + _SCALE_WEIGHT * (ratio - self.cost.scale))

    def _snapshot_running(self, sequence: GenerationSequence, *, counts_freed: bool) -> SequenceSnapshot:
        references = self._blocks.references
        last = sequence.num_computed // self._blocks.block_size
        return sequence.snapshot(
            num_computed=sequence.num_computed,
            num_blocks=len(sequence.blocks),
            num_freed=sum(references(block) == 1 for block in sequence.blocks) if counts_freed else 0,
            copies_block=last < len(sequence.blocks) and references(sequence.blocks[last]) > 1,
            now_candidates=self._candidates(sequence),
        )

    def _snapshot_waiting(self, sequence: GenerationSequence) -> SequenceSnapshot:
        computed, used = sequence.num_computed, 0
        if sequence.saved is None:
            cached, used = self._blocks.count_cached(self._cacheable_keys(sequence))
            computed = cached * self._blocks.block_size
        return sequence.snapshot(
            num_computed=computed,
            num_blocks=used,
            num_freed=0,
            copies_block=False,
            now_candidates=self._candidates(sequence),
        )

    def _candidates(self, sequence: GenerationSequence) -> int:
        return 1 if sequence.has_sampled else sequence.request.params.num_candidates

    def _cacheable_keys(self, sequence: GenerationSequence) -> list[bytes]:
        """Return the keys of the blocks that may be taken from the prefix cache: one token at least is computed."""
        if not self._blocks.prefix_caching or sequence.request.params.prompt_logprobs is not None:
            return []
        size = self._blocks.block_size
        return sequence.keys_until((len(sequence.token_ids) - 1) // size, size)

    def _admit(self, sequence: GenerationSequence, now: float) -> bool:
        """Allocate the blocks of a waiting sequence's known tokens. Return False if too few are free by now."""
        if sequence.saved is not None:
            needed = self._blocks.blocks_for(sequence.num_known)
            if needed > self._blocks.num_free:
                return False
            sequence.blocks = self._blocks.allocate(needed)
            self._preempted.restore(sequence)
        else:
            keys = self._cacheable_keys(sequence)
            cached, used = self._blocks.count_cached(keys)
            if self._blocks.blocks_for(sequence.num_known) - used > self._blocks.num_free:
                return False
            sequence.blocks = self._blocks.acquire_cached(keys)
            sequence.num_registered = cached
            sequence.num_computed = cached * self._blocks.block_size
            sequence.blocks += self._blocks.allocate(self._blocks.blocks_for(sequence.num_known) - cached)
            self._count_lookup(sequence, len(keys))
        metrics = sequence.request.metrics
        if metrics.scheduled_time is None:
            metrics.scheduled_time = now
        del self._waiting[sequence.sequence_id]
        self._running[sequence.sequence_id] = sequence
        return True

    def _grow(self, sequence: GenerationSequence, tokens: int, copies: list[tuple[int, int]]) -> None:
        """Extend a running sequence's blocks to `tokens` tokens, and copy its last block if that is shared."""
        place = sequence.num_computed // self._blocks.block_size
        if place < len(sequence.blocks):
            block = sequence.blocks[place]
            writable = self._blocks.make_writable(block)
            if writable != block:
                sequence.blocks[place] = writable
                copies.append((block, writable))
        missing = self._blocks.blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self._blocks.allocate(missing)

    def _preempt(self, sequence: GenerationSequence) -> None:
        request = sequence.request
        request.metrics.num_preemptions += 1
        self._stats.num_preemptions += 1
        sequence.drafts = []
        self._preempted.save(sequence)
        self._free(sequence)
        del self._running[sequence.sequence_id]
        self._waiting[sequence.sequence_id] = sequence

    def _free(self, sequence: GenerationSequence) -> None:
        if sequence.in_flight:
            return  # cancelled; a step still writes to its blocks, and frees them at its end
        self._blocks.release(sequence.blocks)
        self.runner.release(sequence.sequence_id)
        sequence.blocks, sequence.num_registered = [], 0
        if sequence.saved is None:
            sequence.num_computed = 0

    def _make_batch(self, chosen: Sequence[tuple[GenerationSequence, int]]) -> tuple[StepBatch, list[list[int]]]:
        size = self._blocks.block_size
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
            rows = self._logit_positions(sequence, first, stop)
            rows_of.append(list(range(len(logit_rows), len(logit_rows) + len(rows))))
            logit_rows += [len(ids) + position - first for position in rows]
            ids += new
            positions += range(first, stop)
            blocks = sequence.blocks
            slots += [blocks[place // size] * size + place % size for place in range(first, stop)]
            starts.append(len(ids))
            lengths.append(stop)
        batch = StepBatch(
            torch.tensor(ids),
            torch.tensor(positions),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            _make_table([sequence for sequence, _ in chosen]),
            torch.tensor(slots),
            torch.tensor(logit_rows, dtype=torch.long),
            [sequence.sequence_id for sequence, _ in chosen],
            [sequence.request.lora_name for sequence, _ in chosen],
        )
        return batch, rows_of

    def _logit_positions(self, sequence: GenerationSequence, first: int, stop: int) -> range:
        """Return the positions in `[first, stop)` whose logits are needed."""
        known = len(sequence.token_ids)
        if self._wants_prompt_logprobs(sequence):
            return range(first, stop)
        return range(max(known - 1, first), stop)

    def _wants_prompt_logprobs(self, sequence: GenerationSequence) -> bool:
        logprobs = sequence.request.prompt_logprobs
        return logprobs is not None and not sequence.has_sampled and len(logprobs) < len(sequence.request.prompt_ids)

    # results

    def _take_logits(
        self, chosen: Sequence[tuple[GenerationSequence, int]], rows_of: Sequence[list[int]], logits: torch.Tensor
    ) -> None:
        """Advance the sequences of a step by their computed tokens, and sample a token for each that has its logits."""
        pending: list[tuple[GenerationSequence, list[int], int]] = []  # sequence, rows, first position
        for sequence, _ in chosen:
            sequence.in_flight -= 1
        for (sequence, count), rows in zip(chosen, rows_of, strict=True):
            if sequence.output.finished():
                self._free(sequence)
                continue
            first = sequence.num_computed
            sequence.num_computed += count
            if self._wants_prompt_logprobs(sequence):
                self._take_prompt_logprobs(sequence, first, logits[rows])
            due = sequence.num_computed - len(sequence.token_ids) + 1  # rows from the last known token on
            if due > 0:
                pending.append((sequence, rows[-due:], sequence.num_computed - due + 1))
            else:
                self._register_blocks(sequence)
        self._draw(pending, logits)

    def _take_tokens(self, chosen: Sequence[tuple[GenerationSequence, int]], tokens: Sequence[SampledToken]) -> None:
        """Advance the sequences of a decode step by the tokens that the device has drawn."""
        for (sequence, _), token in zip(chosen, tokens, strict=True):
            sequence.in_flight -= 1
            if sequence.output.finished():
                self._free(sequence)
                continue
            sequence.num_computed += 1
            if token.error is not None:
                self._end(sequence.request, "error", token.error)
            elif not self._append(sequence, token):
                self._register_blocks(sequence)

    def _draw(self, pending: list[tuple[GenerationSequence, list[int], int]], logits: torch.Tensor) -> None:
        """Draw tokens depth by depth: the second row of a sequence counts if its first draft was accepted, etc."""
        live = []
        for sequence, rows, computed in pending:
            for candidate in self._candidates_of(sequence):
                drafts = candidate.drafts
                self._stats.draft_tokens += len(drafts)
                candidate.drafts = []
                live.append((candidate, rows, computed, drafts))
        depth = 0
        while live:
            # all rows at depth 0 without repetition are the logits themselves
            index = [rows[depth] for _, rows, _, _ in live]
            chosen = logits if index == list(range(logits.shape[0])) else logits[index]
            tokens = sample(chosen, [sequence.sampler for sequence, *_ in live])
            following = []
            for (sequence, rows, computed, drafts), token in zip(live, tokens, strict=True):
                if sequence.output.finished():
                    continue  # an error of another candidate has ended the request
                sequence.num_computed = computed + depth
                if token.error is not None:
                    self._end(sequence.request, "error", token.error)
                    continue
                ended = self._append(sequence, token)
                accepted = depth < len(drafts) and drafts[depth] == token.token
                if accepted:
                    self._stats.accepted_draft_tokens += 1
                if accepted and not ended and depth + 1 < len(rows):
                    following.append((sequence, rows, computed, drafts))
                elif not ended:
                    self._register_blocks(sequence)
            live, depth = following, depth + 1

    def _candidates_of(self, sequence: GenerationSequence) -> list[GenerationSequence]:
        """Return the sequence itself, or all candidates of its request if its prompt was just computed."""
        request = sequence.request
        count = request.params.num_candidates
        if sequence.has_sampled:
            return [sequence]
        self._stats.prompt_tokens += len(request.prompt_ids)
        if count == 1:
            return [sequence]
        self._register_blocks(sequence)
        others = []
        for index in range(1, count):
            other = self._make_sequence(request, index)
            other.num_computed, other.num_registered = sequence.num_computed, sequence.num_registered
            other.blocks, other.block_keys = self._blocks.fork(sequence.blocks), list(sequence.block_keys)
            self._running[other.sequence_id] = other
            request.sequences.append(other)
            others.append(other)
        self.runner.fork(sequence.sequence_id, [other.sequence_id for other in others])
        return [sequence, *others]

    def _append(self, sequence: GenerationSequence, sampled: SampledToken) -> bool:
        """Add a drawn token; return True if it ended the sequence."""
        request, output, token = sequence.request, sequence.output, sampled.token
        now = self._clock()
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        request.metrics.last_token_time = now
        self._changed[request.request_id] = request
        self._stats.generation_tokens += 1
        sequence.has_sampled = True
        sequence.token_ids.append(token)
        output.token_ids.append(token)
        sequence.sampler.count(token)
        try:
            if sampled.logprobs is not None:
                assert output.logprobs is not None and output.cumulative_logprob is not None
                output.cumulative_logprob += sampled.logprobs[token].logprob
                output.logprobs.append(self._with_text(sampled.logprobs))
            if sequence.constraint is not None:
                sequence.constraint.accept(token)
            reason = self._finish_reason(sequence, token)
            if reason is not None:
                self._finish(sequence, reason)
        except RequestError as error:
            self._end(request, "error", error)
            return True
        except Exception as error:  # of the tokenizer or of a structured output: other requests go on
            logger.exception("request %s ends by an error of its text", request.request_id)
            cause = f"token {token} could not be added to the text: {type(error).__name__}: {one_line(str(error))}"
            for other in request.sequences:
                other.detokenizer = None  # which may be what failed
            self._end(request, "error", ModelError(cause))
            return True
        return reason is not None

    def _finish_reason(self, sequence: GenerationSequence, token: int) -> FinishReason | None:
        """Add the token's text, and return the finish reason if the sequence ends here, else None."""
        request, output = sequence.request, sequence.output
        params, length = request.params, len(output.token_ids)
        is_eos = token in self.eos_ids and not params.ignore_eos
        is_stop = token in (params.stop_token_ids or ())
        if length >= params.min_tokens and (is_eos or is_stop):
            if is_stop:
                output.stop_reason = token
            if params.include_stop_str_in_output and sequence.detokenizer is not None:
                sequence.detokenizer.append(token)
            return "stop"
        if sequence.detokenizer is not None and self._add_text(sequence, sequence.detokenizer.append(token)):
            return "stop"
        if length >= request.max_tokens:
            return "length"
        if sequence.constraint is not None and sequence.constraint.is_complete():
            return "stop"
        return None

    def _add_text(self, sequence: GenerationSequence, new: str) -> bool:
        """Update the answer's text; return True if it has reached a stop text."""
        assert sequence.detokenizer is not None
        params, output, text = sequence.request.params, sequence.output, sequence.detokenizer.text
        stops = params.stops if len(output.token_ids) >= params.min_tokens else ()
        found = find_stop(text, len(new), stops) if new else None
        if found is None:
            # hold back an end that may be the beginning of a stop text
            output.text = text[: len(text) - held_back(text, params.stops)]
            return False
        place, stop = found
        output.text = text[: place + len(stop)] if params.include_stop_str_in_output else text[:place]
        output.stop_reason = stop
        return True

    def _finish(self, sequence: GenerationSequence, reason: FinishReason) -> None:
        output = sequence.output
        if sequence.detokenizer is not None and not isinstance(output.stop_reason, str):
            new = sequence.detokenizer.finish()  # bytes of an incomplete character
            if self._add_text(sequence, new):
                reason = "stop"
            else:
                output.text = sequence.detokenizer.text
        output.finish_reason = reason
        self._register_blocks(sequence)
        self._preempted.drop(sequence)
        self._free(sequence)
        if self._proposer is not None:
            self._proposer.release(sequence.sequence_id)
        self._running.pop(sequence.sequence_id, None)
        self._waiting.pop(sequence.sequence_id, None)
        self._changed[sequence.request.request_id] = sequence.request

    def _end(
        self, request: GenerationRequest, reason: FinishReason, error: RequestError | ModelError | None = None
    ) -> None:
        request.error = error
        for sequence in request.sequences:
            if not sequence.output.finished():
                self._finish(sequence, reason)

    def _forget(self, request: GenerationRequest) -> None:
        if self._requests.pop(request.request_id, None) is None:
            return
        request.metrics.finished_time = self._clock()
        for sequence in request.sequences:
            reason = sequence.output.finish_reason or "abort"
            self._finished_counts[reason] = self._finished_counts.get(reason, 0) + 1

    def _register_blocks(self, sequence: GenerationSequence) -> None:
        """Add the blocks that became full of accepted tokens to the prefix cache."""
        if not self._blocks.prefix_caching:
            return
        size = self._blocks.block_size
        full = min(sequence.num_computed, len(sequence.token_ids)) // size
        if full > sequence.num_registered:
            keys = sequence.keys_until(full, size)
            for place in range(sequence.num_registered, full):
                self._blocks.register(sequence.blocks[place], keys[place])
            sequence.num_registered = full

    def _propose_drafts(self) -> None:
        options = self.options.speculative
        if self._proposer is None or options is None:
            return
        idle = [s for s in self._running.values() if not s.in_flight and not s.drafts]
        ready = [s for s in idle if s.has_sampled and len(s.token_ids) - s.num_computed == 1]
        ready = [s for s in ready if s.constraint is None or not s.constraint.is_complete()]
        if not ready:
            return
        try:
            found = self._proposer.propose([(s.sequence_id, s.token_ids) for s in ready], options.num_tokens)
        except Exception:  # drafts change no token, so requests go on without
            logger.exception("speculative decoding has stopped by an error; requests go on without drafts")
            self._proposer.close()
            self._proposer = None
            return
        for sequence, drafts in zip(ready, found, strict=True):
            room = sequence.request.max_tokens - len(sequence.generated) - 1
            sequence.drafts = drafts[: max(room, 0)]

    # parts of requests

    def _make_sequence(
        self, request: GenerationRequest, index: int = 0, constraint: OutputConstraint | None = None
    ) -> GenerationSequence:
        params = request.params
        wants_logprobs = params.logprobs is not None or params.best_of is not None
        output = CompletionOutput(
            index,
            "",
            [],
            0.0 if wants_logprobs else None,
            [] if wants_logprobs else None,
        )
        if params.structured_outputs is not None and constraint is None:
            first = request.sequences[0].constraint if request.sequences else None
            constraint = first.copy() if first is not None else self.constraints.compile(params.structured_outputs)
        if index == 0:
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        else:
            seed = request.sequences[0].sampler.seed
        sampler = SequenceSampler(
            params if params.logprobs is not None or not wants_logprobs else params.replace(logprobs=0),
            request.prompt_ids,
            output.token_ids,
            seed,
            index,
            self.eos_ids | frozenset(params.stop_token_ids or ()),
            self._encode_bad_words(params),
            None if constraint is None else constraint.allowed,
        )
        detokenizer = None
        if self.tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(
                self.tokenizer, request.prompt_ids, skip_special_tokens=params.skip_special_tokens
            )
        return GenerationSequence(
            next(self._numbers), request, index, list(request.prompt_ids), output, sampler, detokenizer, constraint
        )

    def _encode_bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each bad word, at the begin of a text and behind a space."""
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer", parameter="bad_words")
        found = set()
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                found.add(tuple(self.tokenizer(text, add_special_tokens=False).input_ids))
        return tuple(sorted(word for word in found if word))

    def _check_prompt(self, ids: Sequence[int], params: SamplingParams) -> None:
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", parameter="prompt")
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens; the model takes {self.max_model_len} together with the answer",
                parameter="prompt",
            )
        if params.num_candidates > self.options.max_sequences:
            raise RequestError(
                f"{params.num_candidates} answers are asked for, and the engine runs {self.options.max_sequences} "
                "sequences at a time",
                parameter="n",
            )
        for name in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
            wrong = next((token for token in getattr(params, name) or () if token >= self.runner.vocab_size), None)
            if wrong is not None:
                raise RequestError(
                    f"{name} has the token {wrong}, beyond a vocabulary of {self.runner.vocab_size}", parameter=name
                )

    def _take_prompt_logprobs(self, sequence: GenerationSequence, first: int, logits: torch.Tensor) -> None:
        request = sequence.request
        assert request.prompt_logprobs is not None
        skipped = len(request.prompt_logprobs) - 1 - first  # positions that were reported before a preemption
        logits = logits[max(skipped, 0) :]
        start = len(request.prompt_logprobs)
        tokens = request.prompt_ids[start : start + logits.shape[0]]
        if tokens:
            counts = [request.params.prompt_logprobs or 0] * len(tokens)
            found = take_logprobs(logits[: len(tokens)], tokens, counts)
            request.prompt_logprobs += [self._with_text(entry) for entry in found]

    def _with_text(self, entry: TokenLogprobs) -> TokenLogprobs:
        if self.tokenizer is None:
            return entry
        return {token: Logprob(found.logprob, found.rank, self._text_of(token)) for token, found in entry.items()}

    def _text_of(self, token: int) -> str:
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = str(self.tokenizer.decode([token]))
        return text

    def _count_lookup(self, sequence: GenerationSequence, blocks: int) -> None:
        size = self._blocks.block_size
        if not sequence.has_sampled and sequence.request.metrics.num_preemptions == 0:
            sequence.request.metrics.num_cached_tokens = sequence.num_computed
        self._stats.prefix_cache_queries += blocks * size
        self._stats.prefix_cache_hits += sequence.num_computed

    def _count_step(self, tokens: int, seconds: float) -> None:
        self._stats.steps += 1
        self._stats.step_tokens += tokens
        self._stats.step_seconds += seconds
        logger.debug("step of %d tokens in %.1f ms", tokens, seconds * 1e3)


def _make_table(sequences: Sequence[GenerationSequence]) -> torch.Tensor:
    """Return the block table of a batch."""
    widest = max(len(sequence.blocks) for sequence in sequences)
    rows = [sequence.blocks + [0] * (widest - len(sequence.blocks)) for sequence in sequences]
    return torch.tensor(rows, dtype=torch.int32)


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt: Python integers, or those of an array.

    Raises:
        RequestError: an element is no integer; its conversion would give a wrong token.
    """
    try:
        if isinstance(prompt, (bytes, bytearray)) or any(isinstance(token, (bool, str)) for token in prompt):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        shown = one_line(repr(prompt), 80)
        raise RequestError(f"the prompt is {shown}; give a text or a list of token ids", parameter="prompt") from None
