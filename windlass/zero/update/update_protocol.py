"""The protocol of optimizer updates: the code that steps the optimizer of a sharded model.

[Note: updates] An update steps the chunks of master weights that this rank keeps ([Note: kinds of states] describes
their states in a checkpoint). `ShardedModel` makes one, `update_class` chooses its class. The rest of the code reads
two flags instead of the class:

- `needs_whole_parameters`: a parameter is stepped in its own shape by one owner rank. Otherwise each rank steps flat
  segments of it, and a state has one value for each element of a segment, or one value for all.
- `reduces_itself`: the update receives local gradients, which no rank reduced, and communicates by itself
  ([Note: local gradients]).

States are of four kinds: one value for each element of a segment, one tensor for a parameter, one number for it, and
one value for each element on every rank ([Note: per-rank states]).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from windlass.comm.mesh_axis import MeshAxis
from windlass.optim.cpu_optimizer import StateFormat
from windlass.storage.slot import Tier
from windlass.zero.core.dp_group import DataParallelGroup
from windlass.zero.core.unit import Unit
from windlass.zero.update.master_weights import MasterWeights
from windlass.zero.update.optimizer_state_offload import OptimizerStateOffload
from windlass.zero.update.rank_state import RankState
from windlass.zero.update.update_chunk import StateEntry, UpdateChunk


@dataclass(frozen=True)
class UpdateContext:
    """Arguments of every update class besides the optimizer.

    Attributes:
        masters: the master weights that this rank updates, and their optimizer states.
        dp_groups: ranks over which states are sharded; the group of dense parameters first.
        axes: axes of the mesh by name.
        shards_states: False where every rank keeps and steps all states (stage 0).
        sub_group_numel: elements to update at once.
    """

    masters: MasterWeights
    dp_groups: list[DataParallelGroup]
    axes: Mapping[str, MeshAxis]
    shards_states: bool
    sub_group_numel: int


class Update(Protocol):
    """Steps of one optimizer on the chunks of a sharded model.

    Attributes:
        needs_whole_parameters: see [Note: updates]; read before the update is constructed.
        reduces_itself: see [Note: updates]; read before the update is constructed.
        optimizer: the user's optimizer. Its groups give the parameters and hyper-parameters.
        state_offload: the tiers of master weights and states. Its `states` are the states of this update.
    """

    needs_whole_parameters: ClassVar[bool]
    reduces_itself: ClassVar[bool]
    optimizer: torch.optim.Optimizer
    state_offload: OptimizerStateOffload

    def __init__(self, optimizer: torch.optim.Optimizer, context: UpdateContext) -> None: ...

    def add_chunks(self, chunks: list[UpdateChunk]) -> None:
        """Step these chunks too, after parameters were unfrozen. `masters.chunks` contains them already."""
        ...

    def cannot_step(self, dtype: torch.dtype, tier: Tier) -> bool:
        """Return True if master weights of `dtype` on tier `tier` cannot be stepped beside the present ones."""
        ...

    def state_entries(self, unit: Unit | None = None) -> Iterator[StateEntry]:
        """Yield the optimizer states of this rank, of one unit or of all: an entry for each tensor that it steps."""
        ...

    def rank_states(self) -> Iterator[RankState]:
        """Yield the states that differ between data-parallel ranks, in the same order on all of them."""
        ...

    def formats(self) -> dict[int, dict[str, StateFormat]]:
        """Return the formats of states that have a fixed one: by id of the parameter, then by name of the state."""
        ...

    def run(self, used: dict[int, list[bool]], divisor: float) -> Iterator[list[UpdateChunk]]:
        """Update batch after batch and yield each batch once its master weights are new.

        A chunk of the batch has its `gradient` until the next batch, or None if it was not updated.

        Args:
            used: by unit index, one flag for each parameter: True if it had a gradient on any rank. Other parameters
            are skipped. divisor: divisor of the gradients: the loss scale over the clip coefficient.
        """
        ...
