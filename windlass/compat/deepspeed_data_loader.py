"""`DeepSpeedDataLoader`: this rank's micro-batches in DeepSpeed's order, which scripts that skip batches count on.

Windlass's own loader moves on to another shuffle by itself, and a checkpoint brings it back to its place. A script for
DeepSpeed does both itself: it says `data_sampler.set_epoch(epoch)`, and after `load_checkpoint` passes over the batches
that were seen. This loader therefore begins at the same first batch whenever it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from windlass.base.errors import DataError
from windlass.compat.accelerator.real_accelerator import get_accelerator
from windlass.compat.not_built import NotBuiltError

if TYPE_CHECKING:
    from windlass.compat.deepspeed_engine import DeepSpeedEngine

_WORKERS_PER_DEVICE = 2
"""Processes that read ahead, unless the caller says how many; none where a process may have no children, nor for an
iterable dataset, of which each would give all."""


class DeepSpeedDataLoader:
    """A torch DataLoader that is its own iterator, made anew by each `iter`.

    Args:
        dataset: with a length; an iterable one is taken as it comes, on every rank.
        batch_size: samples of a micro-batch.
        local_rank: negative: no ranks, the order is drawn by torch's generator.
        tput_timer: told when a batch is asked for; None: none.
        data_sampler: the order, instead of torch's DistributedSampler.

    Raises:
        DataError: the dataset is empty.
        NotBuiltError: the configuration asks for the curriculum's order.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: dict[str, Any] | None = None,
    ) -> None:
        if (deepspeed_dataloader_config or {}).get("curriculum_learning"):
            raise NotBuiltError("DeepSpeedDataLoader: the curriculum's order is not built; pass a data_sampler")
        iterable = isinstance(dataset, IterableDataset)
        if not iterable and len(dataset) == 0:
            raise DataError("training_data is empty: its length is 0")
        if data_sampler is None and not iterable:
            data_sampler = (
                DistributedSampler(dataset, data_parallel_world_size, data_parallel_rank)
                if local_rank >= 0
                else RandomSampler(dataset)
            )
        self.device_count = 1 if local_rank >= 0 else get_accelerator().device_count()
        if num_local_io_workers is None:
            num_local_io_workers = (
                0 if iterable or current_process().daemon else _WORKERS_PER_DEVICE * self.device_count
            )
        self.dataset, self.data_sampler, self.collate_fn = dataset, data_sampler, collate_fn
        self.batch_size = batch_size * self.device_count
        self.num_local_io_workers, self.tput_timer = num_local_io_workers, tput_timer
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.dataloader_drop_last = dataloader_drop_last
        self.data: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Batches of an epoch for this rank."""
        samples = len(self.dataset if self.data_sampler is None else self.data_sampler)
        return samples // self.batch_size if self.dataloader_drop_last else math.ceil(samples / self.batch_size)

    def __iter__(self) -> DeepSpeedDataLoader:
        self.dataloader: DataLoader[Any] = DataLoader(
            self.dataset,
            batch_size=self.batch_size,
            sampler=self.data_sampler,
            collate_fn=self.collate_fn,
            drop_last=self.dataloader_drop_last,
            num_workers=self.num_local_io_workers,
            pin_memory=self.pin_memory,
        )
        self.data = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self.data is None:
            raise DataError("this loader has not begun: ask iter(loader) first")
        if self.tput_timer is not None:
            self.tput_timer.start()
        return next(self.data)


def make_engine_loader(
    engine: DeepSpeedEngine,
    dataset: Any,
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> DeepSpeedDataLoader:
    """A loader of an engine's micro-batches, shuffled for `route="train"`; "eval" and "predict" keep the order.

    Raises:
        DataError: the dataset is empty.
    """
    ranks, rank = engine.dp_world_size, engine.get_data_parallel_rank()
    if data_sampler is None and route in ("eval", "predict"):
        data_sampler = DistributedSampler(dataset, ranks, rank, shuffle=False)
    loader = DeepSpeedDataLoader(
        dataset,
        batch_size if batch_size is not None else engine.train_micro_batch_size_per_gpu(),
        pin_memory,
        engine.local_rank,
        engine.tput_timer if route == "train" else None,
        collate_fn if collate_fn is not None else engine.collate_fn,
        num_local_io_workers,
        data_sampler,
        ranks,
        rank,
        engine._config.dataloader_drop_last,
    )
    if route == "train" and engine.training_dataloader is None:
        engine.training_dataloader = loader
    return loader
