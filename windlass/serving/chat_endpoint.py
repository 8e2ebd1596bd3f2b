"""Endpoint `/v1/chat/completions`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from windlass.base.text import one_line
from windlass.inference.sampling_params import MAX_LOGPROBS, StructuredOutputsParams
from windlass.serving.api_errors import ApiError, json_response
from windlass.serving.chat_prompt import ChatTool, forced_call_schema, normalize_messages, parse_tools, render_chat
from windlass.serving.completions_endpoint import prompt_logprobs_as_json
from windlass.serving.event_stream import DONE, encode_event, start_event_stream, until_disconnect
from windlass.serving.generation import AnswerPiece, AnswerProgress, Generation, encode_text, start_generation
from windlass.serving.logprob_format import LogprobFormat
from windlass.serving.request_body import read_json_object
from windlass.serving.request_fields import RequestModel, SamplingFields
from windlass.serving.server_context import ServerContext
from windlass.serving.tool_calls import (
    ForcedFunction,
    OptionalCalls,
    ParsedText,
    PlainText,
    RequiredCalls,
    ToolCallParser,
)

_CHUNK = "chat.completion.chunk"


class ChatFields(RequestModel):
    """Fields that make the prompt of a chat.

    Attributes:
        add_generation_prompt: end the prompt with the header of the assistant's message.
        continue_final_message: continue the last message in place of a new one.
        chat_template_kwargs: values that the chat template reads.
        add_special_tokens: let the tokenizer add its beginning-of-text token; templates usually have it.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
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
class _ToolChoice:
    """Tools that the template shows, the constraint of the text, and the parser of the answer."""

    shown: list[ChatTool]
    schema: dict[str, Any] | None
    new_parser: Callable[[], ToolCallParser]
    forced: bool = False


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, at once or as a stream of events."""
    context: ServerContext = request.app.state.context
    fields = ChatRequest.parse(await read_json_object(request, context.settings.max_body_bytes))
    context.lora_of(fields.model)
    if fields.echo:
        raise ApiError(400, "echo is not supported in a chat; leave it out", parameter="echo")
    choice = _tool_choice(fields, context.settings.tool_calls)
    name, constraint = _response_constraint(fields, choice)
    values: dict[str, Any] = {"max_tokens": _max_tokens(fields), "logprobs": _num_logprobs(fields)}
    if constraint is not None:
        values["structured_outputs"] = constraint
    params = fields.sampling_params(**values)
    prompt = await encode_chat(context, fields, choice.shown)
    generation = start_generation(request, fields, [prompt], params, "chatcmpl", name)
    answer = _ChatAnswer(generation, fields, choice, LogprobFormat(context.engine.tokenizer, _as_ids(fields)))
    if fields.stream:
        return await start_event_stream(request, answer.events())
    return await until_disconnect(request, answer.response())


async def encode_chat(context: ServerContext, fields: ChatFields, tools: list[ChatTool]) -> list[int]:
    """Return the tokens of a conversation.

    Raises:
        ApiError: invalid messages, or no chat template.
    """
    messages = normalize_messages(fields.messages)
    continued = bool(fields.continue_final_message)
    if continued and fields.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other",
            parameter="continue_final_message",
        )
    text = await context.in_tokenizer_thread(
        lambda: render_chat(
            context.engine.tokenizer,
            messages,
            tools,
            template=context.settings.chat_template,
            add_generation_prompt=fields.add_generation_prompt is not False and not continued,
            continue_final_message=continued,
            template_arguments=fields.chat_template_kwargs or {},
        )
    )
    return await encode_text(context, text, bool(fields.add_special_tokens))


def _as_ids(fields: ChatRequest) -> bool:
    return bool(fields.return_tokens_as_token_ids)


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


def _tool_choice(fields: ChatRequest, form: str) -> _ToolChoice:
    tools = parse_tools(fields.tools)
    names = {tool.name for tool in tools}
    choice = fields.tool_choice if fields.tool_choice is not None else ("auto" if tools else "none")
    if choice == "none":
        return _ToolChoice([], None, PlainText)
    if not tools:
        raise ApiError(400, "tool_choice needs tools", parameter="tool_choice")
    if choice == "auto":
        parser = PlainText if form == "none" else lambda: OptionalCalls(names, form)
        return _ToolChoice(tools, None, parser)
    if choice == "required":
        several = fields.parallel_tool_calls is not False
        return _ToolChoice(tools, forced_call_schema(tools, None, several=several), RequiredCalls, forced=True)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in names:
        shown = one_line(repr(choice), 100)
        raise ApiError(
            400,
            f'tool_choice is {shown}; write "none", "auto", "required" or a function of tools',
            parameter="tool_choice",
        )
    return _ToolChoice(tools, forced_call_schema(tools, name), lambda: ForcedFunction(name), forced=True)


def _response_constraint(fields: ChatRequest, choice: _ToolChoice) -> tuple[str | None, StructuredOutputsParams | None]:
    """Return the field that constrains the text, and its constraint; the latter is None for fields of vLLM's."""
    found = [] if choice.schema is None else [("tool_choice", StructuredOutputsParams(json=choice.schema))]
    form = fields.response_format
    kind = form.get("type") if form is not None else "text"
    if form is not None and kind == "json_object":
        found.append(("response_format", StructuredOutputsParams(json_object=True)))
    elif form is not None and kind == "json_schema":
        wrapper = form.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if not isinstance(schema, dict):
            raise ApiError(
                400, "response_format.json_schema.schema is missing; send a JSON Schema", parameter="response_format"
            )
        found.append(("response_format", StructuredOutputsParams(json=schema)))
    elif kind != "text":
        shown = one_line(repr(kind), 80)
        raise ApiError(
            400,
            f"response_format.type is {shown}; write text, json_object or json_schema",
            parameter="response_format",
        )
    own = fields.constraint_field
    if own is not None:
        found.append((own, StructuredOutputsParams(json_object=True)))
    if len(found) > 1:
        raise ApiError(400, f"{found[0][0]} and {found[1][0]} both constrain the text; keep one", parameter=found[1][0])
    if found and choice.shown and not choice.forced:
        raise ApiError(
            400,
            f'{found[0][0]} excludes calls of tools; send tool_choice = "none"',
            parameter=found[0][0],
        )
    name, constraint = found[0] if found else (None, None)
    return name, None if name == own else constraint


@dataclass
class _ChoiceState:
    """State of one answer while it is sent."""

    parser: ToolCallParser
    progress: AnswerProgress = field(default_factory=AnswerProgress)
    has_role: bool = False
    calls: int = 0


@dataclass
class _ChatAnswer:
    """Answer to one request."""

    generation: Generation
    fields: ChatRequest
    choice: _ToolChoice
    logprobs: LogprobFormat

    async def response(self) -> Response:
        output = (await self.generation.finish())[0]
        choices = []
        for answer in sorted(output.outputs, key=lambda one: one.index):
            piece = AnswerProgress().advance(answer) or AnswerPiece("", [], None, None, answer.finish_reason, None)
            parsed = self._limit_calls(self.choice.new_parser().feed(piece.text, True), 0)
            message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
            if parsed.calls:
                message["content"] = parsed.content.strip() or None
                message["tool_calls"] = [call.as_json(streamed=False) for call in parsed.calls]
            choice = self._choice(answer.index, "message", message, piece, len(parsed.calls))
            if self.fields.return_token_ids:
                choice["token_ids"] = piece.tokens
            choices.append(choice)
        body = {**self.generation.head("chat.completion"), "choices": choices, "usage": self.generation.usage()}
        if self.fields.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs_as_json(output)
        if self.fields.return_token_ids:
            body["prompt_token_ids"] = self.generation.prompts[0]
        return json_response(body)

    async def events(self) -> AsyncGenerator[bytes, None]:
        states: dict[int, _ChoiceState] = {}
        plain = _PlainEvents(self.generation.head(_CHUNK)) if self._is_plain else None
        async with contextlib.aclosing(self.generation.stream()) as outputs:
            async for _, output in outputs:
                for answer in output.outputs:
                    state = states.get(answer.index)
                    if state is None:
                        state = states[answer.index] = _ChoiceState(self.choice.new_parser())
                    piece = state.progress.advance(answer)
                    if piece is None:
                        continue
                    if not state.has_role:
                        state.has_role = True
                        yield self._event(answer.index, {"role": "assistant", "content": ""}, None, 0, is_first=True)
                    if plain is not None and piece.finish_reason is None:
                        yield plain.encode(answer.index, piece.text)
                        continue
                    for event in self._piece_events(answer.index, state, piece):
                        yield event
        if self.fields.wants_usage_event:
            usage = self.generation.usage()
            yield encode_event({**self.generation.head(_CHUNK), "choices": [], "usage": usage})
        yield DONE

    @property
    def _is_plain(self) -> bool:
        """True if the events between the first and the last have text only."""
        fields = self.fields
        return not (self.choice.shown or fields.logprobs or fields.stream_options or fields.return_token_ids)

    def _piece_events(self, index: int, state: _ChoiceState, piece: AnswerPiece) -> list[bytes]:
        parsed = self._limit_calls(state.parser.feed(piece.text, piece.finish_reason is not None), state.calls)
        state.calls = max([state.calls, *(call.index + 1 for call in parsed.calls)])
        deltas: list[dict[str, Any]] = []
        if parsed.content:
            deltas.append({"content": parsed.content})
        deltas += [{"tool_calls": [call.as_json(streamed=True)]} for call in parsed.calls]
        shows_tokens = self.fields.return_token_ids and piece.tokens
        if not deltas and not (piece.logprobs or piece.finish_reason or shows_tokens):
            return []
        # the end and the log-probabilities are part of the last event of the piece
        silent = AnswerPiece("", [], None, None, None, None)
        deltas = deltas or [{}]
        return [
            self._event(index, delta, piece if number == len(deltas) - 1 else silent, state.calls)
            for number, delta in enumerate(deltas)
        ]

    def _limit_calls(self, parsed: ParsedText, before: int) -> ParsedText:
        """Remove all calls after the first if the request allows at most one."""
        if self.fields.parallel_tool_calls is False:
            parsed.calls = [call for call in parsed.calls if call.index == 0 and (before == 0 or call.name is None)]
        return parsed

    def _event(
        self, index: int, delta: dict[str, Any], piece: AnswerPiece | None, calls: int, *, is_first: bool = False
    ) -> bytes:
        piece = piece or AnswerPiece("", [], None, None, None, None)
        choice = self._choice(index, "delta", delta, piece, calls)
        if self.fields.return_token_ids:
            choice["token_ids"] = piece.tokens
        event = {**self.generation.head(_CHUNK), "choices": [choice]}
        if is_first and self.fields.return_token_ids:
            event["prompt_token_ids"] = self.generation.prompts[0]
        if self.fields.wants_usage_event or self.fields.wants_usage_in_each_event:
            event["usage"] = self.generation.usage() if self.fields.wants_usage_in_each_event else None
        return encode_event(event)

    def _choice(self, index: int, kind: str, content: Any, piece: AnswerPiece, calls: int) -> dict[str, Any]:
        logprobs = None
        if self.fields.logprobs and piece.logprobs:
            logprobs = self.logprobs.chat(piece.tokens, piece.logprobs, self.fields.top_logprobs or 0)
        reason: str | None = piece.finish_reason
        named = isinstance(self.fields.tool_choice, dict)
        if reason == "stop" and calls and not named:
            reason = "tool_calls"  # as OpenAI's: a named function ends with "stop"
        return {
            "index": index,
            kind: content,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }


class _PlainEvents:
    """Events with text only, whose other fields are encoded once."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = json.dumps(head, separators=(",", ":"))[:-1]

    def encode(self, index: int, text: str) -> bytes:
        """Return the event for a piece of text."""
        delta = json.dumps(text)
        return (
            f'data: {self._head},"choices":[{{"index":{index},"delta":{{"content":{delta}}},"logprobs":null,'
            f'"finish_reason":null}}]}}\n\n'
        ).encode("ascii")
