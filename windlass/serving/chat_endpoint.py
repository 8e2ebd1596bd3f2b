"""Endpoint `/v1/chat/completions`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from windlass.inference.outputs import RequestOutput
from windlass.inference.sampling_params import SamplingParams
from windlass.serving.api_errors import ApiError, json_response
from windlass.serving.chat_request import (
    ChatRequest,
    ToolChoice,
    chat_sampling_params,
    choose_tools,
    encode_chat,
    response_constraint,
)
from windlass.serving.completions_endpoint import prompt_logprobs_as_json
from windlass.serving.event_stream import DONE, encode_event, start_event_stream, until_disconnect
from windlass.serving.generation import AnswerPiece, AnswerProgress, Generation, start_generation
from windlass.serving.logprob_format import LogprobFormat
from windlass.serving.long_answer import build_answer, count_entries
from windlass.serving.request_body import check_fields, read_request
from windlass.serving.server_context import ServerContext
from windlass.serving.tool_calls import ToolCallParser

_CHUNK = "chat.completion.chunk"


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, at once or as a stream of events."""
    context: ServerContext = request.app.state.context
    fields, choice, params, name = await read_request(
        request, context.settings.max_body_bytes, lambda data: _check(context, ChatRequest.parse(data))
    )
    truncates = fields.truncate_prompt_tokens is not None
    prompt = await encode_chat(context, fields, choice.shown, truncates=truncates)
    generation = await check_fields(
        request, lambda: start_generation(request, fields, [prompt], params, "chatcmpl", name)
    )
    answer = _ChatAnswer(generation, fields, choice, LogprobFormat(context.engine.tokenizer, _as_ids(fields)))
    if fields.stream:
        return await start_event_stream(request, answer.events())
    return await until_disconnect(request, answer.response())


def _check(context: ServerContext, fields: ChatRequest) -> tuple[ChatRequest, ToolChoice, SamplingParams, str | None]:
    """Return the fields, the choice of tools, the sampling parameters, and the name of the field that constrains the
    text, or None.
    """
    context.lora_of(fields.model)
    if fields.echo:
        raise ApiError(400, "echo is not supported in a chat; leave it out", parameter="echo")
    choice = choose_tools(fields, context.settings.tool_calls)
    name, constraint = response_constraint(fields, choice)
    return fields, choice, chat_sampling_params(fields, constraint), name


def _as_ids(fields: ChatRequest) -> bool:
    return bool(fields.return_tokens_as_token_ids)


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
    choice: ToolChoice
    logprobs: LogprobFormat

    async def response(self) -> Response:
        output = (await self.generation.finish())[0]
        return await build_answer(count_entries([output]), partial(self._response, output))

    def _response(self, output: RequestOutput, is_long: bool) -> Response:
        choices = []
        for answer in sorted(output.outputs, key=lambda one: one.index):
            piece = AnswerProgress().advance(answer) or AnswerPiece("", [], None, None, answer.finish_reason, None)
            parsed = self.choice.limit_calls(self.choice.new_parser().feed(piece.text, True))
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
        return json_response(body, is_long=is_long)

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
                    build = partial(self._piece_events, answer.index, state, piece)
                    for event in await build_answer(piece.num_logprobs, build):
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

    def _piece_events(self, index: int, state: _ChoiceState, piece: AnswerPiece, is_long: bool) -> list[bytes]:
        parsed = self.choice.limit_calls(state.parser.feed(piece.text, piece.finish_reason is not None))
        state.calls = max([state.calls, *(call.index + 1 for call in parsed.calls)])
        deltas: list[dict[str, Any]] = []
        if parsed.content:
            deltas.append({"content": parsed.content})
        deltas += [{"tool_calls": [call.as_json(streamed=True)]} for call in parsed.calls]
        shows_tokens = self.fields.return_token_ids and piece.tokens
        if not deltas and not (piece.logprobs or piece.finish_reason or shows_tokens):
            return []
        if parsed.calls and piece.finish_reason:
            deltas.append({})  # OpenAI's client ignores calls in the last event, so send an empty last event
        # the last event of the piece has the finish reason and the log-probabilities
        silent = AnswerPiece("", [], None, None, None, None)
        deltas = deltas or [{}]
        return [
            self._event(index, delta, piece if number == len(deltas) - 1 else silent, state.calls, is_long=is_long)
            for number, delta in enumerate(deltas)
        ]

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        piece: AnswerPiece | None,
        calls: int,
        *,
        is_first: bool = False,
        is_long: bool = False,
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
        return encode_event(event, is_long=is_long)

    def _choice(self, index: int, kind: str, content: Any, piece: AnswerPiece, calls: int) -> dict[str, Any]:
        logprobs = None
        if self.fields.logprobs and piece.logprobs:
            logprobs = self.logprobs.chat(piece.tokens, piece.logprobs, self.fields.top_logprobs or 0)
        reason: str | None = piece.finish_reason
        named = isinstance(self.fields.tool_choice, dict)
        if reason == "stop" and calls and not named:
            reason = "tool_calls"  # as OpenAI's server; a call that `tool_choice` names keeps "stop"
        return {
            "index": index,
            kind: content,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }


class _PlainEvents:
    """Encoder of events with text only. The other fields are encoded once."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = json.dumps(head, separators=(",", ":"))[:-1]

    def encode(self, index: int, text: str) -> bytes:
        """Return the event for a piece of text."""
        delta = json.dumps(text)
        return (
            f'data: {self._head},"choices":[{{"index":{index},"delta":{{"content":{delta}}},"logprobs":null,'
            f'"finish_reason":null}}]}}\n\n'
        ).encode("ascii")
