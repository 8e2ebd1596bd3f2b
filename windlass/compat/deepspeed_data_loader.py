"""Class `DeepSpeedDataLoader`: this rank's micro-batches in DeepSpeed's order, for scripts that skip batches.

Windlass's own loader reshuffles each epoch by itself, and a checkpoint restores its position. A script for DeepSpeed
does both itself: it calls `data_sampler.set_epoch(epoch)`, and after `load_checkpoint` it skips the batches already
seen. Therefore `iter` of this loader restarts the sampler's epoch at its first batch.
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
"""Default number of worker processes per device. Two cases use none: a daemonic process, which may not have children,
and an iterable dataset, because each worker would yield all its samples.
"""


class DeepSpeedDataLoader:
    """Loader that is its own iterator. Each `iter` creates anew the torch DataLoader that it reads.

    Args:
        dataset: map-style dataset with a length. An iterable dataset is read in its order, and in full on every rank.
        batch_size: samples in a micro-batch.
        local_rank: negative if one process uses all devices of the host. Samples are then not split over ranks,
            RandomSampler draws their order, and a batch has `batch_size` samples for each device.
        tput_timer: timer started at each batch, or None.
        data_sampler: sampler used instead of torch's DistributedSampler.

    Raises:
        DataError: the dataset is empty.
        NotBuiltError: the configuration requests curriculum learning.
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
            raise NotBuiltError("DeepSpeedDataLoader: curriculum learning is not built; pass a data_sampler")
        iterable = isinstance(dataset, IterableDataset)
        if not iterable and len(dataset) == 0:
            raise DataError("training_data is empty: its length is 0; pass a dataset with samples")
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
        """Return the number of this rank's batches in an epoch."""
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
            raise DataError("this loader has no iterator yet: call iter(loader) first")
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
    """Create a loader of an engine's micro-batches.

    The order is shuffled for `route="train"`, and that of the dataset for "eval" and "predict". An iterable dataset is
    read in its order.

    Raises:
        DataError: the dataset is empty.
    """
    ranks, rank = engine.dp_world_size, engine.get_data_parallel_rank()
    if data_sampler is None and route in ("eval", "predict") and not isinstance(dataset, IterableDataset):
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
