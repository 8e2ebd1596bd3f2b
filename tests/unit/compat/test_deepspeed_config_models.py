"""Tests of DeepSpeed's section models and getters: names, defaults, dependent values, and refused values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from windlass.compat import config_getters as getters
from windlass.compat.config_queries import COMPUTED_ANSWERS, CONFIG_KEYS, config_value
from windlass.compat.config_sections import (
    DEFAULT_LEAF_MODULE_CLASSES,
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from windlass.config import load_config


def test_stage_3_aliases_are_accepted() -> None:
    config = DeepSpeedZeroConfig(stage=3, stage3_max_reuse_distance=7, prefetch_bucket_size=8)
    assert (config.max_reuse_distance, config.stage3_prefetch_bucket_size) == (7, 8)
    config.max_reuse_distance = 9
    assert config.stage3_max_reuse_distance == 9
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save


def test_defaults_depend_on_other_keys() -> None:
    assert [DeepSpeedZeroConfig(stage=stage).overlap_comm for stage in range(4)] == [False, False, False, True]
    config = DeepSpeedZeroConfig(cpu_offload=True, cpu_offload_param=True, overlap_comm="auto")
    assert isinstance(config.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert isinstance(config.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert (config.offload_optimizer.device, config.offload_param.device) == ("cpu", "cpu")
    assert DeepSpeedZeroConfig().offload_param is None
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=True).pipeline
    assert not DeepSpeedZeroOffloadOptimizerConfig().pipeline


def test_leaf_modules() -> None:
    assert DeepSpeedZeroConfig().leaf_module.classes == DEFAULT_LEAF_MODULE_CLASSES
    given = DeepSpeedZeroConfig(leaf_module={"classes": "a.B", "names": ["x", "x"]}).leaf_module
    assert (given.classes, given.names, given.name_suffixes) == (["a.B"], ["x"], [])


@pytest.mark.parametrize("value", [True, math.inf, math.nan, -1, [], "abc"])
def test_invalid_loss_scales_are_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        DeepSpeedFP16Config(loss_scale=value)


@pytest.mark.parametrize("field", ["loss_scale_window", "min_loss_scale"])
def test_dynamic_scaling_needs_positive_bounds(field: str) -> None:
    for value in (0, -1, True, math.nan, None):
        with pytest.raises(ValidationError):
            DeepSpeedFP16Config(enabled=True, **{field: value})
    assert getattr(DeepSpeedFP16Config(enabled=True, loss_scale=8, **{field: 0}), field) == 0
    assert getattr(DeepSpeedFP16Config(**{field: -1}), field) == -1
    config = DeepSpeedFP16Config(enabled=True, initial_scale_power=4, **{field: 3})
    assert config.dynamic_loss_scale_args()["init_scale"] == config.initial_dynamic_scale() == 16


def test_getters_read_a_dict() -> None:
    assert isinstance(getters.get_bfloat16_config({}), DeepSpeedBF16Config)
    assert getters.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert getters.get_float16_config({"fp16": {"loss_scale": 4}}).loss_scale == 4
    named: Any = getters
    assert (named.get_gradient_clipping({}), named.get_gradient_clipping({"gradient_clipping": 0.0})) == (1.0, 0.0)
    assert named.get_log_level({}) is None
    assert getters.get_communication_data_type({"communication_data_type": "bf16"}) is torch.bfloat16
    assert getters.get_torch_autocast_dtype({"torch_autocast": {"dtype": "torch.float16"}}) is torch.float16
    assert getters.get_gradient_allreduce_op({"gradient_allreduce_op": "SUM"}) == "sum"
    config = {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 2.0}}}
    assert getters.get_optimizer_name(config) == "Adam" and getters.get_optimizer_gradient_clipping(config) == 2.0
    assert getters.get_optimizer_params({}) is None and getters.get_scheduler_params({}) is None
    assert getters.get_pipeline_config({"pipeline": {"stages": 2}})["stages"] == 2


@pytest.mark.parametrize(
    ("getter", "given"),
    [
        ("get_gradient_allreduce_op", {"gradient_allreduce_op": "max"}),
        ("get_communication_data_type", {"communication_data_type": "int8"}),
        ("get_lower_precision_safe_modules", {"torch_autocast": {"lower_precision_safe_modules": [1]}}),
        ("get_checkpoint_tag_validation_mode", {"tag_validation": "Maybe"}),
    ],
)
def test_getters_refuse_invalid_values(getter: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max|int8|\[1\]|Maybe"):
        getattr(getters, getter)(given)


@pytest.mark.parametrize(
    ("method", "section", "value"),
    [
        ("fp16_master_weights_and_gradients", {"fp16": {"fp16_master_weights_and_grads": True}}, True),
        ("bf16_master_weights_and_gradients", {"bf16": {"bf16_master_weights_and_grads": True}}, True),
        ("bf16_optimizer_states", {"bf16": {"bf16_optimizer_states": True}}, True),
        ("optimizer_legacy_fusion", {"optimizer": {"type": "Adam", "legacy_fusion": True}}, True),
        ("cpuadam_cores_perc", {"zero_optimization": {"offload_optimizer": {"cpuadam_cores_perc": 0.5}}}, 0.5),
    ],
)
def test_engine_methods_return_the_values_of_the_configuration(method: str, section: Any, value: Any) -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1, **section})
    plain = load_config({"train_micro_batch_size_per_gpu": 1})
    expected = (value, 0.9 if method == "cpuadam_cores_perc" else False)
    if method in CONFIG_KEYS:
        assert tuple(config_value(one, CONFIG_KEYS[method]) for one in (config, plain)) == expected
    else:
        assert tuple(COMPUTED_ANSWERS[method](one) for one in (config, plain)) == expected
