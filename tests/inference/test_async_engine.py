"""Tests of the asyncio engine: streams, cancellation, draining, and a thread that dies."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.causal_models import VOCABULARY, build
from tests.inference.greedy_reference import assert_greedy, make_prompts
from windlass.base.errors import EngineOverloadedError, RequestError
from windlass.inference import async_engine, llm_engine
from windlass.inference.async_engine import AsyncLLMEngine, EngineStoppedError
from windlass.inference.sampler import sample
from windlass.inference.sampling_params import SamplingParams, TokenTexts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_engine(**options: Any) -> tuple[Any, AsyncLLMEngine]:
    model = build("llama", max_position_embeddings=96).eval()
    settings = {"max_tokens_per_step": 16, "max_sequences": 4, "check_at_load": False, **options}
    return model, AsyncLLMEngine.from_model(model, **settings)


def test_an_engine_takes_the_arguments_of_an_llm(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    engine = AsyncLLMEngine.from_model(tmp_path, device="cpu", skip_tokenizer_init=True, check_at_load=False)
    assert engine.tokenizer is None
    asyncio.run(engine.shutdown())


def test_an_engine_that_was_not_started_says_so() -> None:
    async def main() -> None:
        _, engine = make_engine()
        with pytest.raises(EngineStoppedError, match="was not started: await engine.start"):
            await engine.add([3], GREEDY)
        await engine.start()
        await engine.shutdown()
        with pytest.raises(EngineStoppedError, match="has stopped"):
            await engine.add([3], GREEDY)

    asyncio.run(main())


def test_streams_are_cumulative_and_complete() -> None:
    async def main() -> None:
        model, engine = make_engine()
        await engine.start()

        async def one(prompt: list[int]) -> Any:
            last, seen = None, 0
            async for output in engine.stream(prompt, GREEDY):
                tokens = output.outputs[0].token_ids
                assert len(tokens) > seen or output.finished
                seen, last = len(tokens), output
            assert last is not None and last.finished
            return last

        outputs = await asyncio.gather(*(one(prompt) for prompt in make_prompts(12, VOCABULARY)))
        assert_greedy(model, list(outputs))
        assert engine.stats().kv_cache_usage == 0
        await engine.shutdown()
        assert not engine.is_healthy
        with pytest.raises(EngineStoppedError):
            await engine.add([3], GREEDY)

    asyncio.run(main())


@pytest.mark.parametrize("between", [False, True], ids=["during the next forward", "before a call between steps"])
def test_a_token_arrives_before_the_engine_has_computed_the_next_one(between: bool) -> None:
    async def main() -> None:
        _, engine = make_engine()
        run, received, arrived = engine._engine.runner.run, [0], threading.Condition()
        forwards = 0

        def wait_for(count: int) -> None:
            with arrived:
                assert arrived.wait_for(lambda: received[0] >= count, timeout=20)

        def observed(batch: Any) -> torch.Tensor:
            nonlocal forwards
            forwards, computed = forwards + 1, forwards + 1
            if between:
                engine._calls.put(lambda: wait_for(computed))
            else:
                wait_for(computed - 1)
            return run(batch)

        engine._engine.runner.run = observed
        await engine.start()
        async for output in engine.stream([3, 4, 5], GREEDY):
            with arrived:
                received[0] = len(output.outputs[0].token_ids)
                arrived.notify_all()
        assert output.outputs[0].finish_reason == "length"
        assert forwards == received[0] == GREEDY.max_tokens
        await engine.shutdown()
        assert engine.error is None

    asyncio.run(main())


def test_a_token_beyond_the_vocabulary_has_no_embedding_and_harms_no_other_request() -> None:
    async def main() -> None:
        _, engine = make_engine()
        await engine.start()
        for token in (-1, VOCABULARY):
            with pytest.raises(RequestError, match=f"token {token} of an input") as raised:
                await engine.embed([[3, token]])
            assert raised.value.parameter == "input"
        assert len(await engine.embed([[3, VOCABULARY - 1]])) == 1
        with pytest.raises(RequestError, match="no unread outputs of a request 'x'"):
            await anext(engine.outputs("x"))
        await engine.shutdown()

    asyncio.run(main())


def test_a_step_runs_between_two_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        _, engine = make_engine(max_queued=2)
        order, run = [], engine._engine.runner.run
        has_begun, may_end = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def embed(*_: Any) -> list[list[float]]:
            order.append("embedding")
            loop.call_soon_threadsafe(has_begun.set)
            assert may_end.wait(20)
            time.sleep(0.002)  # time for other clients to queue inputs
            return [[1.0]]

        def observed(batch: Any) -> torch.Tensor:
            order.append("step")
            return run(batch)

        monkeypatch.setattr(async_engine, "embed_prompts", embed)
        engine._engine.runner.run = observed
        await engine.start()
        stream = engine.stream([3, 4, 5], GREEDY.replace(max_tokens=80))
        await anext(stream)
        clients = [asyncio.create_task(engine.embed([[3]] * 6))]
        await has_begun.wait()
        clients += [asyncio.create_task(engine.embed([[3]] * 6)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloadedError, match="2 embeddings are waiting"):
            await engine.embed([[3]])
        may_end.set()
        assert await asyncio.gather(*clients) == [[[1.0]] * 6] * 3
        await stream.aclose()
        assert order.count("embedding") == 18
        assert all({"step"} <= set(pair) for pair in itertools.pairwise(order))
        await engine.shutdown()
        assert engine.error is None

    asyncio.run(main())


def test_bad_words_are_encoded_once_and_not_in_the_thread_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        _, engine = make_engine()
        names: list[str] = []

        def encode(params: SamplingParams) -> TokenTexts:
            names.append(threading.current_thread().name)
            return ((5,),)

        monkeypatch.setattr(engine._engine._factory, "encode_bad_words", encode)
        await engine.start()
        params = GREEDY.replace(bad_words=["a"], n=3, temperature=1.0)
        async for output in engine.stream([3, 4], params):
            assert all(5 not in answer.token_ids for answer in output.outputs)
        assert len(names) == 1 and names[0] != "windlass-engine"
        await engine.shutdown()

    asyncio.run(main())


def test_a_client_that_leaves_frees_its_blocks() -> None:
    async def main() -> None:
        _, engine = make_engine()
        await engine.start()
        long = GREEDY.replace(max_tokens=80)
        stream = engine.stream([3, 4, 5], long)
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(anext(engine.stream([3, 4, 5], long)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.embed([[3]])  # runs after the cancellation, which is before it in the queue
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.kv_cache_usage == 0
        await engine.shutdown()

    asyncio.run(main())


def test_a_slow_client_keeps_the_newest_output_alone() -> None:
    async def main() -> None:
        model, engine = make_engine()
        await engine.start()
        request = await engine.add([3, 4, 5], GREEDY)
        while engine.stats().num_running or engine.stats().num_waiting:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
        outputs = [output async for output in engine.outputs(request)]
        assert len(outputs) == 1
        assert_greedy(model, outputs)
        await engine.shutdown()

    asyncio.run(main())


def test_an_old_stream_does_not_end_a_new_request_of_its_id() -> None:
    async def main() -> None:
        model, engine = make_engine()
        await engine.start()
        old = engine.stream([3, 4], GREEDY, request_id="x")
        await anext(old)
        engine.cancel("x")
        new = await engine.add([3, 4, 5], GREEDY, request_id="x")
        await old.aclose()
        outputs = [output async for output in engine.outputs(new)][-1:]
        assert_greedy(model, outputs)
        await engine.shutdown()

    asyncio.run(main())


def test_errors_of_one_request_leave_the_others_alone() -> None:
    async def main() -> None:
        model, engine = make_engine(max_queued=1, max_sequences=1)
        assert engine.max_queued == 1
        await engine.start()
        # all requests arrive while the thread is held, so that no step runs between them
        release = threading.Event()
        held = asyncio.create_task(engine._call(release.wait))
        await asyncio.sleep(0)
        prompts = [[99], [3] * 200, [3, 4, 5], [3, 4]]
        adding = [asyncio.create_task(engine.add(prompt, GREEDY)) for prompt in prompts]
        await asyncio.sleep(0)
        release.set()
        await held
        with pytest.raises(RequestError, match="token 99 of the prompt"):
            await adding[0]
        with pytest.raises(RequestError, match="prompt has 200 tokens"):
            await adding[1]
        first = await adding[2]
        with pytest.raises(EngineOverloadedError, match="try again"):
            await adding[3]
        outputs = [output async for output in engine.outputs(first)][-1:]
        second = await engine.add([3, 4], GREEDY)
        outputs += [output async for output in engine.outputs(second)][-1:]
        assert_greedy(model, outputs)
        await engine.shutdown()

    asyncio.run(main())


def test_draining_finishes_running_requests() -> None:
    async def main() -> None:
        model, engine = make_engine()
        await engine.start()
        stream = engine.stream([3, 4, 5], GREEDY)
        outputs = [await anext(stream)]
        ending = asyncio.create_task(engine.shutdown(drain=True))
        outputs += [output async for output in stream]
        await ending
        assert outputs[-1].finished
        assert_greedy(model, outputs[-1:])

    asyncio.run(main())


def test_draining_finishes_the_embeddings_of_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        _, engine = make_engine()
        await engine.start()
        begins, goes_on = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def embed(*_: Any) -> list[list[float]]:
            loop.call_soon_threadsafe(begins.set)
            assert goes_on.wait(60)
            return [[0.0]]

        monkeypatch.setattr(async_engine, "embed_prompts", embed)
        client = asyncio.create_task(engine.embed([[3], [4], [5]]))
        await begins.wait()
        ending = asyncio.create_task(engine.shutdown(drain=True))
        await asyncio.sleep(0)
        goes_on.set()
        assert await client == [[0.0]] * 3
        await ending
        with pytest.raises(EngineStoppedError):
            await engine.embed([[3]])

    asyncio.run(main())


class FailingRunner:
    """Runner that raises for batches with `token`, or for all batches, like a forward that runs out of memory."""

    def __init__(self, runner: Any, token: int, *, always: bool = False) -> None:
        self.run_batch, self.token, self.always, self.failures = runner.run, token, always, 0

    def run(self, batch: Any) -> torch.Tensor:
        if self.always or self.token in batch.token_ids.tolist():
            self.failures += 1
            raise MemoryError("out of memory\nwhile a layer was computed")
        return self.run_batch(batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize("position", [0, 30])
def test_a_forward_that_fails_ends_its_request_alone(position: int) -> None:
    """Other requests, also requests of the failed step, get the tokens of a run without the failing request."""

    async def main() -> None:
        model, engine = make_engine(deterministic=False)
        await engine.start()
        prompts = [[token % (VOCABULARY - 5) + 3 for token in prompt] for prompt in make_prompts(6, VOCABULARY - 2)]
        bad = VOCABULARY - 1
        failing = [*([7] * position), bad, 9, 11]
        runner: Any = engine._engine.runner
        failures = FailingRunner(runner, bad)
        runner.run = failures.run

        async def one(prompt: list[int]) -> Any:
            async for output in engine.stream(prompt, GREEDY.replace(logit_bias={bad: -100.0})):
                last = output
            return last

        *good, ended = await asyncio.gather(*(one(prompt) for prompt in [*prompts, failing]))
        assert failures.failures >= 1
        assert ended.outputs[0].finish_reason == "error" and not ended.is_request_error
        assert "MemoryError: out of memory" in ended.error
        assert [output.outputs[0].finish_reason for output in good] == ["length"] * len(prompts)
        assert_greedy(model, good)
        assert engine.is_healthy and engine.stats().kv_cache_usage == 0
        await engine.shutdown()

    asyncio.run(main())


def test_a_forward_that_fails_with_the_models_own_cache_ends_its_request_alone() -> None:
    """The forward fails after those of other sequences of the same step, whose caches have grown by then."""
    bad = VOCABULARY - 1

    def fail(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if bad in inputs[0]:
            raise MemoryError("out of memory")

    async def main() -> None:
        model: Any = build("bloom").eval()
        options = {"max_tokens_per_step": 16, "max_sequences": 6, "kv_cache_tokens": 320, "max_model_len": 32}
        engine = AsyncLLMEngine.from_model(model, **options)
        await engine.start()
        handle = model.get_input_embeddings().register_forward_pre_hook(fail)

        async def one(prompt: list[int]) -> Any:
            async for output in engine.stream(prompt, GREEDY.replace(logit_bias={bad: -100.0})):
                last = output
            return last

        first = engine.stream([3, 4, 5], GREEDY.replace(logit_bias={bad: -100.0}))
        last = await anext(first)  # the only output, if the others come before it is read
        later = asyncio.gather(*(one(prompt) for prompt in ([6, 7, 8, 9], [9, 4], [11, bad, 5])))
        async for output in first:
            last = output
        *good, ended = await later
        handle.remove()
        assert ended.outputs[0].finish_reason == "error" and "MemoryError: out of memory" in ended.error
        assert_greedy(model, [last, *good])
        assert engine.is_healthy and not engine._engine.runner._states  # type: ignore[attr-defined]
        await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("part", ["mask", "structure", "text"])
def test_an_error_of_masks_or_text_ends_its_request_alone(part: str) -> None:
    """Libraries compute masks and text, and raise errors of other types than RequestError."""

    class Broken:
        text = ""

        def append(self, token: int) -> str:
            raise ValueError(f"no text for {token}")

        accept = append
        allowed = finish = append

    async def main() -> None:
        model, engine = make_engine()
        make_sequence = engine._engine._factory.make_sequence

        def make_broken(request: Any, *arguments: Any, **options: Any) -> Any:
            sequence: Any = make_sequence(request, *arguments, **options)
            if request.prompt_ids == failing and part == "mask":
                sequence.sampler.allowed = lambda: Broken().allowed(0)
            elif request.prompt_ids == failing:
                setattr(sequence, {"structure": "constraint", "text": "detokenizer"}[part], Broken())
            return sequence

        engine._engine._factory.make_sequence = make_broken  # type: ignore[method-assign]
        await engine.start()
        failing = [5, 6, 7]
        names = [await engine.add(prompt, GREEDY) for prompt in ([3, 4], failing)]
        outputs = [[output async for output in engine.outputs(name)][-1] for name in names]
        assert_greedy(model, outputs[:1])
        assert outputs[1].outputs[0].finish_reason == "error" and not outputs[1].is_request_error
        assert "ValueError: no text for" in outputs[1].error
        assert engine.is_healthy and engine.stats().kv_cache_usage == 0
        await engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("several", [1, 3], ids=["one answer", "three answers"])
def test_a_draw_that_fails_ends_the_requests_of_its_step(several: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting requests continue. If every draw fails, the engine stops."""
    failures = 0

    def failing(logits: torch.Tensor, samplers: Any) -> Any:
        nonlocal failures
        if any(made.prompt == [5, 6, 7] for made in samplers):
            failures += 1
            raise IndexError("index 0 is out of bounds")
        return sample(logits, samplers)

    async def main() -> None:
        model, engine = make_engine(max_sequences=1 + several)
        monkeypatch.setattr(llm_engine, "sample", failing)
        await engine.start()
        drawn = SamplingParams(n=several, max_tokens=12, ignore_eos=True)
        requests = [([5, 6, 7], drawn), ([3, 4], GREEDY), ([8, 9, 10], GREEDY)]
        names = [await engine.add(prompt, params) for prompt, params in requests]
        failed, *good = [[output async for output in engine.outputs(name)][-1] for name in names]
        assert failures == 1
        assert [answer.finish_reason for answer in failed.outputs] == ["error"] * several
        assert "IndexError: index 0" in failed.error and not failed.is_request_error
        assert good[-1].outputs[0].finish_reason == "length"
        assert_greedy(model, [output for output in good if output.error is None])
        assert engine.is_healthy and engine.stats().kv_cache_usage == 0 and engine.stats().num_running == 0
        for _ in range(2):
            assert [output async for output in engine.stream([5, 6, 7], GREEDY)][-1].error is not None
        with pytest.raises(EngineStoppedError):
            async for _ in engine.stream([5, 6, 7], GREEDY):
                pass
        assert isinstance(engine.error, IndexError)

    asyncio.run(main())


def test_idle_engine_calls_use_idle_time() -> None:
    async def main() -> None:
        _, engine = make_engine()
        runner: Any = engine._engine.runner
        calls = iter([True, True, False])
        left = threading.Event()

        def use_idle_time() -> bool:
            more = next(calls, None)
            if more is None:
                left.set()
            return bool(more)

        runner.use_idle_time = use_idle_time
        await engine.start()
        async for _ in engine.stream([3, 4, 5], GREEDY):
            pass
        assert await asyncio.to_thread(left.wait, 30)
        await engine.shutdown()

    asyncio.run(main())


def test_an_engine_whose_forward_always_fails_stops() -> None:
    async def main() -> None:
        _, engine = make_engine()
        await engine.start()
        runner: Any = engine._engine.runner
        runner.run = FailingRunner(runner, 0, always=True).run
        found: list[str | None] = []
        for _ in range(3):
            try:
                async for output in engine.stream([3, 4, 5], GREEDY):
                    found.append(output.outputs[0].finish_reason)
            except EngineStoppedError as error:
                assert isinstance(error.__cause__, MemoryError)
                found.append("stopped")
        assert found == ["error", "error", "stopped"]
        assert not engine.is_healthy
        assert isinstance(engine.error, MemoryError)
        assert engine._thread is not None
        engine._thread.join(30)
        with pytest.raises(RequestError, match="engine is closed"):
            engine._engine.add_request("x", [3], GREEDY)
        with pytest.raises(EngineStoppedError):
            await engine.add([3], GREEDY)

    asyncio.run(main())


def test_an_engine_that_was_not_started_is_closed() -> None:
    model, engine = make_engine()
    attention = build("llama", max_position_embeddings=96).config._attn_implementation
    assert model.config._attn_implementation != attention
    asyncio.run(engine.shutdown())
    assert model.config._attn_implementation == attention
