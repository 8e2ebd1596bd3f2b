"""Submission of a request's prompts to the engine, and progress of the answers, for all kinds of completion."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from windlass.base.errors import EngineOverloadedError, RequestError
from windlass.base.log import logger
from windlass.inference.outputs import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs
from windlass.inference.sampling_params import SamplingParams, TokenTexts
from windlass.inference.scheduler import ServiceLevel
from windlass.serving.api_errors import ApiError
from windlass.serving.event_stream import merge
from windlass.serving.request_fields import SamplingFields
from windlass.serving.server_context import ServerContext

_MAX_ENTRIES = 2**21
_MOST_WINDOWS = 16  # length of the longest text of which a part is kept, in context windows
NO_TOKENIZER = "the model has no tokenizer"


@dataclass(frozen=True)
class AnswerPiece:
    """Part of an answer that is new since the last event."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    text_offsets: list[int] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    @property
    def num_logprobs(self) -> int:
        """Number of log-probabilities. A piece has all tokens since the previous piece, so a slow client gets many."""
        return sum(map(len, self.logprobs or ()))


@dataclass
class AnswerProgress:
    """Progress of one answer: the part that was already sent."""

    characters: int = 0
    tokens: int = 0
    finished: bool = False

    def advance(self, output: CompletionOutput) -> AnswerPiece | None:
        """Return the part of an answer that was not sent; None if there is none."""
        if self.finished:
            return None
        text = output.text[self.characters :]
        tokens = output.token_ids[self.tokens :]
        logprobs = output.logprobs[self.tokens : self.tokens + len(tokens)] if output.logprobs is not None else None
        offsets = None if output.text_offsets is None else output.text_offsets[self.tokens :]
        self.finished = output.finished()
        if not text and not self.finished and not (tokens and logprobs):
            return None  # the new tokens give no text yet, e.g. in the middle of a character
        self.characters += len(text)
        self.tokens += len(tokens)
        return AnswerPiece(text, tokens, logprobs, offsets, output.finish_reason, output.stop_reason)


@dataclass
class Generation:
    """Prompts of one HTTP request in the engine.

    Attributes:
        request_id: id of the HTTP request, for the log.
        model: name of the model in the answer.
        constraint_field: field of the request that constrains the text, for errors about it.
        outputs: latest state of each prompt, by the index of the prompt.
    """

    context: ServerContext
    request_id: str
    response_id: str
    model: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    lora_name: str | None = None
    priority: int = 0
    sla: ServiceLevel | None = None
    constraint_field: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    async def stream(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield the state of a prompt's answers whenever they have grown, with the index of the prompt.

        Raises:
            ApiError: the engine ended a request with an error.
            RequestError, EngineOverloadedError: the engine refuses a prompt, or sampling parameters exclude all tokens.
        """
        bad_words = await self._encode_bad_words()
        starts = [self._start(index, bad_words) for index in range(len(self.prompts))]
        async with contextlib.aclosing(merge(starts)) as states:
            try:
                async for index, output in states:
                    self.outputs[index] = output
                    if output.error is not None and output.retry_after is not None:
                        raise EngineOverloadedError(output.error, retry_after=output.retry_after)
                    if output.error is not None and output.is_request_error:
                        raise RequestError(output.error)
                    if output.error is not None:
                        logger.error("request %s failed in the engine: %s", self.request_id, output.error)
                        raise ApiError(
                            500,
                            f"the engine failed; the server's log has the cause under the id {self.request_id}",
                            code="internal_error",
                        )
                    yield index, output
            except EngineOverloadedError:
                self.context.metrics.rejections.inc()
                raise
            except RequestError as error:
                if error.parameter != "structured_outputs" or self.constraint_field is None:
                    raise
                raise ApiError(400, str(error), parameter=self.constraint_field) from error

    async def finish(self) -> list[RequestOutput]:
        """Wait for all answers and return them in the order of the prompts."""
        async with contextlib.aclosing(self.stream()) as states:
            async for _ in states:
                pass
        return [self.outputs[index] for index in range(len(self.prompts))]

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields with which a response or an event begins."""
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens so far; see `usage_of`."""
        return usage_of(self.outputs.values())

    async def _encode_bad_words(self) -> TokenTexts | None:
        """Return the tokens of the request's bad words, which all prompts share; None: the request has none."""
        params = self.params[0]
        if not params.bad_words:
            return None
        return await self.context.in_tokenizer_thread(lambda: self.context.engine.encode_bad_words(params))

    async def _start(self, index: int, bad_words: TokenTexts | None) -> AsyncIterator[RequestOutput]:
        stream = self.context.engine.stream(
            self.prompts[index],
            self.params[index],
            request_id=uuid.uuid4().hex,
            lora_name=self.lora_name,
            priority=self.priority,
            sla=self.sla,
            bad_words=bad_words,
        )
        seen: dict[int, tuple[float, int]] = {}  # time of the newest token, and number of tokens, by answer
        try:
            async for output in stream:
                self._observe_tokens(output, seen)
                if output.finished:
                    self.context.metrics.observe_finished(output)
                yield output
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    def _observe_tokens(self, output: RequestOutput, seen: dict[int, tuple[float, int]]) -> None:
        """Add the times of new tokens to the metrics."""
        metrics, now = self.context.metrics, output.metrics.last_token_time
        if now is None:
            return
        if not seen:
            metrics.observe_first_token(output.metrics)
        for answer in output.outputs:
            count = len(answer.token_ids)
            before, known = seen.get(answer.index, (None, 0))
            if count > known:
                if before is not None:
                    metrics.observe_token_gap(max(0.0, now - before), count - known)
                seen[answer.index] = now, count


def start_generation(
    request: Request,
    fields: SamplingFields,
    prompts: list[list[int]],
    params: SamplingParams,
    kind: str,
    constraint_field: str | None,
) -> Generation:
    """Check the lengths of the prompts and return their generation.

    Args:
        kind: beginning of the response's id.
        constraint_field: field of the request that constrains the text; None without one.

    Raises:
        ApiError: the model is unknown, a prompt is empty or too long, or a value exceeds a limit of the server.
    """
    context: ServerContext = request.app.state.context
    _check_entries(params, len(prompts))
    field = "prompt" if kind == "cmpl" else "messages"
    prompts = [params.truncate_prompt(prompt, context.engine.max_model_len) for prompt in prompts]
    return Generation(
        context,
        request_id=request.state.request_id,
        response_id=f"{kind}-{fields.request_id or uuid.uuid4().hex}",
        model=fields.model or context.settings.model_names[0],
        prompts=prompts,
        params=[_bounded(context, prompt, params, field) for prompt in prompts],
        lora_name=context.lora_of(fields.model),
        priority=fields.priority or 0,
        sla=fields.service_level(),
        constraint_field=constraint_field,
    )


def _check_entries(params: SamplingParams, prompts: int) -> None:
    """Raise an ApiError if a token list, copied for each of several prompts, has too many entries in total."""
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
        entries = len(getattr(params, name) or ())
        if prompts > 1 and entries * prompts > _MAX_ENTRIES:
            raise ApiError(
                400,
                f"{name} has {entries:,} entries for each of {prompts} prompts; this server takes {_MAX_ENTRIES:,} "
                "together: send fewer prompts in a request",
                parameter=name,
            )


def _bounded(context: ServerContext, prompt: list[int], params: SamplingParams, field: str) -> SamplingParams:
    """Return the parameters with a maximum number of tokens that fits the context window.

    Args:
        field: name of the request's field with the prompt.
    """
    window = context.engine.max_model_len
    left = window - len(prompt)
    if not prompt:
        raise ApiError(400, "the prompt has no tokens; send some text", parameter=field)
    if left < 1 or (params.max_tokens is not None and params.max_tokens > left):
        # without room for an answer, `max_tokens` is not the problem, so the message leaves it out
        asked = f" and max_tokens is {params.max_tokens:,}" if left >= 1 else ""
        raise ApiError(
            400,
            # clients search for these words of OpenAI's error, then shorten the conversation and try again
            f"the prompt has {len(prompt):,} tokens{asked}; this model's maximum context length is {window} tokens"
            + (", of prompt and answer together" if asked else ""),
            parameter="max_tokens" if left >= 1 else field,
            code="context_length_exceeded",
        )
    limit = context.settings.max_output_tokens
    for name, tokens in (("min_tokens", params.min_tokens), ("max_tokens", params.max_tokens)):
        if limit is not None and tokens is not None and tokens > limit:
            raise ApiError(400, f"{name} is {tokens:,}; this server allows {limit:,}: lower it", parameter=name)
    if params.max_tokens is None:
        params = params.replace(max_tokens=max(left if limit is None else min(left, limit), params.min_tokens))
    return params


async def encode_text(
    context: ServerContext, text: str, add_special_tokens: bool, field: str, *, truncates: bool = False
) -> list[int]:
    """Return the tokens of a text.

    Args:
        field: name of the request's field with the text.
        truncates: True: the caller keeps a part of the tokens, so the text may be some times longer than the window.

    Raises:
        ApiError: the model has no tokenizer, or none that has tokens for all of the text; the text is not valid
            Unicode, or cannot fit the context window.
    """
    tokenizer, window = context.engine.tokenizer, context.engine.max_model_len
    if tokenizer is None:
        raise ApiError(400, f"{NO_TOKENIZER}; send token ids", code="no_tokenizer")
    least = context.least_tokens(text)
    if least > window * (_MOST_WINDOWS if truncates else 1):  # megabytes of text would occupy the tokenizer for seconds
        raise ApiError(
            400,
            f"the text of {len(text):,} characters has at least {least:,} tokens; this model's maximum context length "
            f"is {window} tokens",
            parameter=field,
            code="context_length_exceeded",
        )
    try:
        ids: list[int] = list(
            await context.in_tokenizer_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))
        )
    except (TypeError, UnicodeError) as error:
        # the text has e.g. a lone surrogate that a template decoded from a nested escape sequence
        raise ApiError(400, f"the text of the prompt is not valid Unicode: {error}", code="invalid_text") from error
    if None in ids:
        raise ApiError(
            400,
            "the model's tokenizer has no token for a part of the text, and no unk_token; leave that part out",
            parameter=field,
            code="invalid_text",
        )
    return ids


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Return the number of tokens of prompts and answers, in OpenAI's form."""
    prompt = generated = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        cached += output.num_cached_tokens
        generated += sum(len(one.token_ids) for one in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
