"""Model with layers sharded over tp and experts over ep, placed by hand with placements alone, and its full version."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from windlass.comm.mesh import Mesh
from windlass.parallel import autograd_collectives
from windlass.parallel.full_parameters import select_local_shard
from windlass.parallel.placement import (
    Placement,
    compute_shard_range,
    make_full_ranges,
    make_ranges_along,
    set_placement,
)

VOCABULARY, HIDDEN, MIDDLE, EXPERTS = 11, 8, 12, 3


class Block(nn.Module):
    """Block of a norm scale, an up and a down projection, and experts whose outputs a router weights and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.up = nn.Linear(HIDDEN, MIDDLE)
        self.down = nn.Linear(MIDDLE, HIDDEN, bias=False)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.2)
        self.mesh: Mesh | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mesh = self.mesh
        if mesh is None:
            scaled = hidden * self.scale
            hidden = hidden + self.down(F.gelu(self.up(scaled)))
        else:
            local = autograd_collectives.scatter_to_parallel_region(hidden, mesh.tp, 2)
            each = HIDDEN // mesh.tp.size
            scale = self.scale[mesh.tp.index * each : (mesh.tp.index + 1) * each]
            scaled = autograd_collectives.gather_from_parallel_region(local * scale, mesh.tp, 2)
            middle = F.gelu(self.up(autograd_collectives.copy_to_parallel_region(scaled, mesh.tp)))
            hidden = hidden + autograd_collectives.reduce_from_parallel_region(self.down(middle), mesh.tp)
        weights = torch.softmax(self.router(hidden), -1)
        if mesh is None:
            return hidden + torch.einsum("bse,bsh,ehk->bsk", weights, hidden, self.experts)
        first, last = compute_shard_range(EXPERTS, mesh.ep.size, mesh.ep.index)
        everyone, theirs = (
            autograd_collectives.all_gather(hidden, mesh.ep, 0),
            autograd_collectives.all_gather(weights, mesh.ep, 0),
        )
        mixed = torch.einsum("bse,bsh,ehk->bsk", theirs[..., first:last], everyone, self.experts)
        return hidden + autograd_collectives.reduce_scatter(mixed, mesh.ep, 0)


class Model(nn.Module):
    """Tied embedding and head around two blocks, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in (*self.blocks, self.blocks[0]):
            hidden = block(hidden)
        loss: torch.Tensor = F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss


def whole() -> Model:
    """Return the full model, which is the same on every rank."""
    torch.manual_seed(3)
    return Model()


def parted(mesh: Mesh) -> Model:
    """Return the part of the model on one rank of the mesh."""
    model = whole()
    for block in model.blocks:
        assert isinstance(block, Block)
        block.mesh = mesh
        middle = compute_shard_range(MIDDLE, mesh.tp.size, mesh.tp.index)
        _cut(block.up.weight, make_ranges_along((MIDDLE, HIDDEN), 0, [middle]), sharded_axes=frozenset({"tp"}))
        _cut(block.up.bias, make_ranges_along((MIDDLE,), 0, [middle]), sharded_axes=frozenset({"tp"}))
        _cut(block.down.weight, make_ranges_along((HIDDEN, MIDDLE), 1, [middle]), sharded_axes=frozenset({"tp"}))
        _cut(block.scale, make_full_ranges((HIDDEN,)), partial_axes=frozenset({"tp"}))
        local = compute_shard_range(EXPERTS, mesh.ep.size, mesh.ep.index)
        shape = (EXPERTS, HIDDEN, HIDDEN)
        _cut(block.experts, make_ranges_along(shape, 0, [local]), sharded_axes=frozenset({"ep"}), is_expert=True)
    return model


def _cut(parameter: nn.Parameter, ranges: Any, **kind: Any) -> None:
    placement = Placement(tuple(parameter.shape), ranges, **kind)
    parameter.data = select_local_shard(parameter.data, placement).clone()
    set_placement(parameter, placement)
