"""Transfer of master weights and optimizer states from one `ShardedModel` to another that shards differently."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.zero.access.shard_values import part_param, part_states, set_part_param, set_part_state, set_plain_state
from windlass.zero.core.parameter_registry import require

if TYPE_CHECKING:
    from windlass.zero.sharded_model import ShardedModel


@dataclass
class _TransferredState:
    weight: torch.Tensor
    states: dict[str, Any] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)


class StateTransfer:
    """Copy of a model's trained parameters, optimizer states and averages in host memory. Collective.

    Each parameter is kept unsharded on one rank. So a rank needs `1 / ranks` of the size of weights, states and
    averages in host memory, and temporarily one full parameter with its states.

    Args:
        model: Model to copy from. It may be destroyed afterwards.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._states: list[tuple[nn.Parameter, int, _TransferredState | None]] = []
        self._averages = list(model.averages.values())
        # every rank stays and keeps its own, see [Note: per-rank states]
        self._rank_states = {
            (id(state.unit.parameters[state.index]), state.key): state.values.cpu().clone()
            for state in (model.update.rank_states() if model.update is not None else ())
        }
        with torch.no_grad():
            for unit in model.units:
                group = unit.dp_group.mesh.data
                for parameter in unit.parameters if model.masters.chunks_of(unit) else ():
                    owner = len(self._states) % group.size
                    copied = _TransferredState(part_param(parameter), part_states(parameter))
                    for average in self._averages:
                        if average.updates:
                            copied.averages[average.name] = average.part_param(parameter)
                    self._states.append((parameter, owner, _in_host_memory(copied) if owner == group.index else None))

    def restore(self, model: ShardedModel) -> None:
        """Set the copied values in `model`, which has the same parameters, and free the copy. Collective.

        Parameters that are frozen in `model` keep their values.
        """
        for average in self._averages:
            average.rebind(model)
        trained = {id(p) for unit in model.units if model.masters.chunks_of(unit) for p in unit.parameters}
        for parameter, owner, copied in self._states:
            if id(parameter) not in trained:
                continue
            found = require(parameter).unit.dp_group.mesh.data.broadcast_object(copied, owner)
            assert found is not None
            set_part_param(parameter, found.weight.to(model.device))
            for key, value in found.states.items():
                if isinstance(value, torch.Tensor):
                    set_part_state(parameter, key, value)
                else:
                    set_plain_state(parameter, key, value)
            for name, value in found.averages.items():
                model.averages[name].set_part_param(parameter, value.to(model.device))
        self._states = []
        for state in model.update.rank_states() if model.update is not None else ():
            values = self._rank_states.get((id(state.unit.parameters[state.index]), state.key))
            if values is not None:
                state.values.copy_(values)


def _in_host_memory(state: _TransferredState) -> _TransferredState:
    states = {key: v.cpu() if isinstance(v, torch.Tensor) else v for key, v in state.states.items()}
    return _TransferredState(state.weight.cpu(), states, {name: value.cpu() for name, value in state.averages.items()})
