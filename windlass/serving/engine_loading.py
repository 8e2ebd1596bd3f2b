"""Picklable description of the engine to serve, and the functions that load it, here or in another process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from windlass.base.shared_weights_file import inherited_shared_weights
from windlass.serving.served_engine import ServedEngine

T = TypeVar("T")

DEFAULT_FACTORY = "windlass.serving.engine_loading:load_llm_engine"


@dataclass(frozen=True)
class EngineSource:
    """Model and options of an engine.

    Attributes:
        model: directory of the model.
        options: options of the engine, serializable as JSON.
        factory: `module:function` that makes the engine from model and options.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    factory: str = DEFAULT_FACTORY

    def to_json(self) -> str:
        """Return the model and the options as JSON."""
        return json.dumps({"model": self.model, "options": dict(self.options), "factory": self.factory})

    @classmethod
    def from_json(cls, text: str) -> EngineSource:
        """Return the `EngineSource` that `to_json` wrote."""
        return cls(**json.loads(text))

    @property
    def num_ranks(self) -> int:
        """Number of ranks that hold the model."""
        return math.prod(int(self.options.get(name, 1)) for name in ("tp", "ep", "pp"))

    def run_rank(self) -> None:
        """Run this process's part of the model until the first rank, which serves it, closes the engine.

        Raises:
            WindlassError: the model cannot be loaded, see `load`; or another rank failed.
        """
        from windlass.inference.worker_loop import run_worker

        options = {name: value for name, value in self.options.items() if name != "tokenizer"}
        run_worker(self.model, owns_process=True, **options)

    async def load(self) -> ServedEngine:
        """Load the model on another thread, so that the server answers meanwhile, and start the engine."""
        module, _, name = self.factory.partition(":")
        function = getattr(importlib.import_module(module), name)
        engine: ServedEngine = await run_on_daemon_thread(partial(function, self.model, **self.options))
        await engine.start()
        return engine


async def run_on_daemon_thread(function: Callable[[], T]) -> T:
    """Run a function on a daemon thread, and return its result. The end of the process does not wait for the thread."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    def set_result(result: T | None, error: BaseException | None) -> None:
        if found.cancelled():
            return
        if error is not None:
            found.set_exception(error)
        else:
            found.set_result(cast(T, result))

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # the caller receives the error
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(set_result, result, error)

    threading.Thread(target=run, name="windlass-load", daemon=True).start()
    return await found


def load_llm_engine(
    model: str,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    **options: Any,
) -> ServedEngine:
    """Load the engine of windlass.

    Args:
        options: fields of `EngineOptions`.

    Raises:
        WindlassError: the directory has no model, or an option does not fit it.
    """
    # import here, because the router of replicas needs neither torch nor a model
    from windlass.inference.async_engine import AsyncLLMEngine
    from windlass.inference.engine_factory import make_engine
    from windlass.inference.engine_options import EngineOptions
    from windlass.inference.model_loading import parse_dtype
    from windlass.kernels.panel_memory import SharedWeights

    checked = EngineOptions.from_arguments(**options)
    parse_dtype(dtype)
    file = inherited_shared_weights()  # file in which the replicas of one server share packed weights
    with contextlib.nullcontext() if file is None else SharedWeights(file).active():
        engine = make_engine(model, checked, tokenizer=tokenizer, dtype=dtype, trust_remote_code=trust_remote_code)
    return AsyncLLMEngine(engine)
