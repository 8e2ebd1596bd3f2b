"""Tests of sharding experts: each expert lies on one rank; an unsupported model raises and stays unchanged."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.hf_experts import FAMILIES
from windlass.base.errors import ConfigError, ModelError
from windlass.comm.mesh_axis import MeshAxis, single_rank_axis
from windlass.comm.rank_group import RankGroup
from windlass.parallel.experts import (
    MixtureOfExperts,
    apply_expert_parallel,
    expert_parameters,
    get_requested_ep_size,
    register_experts,
)
from windlass.parallel.experts.expert_modules import find_expert_spec
from windlass.parallel.placement import get_placement, has_placement


def axis(ranks: int, index: int = 0) -> MeshAxis:
    """Return an axis of `ranks` ranks as rank `index` has it, without a process group to send by."""
    return MeshAxis("ep", RankGroup(None, tuple(range(ranks)), index))  # type: ignore[arg-type]


def layer(experts: int = 5, **words: Any) -> nn.Module:
    """Return a module of a dense layer and a mixture of experts."""
    torch.manual_seed(0)
    return nn.ModuleDict({"dense": nn.Linear(4, 4), "moe": MixtureOfExperts(4, nn.Linear(4, 4), experts, **words)})


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        pytest.param(family, ranks, marks=() if ranks == 2 + number % 3 else pytest.mark.slow)
        for number, family in enumerate(FAMILIES)
        for ranks in (2, 3, 4)
    ],
)
def test_each_expert_of_a_tensor_lies_on_one_rank(family: str, ranks: int) -> None:
    full = FAMILIES[family].build()
    names = {name for name, _ in expert_parameters(full)}
    assert names
    covered: dict[str, list[int]] = {name: [] for name in names}
    for index in range(ranks):
        model = FAMILIES[family].build()
        plan = apply_expert_parallel(model, axis(ranks, index))
        assert plan.ranks == ranks and len(plan.layers) == 2
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in full.named_parameters()]
        for name, parameter in model.named_parameters():
            assert has_placement(parameter) == (name in names), name
            if name not in names:
                continue
            placement, values = get_placement(parameter), full.get_parameter(name)
            assert (
                placement.is_expert
                and placement.sharded_axes == {"ep"}
                and placement.global_shape == tuple(values.shape)
            )
            ((start, stop),) = placement.ranges[0]
            assert torch.equal(parameter, values[start:stop])
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
            covered[name] += range(start, stop)
    for name, rows in covered.items():
        assert rows == list(range(full.get_parameter(name).shape[0])), name


def test_experts_of_other_ranks_are_removed_and_names_keep_their_indices() -> None:
    kept: list[str] = []
    for index in range(3):
        model = layer()
        experts: Any = model["moe"].deepspeed_moe["experts"]
        plan = apply_expert_parallel(model, axis(3, index))
        here = [name for name in model.state_dict() if "deepspeed_experts" in name]
        kept += here
        first, end = plan.layers[0].local_experts
        assert (first, end) == [(0, 2), (2, 4), (4, 5)][index]
        assert [name for name, _ in expert_parameters(model)] == here
        assert all(
            get_placement(p).is_expert and get_placement(p).sharded_axes == {"ep"} for _, p in expert_parameters(model)
        )
        assert not has_placement(model["dense"].weight) and not has_placement(
            model["moe"].deepspeed_moe["gate"].wg.weight
        )
        assert len(experts.deepspeed_experts) == end - first and experts.deepspeed_experts[first] is not None
        with pytest.raises(IndexError, match=f"expert {end % 5} is not on this rank, which has {first}"):
            experts.deepspeed_experts[end % 5]
        assert (
            str(plan).splitlines()[1].endswith(f"moe.deepspeed_moe.experts (Experts): {first} to {end - 1} of 5 here")
        )
    assert kept == [name for name in layer().state_dict() if "deepspeed_experts" in name]


@pytest.mark.parametrize("family", FAMILIES)
def test_meta_model_is_sharded(family: str) -> None:
    with torch.device("meta"):
        model = FAMILIES[family].build()
    sizes = {name: parameter.numel() for name, parameter in expert_parameters(model)}
    apply_expert_parallel(model, axis(2, 1))
    for name, parameter in expert_parameters(model):
        assert parameter.is_meta and parameter.numel() == math.prod(get_placement(parameter).local_shape) < sizes[name]


def test_on_one_rank_nothing_changes() -> None:
    model = FAMILIES["mixtral"].build()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    plan = apply_expert_parallel(model, single_rank_axis("ep"))
    assert [item.local_experts for item in plan.layers] == [(0, 4), (0, 4)]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not any(has_placement(parameter) or "forward" in vars(model) for parameter in model.parameters())


def test_copy_of_a_sharded_model_runs_its_own_experts() -> None:
    model = FAMILIES["mixtral"].build()
    apply_expert_parallel(model, axis(2))
    experts: Any = model.model.layers[0].mlp.experts  # type: ignore[union-attr, index]
    other: Any = copy.deepcopy(model).model.layers[0].mlp.experts  # type: ignore[union-attr, index]
    assert other is not experts and other.forward.module is other and other.forward.axis is experts.forward.axis
    assert other.forward._original_forward.__self__ is other
    mixture = layer()
    apply_expert_parallel(mixture, axis(2))
    twin = copy.deepcopy(mixture)
    item, two = (model["moe"].deepspeed_moe["experts"] for model in (mixture, twin))
    assert two.axis is item.axis and list(two.state_dict()) == list(item.state_dict())
    assert two.deepspeed_experts[0].weight is not item.deepspeed_experts[0].weight


def test_fewer_experts_than_ranks() -> None:
    for model, name, kind in (
        (layer(3), "moe.deepspeed_moe.experts", "Experts"),
        (FAMILIES["mixtral"].build(), "model.layers.0.mlp.experts", "MixtralExperts"),
    ):
        count = 3 if kind == "Experts" else 4
        before = [tuple(p.shape) for p in model.parameters()]
        text = rf"{name} \({kind}\) has {count} experts, fewer than the parallel.ep = 5 .* at most {count}"
        with pytest.raises(ConfigError, match=text):
            apply_expert_parallel(model, axis(5))
        assert [tuple(p.shape) for p in model.parameters()] == before


def test_a_model_without_experts() -> None:
    with pytest.raises(ModelError, match="Linear has no experts .* parallel.ep = 2 ranks; set parallel.ep to 1"):
        apply_expert_parallel(nn.Linear(2, 2), axis(2))
    assert not apply_expert_parallel(nn.Linear(2, 2), axis(2), required=False).layers
    assert not apply_expert_parallel(nn.Linear(2, 2), single_rank_axis("ep")).layers


class Strange(nn.Module):
    """Module of experts of an unknown class."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])


def test_unknown_experts_are_refused_by_name() -> None:
    model = nn.ModuleDict({"block": Strange(), "moe": MixtureOfExperts(4, nn.Linear(4, 4), 4)})
    with pytest.raises(ModelError, match=r"block.experts \(ModuleList\) over parallel.ep = 2.*register_experts\('Mod"):
        apply_expert_parallel(model, axis(2))
    assert len(model["moe"].deepspeed_moe["experts"].deepspeed_experts) == 4
    assert len(apply_expert_parallel(copy.deepcopy(model), axis(2), replicated=["ModuleList"]).layers) == 1
    assert len(apply_expert_parallel(copy.deepcopy(model), axis(2), replicated=[r"block\..*"]).layers) == 1


def test_shared_experts_are_replicated() -> None:
    """DeepSeek's shared experts are not sharded: despite their name, every token passes through them."""
    model = FAMILIES["deepseek_v3"].build()
    assert any("shared_experts" in name for name, _ in model.named_modules())
    plan = apply_expert_parallel(model, axis(2))
    assert all(item.name.endswith("mlp.experts") for item in plan.layers)


class Bank(nn.Module):
    """Experts of a class that a user registers: one matrix for all experts, in a child module."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.many = 4
        self.inner = nn.Linear(3, rows, bias=False)


def test_registered_experts() -> None:
    register_experts("Bank", count_attribute="many", parameter_names=["inner.weight"])
    bank = Bank(8)
    family = find_expert_spec(bank)
    assert family is not None and family.sharded_parameters(bank) == ["inner.weight"]
    apply_expert_parallel(nn.ModuleList([bank]), axis(2, 1))
    assert bank.many == 2 and get_placement(bank.inner.weight).ranges == (((4, 8),), ((0, 3),))
    with pytest.raises(
        ModelError, match=r"0.inner.weight of shape \(6, 3\), of which 6 rows .* into 4 experts \(many\)"
    ):
        apply_expert_parallel(nn.ModuleList([Bank(6), Bank(8)]), axis(2))


def test_sharded_model_is_not_sharded_again() -> None:
    for model in (layer(4), FAMILIES["mixtral"].build()):
        apply_expert_parallel(model, axis(2))
        with pytest.raises(ModelError, match="are distributed already"):
            apply_expert_parallel(model, axis(2))


def test_expert_parallel_size_of_layers() -> None:
    assert get_requested_ep_size(layer()) == 1 == get_requested_ep_size(nn.Linear(2, 2))
    assert get_requested_ep_size(layer(4, ep_size=2)) == 2
    assert len(apply_expert_parallel(layer(4, ep_size=2), axis(2)).layers) == 1
    with pytest.raises(ConfigError, match="have ep_size = 2, and parallel.ep = 4; set parallel.ep to 2"):
        apply_expert_parallel(layer(4, ep_size=2), axis(4))
    both = nn.ModuleList([layer(4, ep_size=2), layer(4, ep_size=4)])
    with pytest.raises(ConfigError, match="have different ep_size: 2 and 4; there is one expert-parallel axis"):
        get_requested_ep_size(both)
