"""Tests of `windlass serve` with a real engine, over HTTP, by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.ports import free_port
from tests.serving.harness import WAIT_SECONDS, wait_until
from tests.serving.tiny_model import write_tiny_model

PROMPTS = ["hello", "a longer prompt with several words", "ünïcödé", "x" * 100]


class ServedModel:
    """Process of `windlass serve`."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_port()
        self.log_path = directory.parent / f"{self.port}.log"
        command = [sys.executable, "-m", "windlass", "serve", str(directory), "--port", str(self.port), *options]
        with self.log_path.open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded."""
        wait_until(lambda: self.process.poll() is not None or "serving tiny on" in self.log_path.read_text())
        assert self.process.poll() is None, self.log_path.read_text()

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of a metric over the engines. Only values with `label` in their labels count."""
        lines = self.client.with_options(max_retries=0).get("/../metrics", cast_to=str).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{") and label in line)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_SECONDS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[ServedModel]:
    server = ServedModel(directory, "--max-queued", "100", "--max-sequences", "16", "--kv-cache-tokens", "8192")
    try:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def test_greedy_answers_and_logprobs_equal_those_of_transformers(served: ServedModel, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    answer = served.client.completions.create(
        model="tiny", prompt=PROMPTS, max_tokens=20, temperature=0, logprobs=1, extra_body={"return_token_ids": True}
    )
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(
            ids, max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=1
        )
        tokens = expected.sequences[0, ids.shape[1] :].tolist()
        assert choice.token_ids == tokens  # type: ignore[attr-defined]
        logprobs = [
            logits[0].log_softmax(-1)[token].item() for logits, token in zip(expected.logits, tokens, strict=True)
        ]
        assert choice.logprobs is not None
        torch.testing.assert_close(choice.logprobs.token_logprobs, logprobs, atol=1e-4, rtol=0)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        assert choice.text == text


def test_a_stream_has_the_text_of_the_whole_answer(served: ServedModel) -> None:
    for prompt in PROMPTS:
        arguments: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "seed": 5}
        whole = served.client.completions.create(**arguments).choices[0].text
        parts = [chunk.choices[0].text for chunk in served.client.completions.create(**arguments, stream=True)]
        # On a busy machine one event may hold many tokens; tests/serving/test_server_process.py
        # checks that events come before the answer is complete.
        assert "".join(parts) == whole


def test_a_chat_stream_of_several_answers_has_all_of_the_whole_ones(served: ServedModel) -> None:
    arguments: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": PROMPTS[2]}],
        **{"n": 3, "seed": 3, "max_completion_tokens": 60, "logprobs": True, "top_logprobs": 4},
    }
    create = served.client.chat.completions.create
    unstopped = create(**arguments).choices[0].message.content
    arguments["stop"] = ["no such text", unstopped[10:12]]
    whole = create(**arguments)
    texts, logprobs, ends, usage = [""] * 3, [[] for _ in range(3)], {}, None
    for chunk in create(**arguments, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices} and ends[0] == "stop"
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, logprobs))
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_response_is_the_chat_completion_of_its_items(served: ServedModel) -> None:
    responses, chat = served.client.responses, served.client.chat.completions
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPTS[2]}]
    whole = chat.create(model="tiny", messages=messages, max_completion_tokens=12, temperature=0)
    arguments: dict[str, Any] = {
        "model": "tiny", "input": messages[1:], "instructions": "Be brief.", "max_output_tokens": 12, "temperature": 0
    }  # fmt: skip
    answer = responses.create(**arguments)
    assert answer.output_text == whole.choices[0].message.content
    assert answer.usage.output_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    *_, last = responses.create(**arguments, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == answer.output_text


def test_a_schema_constrains_the_answer_and_forces_a_call(served: ServedModel) -> None:
    parameters = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    messages: Any = [{"role": "user", "content": "hi"}]
    chat: Any = served.client.chat.completions.create
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": parameters}}
    for seed in range(3):
        answer = chat(model="tiny", messages=messages, response_format=form, max_tokens=200, seed=seed).choices[0]
        assert answer.finish_reason == "stop" and set(json.loads(answer.message.content)) == {"yes"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        answer = chat(
            model="tiny", messages=messages, tools=tools, tool_choice=choice, max_tokens=400, stream=False, seed=1
        ).choices[0]
        (call,) = answer.message.tool_calls[:1]
        assert call.function.name == "f" and set(json.loads(call.function.arguments)) == {"yes"}
    with pytest.raises(openai.BadRequestError, match="cannot be compiled") as raised:
        wrong = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "thing"}}}
        chat(model="tiny", messages=messages, response_format=wrong)
    assert raised.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="cannot be compiled") as raised:
        chat(model="tiny", messages=messages, extra_body={"guided_regex": "("})
    assert raised.value.param == "guided_regex"
    with pytest.raises(openai.BadRequestError, match="token 9999 of an input") as raised:
        served.client.embeddings.create(model="tiny", input=[5, 9999])
    assert raised.value.param == "input"


def test_embeddings_are_unit_vectors(served: ServedModel) -> None:
    vectors = [entry.embedding for entry in served.client.embeddings.create(model="tiny", input=PROMPTS).data]
    assert all(math.isclose(sum(x * x for x in vector), 1.0, rel_tol=1e-4) for vector in vectors)


def test_a_repeated_prompt_comes_from_the_cache(served: ServedModel) -> None:
    prompt = "a prompt that is long enough for a block of the cache " * 3
    cached = []
    for _ in range(2):
        usage = served.client.completions.create(model="tiny", prompt=prompt, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, len(prompt) // 16 * 16]


def test_a_connection_that_is_reset_during_its_stream_harms_no_other_request(served: ServedModel) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "reset", "max_tokens": 400, "temperature": 0}
    body = json.dumps({**arguments, "stream": True, "ignore_eos": True}).encode()
    arguments["extra_body"] = {"ignore_eos": True}
    expected = served.client.completions.create(**arguments).choices[0].text
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

    def count_aborted() -> float:
        return served.metric("vllm:request_success_total", 'finished_reason="abort"')

    aborted = count_aborted()

    def reset_one() -> bool:
        """Reset a connection after its first event; return True if its request has ended before its last token."""
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            received = b""
            while b"data: {" not in received:
                received += client.recv(4096)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # `close` sends RST
        wait_until(lambda: served.metric("vllm:num_requests_running") <= 1)
        return count_aborted() > aborted

    stream = served.client.completions.create(**arguments, stream=True)
    first = next(stream).choices[0].text
    wait_until(reset_one)  # repeated: on a busy machine the full answer may be sent before the reset
    assert first + "".join(chunk.choices[0].text for chunk in stream) == expected
    wait_until(lambda: served.metric("vllm:num_requests_running") == 0)
    assert served.metric("vllm:kv_cache_usage_perc") == 0
    assert "Traceback" not in served.log_path.read_text()


def test_nothing_is_lost_and_no_block_leaks_under_load(served: ServedModel) -> None:
    """Many clients at once: a third goes away during the stream, a tenth sends invalid requests, one a long prompt."""
    counts = {"answered": 0, "left": 0, "refused": 0}
    draw = random.Random(0)
    kinds = [draw.choice(["answered"] * 17 + ["left"] * 10 + ["refused"] * 3) for _ in range(150)]

    async def run() -> None:
        base_url = f"http://127.0.0.1:{served.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            slots = asyncio.Semaphore(32)
            await asyncio.gather(*(ask(client, slots, number, kind) for number, kind in enumerate(kinds)))

    async def ask(client: openai.AsyncOpenAI, slots: asyncio.Semaphore, number: int, kind: str) -> None:
        prompt = f"{number} " * (100 if number == 75 else number % 7 + 1)
        arguments: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 20 + number % 30}
        async with slots:
            if kind == "refused":
                with pytest.raises(openai.BadRequestError):
                    await client.completions.create(**{**arguments, "top_p": 7})
                counts[kind] += 1
                return
            stream = await client.completions.create(
                **arguments, stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
            )
            tokens = None
            async for chunk in stream:
                tokens = chunk.usage.completion_tokens if chunk.usage else None
                if kind == "left":
                    await stream.close()
                    counts[kind] += 1
                    return
            assert tokens == arguments["max_tokens"]
            counts[kind] += 1

    asyncio.run(run())
    assert counts == {kind: kinds.count(kind) for kind in counts}
    wait_until(lambda: served.metric("vllm:num_requests_running") + served.metric("vllm:num_requests_waiting") == 0)
    assert served.metric("vllm:kv_cache_usage_perc") == 0
    assert served.process.poll() is None and "Traceback" not in served.log_path.read_text()


@pytest.mark.slow  # loads two more models; tests/serving/test_server_process.py tests replicas without a model
def test_two_replicas_answer_as_one_engine(directory: Path, served: ServedModel) -> None:
    server = ServedModel(directory, "--replicas", "2", "--kv-cache-tokens", "2048")
    try:
        server.wait_until_ready()
        for prompt in PROMPTS:
            arguments: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 10, "temperature": 0}
            answers = [one.client.completions.create(**arguments).choices[0].text for one in (server, served)]
            assert answers[0] == answers[1]
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
