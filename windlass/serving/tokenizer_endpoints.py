"""Endpoints `/tokenize` and `/detokenize`, in vLLM's form."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from windlass.serving.api_errors import ApiError, json_response
from windlass.serving.chat_prompt import parse_tools
from windlass.serving.chat_request import ChatFields, encode_chat
from windlass.serving.generation import NO_TOKENIZER, encode_text
from windlass.serving.request_body import read_request
from windlass.serving.request_fields import ListField, RequestModel
from windlass.serving.server_context import ServerContext


class TokenizeRequest(RequestModel):
    """Fields of a request for the tokens of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatFields):
    """Fields of a request for the tokens of a conversation."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """Fields of a request for the text of tokens."""

    tokens: ListField[int]
    model: str | None = None


async def tokenize(request: Request) -> Response:
    """Return the tokens of a text or a conversation."""
    context: ServerContext = request.app.state.context
    fields = await read_request(request, context.settings.max_body_bytes, _parse_tokenize)
    context.lora_of(fields.model)
    if isinstance(fields, TokenizeChatRequest):
        tokens = await encode_chat(context, fields, parse_tools(fields.tools))
    else:
        tokens = await encode_text(context, fields.prompt, fields.add_special_tokens is not False, "prompt")
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": context.engine.max_model_len, "tokens": tokens}
    if fields.return_token_strs:  # runs on the event loop, which is safe: see [Note: tokenizer threads]
        answer["token_strs"] = context.engine.tokenizer.convert_ids_to_tokens(tokens)
    return json_response(answer)


def _parse_tokenize(data: dict[str, Any]) -> TokenizeChatRequest | TokenizeRequest:
    return TokenizeChatRequest.parse(data) if "messages" in data else TokenizeRequest.parse(data)


async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    context: ServerContext = request.app.state.context
    fields = await read_request(request, context.settings.max_body_bytes, DetokenizeRequest.parse)
    context.lora_of(fields.model)
    tokenizer = context.engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, NO_TOKENIZER, code="no_tokenizer")
    text = await context.in_tokenizer_thread(lambda: _decode(tokenizer, fields.tokens))
    return json_response({"prompt": text})


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    size = len(tokenizer)
    for index, token in enumerate(tokens):
        if not 0 <= token < size:
            raise ApiError(400, f"tokens.{index} is {token}; the tokenizer has {size:,} tokens", parameter="tokens")
    return str(tokenizer.decode(tokens))
