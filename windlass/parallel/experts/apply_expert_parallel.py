"""Distribution of a model's experts over the ranks of a mesh axis."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.experts.expert_list import Experts
from windlass.parallel.experts.expert_modules import ExpertModuleSpec, find_expert_spec, list_registered_classes
from windlass.parallel.experts.mixture_of_experts import MixtureOfExperts
from windlass.parallel.experts.stacked_experts import (
    ExpertParallelForward,
    find_shardable_parameters,
    shard_stacked_experts,
)


@dataclass(frozen=True)
class ExpertLayerShard:
    """Experts of one layer.

    Attributes:
        name: name of the module that holds the experts.
        class_name: class of that module.
        num_experts: number of experts on all ranks.
        local_experts: range `[first, end)` of the experts on this rank.
    """

    name: str
    class_name: str
    num_experts: int
    local_experts: tuple[int, int]


@dataclass(frozen=True)
class ExpertParallelPlan:
    """Result of `apply_expert_parallel`: the number of ranks and the expert layers."""

    ranks: int
    layers: tuple[ExpertLayerShard, ...]

    def __str__(self) -> str:
        lines = [f"experts over {self.ranks} ranks:"]
        for layer in self.layers:
            lines.append(
                f"  {layer.name} ({layer.class_name}): {layer.local_experts[0]} to {layer.local_experts[1] - 1} of "
                f"{layer.num_experts} here"
            )
        return "\n".join(lines)


def apply_expert_parallel(
    model: nn.Module, axis: MeshAxis, *, replicated: Collection[str] = (), required: bool = True
) -> ExpertParallelPlan:
    """Keep only this rank's experts in every layer, and make the layers dispatch tokens to the ranks of their experts.

    Changes `model` in place. `MoE` layers drop the experts of other ranks. Expert modules of transformers, `StackedMLP`
    and classes registered with `register_experts` keep the rows of this rank's experts, recorded by `set_placement`,
    and get a new forward. Routers do not change. Not collective; works on the meta device. Nothing changes on an axis
    of one rank. Tensor parallelism may shard other dimensions before or after.

    Args:
        axis: mesh axis over which the experts are distributed.
        replicated: class names, or regular expressions of module names, whose experts are replicated on every rank.
        required: raise if the model has no experts. False for a stage of a pipeline.

    Raises:
        ModelError: there are no experts, experts of an unknown class, experts that are distributed already, or a tensor
            that cannot be divided into equal parts for its experts.
        ConfigError: fewer experts than ranks, or a `MoE` layer with a different `ep_size`.
    """
    layers = list(_expert_modules(model, replicated))
    unknown = list(_unknown_expert_modules(model, replicated)) if axis.size > 1 else []
    if unknown:
        raise ModelError(_unknown_experts_text(unknown[0], axis.size))
    if not layers and required and axis.size > 1:
        raise ModelError(
            f"{type(model).__name__} has no experts to distribute over parallel.ep = {axis.size} ranks; "
            "set parallel.ep to 1"
        )
    _check_expert_counts(model, layers, axis)
    if axis.size == 1:
        return ExpertParallelPlan(
            1, tuple(ExpertLayerShard(name, type(m).__name__, n, (0, n)) for name, m, _, n in layers)
        )
    for name, module, spec, _ in layers:
        if spec is not None:
            find_shardable_parameters(module, name, spec)
    sharded = []
    for name, module, spec, count in layers:
        if spec is None:
            assert isinstance(module, Experts)
            here = module.shard(axis)
        else:
            here = shard_stacked_experts(module, name, spec, axis)
        sharded.append(ExpertLayerShard(name, type(module).__name__, count, here))
    return ExpertParallelPlan(axis.size, tuple(sharded))


def get_requested_ep_size(model: nn.Module) -> int:
    """Return the `ep_size` that the model's `MoE` layers request; 1 if none does.

    Raises:
        ConfigError: layers request different sizes.
    """
    requested = {module.ep_size for module in model.modules() if isinstance(module, MixtureOfExperts)}
    if len(requested - {1}) > 1:
        raise ConfigError(
            f"MoE layers have different ep_size: {' and '.join(map(str, sorted(requested)))}; there is one "
            "expert-parallel axis: write the same value in all of them"
        )
    return max(requested, default=1)


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of every expert parameter that is, or can be, sharded along ep."""
    for name, module, spec, _ in _expert_modules(model, ()):
        if spec is None:
            yield from ((f"{name}.{inner}", parameter) for inner, parameter in module.named_parameters())
        else:
            yield from ((f"{name}.{inner}", module.get_parameter(inner)) for inner in spec.sharded_parameters(module))


def _expert_modules(
    model: nn.Module, replicated: Collection[str]
) -> Iterator[tuple[str, nn.Module, ExpertModuleSpec | None, int]]:
    """Yield each module that holds experts: name, module, spec (None for `Experts`), and total number of experts."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside) or _is_replicated(name, module, replicated):
            continue
        if isinstance(module, Experts):
            inside.append(name)
            yield name, module, None, module.num_experts
            continue
        spec = find_expert_spec(module)
        if spec is not None:
            inside.append(name)
            forward = module.__dict__.get("forward")
            count = (
                forward.num_experts
                if isinstance(forward, ExpertParallelForward)
                else int(getattr(module, spec.count_attribute))
            )
            yield name, module, spec, count


def _unknown_expert_modules(model: nn.Module, replicated: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that are named like experts and have parameters, but match no known class and are not shared
    experts.
    """
    known = [name for name, _, _, _ in _expert_modules(model, ())]
    for name, module in model.named_modules():
        named = name.rpartition(".")[2] == "experts" or re.search(r"Experts?([A-Z0-9]|$)", type(module).__name__)
        shared = "shared" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        if not named or shared or _is_replicated(name, module, replicated) or next(module.parameters(), None) is None:
            continue
        if not any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in known):
            yield name, module


def _is_replicated(name: str, module: nn.Module, replicated: Collection[str]) -> bool:
    return any(type(module).__name__ == one or re.fullmatch(one, name) for one in replicated)


def _check_expert_counts(
    model: nn.Module, layers: list[tuple[str, nn.Module, ExpertModuleSpec | None, int]], axis: MeshAxis
) -> None:
    for name, module, _, count in layers:
        if count < axis.size:
            raise ConfigError(
                f"{name} ({type(module).__name__}) has {count} experts, fewer than the parallel.ep = {axis.size} "
                f"ranks, and each rank needs one; set parallel.ep to at most {min(n for _, _, _, n in layers)}"
            )
        spread_already = isinstance(module.__dict__.get("forward"), ExpertParallelForward) or (
            isinstance(module, Experts) and module.axis.size > 1
        )
        if axis.size > 1 and spread_already:
            raise ModelError(f"the experts of {name} are distributed already; call apply_expert_parallel once")
    requested = get_requested_ep_size(model)
    if requested not in (1, axis.size):
        raise ConfigError(
            f"MoE layers have ep_size = {requested}, and parallel.ep = {axis.size}; set parallel.ep to {requested}"
        )


def _unknown_experts_text(found: tuple[str, nn.Module], ranks: int) -> str:
    name, module = found
    kind = type(module).__name__
    return (
        f"cannot distribute {name} ({kind}) over parallel.ep = {ranks} ranks: unknown class. Known are "
        f"windlass.MoE, modules "
        "of transformers' experts interface, modules with num_experts and tensors [num_experts, ...] whose forward "
        f"takes (hidden_states, top_k_index, top_k_weights), and {', '.join(list_registered_classes())}. Describe "
        f"it with "
        f"register_experts({kind!r}, ...), replicate it with replicated=[{kind!r}], or set parallel.ep to 1"
    )
