"""Tests of names below `deepspeed.runtime` that scripts and DeepSpeed's tests use: sizes, section models, Muon."""

from __future__ import annotations

import copy
import inspect
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import Field, ValidationError
from torch import nn

from tests.unit.compat.test_deepspeed_tools import one_rank
from windlass.base.errors import ConfigError
from windlass.compat.config_models import DeepSpeedConfigModel, dict_raise_error_on_duplicate_keys
from windlass.compat.loss_scaler_view import DeepSpeedLossScale, DynamicLossScalerView, scale_of
from windlass.compat.memory_estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_live,
    model_to_params,
)
from windlass.compat.optimizers.deepspeed_muon import Muon, MuonWithAuxAdam
from windlass.compat.parameter_offload import ZeROOrderedDict, ensure_zero_ordered_dict
from windlass.compat.partition_parameters import Init, requests_linear
from windlass.compat.precision import Precision
from windlass.compat.z3_leaf_modules import get_z3_leaf_modules, mark_fine_grained_modules
from windlass.compat.zero_functions import apply_to_tensors_only
from windlass.compat.zero_linear import InsertPostInitMethodToModuleSubClasses, replace_linear, zero3_linear_wrap
from windlass.config import BatchSizes, load_config
from windlass.config.precision_section import Fp16
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import DynamicLossScale, StaticLossScale


class MegatronUnit:
    """Megatron's `mpu` with the given sequence-parallel and tensor-parallel sizes."""

    def __init__(self, sequence: int, tensor: int) -> None:
        self.get_sequence_parallel_world_size = lambda: sequence
        self.get_tensor_model_parallel_world_size = lambda: tensor


def test_init_takes_an_mpu_whose_ranks_hold_the_same_parameters(tmp_path: Path) -> None:
    """Megatron and GPT-NeoX pass their mpu at every stage, with `enabled` only at stage 3."""
    with Init(enabled=False, mpu=MegatronUnit(1, 2), param_swapper=object()):
        assert nn.Linear(2, 2).weight.shape == (2, 2)
    with one_rank(tmp_path):
        with Init(mpu=MegatronUnit(2, 1), sequence_data_parallel_group=dist.group.WORLD):
            made = nn.Linear(2, 2)
        assert hasattr(made.weight, "ds_id")
        with pytest.raises(ConfigError, match="mpu"):
            Init(mpu=MegatronUnit(1, 2))


BIG = (10**9, 10**7, 8, 2)  # parameters, those of the largest layer, GPUs of a node, nodes


def test_memory_estimates_equal_deepspeed_where_the_states_do() -> None:
    """Estimates equal DeepSpeed 0.19.8's, except that parameters are padded by a few bytes for each layer."""
    needs = estimate_zero3_model_states_mem_needs
    assert needs(*BIG) == close(13_500_000_000, 40_000_000, 40_000_000)
    assert needs(*BIG, True, False)[:2] == close(12_000_000_000, 165_000_000)
    assert needs(*BIG, True, False, False)[0] == close(48_000_000_000)
    assert needs(*BIG, False, False)[:2] == close(480_000_000, 1_165_000_000)
    assert needs(*BIG, False, True, False)[:2] == close(48_000_000_000, 1_165_000_000)
    assert estimate_zero2_model_states_mem_needs(10**9, 8, 2)[1] == close(2_000_000_000)
    assert estimate_zero2_model_states_mem_needs(10**9, 8, 2, False)[0] == close(48_000_000_000)
    assert estimate_zero2_model_states_mem_needs(10**9, 8) == close(48_000_000_000, 2_000_000_000)
    assert needs(*BIG, additional_buffer_factor=1.0)[0] == close(9_000_000_000)


def test_memory_estimates_that_differ_from_deepspeed() -> None:
    """See docs/planning.md. DeepSpeed's results are in the comments."""
    zero2 = estimate_zero2_model_states_mem_needs
    assert zero2(10**9, 8, 2)[0] == close(48_000_000_000)  # 96e9: each node builds the model only on its own ranks
    assert zero2(10**9, 8, 2, False)[1] == close(3_000_000_000)  # 3.125e9: no 16-bit copy of a gradient shard


def close(*needs: int) -> Any:
    return pytest.approx(needs if len(needs) > 1 else needs[0], rel=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_estimates_of_a_model_are_those_of_its_plan(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 3000), nn.BatchNorm1d(3000)).to(torch.float16)
    model[1].weight = model[0].weight
    assert model_to_params(model) == (9_000_000 + 4 * 3000, 9_003_000)
    model.requires_grad_(False)  # frozen: neither gradients nor states
    live = (
        estimate_zero3_model_states_mem_needs_all_live if stage == 3 else estimate_zero2_model_states_mem_needs_all_live
    )
    live(model, 2)
    frozen = capsys.readouterr().out
    model.requires_grad_(True)
    live(model, 2)
    trained = capsys.readouterr().out
    assert trained.count("zero_init=") == (6 if stage == 3 else 0) and trained.count("communication buffers") == 1
    assert trained.count("offload_optimizer=cpu") == (4 + 2 if stage == 3 else 1 + 1)
    gib, total = 2**30, 9_012_000
    kept = total * 18 / 2 if stage == 3 else total * (2 + 16 / 2)
    largest = 4 * 9_003_000 if stage == 3 else 0
    assert f"| {(kept + largest) / gib:7.2f}GB |" in trained.splitlines()[-6 if stage == 3 else -5]
    assert frozen != trained


def test_init_has_the_documented_signature() -> None:
    names = list(inspect.signature(Init).parameters)
    assert names[:3] == ["module", "data_parallel_group", "mem_efficient_linear"] and "config_dict_or_path" in names


class Section(DeepSpeedConfigModel):
    count: int = 0
    old: str | None = Field(
        None, json_schema_extra={"deprecated": True, "new_param": "new", "new_param_fn": lambda x: [x]}
    )
    new: list[str] | None = None
    named: int = Field(0, alias="other")


def test_config_model_migrates_deprecated_keys() -> None:
    assert Section(old="a").new == ["a"] and Section(other=2).named == Section(named=2).named == 2
    assert Section(count="auto").count == 0
    for wrong in ({"count": "x"}, {"new": "x"}, {"typo": 1}):
        with pytest.raises(ValidationError):
            Section(**wrong)
    with pytest.raises(AssertionError, match="old name of new"):
        Section(old="a", new=["b"])
    with pytest.raises(ValueError, match="Duplicate"):
        dict_raise_error_on_duplicate_keys([("a", 1), ("a", 2)])


def test_apply_to_tensors_reaches_nested_tensors() -> None:
    pair = namedtuple("pair", "a b")
    given = {"p": pair(torch.zeros(1), "text"), "l": [nn.Parameter(torch.ones(1)), None]}
    made = apply_to_tensors_only(lambda x: x + 1, given)
    assert (
        made is given
        and made["p"].a.item() == 1
        and made["p"].b == "text"
        and made["l"][0].item() == 2
        and made["l"][1] is None
    )


def test_muon_aliases() -> None:
    """Groups choose Muon or Adam by `use_muon`, and omitted settings have DeepSpeed's defaults."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    both = MuonWithAuxAdam(
        [{"params": [layer.weight], "use_muon": True}, {"params": [layer.bias], "use_muon": False, "lr": 1e-2}]
    )
    assert [(g["lr"], g["weight_decay"]) for g in both.param_groups] == [(0.02, 0), (1e-2, 0)]
    assert both.param_groups[1]["betas"] == (0.9, 0.95) and both.param_groups[1]["eps"] == 1e-10
    other = nn.Linear(4, 3, bias=False)
    other.load_state_dict({"weight": layer.weight})
    alone = Muon(other.parameters())
    before = {name: value.detach().clone() for name, value in layer.named_parameters()}
    for module, optimizer in ((layer, both), (other, alone)):
        loss = (module.weight * torch.arange(12.0).view(3, 4)).square().mean()
        (loss if module.bias is None else loss + module.bias.square().mean()).backward()
        optimizer.step()
    assert torch.equal(layer.weight, other.weight)
    assert not any(torch.equal(value, before[name]) for name, value in layer.named_parameters())
    with pytest.raises(AssertionError, match="use_muon"):
        MuonWithAuxAdam([{"params": [layer.weight]}])
    with pytest.raises(TypeError, match="lr"):
        MuonWithAuxAdam([{"params": [layer.weight], "use_muon": True}], lr=0.1)  # type: ignore[call-arg]


def test_stage_3_container_keeps_a_module_working() -> None:
    layer = nn.Linear(3, 2)
    given, x = layer._parameters, torch.ones(1, 3)
    expected = layer(x)
    ensure_zero_ordered_dict(layer)
    made = layer._parameters
    ensure_zero_ordered_dict(layer)
    assert isinstance(made, ZeROOrderedDict) and layer._parameters is made and layer._original_parameters is given
    assert torch.equal(layer(x), expected) and list(made) == ["weight", "bias"]
    assert list(copy.deepcopy(layer)._parameters) == ["weight", "bias"]
    ensure_zero_ordered_dict(object())


def test_module_cast_to_given_dtypes() -> None:
    class Holder(Precision):
        def __init__(self) -> None:
            self.module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.module.register_buffer("inv_freq", torch.ones(2))

    def dtypes(holder: Holder) -> tuple[set[torch.dtype], dict[str, torch.dtype]]:
        return {p.dtype for p in holder.module.parameters()}, {n: b.dtype for n, b in holder.module.named_buffers()}

    half, full = torch.bfloat16, torch.float32
    made = Holder()
    made._cast_module_mixed_precision(half, None, False)
    assert dtypes(made)[0] == {half} and dtypes(made)[1]["inv_freq"] is full
    made = Holder()
    made._cast_module_mixed_precision(half, half, True, re.compile("freq"))
    assert dtypes(made)[0] == {full}
    assert dtypes(made)[1] == {
        "inv_freq": full,
        "1.running_mean": half,
        "1.running_var": half,
        "1.num_batches_tracked": torch.long,
    }


@pytest.mark.parametrize(
    ("window", "hysteresis", "consecutive", "scales"),
    [
        (2, 1, False, [4, 4, 8, 8, 16, 8, 8, 4, 4, 4, 8, 4, 2, 2, 2, 4, 4]),
        (2, 2, False, [4, 4, 8, 8, 16, 16, 16, 8, 8, 8, 16, 16, 8, 8, 8, 16, 16]),
        (3, 2, True, [4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 8]),
    ],
)
def test_dynamic_loss_scale_equals_deepspeed(
    window: int, hysteresis: int, consecutive: bool, scales: list[float]
) -> None:
    """Scales equal those of DeepSpeed 0.19.8 after each step; `o` is a step that overflows."""
    made = DynamicLossScale(4.0, window, hysteresis, consecutive, min_scale=1.0)
    for zero in (True, False):
        scale = scale_of(made, zero=zero)
        assert isinstance(scale, DeepSpeedLossScale)
        progress = TrainingProgress(BatchSizes(1, 1, 1))
        optimizer = type("", (), {"loss_scale": property(lambda self, scale=scale: scale.scale)})()
        view = DynamicLossScalerView(scale, optimizer, progress, Fp16(), lambda loss: loss, scale.update)
        assert view.last_overflow_iter == -1 and view.raise_error_at_min_scale == zero
        steps, results = "gggggogogggoogggg", []
        for number, step in enumerate(steps, 1):
            view.update_scale(step == "o")
            results.append(view.cur_scale)
            assert view.cur_iter == number and view.last_overflow_iter == steps.rfind("o", 0, number)
        assert results == (scales if zero else scale_at_stage_0(window))
        assert (view.delayed_shift, view.consecutive_hysteresis) == (hysteresis if zero else 1, consecutive)
        assert 1 <= view.cur_hysteresis <= view.delayed_shift
        again = scale_of(made, zero=zero)
        again.load_state_dict(scale.state_dict())
        assert vars(again) == vars(scale)
    fixed = StaticLossScale(2.0)
    assert scale_of(fixed, zero=True) is fixed


def scale_at_stage_0(window: int) -> list[float]:
    return [4, 4, 8, 8, 16, 8, 8, 4, 4, 4, 8, 4, 2, 2, 2, 4, 4] if window == 2 else [
        4, 4, 4, 8, 8, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1, 1, 2
    ]  # fmt: skip


def test_gradient_sum_is_refused_with_unsupported_features() -> None:
    from windlass.compat.deepspeed_config import DeepSpeedConfig

    requested = {"train_batch_size": 1, "gradient_allreduce_op": "SUM"}
    assert DeepSpeedConfig({**requested, "zero_optimization": {"stage": 2}}).gradient_allreduce_op == "sum"
    for more, name in (
        ({"zero_optimization": {"stage": 3}}, "ZeRO stage 3"),
        ({"zero_optimization": {"zenflow": {}}}, "ZenFlow"),
        ({"compile": {"deepcompile": True}}, "Deep"),
    ):
        with pytest.raises(ValueError, match=f"not supported with {name}"):
            DeepSpeedConfig({**requested, **more})
    with pytest.raises(ValueError, match="Invalid gradient_allreduce_op: 'max'"):
        DeepSpeedConfig({**requested, "gradient_allreduce_op": "max"})


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ((32, 16, 2), (32, 16, 2)),
        ((32, 16, None), (32, 16, 2)),
        ((32, None, 2), (32, 16, 2)),
        ((None, 16, 2), (32, 16, 2)),
        ((None, 16, None), (16, 16, 1)),
        ((33, 17, 2), None),
        ((None, None, 2), None),
        ((33, None, 2), None),
    ],
)
def test_batch_sizes_are_completed(given: tuple[int | None, ...], filled: tuple[int, ...] | None) -> None:
    """`_configure_train_batch_size` computes the sizes that are None, and asserts that the three sizes agree."""
    from windlass.compat.deepspeed_config import DeepSpeedConfig

    config = DeepSpeedConfig({"train_batch_size": 1})
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name, value in zip(names, given, strict=True):
        setattr(config, name, value)
    if filled is None:
        with pytest.raises(AssertionError):
            config._configure_train_batch_size()
    else:
        config._configure_train_batch_size()
        assert tuple(getattr(config, name) for name in names) == filled


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": 1001}}, "multiple of nccl_start_alignment_factor"),
        (
            {"zero_optimization": {"stage": 1, "overlap_comm": True}, "managed_gradient_accumulation": False},
            "overlap_comm only with ZeRO stage 2",
        ),
        ({"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": False}, "SGD is none of Adam, AdamW"),
    ],
)
def test_combinations_that_deepspeed_asserts_against(given: dict[str, Any], text: str) -> None:
    """Keys that DeepSpeed refuses together raise AssertionError if the caller wrote them."""
    from windlass.compat.config_assertions import assert_supported_by_deepspeed

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(AssertionError, match=text):
        assert_supported_by_deepspeed(given, model, optimizer)
    with pytest.raises(ValueError, match="not supported with ZeRO stage 3"):
        assert_supported_by_deepspeed({"gradient_allreduce_op": "SUM", "zero_optimization": {"stage": 3}}, model, None)
    assert_supported_by_deepspeed({"zero_optimization": {"stage": 2}}, model, optimizer)
    assert_supported_by_deepspeed(given, model, torch.optim.Adam(model.parameters())) if "SGD" in text else None


def test_memory_efficient_linear_replaces_the_function_if_it_is_written() -> None:
    """`F.linear` is replaced only on request, with equal gradients, and not if a script has replaced it already."""
    original = torch.nn.functional.linear
    config: dict[str, Any] = {"train_batch_size": 1, "zero_optimization": {"stage": 3}}
    assert not requests_linear(load_config(config))
    config["zero_optimization"]["memory_efficient_linear"] = True
    assert requests_linear(load_config(config))
    try:
        replace_linear()
        assert torch.nn.functional.linear is zero3_linear_wrap
        assert InsertPostInitMethodToModuleSubClasses.linear_bk is original
        torch.nn.functional.linear = original  # a second model installs it again
        replace_linear()
        layer, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
        given = [x, *layer.parameters()]
        ours = torch.autograd.grad(layer(x).square().sum(), given)
        theirs = torch.autograd.grad(original(x, layer.weight, layer.bias).square().sum(), given)
        assert all(map(torch.allclose, ours, theirs))
        torch.nn.functional.linear = mine = lambda *given: original(*given)  # a script's function stays
        replace_linear()
        assert torch.nn.functional.linear is mine
    finally:
        torch.nn.functional.linear = original
        del InsertPostInitMethodToModuleSubClasses.linear_bk


def test_module_granularity_threshold_marks_the_outermost_fine_modules() -> None:
    block = nn.Module()
    block.first, block.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    net = nn.Module()
    net.blocks, net.head = nn.ModuleList([block, copy.deepcopy(block)]), nn.Linear(4, 100, bias=False)
    # Elements per module: 32 / 3 = 10.7 in a block, 464 / 8 = 58 in the model (lists do not count as modules).
    assert mark_fine_grained_modules(net, 9) == []
    assert mark_fine_grained_modules(net, 10) == list(net.blocks) == get_z3_leaf_modules(net)
    assert mark_fine_grained_modules(net, 58) == [net]
