"""Tests that expert parallelism with tensor or sequence parallelism equals one process: losses and full gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.harness import run_ranks
from tests.hf_experts import FAMILIES, language
from tests.oracle import relative_error
from windlass.comm.mesh import Mesh, build_mesh
from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.experts import apply_expert_parallel
from windlass.parallel.full_parameters import gather_full_with_grad, select_local_shard
from windlass.parallel.placement import get_placement
from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel
from windlass.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel

BOUND = 1e-5
OF_MATRICES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "granite", "gpt_oss")
OF_SEQUENCES = ("qwen2_moe", "qwen3_moe", "deepseek_v3", "olmoe", "granite")


def see(family: str, mesh: Mesh) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of this rank's tokens, and the full gradients of the mean of all ranks' losses."""
    model: nn.Module = FAMILIES[family].build()
    apply_expert_parallel(model, mesh.ep)
    apply_tensor_parallel(model, mesh.tp)
    apply_sequence_parallel(model, mesh.sp)
    cut = {name for name in ("ep", "tp") if mesh.axes[name].size > 1}
    assert any(get_placement(p).sharded_axes == cut for p in model.parameters()), f"nothing of {family} is cut by {cut}"
    loss = model(**language(mesh.ep.index)).loss
    loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        placement, grad = get_placement(parameter), parameter.grad
        assert grad is not None, name
        for axis in placement.partial_axes:
            grad = mesh.axes[axis].all_reduce(grad.contiguous().clone())
        grad = gather_full_with_grad(grad, placement, mesh.axes)
        if not placement.is_expert:
            grad = mesh.ep.all_reduce(grad.contiguous().clone())
        grads[name] = mesh.sp.all_reduce(grad.contiguous().clone()) / (mesh.ep.size * mesh.sp.size)
    return loss.item(), grads


def see_all(grid: MeshShape, families: tuple[str, ...]) -> list[Any]:
    mesh = build_mesh(grid)
    return [see(family, mesh) for family in families]


@cache
def expected(family: str) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = FAMILIES[family].build(), []
    for rank in range(2):
        loss = model(**language(rank)).loss
        (loss / 2).backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differentiate(grid: MeshShape) -> float:
    """Return the largest error of gradients through gathered parameters. The loss differs along ep."""
    mesh, error = build_mesh(grid), 0.0
    model: nn.Module = FAMILIES["mixtral"].build()
    apply_expert_parallel(model, mesh.ep)
    apply_tensor_parallel(model, mesh.tp)
    for parameter in model.parameters():
        placement = get_placement(parameter)
        full = gather_full_with_grad(parameter, placement, mesh.axes)
        factors = torch.arange(full.numel(), dtype=full.dtype).sin().view_as(full)
        (full * factors * (mesh.ep.index + 1)).sum().backward()
        total = 3 if "ep" in placement.sharded_axes else mesh.ep.index + 1
        assert parameter.grad is not None
        error = max(error, float((parameter.grad - select_local_shard(total * factors, placement)).abs().max()))
    return error


def test_gathered_parameters_are_differentiable() -> None:
    assert max(run_ranks(differentiate, 4, MeshShape(ep=2, tp=2), timeout=240)) <= 1e-6


@pytest.mark.parametrize(
    ("grid", "families"), [(MeshShape(ep=2, tp=2), OF_MATRICES), (MeshShape(ep=2, sp=2), OF_SEQUENCES)]
)
def test_experts_of_models_sharded_along_another_axis(grid: MeshShape, families: tuple[str, ...]) -> None:
    by_rank = run_ranks(see_all, 4, grid, families, timeout=240)
    for number, family in enumerate(families):
        losses, requested = expected(family)
        for rank, seen in enumerate(by_rank):
            loss, grads = seen[number]
            assert abs(loss - losses[grid.coordinates(rank)["ep"]]) <= BOUND * abs(loss), (family, rank)
            error, where = relative_error(grads, requested)
            assert error <= BOUND, (family, rank, where, error)
