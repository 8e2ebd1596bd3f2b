"""Results of requests, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
"""Reason for the end of an answer: `stop` (a stop text, stop token or end-of-sequence token, or the end of a structured
output), `length` (the maximum length), `abort` (cancellation) or `error`."""


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        rank: 1 for the likeliest token of the vocabulary.
        decoded_token: text of the token; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities of one position, by token id. The first is that of the drawn token, or of the prompt's token."""


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        token_ids: generated tokens, including a stop token or end-of-sequence token.
        cumulative_logprob: sum of the tokens' log-probabilities; None if the request has no `logprobs`.
        logprobs: one entry for each token; None if the request has no `logprobs`.
        finish_reason: None while the answer grows.
        stop_reason: the stop text or stop token that ended the answer; None if neither did.
        text_offsets: offset in `text` of each token's text; for a token that is a part of a character, the offset of
            the character. None without logprobs or text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] | None = None

    def finished(self) -> bool:
        """Return True if the answer is complete."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of a request in seconds of the engine's clock (by default `time.monotonic`), and counts.

    Attributes:
        arrival_time: time at which the request arrived.
        scheduled_time: time at which the request's first tokens entered a step; None: not yet.
        first_token_time, last_token_time: times of the first and the latest generated token; None: there is none.
        finished_time: time at which the request ended; None: not yet.
        num_cached_tokens: number of tokens of the prompt with keys and values in the prefix cache.
        num_preemptions: number of times that sequences of the request were preempted, i.e. lost their KV blocks.
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """State of a request, with all tokens generated so far.

    Attributes:
        prompt: text of the prompt; None if it was given as tokens.
        prompt_logprobs: one entry for each token of the prompt, the first None; None if the request has no
            `prompt_logprobs`.
        outputs: the answers; `n` of them once the request has finished, 1 if it ended before its prompt was computed.
        error: message of the error that ended the request; None: no error.
        is_request_error: True if the error is due to the request's own parameters or to load, not to the model.
        retry_after: seconds after which a request that was refused because of load may be sent again; None: it was not
            refused because of load.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    lora_name: str | None = None
    error: str | None = None
    is_request_error: bool = False
    retry_after: int | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were in the prefix cache."""
        return self.metrics.num_cached_tokens


@dataclass
class EmbeddingOutput:
    """Embedding of a prompt: the last hidden state of the last token, divided by the state's L2 norm."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of features."""
        return len(self.embedding)


@dataclass
class EmbeddingRequestOutput:
    """Embedding of one prompt, with the prompt's tokens."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass
class EngineStats:
    """Counters and gauges of an engine; counters only grow.

    Attributes:
        kv_cache_usage: share of the KV blocks that running requests hold, 0 to 1.
        prefix_cache_queries, prefix_cache_hits: numbers of tokens that were looked up in the prefix cache, and found.
        steps, step_tokens: number of forwards, and of the tokens in them.
        step_seconds, forward_seconds: seconds in steps, and the part of this time in forwards of the model. The latter
            does not include steps whose tokens are sampled on the device.
        idle_seconds: seconds in which an `AsyncLLMEngine` waited for requests.
        finished: number of ended answers by finish reason.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    kv_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0
    idle_seconds: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
