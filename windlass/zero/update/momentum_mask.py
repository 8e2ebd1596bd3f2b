"""Momentum masks: elements of parameters whose momentum stays zero in compressed steps.

A message of one bit for each element cannot represent zero. An element whose gradient is always zero, such as an
embedding of a position beyond the sequence length, would get a momentum from messages of its block. A parameter group
excludes such elements by a mask under the key `exp_avg_mask`, as in DeepSpeed: the momentum is multiplied by it after
every exchange. Elements without a gradient before the freeze need no mask: their variance is zero, and they do not
move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from windlass.base.errors import ConfigError
from windlass.optim.one_bit_adam import MOMENTUM_MASK
from windlass.parallel.full_parameters import select_local_shard
from windlass.zero.core.unit import Unit


def check_momentum_masks(optimizer: torch.optim.Optimizer, units: Iterable[Unit]) -> None:
    """Check the masks of all parameter groups.

    Raises:
        ConfigError: a mask is not a tensor, or does not have the elements of a parameter of its group.
    """
    places = {id(p): (unit, index) for unit in units for index, p in enumerate(unit.parameters)}
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get(MOMENTUM_MASK) is not None else ():
            if id(parameter) in places:
                _local_mask(group, *places[id(parameter)])


def apply_momentum_mask(values: torch.Tensor, group: Mapping[str, Any], unit: Unit, index: int, start: int = 0) -> None:
    """Multiply a momentum, or the mean of messages, by the mask of its parameter group in place; no effect without one.

    Args:
        values: elements of the parameter number `index` of `unit` from `start` on, of any shape.
        group: the hyper-parameters of the parameter's group.

    Raises:
        ConfigError: see `check_momentum_masks`.
    """
    if group.get(MOMENTUM_MASK) is not None:
        mask = _local_mask(group, unit, index)[start : start + values.numel()]
        values.mul_(mask.to(device=values.device, dtype=values.dtype).view(values.shape))


def _local_mask(group: Mapping[str, Any], unit: Unit, index: int) -> torch.Tensor:
    """Return the flat mask of this rank's part of a parameter."""
    mask, placement = group[MOMENTUM_MASK], unit.placements[index]
    numel, full = unit.layout.numels[index], torch.Size(placement.global_shape)
    if isinstance(mask, torch.Tensor) and mask.numel() == full.numel():
        return select_local_shard(mask.detach().reshape(full), placement).reshape(-1)
    if isinstance(mask, torch.Tensor) and mask.numel() == numel:
        return mask.detach().reshape(-1)
    given = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
    raise ConfigError(
        f"{MOMENTUM_MASK} in the group of {unit.names[index]!r} is {given}, and the parameter has the shape "
        f"{tuple(full)}; give each parameter with a mask a group of its own, and a mask of its shape"
    )
