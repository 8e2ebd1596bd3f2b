"""Engine of the server's protocol without a model: it answers with the characters of the prompt, one token a step."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from windlass.base.errors import ConfigError, EngineOverloadedError, RequestError
from windlass.inference.outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from windlass.inference.sampling_params import SamplingParams, TokenTexts
from windlass.inference.scheduler import ServiceLevel

TEMPLATE = (
    "{% if tools %}[tools:{% for tool in tools %}{{ tool.function.name }} {% endfor %}]{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' and not message.tool_call_id %}"
    "{{ raise_exception('a tool message needs tool_call_id') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls or [] %}"
    "({{ call.function.name }}:{{ call.function.arguments.city }}){% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class CharacterTokenizer:
    """Tokenizer with one token for each code point, and token 1 before the text."""

    bos = 1

    def __init__(self, chat_template: str | None = TEMPLATE) -> None:
        self.chat_template = chat_template

    def __len__(self) -> int:
        return sys.maxunicode + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.bos] * add_special_tokens + [ord(character) for character in text]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(token) for token in tokens if token != self.bos)

    def convert_ids_to_tokens(self, tokens: Any) -> Any:
        return chr(tokens) if isinstance(tokens, int) else [chr(token) for token in tokens]

    def apply_chat_template(
        self, messages: Any, chat_template: str | None = None, *, tokenize: bool, **arguments: Any
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        tools = arguments.pop("tools", None)
        template = chat_template or self.chat_template
        texts, _ = render_jinja_template([messages], tools=tools, chat_template=template, **arguments)
        return texts[0]


class FakeEngine:
    """Engine that answers with `answer`, or with the prompt's own characters, again and again.

    Args:
        step_seconds: time of a step.
        max_running: number of requests; further ones are refused.
        answer: text of all answers.
        fails_at: prompt at which the engine dies.
        gate: file that must exist for a request to go beyond its first token.
    """

    def __init__(
        self,
        *,
        step_seconds: float = 0.0,
        max_running: int = 1000,
        max_model_len: int = 512,
        answer: str | None = None,
        lora_names: tuple[str, ...] = (),
        tokenizer: CharacterTokenizer | None = None,
        fails_at: str | None = None,
        gate: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer or CharacterTokenizer()
        self.max_model_len = max_model_len
        self.max_queued: int | None = None
        self.lora_names = list(lora_names)
        self.answer = answer
        self.fails_at = fails_at
        self.gate = gate
        self.step_seconds = step_seconds
        self.max_running = max_running
        self.running: dict[str, asyncio.Event] = {}
        self.seen: list[tuple[list[int], SamplingParams, str | None, int]] = []
        self.bad_words: list[TokenTexts | None] = []
        self.finished: Counter[str] = Counter()
        self.tokens = Counter[str]()
        self.is_healthy = True
        self.error: BaseException | None = None
        self.is_started = False

    async def start(self) -> None:
        self.is_started = True

    async def shutdown(self, drain: bool) -> None:
        self.is_started = False

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            self.running[request_id].set()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            kv_cache_usage=min(1.0, len(self.running) / max(1, self.max_running)),
            prompt_tokens=self.tokens["prompt"],
            generation_tokens=self.tokens["generated"],
            steps=self.tokens["generated"],
            step_tokens=self.tokens["generated"],
            finished=dict(self.finished),
        )

    def encode_bad_words(self, params: SamplingParams) -> TokenTexts:
        return tuple(tuple(self.tokenizer.encode(word, False)) for word in params.bad_words or ())

    async def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        return [[float(len(prompt)), 0.5, -1.0] for prompt in prompts]

    async def stream(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        lora_name: str | None = None,
        priority: int = 0,
        sla: ServiceLevel | None = None,
        bad_words: TokenTexts | None = None,
    ) -> AsyncIterator[RequestOutput]:
        request_id = request_id or "only"
        prompt = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        assert request_id not in self.running
        if len(self.running) >= self.max_running:
            raise EngineOverloadedError("the queue is full")
        if max(prompt) >= len(self.tokenizer):
            raise RequestError(f"token {max(prompt)} is not in the vocabulary", parameter="prompt")
        self.seen.append((prompt, params, lora_name, priority))
        self.bad_words.append(bad_words)
        cancelled = self.running[request_id] = asyncio.Event()
        self.tokens["prompt"] += len(prompt)
        metrics = RequestMetrics(time.monotonic(), time.monotonic())
        reason: str = "abort"
        try:
            for count in range(1, (params.max_tokens or 16) + 1):
                if self.fails_at is not None and self.tokenizer.decode(prompt) == self.fails_at:
                    self.is_healthy, self.error = False, RuntimeError("the device is gone")
                if self.error is not None:
                    raise self.error
                await asyncio.sleep(self.step_seconds)
                while count > 1 and self.gate and not os.path.exists(self.gate) and not cancelled.is_set():
                    await asyncio.sleep(0.01)
                output = self._state(request_id, prompt, params, count, metrics, cancelled.is_set())
                self.tokens["generated"] += params.n
                yield output
                if output.finished:
                    reason = output.outputs[0].finish_reason or "stop"
                    return
        finally:
            self.finished[reason] += 1
            del self.running[request_id]

    def _state(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        count: int,
        metrics: RequestMetrics,
        cancelled: bool,
    ) -> RequestOutput:
        metrics.last_token_time = time.monotonic()
        metrics.first_token_time = metrics.first_token_time or metrics.last_token_time
        text = self.answer
        if text is None:
            text = self.tokenizer.decode(prompt) or "x"
            text *= 1 + (params.max_tokens or 16) // len(text)
        finish: FinishReason | None = "length" if count == params.max_tokens else None
        stop_reason = None
        if self.answer is not None and count >= len(text):
            finish = "stop"
        shown = text[:count]
        for stop in params.stops:
            if stop in shown:
                shown, finish, stop_reason = shown[: shown.index(stop)], "stop", stop
        finish = "abort" if cancelled else finish
        tokens = [ord(character) for character in text[:count]]
        outputs = [
            CompletionOutput(
                index,
                shown,
                tokens,
                logprobs=None if params.logprobs is None else [self._row(one, params.logprobs) for one in tokens],
                finish_reason=finish,
                stop_reason=stop_reason,
                text_offsets=None if params.logprobs is None else list(range(count)),
            )
            for index in range(params.n)
        ]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._row(one, params.prompt_logprobs) for one in prompt[1:])]
        if finish:
            metrics.finished_time = time.monotonic()
        return RequestOutput(request_id, None, prompt, prompt_logprobs, outputs, finish is not None, metrics)

    def _row(self, token: int, top: int) -> dict[int, Logprob]:
        """Return log-probabilities of the drawn token, which has rank 2, and of likelier and less likely tokens."""
        row = {token: Logprob(-1.0, 2, chr(token))}
        for rank in range(top):
            if rank != 1:
                row[token + 1 + rank] = Logprob(-0.5 - rank, rank + 1, chr(token + 1 + rank))
        row[token + 999] = Logprob(-math.inf, 999, "?")
        return row


def make_fake_engine(model: str, **options: Any) -> FakeEngine:
    """Return a fake engine, for the server processes of tests. The models "broken", "bug" and "dies" fail here."""
    if model == "broken":
        raise ConfigError("the model is broken")
    if model == "bug":
        raise ZeroDivisionError("a bug at load")
    if model == "dies":
        code = options["exits"]
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    return FakeEngine(**options)
