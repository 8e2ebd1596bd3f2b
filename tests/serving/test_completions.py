"""Tests of completions and chats: forms of prompts, fields beyond OpenAI's, usage, and metrics."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.fake_engine import CharacterTokenizer, FakeEngine
from tests.serving.harness import client_of, events_of
from windlass.inference.outputs import Logprob, RequestOutput
from windlass.inference.sampling_params import SamplingParams
from windlass.serving import api_errors, event_stream, long_answer
from windlass.serving.api_errors import encode_json
from windlass.serving.event_stream import encode_event
from windlass.serving.generation import Generation
from windlass.serving.logprob_format import LogprobFormat
from windlass.serving.server_context import ServerContext
from windlass.serving.server_metrics import ServerMetrics

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [[1, 97, 98]]),
        (["a", "b"], [[1, 97], [1, 98]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", [7]], [[1, 97], [7]]),
    ],
)
def test_each_form_of_a_prompt_reaches_the_engine(prompt: object, prompts: list[list[int]]) -> None:
    engine = FakeEngine()
    answer = client_of(engine).post(TEXT, json={"prompt": prompt, "max_tokens": 1}).json()
    assert [seen[0] for seen in engine.seen] == prompts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(prompts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_every_sampling_field_reaches_the_engine() -> None:
    engine = FakeEngine()
    fields = {
        **{"n": 2, "best_of": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 1},
        **{"stop": ["x", "y"], "stop_token_ids": [3], "ignore_eos": True, "include_stop_str_in_output": True},
        **{"skip_special_tokens": False, "allowed_token_ids": [1, 2], "bad_words": ["z"], "max_tokens": 9},
        **{"logprobs": 2, "prompt_logprobs": 1, "truncate_prompt_tokens": 5},
    }
    body = {"prompt": "a", **fields, "logit_bias": {"5": -1.5}, "priority": 4}
    assert client_of(engine).post(TEXT, json=body).status_code == 200
    _, params, _, priority = engine.seen[0]
    assert params == SamplingParams(**{**fields, "logit_bias": {5: -1.5}}) and priority == 4


def test_prompts_share_the_tokens_of_bad_words() -> None:
    engine = FakeEngine()
    body = {"prompt": ["a", "b", "c"], "bad_words": ["xy", "z"]}
    assert client_of(engine).post(TEXT, json=body).status_code == 200
    first, *others = engine.bad_words
    assert first == ((ord("x"), ord("y")), (ord("z"),))
    assert len(others) == 2 and all(one is first for one in others)


def test_the_default_length_is_16_tokens_of_a_completion_and_the_window_of_a_chat() -> None:
    engine = FakeEngine(max_model_len=100)
    client = client_of(engine, max_output_tokens=80)
    client.post(TEXT, json={"prompt": "a"})
    client.post(TEXT, json={"prompt": "a" * 90})
    client.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]})
    client.post(CHAT, json={"messages": [{"role": "user", "content": "a" * 50}]})
    lengths = [params.max_tokens for _, params, *_ in engine.seen]
    assert lengths == [16, 9, 80, 100 - len("<user><assistant>") - 50]
    assert client_of(engine, max_output_tokens=8).post(TEXT, json={"prompt": "a"}).status_code == 200
    assert engine.seen[-1][1].max_tokens == 8


def test_the_end_of_a_prompt_is_kept_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerContext, "least_tokens", lambda self, text: len(text))
    engine = FakeEngine(max_model_len=40)
    client = client_of(engine)
    cases = [
        (TEXT, {"prompt": "abcdef", "truncate_prompt_tokens": 3}, "def", 16),
        (TEXT, {"prompt": ["abcdef", "xyz"], "truncate_prompt_tokens": 3, "max_tokens": 2}, "xyz", 2),
        (TEXT, {"prompt": "a" * 90 + "z", "truncate_prompt_tokens": -1}, "a" * 23 + "z", 16),
        (TEXT, {"prompt": "a" * 90 + "z", "truncate_prompt_tokens": 38}, "a" * 37 + "z", 2),
        (TEXT, {"prompt": "a" * 90 + "z", "truncate_prompt_tokens": -1, "max_tokens": 4}, "a" * 35 + "z", 4),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a" * 90}], "truncate_prompt_tokens": 13},
            "aa<assistant>",
            27,
        ),
    ]
    for url, body, text, most in cases:
        answer = client.post(url, json=body)
        assert answer.status_code == 200, answer.text
        assert ("".join(map(chr, engine.seen[-1][0])), engine.seen[-1][1].max_tokens) == (text, most)
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 3, "max_tokens": 1, "echo": True}
    answer = client.post(TEXT, json=body).json()
    assert answer["choices"][0]["text"].startswith("def") and answer["usage"]["prompt_tokens"] == 3
    assert (
        len(client.post("/v1/embeddings", json={"input": "a" * 90, "truncate_prompt_tokens": -1}).json()["data"]) == 1
    )
    for wrong in (0, -2):
        for url, body in ((TEXT, {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
            refused = client.post(url, json={**body, "truncate_prompt_tokens": wrong})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "truncate_prompt_tokens"
    endless = client.post(TEXT, json={"prompt": "a" * 40 * 17, "truncate_prompt_tokens": 3})
    assert endless.json()["error"]["code"] == "context_length_exceeded"


def test_one_constraint_in_its_older_and_its_newer_form_is_one() -> None:
    engine = FakeEngine()
    both = {"guided_json": {"type": "object"}, "guided_whitespace_pattern": " ?"}
    newer = {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": " ?"}}
    for fields in (both, newer, {**both, **newer}):
        assert client_of(engine).post(TEXT, json={"prompt": "a", "max_tokens": 1, **fields}).status_code == 200
    structures = [params.structured_outputs for _, params, *_ in engine.seen]
    assert structures[0] == structures[1] == structures[2] and structures[0].whitespace_pattern == " ?"


def test_a_template_that_reads_parts_gets_parts() -> None:
    loop = "{% for m in messages %}{% for part in m.content %}{{ part.text }};{% endfor %}{% endfor %}"
    engine = FakeEngine(tokenizer=CharacterTokenizer(chat_template=loop))
    parts = [{"type": "text", "text": "c"}, {"type": "refusal", "refusal": "d"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert client_of(engine).post(CHAT, json={"messages": messages}).status_code == 200
    assert engine.tokenizer.decode(engine.seen[0][0]) == "ab;c;d;"
    engine.tokenizer.chat_template = (
        "{% for m in messages if m.tool_calls %}{{ '<' + m.tool_calls[0].function.arguments }}{% endfor %}"
    )
    assert client_of(engine).post(CHAT, json={"messages": messages}).status_code == 200
    assert engine.tokenizer.decode(engine.seen[1][0]) == "<{}"
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    assert client_of(engine).post(CHAT, json={"messages": messages}).status_code == 200
    assert engine.tokenizer.decode(engine.seen[2][0]) == "ab;c\nd;;"


def _events_of_each_choice(stream: str) -> dict[str, list[str]]:
    """Events in their order within a choice: choices are written as their outputs arrive."""
    events: dict[str, list[str]] = {}
    for event in stream.split("\n\n"):
        index = re.search(r'"choices":\[{"index":([0-9]+)', event)
        events.setdefault(index[1] if index else "", []).append(event)
    return events


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "PROMPT", "echo": True, "logprobs": 2, "max_tokens": 0}),
        (TEXT, {"prompt": "PROMPT", "echo": True, "logprobs": 2, "max_tokens": 1, "n": 2, "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "PROMPT"}], "prompt_logprobs": 2, "max_tokens": 1}),
    ],
)
def test_many_logprobs_are_formatted_beside_the_event_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON encoder in C would hold the interpreter lock, so a long answer is encoded in Python."""
    encoded: list[tuple[bool, bool]] = []

    def note(encoder: json.JSONEncoder, data: Any, is_long: bool = False) -> str:
        runs_loop = True
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            runs_loop = False
        if data["choices"]:
            encoded.append((runs_loop, is_long))
        return encode_json(encoder, data, is_long)

    monkeypatch.setattr(api_errors, "encode_json", note)
    monkeypatch.setattr(event_stream, "encode_json", note)
    client, answers = client_of(FakeEngine(max_model_len=5000)), []
    for length, most in ((2000, 2**11), (2000, 2**20), (20, 2**11)):
        encoded.clear()
        monkeypatch.setattr(long_answer, "_MAX_ENTRIES", most)
        prompt = "abcd" * (length // 4)
        sent = json.loads(json.dumps(body).replace("PROMPT", prompt))
        answer = client.post(path, json={**sent, "request_id": "same"})
        assert answer.status_code == 200
        is_long = length * 3 > most
        assert encoded == [(not is_long, is_long)] * (2 if "n" in body else 1)
        answers.append(_events_of_each_choice(re.sub(r'"created":[0-9]+', "", answer.text)))
    assert answers[0] == answers[1]


class _CoalescingEngine(FakeEngine):
    """Engine as a client that reads slowly sees it: an output has ten tokens more than the one before."""

    async def stream(self, *args: Any, **named: Any) -> AsyncIterator[RequestOutput]:
        async for output in super().stream(*args, **named):
            if output.finished or len(output.outputs[0].token_ids) % 10 == 1:
                yield output


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": ["abc", "d"], "echo": True, "logprobs": 2, "max_tokens": 25}),
        (CHAT, {"messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 2, "n": 2}),
        ("/v1/responses", {"input": "abc", "top_logprobs": 2, "max_output_tokens": 25}),
    ],
)
def test_events_for_a_slow_reader_are_formatted_beside_the_event_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event has all tokens since the last one, and so as many log-probabilities as a whole answer."""
    found: list[tuple[int, bool, bool]] = []

    def note(encoder: json.JSONEncoder, data: Any, is_long: bool = False) -> str:
        text = encode_json(encoder, data, is_long)
        tokens = text.count("-1.0") // 2  # each token is shown as drawn, and among the likeliest
        found.append((tokens, is_long, threading.current_thread().name.startswith("long-answers")))
        return text

    monkeypatch.setattr(event_stream, "encode_json", note)
    client, answers = client_of(_CoalescingEngine()), []
    for most in (20, 2**20):
        found.clear()
        monkeypatch.setattr(long_answer, "_MAX_ENTRIES", most)
        limit = {"max_tokens": 25} if path == CHAT else {}
        answer = client.post(path, json={**body, **limit, "stream": True, "request_id": "same"})
        assert answer.status_code == 200
        assert all(is_long is beside for _, is_long, beside in found)
        assert all(is_long for tokens, is_long, _ in found if 3 * tokens > most)
        assert any(is_long for _, is_long, _ in found) is (most == 20)
        assert not all(is_long for _, is_long, _ in found)
        text = re.sub(r'"created(_at)?":[0-9]+|msg_[0-9a-f]+', "", answer.text)
        answers.append(_events_of_each_choice(text))
    assert answers[0] == answers[1]


def test_echo_with_logprobs_alone_generates_nothing() -> None:
    """Evaluation harnesses send `max_tokens: 0`."""
    client = client_of(FakeEngine())
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = client.post(TEXT, json=body).json()
    choice = answer["choices"][0]
    assert choice["text"] == "abc" and choice["logprobs"]["tokens"] == ["", "a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert answer["usage"]["completion_tokens"] == 0
    event = events_of(client.post(TEXT, json={**body, "stream": True}).text)[0]["choices"][0]
    assert {**event, "finish_reason": "length"} == choice


def test_tokens_are_returned_with_those_of_the_prompt() -> None:
    client = client_of(FakeEngine())
    body = {"prompt": ["ab", "c"], "max_tokens": 3, "return_token_ids": True}
    choices = client.post(TEXT, json=body).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 97, 98], [1, 99]]
    assert [choice["token_ids"] for choice in choices] == [[97, 98, 97], [99, 99, 99]]
    streamed: list[dict[str, list[int]]] = [{}, {}]
    for event in events_of(client.post(TEXT, json={**body, "stream": True}).text):
        (choice,) = event["choices"]
        found = streamed[choice["index"]]
        found["tokens"] = found.get("tokens", []) + choice["token_ids"]
        if "prompt_token_ids" in choice:
            assert "prompt" not in found
            found["prompt"] = choice["prompt_token_ids"]
    assert streamed == [{"tokens": c["token_ids"], "prompt": c["prompt_token_ids"]} for c in choices]
    nothing = {**body, "echo": True, "max_tokens": 0}
    assert [choice["token_ids"] for choice in client.post(TEXT, json=nothing).json()["choices"]] == [[], []]


def test_a_chat_returns_the_tokens_of_text_that_is_held_back() -> None:
    """Text that may become a call is sent only at the end; its tokens are sent step by step."""
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "return_token_ids": True}
    client = client_of(FakeEngine(answer='{"name": "f", "parameters": {}} or not'))
    whole = client.post(CHAT, json=body).json()
    events = events_of(client.post(CHAT, json={**body, "stream": True}).text)
    tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"] and len(tokens) > 30
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"] and "prompt_token_ids" not in events[1]


def test_offsets_are_places_in_the_text_of_the_choice() -> None:
    """Token 1 of the prompt has no text, and `return_tokens_as_token_ids` changes only the tokens."""
    client = client_of(FakeEngine())
    for fields in ({}, {"return_tokens_as_token_ids": True}):
        body = {"prompt": "ab", "max_tokens": 3, "logprobs": 0, "echo": True, **fields}
        choice = client.post(TEXT, json=body).json()["choices"][0]
        assert choice["text"] == "ababa"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 4]
        events = events_of(client.post(TEXT, json={**body, "stream": True}).text)
        streamed = [place for event in events for place in event["choices"][0]["logprobs"]["text_offset"]]
        assert streamed == choice["logprobs"]["text_offset"]


def test_a_stop_text_ends_the_answer_and_is_named() -> None:
    client = client_of(FakeEngine(answer="one two three"))
    body = {"prompt": "a", "stop": [" t"], "max_tokens": 50}
    choice = client.post(TEXT, json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", " t")


def test_usage_counts_cached_tokens_and_can_come_with_every_event() -> None:
    client = client_of(FakeEngine())
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, prompt in ((TEXT, {"prompt": "ab"}), (CHAT, {"messages": [{"role": "user", "content": "ab"}]})):
        body = {**prompt, "stream": True, "max_tokens": 3, "stream_options": options}
        events = events_of(client.post(path, json=body).text)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[-1] == 3 and events[-1]["choices"] == []
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        plain = events_of(client.post(path, json={**body, "stream_options": {"include_usage": True}}).text)
        assert [event["usage"] for event in plain[:-1]] == [None] * (len(plain) - 1)
        assert plain[-1]["usage"] == events[-1]["usage"]


def test_events_are_ascii_so_that_no_character_ends_a_line() -> None:
    text = "a\u2028b\x85c\n\nd\re\U0001f600\ud800"
    event = encode_event({"text": text})
    assert event.isascii() and event.count(b"\n") == 2 and b"\r" not in event
    assert json.loads(event.removeprefix(b"data: "))["text"] == text


def test_lone_surrogates_in_an_answer_do_not_break_it() -> None:
    answer = client_of(FakeEngine(answer="a\ud800b")).post(TEXT, json={"prompt": "a"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "a?b"


def test_bytes_of_tokens_that_are_parts_of_a_character() -> None:
    class ByteLevel:
        def decode(self, tokens: list[int]) -> str:
            return "�"

        def convert_ids_to_tokens(self, token: int) -> str:
            return {1: "Ã", 2: "<0xA9>", 3: "☃"}[token]

    format_ = LogprobFormat(ByteLevel())
    entries = [format_._entry(token, -1.0, {}) for token in (1, 2, 3)]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"\xc3", b"\xa9", "�".encode()]


def test_of_tokens_with_one_text_the_likeliest_is_shown() -> None:
    row: dict[int, Logprob] = {
        number: Logprob(-float(number), number, "�" if number < 3 else "a") for number in (1, 2, 3)
    }
    shown = LogprobFormat(None).completion([2], [row], 3, [0])
    assert shown["top_logprobs"] == [{"token_id:1": -1.0, "token_id:2": -2.0, "token_id:3": -3.0}]
    shown = LogprobFormat(SimpleNamespace()).completion([2], [row], 3, [0])
    assert shown["top_logprobs"] == [{"�": -1.0, "a": -3.0}]
    assert shown["token_logprobs"] == [-2.0]


def test_the_text_of_tokens_and_back() -> None:
    client = client_of(FakeEngine())
    answer = client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [1, 104, 233], "token_strs": ["\x01", "h", "é"]}
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    chat = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    tokens = client.post("/tokenize", json=chat).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "<user>a"


def test_metrics_have_vllms_names_and_the_engines_counts() -> None:
    client = client_of(FakeEngine(step_seconds=0.001))
    client.post(TEXT, json={"prompt": "abc", "max_tokens": 5})
    client.post(TEXT, json={"prompt": "abc", "n": 0})
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    labels = '{engine="0",model_name="m"}'
    expected = {
        f"vllm:num_requests_running{labels}": 0,
        f"vllm:num_requests_waiting{labels}": 0,
        f"vllm:kv_cache_usage_perc{labels}": 0,
        f"vllm:prompt_tokens_total{labels}": 4,
        f"vllm:generation_tokens_total{labels}": 5,
        f"vllm:iteration_tokens_total_sum{labels}": 5,
        f"vllm:time_to_first_token_seconds_count{labels}": 1,
        f"vllm:e2e_request_latency_seconds_count{labels}": 1,
        f"vllm:inter_token_latency_seconds_count{labels}": 4,
        f"vllm:request_generation_tokens_sum{labels}": 5,
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}': 1,
        'windlass:http_requests_total{engine="0",path="/v1/completions",status="200"}': 1,
        'windlass:http_requests_total{engine="0",path="/v1/completions",status="400"}': 1,
    }
    assert {name: float(lines[name]) for name in expected} == expected


def test_times_between_tokens_are_those_of_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps: list[tuple[float, int]] = []
    monkeypatch.setattr(ServerMetrics, "observe_token_gap", lambda self, *gap: gaps.append(gap))
    client_of(FakeEngine()).post(TEXT, json={"prompt": "abc", "max_tokens": 3, "n": 4})
    assert len(gaps) == 2 * 4 and {tokens for _, tokens in gaps} == {1}


def test_a_request_that_ends_early_has_a_time_to_its_first_token() -> None:
    client = client_of(FakeEngine(gate="/nonexistent"))
    with pytest.raises(TimeoutError):
        asyncio.run(_cancelled_after_the_first_token(client))
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 1.0' in client.get("/metrics").text


async def _cancelled_after_the_first_token(client: Any) -> None:
    context = client.app.state.context
    generation = Generation(context, "r", "r", "m", [[97]], [SamplingParams(max_tokens=5)])
    await asyncio.wait_for(generation.finish(), 0.2)
