"""Engine of continuous batching: queues requests, runs one step at a time, and returns outputs."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import EngineOverloadedError, ModelError, RequestError
from windlass.base.log import logger
from windlass.base.model_updates import count_updates
from windlass.base.text import one_line
from windlass.inference.answer_writer import AnswerWriter
from windlass.inference.engine_options import EngineOptions
from windlass.inference.generation_request import GenerationRequest, GenerationSequence
from windlass.inference.model_forward import own_modes
from windlass.inference.model_loading import count_embeddings
from windlass.inference.outputs import EngineStats, RequestMetrics, RequestOutput
from windlass.inference.request_factory import RequestFactory
from windlass.inference.sampler import PendingTokens, SampledToken, can_draw_later, draw_later, sample
from windlass.inference.sampling_params import SamplingParams, TokenTexts
from windlass.inference.scheduler import Policy, ServiceLevel
from windlass.inference.sequence_table import SequenceTable, count_candidates
from windlass.inference.speculation import DraftProposer
from windlass.inference.step_batch import AdapterStore, ModelRunner, PipelinedRunner
from windlass.inference.step_cost import StepCost
from windlass.inference.step_planner import PlannedStep, StepPlanner, wants_prompt_logprobs
from windlass.inference.structured_output import OutputConstraint, StructuredOutputCompiler

_MAX_FAILURES = 2  # number of failures in a row that only end requests; the next one is raised


@dataclass
class _StartedStep:
    """Started step that is not finished.

    Attributes:
        began: time of the start.
        pending: tokens that the device draws; None: `_finish_step` runs the forward, or finishes a pipeline's forward.
    """

    plan: PlannedStep
    began: float
    pending: PendingTokens | None = None


class LLMEngine:
    """Engine of one model: scheduler, KV blocks, runner and sampler.

    Not thread-safe: one thread adds requests and runs steps. `windlass.inference.async_engine` wraps it for servers.

    Args:
        runner: runner of the model.
        tokenizer: tokenizer of transformers; None: prompts are token ids and outputs have no text.
        eos_ids: tokens that end an answer.
        max_model_len: largest number of tokens of a sequence, prompt and answer together.
        cost: model of the time of a step; None: times were not measured.
        proposer: source of drafts, for a runner that computes them.
        clock: function that returns the time in seconds.
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
        self._proposer = proposer
        self._pipelined = runner if isinstance(runner, PipelinedRunner) and runner.depth > 1 else None
        self._looks_ahead = self._pipelined is None and runner.is_asynchronous and self._proposer is None
        self._depth = 1 if self._pipelined is None else self._pipelined.depth
        self._clock = clock
        self._warns_of_levels = cost is None
        cost = cost or StepCost()
        self._stats = EngineStats(kv_blocks=runner.num_blocks)
        self._factory = RequestFactory(
            options, tokenizer, self.eos_ids, runner.vocab_size, max_model_len, count_embeddings(runner.model)
        )
        self._table = SequenceTable(runner, options, cost, self._stats)
        self._planner = StepPlanner(runner, options, self._table, self._depth)
        self._answers = AnswerWriter(self._table, tokenizer, self.eos_ids, self._stats, clock, self._forget_drafts)
        self._requests: dict[str, GenerationRequest] = {}
        self._started: deque[_StartedStep] = deque()
        self._finished_at = 0.0
        self._finished_counts: dict[str, int] = {}
        self._updates = count_updates(runner.model)
        self._lora_directories = {name: Path(found).resolve() for name, found in (options.lora or {}).items()}
        self._failed: list[str] = []  # requests of the steps that the last call of `step` could not finish
        self._failures = 0  # failures in a row: forwards of one request alone, and draws of tokens
        self._closed = False

    @property
    def cost(self) -> StepCost:
        """Model of a step's time, corrected by measured times."""
        return self._planner.cost

    @property
    def constraints(self) -> StructuredOutputCompiler:
        """Compiler of structured outputs."""
        return self._factory.constraints

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
        bad_words: TokenTexts | None = None,
    ) -> None:
        """Queue a request.

        Args:
            prompt: text, or token ids.
            priority: lower values run first.
            level: service level that the request declares.
            lora_name: name of the adapter.
            arrival: time of arrival by the engine's clock; None: now.
            streams: `step` reports the request at every token, not only at its end.
            constraint: `params.structured_outputs`, compiled by `constraints`; None: compile them here.
            bad_words: tokens of `params.bad_words`, from `encode_bad_words`; None: encode the words here.

        Raises:
            RequestError: the request cannot be served, its id is in use, or the engine is closed. Other requests
                continue.
            EngineOverloadedError: the queue is full, or a request would wait too long (`enforce_max_wait`).
        """
        if self._closed:
            raise RequestError("the engine is closed, and its KV cache is freed; build another one")
        if not isinstance(priority, int):
            raise RequestError(f"priority is {priority!r}; write an integer", parameter="priority")
        if request_id in self._requests:
            raise RequestError(f"a request {request_id!r} is running already; use another id", parameter="request_id")
        if self.is_full:
            limit = self.options.max_queued
            raise EngineOverloadedError(f"{limit} requests are waiting, the maximum (max_queued); try again later")
        params, text, ids, max_tokens = self._factory.read_prompt(prompt, params)
        if level is not None and self._warns_of_levels:
            self._warns_of_levels = False
            logger.warning(
                "service levels of requests do not limit the size of steps, because check_at_load=False left the time "
                "of steps unmeasured; set check_at_load=True or max_gap_ms"
            )
        salt = b""
        if lora_name is not None:
            adapters = self._adapters()
            adapters.check_name(lora_name)
            salt = adapters.cache_salt(lora_name)
        now = self._clock() if arrival is None else arrival
        request = GenerationRequest(
            request_id,
            text,
            ids,
            params,
            max_tokens,
            RequestMetrics(now),
            priority,
            level,
            lora_name,
            streams,
            salt,
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        sequence = self._factory.make_sequence(request, constraint=constraint, bad_words=bad_words)
        if self.options.enforce_max_wait and (late := self._planner.predict_lateness(sequence, self._clock())) > 0:
            raise EngineOverloadedError(
                f"with this request in the queue, some request would wait longer than "
                f"{self.options.max_wait_seconds:g} seconds (max_wait_seconds) for its first token; "
                f"try again in {math.ceil(late)} seconds",
                retry_after=math.ceil(late),
            )
        request.sequences.append(sequence)
        self._requests[request_id] = request
        self._table.queue(sequence)

    def cancel(self, request_id: str) -> RequestOutput | None:
        """End a request with the finish reason `abort`, free its blocks and return its last state; None for an unknown
        id.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._answers.end(request, "abort")
        self._forget(request)
        self._answers.changed.pop(request_id, None)
        return request.to_output()

    @property
    def is_full(self) -> bool:
        """True if `max_queued` requests are waiting, so that a new one is refused."""
        limit, waiting = self.options.max_queued, self._table.waiting
        if limit is None or len(waiting) < limit:
            return False
        # preempted sequences wait too, but their requests have begun
        return sum(one.request.metrics.scheduled_time is None for one in waiting.values()) >= limit

    def has_requests(self) -> bool:
        """Return True if a request or a started step is unfinished, or `step` has outputs to return."""
        return bool(self._table.running or self._table.waiting or self._started or self._answers.changed)

    def encode(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        """Return the text of a prompt (None if it is given as token ids) and its token ids.

        Raises:
            RequestError: the prompt is neither valid Unicode text nor token ids of the vocabulary, or is text and there
                is no tokenizer.
        """
        return self._factory.encode(prompt)

    def encode_bad_words(self, params: SamplingParams) -> TokenTexts:
        """Return the tokens of each bad word of `params`. Any thread may call this method.

        Raises:
            RequestError: there are bad words and no tokenizer, or a bad word is not valid Unicode text.
        """
        return self._factory.encode_bad_words(params)

    @property
    def lora_names(self) -> list[str]:
        """Names of the loaded LoRA adapters."""
        return [] if self.runner.lora is None else self.runner.lora.names

    def add_lora(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter of peft, between steps.

        Raises:
            ModelError: the adapter cannot be read, or does not fit the model.
            RequestError: the name is empty or is that of a loaded adapter, or the engine takes no adapters (pp > 1).
        """
        with own_modes():
            self._adapters().add(name, directory)
        self._lora_directories[name] = Path(directory).resolve()

    def remove_lora(self, name: str) -> None:
        """Unload a LoRA adapter.

        Raises:
            RequestError: no adapter has this name, or unfinished requests use the adapter.
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
        self._lora_directories.pop(name, None)

    def lora_directory(self, name: str) -> Path | None:
        """Return the absolute directory that an adapter was loaded from; None if no adapter has this name."""
        return self._lora_directories.get(name)

    def _adapters(self) -> AdapterStore:
        if self.runner.lora is None:
            raise RequestError("this engine takes no LoRA adapters; start it with pp=1", parameter="lora_name")
        return self.runner.lora

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        used = self._table.blocks.num_blocks - self._table.blocks.num_free
        return replace(
            self._stats,
            num_running=len(self._table.running),
            num_waiting=len(self._table.waiting),
            kv_cache_usage=used / max(self._table.blocks.num_blocks, 1),
            finished=dict(self._finished_counts),
        )

    def set_policy(self, policy: Policy) -> None:
        """Schedule by another policy from the next step on."""
        self._planner.set_policy(policy)

    def clear_prefix_cache(self) -> None:
        """Finish started steps, pack changed weights again, and drop all keys and values.

        Unfinished requests keep their tokens, and continue with the new weights.
        """
        with own_modes():
            self.finish_started()
            self.runner.refresh_weights()
            # preempt running requests too: their blocks are added to the prefix cache as they become full
            self._table.preempt_all()

    def close(self) -> None:
        """Cancel all requests and free the KV cache."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._requests):
            self.cancel(request_id)
        self._table.close()
        if self._proposer is not None:
            self._proposer.close()
        with own_modes():
            self.runner.close()

    # steps

    def step(self, before_forward: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Finish one step; return the requests that have finished, and those that stream and have new tokens.

        With stages on several ranks, or on a CUDA device, later steps may be started before the oldest one is finished.

        Args:
            before_forward: function that is called after steps were started and before the oldest one is finished. Not
                called if there is no step.

        Raises:
            Exception: an error of the model; `recover` determines whether requests can continue.
        """
        self._failed = []
        if self.has_requests():
            with own_modes():
                self._check_weights()
                try:
                    self._run_step(before_forward)
                except BaseException:
                    self._failed = list(
                        dict.fromkeys(s.request.request_id for step in self._started for s, _ in step.plan.chosen)
                    )
                    self._drop_started()
                    raise
        return self._take_outputs()

    def recover(self, error: Exception) -> list[RequestOutput]:
        """Let requests continue after `step` has raised `error`; return outputs as `step` does.

        [Note: failed steps] If a forward fails, each request of its step runs alone once, so the tokens of the step are
        computed again. A request that fails alone ends with the finish reason `error`. If the tokens of a step cannot
        be drawn, all its requests end with this reason, because the draw cannot be repeated (`_end_requests`).

        Raises:
            Exception: `error` itself, if the error does not come from a step, the runner cannot repeat the step
                (`ModelRunner.can_repeat`), or this is the third failure in a row.
        """
        failed = [request_id for request_id in self._failed if request_id in self._requests]
        if not failed or self._pipelined is not None or not self.runner.can_repeat:
            raise error
        if not self.runner.block_nbytes:
            # the failed forward may have updated some layers of a model's own cache, so its sequences begin anew
            for sequence in list(self._table.running.values()):
                if sequence.request.request_id in failed:
                    self._table.preempt(sequence)
        if len(failed) > 1:
            logger.warning("a step of %d requests failed (%s); each runs alone now", len(failed), one_line(str(error)))
            self._planner.alone = dict.fromkeys(failed)
            return []
        self._failures += 1
        if self._failures > _MAX_FAILURES:
            raise error
        logger.error("request %s failed, because its forward raised an error", failed[0], exc_info=error)
        self._planner.alone.pop(failed[0], None)
        cause = ModelError(f"the forward of this request failed with {type(error).__name__}: {one_line(str(error))}")
        self._answers.end(self._requests[failed[0]], "error", cause)
        return self._take_outputs()

    def use_idle_time(self) -> bool:
        """Do some milliseconds of work that makes later steps faster; return False if there is none."""
        return self.runner.use_idle_time()

    def _take_outputs(self) -> list[RequestOutput]:
        outputs = []
        for request in self._answers.changed.values():
            finished = request.finished
            if finished:
                self._forget(request)
            if finished or request.streams:
                outputs.append(request.to_output())
        self._answers.changed = {}
        return outputs

    def _run_step(self, before_forward: Callable[[], None] | None) -> None:
        """Start as many steps as can be in flight, and finish the oldest one."""
        while len(self._started) < self._depth and self._start_step():
            pass
        if self._looks_ahead and self._started:
            self._start_next(self._started[-1])
        if self._started:
            if before_forward is not None:
                before_forward()
            self._finish_step()

    def finish_started(self) -> None:
        """Finish the steps that were started; the next `step` returns their outputs."""
        try:
            with own_modes():
                while self._started:
                    self._finish_step()
        except BaseException:
            self._drop_started()
            raise

    def _drop_started(self) -> None:
        """Drop started steps after an error. Their tokens are computed again if the requests continue."""
        for step in self._started:
            for sequence, _ in step.plan.chosen:
                sequence.in_flight = 0
                if sequence.output.finished():
                    self._table.free(sequence)
        self._started.clear()

    def _start_step(self) -> bool:
        """Plan and start a step of sequences that no unfinished step contains. Return False if there are none."""
        if not (self._table.running or self._table.waiting):
            return False
        began = self._clock()
        if self.options.enforce_max_wait:
            self._refuse_late(began)
            if not (self._table.running or self._table.waiting):
                return False
        plan = self._planner.plan(began, has_started=bool(self._started))
        if plan is None:
            return False
        self._note_start(_StartedStep(plan, began))
        if self._pipelined is not None:
            self._pipelined.start(plan.batch)
        elif self._looks_ahead and self._draws_later(plan):
            self._run_later(self._started[-1])
        return True

    def _refuse_late(self, now: float) -> None:
        """End requests that have waited longer than `max_wait_seconds` and have not begun."""
        longest = self.options.max_wait_seconds
        for sequence in list(self._table.waiting.values()):
            metrics = sequence.request.metrics
            if metrics.scheduled_time is None and now - metrics.arrival_time > longest:
                error = EngineOverloadedError(
                    f"the request waited for {longest:g} seconds and could not begin; try again later",
                    retry_after=math.ceil(longest),
                )
                self._answers.end(sequence.request, "error", error)

    def _note_start(self, step: _StartedStep) -> None:
        for sequence, _ in step.plan.chosen:
            sequence.in_flight, sequence.last_step = sequence.in_flight + 1, self._stats.steps
        self._started.append(step)

    def _draws_later(self, plan: PlannedStep) -> bool:
        """Return True if the device can draw the tokens: one per sequence, from unchanged logits, without
        log-probabilities.
        """
        return plan.batch.is_decode and all(
            sequence.num_known - sequence.num_computed == 1
            and count_candidates(sequence) == 1
            and can_draw_later(sequence.sampler)
            and not wants_prompt_logprobs(sequence)
            for sequence, _ in plan.chosen
        )

    def _run_later(self, step: _StartedStep) -> None:
        """Queue a step and the draw of its tokens on the device."""
        logits = self.runner.run(step.plan.batch)
        step.pending = draw_later(logits, [sequence.sampler for sequence, _ in step.plan.chosen])

    def _start_next(self, last: _StartedStep) -> None:
        """Queue the next step while the tokens of the last step are only on the device, so that the device is not idle.

        [Note: one step ahead] A sequence that ends in the last step is computed once more: the result is ignored, and
        the sequence's blocks are freed afterwards. No step is queued if it could contain other sequences, or if KV
        blocks are missing.
        """
        if last.pending is None or len(self._started) > 1:
            return
        plan = self._planner.plan_next([sequence for sequence, _ in last.plan.chosen], last.pending.ids)
        if plan is not None:
            step = _StartedStep(plan, self._clock())
            self._run_later(step)
            self._note_start(step)

    def _finish_step(self) -> None:
        step = self._started[0]
        take: Callable[[], None]
        if step.pending is not None:
            take = partial(self._take_tokens, step.plan.chosen, step.pending.wait())
        else:
            before = self._clock()
            logits = self.runner.run(step.plan.batch) if self._pipelined is None else self._pipelined.finish()
            self._stats.forward_seconds += self._clock() - before
            take = partial(self._take_logits, step.plan.chosen, step.plan.rows, logits)
        self._started.popleft()
        for sequence, _ in step.plan.chosen:
            sequence.in_flight -= 1
        try:
            take()
        except Exception as error:
            self._end_requests(step.plan.chosen, error)
        else:
            self._failures = 0
        for sequence, _ in step.plan.chosen:
            self._planner.alone.pop(sequence.request.request_id, None)
        self._propose_drafts()
        now = self._clock()
        seconds = now - max(step.began, self._finished_at)
        self._count_step(step.plan.batch.num_tokens, seconds)
        if step.plan.has_prompts:
            # Steps that only decode do not count: a server answers its clients during them, which makes them longer,
            # so the planner would give later steps fewer prompt tokens.
            self._planner.correct_cost(seconds, step.plan.predicted)
        self._finished_at = now

    def _check_weights(self) -> None:
        """Drop all keys and values and pack the weights again, if a training engine has changed the weights."""
        updates = count_updates(self.runner.model)
        if updates != self._updates:
            self._updates = updates
            self.finish_started()
            self.runner.refresh_weights()
            self._table.preempt_all()

    # results

    def _take_logits(
        self, chosen: Sequence[tuple[GenerationSequence, int]], rows_of: Sequence[list[int]], logits: torch.Tensor
    ) -> None:
        """Advance the sequences of a step by their computed tokens. Sample for those whose tokens are all computed."""
        # Sequence, its rows of the logits to sample from, and its number of tokens up to the first of these rows.
        pending: list[tuple[GenerationSequence, list[int], int]] = []
        for (sequence, count), rows in zip(chosen, rows_of, strict=True):
            if sequence.output.finished():
                self._table.free(sequence)
                continue
            first = sequence.num_computed
            sequence.num_computed += count
            wanted = wants_prompt_logprobs(sequence)
            if wanted and not self._answers.add_prompt_logprobs(sequence, first, logits[rows]):
                continue
            due = sequence.num_computed - len(sequence.token_ids) + 1  # number of rows to sample from
            if due > 0:
                pending.append((sequence, rows[-due:], sequence.num_computed - due + 1))
            else:
                self._table.register_blocks(sequence)
        self._draw(pending, logits)

    def _take_tokens(self, chosen: Sequence[tuple[GenerationSequence, int]], tokens: Sequence[SampledToken]) -> None:
        """Advance the sequences of a decode step by the tokens that the device has drawn."""
        for (sequence, _), token in zip(chosen, tokens, strict=True):
            if sequence.output.finished():
                self._table.free(sequence)
                continue
            sequence.num_computed += 1
            if token.error is not None:
                self._answers.end(sequence.request, "error", token.error)
            elif not self._answers.append(sequence, token):
                self._table.register_blocks(sequence)

    def _end_requests(self, chosen: Sequence[tuple[GenerationSequence, int]], error: Exception) -> None:
        """End the requests of a step after its tokens could not be drawn. The draw cannot be repeated, because some
        sequences may already have received new tokens, for which random numbers were used.

        Raises:
            Exception: `error` itself, if this is the third failure in a row.
        """
        self._failures += 1
        if self._failures > _MAX_FAILURES:
            self._drop_started()  # otherwise `recover` would repeat or end the requests of steps that were queued ahead
            raise error
        requests = {sequence.request.request_id: sequence.request for sequence, _ in chosen}
        logger.error("%d requests failed, because their next tokens could not be drawn", len(requests), exc_info=error)
        cause = ModelError(f"no token could be drawn: {type(error).__name__}: {one_line(str(error))}")
        for sequence, _ in chosen:
            if sequence.output.finished():
                self._table.free(sequence)  # e.g. a sequence that was cancelled while the step was in flight
        for request in requests.values():
            if not request.finished:
                self._answers.end(request, "error", cause)

    def _draw(self, pending: list[tuple[GenerationSequence, list[int], int]], logits: torch.Tensor) -> None:
        """Draw tokens row by row: the next row of a sequence is used only if the draft token before it was accepted."""
        live = []
        for sequence, rows, computed in pending:
            for candidate in self._candidates_of(sequence):
                drafts = candidate.drafts
                self._stats.draft_tokens += len(drafts)
                candidate.drafts = []
                live.append((candidate, rows, computed, drafts))
        depth = 0
        while live:
            # no copy is needed if each row of the logits is used once, in order
            index = [rows[depth] for _, rows, _, _ in live]
            chosen = logits if index == list(range(logits.shape[0])) else logits[index]
            tokens = sample(chosen, [sequence.sampler for sequence, *_ in live])
            following = []
            for (sequence, rows, computed, drafts), token in zip(live, tokens, strict=True):
                if sequence.output.finished():
                    continue  # an error of another candidate has ended the request
                sequence.num_computed = computed + depth
                if token.error is not None:
                    self._answers.end(sequence.request, "error", token.error)
                    continue
                ended = self._answers.append(sequence, token)
                accepted = depth < len(drafts) and drafts[depth] == token.token
                if accepted:
                    self._stats.accepted_draft_tokens += 1
                if accepted and not ended and depth + 1 < len(rows):
                    following.append((sequence, rows, computed, drafts))
                elif not ended:
                    self._table.register_blocks(sequence)
            live, depth = following, depth + 1

    def _candidates_of(self, sequence: GenerationSequence) -> list[GenerationSequence]:
        """Return the sequence. If its prompt was just computed, create and return all candidates of its request."""
        request = sequence.request
        if sequence.has_sampled:
            return [sequence]
        self._stats.prompt_tokens += len(request.prompt_ids)
        others = [self._factory.make_sequence(request, index) for index in range(1, request.params.num_candidates)]
        if others:
            request.sequences += others
            self._table.add_candidates(sequence, others)
        return [sequence, *others]

    def _forget(self, request: GenerationRequest) -> None:
        if self._requests.pop(request.request_id, None) is None:
            return
        self._planner.alone.pop(request.request_id, None)
        request.metrics.finished_time = self._clock()
        for sequence in request.sequences:
            reason = sequence.output.finish_reason or "abort"
            self._finished_counts[reason] = self._finished_counts.get(reason, 0) + 1

    def _propose_drafts(self) -> None:
        options = self.options.speculative
        if self._proposer is None or options is None:
            return
        idle = [s for s in self._table.running.values() if not s.in_flight and not s.drafts]
        ready = [s for s in idle if s.has_sampled and len(s.token_ids) - s.num_computed == 1]
        ready = [s for s in ready if s.constraint is None or not s.constraint.is_complete()]
        if not ready:
            return
        try:
            found = self._proposer.propose([(s.sequence_id, s.token_ids) for s in ready], options.num_tokens)
        except Exception:  # requests can continue, because drafts never change the drawn tokens
            logger.exception("speculative decoding was stopped by an error; requests continue without drafts")
            self._proposer.close()
            self._proposer = None
            return
        for sequence, drafts in zip(ready, found, strict=True):
            room = sequence.request.max_tokens - len(sequence.generated) - 1
            sequence.drafts = drafts[: max(room, 0)]

    def _forget_drafts(self, sequence: GenerationSequence) -> None:
        if self._proposer is not None:
            self._proposer.release(sequence.sequence_id)

    def _count_step(self, tokens: int, seconds: float) -> None:
        self._stats.steps += 1
        self._stats.step_tokens += tokens
        self._stats.step_seconds += seconds
        logger.debug("step of %d tokens in %.1f ms", tokens, seconds * 1e3)
