"""Training of a tensor-parallel model and of a full copy on each rank, and the differences between the two."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.causal_models import build, language
from tests.oracle import relative_error
from windlass.comm.mesh import build_mesh
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.full_parameters import write_local_shard
from windlass.parallel.placement import Placement, get_placement
from windlass.parallel.tensor import TensorParallelPlan, apply_tensor_parallel

EXACT = 1e-5
NORMS: dict[str, Any] = {"tp_sequence_norms": True}


@dataclass(frozen=True)
class Apart:
    """Largest relative errors of a tensor-parallel model, with the names of the parameters that have these errors, and
    the bytes moved in a step."""

    loss: float
    logits: float
    gradients: tuple[float, str]
    parameters: tuple[float, str]
    moved: dict[str, int]


def tensor_axis() -> MeshAxis:
    """Return the tensor-parallel axis over all ranks."""
    return build_mesh(MeshShape(tp=dist.get_world_size())).tp


def added_up(model: nn.Module, axis: MeshAxis) -> None:
    """All-reduce the gradients that are partial sums on each rank, as the engine does."""
    for parameter in model.parameters():
        if axis.name in get_placement(parameter).partial_axes and parameter.grad is not None:
            axis.all_reduce(parameter.grad)


def whole_gradients(model: nn.Module, axis: MeshAxis) -> dict[str, Tensor | None]:
    """Return full gradients by name, gathered by their placements."""
    return {
        name: None if parameter.grad is None else gather_full_tensor(parameter.grad, get_placement(parameter), axis)
        for name, parameter in model.named_parameters()
    }


def whole_values(model: nn.Module, axis: MeshAxis) -> dict[str, Tensor | None]:
    """Return full parameters by name, gathered by their placements."""
    return {
        name: gather_full_tensor(value.data, get_placement(value), axis) for name, value in model.named_parameters()
    }


def stepped(model: nn.Module) -> None:
    """Take one SGD step on the local parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.05)
                parameter.grad = None


def pair(
    name: str, changes: dict[str, Any], options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, nn.Module, MeshAxis, TensorParallelPlan]:
    """Return a full model, its tensor-parallel version, the axis, and the plan."""
    plain = build(name, **changes).train().to(dtype)
    model, axis = copy.deepcopy(plain), tensor_axis()
    plan = apply_tensor_parallel(model, axis, **options)
    return plain, model, axis, plan


def trained_beside(
    name: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    steps: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Apart:
    """Train a full model and its tensor-parallel version on the same batches. Return their differences."""
    plain, model, axis, _ = pair(name, changes, options, dtype)
    loss, gradients = 0.0, (0.0, "")
    moved: dict[str, int] = {}
    with torch.no_grad():
        ids = language(99)["input_ids"]
        expected, actual = plain(input_ids=ids).logits, model(input_ids=ids).logits
        logits = relative_error({"logits": actual}, {"logits": expected})[0]
    for step in range(steps):
        batch = language(step)
        want = plain(**batch).loss
        want.backward()
        axis.traffic.reset()
        have = model(**batch).loss
        have.backward()
        moved = dict(axis.traffic.bytes_moved)
        loss = max(loss, abs(float(have) - float(want)) / abs(float(want)))
        added_up(model, axis)
        all_of_them = {name: parameter.grad for name, parameter in plain.named_parameters()}
        gradients = max(gradients, relative_error(whole_gradients(model, axis), all_of_them))
        stepped(plain)
        stepped(model)
    parameters = relative_error(whole_values(model, axis), dict(plain.named_parameters()))
    return Apart(loss, logits, gradients, parameters, moved)


def gather_full_tensor(local: torch.Tensor, placement: Placement, *axes: MeshAxis) -> torch.Tensor:
    """Gather the full tensor on every rank of the axes. Collective.

    Args:
        local: this rank's part: a parameter, its gradient, or an optimizer state of its shape.
        placement: placement of the parameter; ranks along `placement.sharded_axes` hold other parts.
        axes: the mesh axes; axes along which the tensor is not sharded are ignored.

    Raises:
        ValueError: an axis along which the tensor is sharded is missing.
    """
    missing = placement.sharded_axes - {axis.name for axis in axes}
    if missing:
        raise ValueError(
            f"the tensor is sharded over {sorted(placement.sharded_axes)}; pass the missing axes {sorted(missing)} too"
        )
    parts = [(placement, local.detach().reshape(-1))]
    for axis in axes:
        if axis.name in placement.sharded_axes:
            parts = _all_gather_parts(parts, axis)
    full = local.new_empty(placement.global_shape)
    for placed, flat in parts:
        write_local_shard(flat.view(placed.local_shape), full, placed)
    return full


def _all_gather_parts(
    parts: list[tuple[Placement, torch.Tensor]], axis: MeshAxis
) -> list[tuple[Placement, torch.Tensor]]:
    """All-gather the parts of all ranks along the axis."""
    placements = axis.all_gather_object([placed for placed, _ in parts])
    counts = [[torch.Size(placed.local_shape).numel() for placed in of_rank] for of_rank in placements]
    flat = axis.all_gather(torch.cat([part for _, part in parts]), 0, [sum(of_rank) for of_rank in counts])
    sizes = [count for of_rank in counts for count in of_rank]
    everything = [placed for of_rank in placements for placed in of_rank]
    return list(zip(everything, flat.split(sizes), strict=True))
