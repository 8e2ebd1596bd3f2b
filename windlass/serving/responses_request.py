"""Request of `/v1/responses`: its fields, and its conversion to a chat completion request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from windlass.base.bounded_json import JsonError, parse_json
from windlass.base.text import one_line
from windlass.serving.api_errors import ApiError
from windlass.serving.chat_prompt import checked_content
from windlass.serving.chat_request import ChatRequest, check_allowed_tools
from windlass.serving.request_fields import CommonSamplingFields, DictField, ListField, RequestModel

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")  # the second has no effect: reasoning is a part of the text
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_SAME = (*CommonSamplingFields.model_fields, "parallel_tool_calls", "chat_template_kwargs", "top_logprobs")
"""Fields that a chat completion has under the same name."""

CHAT_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
              "response_format.json_schema": "text.format", "response_format": "text",
              "reasoning_effort": "reasoning"}  # fmt: skip
"""Names of fields of a chat completion, mapped to the names in this request, which errors use."""


class TextFields(RequestModel):
    """Field `text` of a request, which sets the format of the answer."""

    harmless: ClassVar = {"verbosity": ("medium",)}
    refused: ClassVar = {}

    format: dict[str, Any] | None = None


class StreamFields(RequestModel):
    """Field `stream_options` of a request."""

    harmless: ClassVar = {"include_obfuscation": (False, True)}
    refused: ClassVar = {}


class ReasoningFields(RequestModel):
    """Effort of the reasoning before the answer.

    Attributes:
        effort: value of the chat template's variable `reasoning_effort`.
    """

    harmless: ClassVar = {"summary": ("auto",), "generate_summary": ("auto",)}
    refused: ClassVar = {
        "summary": "the server summarizes nothing",
        "generate_summary": "the server summarizes nothing",
    }

    effort: str | None = None


class ResponsesRequest(CommonSamplingFields):
    """Request of `/v1/responses`: OpenAI's fields, and those fields of vLLM that chat completions also have."""

    harmless: ClassVar = {
        **RequestModel.harmless,
        "background": (False,),
        "truncation": ("disabled",),
    }
    refused: ClassVar = {
        **RequestModel.refused,
        "access_programs": "the server has none",
        "background": "the answer is sent to the request that asks for it",
        "background_options": "the answer is sent to the request that asks for it",
        "context_management": "shorten the input",
        "conversation": "the server keeps no conversations; send all items as input",
        "image": "the server takes text only",
        "max_tokens": "write max_output_tokens",
        "max_completion_tokens": "write max_output_tokens",
        "max_tool_calls": "the server calls no tools",
        "messages": "write input",
        "previous_response_id": "the server keeps no answers; send all items as input",
        "prompt": "the server has no stored prompts; write instructions and input",
        "response_format": "write text.format",
        "truncation": "shorten the input",
    }

    input: str | ListField[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    tools: ListField[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    include: ListField[str] | None = None
    metadata: DictField[str] | None = None
    stream_options: StreamFields | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def shows_logprobs(self) -> bool:
        """True if the answer has log-probabilities."""
        return _LOGPROBS in (self.include or []) or bool(self.top_logprobs)

    def chat(self) -> ChatRequest:
        """Return the equivalent request for a chat completion.

        Raises:
            ApiError: an item, a tool, a format or an entry of `include` is not supported; the error names the field.
        """
        for name in self.include or []:
            if name not in _INCLUDED:
                raise ApiError(400, f"include has {one_line(repr(name), 80)}; write {_LOGPROBS}", parameter="include")
        tools, choice = _chat_tools(self.tools, self.tool_choice)
        values = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        return ChatRequest(
            messages=chat_messages(self.input, self.instructions),
            tools=tools,
            tool_choice=choice,
            response_format=_chat_format(self.text.format if self.text is not None else None),
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            logprobs=self.shows_logprobs or None,
            **values,
        )


def chat_messages(items: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Return the chat messages for the items of a request.

    A call becomes a part of the preceding assistant message, or of a new one. Reasoning items are left out.

    Raises:
        ApiError: there are no items, an item is not supported, or is the output of a call that is not among the items
            before it.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not items:
        raise ApiError(400, "input is empty; send a text or at least one item", parameter="input")
    calls: set[str] = set()
    for index, item in enumerate(items):
        place, kind = f"input.{index}", item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if role not in _ROLES:
                shown = one_line(repr(role), 80)
                raise ApiError(
                    400, f"{place}.role is {shown}; write one of {', '.join(_ROLES)}", parameter=f"{place}.role"
                )
            messages.append(
                {"role": role, "content": checked_content(item.get("content"), f"{place}.content", _TEXT_PARTS)}
            )
        elif kind == "function_call":
            fields = {name: _string(item, name, place) for name in ("call_id", "name", "arguments")}
            _check_arguments(fields["arguments"], f"{place}.arguments")
            calls.add(fields["call_id"])
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": fields["name"], "arguments": fields["arguments"]}
            call = {"id": fields["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id = _string(item, "call_id", place)
            if call_id not in calls:
                shown = one_line(call_id, 80)
                raise ApiError(
                    400,
                    f"{place} is the output of the call {shown!r}, which is not among the items before it; send the "
                    "item of type function_call too",
                    parameter=f"{place}.call_id",
                )
            content = checked_content(item.get("output"), f"{place}.output", _TEXT_PARTS)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind != "reasoning":
            raise ApiError(
                400,
                f"{place}.type is {one_line(repr(kind), 80)}; write message, function_call or function_call_output",
                parameter=f"{place}.type",
            )
    return messages


def _string(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(
            400, f"{place}.{name} is {one_line(repr(value), 80)}; write a string", parameter=f"{place}.{name}"
        )
    return value


def _check_arguments(arguments: str, place: str) -> None:
    try:
        parse_json(arguments or "{}", finite_numbers=True)
    except JsonError as error:
        raise ApiError(400, f"{place} is not JSON: {error}", parameter=place) from error


def _chat_tools(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """Return `tools` and `tool_choice` in the form of chat completions; of `allowed_tools`, only the allowed ones."""
    nested: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or []):
        if tool.get("type") != "function":
            raise ApiError(
                400,
                f"tools.{index}.type is {one_line(repr(tool.get('type')), 80)}; write function",
                parameter=f"tools.{index}.type",
            )
        nested.append({"type": "function", "function": {name: tool[name] for name in tool if name != "type"}})
    if isinstance(choice, dict) and choice.get("type") == "function":
        return nested or None, {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed, mode = choice.get("tools"), choice.get("mode") or "auto"
        known = [tool["function"].get("name") for tool in nested]
        names = check_allowed_tools("tool_choice", allowed, allowed if isinstance(allowed, list) else [], known, mode)
        return [tool for tool in nested if tool["function"].get("name") in names], mode
    return nested or None, choice


def _chat_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return `text.format` in the form of chat completions, which nests the schema one level deeper."""
    if form is None or form.get("type") != "json_schema":
        return form
    if not isinstance(form.get("schema"), dict):
        raise ApiError(400, "text.format.schema is missing; send a JSON Schema", parameter="text")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
