"""Plan of a model's units (groups of parameters that are gathered together): the blocks and parameters of each."""

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
    """Plan of a unit. Its parameters agree in dtype, device, `trainable`, `kind`, and in the three flags below.

    Attributes:
        blocks: Blocks that use at least one of the parameters.
        persistent: The parameters are never resharded.
        lowered: Gradients are sent in `ZeroSettings.lowered_reduce_dtype`.
        unstepped: The parameters are trainable, but in no group of the optimizer.
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
        """Number of elements of the full parameters: equal on all ranks, even if the ranks' parts differ in size."""
        return sum(get_global_numel(p) for p in self.parameters)
