"""Tests of invalid requests: each gets a status and a message that names the field, and other requests continue."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import select
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pydantic
import pytest
import uvicorn
from starlette.testclient import TestClient
from uvicorn.server import ServerState

from tests.serving.fake_engine import CharacterTokenizer, FakeEngine
from tests.serving.harness import client_of, server_on_thread
from tests.serving.tiny_model import make_byte_tokenizer
from windlass.base.errors import EngineOverloadedError
from windlass.serving import completions_endpoint
from windlass.serving.chat_request import ChatRequest
from windlass.serving.completions_endpoint import CompletionRequest
from windlass.serving.http_protocol import TimedHttpProtocol
from windlass.serving.request_body import read_request
from windlass.serving.request_fields import RequestModel, StructuredOutputsField
from windlass.serving.responses_request import ResponsesRequest
from windlass.serving.server_settings import ApiKeys
from windlass.serving.tokenizer_endpoints import DetokenizeRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return client_of(FakeEngine(), max_body_bytes=100_000, max_prompts=8, max_output_tokens=300)


def refused(client: TestClient, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Return the error of a refused request, in OpenAI's form."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=data, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "Traceback" not in answer.text
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "not valid JSON"),
        (b"{", "line 1, column 2"),
        (b"[1]", "array"),
        (b"null", "null"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "1e999"),
        (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "beyond the range of float64"),
        (b'{"prompt": "\\ud800"}', "surrogate \\ud800"),
        (b'{"prompt": ' + b"[" * 99_000, "nested"),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "nested"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "digits"),
        (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 300}', "'max_tokens' is given twice"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true, "include_usage": false}}', "given twice"),
    ],
)
def test_a_body_that_is_no_json_object(client: TestClient, body: bytes, part: str) -> None:
    error = refused(client, TEXT, body)
    assert part in error["message"] and error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "parameter", "part"),
    [
        ({}, "prompt", "required"),
        ({"prompt": ""}, None, None),  # served: the tokenizer adds a token
        ({"prompt": []}, "prompt", "send a text"),
        ({"prompt": [1, "a"]}, "prompt", "prompt.0"),
        ({"prompt": [[1], [True]]}, "prompt", "prompt.1"),
        ({"prompt": [-1]}, "prompt", "prompt.0"),
        ({"prompt": [2_000_000]}, "prompt", "vocabulary"),
        ({"prompt": ["a"] * 9}, "prompt", "allows 8"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "temperature": "1"}, "temperature", "valid number"),
        ({"prompt": "a", "n": True}, "n", "valid integer"),
        ({"prompt": "a", "n": 0}, "n", "at least 1"),
        ({"prompt": "a", "n": 100_000}, "n", "at most 128"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
        ({"prompt": "a", "max_tokens": 301}, "max_tokens", "allows 300"),
        ({"prompt": "a", "min_tokens": 301}, "min_tokens", "min_tokens is 301; this server allows 300"),
        ({"prompt": "a", "max_tokens": 511}, "max_tokens", "maximum context length"),
        ({"prompt": "a", "best_of": 3, "stream": True}, "best_of", "stream = false"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "stream = true"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options", "unknown field"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"prompt": "a", "stop": [""]}, "stop", "non-empty"),
        ({"prompt": "a", "tempurature": 1}, "tempurature", "did you mean temperature"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search", "beam search"),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "both constrain"),
        ({"prompt": "a", "structured_outputs": {}}, "structured_outputs", "nothing"),
        ({"prompt": "a", "structured_outputs": {"rege": "a"}}, "structured_outputs", "did you mean regex"),
        ({"prompt": "a", "sla": {"first_token_seconds": 0}}, "sla", "time above 0"),
    ],
)
def test_a_completion_with_an_invalid_field(client: TestClient, body: Any, parameter: str, part: str) -> None:
    if part is None:
        assert client.post(TEXT, json=body).status_code == 200
        return
    error = refused(client, TEXT, body)
    assert part in error["message"] and error["param"] == parameter, error


@pytest.mark.parametrize(
    ("fields", "parameter", "part"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "None"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages.0.content.0.type",
            "text only",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages.0.tool_calls.0.function.arguments",
            "not JSON",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "needs tool_call_id"),
        ({"tools": [{"type": "web"}]}, "tools.0", "not a function"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name", "once"),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice", "required"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "function of the field tools",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": {}}}},
            "tool_choice",
            "function of the field tools",
        ),
        ({"tools": [WEATHER], "guided_regex": "a"}, "guided_regex", "cannot be used with tool calls"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema is missing"),
        *(
            ({"response_format": form}, "response_format", f"unknown field 'response_format.{name}'")
            for form, name in (
                ({"type": "json_object", "schema": {"type": "object"}}, "schema"),
                ({"type": "text", "json_schema": {}}, "json_schema"),
                ({"type": "json_schema", "json_schema": {"schema": {}}, "strict": True}, "strict"),
                ({"type": "json_schema", "json_schema": {"schema": {}, "streng": True}}, "json_schema.streng"),
            )
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "both"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs = true"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs", "0 to 64"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "0 to 64"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream = false"),
        ({"stop": 5}, "stop", "valid"),
        ({"min_tokens": 301}, "min_tokens", "allows 300"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "send one"),
        ({"functions": []}, "functions", "use tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "chat_template_kwargs"),
        ({"thinking": {"type": "disabled"}}, "thinking", "chat_template_kwargs"),
        ({"stream_options": {"usage": True}, "stream": True}, "stream_options", "'stream_options.usage'"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "use grammar"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        ({"store": True}, "store", "write false"),
        ({"modalities": ["text", "audio"]}, "modalities", "text only"),
        ({"chat_template": "x"}, "chat_template", "--chat-template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "are both true"),
        ({"echo": True}, "echo", "not supported"),
    ],
)
def test_a_chat_with_an_invalid_field(client: TestClient, fields: Any, parameter: str, part: str) -> None:
    error = refused(client, CHAT, {**HELLO, **fields})
    assert part in error["message"] and error["param"] == parameter, error


def test_harmless_fields_and_null_are_accepted(client: TestClient) -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"]}
    empty = {"functions": None, "audio": None, "temperature": None, "reasoning_effort": None, "tools": None}
    echoed = {"role": "assistant", "content": "hi", "refusal": None, "audio": None, "tool_calls": None}
    body = {"messages": [*HELLO["messages"], echoed, *HELLO["messages"]], **harmless, **empty}
    assert client.post(CHAT, json=body).status_code == 200
    usage = {"include_usage": None, "continuous_usage_stats": None, "include_obfuscation": False}
    options = {"stream_options": usage, "length_penalty": 1.0, "include_reasoning": True, "tool_choice": "auto"}
    options |= {"guided_decoding_backend": "guidance", "tools": [], "vllm_xargs": None}
    answer = client.post(CHAT, json={**body, **options, "stream": True})
    assert answer.status_code == 200
    assert '"usage"' not in answer.text


def test_other_bad_requests(client: TestClient) -> None:
    assert refused(client, TEXT, {"prompt": "a", "model": "x"}, 404)["code"] == "model_not_found"
    assert refused(client, "/v1/nothing", {}, 404)["code"] == "unknown_path"
    answer = client.get(TEXT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    answer = client.post(TEXT, content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_content_type"
    kind = {"content-type": "application/json"}
    compressed = client.post(TEXT, content=b"\x1f\x8b", headers={"content-encoding": "gzip", **kind})
    assert compressed.status_code == 415 and "without compression" in compressed.json()["error"]["message"]
    assert client.post(TEXT, content=b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}', headers=kind).status_code == 200
    error = refused(client, "/v1/embeddings", {"input": "a", "dimensions": 3})
    assert error["param"] == "dimensions"
    assert refused(client, "/v1/embeddings", {"input": "a" * 600})["code"] == "context_length_exceeded"
    assert refused(client, "/detokenize", {"tokens": [1, -5]})["param"] == "tokens"


@pytest.mark.parametrize(
    "model", [ChatRequest, CompletionRequest, ResponsesRequest, DetokenizeRequest, StructuredOutputsField]
)
def test_many_wrong_elements_are_one_error(model: type[RequestModel]) -> None:
    for name in model.model_fields:
        for value in ([object()] * 99, {str(number): object() for number in range(99)}):
            errors: list[Any] = []
            try:
                model.model_validate({name: value})
            except pydantic.ValidationError as error:
                errors = [one for one in error.errors(include_url=False) if one["loc"][0] == name]
                # `parse` refuses the first unknown field itself
                errors = [one for one in errors if one["type"] != "extra_forbidden"]
            assert len(errors) <= 3, name  # one for each member of the field's union


def test_a_chat_without_a_template() -> None:
    client = client_of(FakeEngine(tokenizer=CharacterTokenizer(chat_template=None)))
    assert refused(client, CHAT, HELLO)["code"] == "no_chat_template"
    client = client_of(FakeEngine(tokenizer=CharacterTokenizer(chat_template=None)), chat_template="fixed")
    answer = client.post(CHAT, json={**HELLO, "max_tokens": 5}).json()
    assert answer["choices"][0]["message"]["content"] == "fixed"


def test_a_schema_that_the_template_cannot_read_is_an_error_of_the_request() -> None:
    template = "{% for tool in tools %}{{ tool.function.parameters.properties | dictsort }}{% endfor %}"
    client = client_of(FakeEngine(tokenizer=CharacterTokenizer(chat_template=template)))
    function = {"name": "f", "parameters": {"type": "object", "properties": ["city"]}}
    error = refused(client, CHAT, {**HELLO, "tools": [{"type": "function", "function": function}]})
    assert "the chat template refuses the messages" in error["message"]


def test_an_unexpected_error_shows_an_id_and_no_cause(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()

    async def embed(prompts: list[list[int]]) -> list[list[float]]:
        raise ZeroDivisionError("a secret path")

    engine.embed = embed  # type: ignore[method-assign]
    answer = client_of(engine).post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "my-id"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "my-id"
    assert "my-id" in answer.json()["error"]["message"] and "secret" not in answer.text


def test_an_error_in_mid_stream_is_the_last_event() -> None:
    engine = FakeEngine()
    client = client_of(engine)
    original = engine._state

    def fail_later(*arguments: Any) -> Any:
        if arguments[3] == 3:
            raise ZeroDivisionError("secret")
        return original(*arguments)

    engine._state = fail_later  # type: ignore[method-assign]
    text = client.post(TEXT, json={"prompt": "abc", "stream": True}).text
    events = [part.removeprefix("data: ") for part in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["error"]["type"] == "internal_server_error"
    assert "secret" not in text and len(events) == 4
    assert client.post(TEXT, json={"prompt": "abc", "max_tokens": 2}).status_code == 200


def test_a_full_queue_is_429_with_retry_after() -> None:
    engine = FakeEngine(max_running=0)
    client = client_of(engine)
    for stream in (False, True):
        answer = client.post(TEXT, json={"prompt": "a", "stream": stream})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"

    async def embed(prompts: list[list[int]]) -> list[list[float]]:
        raise EngineOverloadedError("the queue is full", retry_after=3)

    engine.embed = embed  # type: ignore[method-assign]
    answer = client.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
    assert 'vllm:admission_rejections_total{engine="0",model_name="m"} 3.0' in client.get("/metrics").text


def test_a_request_that_waited_too_long_is_429_with_retry_after() -> None:
    engine = FakeEngine()
    original = engine._state

    def refuse(*arguments: Any) -> Any:
        state = original(*arguments)
        state.finished, state.error, state.is_request_error, state.retry_after = True, "it waited", True, 30
        return state

    engine._state = refuse  # type: ignore[method-assign]
    client = client_of(engine)
    for stream in (False, True):
        answer = client.post(TEXT, json={"prompt": "a", "stream": stream})
        assert answer.status_code == 429 and answer.headers["retry-after"] == "30"


def test_more_prompts_than_the_queue_holds_are_400() -> None:
    """The status is 400 and not 429, since the same request would be refused again."""
    engine = FakeEngine()
    engine.max_queued = 2
    assert "allows 2" in refused(client_of(engine), TEXT, {"prompt": ["a"] * 3})["message"]
    assert client_of(engine).post(TEXT, json={"prompt": ["a"] * 2}).status_code == 200


def test_a_server_that_is_not_ready_is_503() -> None:
    client = client_of(None)
    assert client.get("/health").status_code == 200
    for answer in (client.get("/ready"), client.post(TEXT, json={"prompt": "a"}), client.get("/v1/models")):
        assert (
            answer.status_code == 503 and answer.headers["retry-after"] and answer.json()["error"]["code"] == "loading"
        )


def test_keys_guard_everything_but_the_status(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\none\n\n  two  \n")
    client = client_of(FakeEngine(), api_keys=ApiKeys.from_file(path))
    for path_name in ("/health", "/ready", "/version", "/metrics", "/"):
        assert client.get(path_name).status_code == 200
    for headers in (
        {},
        {"authorization": "Bearer three"},
        {"authorization": "Basic one"},
        {"authorization": "Bearer "},
    ):
        answer = client.get("/v1/models", headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert client.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 401
    for key in ("one", "two"):
        assert client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_keys_are_compared_as_the_bytes_that_were_sent(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_bytes("\N{BOM}erster\nschlüsselà\n".encode())  # the last byte of à is a space in Latin-1
    client = client_of(FakeEngine(), api_keys=ApiKeys.from_file(path))
    for key in ("erster", "schlüsselà", " schlüsselà "):
        assert client.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()}).status_code == 200, key
    for key in ("schlüssel", "schlüsselà".encode().decode("latin-1")):
        assert client.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()}).status_code == 401, key


def test_a_chat_beyond_the_window_names_its_messages(client: TestClient) -> None:
    error = refused(client, CHAT, {"messages": [{"role": "user", "content": "a" * 600}]})
    assert error["param"] == "messages" and error["code"] == "context_length_exceeded"


def test_a_text_without_tokens_is_an_error_of_the_request() -> None:
    """A slow tokenizer without an unknown token gives None for a part that it has no token for."""

    class WithoutX(CharacterTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[Any]:
            return [None if token == ord("x") else token for token in super().encode(text, add_special_tokens)]

    client = client_of(FakeEngine(tokenizer=WithoutX()))
    for path, body in (
        ("/v1/completions", {"prompt": "axe"}),
        ("/v1/embeddings", {"input": ["axe"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "axe"}]}),
        ("/tokenize", {"prompt": "axe"}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert "has no token for a part of the text, and no unk_token" in answer.json()["error"]["message"]


def test_a_text_that_cannot_fit_is_refused_without_its_tokens() -> None:
    engine = FakeEngine()
    engine.tokenizer = tokenizer = make_byte_tokenizer()
    client = client_of(engine)
    tokenizer.encode = None  # a call of the tokenizer raises
    text = "a" * 10_000
    chat = {"messages": [{"role": "user", "content": text}]}
    for path, body, field in (
        (TEXT, {"prompt": [text]}, "prompt"),
        (CHAT, chat, "messages"),
        ("/v1/responses", {"input": text}, "input"),
        ("/v1/embeddings", {"input": text}, "input"),
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", chat, "messages"),
    ):
        error = refused(client, path, body)
        assert (error["param"], error["code"]) == (field, "context_length_exceeded"), path
        assert "at least" in error["message"]


def test_long_lists_are_checked_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    client, plain, threads = client_of(FakeEngine()), CompletionRequest.sampling_params, []

    def note(fields: CompletionRequest, **values: Any) -> Any:
        threads.append(threading.current_thread())
        return plain(fields, **values)

    async def parsed(request: Any, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return await read_request(request, *arguments)

    monkeypatch.setattr(completions_endpoint, "read_request", parsed)
    monkeypatch.setattr(CompletionRequest, "sampling_params", note)
    for biases, apart in ((10, False), (40_000, True)):
        body = {"prompt": [[5], [6]], "logit_bias": {str(token): 1.0 for token in range(biases)}}
        assert client.post(TEXT, json=body).status_code == 200
        assert (threads[0] is not threads[1]) == apart
        threads.clear()
    body = {"prompt": [[5]] * 30, "allowed_token_ids": [*range(70_000)]}
    assert refused(client, TEXT, body)["param"] == "allowed_token_ids"
    wrong = {"prompt": [5], "allowed_token_ids": [*range(70_000), -1]}
    assert "allowed_token_ids is -1" in refused(client, TEXT, wrong)["message"]


def test_pages_of_other_origins_are_refused_unless_allowed() -> None:
    preflight = {
        "origin": "https://example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang,x-stainless-retry-count",
    }
    assert client_of(FakeEngine()).options(TEXT, headers=preflight).status_code == 405
    client = client_of(FakeEngine(), allowed_origins=("https://example.org",))
    answer = client.options(TEXT, headers=preflight)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://example.org"
    assert answer.headers["access-control-allow-headers"] == preflight["access-control-request-headers"]
    answer = client.post(TEXT, json={"prompt": "a"}, headers={"origin": "https://example.org"})
    assert answer.headers["access-control-allow-origin"] == "https://example.org"
    assert answer.headers["x-request-id"] and "X-Request-Id" in answer.headers["access-control-expose-headers"]
    answer = client.options(TEXT, headers={**preflight, "origin": "https://other.org", "x-request-id": "my-id"})
    assert answer.status_code == 400 and answer.headers["x-request-id"] == "my-id"
    assert "Disallowed CORS origin" in answer.json()["error"]["message"]
    assert answer.headers["vary"].startswith("Origin")
    assert "access-control-allow-origin" not in answer.headers


def test_parameters_that_exclude_all_tokens_are_an_error_of_the_request() -> None:
    engine = FakeEngine()
    original = engine._state

    def fail(*arguments: Any) -> Any:
        return dataclasses.replace(original(*arguments), error="no token can be generated", is_request_error=True)

    engine._state = fail  # type: ignore[method-assign]
    error = refused(client_of(engine), TEXT, {"prompt": "a"})
    assert "no token can be generated" in error["message"] and error["type"] == "invalid_request_error"


def test_a_surrogate_inside_the_arguments_of_a_call_is_refused() -> None:
    class Strict(CharacterTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            text.encode()  # raises for a lone surrogate, as the tokenizers of Hugging Face do
            return super().encode(text, add_special_tokens)

    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "\\ud800"}'}}
    messages = [*HELLO["messages"], {"role": "assistant", "tool_calls": [call]}]
    error = refused(client_of(FakeEngine(tokenizer=Strict())), CHAT, {"messages": messages, "tools": [WEATHER]})
    assert "not valid Unicode" in error["message"]


def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that sends its head byte by byte is closed too; one with an answer in progress stays open."""
    monkeypatch.setattr("windlass.serving.http_protocol.HEAD_SECONDS", 0.2)
    engine = FakeEngine(answer="abcdefgh", step_seconds=0.2)
    with server_on_thread(engine) as address, contextlib.ExitStack() as opened:
        port = int(address.rpartition(":")[2])
        silent, slow, used, busy = (
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=240)) for _ in range(4)
        )
        body = json.dumps({"prompt": "a"}).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        busy.sendall(head.encode() + body)
        used.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert used.recv(9) == b"HTTP/1.1 "
        used.sendall(b"GET /he")  # the next request begins, which ends uvicorn's own timeout
        slow.sendall(b"GET /health HTTP/1.1\r\nX: ")
        with contextlib.suppress(OSError):
            while not select.select([slow], [], [], 0.05)[0]:
                slow.sendall(b"a")
        for connection in (silent, slow, used):
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
        answer = b""
        while b'"finish_reason"' not in answer:
            piece = busy.recv(4096)
            assert piece, answer
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_head_after_a_long_answer_has_its_own_time() -> None:
    """The answer ends, and the next head begins, just before the connection is checked."""
    checks: list[Callable[[], None]] = []
    loop = SimpleNamespace(call_later=lambda seconds, check: checks.append(check))
    app = client_of(FakeEngine()).app
    config = uvicorn.Config(app, http=TimedHttpProtocol, ws="none", lifespan="off", log_config=None)
    protocol = TimedHttpProtocol(config, ServerState(), {}, _loop=loop)
    protocol.connection_made(Mock(is_closing=lambda: False))
    protocol.cycle = cycle = SimpleNamespace(response_complete=False)  # type: ignore[assignment]
    checks.pop()()
    checks.pop()()
    cycle.response_complete = True
    protocol.data_received(b"GET /health HTTP/1.1\r\nX: ")
    checks.pop()()
    assert not protocol.transport.close.called
    checks.pop()()
    assert protocol.transport.close.called and not checks


def test_a_huge_head_is_refused_and_the_server_goes_on() -> None:
    with server_on_thread(FakeEngine(answer="ab")) as address:
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        with socket.create_connection(place, timeout=240) as connection:
            answer = b""
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /health HTTP/1.1\r\n")
                for _ in range(1000):
                    connection.sendall(b"X: " + b"a" * 8000 + b"\r\n")
                raise AssertionError("eight megabytes of headers were read")
            with contextlib.suppress(OSError):
                while piece := connection.recv(65536):
                    answer += piece
        assert not answer or answer.startswith(b"HTTP/1.1 431 ")  # a reset may overtake the answer
        body = json.dumps({"prompt": "a" * 300}).encode()
        with socket.create_connection(place, timeout=240) as connection:
            for number in range(3):  # the limit holds for each head alone
                head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nX: {'a' * 60_000}\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                answer = b""
                while b'"finish_reason"' not in answer:
                    answer += connection.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200 "), number


def test_a_request_that_is_not_parsed_gets_an_error_of_the_usual_form() -> None:
    head, rest = b"GET /health HTTP/1.1\r\nX-Request-Id: my-id\r\nHost: a\r\n", b"X: "
    huge = head + rest + b"a" * (2**17 + 1 - len(head + rest))
    before = b"GET /health HTTP/1.1\r\nHost: a\r\nX-Request-Id: earlier\r\n\r\n"
    with server_on_thread(FakeEngine()) as address:
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        for sent, status, request_id in (
            (b"\x00 nonsense\r\n\r\n", 400, None),
            (head + b"no header\r\n\r\n", 400, "my-id"),
            (huge, 431, "my-id"),
        ):
            with socket.create_connection(place, timeout=240) as connection:
                connection.sendall(before)
                response = http.client.HTTPResponse(connection)
                response.begin()
                assert response.status == 200 and response.read()
                connection.sendall(sent)
                response = http.client.HTTPResponse(connection)
                response.begin()
                assert response.status == status
                error = json.loads(response.read())["error"]
                assert set(error) == {"message", "type", "param", "code"}
                found = response.headers["x-request-id"]
                assert found == request_id if request_id else found not in (None, "earlier")
                assert connection.recv(1) == b""


def test_a_body_that_is_not_read_is_not_taken_for_a_head() -> None:
    """A request without an API key is answered before its body has arrived."""
    body = b"a" * 2**18
    with server_on_thread(FakeEngine(), api_keys=ApiKeys(["key"])) as address:
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        with socket.create_connection(place, timeout=240) as connection:
            connection.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            for request, status in ((b"", 401), (body + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", 200)):
                connection.sendall(request)
                response = http.client.HTTPResponse(connection)
                response.begin()
                assert response.status == status and response.read()


@pytest.mark.parametrize("rest", [b"GET / HTTP/1.1\r\nX: " + b"a" * 2**20, b"\x00 nonsense\r\n\r\n"])
def test_a_bad_request_behind_an_answer_in_progress_closes_the_connection(rest: bytes) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    engine = FakeEngine(step_seconds=0.02)
    with server_on_thread(engine) as address:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=240) as connection:
            connection.sendall(head.encode() + body)
            answer = connection.recv(2**16)
            with contextlib.suppress(OSError):
                connection.sendall(rest)
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(2**16):
                    answer += piece
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1") == 1
    assert engine.tokens["generated"] < 500 and not engine.running


def test_a_request_that_asks_for_another_protocol_keeps_its_body() -> None:
    """Java's HttpClient asks for HTTP/2 in each first request, and sends the body with it."""
    body = b'{"prompt": "ab", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    length, plain = b"Content-Length: %d\r\n\r\n" % len(body), b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    last = plain.replace(b"\r\n\r\n", b"\r\n" + upgrade.replace(b"Upgrade,", b"Upgrade, close,", 1) + b"\r\n")
    with server_on_thread(FakeEngine()) as address:
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        with socket.create_connection(place, timeout=240) as connection:
            connection.sendall(head + upgrade + length + body + plain + head + upgrade + chunks + last)
            found = b""
            while piece := connection.recv(65536):
                found += piece
        assert found.count(b"HTTP/1.1 200 OK") == 4, found
        assert found.count(b"text_completion") == 2
