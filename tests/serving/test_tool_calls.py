"""Tests of tool calls: recognition in text that is split at any point, and their place in answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inference.text_models import byte_level_tokenizer
from tests.serving.fake_engine import CharacterTokenizer, FakeEngine
from tests.serving.harness import client_of, events_of
from windlass.inference.sampling_params import StructuredOutputsParams
from windlass.inference.structured_output import StructuredOutputCompiler
from windlass.serving.chat_prompt import ChatTool, forced_call_schema, parse_tools
from windlass.serving.tool_calls import ForcedFunction, OptionalCalls, RequiredCalls, ToolCallParser

CHAT = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {}}}}}
    for name in ("weather", "time")
]
BLOCK = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'

CASES = [
    # form, text, content, calls
    ("auto", "just text < and <tool", "just text < and <tool", []),
    ("auto", BLOCK, "", [("weather", {"city": "Łódź"})]),
    ("auto", f"One moment.\n{BLOCK}\n{BLOCK}", "One moment.\n", [("weather", {"city": "Łódź"})] * 2),
    ("auto", f"{BLOCK}\nall is  done\nnow", "all is  done\nnow", [("weather", {"city": "Łódź"})]),
    ("auto", f"{BLOCK} and {BLOCK} done now", "and done now", [("weather", {"city": "Łódź"})] * 2),
    ("auto", f" \n{BLOCK}\n", "", [("weather", {"city": "Łódź"})]),
    ("auto", f" Look: {BLOCK}", " Look: ", [("weather", {"city": "Łódź"})]),
    ("auto", "\n  text", "\n  text", []),
    ("auto", BLOCK.removesuffix("</tool_call>"), "", [("weather", {"city": "Łódź"})]),
    ("auto", "<tool_call>not json</tool_call>!", "<tool_call>not json</tool_call>!", []),
    ("auto", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("auto", '{"name": "time", "parameters": {}}', "", [("time", {})]),
    (
        "auto",
        '<|python_tag|>{"name": "time", "parameters": {"a": 1}}; {"name": "weather", "arguments": {}}',
        "",
        [("time", {"a": 1}), ("weather", {})],
    ),
    ("auto", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("auto", '{"name": "time", "parameters": {"a": 1e999}}', '{"name": "time", "parameters": {"a": 1e999}}', []),
    ("auto", '{"name": "time", "parameters": {"a": NaN}}', '{"name": "time", "parameters": {"a": NaN}}', []),
    ("auto", '{"a": 1} and more', '{"a": 1} and more', []),
    ("auto", '{"name": "time", "parameters"', '{"name": "time", "parameters"', []),
    ("hermes", '{"name": "time", "parameters": {}}', '{"name": "time", "parameters": {}}', []),
    ("llama3_json", BLOCK, BLOCK, []),
    ("auto", "", "", []),
]


def parse(parser: ToolCallParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """Feed the pieces, and return content and calls."""
    content, names, arguments = "", {}, {}
    for number, piece in enumerate(pieces):
        found = parser.feed(piece, finished=number == len(pieces) - 1)
        content += found.content
        for call in found.calls:
            if call.name is not None:
                assert call.id is not None and call.index == len(names)
                names[call.index] = call.name
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
    return content, [(names[index], json.loads(arguments[index])) for index in names]


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 200), max_size=12))
def test_calls_are_found_however_the_text_is_cut(case: Any, cuts: list[int]) -> None:
    form, text, content, calls = case
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[begin:end] for begin, end in zip(places, places[1:], strict=False)] or [""]
    assert parse(OptionalCalls({"weather", "time"}, form), pieces) == (content, calls)
    assert parse(OptionalCalls({"weather", "time"}, form), [*pieces, ""]) == (content, calls)


@given(cuts=st.lists(st.integers(0, 100), max_size=12))
def test_forced_calls_are_found_however_the_text_is_cut(cuts: list[int]) -> None:
    listed = '[{"name": "weather", "parameters": {"city": "}{"}}, {"name": "time", "parameters": {}}]'
    arguments = '{"city": "Łódź"}'
    for parser, text, calls in (
        (RequiredCalls(), listed, [("weather", {"city": "}{"}), ("time", {})]),
        (ForcedFunction("weather"), arguments, [("weather", {"city": "Łódź"})]),
    ):
        places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
        pieces = [text[begin:end] for begin, end in zip(places, places[1:], strict=False)]
        assert parse(parser, pieces) == ("", calls)


def ask(
    answer: str, *, engine_options: dict[str, Any] | None = None, **fields: Any
) -> tuple[dict[str, Any], list[Any], FakeEngine]:
    """Return the choice of an answer, the deltas of its stream, and the engine."""
    engine = FakeEngine(answer=answer, **engine_options or {})
    client = client_of(engine)
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
    whole = client.post(CHAT, json=body)
    assert whole.status_code == 200, whole.text
    events = events_of(client.post(CHAT, json={**body, "stream": True}).text)
    return whole.json()["choices"][0], [event["choices"][0] for event in events], engine


def joined_calls(deltas: list[Any]) -> list[tuple[str, str]]:
    """Return name and arguments of each call of a stream, as clients join them."""
    calls: list[list[str]] = []
    for delta in deltas:
        for call in delta["delta"].get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls]


def called(choice: dict[str, Any]) -> list[tuple[str, str]]:
    """Return name and arguments of each call of an answer."""
    calls = choice["message"].get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_a_call_of_the_models_choice() -> None:
    choice, deltas, engine = ask(f"Well. {BLOCK}")
    assert called(choice) == joined_calls(deltas) == [("weather", '{"city": "Łódź"}')]
    assert choice["message"]["content"] == "Well." and choice["finish_reason"] == "tool_calls"
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == "Well. "
    prompt, params, *_ = engine.seen[0]
    assert "[tools:weather time ]" in engine.tokenizer.decode(prompt) and params.structured_outputs is None


def test_at_most_one_call_without_parallel_calls() -> None:
    choice, deltas, _ = ask(BLOCK + BLOCK, parallel_tool_calls=False)
    assert called(choice) == joined_calls(deltas) == [("weather", '{"city": "Łódź"}')]


def test_a_forced_call_without_parallel_calls_ends_after_the_first() -> None:
    for parallel, most in ((None, None), (True, None), (False, 1)):
        *_, engine = ask("[]", tool_choice="required", parallel_tool_calls=parallel)
        assert engine.seen[0][1].structured_outputs.json.get("maxItems") == most


def test_no_tools_are_shown_if_none_may_be_called() -> None:
    choice, _, engine = ask(BLOCK, tool_choice="none")
    assert choice["message"]["content"] == BLOCK and "tool_calls" not in choice["message"]
    assert "[tools:" not in engine.tokenizer.decode(engine.seen[0][0])


def test_a_forced_function_is_constrained_by_its_schema() -> None:
    choice, deltas, engine = ask('{"city": "x"}', tool_choice={"type": "function", "function": {"name": "time"}})
    assert called(choice) == joined_calls(deltas) == [("time", '{"city": "x"}')]
    assert choice["finish_reason"] == deltas[-1]["finish_reason"] == "stop"  # as OpenAI's server does
    constraint = engine.seen[0][1].structured_outputs
    assert constraint is not None and constraint.json == TOOLS[1]["function"]["parameters"]


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ({"properties": {"city": {}}, "required": ["city"]}, "object"),
        ({"properties": {"city": {}}, "anyOf": [{"required": ["city"]}, {"required": ["place"]}]}, "object"),
        ({}, "object"),
        ({"$ref": "#/$defs/A"}, None),
    ],
)
def test_arguments_are_objects_also_without_a_type(parameters: dict[str, Any], kind: str | None) -> None:
    (tool,) = parse_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tool.parameters.get("type") == kind and tool.parameters.items() >= parameters.items()
    assert tool.definition["function"]["parameters"] == parameters  # the template gets what the client has sent
    if kind is not None:
        structure = StructuredOutputsParams(json=forced_call_schema([tool], "f"))
        assert accepts(structure, '{"city": 1}') and not accepts(structure, "5")


def test_required_calls_are_constrained_to_a_list_of_calls() -> None:
    choice, deltas, engine = ask('[{"name": "time", "parameters": {"city": "x"}}]', tool_choice="required")
    assert called(choice) == joined_calls(deltas) == [("time", '{"city": "x"}')]
    assert choice["finish_reason"] == "tool_calls"
    constraint = engine.seen[0][1].structured_outputs
    assert constraint is not None and isinstance(constraint.json, dict)
    names = [entry["properties"]["name"]["const"] for entry in constraint.json["items"]["anyOf"]]
    assert names == ["weather", "time"] and constraint.json["minItems"] == 1


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array"}}}, "json"),
        ({"type": "json_schema", "json_schema": {"strict": True, "schema": {}, "name": "", "description": ""}}, "json"),
        ({"type": "text", "json_schema": None}, None),
    ],
)
def test_the_response_format_becomes_a_constraint(form: Any, field: str | None) -> None:
    engine = FakeEngine()
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
    assert client_of(engine).post(CHAT, json=body).status_code == 200
    constraint = engine.seen[0][1].structured_outputs
    assert (constraint is None) == (field is None)
    if constraint is not None:
        assert getattr(constraint, str(field)) == (form["json_schema"]["schema"] if field == "json" else True)


def test_a_forced_call_is_no_text_and_has_no_response_format() -> None:
    engine = FakeEngine()
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required"}
    assert client_of(engine).post(CHAT, json={**body, "response_format": form}).status_code == 200
    assert client_of(engine).post(CHAT, json=body).status_code == 200
    assert engine.seen[0][1] == engine.seen[1][1] and engine.seen[0][1].structured_outputs.json["type"] == "array"


def test_the_effort_of_reasoning_is_passed_to_a_template_that_reads_it() -> None:
    engine = FakeEngine(tokenizer=CharacterTokenizer(chat_template="effort: {{ reasoning_effort }}"))
    client = client_of(engine)
    messages = [{"role": "user", "content": "hi"}]
    assert client.post(CHAT, json={"messages": messages, "reasoning_effort": "low"}).status_code == 200
    answer = client.post("/v1/responses", json={"input": "hi", "reasoning": {"effort": "high", "summary": None}})
    assert answer.json()["reasoning"] == {"effort": "high", "summary": None}
    assert [engine.tokenizer.decode(seen[0]) for seen in engine.seen] == ["effort: low", "effort: high"]


def test_a_conversation_with_calls_reaches_the_template_with_objects() -> None:
    engine = FakeEngine()
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Łódź"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    assert client_of(engine).post(CHAT, json={"messages": messages}).status_code == 200
    text = engine.tokenizer.decode(engine.seen[0][0])
    assert text == "<user>a\nb<assistant>(weather:Łódź)<tool>rain<assistant>"


def test_definitions_of_one_name_stay_those_of_their_tool() -> None:
    """Each reference in the schema of all calls points to the definition of its own tool."""
    tools = []
    for name, kind in (("first", "string"), ("second", "integer")):
        item = {"type": kind}
        parameters = {"type": "object", "properties": {"item": {"$ref": "#/$defs/Item"}}, "$defs": {"Item": item}}
        tools.append(ChatTool(name, parameters, {}))
    schema = forced_call_schema(tools, None)
    for call, kind in zip(schema["items"]["anyOf"], ("string", "integer"), strict=True):
        found: Any = schema
        for part in call["properties"]["parameters"]["properties"]["item"]["$ref"].removeprefix("#/").split("/"):
            found = found[int(part)] if isinstance(found, list) else found[part]
        assert found == {"type": kind}


def test_the_schema_of_all_calls_can_be_compiled() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    item = {"type": "object", "properties": {"item": {"$ref": "#/$defs/I"}}, "$defs": {"I": {"const": 3}}}
    schema = forced_call_schema([ChatTool("tree", tree, {}), ChatTool("item", item, {})], None)
    for text, allowed in (
        ('[{"name": "tree", "parameters": {"left": {"left": {}}}}]', True),
        ('[{"name": "item", "parameters": {"item": 3}}]', True),
        ('[{"name": "item", "parameters": {"item": 4}}]', False),
        ('[{"name": "tree", "parameters": {"left": {"name": "tree"}}}]', False),
    ):
        assert accepts(StructuredOutputsParams(json=schema), text) == allowed, text


def accepts(params: StructuredOutputsParams, text: str) -> bool:
    """Return True if a text obeys a structure and may end."""
    tokenizer = byte_level_tokenizer()
    constraint = StructuredOutputCompiler(tokenizer, len(tokenizer)).compile(params)
    for token in [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]:
        if token == tokenizer.eos_token_id and constraint.is_complete():
            return True
        if not constraint.allowed()[token]:
            return False
        constraint.accept(token)
    return True


ANSWER = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "integer"}}}
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/C"}}, "$defs": {"C": {"type": "string"}}}
BLOCKS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
OBJECT = '{"name": "weather", "parameters": {"city": "Łódź"}}'


@pytest.mark.parametrize(
    ("form", "several", "text", "allowed"),
    [
        ("auto", True, '{"x": 3}', True),
        ("auto", True, '{"x": "3"}', False),
        ("auto", True, BLOCKS, True),
        ("auto", True, f"{BLOCKS}\n{BLOCKS}", True),
        ("auto", False, f"{BLOCKS}\n{BLOCKS}", False),
        ("auto", True, BLOCKS.replace('"Łódź"', "3"), False),
        ("auto", True, f"{OBJECT}; {OBJECT}", True),
        ("llama3_json", True, BLOCKS, False),
        ("hermes", True, OBJECT.replace("name", "x"), False),
        ("hermes", True, f"{BLOCKS} and text", False),
    ],
)
def test_a_text_is_the_answer_of_a_form_or_calls(form: str, several: bool, text: str, allowed: bool) -> None:
    engine = FakeEngine(answer=text)
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": CITY}}, TOOLS[1]],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": ANSWER}},
        "parallel_tool_calls": several,
        "max_tokens": len(text),
    }
    answer = client_of(engine, tool_calls=form).post(CHAT, json=body).json()
    structure = engine.seen[0][1].structured_outputs
    assert accepts(structure, text) == allowed
    if allowed:
        message = answer["choices"][0]["message"]
        assert (message["content"] == text) == (text[:4] == '{"x"') == (not message.get("tool_calls"))


def test_numbers_beyond_every_type_are_passed_on_as_they_are_written() -> None:
    huge = "9" * 5000
    choice, deltas, _ = ask(
        '[{"name": "time", "parameters": {"a": 1e999, "b": ' + huge + "}}]",
        tool_choice="required",
        max_tokens=6000,
        engine_options={"max_model_len": 9000},
    )
    assert called(choice) == joined_calls(deltas) == [("time", '{"a": 1e999, "b": ' + huge + "}")]
