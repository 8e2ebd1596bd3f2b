"""State that all endpoints of a server share.

[Note: tokenizer threads] One thread encodes all texts of a server, because an encoding changes a tokenizer: its
settings of truncation and padding, and caches of slow tokenizers. Other threads decode meanwhile: the engine's thread,
the event loop and the threads of long answers (long_answer.py) call `decode` and `convert_ids_to_tokens`, which only
read the vocabulary, in fast tokenizers as in slow ones. The settings of a fast tokenizer must not change during such a
call ("Already borrowed" in older releases), so the server always encodes with the same settings, which
`ServerContext.attach` sets before the first request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from windlass.inference.token_bound import TokenBound
from windlass.serving.api_errors import ApiError
from windlass.serving.request_counter import RequestCounter, ServerPhase
from windlass.serving.served_engine import ServedEngine
from windlass.serving.server_metrics import ServerMetrics
from windlass.serving.server_settings import ServerSettings

Result = TypeVar("Result")


class ServerContext:
    """Engine, settings, metrics and phase of a server. `engine` is set once the model is loaded."""

    def __init__(self, settings: ServerSettings, engine: ServedEngine | None = None) -> None:
        self.settings = settings
        self.metrics = ServerMetrics(settings.model_names[0], settings.engine_index)
        self.requests = RequestCounter()
        self.created = int(time.time())
        self._engine: ServedEngine | None = None
        self._bound = TokenBound(None)
        # One thread: see [Note: tokenizer threads]. Also, long prompts do not block the event loop.
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        if engine is not None:
            self.attach(engine)

    @property
    def engine(self) -> ServedEngine:
        """Engine of the server.

        Raises:
            ApiError: the model is not loaded yet.
        """
        if self._engine is None:
            self.requests.refuse_unless_ready()
            raise ApiError(503, "the engine is not loaded yet; try again", code="loading", retry_after=5)
        return self._engine

    @property
    def loaded_engine(self) -> ServedEngine | None:
        """Engine, or None while the model is being loaded."""
        return self._engine

    def attach(self, engine: ServedEngine) -> None:
        """Serve a started engine from now on."""
        if engine.tokenizer is not None:
            # The first call sets truncation and padding: see [Note: tokenizer threads].
            engine.tokenizer.encode("a", add_special_tokens=False)
            self._bound = TokenBound(engine.tokenizer)
        self._engine = engine
        self.metrics.watch(engine)
        self.requests.phase = ServerPhase.READY

    async def in_tokenizer_thread(self, function: Callable[[], Result]) -> Result:
        """Run a function on the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_thread, function)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, much faster than tokenization."""
        return self._bound(text)

    def lora_of(self, model: str | None) -> str | None:
        """Return the adapter that a request's `model` names; None for the base model.

        Raises:
            ApiError: there is no such model.
        """
        if model is None or model in self.settings.model_names:
            return None
        if model in self.engine.lora_names:
            return model
        names = ", ".join([*self.settings.model_names, *self.engine.lora_names][:20])
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist; this server has {names}",
            parameter="model",
            code="model_not_found",
        )

    def close(self) -> None:
        """End the tokenizer's thread."""
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)
