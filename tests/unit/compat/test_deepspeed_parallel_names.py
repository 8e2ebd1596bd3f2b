"""Tests of expert, sequence and tensor-parallel names in one process; tests on several ranks are in tests/dist."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from windlass.base.errors import ConfigError
from windlass.compat import expert_groups, expert_parameters, parallel_groups, parallel_state_sp, tp_model_init
from windlass.compat.config_queries import COMPUTED_ANSWERS
from windlass.compat.deepspeed_config import DeepSpeedConfig
from windlass.compat.moe_layer import MoE
from windlass.compat.tolerated_keys import resolve_tolerated_keys
from windlass.config import load_config
from windlass.parallel.experts import StackedMLP

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


class Net(nn.Module):
    def __init__(self, ep_size: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.mixture = MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=ep_size, k=1, use_residual=True)


def test_expert_layers_have_deepspeed_arguments() -> None:
    names = list(
        inspect.signature(MoE.__init__.__wrapped__ if hasattr(MoE.__init__, "__wrapped__") else MoE).parameters
    )
    assert names[:4] == ["hidden_size", "expert", "num_experts", "ep_size"]
    layer = MoE(4, nn.Linear(4, 4), 4, 2, 1, 1.5, 2.0, 8, True, "Jitter", False, False)
    gate: Any = layer.deepspeed_moe.gate
    assert gate.capacity_limit is None and gate.routing_rule.noise == "Jitter" and layer.use_residual
    assert (layer.expert_group_name, layer.num_local_experts) == ("ep_size_2", 2)
    assert layer.set_deepspeed_parallelism() is None
    with pytest.raises(ConfigError, match=r"experts \(3\) should be divisible by expert parallel size \(2\)"):
        MoE(4, nn.Linear(4, 4), 3, 2)


def test_experts_have_deepspeed_attributes_and_no_others() -> None:
    net = Net()
    results = {name for name, p in net.named_parameters() if expert_parameters.is_moe_param(p)}
    assert results == {name for name, _ in net.named_parameters() if "deepspeed_experts" in name} and len(results) == 8
    expert: Any = net.mixture.deepspeed_moe.experts.deepspeed_experts[0].weight
    assert expert.allreduce is False and expert.group_name == "ep_size_2" and not expert.__dict__
    assert not hasattr(net.first.weight, "allreduce") and not hasattr(net.mixture.mlp.weight, "group_name")
    assert not expert_parameters.is_autoep_expert_param(expert)
    assert expert_parameters.has_moe_layers(net) == (True, 4) and expert_parameters.has_moe_layers(net.first) == (
        False,
        0,
    )
    stacked = MoE(4, StackedMLP(4, 6, 2), 2)
    assert all(expert_parameters.is_moe_param(p) for p in stacked.deepspeed_moe.experts.parameters())


def test_experts_get_separate_groups() -> None:
    net = Net()
    given = {"params": list(net.parameters()), "name": "all", "lr": 0.5}
    made = expert_parameters.split_params_into_different_moe_groups_for_optimizer(given)
    shared, own = expert_parameters.split_params_into_shared_and_expert_params(net.parameters())
    assert [group["params"] for group in made] == [shared, own] and made[0] is given
    assert (
        [group.get("moe", False) for group in made]
        == [False, True]
        == [*map(expert_parameters.is_moe_param_group, made)]
    )
    assert made[1]["name"] == "ep_size_2" and made[1]["lr"] == 0.5
    assert expert_parameters.configure_moe_param_groups(made) is made
    torch.optim.AdamW(made)


def test_expert_groups_have_a_maximum_size() -> None:
    net = Net()
    many = [{"params": list(net.parameters()), "name": "all"}]
    made = expert_parameters.split_params_into_different_moe_groups_for_optimizer(many, max_group_size=20)
    assert made is many
    sizes = [[p.numel() for p in group["params"]] for group in made[1:]]
    assert sizes == [[16, 4]] * 4
    sizes = [
        [p.numel() for p in group["params"]]
        for group in expert_parameters.split_params_into_different_moe_groups_for_optimizer(
            {"params": net.parameters(), "name": "all"}, max_group_size=7
        )[1:]
    ]
    assert sizes == [[16], [4]] * 4


def test_groups_without_experts_are_returned() -> None:
    """Groups without experts are returned unchanged: scripts call these functions for any model."""
    net = torch.nn.Linear(2, 2)
    for given in ({"params": net.parameters(), "name": "all"}, [{"params": [net.weight]}, {"params": [net.bias]}]):
        result = expert_parameters.split_params_into_different_moe_groups_for_optimizer(given)
        assert [item for group in result for item in group["params"]] == [net.weight, net.bias]
    result = expert_parameters.configure_moe_param_groups(list(net.parameters()))
    assert len(result) == 1 and torch.optim.SGD(result, lr=0.1).param_groups[0]["params"] == list(net.parameters())
    with pytest.raises(ValueError, match="param_groups is a str"):
        expert_parameters.split_params_into_different_moe_groups_for_optimizer("all")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a str"):
        expert_parameters.configure_moe_param_groups(["all"])


def test_script_can_mark_its_own_experts() -> None:
    net = torch.nn.Linear(2, 2)
    net.bias.allreduce = False  # type: ignore[attr-defined]
    assert expert_parameters.split_params_into_shared_and_expert_params(net.parameters()) == ([net.weight], [net.bias])
    net(torch.ones(1, 2)).sum().backward()
    shared, own = expert_parameters.split_params_grads_into_shared_and_expert_params(net.parameters())
    assert torch.equal(shared[0], torch.ones(2, 2)) and torch.equal(own[0], torch.ones(2))


def test_groups_of_experts_need_an_engine() -> None:
    with pytest.raises(AssertionError, match="no expert-parallel group 'ep_size_2': first initialize an engine"):
        parallel_groups._get_expert_parallel_group("ep_size_2")
    assert (
        parallel_groups._get_expert_parallel_group_dict() == {}
        and parallel_groups._get_expert_model_parallel_world_size() == 1
    )
    with pytest.raises(AssertionError, match="all-to-all"):
        expert_groups._get_local_all_to_all_group()
    with pytest.raises(AssertionError, match="initialize_sequence_parallel"):
        parallel_state_sp.get_sequence_parallel_rank()


# ----------------------------------------------------------------------------------------------- tensor parallelism


def test_arguments_of_tp_model_init_reach_the_configuration(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert tp_model_init.tp_model_init(model, tp_size=2, dtype=torch.bfloat16) is model
    assert tp_model_init.tp_model_init(model, 2, torch.bfloat16, config=None) is model
    given: dict[str, Any] = {**CONFIG, "bf16": {"enabled": True}}
    result = tp_model_init.config_with_tp_arguments(model, given)
    assert result["tensor_parallel"] == {"autotp_size": 2} and "tensor_parallel" not in given
    assert tp_model_init.config_with_tp_arguments(other, given) is given
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(given))
    assert tp_model_init.config_with_tp_arguments(model, str(file)) == result
    assert (
        COMPUTED_ANSWERS["autotp_size"](load_config(result)) == 2
        and COMPUTED_ANSWERS["autotp_size"](load_config(given)) == 0
    )


def test_recorded_arguments_apply_to_the_next_model() -> None:
    tp_model_init.record_tp_model_init_args(4, torch.float32, None, None)
    assert tp_model_init.config_with_tp_arguments(nn.Linear(1, 1), CONFIG)["tensor_parallel"] == {"autotp_size": 4}
    assert tp_model_init.config_with_tp_arguments(nn.Linear(1, 1), CONFIG) is CONFIG
    tp_model_init.record_tp_model_init_args(4, torch.float32, None, None)
    config: dict[str, Any] = {"tensor_parallel": {"autotp_size": 4}}
    tp_model_init.merge_tp_model_init_into_config(config, None, None, None)
    assert config == {"tensor_parallel": {"autotp_size": 4}}
    tp_model_init.merge_tp_model_init_into_config(config, None, None, None)
    assert tp_model_init.set_autotp_mode(training=True) is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size is 4, and tp_model_init.*tp_size 2"),
        ({"tensor_parallel": {"tp": {"tp_size": 8}}}, "tensor_parallel.tp.tp_size is 8"),
        ({"fp16": {"enabled": True}}, r"fp16.enabled is true, but tp_model_init was called with torch.bfloat16"),
    ],
)
def test_two_sizes_or_dtypes_are_refused(config: dict[str, Any], text: str) -> None:
    model = nn.Linear(2, 2)
    tp_model_init.tp_model_init(model, 2, torch.bfloat16)
    with pytest.raises(ConfigError, match=text):
        tp_model_init.config_with_tp_arguments(model, {**CONFIG, **config})
    with pytest.raises(ConfigError, match="tp_size 2 and torch.bfloat16, and now with 4"):
        tp_model_init.tp_model_init(model, 4, torch.bfloat16)
    with pytest.raises(ConfigError, match="tp_size = 0"):
        tp_model_init.tp_model_init(model, 0, torch.bfloat16)


def test_source_rank_of_a_group_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An mpu may put tensor parallelism on ranks of different hosts."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    if dist.is_initialized():
        pytest.skip("another test left its process group")
    dist.init_process_group("fake", rank=3, world_size=4, store=fake.FakeStore())
    try:
        group = dist.new_group([1, 3])
        mpu = SimpleNamespace(get_model_parallel_group=lambda: group, get_model_parallel_world_size=lambda: 2)
        monkeypatch.setattr(parallel_groups, "mpu", mpu)
        assert parallel_groups.get_tensor_model_parallel_src_rank() == 1
        monkeypatch.setitem(parallel_groups._overrides, "world_size", 4)
        assert parallel_groups.get_tensor_model_parallel_src_rank() == 0
        monkeypatch.delitem(parallel_groups._overrides, "world_size")
        monkeypatch.setattr(parallel_groups, "mpu", None)
        assert parallel_groups.get_tensor_model_parallel_src_rank() == 3
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------- configurations


def unit(**sizes: int) -> Any:
    return SimpleNamespace(
        **{f"get_{kind}_parallel_world_size": lambda size=size: size for kind, size in sizes.items()}
    )


@pytest.mark.parametrize(
    ("config", "mpu", "readers"),
    [
        ({}, None, 8),
        ({"sequence_parallel_size": 2}, None, 4),
        ({"tensor_parallel": {"autotp_size": 4}}, None, 2),
        ({"pipeline": {"stages": 2}, "expert_parallel": {"enabled": True, "autoep_size": 4}}, None, 4),
        ({}, unit(model=2, data=4), 4),
        ({}, unit(tensor_model=2, pipeline_model=2), 2),
        ({}, unit(sequence=4, data=2), 2),
        ({}, unit(data=2), 2),
        ({"tensor_parallel": {"autotp_size": 2}}, unit(tensor_model=2, data=4), 4),
    ],
)
def test_batch_sizes_count_data_loading_ranks(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], mpu: Any, readers: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    result = DeepSpeedConfig({**CONFIG, **config}, mpu=mpu)
    assert (result.world_size, result.train_batch_size) == (readers, readers * 6)


def test_configuration_that_contradicts_its_mpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="two sizes of one axis, tp"):
        DeepSpeedConfig({**CONFIG, "tensor_parallel": {"autotp_size": 4}}, mpu=unit(tensor_model=2))


def test_pipeline_keys_are_applied() -> None:
    given = {**CONFIG, "pipeline": {"stages": "auto", "partition": "uniform", "of_no_version": 1}}
    assert resolve_tolerated_keys(given)["pipeline"] == {"stages": "auto", "partition": "uniform"}
    given = {**CONFIG, "flops_profiler": {"enabled": True, "step": 1}}
    assert resolve_tolerated_keys(given)["flops_profiler"] == {"enabled": True}
    given = {
        **CONFIG,
        "flops_profiler": {"enabled": True, "profile_step": -1, "top_modules": 3},
    }  # a step never reached
    assert resolve_tolerated_keys(given)["flops_profiler"] == {"top_modules": 3}
    assert not DeepSpeedConfig(given).config.flops_profiler.enabled
    plain = {**CONFIG, "pipeline": {"stages": 2}}
    assert resolve_tolerated_keys(plain) is plain
    assert "use_data_before_expert_parallelism" not in resolve_tolerated_keys(
        {**CONFIG, "use_data_before_expert_parallelism": True}
    )


def test_configuration_of_moq_may_have_unknown_keys() -> None:
    given = {
        **CONFIG,
        "eigenvalue": {"enabled": True, "model_name": "bert-large"},
        "quantize_training": {"quantize_groups": 4, "quantize_eigenvalue": True, "quantize_bits": {"of_no_version": 1}},
    }
    result = DeepSpeedConfig(given)
    assert result.config.eigenvalue.enabled and result.config.quantize_training.quantize_groups == 4
    assert result._param_dict["quantize_training"]["quantize_eigenvalue"] is True


@pytest.mark.parametrize("technique", ["weight_quantization", "activation_quantization", "row_pruning"])
def test_compression_without_groups_compresses_nothing(technique: str, caplog: pytest.LogCaptureFixture) -> None:
    shared = {"enabled": True, **({"method": "l1"} if technique == "row_pruning" else {})}
    section = {technique: {"shared_parameters": shared, "different_groups": {}}}
    given = {**CONFIG, "compression_training": section}
    result = DeepSpeedConfig(given)
    assert not getattr(result.config.compression_training, technique).shared_parameters.enabled
    assert given["compression_training"] == section
    assert f"{technique} compresses no module" in caplog.text
    with pytest.raises(ConfigError, match="empty; name the modules of at least one group"):
        load_config(given)
