"""`mii.serve` and `mii.client`: a deployment in this process, which several threads may use at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from windlass.base.errors import ConfigError
from windlass.compat.mii_pipeline import (
    MiiResponse,
    engine_arguments,
    make_response,
    make_sampling_params,
    merge_settings,
    take_model,
    use_engine_config,
)
from windlass.inference.async_engine import AsyncLLMEngine
from windlass.inference.outputs import RequestOutput
from windlass.inference.sampling_params import SamplingParams

Result = TypeVar("Result")

_IGNORED = frozenset(
    {"port_number", "hostfile", "restful_api_host", "restful_processes", "version", "instance_type"}
)  # settings of MII's servers

_deployments: dict[str, MiiClient] = {}
_unregistering = threading.RLock()


def serve(
    model_name_or_path: str | Path | nn.Module = "",
    model_config: Mapping[str, Any] | None = None,
    mii_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> MiiClient:
    """Start a deployment and return its client.

    The deployment ends with this process; `windlass serve` starts a server for other processes.

    Args:
        model_name_or_path: directory, name on the hub, or a module.
        model_config: settings of the model as a dict; see `pipeline`.
        mii_config: settings of the deployment as a dict.
        settings: settings of both; `deployment_name` is the name for `client`.

    Raises:
        ConfigError: the name is taken, a setting is not known, or the deployment needs other processes.
    """
    settings = merge_settings("mii_config", mii_config, settings)
    models = merge_settings("mii_config", settings.pop("model_config", None), model_config or {})
    settings = merge_settings("model_config", models, settings)
    model = take_model(model_name_or_path, settings)
    name = settings.pop("deployment_name", None) or _default_name(model)
    if name in _deployments:
        raise ConfigError(f"a deployment {name!r} runs already; call mii.client({name!r}), or give another name")
    use_engine_config(settings)
    _check_processes(settings)
    engine = AsyncLLMEngine.from_model(
        model,
        tokenizer=settings.pop("tokenizer", None),
        trust_remote_code=bool(settings.pop("trust_remote_code", False)),
        **engine_arguments({"tensor_parallel": 1, **settings}),
    )
    _deployments[name] = MiiClient(name, engine)
    return _deployments[name]


def _default_name(model: str | Path | nn.Module) -> str:
    if isinstance(model, nn.Module):
        return f"{type(model).__name__}-mii-deployment"
    return f"{Path(model).name if Path(model).exists() else model}-mii-deployment"


def _check_processes(settings: dict[str, Any]) -> None:
    """Remove the settings of MII's processes from `settings`.

    Raises:
        ConfigError: a setting requires another process or a server, or is not supported.
    """
    tp, replicas = settings.get("tensor_parallel") or 1, settings.pop("replica_num", None) or 1
    if tp > 1 or replicas > 1:
        raise ConfigError(
            f"tensor_parallel = {tp}, replica_num = {replicas}: a deployment is one process; start `windlass serve` "
            "with --tp or --replicas"
        )
    port, restful = settings.pop("restful_api_port", None), settings.pop("enable_restful_api", False)
    if restful:
        raise ConfigError(
            f"enable_restful_api is True (restful_api_port {port}), and a deployment has no HTTP server; start "
            "`windlass serve`, which has OpenAI's API"
        )
    kind = settings.pop("deployment_type", "local")
    if getattr(kind, "value", kind) != "local":
        raise ConfigError(f"deployment_type is {kind!r}; write 'local', the only type")
    for ignored in _IGNORED:
        settings.pop(ignored, None)


def client(model_or_deployment_name: str | Path) -> MiiClient:
    """Return the client of a deployment of this process, by its name or by that of its model.

    Raises:
        ConfigError: no deployment has this name.
    """
    given = str(model_or_deployment_name)
    for name in (given, _default_name(given)):
        if name in _deployments:
            return _deployments[name]
    raise ConfigError(
        f"there is no deployment {given!r} in this process; running: {', '.join(sorted(_deployments)) or 'none'}. "
        "Start it with mii.serve, or use OpenAI's client for a server of `windlass serve`"
    )


class MiiClient:
    """Client of a deployment. Threads may call it at the same time; their requests share batches."""

    def __init__(self, name: str, engine: AsyncLLMEngine) -> None:
        self._name, self._engine, self._process = name, engine, os.getpid()
        self._loop = asyncio.new_event_loop()
        self._starting, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mii-{name}", daemon=True)
        self._thread.start()
        self._wait_for(engine.start())

    def __call__(self, prompts: str | Sequence[str], **settings: Any) -> Any:
        """See `generate`."""
        return self.generate(prompts, **settings)

    def generate(
        self,
        prompts: str | Sequence[str],
        streaming_fn: Callable[[list[MiiResponse]], Any] | None = None,
        **settings: Any,
    ) -> list[MiiResponse] | None:
        """Generate one response for each prompt.

        Args:
            streaming_fn: function called in this thread with a list of one response, which has the text generated since
                the previous call. `generate` then takes a single prompt and returns None. An error raised by the
                function ends the request.
            settings: `return_full_text`, and those of `make_sampling_params`.

        Raises:
            ConfigError: a setting is not known, or the deployment was terminated.
            RequestError: a prompt or a setting cannot be served; no answer is generated.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        full = bool(settings.pop("return_full_text", False))
        params = make_sampling_params(self._engine.tokenizer, listed, self._engine.max_model_len, **settings)
        if streaming_fn is None:
            outputs = self._wait_for(self._answer_all(listed, params))
            return [make_response(output, output.outputs[0], full=full) for output in outputs]
        if len(listed) != 1:
            raise ConfigError(f"streaming_fn takes one prompt, and {len(listed)} were given; call generate for each")
        self._stream(listed[0], params[0], streaming_fn, full=full)
        return None

    def terminate_server(self) -> None:
        """End the deployment. Answers that are being generated end with an error."""
        with _unregistering:  # another deployment may have the name by now
            if _deployments.get(self._name) is not self:
                return
            del _deployments[self._name]
        ending = self._start(self._end(), is_last=True)
        try:
            ending.result()
        finally:
            if ending.done():  # False if this thread was interrupted: the loop then ends the requests by itself
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    async def _end(self) -> None:
        """Shut the engine down and wait until all calls have ended: once the loop has stopped, they would never
        return."""
        try:
            await self._engine.shutdown()
        except BaseException:  # the engine may never end the calls
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            raise
        finally:
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
            await self._loop.shutdown_asyncgens()

    async def _answer_all(self, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Return the last output of each prompt. An error of one prompt cancels all other prompts."""
        tasks = [asyncio.ensure_future(self._answer(*one)) for one in zip(prompts, params, strict=True)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, prompt: str, params: SamplingParams) -> RequestOutput:
        async with contextlib.aclosing(self._engine.stream(prompt, params)) as outputs:  # type: ignore[type-var]
            last: RequestOutput | None = None
            async for output in outputs:
                last = output
        assert last is not None  # a stream ends with an output or raises
        return last

    def _stream(
        self, prompt: str, params: SamplingParams, function: Callable[[list[MiiResponse]], Any], *, full: bool
    ) -> None:
        """Call `function` with each new part of an answer, in the thread of the caller, while other requests
        continue."""
        stream: Any = self._engine.stream(prompt, params)

        async def read() -> RequestOutput | None:
            found: RequestOutput | None = await anext(stream, None)
            return found

        shown = 0
        while (output := self._wait_for(read())) is not None:  # an error or interrupt here closes the stream
            try:
                response = make_response(output, output.outputs[0], full=full)
                text = response.generated_text
                response.generated_text, shown = text[shown:], len(text)
                function([response])
            except BaseException:
                self._wait_for(stream.aclose())
                raise

    def _start(self, coroutine: Coroutine[Any, Any, Result], *, is_last: bool = False) -> Any:
        """Start a coroutine on the loop. None can be started after the last one, which waits for all others."""
        if os.getpid() != self._process:  # a forked process lacks the engine's threads
            coroutine.close()
            raise ConfigError(
                f"the deployment {self._name!r} runs in process {self._process}, but was called in its fork "
                f"{os.getpid()}; call it from threads of that process, or start `windlass serve` for clients in other "
                "processes"
            )
        with self._starting:
            if self._ended:
                coroutine.close()
                raise ConfigError(f"the deployment {self._name!r} was terminated; start another one with mii.serve")
            self._ended = is_last
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        running = self._start(coroutine)
        try:
            found: Result = running.result()
        except BaseException:  # an interrupt of this thread ends its requests too
            running.cancel()
            raise
        return found
