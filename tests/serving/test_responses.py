"""Tests of `/v1/responses` with OpenAI's own client, and of its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.serving.fake_engine import FakeEngine
from tests.serving.harness import client_of, server_on_thread
from windlass.serving.response_items import ResponseItems
from windlass.serving.tool_calls import OptionalCalls

if TYPE_CHECKING:  # the import takes seconds in each process that collects tests
    import openai

TOOLS: list[Any] = [
    {
        "type": "function", "name": name, "description": "", "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    for name in ("weather", "time")
]  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(lora_names=("adapter",))


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    import openai

    with (
        server_on_thread(engine) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def prompt_of(engine: FakeEngine) -> str:
    """Return the text of the last prompt that the engine received."""
    return engine.tokenizer.decode(engine.seen[-1][0])


def test_a_text_with_instructions(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.responses.create(
        model="m", input="hé", instructions="Be brief.", max_output_tokens=9, temperature=0.5, metadata={"a": "b"}
    )
    assert prompt_of(engine) == "<system>Be brief.<user>hé<assistant>"
    assert engine.seen[-1][1].temperature == 0.5
    assert answer.output_text == "<system>B" and answer.object == "response"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert answer.usage is not None and (answer.usage.output_tokens, answer.usage.total_tokens) == (9, 45)
    assert (answer.temperature, answer.metadata, answer.instructions) == (0.5, {"a": "b"}, "Be brief.")


def test_a_stream_grows_to_the_whole_response(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = f"One moment.\n{CALL}{CALL}"
    arguments: dict[str, Any] = {
        "model": "m", "input": "hi", "tools": TOOLS, "max_output_tokens": 400, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }  # fmt: skip
    whole = client.responses.create(**arguments)
    events = list(client.responses.create(**arguments, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert events[-1].type == "response.completed"

    def plain(item: Any) -> Any:
        return {key: value for key, value in item.model_dump().items() if key not in ("id", "call_id")}

    last = events[-1].response
    assert last.status == whole.status == "completed" and last.usage == whole.usage
    assert [item.type for item in last.output] == ["message", "function_call", "function_call"]
    assert list(map(plain, last.output)) == list(map(plain, whole.output))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert whole.output[0].content[0].logprobs  # type: ignore[union-attr, index]
    # OpenAI's client accumulates the events, and so checks their order and indices.
    with client.responses.stream(**arguments) as stream:
        assert list(map(plain, stream.get_final_response().output))[0]["content"][0]["text"] == "One moment.\n"


def test_a_call_and_its_output_are_messages_of_the_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = CALL
    question = {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}
    first = client.responses.create(model="m", input=[question], tools=TOOLS)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Łódź"})  # type: ignore[union-attr]
    engine.answer = "Yes."
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}  # type: ignore[union-attr]
    second = client.responses.create(
        model="m", input=[question, thought, *first.output, output], tools=TOOLS, tool_choice="none"
    )
    assert second.output_text == "Yes."
    assert prompt_of(engine) == "<user>Rain?<assistant>(weather:Łódź)<tool>wet<assistant>"


def test_tools_can_be_forced_and_limited(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = '{"city": "x"}'
    forced = client.responses.create(
        model="m", input="hi", tools=TOOLS, tool_choice={"type": "function", "name": "time"}
    )
    assert [(item.type, item.name) for item in forced.output] == [("function_call", "time")]  # type: ignore[union-attr]
    assert engine.seen[-1][1].structured_outputs is not None
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    client.responses.create(model="m", input="hi", tools=TOOLS, tool_choice=allowed)
    assert prompt_of(engine).startswith("[tools:time ]")
    engine.answer = f"{CALL}{CALL}"
    single = client.responses.create(model="m", input="hi", tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in single.output] == ["function_call"]


def test_structured_text_is_parsed(client: openai.OpenAI, engine: FakeEngine) -> None:
    class City(BaseModel):
        city: str

    engine.answer = '{"city": "x"}'
    parsed = client.responses.parse(model="m", input="hi", text_format=City)
    assert parsed.output_parsed == City(city="x")
    constraint = engine.seen[-1][1].structured_outputs
    assert constraint is not None and isinstance(constraint.json, dict)
    assert constraint.json["required"] == ["city"]


def test_an_adapter_is_chosen_by_its_name(client: openai.OpenAI, engine: FakeEngine) -> None:
    assert client.responses.create(model="adapter", input="hi").model == "adapter"
    assert engine.seen[-1][2] == "adapter"


BAD = [
    ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id", "send all items as input"),
    ({"input": "hi", "store": True}, "store", "keeps no answers"),
    ({"input": "hi", "max_tokens": 3}, "max_tokens", "write max_output_tokens"),
    ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
    ({"input": "hi", "max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens is 1,000,000"),
    ({"input": "x" * 600}, "input", "context length is 512"),
    ({"input": []}, "input", "input is empty"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "'robot'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "text only"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "'item_reference'"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input.0.call_id", "'c'"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
        "input.0.arguments",
        "input.0.arguments is not JSON",
    ),
    ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools.0.type", "write function"),
    ({"input": "hi", "tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "tools.0.name is 'a b'"),
    ({"input": "hi", "tool_choice": "required"}, "tool_choice", "needs tools"),
    *(
        (
            {"input": "hi", "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": allowed}},
            "tool_choice",
            text,
        )
        for mode, allowed, text in (
            (5, [{"type": "function", "name": "time"}], "tool_choice.mode is 5"),
            ("none", [{"type": "function", "name": "time"}], "tool_choice.mode is 'none'"),
            ("auto", [{"type": "function", "name": "time"}, 7], "tool_choice.tools has 7"),
            ("auto", ["time"], "tool_choice.tools has 'time'"),
            ("auto", 7, "tool_choice.tools has 7"),
        )
    ),
    ({"input": "hi", "max_output_tokens": 3, "min_tokens": 4}, "min_tokens", "more than max_output_tokens (3)"),
    ({"input": "hi", "text": {"format": {"type": "xml"}}}, "text", "text.type is 'xml'"),
    ({"input": "hi", "text": {"format": {"type": "json_schema"}}}, "text", "text.format.schema is missing"),
    ({"input": "hi", "text": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "text", "'text.format.x'"),
    ({"input": "hi", "include": ["file_search_call.results"]}, "include", "file_search_call"),
    ({"input": "hi", "reasoning": {"effort": "high"}}, "reasoning", "chat_template_kwargs"),
    ({"input": "hi", "temprature": 1.0}, "temprature", "did you mean temperature?"),
    ({"input": "hi", "temperature": -1.0}, "temperature", "temperature is -1.0"),
]


def test_harmless_parts_of_fields_are_accepted() -> None:
    body = {"input": "hi", "text": {"verbosity": "medium"}, "reasoning": {"effort": None, "summary": "auto"}}
    client = client_of(FakeEngine())
    assert client.post("/v1/responses", json=body).status_code == 200
    stream = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert client.post("/v1/responses", json={**body, **stream}).status_code == 200


@pytest.mark.parametrize(("body", "parameter", "text"), BAD, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_field_is_named(body: dict[str, Any], parameter: str, text: str, stream: bool) -> None:
    answer = client_of(FakeEngine()).post("/v1/responses", json={**body, "stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], text in error["message"]) == (parameter, True), error


@given(
    text=st.sampled_from([f"One.\n{CALL}\n{CALL}\nTwo.", "  \n", "", f"\n\n{CALL}", "\n text \n"]),
    cuts=st.lists(st.integers(0, 200), max_size=12),
)
def test_events_add_up_to_the_items(text: str, cuts: list[int]) -> None:
    items, parser = ResponseItems(), OptionalCalls({"weather"}, "auto")
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[begin:end] for begin, end in zip(places, places[1:], strict=False)] or [""]
    events: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        parsed = parser.feed(piece, number == len(pieces) - 1)
        events += items.add_text(parsed.content) if parsed.content else []
        for call in parsed.calls:
            events += items.add_call(call)
    events += items.finish("completed")
    assert items.output and all(item["status"] == "completed" for item in items.output)
    for index, item in enumerate(items.output):
        own = [event for event in events if event["output_index"] == index]
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert own[-1]["item"] == item
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    order = [event["output_index"] for event in events]
    assert order == sorted(order)


@pytest.mark.parametrize("texts", [["ab"], ["a", "b"], ["", "ab", ""], ["ab", ""], [""], ["", ""]])
def test_log_probabilities_do_not_depend_on_the_pieces(texts: list[str]) -> None:
    """The engine may pass tokens that end an answer, and have no text, alone or with the text before them."""
    entries = [{"token": str(number)} for number in range(4)]
    items, first = ResponseItems(), 0
    for number, text in enumerate(texts):
        count = len(entries) - first if number == len(texts) - 1 else 1
        items.add_logprobs(entries[first : first + count])
        first += count
        if text:
            items.add_text(text)
    events = items.finish("completed")
    (item,) = items.output
    assert item["content"][0]["logprobs"] == entries
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == entries
