"""Chat messages and tools: validation, and rendering of the prompt by the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.text import one_line
from windlass.inference.chat_template import with_content_form
from windlass.serving.api_errors import ApiError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_TOOLS = 128
_TYPE_KEYS = frozenset({"type", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const"})
"""Keys of a JSON Schema that limit the type of the value, or may do so."""


@dataclass(frozen=True)
class ChatTool:
    """Function that the model can call.

    Attributes:
        parameters: JSON Schema of the function's arguments.
        definition: the tool's full entry in the request, which the chat template reads.
    """

    name: str
    parameters: Mapping[str, Any]
    definition: Mapping[str, Any]


def normalize_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validate messages and return them for `with_content_form`, with texts or text parts as contents.

    The role `developer` becomes `system`.

    Raises:
        ApiError: there is no message, or a message's role, content, tool calls or other fields are not supported; the
            error names the field.
    """
    if not messages:
        raise ApiError(400, "messages is empty; send at least one message", parameter="messages")
    return [_normalize_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _normalize_message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        shown = one_line(repr(role), 80)
        raise ApiError(400, f"{place}.role is {shown}; write one of {', '.join(_ROLES)}", parameter=f"{place}.role")
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise ApiError(400, f"{place}.{name} is not supported; leave it out", parameter=f"{place}.{name}")
    # keep fields that a template reads, such as `name`; drop null ones, which clients send with earlier answers
    kept = {name: value for name, value in message.items() if value is not None}
    # chat templates use the role's older name, `system`
    kept["role"] = "system" if role == "developer" else role
    content = message.get("content")
    if content is not None:
        kept["content"] = checked_content(content, f"{place}.content")
    elif not message.get("tool_calls"):
        raise ApiError(400, f"{place}.content is missing; send a text", parameter=f"{place}.content")
    if message.get("tool_calls"):
        kept["tool_calls"] = _normalize_tool_calls(message["tool_calls"], f"{place}.tool_calls")
    return kept


def checked_content(content: Any, place: str, kinds: Collection[str] = ("text",)) -> str | list[dict[str, str]]:
    """Return a message's content: a text, or a list of parts of the type `text`.

    Args:
        kinds: types of the parts that have a field `text`. Parts of the type `refusal` are accepted too.

    Raises:
        ApiError: the content or one of its parts is not text; the error names the field.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(
            400, f"{place} is {one_line(repr(content), 80)}; send a text or a list of parts", parameter=place
        )
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "refusal" and kind not in kinds:
            raise ApiError(
                400,
                f"{place}.{index} has type {one_line(repr(kind), 80)}; the model takes text only",
                parameter=f"{place}.{index}.type",
                code="unsupported_content_part",
            )
        key = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(key), str):
            raise ApiError(400, f"{place}.{index}.{key} is not text; send a string", parameter=f"{place}.{index}.{key}")
        parts.append({"type": "text", "text": part[key]})
    return parts


def _normalize_tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    normalized = []
    for index, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{place}.{index} has no function with a name; send one", parameter=f"{place}.{index}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                parse_json(arguments or "{}", finite_numbers=True)
            except JsonError as error:
                where = f"{place}.{index}.function.arguments"
                raise ApiError(400, f"{where} is not JSON: {error}", parameter=where) from error
        normalized.append({**call, "function": {**function, "arguments": arguments}})
    return normalized


def parse_tools(tools: list[dict[str, Any]] | None) -> list[ChatTool]:
    """Return the tools of a request, `[]` for None.

    Raises:
        ApiError: there are too many tools, a tool is not a function, a name is invalid or repeated, or parameters are
            not an object.
    """
    if tools is None:
        return []
    if len(tools) > _MAX_TOOLS:
        raise ApiError(400, f"tools has {len(tools)} entries; send at most {_MAX_TOOLS}", parameter="tools")
    found: list[ChatTool] = []
    for index, tool in enumerate(tools):
        place = f"tools.{index}"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ApiError(400, f'{place} is not a function; write {{"type": "function", ...}}', parameter=place)
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name) or name in [one.name for one in found]:
            shown = one_line(repr(name), 80)
            raise ApiError(
                400,
                f"{place}.function.name is {shown}; write 1 to 64 letters, digits, '_', '-' or '.', each name once",
                parameter=f"{place}.function.name",
            )
        parameters = function.get("parameters")
        if parameters is None or parameters == {}:  # arguments are an object in this case too
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise ApiError(
                400,
                f"{place}.function.parameters is not a JSON Schema; send an object",
                parameter=f"{place}.function.parameters",
            )
        # A schema without a type also allows numbers, texts and lists, whatever its `properties` are.
        if "type" not in parameters and ("properties" in parameters or not parameters.keys() & _TYPE_KEYS):
            parameters = {"type": "object", **parameters}
        found.append(ChatTool(name, parameters, tool))
    return found


def reads_variable(template: Any, name: str) -> bool:
    """Return True if a chat template in Jinja, or any of a dict of templates, contains a variable's name."""
    texts = template.values() if isinstance(template, Mapping) else [template]
    return any(re.search(rf"\b{name}\b", text) for text in texts if isinstance(text, str))


def render_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[ChatTool],
    *,
    template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_arguments: Mapping[str, Any],
) -> str:
    """Return the prompt's text, as the chat template renders it.

    Raises:
        ApiError: there is no template, `template_arguments` has a reserved name, or the template refuses the messages.
    """
    if tokenizer is None or (template is None and not getattr(tokenizer, "chat_template", None)):
        raise ApiError(
            400,
            "the model's tokenizer has no chat template; use /v1/completions, or start the server with --chat-template",
            code="no_chat_template",
        )
    reserved = {"tokenize", "conversation", "chat_template", "return_tensors", "return_dict"} & set(template_arguments)
    if reserved:
        name = sorted(reserved)[0]
        raise ApiError(400, f"chat_template_kwargs cannot set {name}; leave it out", parameter="chat_template_kwargs")
    arguments = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        **template_arguments,
    }
    if tools:
        arguments["tools"] = [dict(tool.definition) for tool in tools]
    shown = with_content_form(messages, tokenizer, template, tools=arguments.get("tools"))
    try:
        text = tokenizer.apply_chat_template(shown, chat_template=template, tokenize=False, **arguments)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        # AttributeError: e.g. by the filter `dictsort`, if a tool's schema has a list where the template expects an
        # object. Templates check the order of roles and types themselves and raise with a text for the user.
        raise ApiError(
            400, f"the chat template refuses the messages: {one_line(str(error), 500)}", parameter="messages"
        ) from error
    return str(text)


def forced_call_schema(tools: list[ChatTool], name: str | None, *, several: bool = True) -> dict[str, Any]:
    """Return the JSON Schema of a forced call.

    Args:
        name: name of the called function: the text is its arguments. None: the text is a list of at least one call of
            any function.
        several: True if the list may have more than one call.
    """
    if name is not None:
        return dict(next(tool.parameters for tool in tools if tool.name == name))
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": _moved(tool.parameters, f"#/items/anyOf/{index}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    bounds = {"minItems": 1} if several else {"minItems": 1, "maxItems": 1}
    return {"type": "array", **bounds, "items": {"anyOf": calls}}


def answer_or_calls_grammar(answer: Mapping[str, Any], tools: list[ChatTool], form: str, *, several: bool) -> str:
    """Return the grammar, in Lark's syntax, of a text that is JSON of a schema, or calls of tools.

    Args:
        answer: the JSON Schema.
        form: form of calls: `hermes`, `llama3_json`, or `auto` for either.
        several: True if the text may have more than one call.
    """
    starts, rules = ["answer"], [f"answer: %json {json.dumps(dict(answer))}"]
    for name, key, before, after, between in _CALL_FORMS:
        if form not in ("auto", name):
            continue
        calls = [f"{name}_{index}" for index in range(len(tools))]
        starts.append(name)
        more = f" ({between} {name}_call)*" if several else ""
        rules += [f"{name}: {name}_call{more}", f"{name}_call: {before} ({' | '.join(calls)}) {after}"]
        for rule, tool in zip(calls, tools, strict=True):
            schema = {
                "type": "object",
                "properties": {"name": {"const": tool.name}, key: _moved(tool.parameters, f"#/properties/{key}")},
                "required": ["name", key],
                "additionalProperties": False,
            }
            rules.append(f"{rule}: %json {json.dumps(schema)}")
    return "\n".join([f"start: {' | '.join(starts)}", *rules])


_CALL_FORMS = (
    ("hermes", "arguments", '"<tool_call>" /[ \\n]*/', '/[ \\n]*/ "</tool_call>"', "/[ \\n]*/"),
    ("llama3_json", "parameters", "", "", "/[ \\n]*[;,]?[ \\n]*/"),
)
"""Forms of calls in a text: name, key of the arguments, and grammar of the text before, after and between calls."""


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose `$ref`s point below `root`, since two tools may use the same name for a definition."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: root + value[1:]
        if name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        else _moved(value, root)
        for name, value in schema.items()
    }


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
