"""`mii.serve` and `mii.client`: a deployment that lives in this process and answers many threads at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from windlass.base.errors import ConfigError
from windlass.compat.mii_pipeline import MiiResponse, engine_arguments, make_response, make_sampling_params
from windlass.inference.async_engine import AsyncLLMEngine

_deployments: dict[str, MiiClient] = {}


def serve(
    model_name_or_path: str | Path | nn.Module = "",
    *,
    deployment_name: str | None = None,
    tensor_parallel: int = 1,
    replica_num: int = 1,
    tokenizer: Any = None,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> MiiClient:
    """Start a deployment and return its client.

    The deployment ends with this process; `windlass serve` starts a server for other processes.

    Raises:
        ConfigError: the name is taken, or the deployment needs other processes.
    """
    name = deployment_name or f"{Path(str(model_name_or_path)).name}-mii-deployment"
    if name in _deployments:
        raise ConfigError(f"a deployment {name!r} runs already; call mii.client({name!r}), or give another name")
    if tensor_parallel > 1 or replica_num > 1:
        raise ConfigError(
            f"tensor_parallel = {tensor_parallel}, replica_num = {replica_num}: a deployment is one process; start "
            "`windlass serve` with --tp or --replicas"
        )
    for unused in ("enable_restful_api", "restful_api_port"):
        if options.pop(unused, None):
            raise ConfigError(
                f"{unused}: a deployment has no HTTP server; start `windlass serve`, which has OpenAI's API"
            )
    engine = AsyncLLMEngine.from_model(
        model_name_or_path,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        **engine_arguments(tensor_parallel, max_length, None, options),
    )
    _deployments[name] = MiiClient(name, engine)
    return _deployments[name]


def client(deployment_name: str) -> MiiClient:
    """Return the client of a deployment of this process.

    Raises:
        ConfigError: there is none of this name.
    """
    if deployment_name not in _deployments:
        raise ConfigError(
            f"there is no deployment {deployment_name!r} in this process; running are "
            f"{', '.join(sorted(_deployments)) or 'none'}. Servers of `windlass serve` answer OpenAI's clients"
        )
    return _deployments[deployment_name]


class MiiClient:
    """Client of a deployment. Threads may call it at the same time; their requests share batches."""

    def __init__(self, name: str, engine: AsyncLLMEngine) -> None:
        self._name, self._engine = name, engine
        self._loop = asyncio.new_event_loop()
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
            streaming_fn: called with a list of one response, whose text is new since the call before; nothing is
                returned then. There is one prompt.
            settings: see `make_sampling_params`.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        full = bool(settings.pop("return_full_text", False))
        params = make_sampling_params(self._engine.tokenizer, listed, **settings)
        if streaming_fn is not None and len(listed) != 1:
            raise ConfigError(f"streaming_fn takes one prompt, and {len(listed)} were given; call generate for each")

        async def run(prompt: str, index: int) -> MiiResponse:
            shown = ""
            async for output in self._engine.stream(prompt, params[index]):
                response = make_response(output, output.outputs[0], full=full)
                if streaming_fn is not None:
                    text, response.generated_text = response.generated_text, response.generated_text[len(shown) :]
                    shown = text
                    streaming_fn([response])
            return response

        async def run_all() -> list[MiiResponse]:
            return list(await asyncio.gather(*(run(prompt, index) for index, prompt in enumerate(listed))))

        found: list[MiiResponse] = self._wait_for(run_all())
        return None if streaming_fn is not None else found

    def terminate_server(self) -> None:
        """End the deployment."""
        if _deployments.pop(self._name, None) is not None:
            self._wait_for(self._engine.shutdown())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait_for(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
