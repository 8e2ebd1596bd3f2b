"""Engine for asyncio programs: a thread runs the steps, and each request has a stream of outputs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.errors import EngineOverloadedError, RequestError, WindlassError
from windlass.base.log import logger
from windlass.inference.embeddings import embed_prompts
from windlass.inference.engine_factory import make_engine
from windlass.inference.engine_options import EngineOptions
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.outputs import EngineStats, RequestOutput
from windlass.inference.sampling_params import SamplingParams, TokenTexts
from windlass.inference.scheduler import ServiceLevel
from windlass.inference.structured_output import OutputConstraint

_DRAIN_PAUSE = 0.001  # seconds between checks for a client's next embedding while the engine drains


class EngineStoppedError(WindlassError, RuntimeError):
    """Error of a request to an engine that was shut down or stopped by an error (the cause of this one)."""


@dataclass
class _Subscriber:
    """Receiver of a request's outputs. Only the newest output is stored, because each output has all tokens so far.

    Attributes:
        loop: event loop of the reader. Only the thread of this loop uses the other attributes.
    """

    loop: asyncio.AbstractEventLoop
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    newest: RequestOutput | BaseException | None = None

    def put(self, output: RequestOutput | BaseException) -> None:
        self.newest = output
        self.arrived.set()

    async def get(self) -> RequestOutput | BaseException:
        """Wait for and return an output that was not returned before, or the error that stopped the engine."""
        await self.arrived.wait()
        self.arrived.clear()
        assert self.newest is not None
        return self.newest


class AsyncLLMEngine:
    """Asyncio interface to an `LLMEngine` that runs in a separate thread.

    torch releases the interpreter lock while it computes, so the event loop answers clients during a step.

    Args:
        engine: engine that serves the requests. From `start` on, only the engine's thread changes it.

    Attributes:
        error: error that stopped the engine, or None.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._embeddings: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._embedding_clients: set[object] = set()  # one object for each call of `embed` in progress
        self._subscribers: dict[str, _Subscriber] = {}  # used by the engine's thread only
        self._unread: dict[str, _Subscriber] = {}  # used by the event loop's thread only
        self._ready: list[RequestOutput] = []  # outputs of the last step; used by the engine's thread only
        self._numbers = itertools.count()
        # Total seconds of the completed waits for requests, and start time of the wait in progress, or None.
        self._idle: tuple[float, float | None] = 0.0, None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._drains = False
        self._ended = False
        self.error: BaseException | None = None

    @classmethod
    def from_model(
        cls,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        dtype: Any = "auto",
        trust_remote_code: bool = False,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ) -> AsyncLLMEngine:
        """Load a model and build its engine; the arguments and errors are those of `LLM`.

        Raises:
            ConfigError: this rank is not the leader of a model on several ranks.
        """
        engine = make_engine(
            model,
            EngineOptions.from_arguments(**options),
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            skip_tokenizer=skip_tokenizer_init,
        )
        return cls(engine)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers, or None."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens of a prompt and its answer together."""
        return self._engine.max_model_len

    @property
    def max_queued(self) -> int | None:
        """Largest number of waiting requests; further ones are refused. None: no limit."""
        return self._engine.options.max_queued

    @property
    def lora_names(self) -> list[str]:
        """Names of the loaded adapters."""
        return self._engine.lora_names

    @property
    def is_healthy(self) -> bool:
        """True while the thread runs and no error has stopped the engine."""
        return self._is_alive()

    def _is_alive(self) -> bool:
        return self.error is None and self._thread is not None and self._thread.is_alive()

    async def start(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="windlass-engine", daemon=True)
            self._thread.start()

    async def shutdown(self, drain: bool = False) -> None:
        """Stop the thread and close the engine. New requests are refused.

        Args:
            drain: True: finish all requests and embeddings first; False: `outputs` and `embed` raise an
                `EngineStoppedError`.
        """
        self._stopping, self._drains = True, drain
        self._calls.put(None)
        thread = self._thread
        # the thread closes the engine when it ends; without a thread, close it here
        end = self._engine.close if thread is None else thread.join
        await asyncio.get_running_loop().run_in_executor(None, end)

    async def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        lora_name: str | None = None,
        priority: int = 0,
        sla: ServiceLevel | None = None,
        bad_words: TokenTexts | None = None,
    ) -> str:
        """Queue a request and return its id for `outputs`.

        The arguments without a description are those of `LLMEngine.add_request`.

        Args:
            request_id: id, unique among unfinished requests; None: an id is generated.
            sla: service level that the request declares.
            bad_words: tokens of `params.bad_words`, from `encode_bad_words`; None: `add` encodes the words.

        Raises:
            RequestError: the request cannot be served.
            EngineOverloadedError: the queue is full, or a request would wait too long (`enforce_max_wait`).
            EngineStoppedError: the engine has stopped, or was not started.
        """
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        loop = asyncio.get_running_loop()
        subscriber = _Subscriber(loop)
        params = params.clone()  # the caller may change its object before the engine's thread reads it
        constraint: OutputConstraint | None = None
        if params.structured_outputs is not None:
            # compile in another thread: a schema can take seconds, and other requests get their tokens meanwhile
            await self._call(self._engine.constraints.load)
            constraint = await asyncio.to_thread(self._engine.constraints.compile, params.structured_outputs)
        if bad_words is None and params.bad_words:  # encoding many words can take seconds too
            bad_words = await asyncio.to_thread(self.encode_bad_words, params)

        def add() -> None:
            self._engine.add_request(
                request_id,
                prompt,
                params,
                lora_name=lora_name,
                priority=priority,
                level=sla,
                streams=True,
                constraint=constraint,
                bad_words=bad_words,
            )
            self._subscribers[request_id] = subscriber

        try:
            await self._call(add)
        except asyncio.CancelledError:
            self._cancel(request_id, subscriber)
            raise
        self._unread[request_id] = subscriber
        return request_id

    async def outputs(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """Yield the newest output of a request, with all tokens so far, at each change until its end. Closing the
        iterator cancels the request.

        Raises:
            RequestError: no request of this id was added, or its outputs were read already.
            EngineStoppedError: the engine was shut down, or stopped by an error.
        """
        if request_id not in self._unread:
            raise RequestError(
                f"there are no unread outputs of a request {request_id!r}; call outputs once, after add",
                parameter="request_id",
            )
        subscriber = self._unread.pop(request_id)
        finished = False
        try:
            while not finished:
                output = await subscriber.get()
                if isinstance(output, BaseException):
                    finished = True
                    raise EngineStoppedError(f"the inference engine has stopped: {output}") from output
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._cancel(request_id, subscriber)

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        lora_name: str | None = None,
        priority: int = 0,
        sla: ServiceLevel | None = None,
        bad_words: TokenTexts | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Queue a request and yield its outputs; see `add` and `outputs`."""
        added = await self.add(
            prompt,
            params,
            request_id=request_id,
            lora_name=lora_name,
            priority=priority,
            sla=sla,
            bad_words=bad_words,
        )
        async with contextlib.aclosing(self.outputs(added)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output

    def cancel(self, request_id: str) -> None:
        """End a request before the next step, and free its KV blocks; unknown ids are ignored."""
        self._unread.pop(request_id, None)
        self._cancel(request_id)

    def _cancel(self, request_id: str, subscriber: _Subscriber | None = None) -> None:
        """End a request. If `subscriber` is given, end only a request with this subscriber: ids can be reused."""

        def cancel() -> None:
            if subscriber is not None and self._subscribers.get(request_id) is not subscriber:
                return
            output = self._engine.cancel(request_id)
            if output is not None:
                self._ready.append(output)  # the last output, for a task that still reads the stream
                self._deliver_ready()
            self._subscribers.pop(request_id, None)

        self._calls.put(cancel)

    def stats(self) -> EngineStats:
        """Return counters and gauges."""
        seconds, since = self._idle
        seconds += 0.0 if since is None else time.monotonic() - since
        return replace(self._engine.stats(), idle_seconds=seconds)

    async def add_lora(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter of peft between steps.

        Raises:
            ModelError: the adapter cannot be read, or does not fit the model.
            RequestError: an adapter of this name is loaded, the name is empty, or the engine takes no adapters (`pp`).
            EngineStoppedError: the engine has stopped, or was not started.
        """
        await self._call(lambda: self._engine.add_lora(name, directory))

    async def remove_lora(self, name: str) -> None:
        """Unload a LoRA adapter.

        Raises:
            RequestError: no adapter has this name, or unfinished requests use it.
            EngineStoppedError: the engine has stopped, or was not started.
        """
        await self._call(lambda: self._engine.remove_lora(name))

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the embedding of each prompt, a list of token ids: the normalized hidden state of its last token.

        Each prompt takes one forward. At most one of these forwards runs between two steps, so that requests get their
        tokens.

        Raises:
            RequestError: the model cannot embed, or a prompt is empty, too long, or has a token beyond the vocabulary.
            EngineOverloadedError: `max_queued` embeddings are waiting.
            EngineStoppedError: the engine has stopped, or was not started.
        """
        limit = self._engine.options.max_queued
        if limit is not None and self._embeddings.qsize() >= limit:
            raise EngineOverloadedError(f"{limit} embeddings are waiting, the maximum (max_queued); try again later")
        self._check_accepts(self._stopping)
        found: list[list[float]] = []
        own = object()
        self._embedding_clients.add(own)
        try:
            for prompt in prompts:
                found += await self._call(partial(embed_prompts, self._engine, [prompt]), self._embeddings)
        finally:
            self._embedding_clients.discard(own)
        return found

    def encode_bad_words(self, params: SamplingParams) -> TokenTexts:
        """Return the tokens of each bad word of `params`; several requests may share the result.

        Raises:
            RequestError: there are bad words and no tokenizer, or a word is not valid Unicode.
        """
        return self._engine.encode_bad_words(params)

    async def _call(
        self, function: Callable[[], Any], calls: queue.SimpleQueue[Callable[[], None]] | None = None
    ) -> Any:
        """Run a function in the engine's thread and return its result.

        Args:
            calls: queue that the function waits in, also while the engine drains; None: the queue of all calls that run
                before the next step.

        Raises:
            EngineStoppedError: the engine has stopped, or was not started. Errors of `function` are raised too.
        """
        self._check_accepts(self._stopping and not (self._drains and calls is not None))
        done: Future[Any] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                if self._ended:
                    raise EngineStoppedError("the inference engine has stopped; build another one") from self.error
                done.set_result(function())
            except Exception as error:  # the caller receives the error
                done.set_exception(error)

        if calls is not None:
            calls.put(run)
        self._calls.put(run if calls is None else None)  # wakes the thread
        waiting = asyncio.ensure_future(asyncio.wrap_future(done))
        try:
            while not (await asyncio.wait({waiting}, timeout=1))[0]:
                if not self._is_alive() and not done.running():  # the thread ended between the check and the call
                    run()
            return waiting.result()
        finally:
            waiting.cancel()

    def _check_accepts(self, is_stopping: bool) -> None:
        """Raise an EngineStoppedError if the engine was not started, has failed, or `is_stopping`."""
        if self._thread is None and not self._stopping:
            raise EngineStoppedError("the inference engine was not started: await engine.start() first")
        if is_stopping or not self.is_healthy:
            raise EngineStoppedError("the inference engine has stopped; build another one") from self.error

    def _run(self) -> None:
        try:
            while not self._stopping or (self._drains and (self._has_work() or self._embedding_clients)):
                if self._stopping and not self._has_work():
                    time.sleep(_DRAIN_PAUSE)  # a client is about to request the embedding of its next prompt
                idle = not self._has_work() and not self._stopping
                while idle and self._calls.empty() and self._engine.use_idle_time():
                    pass
                self._run_calls(wait=idle)
                self._run_embedding()
                if self._engine.has_requests():
                    self._run_step()
            self._run_calls(wait=False)
            self._engine.close()
            stopped: BaseException = EngineStoppedError("it was shut down")
        except BaseException as error:
            logger.exception("the inference engine was stopped by an error")
            self.error = stopped = error
        self._ended = True
        self._deliver_ready()
        for subscriber in self._subscribers.values():
            self._send(subscriber, stopped)
        self._subscribers.clear()
        self._run_calls(wait=False)  # calls queued after the last step
        while self._run_embedding():  # each waiting embedding raises `EngineStoppedError`
            pass
        if self.error is not None:
            self._close_after_error()

    def _has_work(self) -> bool:
        return self._engine.has_requests() or not self._embeddings.empty()

    def _close_after_error(self) -> None:
        """Free the memory of the engine, once all readers have the error that stopped it."""
        try:
            self._engine.close()
        except Exception:  # the first error is the one that matters, and it was logged and delivered
            logger.exception("the inference engine was stopped by an error, and could not free all of its memory")

    def _run_step(self) -> None:
        """Run a step, and deliver the outputs of the previous step when the forward of this step begins.

        [Note: delivery during the forward] The event loop holds the interpreter lock while it sends outputs to clients.
        Outputs are delivered when the next forward begins, because the forward computes without this lock: no step
        waits for the event loop.
        """
        try:
            outputs = self._engine.step(self._deliver_ready)
        except Exception as error:
            outputs = self._engine.recover(error)
        self._deliver_ready()  # not delivered yet if the step had no forward
        self._ready = outputs
        if not self._engine.has_requests():
            self._deliver_ready()

    def _run_calls(self, *, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._wait_for_call() if wait else self._calls.get_nowait()
                wait = False
                self._deliver_ready()  # first: the call can take long, or reuse the id of a request that has ended
                if call is not None:
                    call()

    def _run_embedding(self) -> bool:
        """Compute the embedding that has waited longest; return False if none waits."""
        try:
            call = self._embeddings.get_nowait()
        except queue.Empty:
            return False
        self._deliver_ready()  # clients need not wait for the forward of the embedding
        call()
        return True

    def _wait_for_call(self) -> Callable[[], None] | None:
        (seconds, _), since = self._idle, time.monotonic()
        self._idle = seconds, since
        try:
            return self._calls.get()
        finally:
            self._idle = seconds + time.monotonic() - since, None

    def _deliver_ready(self) -> None:
        outputs, self._ready = self._ready, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Subscriber, RequestOutput]]] = {}
        for output in outputs:
            subscriber = self._subscribers.get(output.request_id)
            if subscriber is None:
                continue
            if output.finished:
                del self._subscribers[output.request_id]
            by_loop.setdefault(subscriber.loop, []).append((subscriber, output))
        for loop, items in by_loop.items():
            # one wake-up for all outputs of a step
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_put_all, items)

    def _send(self, subscriber: _Subscriber, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):
            subscriber.loop.call_soon_threadsafe(subscriber.put, error)


def _put_all(items: Sequence[tuple[_Subscriber, RequestOutput]]) -> None:
    for subscriber, output in items:
        subscriber.put(output)
