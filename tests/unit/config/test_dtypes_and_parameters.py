"""Tests of the dtype table, and that tables of optimizer and schedule parameters equal the classes' signatures."""

from __future__ import annotations

import inspect
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windlass.config import load_config, optimizer_section, scheduler_section
from windlass.config.key_status import KeyStatus
from windlass.optim import optimizer_factory, scheduler_factory

BUILT = [
    name for name in optimizer_section.OPTIMIZER_PARAMETERS if name not in optimizer_section.UNSUPPORTED_OPTIMIZERS
]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("source", "model", "table"),
    [
        ({}, "fp32", ("fp32", "fp32", "fp32", "fp32", "fp32", "fp32")),
        ({}, "bf16", ("bf16", "bf16", "fp32", "fp32", "fp32", "fp32")),
        ({}, "fp64", ("fp64", "fp64", "fp64", "fp64", "fp64", "fp64")),
        ({"bf16": {"enabled": True}}, "fp32", ("bf16", "bf16", "fp32", "fp32", "fp32", "fp32")),
        ({"fp16": {"enabled": True}}, "fp32", ("fp16", "fp16", "fp32", "fp32", "fp32", "fp32")),
        ({"torch_autocast": {"enabled": True}}, "fp32", ("fp32", "bf16", "fp32", "fp32", "fp32", "fp32")),
        (
            {"torch_autocast": {"enabled": True, "dtype": "torch.float16"}},
            "fp32",
            ("fp32", "fp16", "fp32", "fp32", "fp32", "fp32"),
        ),
        (
            {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}},
            "fp32",
            ("bf16", "bf16", "fp32", "fp32", "fp32", "fp32"),
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            "fp32",
            ("bf16", "bf16", "bf16", "bf16", "fp32", "fp32"),
        ),
        ({"communication_data_type": "BF16"}, "fp32", ("fp32", "fp32", "fp32", "bf16", "fp32", "fp32")),
    ],
)
def test_the_dtype_table_is_the_same_at_every_stage(
    source: dict[str, Any], model: str, table: tuple[str, ...], stage: int
) -> None:
    config = load_config(source | {"zero_optimization": {"stage": stage}})
    assert astuple(config.dtype_table(model)) == table


@pytest.mark.parametrize("name", BUILT)
def test_optimizer_parameters_are_those_of_the_class(name: str) -> None:
    """The class accepts all parameters of the table, with equal defaults. Tables of windlass's classes are complete."""
    built = optimizer_factory.accepted_params(name, {})
    table = optimizer_section.OPTIMIZER_PARAMETERS[name]
    assert set(table) <= set(built) | {"set_grad_none"}
    in_signature = set(inspect.signature(optimizer_factory.resolve_optimizer_class(name, {}).__init__).parameters) - {
        "self",
        "params",
    }
    if optimizer_factory.resolve_optimizer_class(name, {}).__module__.startswith("windlass"):
        assert in_signature <= set(table)
    for key, parameter in table.items():
        if key in in_signature and parameter.status is KeyStatus.HONOURED:
            default = built[key]
            assert parameter.default == (list(default) if isinstance(default, tuple) else default), key


@pytest.mark.parametrize("name", BUILT)
def test_resolved_optimizer_equals_the_constructed_one(name: str) -> None:
    config = load_config({"optimizer": {"type": name.upper(), "params": {"weight_decay": 0.1}}})
    assert config.optimizer is not None
    resolved = config.optimizer.resolve()
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.infshape = SimpleNamespace(ninf=lambda: 0)  # type: ignore[attr-defined]
    instance = optimizer_factory.build_optimizer(config.optimizer.type, config.optimizer.params, [weight])
    assert type(instance).__name__ == resolved.name
    assert instance.defaults["weight_decay"] == resolved.arguments["weight_decay"] == 0.1


@pytest.mark.parametrize(("params", "name", "decay"), [({}, "AdamW", 0.0), ({"adam_w_mode": False}, "Adam", None)])
def test_adam_decouples_weight_decay_by_default(params: dict[str, Any], name: str, decay: float | None) -> None:
    config = load_config({"optimizer": {"type": "Adam", "params": params}})
    assert config.optimizer is not None
    assert config.optimizer.resolve().name == name
    assert config.optimizer.resolve().arguments.get("weight_decay") == decay


@pytest.mark.parametrize("name", list(scheduler_section.SCHEDULER_PARAMETERS))
def test_schedule_parameters_are_those_of_the_class(name: str) -> None:
    signature = list(inspect.signature(scheduler_factory.resolve_scheduler_class(name).__init__).parameters.values())[
        2:
    ]
    table = scheduler_section.SCHEDULER_PARAMETERS[name]
    assert {entry.name for entry in signature} == set(table)
    for item in signature:
        assert table[item.name].default == (... if item.default is item.empty else item.default)


@pytest.mark.parametrize("name", [*optimizer_section.UNSUPPORTED_OPTIMIZERS])
def test_unsupported_optimizers_load_and_are_refused(name: str) -> None:
    assert [item.path for item in load_config({"optimizer": {"type": name}}).refusals()] == ["optimizer.type"]
    with pytest.raises(ValueError, match="refused"):
        optimizer_factory.resolve_optimizer_class(name)


@pytest.mark.parametrize("name", [*scheduler_section.UNSUPPORTED_SCHEDULES])
def test_unsupported_schedules_load_and_are_refused(name: str) -> None:
    assert [item.path for item in load_config({"scheduler": {"type": name}}).refusals()] == ["scheduler.type"]
    with pytest.raises(ValueError, match="refused"):
        scheduler_factory.resolve_scheduler_class(name)


def test_any_torch_class_can_be_named() -> None:
    config = load_config(
        {
            "optimizer": {"type": "rmsprop", "params": {"alpha": 0.9}},
            "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}},
        }
    )
    assert config.refusals() == []


def test_whole_numbers_are_integers_where_steps_are_counted() -> None:
    config = load_config(
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 1e3, "warmup_num_steps": 10.0}}}
    )
    assert config.scheduler is not None
    assert {type(value) for value in config.scheduler.params.values()} == {int}
