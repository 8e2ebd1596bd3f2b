"""Data loaders of an engine: this rank's micro-batches of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from windlass.base.errors import ConfigError
from windlass.data.resumable_loaders import EpochLoader, make_loader

ROUTES = ("train", "eval", "predict")


def build_data_loader(
    dataset: Any,
    batch_size: int,
    readers: int,
    reader: int,
    *,
    drop_last: bool,
    pin_memory: bool,
    route: str,
    data_sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> EpochLoader:
    """Build the data loader that `Engine.deepspeed_io` returns.

    Args:
        readers: number of data-loading ranks.
        reader: index of the data-loading rank whose samples this rank loads.
    """
    if route not in ROUTES:
        raise ConfigError(f"deepspeed_io: route is {route!r}; write one of {', '.join(ROUTES)}")
    return make_loader(
        dataset,
        batch_size,
        reader,
        readers,
        collate_fn=collate_fn,
        drop_last=drop_last,
        shuffle=route == "train",
        num_workers=num_local_io_workers or 0,
        pin_memory=pin_memory,
        custom_sampler=data_sampler,
    )
