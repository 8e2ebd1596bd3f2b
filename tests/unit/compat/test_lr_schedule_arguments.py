"""Tests of DeepSpeed's schedule classes and their command-line arguments, and of flags for Muon."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

from windlass.compat import lr_schedule_arguments, runtime_constants
from windlass.compat.script_config import load_ds_config, set_optimizer_flags
from windlass.optim.scheduler_factory import OWN_SCHEDULES

# options of DeepSpeed 0.19.8's command line, with their defaults
DEFAULTS = {
    "lr_schedule": None,
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_momentum": False,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
    "warmup_min_lr": 0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "warmup_min_ratio": 0.01,
    "cos_min_ratio": 0.01,
}


def parsed(*line: str) -> argparse.Namespace:
    return lr_schedule_arguments.add_tuning_arguments(argparse.ArgumentParser()).parse_args(line)


def test_arguments_and_defaults() -> None:
    assert vars(parsed()) == DEFAULTS
    assert parsed("--lr_range_test_staircase", "true").lr_range_test_staircase is True
    assert parsed("--lr_range_test_staircase").lr_range_test_staircase is True


def test_a_section_from_a_command_line() -> None:
    assert lr_schedule_arguments.get_config_from_args(parsed()) == (None, "--lr_schedule not specified on command line")
    section, why = lr_schedule_arguments.get_config_from_args(
        parsed("--lr_schedule", "WarmupLR", "--warmup_max_lr", "0.1")
    )
    assert why is None and section == {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 1000, "warmup_type": "log"},
    }
    assert "Nope is not supported" in str(
        lr_schedule_arguments.get_config_from_args(parsed("--lr_schedule", "Nope"))[1]
    )
    for name in lr_schedule_arguments.VALID_LR_SCHEDULES:
        section, _ = lr_schedule_arguments.get_config_from_args(parsed("--lr_schedule", name))
        assert section is not None
        if name in ("WarmupLR", "LRRangeTest"):
            OWN_SCHEDULES[name](torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), **section["params"])


def test_a_rate_from_a_section() -> None:
    rate = lr_schedule_arguments.get_lr_from_config
    assert rate({"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}) == (0.1, "")
    assert rate({"type": "OneCycle", "params": {"cycle_max_lr": 0.2}}) == (0.2, "")
    assert rate({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.3}}) == (0.3, "")
    assert rate({"type": "WarmupCosineLR", "params": {}})[0] is None
    assert rate({"params": {}}) == (None, "LR schedule type not defined in config")
    assert rate({"type": "Nope", "params": {}})[0] is None


def test_last_lr_before_a_step_is_the_first() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = lr_schedule_arguments.WarmupLR(optimizer, warmup_min_lr=0.01, warmup_max_lr=0.1)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert schedule.get_last_lr() == [0.01]
    schedule.step()
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    with pytest.raises(ValueError):
        lr_schedule_arguments.WarmupLR(optimizer, warmup_num_steps=0)


def test_schedule_names_equal_their_classes() -> None:
    assert set(lr_schedule_arguments.VALID_LR_SCHEDULES) == set(OWN_SCHEDULES)
    for name in lr_schedule_arguments.VALID_LR_SCHEDULES:
        assert issubclass(getattr(lr_schedule_arguments, name), OWN_SCHEDULES[name])


def test_rates_and_wrapped_optimizers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    kept = optimizer.param_groups[0]["lr"]
    assert lr_schedule_arguments.update_lr(optimizer.param_groups, [0.5]) == [kept] and kept.item() == 0.5

    class Wrapper:
        def __init__(self) -> None:
            self.optimizer = optimizer

    assert lr_schedule_arguments.get_torch_optimizer(Wrapper()) is optimizer
    with pytest.raises(TypeError, match="list is not a torch.optim.Optimizer"):
        lr_schedule_arguments.get_torch_optimizer([])


def test_constants_and_load_ds_config() -> None:
    assert (
        runtime_constants.GRADIENT_CLIPPING_DEFAULT == 1.0 and runtime_constants.ONEBIT_LAMB_OPTIMIZER == "onebitlamb"
    )
    given = {"train_batch_size": 1}
    assert load_ds_config(given) is given
    with pytest.raises(ValueError, match="no configuration file"):
        load_ds_config("/nowhere.json")


def test_muon_flags() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.hidden, self.lm_head = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4)

    net, config = Net(), argparse.Namespace(optimizer_name="muon")
    set_optimizer_flags(config, net)
    flags = {name: parameter.use_muon for name, parameter in net.named_parameters()}  # type: ignore[attr-defined]
    assert [name for name, flag in flags.items() if flag] == ["hidden.weight"]
    other = Net()
    set_optimizer_flags(argparse.Namespace(optimizer_name="adam"), other)
    assert not hasattr(other.hidden.weight, "use_muon")


def test_unknown_warmup_type_falls_back_to_log() -> None:
    """An unknown kind of warm-up is logarithmic, as in DeepSpeed; windlass's own schedules refuse it."""
    from windlass.compat.tolerated_keys import resolve_tolerated_keys
    from windlass.optim import lr_warmups

    def rates(schedule: type, **more: object) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        made = schedule(optimizer, warmup_num_steps=4, **more)
        results = []
        for _ in range(6):
            made.step()
            results.append(made.get_lr()[0])
        assert isinstance(made, schedule)
        return results

    for name, more in (
        ("WarmupLR", {}),
        ("WarmupDecayLR", {"total_num_steps": 9}),
        ("WarmupCosineLR", {"total_num_steps": 9}),
    ):
        own, theirs = getattr(lr_warmups, name), getattr(lr_schedule_arguments, name)
        assert (
            rates(theirs, warmup_type="cubic", **more)
            == rates(own, **more)
            != rates(theirs, warmup_type="linear", **more)
        )
        with pytest.raises(ValueError, match="cubic"):
            rates(own, warmup_type="cubic", **more)
        made = own(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), **more)
        assert isinstance(made, theirs), "initialize makes windlass's own"
    section = {"type": "WarmupLR", "params": {"warmup_type": "cubic", "warmup_num_steps": 4}}
    result = resolve_tolerated_keys({"train_batch_size": 1, "scheduler": section})
    assert result["scheduler"]["params"] == {"warmup_num_steps": 4} and "warmup_type" in section["params"]


def test_one_cycle_lengths_equal_deepspeed() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    made = lr_schedule_arguments.OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=3, cycle_second_step_size=1)
    assert (made.total_size, made.step_ratio, made.first_step_size, made.second_step_size) == (4, 0.75, 3, 1)
