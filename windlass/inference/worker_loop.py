"""Entry point of all ranks of a served model except the first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from windlass.base.errors import ConfigError
from windlass.base.garbage_collection import freeze_live_objects
from windlass.inference.engine_factory import make_rank_engine
from windlass.inference.engine_options import EngineOptions
from windlass.inference.rank_worker import RankWorker


def run_worker(
    model: str | Path | nn.Module,
    *,
    dtype: Any = "auto",
    trust_remote_code: bool = False,
    owns_process: bool = False,
    **options: Any,
) -> None:
    """Load this rank's part of a model and run the steps of the first rank's engine until the engine is closed.

    The first rank builds an `AsyncLLMEngine` with the same arguments.

    Args:
        owns_process: True if nothing else runs in this process, so that garbage collections may skip the objects that
            exist after loading.

    Raises:
        ConfigError: this rank is the first one of its model; or see `make_rank_engine`.
        ModelError, StorageError: see `make_rank_engine`.
        PeerError: another rank failed.
    """
    made = make_rank_engine(
        model,
        EngineOptions.from_arguments(**options),
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        skip_tokenizer=True,
    )
    if not isinstance(made, RankWorker):
        made.close()
        raise ConfigError("this rank is the first one of its model; build an AsyncLLMEngine here")
    if owns_process:
        freeze_live_objects()
    made.serve()
