"""Data loaders of an engine: this rank's micro-batches of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from windlass.base.errors import ConfigError
from windlass.data.resumable_loaders import EpochLoader, make_loader

if TYPE_CHECKING:
    from windlass.engine.training_engine import Engine

ROUTES = ("train", "eval", "predict")


def build_data_loader(
    engine: Engine,
    dataset: Any,
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> EpochLoader:
    """Build the loader of `Engine.deepspeed_io`."""
    if route not in ROUTES:
        raise ConfigError(f"deepspeed_io: route is {route!r}; write one of {', '.join(ROUTES)}")
    readers, reader = engine.data_loading_ranks
    loader = make_loader(
        dataset,
        batch_size if batch_size is not None else engine.train_micro_batch_size_per_gpu(),
        reader,
        readers,
        collate_fn=collate_fn,
        drop_last=engine._config.dataloader_drop_last,
        shuffle=route == "train",
        num_workers=num_local_io_workers or 0,
        pin_memory=pin_memory and engine.device.type == "cuda",
        custom_sampler=data_sampler,
    )
    if route == "train" and engine.training_dataloader is None:
        engine.training_dataloader = loader
    return loader
