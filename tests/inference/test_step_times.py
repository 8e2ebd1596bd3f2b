"""Law: times of steps with parts of prompts correct the predicted times; those of decodes do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.causal_models import build
from windlass.inference.engine_options import EngineOptions, SpeculativeOptions
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.step_batch import StepBatch
from windlass.inference.step_cost import StepCost

COST = StepCost(token_seconds=0.001)
PROMPT = 20  # tokens


class TimedRunner(PagedModelRunner):
    """Runner whose steps take a stated time of a clock that stands still otherwise."""

    now = 0.0
    prompts, decodes = 1.0, 1.0  # ratio of the time of a step to the predicted one

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
