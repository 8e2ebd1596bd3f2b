"""Endpoint `/v1/completions`."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from windlass.base.text import one_line
from windlass.inference.detokenizer import text_offsets
from windlass.inference.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from windlass.inference.sampling_params import SamplingParams
from windlass.serving.api_errors import ApiError, json_response
from windlass.serving.event_stream import DONE, encode_event, start_event_stream, until_disconnect
from windlass.serving.generation import AnswerPiece, AnswerProgress, Generation, encode_text, start_generation
from windlass.serving.logprob_format import LogprobFormat
from windlass.serving.long_answer import build_answer, count_entries
from windlass.serving.request_body import check_fields, read_request
from windlass.serving.request_fields import SamplingFields
from windlass.serving.server_context import ServerContext

_DEFAULT_MAX_TOKENS = 16
_KIND = "text_completion"


class CompletionRequest(SamplingFields):
    """Fields of a completion.

    Attributes:
        prompt: a text, a list of texts, token ids, or a list of lists of token ids.
        echo: begin the answer with the prompt.
        suffix: text after the answer; refused.
        logprobs: number of likeliest tokens whose log-probabilities are returned at each position; None: no
            log-probabilities.
        add_special_tokens: let the tokenizer add its beginning-of-text token.
    """

    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


async def create_completion(request: Request) -> Response:
    """Complete one or several prompts, at once or as a stream of events."""
    context: ServerContext = request.app.state.context
    fields, given = await read_request(
        request, context.settings.max_body_bytes, lambda data: _check(context, CompletionRequest.parse(data))
    )
    special, truncates = fields.add_special_tokens is not False, fields.truncate_prompt_tokens is not None
    prompts = [
        one if isinstance(one, list) else await encode_text(context, one, special, "prompt", truncates=truncates)
        for one in given
    ]
    generation = await check_fields(request, lambda: _start(request, fields, prompts))
    texts = [
        one if isinstance(one, str) and len(kept) == len(whole) else None
        for one, whole, kept in zip(given, prompts, generation.prompts, strict=True)
    ]
    completion = _Completion(generation, fields, texts, context.engine.tokenizer)
    if fields.stream:
        return await start_event_stream(request, completion.events())
    return await until_disconnect(request, completion.response())


def _start(request: Request, fields: CompletionRequest, prompts: list[list[int]]) -> Generation:
    if fields.suffix:
        raise ApiError(400, "suffix is not supported; leave it out", parameter="suffix", code="unsupported_parameter")
    max_tokens = fields.max_tokens
    context: ServerContext = request.app.state.context
    if fields.truncate_prompt_tokens is not None:  # before the default of `max_tokens`, which depends on the lengths
        cut = SamplingParams(
            max_tokens=max_tokens or _DEFAULT_MAX_TOKENS, truncate_prompt_tokens=fields.truncate_prompt_tokens
        )
        prompts = [cut.truncate_prompt(prompt, context.engine.max_model_len) for prompt in prompts]
    if max_tokens is None:
        left = context_left(context, prompts)
        allowed = min(_DEFAULT_MAX_TOKENS, left, context.settings.max_output_tokens or left)
        max_tokens = max(allowed, fields.min_tokens or 0)
    values: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": fields.logprobs}
    if fields.echo:
        # max_tokens = 0: evaluation harnesses use only the prompt's log-probabilities. One token is made, not returned.
        values["max_tokens"] = 1 if max_tokens == 0 else max_tokens
        if fields.logprobs is not None:
            values["prompt_logprobs"] = fields.logprobs
    return start_generation(request, fields, prompts, fields.sampling_params(**values), "cmpl", fields.constraint_field)


def context_left(context: ServerContext, prompts: list[list[int]]) -> int:
    """Return the number of tokens that the context window has left after the longest prompt; at least 1."""
    return max(1, context.engine.max_model_len - max((len(prompt) for prompt in prompts), default=0))


def _check(context: ServerContext, fields: CompletionRequest) -> tuple[CompletionRequest, list[str | list[int]]]:
    """Return the fields, and each prompt as text or tokens."""
    context.lora_of(fields.model)
    max_prompts, max_queued = context.settings.max_prompts, context.engine.max_queued
    # refuse at once, because no retry of a request with more prompts than the queue can hold would succeed
    most = max_prompts if max_queued is None else min(max_prompts, max_queued)
    return fields, normalize_prompts(fields.prompt, "prompt", most)


def normalize_prompts(given: Any, name: str, max_prompts: int) -> list[str | list[int]]:
    """Return the prompts of a request, each a text or a list of tokens, from any of OpenAI's four forms.

    Raises:
        ApiError: `given` has another form, or too many prompts.
    """
    if isinstance(given, str) or (isinstance(given, list) and given and all(_is_token(one) for one in given)):
        return [given]
    if not isinstance(given, list) or not given:
        shown = one_line(repr(given), 80)
        raise ApiError(400, f"{name} is {shown}; send a text, a list of texts, or token ids", parameter=name)
    if len(given) > max_prompts:
        raise ApiError(
            400, f"{name} has {len(given):,} entries; this server allows {max_prompts:,}: send fewer", parameter=name
        )
    for index, one in enumerate(given):
        tokens = isinstance(one, list) and all(_is_token(token) for token in one)
        if not (isinstance(one, str) or tokens):
            shown = one_line(repr(one), 80)
            raise ApiError(400, f"{name}.{index} is {shown}; send a text or a list of token ids", parameter=name)
    return given


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


@dataclass
class _Completion:
    """Answer to one request. Any thread decodes its tokens: see [Note: tokenizer threads]."""

    generation: Generation
    fields: CompletionRequest
    texts: list[str | None]
    tokenizer: Any

    def __post_init__(self) -> None:
        self._logprobs = LogprobFormat(self.tokenizer, bool(self.fields.return_tokens_as_token_ids))
        self._echoes: dict[int, str] = {}  # decoded texts of prompts that came as tokens, by index
        self._prompt_only = bool(self.fields.echo) and self.fields.max_tokens == 0

    async def response(self) -> Response:
        outputs = await self.generation.finish()
        entries = count_entries(outputs, copies=self.generation.params[0].n)
        return await build_answer(entries, partial(self._response, outputs))

    def _response(self, outputs: list[RequestOutput], is_long: bool) -> Response:
        choices = [
            self._choice(prompt, output, prompt * len(output.outputs) + one.index, one)
            for prompt, output in enumerate(outputs)
            for one in sorted(output.outputs, key=lambda one: one.index)
        ]
        body = {**self.generation.head(_KIND), "choices": choices, "usage": self._usage()}
        return json_response(body, is_long=is_long)

    def _choice(self, prompt: int, output: RequestOutput, index: int, answer: CompletionOutput) -> dict[str, Any]:
        piece = AnswerProgress().advance(answer) or AnswerPiece("", [], None, None, answer.finish_reason, None)
        choice = self._piece_as_json(prompt, output, index, piece, is_first=True)
        if self.fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_as_json(output)
        return choice

    async def events(self) -> AsyncGenerator[bytes, None]:
        progress: defaultdict[int, AnswerProgress] = defaultdict(AnswerProgress)
        begun: set[int] = set()
        answers = self.fields.n or 1
        head = self.generation.head(_KIND)
        async with contextlib.aclosing(self.generation.stream()) as states:
            async for prompt, output in states:
                for answer in output.outputs:
                    index = prompt * answers + answer.index
                    piece = progress[index].advance(answer)
                    if piece is None:
                        continue
                    is_first = index not in begun
                    begun.add(index)
                    build = partial(self._event, head, prompt, output, index, piece, is_first=is_first)
                    # only the first event can have the prompt
                    entries = count_entries([output]) if is_first else piece.num_logprobs
                    yield await build_answer(entries, build)
        if self.fields.wants_usage_event:
            yield encode_event({**head, "choices": [], "usage": self._usage()})
        yield DONE

    def _event(
        self,
        head: dict[str, Any],
        prompt: int,
        output: RequestOutput,
        index: int,
        piece: AnswerPiece,
        is_long: bool,
        *,
        is_first: bool,
    ) -> bytes:
        choice = self._piece_as_json(prompt, output, index, piece, is_first=is_first)
        event = {**head, "choices": [choice]}
        if self.fields.wants_usage_event or self.fields.wants_usage_in_each_event:
            event["usage"] = self._usage() if self.fields.wants_usage_in_each_event else None
        return encode_event(event, is_long=is_long)

    def _usage(self) -> dict[str, Any]:
        usage = self.generation.usage()
        if self._prompt_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _echo(self, prompt: int, output: RequestOutput) -> str:
        text = self._echoes.get(prompt, self.texts[prompt])
        if text is None:
            text = "" if self.tokenizer is None else str(self.tokenizer.decode(output.prompt_token_ids))
            self._echoes[prompt] = text
        return text

    def _echo_offsets(self, prompt: int, output: RequestOutput) -> list[int]:
        """Return the offset of each prompt token in the prompt's text. The text of a prompt that
        came as token ids includes special tokens.
        """
        if self.tokenizer is None:
            return [0] * len(output.prompt_token_ids)
        has_text = self.texts[prompt] is not None
        return text_offsets(self.tokenizer, output.prompt_token_ids, skip_special_tokens=has_text)

    def _piece_as_json(
        self, prompt: int, output: RequestOutput, index: int, piece: AnswerPiece, *, is_first: bool
    ) -> dict[str, Any]:
        text, tokens = piece.text, piece.tokens
        rows: list[TokenLogprobs | None] = [*(piece.logprobs or [])]
        begin = len(self._echo(prompt, output)) if self.fields.echo else 0
        offsets = [begin + offset for offset in piece.text_offsets or [0] * len(tokens)]
        if self._prompt_only:
            text, tokens, rows, offsets = "", [], [], []
        if is_first and self.fields.echo:
            text = self._echo(prompt, output) + text
            tokens = [*output.prompt_token_ids, *tokens]
            rows = [*(output.prompt_logprobs or []), *rows]
            if self.fields.logprobs is not None:
                offsets = [*self._echo_offsets(prompt, output), *offsets]
        shown = None
        if self.fields.logprobs is not None:
            shown = self._logprobs.completion(tokens, rows, self.fields.logprobs, offsets)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": "length" if self._prompt_only and piece.finish_reason else piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.fields.return_token_ids:
            choice["token_ids"] = [] if self._prompt_only else piece.tokens
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice


def prompt_logprobs_as_json(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of the prompt in vLLM's form; None if the request has none."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if row is None
        else {
            str(token): {"logprob": max(one.logprob, -9999.0), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in row.items()
        }
        for row in output.prompt_logprobs
    ]
