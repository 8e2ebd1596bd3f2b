"""Laws of recorded decode steps and of steps that are queued ahead, on the CPU: no token changes.

In place of a CUDA graph, a replay calls the recorded function again, on the same input tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.causal_models import VOCABULARY, build
from tests.inference.greedy_reference import answer_arrivals, assert_greedy, make_prompts
from windlass.inference.decode_graphs import DecodeGraphs, bucket_sizes
from windlass.inference.engine_options import EngineOptions
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.step_batch import StepBatch

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class CalledAgain:
    """Captured step that calls its function in each replay."""

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._function = function
        self.output = torch.zeros(0)

    def replay(self) -> None:
        self.output = self._function()


class AsynchronousRunner(PagedModelRunner):
    """Runner that reports asynchronous steps, as the runner of a CUDA device does."""

    is_asynchronous = True  # type: ignore[assignment]


def make_engine(model: Any, *, graphs: bool, blocks: int = 24, **options: Any) -> LLMEngine:
    """Return an engine that queues steps ahead and, with `graphs`, records decode steps."""
    chosen = EngineOptions(max_tokens_per_step=32, max_sequences=6, max_model_len=96, **options)
    runner = AsynchronousRunner(model, block_size=16, num_blocks=lambda _: blocks, has_scratch=graphs)
    if graphs:
        runner.record_decodes(CalledAgain, 6, 6)
    return LLMEngine(runner, chosen, eos_ids={7}, max_model_len=96)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_greedy_tokens_are_those_of_the_plain_model(name: str, graphs: bool) -> None:
    changes = {"sliding_window": 8} if name == "gemma3" else {}
    model = build(name, max_position_embeddings=96, **changes).eval()
    engine = make_engine(model, graphs=graphs, blocks=7)
    queued = 0
    original = engine._start_next

    def counting(last: Any) -> None:
        nonlocal queued
        before = len(engine._started)
        original(last)
        queued += len(engine._started) > before

    engine._start_next = counting  # type: ignore[method-assign]
    params = [GREEDY.replace(max_tokens=3 + number) for number in range(24)]
    outputs = answer_arrivals(engine, make_prompts(24, VOCABULARY, 40, shared=18), params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [one.max_tokens for one in params]
    assert_greedy(model, outputs)
    assert queued > 20
    assert engine.stats().num_preemptions > 0
    graph = engine.runner.graphs
    assert (graph is not None) == graphs
    assert graph is None or set(graph.captured_sizes) >= {1, 2, 4}
    engine.close()


def test_sampled_tokens_and_ends_do_not_depend_on_steps_ahead() -> None:
    """Seeded draws, ends of sequence in the middle, several answers, penalties and log-probabilities mixed."""
    model = build("llama", max_position_embeddings=96).eval()
    prompts = make_prompts(16, VOCABULARY, 20)
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.7, "min_p": 0.01}, {"n": 2}, {"logprobs": 2}]
    kinds += [{"repetition_penalty": 1.3}, {"stop_token_ids": [11, 12, 13]}]
    params = [
        SamplingParams(temperature=0.8, seed=number, max_tokens=20, **kinds[number % len(kinds)])
        for number in range(16)
    ]
    found = []
    for ahead in (False, True):
        engine = make_engine(model, graphs=ahead)
        engine._looks_ahead = ahead
        outputs = answer_arrivals(engine, prompts, params)
        found.append([[(one.token_ids, one.finish_reason) for one in output.outputs] for output in outputs])
        engine.close()
    assert found[0] == found[1]
    assert {reason for output in found[0] for _, reason in output} == {"stop", "length"}


@pytest.mark.parametrize("cancels", [False, True], ids=["length", "cancelled"])
def test_a_waiting_request_is_admitted_once_another_ends(cancels: bool) -> None:
    engine = make_engine(build("llama", max_position_embeddings=96).eval(), graphs=False)
    for number in range(6):
        engine.add_request(str(number), [3 + number] * 4, GREEDY.replace(max_tokens=60 if number else 6))
    if cancels:
        engine.add_request(
            "several", [3] * 4, SamplingParams(n=2, seed=0)
        )  # needs two places, and is before "next" in the queue
    engine.add_request("next", [3] * 4, GREEDY)
    ended = False
    while not ended:
        ended = bool(engine.step())
    if cancels:
        for _ in range(3):
            engine.step()
        assert engine.stats().num_waiting == 2
        engine.cancel("several")
    for _ in range(2):
        engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (6, 0)
    engine.close()


def test_a_cancelled_request_keeps_its_blocks_while_a_step_writes_to_them() -> None:
    engine = make_engine(build("llama", max_position_embeddings=96).eval(), graphs=False)
    for number in range(2):
        engine.add_request(str(number), [3 + number] * 20, GREEDY)
    while not engine._started:
        engine.step()
    used = engine.stats().kv_cache_usage
    engine.cancel("0")
    assert engine.stats().kv_cache_usage == used
    engine.step()
    while engine.has_requests():
        engine.step()
    assert engine.stats().kv_cache_usage == 0


def test_a_logit_that_is_not_finite_ends_its_request_alone() -> None:
    model = build("llama", max_position_embeddings=96).eval()
    engine = make_engine(model, graphs=False)
    original = engine.runner.run

    def spoiled(batch: StepBatch) -> torch.Tensor:
        logits = original(batch).clone()
        for row, context in enumerate(batch.context_lengths.tolist()):
            if context == 12 and batch.is_decode:
                logits[row] = torch.nan
        return logits

    engine.runner.run = spoiled  # type: ignore[method-assign]
    outputs = answer_arrivals(engine, [[3] * 8, [4] * 30], [GREEDY, GREEDY])
    assert outputs[0].outputs[0].finish_reason == "error" and "highest logit" in str(outputs[0].error)
    assert len(outputs[1].outputs[0].token_ids) == 12


def test_the_third_failure_of_a_draw_in_a_row_is_not_blamed_on_the_step_queued_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(build("llama", max_position_embeddings=96).eval(), graphs=False)
    for number in range(2):
        engine.add_request(str(number), [3 + number] * 8, GREEDY)
    while not engine._started:
        engine.step()

    def failing(*arguments: Any) -> None:
        raise IndexError("index 0 is out of bounds")

    monkeypatch.setattr(engine, "_take_tokens", failing)
    engine._failures = 2
    with pytest.raises(IndexError) as raised:
        engine.step()
    with pytest.raises(IndexError):
        engine.recover(raised.value)
    engine.close()


def make_graphs(largest: int, fails: bool = False) -> tuple[DecodeGraphs, list[StepBatch]]:
    seen: list[StepBatch] = []

    def compute(batch: StepBatch) -> torch.Tensor:
        seen.append(batch)
        return batch.token_ids[:, None].float() + batch.positions[:, None]

    def capture(function: Callable[[], torch.Tensor]) -> CalledAgain:
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return CalledAgain(function)

    graphs = DecodeGraphs(
        compute,
        capture,
        max_sequences=largest,
        max_blocks=4,
        scratch_block=9,
        block_size=16,
        device=torch.device("cpu"),
    )
    return graphs, seen


def decode_batch(count: int) -> StepBatch:
    rows = torch.arange(count)
    return StepBatch(
        rows + 5,
        rows + 20,
        torch.arange(count + 1, dtype=torch.int32),
        (rows + 21).int(),
        torch.arange(2 * count, dtype=torch.int32).view(count, 2) % 9,
        rows * 16,
        rows,
        list(range(count)),
        [None] * count,
    )


def test_padding_reads_and_writes_the_scratch_block_alone() -> None:
    graphs, seen = make_graphs(16)
    for count in (16, 5, 1, 7):
        batch = decode_batch(count)
        assert graphs.takes(batch)
        expected = batch.token_ids[:, None].float() + batch.positions[:, None]
        assert torch.equal(graphs.run(batch), expected)
        last, size = seen[-1], len(seen[-1].sequence_ids)
        assert size == next(one for one in bucket_sizes(16) if one >= count)
        assert torch.equal(last.slots[:count], batch.slots)
        assert torch.equal(last.block_table[:count, :2], batch.block_table)
        assert (last.slots[count:] == 9 * 16).all() and (last.block_table[count:] == 9).all()
        assert (last.context_lengths[count:] == 1).all() and (last.positions[count:] == 0).all()
    assert graphs.captured_sizes == [1, 8, 16]


def test_larger_batches_and_prompts_are_not_taken() -> None:
    graphs, _ = make_graphs(4)
    assert not graphs.takes(decode_batch(5))
    wide = decode_batch(2)
    wide.block_table = torch.zeros(2, 5, dtype=torch.int32)
    assert not graphs.takes(wide)
    prompt = decode_batch(3)
    prompt.sequence_ids = [0]
    assert not graphs.takes(prompt)


def test_a_forward_that_cannot_be_recorded_runs_as_it_is() -> None:
    graphs, seen = make_graphs(4, fails=True)
    batch = decode_batch(3)
    assert torch.equal(graphs.run(batch), batch.token_ids[:, None].float() + batch.positions[:, None])
    assert seen[-1] is batch
    assert not graphs.takes(batch)


@pytest.mark.parametrize("largest", [1, 3, 8, 64, 100])
def test_sizes_grow_to_the_largest_batch(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest and sizes[0] == 1
