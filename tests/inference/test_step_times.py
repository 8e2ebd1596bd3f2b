"""Laws of step times: steps with prompt tokens correct the prediction, and the wait for a first token is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.causal_models import build
from windlass.base.errors import EngineOverloadedError
from windlass.inference.engine_options import EngineOptions, SpeculativeOptions
from windlass.inference.generation_request import GenerationSequence
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.step_batch import StepBatch
from windlass.inference.step_cost import StepCost

COST = StepCost(token_seconds=0.001)
PROMPT = 20  # tokens


class TimedRunner(PagedModelRunner):
    """Runner with a simulated clock, which advances only by the stated time of each step."""

    now = 0.0
    prompts, decodes = 1.0, 1.0  # time of a step relative to its predicted time

    def run(self, batch: StepBatch) -> torch.Tensor:
        ratio = self.prompts if batch.num_tokens >= PROMPT else self.decodes
        self.now += COST.step_seconds(batch.num_tokens, 0) * ratio
        return super().run(batch)


class ConstantDrafts:
    """Source of the same drafts for each sequence."""

    def propose(self, sequences: Sequence[tuple[int, list[int]]], count: int) -> list[list[int]]:
        return [[1] * count for _ in sequences]

    def release(self, sequence_id: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("prompts", "decodes", "scale"), [(1.0, 3.0, 1.0), (2.0, 1.0, 1.1), (2.0, 3.0, 1.1)])
def test_only_steps_with_prompts_correct_the_predictions(
    prompts: float, decodes: float, scale: float, drafts: int
) -> None:
    model = build("llama", max_position_embeddings=96).eval()
    runner = TimedRunner(model, block_size=16, num_blocks=lambda _: 8)
    runner.prompts, runner.decodes = prompts, decodes
    speculative = SpeculativeOptions(num_tokens=drafts) if drafts else None
    options = EngineOptions(max_tokens_per_step=32, max_sequences=2, max_model_len=96, speculative=speculative)
    proposer = ConstantDrafts() if drafts else None
    engine = LLMEngine(
        runner, options, max_model_len=96, cost=replace(COST), proposer=proposer, clock=lambda: runner.now
    )
    engine.add_request("one", list(range(1, PROMPT + 1)), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    while engine.has_requests():
        engine.step()
    assert engine.stats().steps <= 8 and bool(engine.stats().draft_tokens) == bool(drafts)
    assert engine.cost.scale == pytest.approx(scale)


def make_bounded_engine(**options: int) -> tuple[TimedRunner, LLMEngine]:
    """Return a runner of 0.001 seconds a token, and an engine that refuses requests with a wait over 0.2 seconds."""
    model = build("llama", max_position_embeddings=96).eval()
    runner = TimedRunner(model, block_size=16, num_blocks=lambda _: 64)
    bounded = EngineOptions(
        max_tokens_per_step=32, max_model_len=96, max_wait_seconds=0.2, enforce_max_wait=True, **options
    )
    return runner, LLMEngine(runner, bounded, max_model_len=96, cost=replace(COST), clock=lambda: runner.now)


def test_a_request_that_would_wait_too_long_is_refused() -> None:
    runner, engine = make_bounded_engine(max_sequences=16)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    accepted = 0
    with pytest.raises(EngineOverloadedError, match=r"longer than 0\.2 seconds .* try again in 1 seconds") as raised:
        for number in range(20):
            engine.add_request(str(number), [1 + (number + place) % 40 for place in range(64)], params)
            accepted += 1
    assert raised.value.retry_after == 1
    assert 2 <= accepted <= 4  # a prompt takes 0.064 seconds
    answered: dict[str, float] = {}
    while engine.has_requests():
        for output in engine.step():
            assert output.metrics.first_token_time is not None
            answered[output.request_id] = output.metrics.first_token_time
    assert len(answered) == accepted and max(answered.values()) <= 0.2 + 0.064
    engine.add_request("later", [1, 2, 3], params)  # the other requests have ended


def test_a_request_that_waits_too_long_for_its_place_is_refused() -> None:
    runner, engine = make_bounded_engine(max_sequences=1)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add_request("first", [1, 2, 3], params.replace(max_tokens=90))
    engine.step()
    runner.decodes = 10.0  # an answer takes 0.9 seconds
    engine.add_request("second", [1, 2, 3], params)
    outputs = []
    while engine.has_requests():
        outputs += engine.step()
    late, whole = outputs
    assert late.request_id == "second" and late.retry_after == 1 and late.is_request_error
    assert "waited for 0.2 seconds" in str(late.error) and not late.outputs[0].token_ids
    assert len(whole.outputs[0].token_ids) == 90 and whole.error is None


def test_an_engine_whose_only_request_is_refused_goes_on() -> None:
    runner, engine = make_bounded_engine(max_sequences=1)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add_request("late", [1, 2, 3], params)
    runner.now = 1.0  # the engine did something else before its first step
    (late,) = engine.step()
    assert late.retry_after == 1 and not engine.has_requests()
    engine.add_request("next", [1, 2, 3], params)
    while engine.has_requests():
        outputs = engine.step()
    assert outputs[0].error is None and len(outputs[0].outputs[0].token_ids) == 2


def make_preempted(**options: int) -> tuple[LLMEngine, GenerationSequence]:
    """Return an engine, and its running sequence of 20 prompt tokens and 12 of an answer, for tests of preemption."""
    model = build("llama", max_position_embeddings=96).eval()
    runner = TimedRunner(model, block_size=16, num_blocks=lambda _: 8)
    settings = EngineOptions(max_tokens_per_step=32, max_sequences=4, max_model_len=96, prefix_caching=False, **options)
    cost = StepCost(token_seconds=1e-3, cached_token_seconds=1e-6, pair_seconds=1e-4)
    engine = LLMEngine(runner, settings, max_model_len=96, cost=cost, clock=lambda: runner.now)
    engine.add_request("one", list(range(1, PROMPT + 1)), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    for _ in range(12):
        engine.step()
    (sequence,) = engine._table.running.values()
    assert len(sequence.generated) == 12 and sequence.num_computed == 31
    return engine, sequence


def test_tokens_that_are_computed_again_count_as_those_of_a_prompt() -> None:
    engine, sequence = make_preempted()
    clock, start, cost = engine._table.fair_clock, sequence.fair_start, replace(engine.cost, scale=1.0)
    engine._table.preempt(sequence)
    plan = engine._planner.plan(0.0, has_started=False)
    assert plan is not None and plan.has_prompts and plan.chosen == [(sequence, 32)]
    assert plan.predicted == pytest.approx(cost.step_seconds(32, 0, 32 * 16))
    work = cost.prompt_work(32, 0)
    assert sequence.fair_start - start == pytest.approx(work)
    assert engine._table.fair_clock - clock == pytest.approx(work)


@pytest.mark.parametrize("corrects", [False, True])
def test_preempted_blocks_are_kept_if_by_corrected_times_that_is_cheaper(corrects: bool) -> None:
    engine, sequence = make_preempted(swap_bytes=1 << 30)
    saved = engine._table._saved
    seconds = engine.cost.prefill_seconds(sequence.num_computed) * 1.5
    nbytes = 2 * engine.runner.block_nbytes
    saved._rates["host"] = 2 * nbytes / seconds  # uncorrected: moving takes 1.5 times as long as computing
    for _ in range(60 if corrects else 0):
        engine._planner.correct_cost(4.0, 1.0)
    engine._table.preempt(sequence)
    assert (sequence.saved is not None) == corrects
