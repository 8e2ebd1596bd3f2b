"""Protocol of updates. An update steps the optimizer of a sharded model.

[Note: updates] An update steps the chunks of master weights that this rank stores ([Note: kinds of states] describes
their states in a checkpoint). `ShardedModel` constructs the update, and `update_class` chooses its class. All other
code reads flags instead of the class:

- `needs_whole_parameters`: a parameter is stepped in its own shape by one owner rank (at stage 0, by every rank).
  Otherwise each rank steps flat segments, and a state has one value for each element of a segment, or one value for
  the segment.
- `reduces_itself`: the update receives local gradients, which no rank reduced, and communicates by itself
  ([Note: local gradients]), in each step before which `takes_local_gradients` is True.
- `separates_masters`: master weights never share memory with the parameters, because the parameters may differ from
  them after `publish`. `publish` runs after each step before which `publishes_itself` is True.

States are of four kinds: one value for each element of a segment, one tensor for a parameter, one number for a
parameter or segment, and one value for each element on every rank ([Note: per-rank states]).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Protocol

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.rank_group import RankGroup
from windlass.optim.cpu_optimizer import StateFormat
from windlass.storage.slot import Tier
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.unit import Unit
from windlass.zero.update.master_weights import MasterWeights
from windlass.zero.update.optimizer_state_offload import OptimizerStateOffload
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.rank_state_memory import MakeSlot
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk


@dataclass(frozen=True)
class UpdateContext:
    """Arguments of every update class besides the optimizer.

    Attributes:
        masters: the master weights that this rank updates, and their optimizer states.
        dp_groups: data-parallel groups over which states are sharded; the group of dense parameters first.
        second_group: returns a second group of the dense data-parallel ranks, for messages in flight while the ranks
            compute. Collective over all ranks at the first call.
        make_slot: returns a new slot, given name, number of elements, dtype and tier.
        axes: mesh axes pp, ep, sp and tp, by name.
        shards_states: False where every rank stores and steps all states (stage 0).
        max_update_numel: maximum number of elements in a batch of chunks. A larger chunk is a batch of its own.
        timeout: maximum wait for a peer.
    """

    masters: MasterWeights
    dp_groups: list[DataParallelGroup]
    second_group: Callable[[], RankGroup]
    make_slot: MakeSlot
    axes: Mapping[str, MeshAxis]
    shards_states: bool
    max_update_numel: int
    timeout: timedelta


class Update(Protocol):
    """Protocol of an object that steps one optimizer on the chunks of a sharded model.

    Attributes:
        needs_whole_parameters: see [Note: updates]; read before the update is constructed.
        reduces_itself: see [Note: updates]; read before the update is constructed.
        steps_whole_units: a chunk is the full state span of a unit; read before the update is constructed.
        optimizer: the user's optimizer. Its groups give the parameters and hyper-parameters.
        state_offload: offload of master weights and states. Its `states` are the states of this update.
        has_stepped: True once the running step may have changed weights or states on this rank, even if it raised. The
            model sets it in steps with local gradients. In other steps, an update that changes nothing before it yields
            its first batch need not set it.
    """

    needs_whole_parameters: ClassVar[bool]
    reduces_itself: ClassVar[bool]
    steps_whole_units: ClassVar[bool]
    optimizer: torch.optim.Optimizer
    state_offload: OptimizerStateOffload
    has_stepped: bool

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None: ...

    @classmethod
    def separates_masters(cls, shards_states: bool) -> bool:
        """Return True if parameters never serve as master weights. Called before the update is constructed."""
        ...

    @classmethod
    def element_state_keys(cls) -> tuple[str, ...] | None:
        """Return the names of all states with one value for each element that this rank steps; None: those that the
        optimizer's own step creates. Called before the update is constructed.
        """
        ...

    @classmethod
    def rank_state_keys(cls, optimizer: torch.optim.Optimizer, shards_states: bool) -> tuple[str, ...]:
        """Return the names of all per-rank states, including those that a later step creates. Called before the update
        is constructed.
        """
        ...

    @property
    def takes_local_gradients(self) -> bool:
        """True if the next step receives local gradients. Equal on all ranks; changes only in a step or a load."""
        ...

    @property
    def publishes_itself(self) -> bool:
        """True if the next step ends with `publish`, instead of a copy of the master weights to the parameters."""
        ...

    @property
    def equalizes_replicas(self) -> bool:
        """True if the parameters of all ranks are to become equal to the master weights after the step that has ended.
        Equal on all ranks.
        """
        ...

    @property
    def keeps_local_weights(self) -> bool:
        """True if parameters differ between data-parallel ranks. `publish` then computes them without a message."""
        ...

    def publish(self, units: list[Unit]) -> None:
        """Apply the result of the last step to the parameters of these units on all ranks. Collective unless
        `keeps_local_weights`: all ranks pass the same units in the same order.
        """
        ...

    def finish_transfers(self) -> None:
        """Wait for messages in flight between steps, so that states are complete. Collective."""
        ...

    def forget_unsent(self) -> None:
        """Drop local changes and error feedback that ranks have not sent yet, because the weights were replaced."""
        ...

    def add_chunks(self, chunks: list[UpdateChunk]) -> None:
        """Step these chunks too, after parameters were unfrozen. `masters.chunks` contains them already."""
        ...

    def cannot_step(self, dtype: torch.dtype, tier: Tier) -> bool:
        """Return True if master weights of `dtype` on tier `tier` cannot be stepped together with the existing ones."""
        ...

    def state_entries(self, unit: Unit | None = None) -> Iterator[StateEntry]:
        """Yield an entry for each tensor that this rank steps, of one unit or of all."""
        ...

    def rank_states(self) -> Iterator[RankState]:
        """Yield the states that differ between data-parallel ranks, in the same order on all of them."""
        ...

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """Prepare for the load of a checkpoint that has the per-rank states `saved`, given by their names. Collective.

        Afterwards `rank_states` yields the states to load.

        Returns:
            The names in `saved` that this update does not use, and whose states are dropped.
        """
        ...

    def formats(self) -> dict[int, dict[str, StateFormat]]:
        """Return the storage formats that the optimizer defines, by id of the parameter and name of the state."""
        ...

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """Update batch after batch, and yield each batch once its master weights are updated.

        The `gradient` of a chunk in the batch stays until the next batch; it is None if the chunk was not updated.

        Args:
            used: one flag for each parameter of a unit, by unit index: True if it had a gradient on any rank. Other
                parameters are skipped.
            divisor: divisor of the gradients: the loss scale over the clip coefficient.
        """
        ...


class OrdinaryUpdate:
    """Defaults of `Update` for an update whose gradients and results the engine communicates."""

    has_stepped: bool = False

    @classmethod
    def separates_masters(cls, shards_states: bool) -> bool:
        """See `Update.separates_masters`."""
        return False

    @classmethod
    def element_state_keys(cls) -> tuple[str, ...] | None:
        """See `Update.element_state_keys`."""
        return None

    @classmethod
    def rank_state_keys(cls, optimizer: torch.optim.Optimizer, shards_states: bool) -> tuple[str, ...]:
        """See `Update.rank_state_keys`."""
        return ()

    @property
    def takes_local_gradients(self) -> bool:
        """See `Update.takes_local_gradients`."""
        return False

    @property
    def equalizes_replicas(self) -> bool:
        """See `Update.equalizes_replicas`."""
        return False

    @property
    def keeps_local_weights(self) -> bool:
        """See `Update.keeps_local_weights`."""
        return False

    @property
    def publishes_itself(self) -> bool:
        """See `Update.publishes_itself`."""
        return False

    def publish(self, units: list[Unit]) -> None:
        """Raise NotImplementedError. Not called, because `publishes_itself` is False."""
        raise NotImplementedError(f"{type(self).__name__} publishes nothing by itself")

    def finish_transfers(self) -> None:
        """See `Update.finish_transfers`. No message is in flight between steps."""

    def forget_unsent(self) -> None:
        """See `Update.forget_unsent`. Does nothing."""

    def open_rank_states(self, saved: Collection[str]) -> frozenset[str]:
        """See `Update.open_rank_states`."""
        return frozenset()
