"""Endpoint `/v1/embeddings`."""

from __future__ import annotations

import base64
import struct
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from windlass.base.errors import EngineOverloadedError
from windlass.inference.sampling_params import check_truncation
from windlass.serving.api_errors import ApiError, json_response
from windlass.serving.completions_endpoint import normalize_prompts
from windlass.serving.event_stream import until_disconnect
from windlass.serving.generation import encode_text
from windlass.serving.request_body import read_request
from windlass.serving.request_fields import RequestModel
from windlass.serving.server_context import ServerContext


class EmbeddingRequest(RequestModel):
    """Fields of an embedding request.

    Attributes:
        input: a text, a list of texts, token ids, or a list of lists of token ids.
        encoding_format: "float", or "base64" for little-endian float32.
        dimensions: length of shortened vectors; refused.
        truncate_prompt_tokens: number of tokens of each text that are kept, from its end; -1: the context window.
    """

    input: Any
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None


async def create_embeddings(request: Request) -> Response:
    """Return one vector for each text."""
    context: ServerContext = request.app.state.context
    fields, form, given = await read_request(
        request, context.settings.max_body_bytes, lambda data: _check(context, EmbeddingRequest.parse(data))
    )
    kept, window = fields.truncate_prompt_tokens, context.engine.max_model_len
    prompts = [
        one if isinstance(one, list) else await encode_text(context, one, True, "input", truncates=kept is not None)
        for one in given
    ]
    if kept is not None:
        prompts = [prompt[-(window if kept == -1 else kept) :] for prompt in prompts]
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ApiError(400, f"input.{index} has no tokens; send some text", parameter="input")
        if len(prompt) > window:
            raise ApiError(
                400,
                f"input.{index} has {len(prompt):,} tokens; this model's maximum context length is {window} tokens",
                parameter="input",
                code="context_length_exceeded",
            )
    try:
        vectors = await until_disconnect(request, context.engine.embed(prompts))
    except EngineOverloadedError:
        context.metrics.rejections.inc()
        raise
    data = [
        {"object": "embedding", "index": index, "embedding": _encode(vector, form)}
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(len(prompt) for prompt in prompts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    model = fields.model or context.settings.model_names[0]
    return json_response({"object": "list", "data": data, "model": model, "usage": usage})


def _check(context: ServerContext, fields: EmbeddingRequest) -> tuple[EmbeddingRequest, str, list[str | list[int]]]:
    """Return the fields, the encoding of vectors (`float` or `base64`), and the texts or token ids."""
    if context.lora_of(fields.model) is not None:
        raise ApiError(400, "embeddings of an adapter are not supported; name the base model", parameter="model")
    if fields.dimensions is not None:
        raise ApiError(
            400,
            "dimensions is not supported: the model's vectors have one size; leave it out",
            parameter="dimensions",
            code="unsupported_parameter",
        )
    check_truncation(fields.truncate_prompt_tokens)
    form = fields.encoding_format or "float"
    if form not in ("float", "base64"):
        raise ApiError(400, f"encoding_format is {form[:80]!r}; write float or base64", parameter="encoding_format")
    return fields, form, normalize_prompts(fields.input, "input", context.settings.max_prompts)


def _encode(vector: list[float], form: str) -> list[float] | str:
    if form == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
