"""Plan of a model's units: blocks, and the parameters of each unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from windlass.parallel.placement import PlacementKey, get_global_numel, get_placement


@dataclass(eq=False)
class Block:
    """Module whose units are unsharded before its forward and its backward, and resharded afterwards."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]


@dataclass(eq=False)
class UnitPlan:
    """Plan of a unit.

    Its parameters have one dtype, are all trainable or all frozen, and all persistent or none. They are sharded and
    reduced over the same ranks, in one dtype. Either none of them is in a group of the optimizer (`unstepped`), or all
    that are trainable.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    blocks: list[Block]
    persistent: bool
    lowered: bool = False
    unstepped: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def trainable(self) -> bool:
        return self.parameters[0].requires_grad

    @property
    def kind(self) -> PlacementKey:
        return get_placement(self.parameters[0]).key

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.parameters)

    @property
    def full_numel(self) -> int:
        """Number of elements of the full parameters: equal on all ranks, even if their parts differ in size."""
        return sum(get_global_numel(p) for p in self.parameters)
