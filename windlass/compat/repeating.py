"""Loaders: one that begins again when it ends, and one over this rank's part of a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from windlass.data.loader import make_loader


class RepeatingLoader:
    """Goes through a loader again and again.

    Raises:
        StopIteration: at `next`, if the loader has nothing at all.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader:
    """Micro-batches of this rank's part of a dataset, by `windlass.data.loader`.

    Args:
        batch_size: samples of a micro-batch.
        local_rank: not negative: only this rank's part; -1: the whole dataset, as one process reads it.
        tput_timer: a `ThroughputTimer`, started at every micro-batch; None: none.
        data_sampler: says the order instead.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: dict[str, Any] | None = None,
    ) -> None:
        together = local_rank >= 0 and dist.is_initialized()
        world_size = data_parallel_world_size or (dist.get_world_size() if together else 1)
        rank = data_parallel_rank if data_parallel_rank is not None else (dist.get_rank() if together else 0)
        self.dataset, self.batch_size, self.tput_timer = dataset, batch_size, tput_timer
        self.deepspeed_dataloader_config = deepspeed_dataloader_config or {}
        self._loader = make_loader(
            dataset,
            batch_size,
            rank if local_rank >= 0 else 0,
            world_size if local_rank >= 0 else 1,
            collate_fn,
            drop_last=dataloader_drop_last,
            num_workers=min(num_local_io_workers or 0, os.cpu_count() or 1),
            pin_memory=pin_memory and torch.cuda.is_available(),
            order=data_sampler,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self.tput_timer is not None:
            self.tput_timer.update_epoch_count()
        for batch in self._loader:
            if self.tput_timer is not None:
                self.tput_timer.start()
            yield batch
