"""The two calls into `torch.distributed.checkpoint`, with its errors in our words on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from windlass.base.errors import CheckpointError
from windlass.checkpoint.agree import Ranks, told, told_together
from windlass.checkpoint.index import Index
from windlass.checkpoint.shards import ShardLoadPlanner, ShardSavePlanner
from windlass.checkpoint.state import Holding
from windlass.checkpoint.storage import LaterWriter, SafetensorsReader


def plan(path: Path, held: dict[str, Holding], ranks: Ranks, plain: Any, rank_plain: Iterable[Any]) -> LaterWriter:
    """Agrees on which rank writes which boxes into the directory `path`; the writer of this rank's. Collective.

    Raises:
        CheckpointError: on all ranks alike, where any of them fails, or the disk has too little room.
    """
    writer = LaterWriter(path, ranks.rank, plain, rank_plain)
    _call(
        "saving",
        ranks,
        lambda: state_dict_saver.save(
            held,
            storage_writer=writer,
            planner=ShardSavePlanner(),
            process_group=ranks.group,
            no_dist=ranks.alone,
        ),
    )
    return writer


def read(path: Path, index: Index, held: dict[str, Holding], ranks: Ranks) -> None:
    """Fills this rank's boxes from the checkpoint directory `path`. Collective.

    Raises:
        CheckpointError: on all ranks alike, where any of them fails. What was filled till then stays filled.
    """
    reader = SafetensorsReader(path, index)
    _call(
        "loading",
        ranks,
        lambda: state_dict_loader.load(
            dict(held),
            storage_reader=reader,
            planner=ShardLoadPlanner(),
            process_group=ranks.group,
            no_dist=ranks.alone,
        ),
    )


def _call(step: str, ranks: Ranks, call: Callable[[], object]) -> None:
    try:
        with warnings.catch_warnings():
            # One process without a process group is a supported case, not a suspicious one.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            call()
    except CheckpointException as failure:
        errors = {rank: error for rank, (error, _) in failure.failures.items()}
        for error in errors.values():
            if not isinstance(error, Exception):
                raise error from failure
        if ranks.world_size == 1 and isinstance(errors[0], CheckpointError):
            raise errors[0] from None
        texts = {rank: told(error) for rank, error in errors.items()}
        raise CheckpointError(told_together(step, texts, ranks.world_size)) from failure
