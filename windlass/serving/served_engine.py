"""Protocol of the engine behind the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from windlass.inference.outputs import EngineStats, RequestOutput
from windlass.inference.sampling_params import SamplingParams, TokenTexts
from windlass.inference.scheduler import ServiceLevel


class ServedEngine(Protocol):
    """Engine that runs many requests at once on one event loop."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers; None if the model has none."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""

    @property
    def max_queued(self) -> int | None:
        """Largest number of waiting requests; further ones are refused. None: no limit."""

    @property
    def lora_names(self) -> Sequence[str]:
        """Names of the loaded adapters."""

    @property
    def is_healthy(self) -> bool:
        """False once the engine cannot run any further step."""

    @property
    def error(self) -> BaseException | None:
        """Cause of the failure; None while the engine is healthy."""

    async def start(self) -> None:
        """Begin to run steps."""

    async def shutdown(self, drain: bool) -> None:
        """Stop the engine. If `drain` is set, finish the running requests first."""

    def stream(
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
        """Yield the state of a request after each step that changed it, with all tokens and all text so far.

        Closing the iterator, or cancelling its task, cancels the request.

        Args:
            bad_words: tokens of `params.bad_words`, from `encode_bad_words`; None: the engine encodes the words.

        Raises:
            RequestError: the input is invalid; raised before the first item.
            EngineOverloadedError: the queue is full; raised before the first item.
        """

    def encode_bad_words(self, params: SamplingParams) -> TokenTexts:
        """Return the tokens of each bad word of `params`. Called on the tokenizer's thread."""

    def stats(self) -> EngineStats:
        """Return counters and gauges."""

    async def embed(self, prompts: list[list[int]]) -> list[list[float]]:
        """Return one vector for each prompt."""
