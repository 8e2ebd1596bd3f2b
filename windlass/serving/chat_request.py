"""Request of a chat: its fields, its prompt, and the constraints of its answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from windlass.base.text import one_line
from windlass.inference.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputsParams
from windlass.serving.api_errors import ApiError
from windlass.serving.chat_prompt import (
    ChatTool,
    answer_or_calls_grammar,
    forced_call_schema,
    normalize_messages,
    parse_tools,
    reads_variable,
    render_chat,
)
from windlass.serving.generation import encode_text
from windlass.serving.request_fields import ListField, RequestModel, SamplingFields
from windlass.serving.server_context import ServerContext
from windlass.serving.tool_calls import (
    ForcedFunction,
    OptionalCalls,
    ParsedText,
    PlainText,
    RequiredCalls,
    ToolCallParser,
)


class ChatFields(RequestModel):
    """Fields that make the prompt of a chat.

    Attributes:
        add_generation_prompt: end the prompt with the header of the assistant's message.
        continue_final_message: continue the last message in place of a new one.
        chat_template_kwargs: values that the chat template reads.
        reasoning_effort: value of the template's variable of this name.
        add_special_tokens: let the tokenizer add its beginning-of-text token, which most templates already contain.
    """

    messages: ListField[dict[str, Any]]
    tools: ListField[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None


class ChatRequest(SamplingFields, ChatFields):
    """Fields of a chat completion."""

    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    echo: bool | None = None


@dataclass(frozen=True)
class ToolChoice:
    """Tools that the template shows, the constraint of the text, and the parser of the answer.

    Attributes:
        schema: JSON Schema of the text; None: the model may write any text.
        forced: True if the answer must be a call.
        form: form of calls that the text is searched for; `none`: the text is not searched for calls.
        several: True if the answer may have more than one call.
    """

    shown: list[ChatTool]
    schema: dict[str, Any] | None
    new_parser: Callable[[], ToolCallParser]
    forced: bool = False
    several: bool = True
    form: str = "none"

    def limit_calls(self, parsed: ParsedText) -> ParsedText:
        """Remove all calls after the first one if the request allows at most one."""
        if not self.several:
            parsed.calls = [call for call in parsed.calls if call.index == 0]
        return parsed


async def encode_chat(
    context: ServerContext, fields: ChatFields, tools: list[ChatTool], *, truncates: bool = False
) -> list[int]:
    """Return the tokens of a conversation.

    Args:
        truncates: True: the caller keeps a part of the tokens: see `encode_text`.

    Raises:
        ApiError: fields contradict each other, the messages are invalid or too long, or the chat template is missing or
            does not read `reasoning_effort`.
    """
    continued = bool(fields.continue_final_message)
    if continued and fields.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt are both true; set one of them",
            parameter="continue_final_message",
        )
    tokenizer, template = context.engine.tokenizer, context.settings.chat_template
    arguments = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        if not reads_variable(template or getattr(tokenizer, "chat_template", None), "reasoning_effort"):
            raise ApiError(
                400,
                f"reasoning_effort = {one_line(repr(fields.reasoning_effort), 80)} is not supported: the chat template "
                "does not read it; pass the template's own switch in chat_template_kwargs",
                parameter="reasoning_effort",
                code="unsupported_parameter",
            )
        arguments.setdefault("reasoning_effort", fields.reasoning_effort)
    text = await context.in_tokenizer_thread(
        lambda: render_chat(
            tokenizer,
            normalize_messages(fields.messages),
            tools,
            template=template,
            add_generation_prompt=fields.add_generation_prompt is not False and not continued,
            continue_final_message=continued,
            template_arguments=arguments,
        )
    )
    return await encode_text(context, text, bool(fields.add_special_tokens), "messages", truncates=truncates)


def choose_tools(fields: ChatRequest, form: str) -> ToolChoice:
    """Return the tools of the prompt, and the constraint and parser of the answer, by `tools` and `tool_choice`.

    Args:
        form: form of calls that the text is searched for: `auto`, `hermes`, `llama3_json` or `none`.

    Raises:
        ApiError: the tools are invalid or missing, or the chosen function is not one of them.
    """
    tools = parse_tools(fields.tools)
    names = {tool.name for tool in tools}
    choice = fields.tool_choice if fields.tool_choice is not None else ("auto" if tools else "none")
    several = fields.parallel_tool_calls is not False
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed_tools(tools, choice.get("allowed_tools"))
        names = {tool.name for tool in tools}
    if choice == "none":
        return ToolChoice([], None, PlainText)
    if not tools and choice == "auto" and fields.tools is not None:
        return ToolChoice([], None, PlainText)  # agents without tools send an empty list
    if not tools:
        raise ApiError(400, "tool_choice needs tools; send tools, or leave it out", parameter="tool_choice")
    if choice == "auto":
        parser = PlainText if form == "none" else lambda: OptionalCalls(names, form)
        return ToolChoice(tools, None, parser, several=several, form=form)
    if choice == "required":
        schema = forced_call_schema(tools, None, several=several)
        return ToolChoice(tools, schema, RequiredCalls, forced=True, several=several)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        shown = one_line(repr(choice), 100)
        raise ApiError(
            400,
            f'tool_choice is {shown}; write "none", "auto", "required" or a function of the field tools',
            parameter="tool_choice",
        )
    return ToolChoice(tools, forced_call_schema(tools, name), lambda: ForcedFunction(name), forced=True)


def _allowed_tools(tools: list[ChatTool], allowed: Any) -> tuple[list[ChatTool], str]:
    """Return the tools that a choice allows, and the mode of the choice. The prompt has only these tools."""
    fields = allowed if isinstance(allowed, dict) else {}
    entries, place = fields.get("tools"), "tool_choice.allowed_tools"
    listed = entries if isinstance(entries, list) else []
    functions = [one.get("function") if isinstance(one, dict) else one for one in listed]
    names = check_allowed_tools(place, entries, functions, [tool.name for tool in tools], fields.get("mode"))
    return [tool for tool in tools if tool.name in names], str(fields["mode"])


def check_allowed_tools(place: str, entries: Any, functions: list[Any], known: list[Any], mode: Any) -> list[Any]:
    """Return the names of the tools that a choice allows.

    Args:
        place: path of the choice in the request, for errors.
        entries: list of tools in the choice.
        functions: for each entry, the object that has the function's name.
        known: names of all tools of the request.

    Raises:
        ApiError: the list is empty, an entry is not a function of the tools, or the mode is unknown.
    """
    names = [one.get("name") if isinstance(one, dict) else one for one in functions]
    wrong = [name for name, one in zip(names, functions, strict=True) if name not in known or not isinstance(one, dict)]
    if not names or wrong:
        shown = one_line(repr(wrong[0] if wrong else entries), 80)
        raise ApiError(400, f"{place}.tools has {shown}; write functions of the field tools", parameter="tool_choice")
    if mode not in ("auto", "required"):
        shown = one_line(repr(mode), 80)
        raise ApiError(400, f"{place}.mode is {shown}; write auto or required", parameter="tool_choice")
    return names


def response_constraint(fields: ChatRequest, choice: ToolChoice) -> tuple[str | None, StructuredOutputsParams | None]:
    """Return the name of the field that constrains the text, and its constraint; each may be None. If one of vLLM's
    fields constrains the text, None is returned as the constraint, because `sampling_params` reads that field.

    Raises:
        ApiError: two fields constrain the text, one of vLLM's fields does so although the model may call tools, or
            `response_format` is invalid.
    """
    found = [] if choice.schema is None else [("tool_choice", StructuredOutputsParams(json=choice.schema))]
    form_constraint = None if fields.response_format is None else _form_constraint(fields.response_format)
    if form_constraint is not None and not choice.forced:  # the format is for text, and a forced call has none
        if choice.shown and choice.form != "none":
            schema = form_constraint.json if isinstance(form_constraint.json, Mapping) else {"type": "object"}
            grammar = answer_or_calls_grammar(schema, choice.shown, choice.form, several=choice.several)
            form_constraint = StructuredOutputsParams(grammar=grammar)
        found.append(("response_format", form_constraint))
    own = fields.constraint_field
    if own is not None:
        found.append((own, StructuredOutputsParams(json_object=True)))
    if len(found) > 1:
        raise ApiError(400, f"{found[0][0]} and {found[1][0]} both constrain the text; keep one", parameter=found[1][0])
    if own is not None and choice.shown and not choice.forced:
        raise ApiError(400, f'{own} cannot be used with tool calls; send tool_choice = "none"', parameter=own)
    name, constraint = found[0] if found else (None, None)
    return name, None if name == own else constraint


def _form_constraint(form: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return the constraint of a response format; None for plain text."""
    kind = form.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        shown = one_line(repr(kind), 80)
        raise ApiError(
            400,
            f"response_format.type is {shown}; write text, json_object or json_schema",
            parameter="response_format",
        )
    _check_names(form, "response_format", ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    wrapper = form.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(wrapper, dict) or not isinstance(schema, dict):
        raise ApiError(
            400, "response_format.json_schema.schema is missing; send a JSON Schema", parameter="response_format"
        )
    # `strict` has no effect: the text always follows the schema
    _check_names(wrapper, "response_format.json_schema", ("name", "description", "schema", "strict"))
    return StructuredOutputsParams(json=schema)


def _check_names(part: Mapping[str, Any], place: str, known: Collection[str]) -> None:
    """Raise an ApiError for a field of the response format that has no effect."""
    for name, value in part.items():
        if name not in known and value is not None:
            shown = one_line(f"{place}.{name}", 120)
            raise ApiError(
                400,
                f"unknown field {shown!r} of this type; leave it out, or write type = json_schema with a schema",
                parameter="response_format",
                code="unknown_parameter",
            )


def chat_sampling_params(fields: ChatRequest, constraint: StructuredOutputsParams | None) -> SamplingParams:
    """Return the sampling parameters of a chat.

    Args:
        constraint: constraint of the text; None: `fields.sampling_params` reads the constraint from
            vLLM's fields, if one is set.

    Raises:
        ApiError, RequestError: a value is out of range, or fields contradict each other.
    """
    values: dict[str, Any] = {"max_tokens": _max_tokens(fields), "logprobs": _num_logprobs(fields)}
    if constraint is not None:
        values["structured_outputs"] = constraint
    return fields.sampling_params(**values)


def _max_tokens(fields: ChatRequest) -> int | None:
    both = fields.max_tokens is not None and fields.max_completion_tokens is not None
    if both and fields.max_tokens != fields.max_completion_tokens:
        raise ApiError(
            400,
            f"max_tokens is {fields.max_tokens} and max_completion_tokens {fields.max_completion_tokens}; send one",
            parameter="max_completion_tokens",
        )
    if fields.max_completion_tokens is None:
        return fields.max_tokens
    if fields.max_completion_tokens < 1:
        raise ApiError(
            400,
            f"max_completion_tokens is {fields.max_completion_tokens}; write an integer of at least 1",
            parameter="max_completion_tokens",
        )
    return fields.max_completion_tokens


def _num_logprobs(fields: ChatRequest) -> int | None:
    if fields.top_logprobs and not fields.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", parameter="top_logprobs")
    if fields.top_logprobs is not None and not 0 <= fields.top_logprobs <= MAX_LOGPROBS:
        raise ApiError(
            400, f"top_logprobs is {fields.top_logprobs}; write 0 to {MAX_LOGPROBS}", parameter="top_logprobs"
        )
    return (fields.top_logprobs or 0) if fields.logprobs else None
