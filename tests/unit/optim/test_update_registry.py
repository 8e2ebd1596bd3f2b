"""Tests that `register_update` adds names to `optimizer.type`, which every reader of the configuration accepts."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import windlass
from windlass.base.errors import ConfigError, ModelError
from windlass.config.config_loading import load_config
from windlass.optim.optimizer_factory import build_optimizer, check_optimizer, list_optimizer_names
from windlass.zero.update.elementwise_update import ElementwiseUpdate
from windlass.zero.update.self_reducing_update import RankStates, SelfReducingUpdate
from windlass.zero.update.update_class import update_class
from windlass.zero.update.whole_parameter_update import WholeParameterUpdate


class Halving(torch.optim.Optimizer):
    """Optimizer class to register. Its step never runs."""

    def __init__(self, params: Any, lr: float = 0.5, heavy: bool = False) -> None:
        super().__init__(params, {"lr": lr, "heavy": heavy})

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


class MoreHalving(Halving):
    """Subclass that is not registered itself."""


class Marked(ElementwiseUpdate):
    """User-defined update class."""

    reduces_itself: ClassVar[bool] = True


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.config.registered_optimizers._classes", {})
    monkeypatch.setattr("windlass.optim.update_registry._updates", {})


def one() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2, 2))]


def test_a_registered_name_constructs_the_class_with_its_params() -> None:
    assert check_optimizer("Halving", {})
    windlass.optim.register_update("Halving", Halving)
    built = build_optimizer("halving", {"lr": 0.25, "heavy": True}, one())
    assert type(built) is Halving
    assert (built.param_groups[0]["lr"], built.param_groups[0]["heavy"]) == (0.25, True)
    assert "Halving" in list_optimizer_names()
    assert load_config({"train_batch_size": 1, "optimizer": {"type": "Halving", "params": {"lr": 0.1}}}).optimizer


def test_params_of_a_registered_class_are_checked_by_its_signature() -> None:
    windlass.optim.register_update("Halving", Halving)
    assert any("momentum" in text for text in check_optimizer("Halving", {"momentum": 0.9}))
    assert any("heavy" in text for text in check_optimizer("Halving", {"heavy": "much"}))
    assert not check_optimizer("Halving", {"heavy": True})


def test_the_update_of_a_class_is_the_registered_one_or_that_of_its_base() -> None:
    windlass.optim.register_update("Halving", Halving, Marked)
    assert update_class(Halving(one())) is Marked
    assert update_class(MoreHalving(one())) is Marked
    assert update_class(torch.optim.AdamW(one())) is ElementwiseUpdate


def test_default_update_is_whole_parameter() -> None:
    windlass.optim.register_update("Halving", Halving)
    assert update_class(Halving(one())) is WholeParameterUpdate


def test_registering_the_same_again_is_accepted() -> None:
    for _ in range(2):
        windlass.optim.register_update("Halving", Halving, Marked)


@pytest.mark.parametrize("name", ["AdamW", "adamw", "Muon", "OneBitAdam", "LBFGS", "radam"])
def test_names_of_known_optimizers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*is taken.*new name"):
        windlass.optim.register_update(name, Halving)


def test_a_second_class_under_a_name_and_a_second_update_of_a_class_are_refused() -> None:
    windlass.optim.register_update("Halving", Halving, Marked)
    with pytest.raises(ConfigError, match="HALVING.*is taken by Halving"):
        windlass.optim.register_update("HALVING", MoreHalving)
    with pytest.raises(ConfigError, match="Other.*taken by Marked"):
        windlass.optim.register_update("Other", Halving)


def test_other_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match="not a subclass of torch.optim.Optimizer"):
        windlass.optim.register_update("Thing", dict)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs_whole_parameters and reduces_itself"):
        windlass.optim.register_update("Thing", Halving, dict)
    with pytest.raises(ConfigError, match=r"register_update\('Thing'\): .*Stepless'> does not define step_parameters;"):
        windlass.optim.register_update("Thing", Halving, type("Stepless", (SelfReducingUpdate,), {}))


def test_per_rank_states_that_are_not_declared_name_the_attribute() -> None:
    states = RankStates("SignUpdate", "weight", {"error": torch.zeros(3)})
    assert "err" not in states and states.get("err") is None and states["error"].numel() == 3
    with pytest.raises(
        ModelError, match=r"SignUpdate has no per-rank state 'err' of 'weight' \(it has \['error'\].*rules"
    ):
        states["err"]
    with pytest.raises(ModelError, match=r"would be dropped; write rank_states\[\"error\"\].copy_"):
        states["error"] = torch.ones(3)
    error = states["error"]
    states["error"] += 2
    assert states["error"] is error and error.tolist() == [2, 2, 2]
