"""Endpoint `/v1/responses`, without stored answers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from windlass.base.errors import RequestError
from windlass.inference.sampling_params import SamplingParams
from windlass.serving.api_errors import ApiError, api_error_of, json_response
from windlass.serving.chat_request import (
    ChatRequest,
    ToolChoice,
    chat_sampling_params,
    choose_tools,
    encode_chat,
    response_constraint,
)
from windlass.serving.event_stream import encode_event, start_event_stream, until_disconnect
from windlass.serving.generation import AnswerPiece, AnswerProgress, Generation, start_generation
from windlass.serving.logprob_format import LogprobFormat
from windlass.serving.long_answer import build_answer, count_entries
from windlass.serving.request_body import check_fields, read_request
from windlass.serving.response_items import ResponseItems
from windlass.serving.responses_request import CHAT_NAMES, ResponsesRequest
from windlass.serving.server_context import ServerContext
from windlass.serving.tool_calls import ToolCallParser


async def create_response(request: Request) -> Response:
    """Answer a text or a list of items, at once or as a stream of events."""
    context: ServerContext = request.app.state.context
    fields, chat, choice, params, name = await read_request(
        request, context.settings.max_body_bytes, lambda data: _check(context, ResponsesRequest.parse(data))
    )
    with _fields_renamed():
        prompt = await encode_chat(context, chat, choice.shown)
        generation = await check_fields(
            request, lambda: start_generation(request, chat, [prompt], params, "resp", CHAT_NAMES.get(name or "", name))
        )
    answer = _Answer(generation, fields, choice, generation.params[0], LogprobFormat(context.engine.tokenizer))
    if fields.stream:
        return await start_event_stream(request, answer.events())
    return await until_disconnect(request, answer.response())


def _check(
    context: ServerContext, fields: ResponsesRequest
) -> tuple[ResponsesRequest, ChatRequest, ToolChoice, SamplingParams, str | None]:
    """Return the fields, the chat request made of them, the choice of tools, the sampling parameters, and the name of
    the chat request's field that constrains the text, or None.
    """
    context.lora_of(fields.model)
    with _fields_renamed():
        chat = fields.chat()
        choice = choose_tools(chat, context.settings.tool_calls)
        name, constraint = response_constraint(chat, choice)
        return fields, chat, choice, chat_sampling_params(chat, constraint), name


@contextlib.contextmanager
def _fields_renamed() -> Iterator[None]:
    """Let errors about fields of a chat completion name the fields of this request."""
    try:
        yield
    except (ApiError, RequestError) as raised:
        error = api_error_of(raised, "")
        place, message = error.parameter or "", str(error)
        if place.startswith("tools."):  # chat requests nest tools one level deeper
            place, message = place.replace(".function", ""), message.replace(".function", "")
        for theirs, ours in CHAT_NAMES.items():
            message = re.sub(rf"\b{theirs}\b", ours, message)
        raise ApiError(
            error.status,
            message,
            parameter=CHAT_NAMES.get(place, place) or None,
            code=error.code,
            retry_after=error.retry_after,
        ) from raised


@dataclass(frozen=True)
class _Change:
    """Events of one addition to the items.

    Attributes:
        entries: number of log-probabilities that the addition has.
    """

    events: list[dict[str, Any]]
    entries: int


@dataclass
class _Answer:
    """Answer to one request: as one response object, or as a stream of events."""

    generation: Generation
    fields: ResponsesRequest
    choice: ToolChoice
    params: SamplingParams
    logprobs: LogprobFormat
    items: ResponseItems = field(default_factory=ResponseItems)
    events_sent: int = 0

    async def response(self) -> Response:
        async with contextlib.aclosing(self._changes()) as changes:
            async for _ in changes:
                pass
        body = self._body(self.items.status)
        return await build_answer(self._count_entries(), lambda is_long: json_response(body, is_long=is_long))

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._changes()) as changes:
            async for change in changes:
                if not self.events_sent:
                    # the engine has accepted the request: an earlier event would keep errors from having an HTTP status
                    for kind in ("created", "in_progress"):
                        yield self._encode({"type": f"response.{kind}", "response": self._body("in_progress")}, False)
                # the events that end an item repeat the log-probabilities of all its events
                ends_item = any(event["type"].endswith(".done") for event in change.events)
                entries = self._count_entries() if ends_item else change.entries
                for event in change.events:
                    yield await build_answer(entries, partial(self._encode, event))
        last = {"type": f"response.{self.items.status}", "response": self._body(self.items.status)}
        yield await build_answer(self._count_entries(), partial(self._encode, last))

    async def _changes(self) -> AsyncGenerator[_Change, None]:
        """Generate the answer. Add new text to the items, and yield each addition."""
        progress, parser = AnswerProgress(), self.choice.new_parser()
        async with contextlib.aclosing(self.generation.stream()) as outputs:
            async for _, output in outputs:
                piece = progress.advance(output.outputs[0])
                if piece is None:
                    yield _Change([], 0)
                    continue
                events = await build_answer(piece.num_logprobs, partial(self._add, parser, piece))
                yield _Change(events, piece.num_logprobs)

    def _count_entries(self) -> int:
        return count_entries(self.generation.outputs.values())

    def _add(self, parser: ToolCallParser, piece: AnswerPiece, is_long: bool) -> list[dict[str, Any]]:
        parsed = self.choice.limit_calls(parser.feed(piece.text, piece.finish_reason is not None))
        if self.fields.shows_logprobs and piece.logprobs:
            top = self.fields.top_logprobs or 0
            self.items.add_logprobs(self.logprobs.chat(piece.tokens, piece.logprobs, top)["content"])
        events = self.items.add_text(parsed.content) if parsed.content else []
        for call in parsed.calls:
            events += self.items.add_call(call)
        if piece.finish_reason is not None:
            events += self.items.finish("incomplete" if piece.finish_reason == "length" else "completed")
        return events

    def _encode(self, event: dict[str, Any], is_long: bool) -> bytes:
        self.events_sent += 1
        numbered = {**event, "sequence_number": self.events_sent - 1}
        return encode_event(numbered, name=event["type"], is_long=is_long)

    def _body(self, status: str) -> dict[str, Any]:
        fields, ended = self.fields, status != "in_progress"
        return {
            "id": self.generation.response_id,
            "object": "response",
            "created_at": self.generation.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": self.generation.model,
            "output": self.items.output if ended else [],
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": self.params.temperature,
            "text": {"format": (fields.text.format if fields.text is not None else None) or {"type": "text"}},
            "tool_choice": fields.tool_choice if fields.tool_choice is not None else "auto",
            "tools": fields.tools or [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
