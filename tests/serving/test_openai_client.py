"""Tests that OpenAI's own client works with the server over HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from tests.serving.fake_engine import FakeEngine
from tests.serving.harness import server_on_thread, wait_until
from windlass.serving.chat_request import ChatRequest
from windlass.serving.completions_endpoint import CompletionRequest
from windlass.serving.embeddings_endpoint import EmbeddingRequest
from windlass.serving.responses_request import ResponsesRequest
from windlass.serving.server_settings import ApiKeys

if TYPE_CHECKING:  # the import takes seconds in each process that collects tests
    import openai


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(lora_names=("adapter",))


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    import openai

    with (
        server_on_thread(engine, api_keys=ApiKeys(["secret"])) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt="abc", max_tokens=5)
    assert answer.choices[0].text == "abcab" and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 5)


def test_streamed_completion_equals_the_whole_one(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "m", "prompt": ["abc", "de"], "max_tokens": 7, "n": 2, "logprobs": 3}
    whole = client.completions.create(**arguments)
    texts, logprobs, reasons = [""] * 4, [[] for _ in range(4)], {}
    usage = None
    for chunk in client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == [choice.text for choice in whole.choices]
    assert logprobs == [
        list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)) for choice in whole.choices
    ]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hé"}],
        "max_completion_tokens": 9,
    }
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content == "<system>B"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]


def test_chat_logprobs_have_the_likeliest_tokens_in_order(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=2, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    entry = logprobs.content[0]
    assert (entry.token, entry.logprob, entry.bytes) == ("<", -1.0, [60])
    assert [(one.token, one.logprob) for one in entry.top_logprobs] == [("=", -0.5), ("<", -1.0)]


class City(pydantic.BaseModel):
    """Arguments of a tool call, and schema of a structured answer."""

    city: str


ARGUMENTS = '{"city": "Rom"}'
FORCED = {"type": "function", "function": {"name": "City"}}


@pytest.mark.parametrize(
    ("choice", "answer"),
    [
        (FORCED, ARGUMENTS),
        ("required", f'[{{"name": "City", "parameters": {ARGUMENTS}}}]'),
        ("auto", f'<tool_call>{{"name": "City", "arguments": {ARGUMENTS}}}</tool_call>'),
        ("auto", f'{{"name": "City", "parameters": {ARGUMENTS}}}'),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FORCED]}},
         f'[{{"name": "City", "parameters": {ARGUMENTS}}}]'),
    ],
)  # fmt: skip
def test_the_clients_own_stream_sees_the_end_of_a_call(
    client: openai.OpenAI, engine: FakeEngine, choice: Any, answer: str
) -> None:
    import openai

    engine.answer = answer
    other = {"type": "function", "function": {"name": "other", "strict": True, "parameters": {"type": "object"}}}
    arguments: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "tools": [openai.pydantic_function_tool(City), *([other] if "allowed_tools" in choice else [])],
        "tool_choice": choice,
        "max_completion_tokens": 200,
    }
    try:
        with client.chat.completions.stream(**arguments) as stream:
            ended = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            message = stream.get_final_completion().choices[0].message
        assert [(event.name, event.parsed_arguments) for event in ended] == [("City", City(city="Rom"))]
        whole = client.chat.completions.parse(**arguments).choices[0].message
        assert "other" not in engine.tokenizer.decode(engine.seen[-1][0])
        for one in (message, whole):
            assert one.tool_calls is not None and one.tool_calls[0].function.parsed_arguments == City(city="Rom")
            result = {"role": "tool", "tool_call_id": one.tool_calls[0].id, "content": [{"type": "text", "text": "ok"}]}
            client.chat.completions.create(model="m", messages=[*arguments["messages"], one, result], max_tokens=1)
    finally:
        engine.answer = None


def test_a_form_of_the_client_parses_whole_and_streamed_answers(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = ARGUMENTS
    arguments: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "a"}], "response_format": City,
        "max_completion_tokens": 50, "logprobs": True, "top_logprobs": 1,
    }  # fmt: skip
    try:
        whole = client.chat.completions.parse(**arguments).choices[0]
        with client.chat.completions.stream(**arguments, stream_options={"include_usage": True}) as stream:
            assert [event.parsed for event in stream if event.type == "content.done"] == [City(city="Rom")]
            final = stream.get_final_completion()
    finally:
        engine.answer = None
    assert final.choices[0].message.parsed == whole.message.parsed == City(city="Rom")
    assert final.choices[0].logprobs == whole.logprobs
    assert final.usage is not None and final.usage.completion_tokens == len(ARGUMENTS)


def test_raw_responses_have_the_id_of_the_request(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="m", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == raw.parse()._request_id == "mine"
    with client.completions.with_streaming_response.create(
        model="m", prompt="a", max_tokens=1, stream=True
    ) as streamed:
        assert [line for line in streamed.iter_lines() if line][-1] == "data: [DONE]"


def test_all_fields_of_the_client_have_an_effect_or_a_message_of_their_own() -> None:
    from openai.types import completion_create_params as completions
    from openai.types import embedding_create_params as embeddings
    from openai.types.chat import completion_create_params as chats
    from openai.types.responses import response_create_params as responses

    for request, sent in (
        (CompletionRequest, completions.CompletionCreateParamsBase),
        (ChatRequest, chats.CompletionCreateParamsBase),
        (EmbeddingRequest, embeddings.EmbeddingCreateParams),
        (ResponsesRequest, responses.ResponseCreateParamsBase),
    ):
        unknown = set(sent.__annotations__) - {*request.model_fields, *request.harmless, *request.refused}
        assert not unknown, request


def test_embeddings_in_both_encodings_are_equal(client: openai.OpenAI) -> None:
    floats = client.embeddings.create(model="m", input=["a", "bc"], encoding_format="float")
    default = client.embeddings.create(model="m", input=["a", "bc"])  # base64, which the client decodes
    assert [one.embedding for one in default.data] == [one.embedding for one in floats.data]
    assert floats.data[1].embedding == [3.0, 0.5, -1.0] and floats.usage.prompt_tokens == 5
    raw = client.embeddings.with_raw_response.create(model="m", input=[[1, 2]], encoding_format="base64").http_response
    assert struct.unpack("<3f", base64.b64decode(raw.json()["data"][0]["embedding"])) == (2.0, 0.5, -1.0)


def test_models_and_adapters(client: openai.OpenAI, engine: FakeEngine) -> None:
    import openai

    assert [model.id for model in client.models.list()] == ["m", "adapter"]
    assert client.models.retrieve("adapter").id == "adapter"
    assert client.completions.create(model="adapter", prompt="a", max_tokens=1).model == "adapter"
    assert engine.seen[-1][2] == "adapter"
    with pytest.raises(openai.NotFoundError, match="m, adapter"):
        client.completions.create(model="other", prompt="a")


def test_errors_are_the_clients_own_types(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="temperature") as found:
        client.completions.create(model="m", prompt="a", temperature=-1)
    assert found.value.param == "temperature" and found.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="this model's maximum context length is 512 tokens") as long:
        client.completions.create(model="m", prompt="a" * 600)
    assert long.value.code == "context_length_exceeded"


def test_a_closed_stream_ends_the_request(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.step_seconds = 0.01
    try:
        stream = client.completions.create(model="m", prompt="a", max_tokens=400, stream=True)
        next(iter(stream))
        assert len(engine.running) == 1
        stream.close()
        wait_until(lambda: not engine.running)
        assert engine.finished["abort"] == 1 and engine.finished["length"] > 0
    finally:
        engine.step_seconds = 0.0


def test_an_abandoned_request_ends_without_a_stream_too(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.step_seconds = 0.05
    aborted = engine.finished["abort"]
    body = json.dumps({"model": "m", "prompt": ["a", "b"], "max_tokens": 400})
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    address = client.base_url
    try:
        with contextlib.closing(HTTPConnection(address.host, address.port)) as connection:
            connection.request("POST", f"{address.path}completions", body, headers)
            wait_until(lambda: len(engine.running) == 2)
        wait_until(lambda: not engine.running)
        assert engine.finished["abort"] == aborted + 2
    finally:
        engine.step_seconds = 0.0


def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI) -> None:
    wrong: list[str] = []

    def ask(number: int) -> None:
        for turn in range(5):
            prompt = f"<{number}:{turn}>"
            chunks = client.completions.create(model="m", prompt=prompt, max_tokens=len(prompt), stream=True)
            text = "".join(chunk.choices[0].text for chunk in chunks)
            if text != prompt:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
