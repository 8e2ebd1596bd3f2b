"""The experts of a model are spread over the ranks of an axis."""

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
    """One layer's experts.

    Attributes:
        name: of the module that holds them.
        kind: its class.
        experts: how many there are.
        here: `[first, end)` of those on this rank.
    """

    name: str
    class_name: str
    num_experts: int
    local_experts: tuple[int, int]


@dataclass(frozen=True)
class ExpertParallelPlan:
    """What was spread over how many ranks."""

    ranks: int
    layers: tuple[ExpertLayerShard, ...]

    def __str__(self) -> str:
        lines = [f"experts over {self.ranks} ranks:"]
        for layer in self.layers:
            lines.append(
                f"  {layer.name} ({layer.class_name}): {layer.local_experts[0]} to {layer.local_experts[1] - 1} of {layer.num_experts} here"
            )
        return "\n".join(lines)


def apply_expert_parallel(
    model: nn.Module, axis: MeshAxis, *, replicated: Collection[str] = (), required: bool = True
) -> ExpertParallelPlan:
    """Leave this rank its own experts of every layer, and have layers send tokens to where their experts are.

    Changes `model` in place: layers of `MoE` lose other ranks' experts; modules of transformers (and what
    `register_experts` knows) keep some rows of their tensors, which `placement_of` tells, and get a forward of their
    own. Routers stay as they are. Not collective; works on the meta device. On an axis of one rank nothing changes.
    Tensor parallelism may cut other dimensions before or after.

    Args:
        axis: along which experts are spread.
        dense: names of classes, or regular expressions of modules' names, whose experts stay whole on every rank.
        required: False: a model without experts is none to complain about (a stage of a pipeline).

    Raises:
        ModelError: there are no experts, or some that nobody knows how to cut.
        ConfigError: fewer experts than ranks, or a `MoE` that asks for another number of ranks.
    """
    layers = list(_expert_modules(model, replicated))
    unknown = list(_unknown_expert_modules(model, replicated)) if axis.size > 1 else []
    if unknown:
        raise ModelError(_unknown_experts_text(unknown[0], axis.size))
    if not layers and required and axis.size > 1:
        raise ModelError(
            f"{type(model).__name__} has no experts that could be spread over parallel.ep = {axis.size} ranks; "
            "set parallel.ep to 1"
        )
    _check_expert_counts(model, layers, axis)
    if axis.size == 1:
        return ExpertParallelPlan(
            1, tuple(ExpertLayerShard(name, type(m).__name__, n, (0, n)) for name, m, _, n in layers)
        )
    for name, module, family, _ in layers:
        if family is not None:
            find_shardable_parameters(module, name, family)
    cut = []
    for name, module, family, count in layers:
        if family is None:
            assert isinstance(module, Experts)
            here = module.shard(axis)
        else:
            here = shard_stacked_experts(module, name, family, axis)
        cut.append(ExpertLayerShard(name, type(module).__name__, count, here))
    return ExpertParallelPlan(axis.size, tuple(cut))


def get_requested_ep_size(model: nn.Module) -> int:
    """Over how many ranks the model's layers of `MoE` ask to be spread (`ep_size`); 1 if they don't.

    Raises:
        ConfigError: they ask for different numbers.
    """
    asked = {module.ep_size for module in model.modules() if isinstance(module, MixtureOfExperts)}
    if len(asked - {1}) > 1:
        raise ConfigError(
            f"layers of MoE ask for ep_size = {' and '.join(map(str, sorted(asked)))}; there is one axis of experts: "
            "write the same in all of them"
        )
    return max(asked, default=1)


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of experts that are, or could be, spread: their names and themselves."""
    for name, module, family, _ in _expert_modules(model, ()):
        if family is None:
            yield from ((f"{name}.{inner}", parameter) for inner, parameter in module.named_parameters())
        else:
            yield from ((f"{name}.{inner}", module.get_parameter(inner)) for inner in family.sharded_parameters(module))


def _expert_modules(
    model: nn.Module, replicated: Collection[str]
) -> Iterator[tuple[str, nn.Module, ExpertModuleSpec | None, int]]:
    """Modules that hold experts: name, module, how (None: modules of their own), and how many there are in all."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside) or _is_replicated(name, module, replicated):
            continue
        if isinstance(module, Experts):
            inside.append(name)
            yield name, module, None, module.num_experts
            continue
        family = find_expert_spec(module)
        if family is not None:
            inside.append(name)
            forward = module.__dict__.get("forward")
            count = (
                forward.num_experts
                if isinstance(forward, ExpertParallelForward)
                else int(getattr(module, family.count_attribute))
            )
            yield name, module, family, count


def _unknown_expert_modules(model: nn.Module, replicated: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that go by the name of experts, have parameters, and are none of `_layers` nor shared by all tokens."""
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
                f"{name} ({type(module).__name__}) has {count} experts, and parallel.ep = {axis.size} ranks have at "
                f"least one each; set parallel.ep to at most {min(n for _, _, _, n in layers)}"
            )
        spread_already = isinstance(module.__dict__.get("forward"), ExpertParallelForward) or (
            isinstance(module, Experts) and module.axis.size > 1
        )
        if axis.size > 1 and spread_already:
            raise ModelError(f"{name} is spread already: apply_expert_parallel is called once")
    asked = get_requested_ep_size(model)
    if asked not in (1, axis.size):
        raise ConfigError(
            f"layers of MoE ask for ep_size = {asked}, and parallel.ep = {axis.size}; set parallel.ep to {asked}"
        )


def _unknown_experts_text(found: tuple[str, nn.Module], ranks: int) -> str:
    name, module = found
    kind = type(module).__name__
    return (
        f"nobody knows how to spread {name} ({kind}) over parallel.ep = {ranks} ranks. Known are windlass.MoE, modules "
        "of transformers' experts interface, modules with num_experts and tensors [num_experts, ...] whose forward "
        f"takes (hidden_states, top_k_index, top_k_weights), and {', '.join(list_registered_classes())}. Say how with "
        f"register_experts({kind!r}, ...), leave it whole with dense=[{kind!r}], or set parallel.ep to 1"
    )
