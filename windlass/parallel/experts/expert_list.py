"""Experts that are separate modules. A rank may hold only some of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from windlass.comm.mesh_axis import MeshAxis, single_rank_axis
from windlass.parallel.experts.deepcopy_on_axis import deepcopy_on_axis
from windlass.parallel.experts.expert_dispatch import compute_expert_spans, dispatch_and_combine
from windlass.parallel.experts.grouped_linear import RowGroups
from windlass.parallel.placement import get_placement, set_placement


class ExpertList(nn.ModuleList):
    """List of experts indexed by their global number. Parameter names keep that number, so that checkpoints contain all
    experts.
    """

    def __getitem__(self, number: int | slice) -> nn.Module:  # type: ignore[override]
        if isinstance(number, slice):
            raise TypeError(
                "slices are not supported, because a rank may not hold all experts; index experts one by one"
            )
        found = self._modules.get(str(number))
        if found is None:
            raise IndexError(
                f"expert {number} is not on this rank, which has {', '.join(self._modules)}; use one of these"
            )
        return found

    def keep_only(self, expert_ids: Sequence[int]) -> None:
        """Drop all experts except those in `expert_ids`."""
        kept = {str(number) for number in expert_ids}
        for name in [name for name in self._modules if name not in kept]:
            del self._modules[name]


class Experts(nn.Module):
    """Copies of one module.

    All copies are on this rank until `shard`. An expert without tokens runs on zero rows, so its parameters get zero
    gradients, as in DeepSpeed. If the expert did not run, its gradients would be None and an optimizer would skip them.
    Thus momentum and weight decay are applied to every expert in every step, and each rank runs the same modules in the
    same order. An expert must therefore accept `[0, hidden]`.

    Args:
        expert: the module; it maps `[rows, hidden]` to the same shape, or to a tuple whose first element has the shape.
        num_experts: number of copies.
    """

    def __init__(self, expert: nn.Module, num_experts: int) -> None:
        super().__init__()
        self.deepspeed_experts = ExpertList([copy.deepcopy(expert) for _ in range(num_experts)])
        self.num_experts = num_experts
        self.axis: MeshAxis = single_rank_axis("ep")

    def shard(self, axis: MeshAxis) -> tuple[int, int]:
        """Keep only this rank's experts, and return their range `[first, end)`."""
        first, end = compute_expert_spans(self.num_experts, axis)[axis.index]
        self.deepspeed_experts.keep_only(range(first, end))
        for parameter in self.parameters():
            before = get_placement(parameter)
            set_placement(parameter, replace(before, sharded_axes=before.sharded_axes | {axis.name}, is_expert=True))
        self.axis = axis
        return first, end

    def __deepcopy__(self, memo: dict[int, Any]) -> Experts:
        """Deep-copy the experts. The copy shares the mesh axis."""
        return deepcopy_on_axis(self, self.axis, memo)

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *, dropless: bool = False
    ) -> torch.Tensor:
        """Run tokens `[tokens, hidden]` through their experts (`dispatch_and_combine`). Collective along the expert
        axis.
        """
        return dispatch_and_combine(
            hidden,
            index,
            weights,
            num_experts=self.num_experts,
            axis=self.axis,
            run_local_experts=self.run_local_experts,
            dropless=dropless,
        )

    def run_local_experts(self, rows: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """Run rows `[rows, hidden]`, sorted by expert, through this rank's experts."""
        found = []
        for expert, part in zip(self.deepspeed_experts, rows.split(groups.sizes()), strict=True):
            out = expert(part)
            found.append(out[0] if isinstance(out, tuple) else out)
        return torch.cat(found)


def sharded_expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield each module inside the `Experts` that are distributed over ranks. Other ranks hold different experts."""
    seen: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, Experts) and module.axis.size > 1:
            for inner in module.deepspeed_experts.modules():
                if inner not in seen:
                    seen.add(inner)
                    yield inner
