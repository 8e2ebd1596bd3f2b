"""The experts of a model are spread over the ranks of an axis."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.comm.axis import Axis
from windlass.parallel.experts.families import Family, family_of, known_classes
from windlass.parallel.experts.layer import MoE
from windlass.parallel.experts.separate import Experts
from windlass.parallel.experts.stacked import SpreadForward, checked, cut_stacked


@dataclass(frozen=True)
class Layer:
    """One layer's experts.

    Attributes:
        name: of the module that holds them.
        kind: its class.
        experts: how many there are.
        here: `[first, end)` of those on this rank.
    """

    name: str
    kind: str
    experts: int
    here: tuple[int, int]


@dataclass(frozen=True)
class Plan:
    """What was spread over how many ranks."""

    ranks: int
    layers: tuple[Layer, ...]

    def __str__(self) -> str:
        lines = [f"experts over {self.ranks} ranks:"]
        for layer in self.layers:
            lines.append(
                f"  {layer.name} ({layer.kind}): {layer.here[0]} to {layer.here[1] - 1} of {layer.experts} here"
            )
        return "\n".join(lines)


def apply_expert_parallel(model: nn.Module, axis: Axis, *, dense: Collection[str] = (), required: bool = True) -> Plan:
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
    layers = list(_layers(model, dense))
    unknown = list(_unknown(model, dense)) if axis.size > 1 else []
    if unknown:
        raise ModelError(_what_is_unknown(unknown[0], axis.size))
    if not layers and required and axis.size > 1:
        raise ModelError(
            f"{type(model).__name__} has no experts that could be spread over parallel.ep = {axis.size} ranks; "
            "set parallel.ep to 1"
        )
    _check_counts(model, layers, axis)
    if axis.size == 1:
        return Plan(1, tuple(Layer(name, type(m).__name__, n, (0, n)) for name, m, _, n in layers))
    for name, module, family, _ in layers:
        if family is not None:
            checked(module, name, family)
    cut = []
    for name, module, family, count in layers:
        if family is None:
            assert isinstance(module, Experts)
            here = module.cut(axis)
        else:
            here = cut_stacked(module, name, family, axis)
        cut.append(Layer(name, type(module).__name__, count, here))
    return Plan(axis.size, tuple(cut))


def asked_ranks(model: nn.Module) -> int:
    """Over how many ranks the model's layers of `MoE` ask to be spread (`ep_size`); 1 if they don't.

    Raises:
        ConfigError: they ask for different numbers.
    """
    asked = {module.ep_size for module in model.modules() if isinstance(module, MoE)}
    if len(asked - {1}) > 1:
        raise ConfigError(
            f"layers of MoE ask for ep_size = {' and '.join(map(str, sorted(asked)))}; there is one axis of experts: "
            "write the same in all of them"
        )
    return max(asked, default=1)


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of experts that are, or could be, spread: their names and themselves."""
    for name, module, family, _ in _layers(model, ()):
        if family is None:
            yield from ((f"{name}.{inner}", parameter) for inner, parameter in module.named_parameters())
        else:
            yield from ((f"{name}.{inner}", module.get_parameter(inner)) for inner in family.names(module))


def _layers(model: nn.Module, dense: Collection[str]) -> Iterator[tuple[str, nn.Module, Family | None, int]]:
    """Modules that hold experts: name, module, how (None: modules of their own), and how many there are in all."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside) or _stays(name, module, dense):
            continue
        if isinstance(module, Experts):
            inside.append(name)
            yield name, module, None, module.count
            continue
        family = family_of(module)
        if family is not None:
            inside.append(name)
            forward = module.__dict__.get("forward")
            count = forward.experts if isinstance(forward, SpreadForward) else int(getattr(module, family.number))
            yield name, module, family, count


def _unknown(model: nn.Module, dense: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that go by the name of experts, have parameters, and are none of `_layers` nor shared by all tokens."""
    known = [name for name, _, _, _ in _layers(model, ())]
    for name, module in model.named_modules():
        named = name.rpartition(".")[2] == "experts" or re.search(r"Experts?([A-Z0-9]|$)", type(module).__name__)
        shared = "shared" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        if not named or shared or _stays(name, module, dense) or next(module.parameters(), None) is None:
            continue
        if not any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in known):
            yield name, module


def _stays(name: str, module: nn.Module, dense: Collection[str]) -> bool:
    return any(type(module).__name__ == one or re.fullmatch(one, name) for one in dense)


def _check_counts(model: nn.Module, layers: list[tuple[str, nn.Module, Family | None, int]], axis: Axis) -> None:
    for name, module, _, count in layers:
        if count < axis.size:
            raise ConfigError(
                f"{name} ({type(module).__name__}) has {count} experts, and parallel.ep = {axis.size} ranks have at "
                f"least one each; set parallel.ep to at most {min(n for _, _, _, n in layers)}"
            )
        spread_already = isinstance(module.__dict__.get("forward"), SpreadForward) or (
            isinstance(module, Experts) and module.axis.size > 1
        )
        if axis.size > 1 and spread_already:
            raise ModelError(f"{name} is spread already: apply_expert_parallel is called once")
    asked = asked_ranks(model)
    if asked not in (1, axis.size):
        raise ConfigError(
            f"layers of MoE ask for ep_size = {asked}, and parallel.ep = {axis.size}; set parallel.ep to {asked}"
        )


def _what_is_unknown(found: tuple[str, nn.Module], ranks: int) -> str:
    name, module = found
    kind = type(module).__name__
    return (
        f"nobody knows how to spread {name} ({kind}) over parallel.ep = {ranks} ranks. Known are windlass.MoE, modules "
        "of transformers' experts interface, modules with num_experts and tensors [num_experts, ...] whose forward "
        f"takes (hidden_states, top_k_index, top_k_weights), and {', '.join(known_classes())}. Say how with "
        f"register_experts({kind!r}, ...), leave it whole with dense=[{kind!r}], or set parallel.ep to 1"
    )
