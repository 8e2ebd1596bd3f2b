"""Sharding of optimizer states that were made before `initialize` sharded their parameters over tp or ep."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from windlass.optim.elementwise_optimizers import SCALAR_STATES
from windlass.parallel.full_parameters import select_local_shard
from windlass.zero.core.unit import Unit


def select_local_states(optimizer: torch.optim.Optimizer, units: Iterable[Unit]) -> None:
    """Replace each state that has the shape of a full parameter by this rank's part of the state.

    States of an optimizer that was made after tp or ep sharded the model are parts already.
    """
    for unit in units:
        for parameter, placement in zip(unit.parameters, unit.placements, strict=True):
            state = optimizer.state.get(parameter, {})
            for key, value in () if placement.is_full else list(state.items()):
                shaped = isinstance(value, torch.Tensor) and key not in SCALAR_STATES
                if shaped and tuple(value.shape) == placement.global_shape:
                    state[key] = select_local_shard(value.detach(), placement)
