"""Tests of the blocks and units of typical models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from windlass.parallel.placement import get_global_numel
from windlass.zero.core import unit_plan
from windlass.zero.setup import unit_partition
from windlass.zero.setup.unit_partition import find_blocks, plan_units
from windlass.zero.setup.zero_settings import UnitRules


class Layer(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.up.requires_grad_(not frozen)


class Model(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(Layer(frozen) for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def names(rules: UnitRules, model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model, rules)]


def test_transformer_block_is_one_block_with_all_its_parameters() -> None:
    assert names(UnitRules(), Model()) == ["", "embed", "layers.0", "layers.1", "head"]


def test_every_parameter_is_in_exactly_one_unit() -> None:
    model = Model(frozen=True)
    _, plans = plan_units(model, UnitRules(persistence_threshold=9))
    results = [name for plan in plans for name in plan.names]
    assert sorted(results) == sorted(name for name, _ in model.named_parameters())


def test_units_have_one_dtype_and_requires_grad() -> None:
    model = Model(frozen=True)
    model.layers[1].norm.to(torch.bfloat16)
    _, plans = plan_units(model, UnitRules(persistence_threshold=5))
    for plan in plans:
        assert len({(p.dtype, p.requires_grad, p.numel() < 5) for p in plan.parameters}) == 1


def test_tied_weight_is_a_separate_unit_of_both_blocks() -> None:
    _, plans = plan_units(Model(), UnitRules())
    tied = next(plan for plan in plans if "embed.weight" in plan.names)
    assert tied.names == ["embed.weight"] and [block.name for block in tied.blocks] == ["embed", "head"]


def test_root_block_has_only_remaining_parameters() -> None:
    _, plans = plan_units(Model(), UnitRules())
    assert [plan.names for plan in plans if plan.blocks[0].name == ""] == [["scale"]]


def test_blocks_can_be_named_by_class_or_path() -> None:
    assert names(UnitRules(blocks=("Layer",)), Model()) == ["", "embed", "layers.0", "layers.1", "head"]
    assert "layers.0.experts" in names(UnitRules(blocks=("layers.0.experts",)), Model())


def test_oversized_block_is_split_into_its_children() -> None:
    assert "layers.0.up" in names(UnitRules(split_above=50), Model())


def test_small_adjacent_units_merge_below_the_limit_only() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    assert len(plan_units(model, UnitRules())[1]) == 6
    assert len(plan_units(model, UnitRules(merge_below=50))[1]) == 2
    assert len(plan_units(model, UnitRules(persistence_threshold=1000))[1]) == 1


def test_parameters_outside_the_optimizer_have_a_unit_each() -> None:
    """Some of them may join a group later, and the gradients of the others stay after a step."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    outside = frozenset(id(parameter) for parameter in model[:2].parameters())
    for rules in (UnitRules(), UnitRules(persistence_threshold=1000), UnitRules(merge_below=1000)):
        _, plans = plan_units(model, dataclasses.replace(rules, unstepped=outside))
        assert [len(plan.parameters) for plan in plans] == [1, 1, 1, 1, 2]
        assert [plan.unstepped for plan in plans] == [True, True, True, True, False]


def test_many_parameters_outside_the_optimizer_share_units() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    outside = frozenset(id(parameter) for parameter in model[:39].parameters())
    _, plans = plan_units(model, dataclasses.replace(UnitRules(persistence_threshold=1000), unstepped=outside))
    assert [(len(plan.parameters), plan.unstepped) for plan in plans] == [(78, True), (2, False)]


def test_partition_time_is_linear_in_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of parameters are read a bounded number of times: a growing unit is not recounted for each parameter."""
    asked = 0

    def counted(parameter: nn.Parameter) -> int:
        nonlocal asked
        asked += 1
        return get_global_numel(parameter)

    for module in (unit_plan, unit_partition):
        monkeypatch.setattr(module, "get_global_numel", counted)
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(100))
    for rules in (UnitRules(persistence_threshold=100), UnitRules(merge_below=1 << 20)):
        asked = 0
        _, plans = plan_units(model, rules)
        assert [len(plan.parameters) for plan in plans] == [200]
        assert [block.module for block in plans[0].blocks] == list(model)
        assert 0 < asked <= 4 * 200
