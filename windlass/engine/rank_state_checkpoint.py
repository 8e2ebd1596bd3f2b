"""Per-rank optimizer states as a checkpoint holds them: `rank_state/PARAMETER/KEY`, `[ranks, *shape]`.

See [Note: per-rank states].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.checkpoint import FlatShard, LazyFlatTensor
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.rank_state import RankState

RANK_STATE_PREFIX = "rank_state/"


def rank_state_shards(model: ShardedModel) -> list[FlatShard]:
    """Return this rank's rows of all per-rank states, in memory."""
    return [_row(model, state) for state in _rank_states(model)]


class RankStateLoader:
    """Per-rank states that a checkpoint holds and this model's update keeps.

    On the number of ranks that saved them, rows are read in place. On another one every rank reads all rows of a state,
    one state at a time, and the update's rule makes its own row: this takes `[saved ranks, *shape]` of host memory.

    Args:
        saved: every tensor of the checkpoint by name, without memory.

    Attributes:
        shards: shards to read.
        was_relaid: rows were saved by another number of ranks, so they are not those of the checkpoint.
        dropped: saved rows that this model's update does not need.

    Raises:
        CheckpointError: the checkpoint holds a state of another shape.
    """

    def __init__(self, model: ShardedModel, saved: Mapping[str, torch.Tensor]) -> None:
        ranks = model.mesh.dense.data.size
        self.shards: list[FlatShard] = []
        self.was_relaid = False
        keys = {name.rpartition("/")[2] for name in saved if name.startswith(RANK_STATE_PREFIX)}
        needless = model.update.open_rank_states(keys) if model.update is not None else frozenset()
        self.dropped = tuple(
            name for name in saved if name.startswith(RANK_STATE_PREFIX) and name.rpartition("/")[2] in needless
        )
        for state in _rank_states(model):
            row = _row(model, state)
            stored = saved.get(row.name)
            if stored is None or stored.shape[:1] == (ranks,):
                self.shards.append(row)  # a missing state is reported together with other missing names
                continue
            if stored.dim() == 0 or stored.shape[1:] != state.shape or not stored.shape[0]:
                raise CheckpointError(
                    f"the checkpoint holds {row.name!r} of shape {list(stored.shape)}, and the row of each rank here "
                    f"has shape {list(state.shape)}; load another checkpoint, or load with "
                    "load_optimizer_states=False"
                )
            self.was_relaid = True
            storage = _RelaidStorage(state, stored, model.mesh.dense.data.index, ranks)
            resting = LazyFlatTensor(math.prod(stored.shape), state.values.dtype, storage, storage.rows)
            self.shards.append(FlatShard(row.name, tuple(stored.shape), 0, resting))
        if self.was_relaid:
            saved_ranks = next(shard.shape[0] for shard in self.shards if shard.storage is not None)
            logger.info(
                f"optimizer states of each rank were saved by {plural(saved_ranks, 'rank')} and are distributed over "
                f"{plural(ranks, 'rank')} by the rule of {type(model.update).__name__}"
            )


class _RelaidStorage:
    """All saved rows of one state, while they are read and distributed."""

    def __init__(self, state: RankState, saved: torch.Tensor, rank: int, ranks: int) -> None:
        self._state, self._saved_ranks, self._rank, self._ranks = state, saved.shape[0], rank, ranks
        self._rows: torch.Tensor | None = None

    @property
    def is_resident(self) -> bool:
        return False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allocate the rows; leaving the context sets this rank's state from them."""
        values = self._state.values
        self._rows = torch.empty(self._saved_ranks, values.numel(), dtype=values.dtype, device="cpu")
        yield
        values.copy_(self._state.relay(self._rows, self._ranks)[self._rank])
        self._rows = None

    def rows(self) -> torch.Tensor:
        """Return the rows `[saved ranks * n]`, while the storage is open."""
        assert self._rows is not None
        return self._rows.view(-1)


def _rank_states(model: ShardedModel) -> Iterator[RankState]:
    return model.update.rank_states() if model.update is not None else iter(())


def _row(model: ShardedModel, state: RankState) -> FlatShard:
    data = model.mesh.dense.data
    name, shape = f"{RANK_STATE_PREFIX}{state.name}/{state.key}", (data.size, *state.shape)
    return FlatShard(name, shape, data.index * state.values.numel(), state.values)
