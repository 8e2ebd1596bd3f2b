"""Partition of a model into blocks (modules whose parameters are unsharded together) and units (parameters that are
sharded in one buffer)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from windlass.parallel.placement import get_global_name, get_global_numel, get_placement
from windlass.zero.core.unit_plan import Block, UnitPlan
from windlass.zero.setup.zero_settings import UnitRules

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


# Persistent parameters are many and small: neighbours are merged until their unit has 1 MiB of float32 gradients.
_PERSISTENT_BUCKET = 1 << 18
# Most parameters in no optimizer group that get a unit each. Every unit adds a collective, so a model whose whole
# backbone is outside the optimizer would be slow.
_MOST_APART = 32


def find_blocks(model: nn.Module, rules: UnitRules) -> list[Block]:
    """Return the blocks of `model` in model order. Tied parameters are in more than one of them.

    By default a block is an element of a ModuleList, ModuleDict or Sequential (e.g. one transformer layer), or a child
    without such a container (e.g. an embedding, a head, a final norm). A parameter held directly by a module with
    deeper blocks belongs to that module's own block. The model itself is always a block, at least to detect when it
    runs. A module that `torch.jit` compiled accepts no hooks, so it is never a block. If no enclosing block lists its
    parameters, `plan_units` assigns them to the model's own block.
    """
    blocks = [Block("", model, list(model.parameters(recurse=False)))]
    if rules.blocks:
        blocks += _named_blocks(model, rules.blocks)
    else:
        blocks += _child_blocks(model, "", rules)
    return blocks


def _child_blocks(module: nn.Module, prefix: str, rules: UnitRules) -> Iterator[Block]:
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        parameters = list(child.parameters())
        if not parameters or isinstance(child, torch.jit.ScriptModule):
            continue
        large = sum(get_global_numel(p) for p in parameters) > rules.split_above
        element = isinstance(module, _CONTAINERS)
        if (
            isinstance(child, _CONTAINERS)
            or (_has_container(child) and not element)
            or (large and _has_children(child))
        ):
            own = list(child.parameters(recurse=False))
            if own:
                yield Block(full, child, own)
            yield from _child_blocks(child, f"{full}.", rules)
        else:
            yield Block(full, child, parameters)


def _has_children(module: nn.Module) -> bool:
    return any(True for child in module.children() for _ in child.parameters())


def _has_container(module: nn.Module) -> bool:
    return any(
        isinstance(m, _CONTAINERS) and any(True for _ in m.parameters()) for m in module.modules() if m is not module
    )


def _named_blocks(model: nn.Module, wanted: Sequence[str]) -> list[Block]:
    """Return one block for each module whose name or class name is in `wanted`, with all parameters inside it, and one
    for each other module that holds parameters directly.
    """
    blocks: list[Block] = []

    def visit(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if isinstance(child, torch.jit.ScriptModule):
                continue
            if full in wanted or type(child).__name__ in wanted:
                blocks.append(Block(full, child, list(child.parameters())))
                continue
            own = list(child.parameters(recurse=False))
            if own:
                blocks.append(Block(full, child, own))
            visit(child, full)

    visit(model, "")
    return blocks


def plan_units(model: nn.Module, rules: UnitRules) -> tuple[list[Block], list[UnitPlan]]:
    """Partition `model` into units, in model order.

    Parameters share a unit if the same blocks use them and they agree in dtype, device, trainability, persistence, the
    ranks over which they are sharded and reduced, the dtype of the reduction, and in whether an optimizer steps them.
    Small neighbouring units are then merged, also across blocks: persistent ones into buckets, others below
    `merge_below` elements. Units of experts are not merged. A parameter that several pipeline stages hold is a unit of
    its own, equal in all stages. So is each trainable parameter in no group of the optimizer, except experts, if
    these are few: some of them may join a group later, and the gradients of the others stay after a step.
    """
    # Experts are left out: ranks may hold different numbers of them, and must have the same number of units.
    waiting = [p for p in model.parameters() if p.requires_grad and id(p) in rules.unstepped]
    apart = {id(p) for p in waiting if not get_placement(p).key.is_expert}
    if len(apart) > _MOST_APART:
        apart = set()
    blocks = find_blocks(model, rules)
    users: dict[int, list[Block]] = {}
    for block in blocks:
        for parameter in block.parameters:
            if block not in users.setdefault(id(parameter), []):
                users[id(parameter)].append(block)
    plans: dict[tuple[object, ...], UnitPlan] = {}
    kept_elements = 0
    for name, parameter in model.named_parameters():
        # Key and number of elements are equal on all ranks, however the parameter is sharded.
        kind, numel = get_placement(parameter).key, get_global_numel(parameter)
        kept = numel < rules.persistence_threshold and kept_elements + numel <= rules.max_persistent_numel
        # Experts are not counted: ranks may hold different numbers of them, and must make the same choice.
        kept_elements += numel if kept and not kind.is_expert else 0
        # Parameters that no block lists belong to the model's own block.
        used_by = users.get(id(parameter), blocks[:1])
        used_in = tuple(id(block) for block in used_by)
        lowered = id(parameter) in rules.lowered
        unstepped = parameter.requires_grad and id(parameter) in rules.unstepped
        alone = id(parameter) if kind.shared_stages or id(parameter) in apart else None
        like = (parameter.dtype, parameter.device, parameter.requires_grad, kept, lowered, unstepped)
        key = (used_in, kind, alone, *like)
        plan = plans.setdefault(key, UnitPlan([], [], used_by, kept, lowered, unstepped))
        plan.names.append(get_global_name(parameter, name))
        plan.parameters.append(parameter)
    return blocks, _merge(list(plans.values()), rules.merge_below, apart)


def _merge(plans: list[UnitPlan], merge_below: int, apart: set[int]) -> list[UnitPlan]:
    merged: list[UnitPlan] = []
    last: dict[tuple[object, ...], _MergedPlan] = {}
    for plan in plans:
        # Experts are not merged: ranks may hold different numbers of them, but must have the same number of units.
        if plan.kind.shared_stages or plan.kind.is_expert or id(plan.parameters[0]) in apart:
            merged.append(plan)
            continue
        like = (plan.trainable, plan.persistent, plan.lowered, plan.unstepped)
        kind = (plan.kind, plan.dtype, plan.parameters[0].device, *like)
        limit = _PERSISTENT_BUCKET if plan.persistent else merge_below
        before, full_numel = last.get(kind), plan.full_numel
        if before is not None and before.full_numel < limit and full_numel < limit:
            before.add(plan, full_numel)
        else:
            last[kind] = _MergedPlan(plan, full_numel)
            merged.append(plan)
    return merged


class _MergedPlan:
    """Plan that absorbs the parameters of other plans, with a running count of its elements and a set of its blocks.

    Computing both again for each absorbed plan would take quadratic time.

    Attributes:
        full_numel: Number of elements of the plan's full parameters.
    """

    def __init__(self, plan: UnitPlan, full_numel: int) -> None:
        self._plan, self.full_numel = plan, full_numel
        plan.blocks = list(plan.blocks)  # the list may be shared with another plan
        self._blocks = {id(block) for block in plan.blocks}

    def add(self, plan: UnitPlan, full_numel: int) -> None:
        """Absorb a plan of `full_numel` elements."""
        self.full_numel += full_numel
        self._plan.names += plan.names
        self._plan.parameters += plan.parameters
        for block in plan.blocks:
            if id(block) not in self._blocks:
                self._blocks.add(id(block))
                self._plan.blocks.append(block)
