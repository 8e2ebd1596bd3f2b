"""Per-rank optimizer states as a checkpoint holds them: `rank_state/PARAMETER/KEY`, `[ranks, *shape]`.

See [Note: per-rank states].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.checkpoint import FlatShard, LazyFlatTensor
from windlass.parallel.placement import Placement
from windlass.zero.sharded_model import ShardedModel
from windlass.zero.update.disk_health import DiskHealth
from windlass.zero.update.rank_state import RankState

RANK_STATE_PREFIX = "rank_state/"


def rank_state_shards(model: ShardedModel) -> list[FlatShard]:
    """Return this rank's rows of the per-rank states, for a save: those of units whose primary replica it has."""
    return [_row(model, state) for state in rank_states(model) if state.unit.is_primary_replica]


class RankStateLoader:
    """Loader of the per-rank states that a checkpoint holds and this model's update keeps.

    On the same number of ranks as in the save, each rank reads its row in place. On another number, and for states
    with `follows_owners`, every rank reads all rows of a state, one state at a time, and the update's rule computes the
    rank's row from them. This takes host memory for `[saved ranks, *shape]` values.

    Args:
        saved: every tensor of the checkpoint by name, on the meta device.

    Attributes:
        shards: shards to read.
        was_relaid: True if a state was saved on another number of ranks, or the rule has changed this rank's row.
        dropped: names of the saved states that this model's update does not need.

    Raises:
        CheckpointError: the checkpoint holds a state of another shape.
    """

    def __init__(self, model: ShardedModel, saved: Mapping[str, torch.Tensor]) -> None:
        ranks = model.mesh.dense.data.size
        self.shards: list[FlatShard] = []
        self.was_relaid = False
        keys = {name.rpartition("/")[2] for name in saved if name.startswith(RANK_STATE_PREFIX)}
        needless = open_rank_states(model, keys)
        self.dropped = tuple(
            name for name in saved if name.startswith(RANK_STATE_PREFIX) and name.rpartition("/")[2] in needless
        )
        if self.dropped:
            logger.warning(
                f"per-rank states that {type(model.update).__name__} does not keep at stage "
                f"{model.policy.stage} on {plural(ranks, 'rank')} are dropped: {', '.join(sorted(keys & needless))}; "
                "continue at the stage and on the ranks of the checkpoint to keep them"
            )
        for state in rank_states(model):
            row = _row(model, state, is_loaded=True)
            stored = saved.get(row.name)
            if stored is None or (stored.shape[:1] == (ranks,) and not state.follows_owners):
                self.shards.append(row)  # a missing state is reported together with other missing names
                continue
            expected = state.full_shape
            if stored.dim() == 0 or stored.shape[1:] != expected or not stored.shape[0]:
                raise CheckpointError(
                    f"the checkpoint holds {row.name!r} of shape {list(stored.shape)}, and the row of each rank here "
                    f"has shape {list(expected)}; load another checkpoint, or load with "
                    "load_optimizer_states=False"
                )
            saved_ranks = stored.shape[0]
            self.was_relaid |= saved_ranks != ranks
            storage = _RelaidStorage(state, saved_ranks, model.mesh.dense.data.index, ranks, self._note_change)
            resting = LazyFlatTensor(saved_ranks * state.values.numel(), state.values.dtype, storage, storage.rows)
            shape = (saved_ranks, *state.shape)
            self.shards.append(FlatShard(row.name, shape, 0, resting, _rows_placement(state, saved_ranks)))
        if self.was_relaid:
            logger.info(
                f"optimizer states of each rank were saved by {plural(saved_ranks, 'rank')} and are distributed over "
                f"{plural(ranks, 'rank')} by the rule of {type(model.update).__name__}"
            )

    def _note_change(self) -> None:
        self.was_relaid = True


class _RelaidStorage:
    """Lazy storage handle of all saved rows of one state. After the read it computes this rank's row from them."""

    def __init__(
        self, state: RankState, saved_ranks: int, rank: int, ranks: int, on_change: Callable[[], None]
    ) -> None:
        self._state, self._saved_ranks, self._rank, self._ranks = state, saved_ranks, rank, ranks
        self._on_change = on_change
        self._rows: torch.Tensor | None = None

    @property
    def is_resident(self) -> bool:
        return False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allocate the rows for a load. At the end of the context this rank's state is set from them."""
        values = self._state.values
        self._rows = torch.empty(self._saved_ranks, values.numel(), dtype=values.dtype, device="cpu")
        yield
        own = self._state.relay(self._rows, self._ranks)[self._rank]
        self._state.set(own)
        # Even on an equal number of ranks, the rule changes this rank's row if ranks own other elements than in the
        # saved run.
        if self._rank < self._saved_ranks and not torch.equal(own, self._rows[self._rank]):
            self._on_change()
        self._rows = None

    def rows(self) -> torch.Tensor:
        """Return all rows as `[saved ranks * elements of a row]`, while the storage is open."""
        assert self._rows is not None
        return self._rows.view(-1)


class _StoredRow:
    """Lazy storage handle of the row of a state that is not in memory.

    Args:
        health: disk health of the state's model.
        is_loaded: True for a load: the row is filled while the handle is open, and written to its tier afterwards.
    """

    def __init__(self, state: RankState, health: DiskHealth, *, is_loaded: bool) -> None:
        self._state, self._health, self._is_loaded = state, health, is_loaded
        self._values: torch.Tensor | None = None

    @property
    def is_resident(self) -> bool:
        return False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Read the row into memory, for the context.

        Raises:
            StorageError: a transfer of this rank failed, so the row to save may be incomplete.
        """
        self._values = self._state.read()
        if not self._is_loaded:
            self._health.raise_local_failure()
        yield
        if self._is_loaded:
            self._state.set(self._values)
        self._values = None

    def values(self) -> torch.Tensor:
        """Return the row `[elements of the row]`, while the handle is open."""
        assert self._values is not None
        return self._values


def open_rank_states(model: ShardedModel, saved: Collection[str]) -> frozenset[str]:
    """Prepare a load of the per-rank states `saved`: afterwards `rank_states` yields the states to load. Collective.

    Args:
        saved: names of states without parameter names, such as `worker_error`.

    Returns:
        The names in `saved` that the model does not use.
    """
    needless = model.update.open_rank_states(saved) if model.update is not None else frozenset()
    return needless | model.quantization_errors.open(saved)


def rank_states(model: ShardedModel, *, reduced_only: bool = False) -> Iterator[RankState]:
    """Yield the states of a model that differ between ranks: those of its update, and of quantized reductions.

    Args:
        reduced_only: leave out errors of units that were not reduced yet and that take no memory until then.
    """
    if model.update is not None:
        yield from model.update.rank_states()
        yield from model.quantization_errors.rank_states(reduced_only=reduced_only)


def _row(model: ShardedModel, state: RankState, *, is_loaded: bool = False) -> FlatShard:
    data = model.mesh.dense.data
    placement = state.unit.placements[state.index]
    name, shape = f"{RANK_STATE_PREFIX}{placement.global_name or state.name}/{state.key}", (data.size, *state.shape)
    start = data.index * state.values.numel()
    values: torch.Tensor | LazyFlatTensor = state.values
    if not state.is_in_memory:
        storage = _StoredRow(state, model.disk_health, is_loaded=is_loaded)
        values = LazyFlatTensor(state.values.numel(), state.values.dtype, storage, storage.values)
    return FlatShard(name, shape, start, values, _rows_placement(state, data.size))


def _rows_placement(state: RankState, ranks: int) -> Placement | None:
    """Return the placement of rows `[ranks, *shape]` for a parameter sharded along tp; None: the rows are full."""
    placement = state.unit.placements[state.index]
    if placement.is_full or state.full_shape == state.shape:
        return None
    return Placement((ranks, *placement.global_shape), (((0, ranks),), *placement.ranges))
