"""Fuzz tests of requests to the server: bodies, single fields, raw HTTP, and the responses of replicas.

Law: a request gets an answer or an error in OpenAI's form, never 500; every stream ends with `[DONE]`; the server
answers the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.fuzz.mutations import SEED, time_limit
from tests.fuzz.texts import ODD, examples, mutants, outcome, replace_somewhere
from tests.serving.fake_engine import FakeEngine
from tests.serving.harness import client_of, events_of, server_on_thread
from windlass.serving.replicas.replica_client import ReplicaConnectionError, ReplicaResponse

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d\\ude00", "city": "b"}'}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "hi \U0001f600"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "max_tokens": 6,
    "temperature": 0.5,
    "stop": ["a", "b"],
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "logit_bias": {"5": 1.5},
    "chat_template_kwargs": {"a": 1},
}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
BODIES: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        CHAT,
        {**CHAT, "stream": False, "stream_options": None},
        {**CHAT, "tool_choice": "required"},
    ]
    + [{"messages": [{"role": "user", "content": "a"}], "response_format": FORM, "max_tokens": 3}],
    "/v1/completions": [
        {"prompt": ["ab", "c"], "n": 2, "max_tokens": 3, "stream": True, "echo": True, "logprobs": 1, "priority": 1},
        {"prompt": [[65, 66], [67]], "max_tokens": 3, "best_of": 2, "sla": {"first_token_seconds": 1.0}, "min_p": 0.1},
        {"prompt": "abc", "max_tokens": 0, "echo": True, "prompt_logprobs": 2, "bad_words": ["x"]},
        {"prompt": "abc", "structured_outputs": {"json": {"type": "object"}}, "ignore_eos": True},
    ],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64"}, {"input": [1, 2]}],
    "/tokenize": [{"prompt": "abc", "return_token_strs": True}, {"messages": [{"role": "user", "content": "a"}]}],
    "/detokenize": [{"tokens": [65, 66, 67]}],
}


def ask(client: TestClient, path: str, data: bytes) -> None:
    with time_limit(what=repr(data)[:200]):
        answer = client.post(path, content=data, headers={"content-type": "application/json"})
    note = (path, data[:2000], answer.text[:500])
    assert answer.status_code in (200, 400, 404, 413), note
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 2000, note
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert all("error" not in event for event in events_of(answer.text)), note
    else:
        answer.json()


@pytest.fixture(scope="module")
def client() -> TestClient:
    return client_of(FakeEngine(max_model_len=4096), max_body_bytes=200_000)


@pytest.mark.parametrize("path", BODIES)
def test_mutations_of_a_body(client: TestClient, path: str) -> None:
    seeds = [json.dumps(body).encode() for body in BODIES[path]]
    seeds += [json.dumps(BODIES[path][0], ensure_ascii=False, indent=1).encode()]
    for data in mutants(seeds, 40):
        ask(client, path, data)


@pytest.mark.parametrize("path", BODIES)
def test_random_fields_with_odd_values(client: TestClient, path: str) -> None:
    """Put odd values at random places of a body, also deep inside. `max_model_len` keeps the answers short."""
    draw = random.Random(SEED)
    for _ in range(examples(100, 100)):
        body = json.loads(json.dumps(draw.choice(BODIES[path])))
        replace_somewhere(body, draw)
        ask(client, path, json.dumps(body).encode())


def test_mutations_of_a_raw_request() -> None:
    body = json.dumps({"prompt": "ab", "max_tokens": 2}).encode()
    line = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:]))
    seeds = [
        line + b"Content-Length: %d\r\n\r\n" % len(body) + body,
        line + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
        b"GET /v1/models/a%20b?c=d HTTP/1.1\r\nHost: a\r\nX-Request-Id: 1\r\nConnection: close\r\n\r\n",
        b"HEAD /health HTTP/1.0\r\n\r\n",
    ]
    with server_on_thread(FakeEngine()) as address:
        place = ("127.0.0.1", int(address.rpartition(":")[2]))
        for data in mutants(seeds, 40):
            with socket.create_connection(place, timeout=60) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)  # the server ends the connection then, whatever it waits for
                answer = b""
                while piece := connection.recv(65536):
                    answer += piece
                assert b"HTTP/1.1 500" not in answer, (data, answer)
        with socket.create_connection(place, timeout=60) as connection:
            connection.sendall(seeds[0])
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200 ") and b'"finish_reason"' in answer


def test_mutations_of_the_stream_of_a_replica() -> None:
    seed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (b"data: {}\n\n", b"data: [DONE]\n\n"))

    async def read(data: bytes, headers: dict[str, str]) -> bytes | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        try:
            return await ReplicaResponse(200, headers, reader).read()
        except ReplicaConnectionError:
            return None

    def outcome_of(data: bytes, headers: dict[str, str]) -> Any:
        return outcome(lambda: asyncio.run(read(data, headers)))

    for data in mutants([seed + b"0\r\n\r\n"], 400):
        found = outcome_of(data, {"transfer-encoding": "chunked"})
        assert found is None or len(found) <= len(data)
    for length in (*ODD, b"5", b"-5"):
        outcome_of(b"abc", {"content-length": length.decode("latin-1")})
