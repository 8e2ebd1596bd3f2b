"""Tests of the names and parameters in a configuration's `optimizer` section."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.base.errors import ConfigError
from windlass.optim import Lamb, Lion, Muon, mup, optimizer_factory
from windlass.optim.elementwise_optimizers import enable_fused_step, is_elementwise

REFUSED = {"LBFGS": "closure", "SparseAdam": "sparse"}


def parameters() -> list[torch.Tensor]:
    return [torch.zeros(3, 2, requires_grad=True), torch.zeros(2, requires_grad=True)]


class Widths(tuple[float, ...]):
    """Fake of the `infshape` that `mup.set_base_shapes` sets: growth factor per dimension, 0 if it does not grow."""

    def ninf(self) -> int:
        return sum(width > 0 for width in self)

    def width_mult(self) -> float:
        return next((width for width in reversed(self) if width), 1.0)

    def fanin_fanout_mult_ratio(self) -> float:
        return (self[1] or 1.0) / (self[0] or 1.0)


def _sized(parameter: torch.Tensor, *widths: float) -> torch.Tensor:
    parameter.infshape = Widths(widths)  # type: ignore[attr-defined]
    return parameter


def test_mup_scales_rates_and_decays_by_width() -> None:
    matrix, vector, fixed = (torch.zeros(2, 2, requires_grad=True) for _ in range(3))
    _sized(matrix, 2.0, 4.0), _sized(vector, 4.0, 0.0), _sized(fixed, 0.0, 0.0)
    groups = [{"params": [matrix, vector]}, {"params": [fixed], "lr": 0.5, "weight_decay": 0.0}]

    def rates(name: str) -> dict[int, tuple[float, float]]:
        optimizer = optimizer_factory.build_optimizer(
            name, {"lr": 0.1, "weight_decay": 0.2}, [dict(group) for group in groups]
        )
        return {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}

    adam = {id(matrix): (0.025, 0.8), id(vector): (0.1, 0.2), id(fixed): (0.5, 0.0)}
    assert rates("MuAdam") == rates("MuAdamW") == adam
    assert rates("MuSGD") == {id(matrix): (0.05, 0.4), id(vector): (0.4, 0.05), id(fixed): (0.5, 0.0)}
    assert type(optimizer_factory.build_optimizer("MuAdam", {}, [matrix])) is torch.optim.Adam
    with pytest.raises(ConfigError, match="set_base_shapes"):
        optimizer_factory.build_optimizer("MuAdam", {}, [torch.zeros(2, 2, requires_grad=True)])
    with pytest.raises(ConfigError, match="3 scaling dimensions"):
        optimizer_factory.build_optimizer(
            "MuSGD", {}, [_sized(torch.zeros(1, 1, 1, requires_grad=True), 2.0, 2.0, 2.0)]
        )


@pytest.mark.parametrize("name", optimizer_factory.list_optimizer_names())
@pytest.mark.parametrize("spell", [str, str.lower, str.upper])
def test_every_name_builds_and_steps_in_any_case(name: str, spell: Any) -> None:
    weights = [_sized(torch.zeros(3, 2, requires_grad=True))]
    optimizer = optimizer_factory.build_optimizer(spell(name), {"lr": 0.1}, weights)
    weights[0].grad = torch.ones(3, 2)
    optimizer.step()
    assert not torch.equal(weights[0].detach(), torch.zeros(3, 2))
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


def test_names_are_all_of_torch_and_windlass() -> None:
    of_torch = {n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert set(optimizer_factory.list_optimizer_names()) == (
        of_torch
        | {
            "Lion",
            "Lamb",
            "Muon",
            "OneBitAdam",
            "OneBitLamb",
            "ZeroOneAdam",
            "DiLoCo",
            "PowerSGD",
            *mup.OPTIMIZER_NAMES,
        }
    ) - {
        "Optimizer",
        "LBFGS",
        "SparseAdam",
    }
    classes = {"lion": Lion, "lamb": Lamb, "muon": Muon, "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}
    assert {name: optimizer_factory.resolve_optimizer_class(name) for name in classes} == classes


@pytest.mark.parametrize("name", REFUSED)
def test_refused_names_have_a_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        optimizer_factory.build_optimizer(name, {}, parameters())


def test_unknown_name_error_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="nearest is AdamW"):
        optimizer_factory.resolve_optimizer_class("AdamWw")


@pytest.mark.parametrize("mode", [None, True, False])
def test_adam_decouples_weight_decay_by_default(mode: bool | None) -> None:
    params = {"lr": 0.1, "weight_decay": 0.5} | ({} if mode is None else {"adam_w_mode": mode})
    reference_class = torch.optim.Adam if mode is False else torch.optim.AdamW
    ours, theirs = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = optimizer_factory.build_optimizer("Adam", params, [ours])
    reference = reference_class([theirs], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        ours.grad, theirs.grad = torch.full((2,), 0.3), torch.full((2,), 0.3)
        optimizer.step()
        reference.step()
    assert type(optimizer) is reference_class
    assert torch.equal(ours, theirs)


def test_deepspeed_parameters_without_effect_are_accepted() -> None:
    adam = {
        "torch_adam": True,
        "adam_w_mode": True,
        "bias_correction": True,
        "set_grad_none": True,
        "betas": [0.8, 0.9],
    }
    optimizer = optimizer_factory.build_optimizer(
        "Adam", {**adam, "fp32_optimizer_states": True, "fused": True}, parameters()
    )
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9) and optimizer.param_groups[0]["fused"] is True
    optimizer_factory.build_optimizer("AdamW", adam, parameters())
    assert optimizer_factory.build_optimizer("Adamax", {"betas": [0.8, 0.9]}, parameters()).param_groups[0][
        "betas"
    ] == (0.8, 0.9)
    muon = {"ns_method": "gram", "per_head_muon": False, "torch_adam": True, "adam_w_mode": True, "momentum": 0.9}
    groups = optimizer_factory.build_optimizer(
        "Muon", {**muon, "lr": 1.0, "muon_lr": 0.2, "adam_lr": 0.3}, parameters()
    ).param_groups
    assert [(group["use_muon"], group["lr"]) for group in groups] == [(True, 0.2), (False, 0.3)]
    lamb = {"eps_inside_sqrt": True, "max_grad_norm": 0.0, "amsgrad": False, "max_coeff": 5, "min_coeff": 0.1}
    optimizer_factory.build_optimizer("Lamb", lamb, parameters())
    optimizer_factory.build_optimizer("Lion", {"set_grad_none": True}, parameters())
    optimizer_factory.build_optimizer("Adagrad", {"amsgrad": False}, parameters())


@pytest.mark.parametrize(
    ("type", "params", "words"),
    [
        (
            "AdamW",
            {"learning_rate": 1, "weight_dekay": 0},
            ["learning_rate", "weight_dekay", "nearest is weight_decay"],
        ),
        ("Adam", {"bias_correction": False}, ["bias_correction = false", "write true"]),
        ("AdamW", {"adam_w_mode": False}, ['type "Adam"']),
        ("Adam", {"max_grad_norm": 1.0}, ["gradient_clipping"]),
        ("Muon", {"per_head_muon": True}, ["not yet built"]),
        ("Muon", {"ns_method": "svd"}, ['ns_method: "svd" does not fit', '"gram" or "standard"']),
        ("Adam", {"lr": "auto", "betas": "auto"}, ['lr = "auto"', 'betas = "auto"']),
        ("Adam", {"lr": -1.0}, ["lr: -1.0 does not fit", ">= 0"]),
        ("AdamW", {"betas": ["", 0.95]}, ["betas:", "2 numbers >= 0 and < 1"]),
        ("AdamW", {"betas": [0.9, 1.0]}, ["betas:", "2 numbers >= 0 and < 1"]),
        ("AdamW", {"lr": float("nan"), "eps": 10**400}, ["lr: NaN", "eps: 1000"]),
        ("NAdam", {"betas": ["", 0.95]}, ["betas:", "2 numbers"]),
        ("RMSprop", {"lr": -1.0}, ["RMSprop cannot be constructed", "Invalid learning rate"]),
        ("SGD", {"nesterov": True}, ["nesterov", "momentum above 0"]),
        ("Lamb", {"min_coeff": 11}, ["min_coeff: 11 is more than max_coeff 10.0"]),
        ("AdamW", {"fused": True, "foreach": True}, ["foreach", "fused"]),
        ("Lamb", {"amsgrad": True}, ["amsgrad", "not yet built"]),
        ("SGD", {"params": []}, ["params.params"]),
    ],
)
def test_wrong_parameters_are_all_named_at_once(type: str, params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        optimizer_factory.build_optimizer(type, params, parameters())
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_defaults_equal_torch_except_the_documented_one() -> None:
    for name in optimizer_factory.list_optimizer_names():
        cls = optimizer_factory.resolve_optimizer_class(name)
        signature = inspect.signature(cls.__init__).parameters
        accepted = optimizer_factory.accepted_params(name)
        differing = {key for key, value in accepted.items() if key in signature and value != signature[key].default}
        assert differing == ({"weight_decay"} if name in ("Adam", "MuAdamW") else set())
        group = optimizer_factory.build_optimizer(name, {}, [_sized(item) for item in parameters()]).param_groups[0]
        for key, value in accepted.items():
            if key in group and key != "foreach":
                assert group[key] == value, (name, key)


def test_documented_table_equals_the_code() -> None:
    text = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 5:
            rows[cells[0]] = cells[1:]
    for name in optimizer_factory.list_optimizer_names():
        documented, defaults, spans, fused = rows[name]
        optimizer = optimizer_factory.build_optimizer(name, {}, [_sized(torch.zeros(3, 2, requires_grad=True))])
        assert documented.rpartition(".")[2] == type(optimizer).__name__
        accepted = optimizer_factory.accepted_params(name)
        results = dict(pair.split("=") for pair in defaults.split("; "))
        assert results == {key: str(accepted[key]) for key in results}, name
        assert len(results) >= 3, name
        if type(optimizer).__module__.startswith("windlass"):
            assert set(results) == set(inspect.signature(type(optimizer)).parameters) - {"params"}
        assert is_elementwise(optimizer) == (spans == "yes"), name
        assert enable_fused_step(optimizer) == (fused == "yes"), name


@pytest.mark.parametrize(
    ("name", "params", "reason"),
    [
        ("DiLoCo", {"lr": -1.0}, "lr is -1.0"),
        ("OneBitAdam", {"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
        ("OneBitLamb", {"lr": -1.0}, "lr is -1.0"),
        ("ZeroOneAdam", {"eps": -1.0}, "eps is -1.0"),
        ("PowerSGD", {"momentum": -1.0}, "momentum is -1.0"),
        ("PowerSGD", {"momentum": 0.0, "nesterov": True}, "nesterov is true and momentum is 0.0"),
    ],
)
def test_own_classes_name_values_out_of_range(name: str, params: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: {reason}"):
        optimizer_factory.resolve_optimizer_class(name)(parameters(), **params)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("ZeroOneAdam", "var_freeze_step", 7), ("ZeroOneAdam", "local_step_clipper", 2), ("DiLoCo", "inner_steps", 8)],
)
def test_groups_share_the_steps_of_messages(name: str, key: str, value: int) -> None:
    def groups() -> list[dict[str, Any]]:
        return [{"params": parameters()[:1]}, {"params": parameters()[:1], key: value, "lr": 0.5}]

    with pytest.raises(ConfigError, match=f"{name}: {key} is {value} in group 1 of the parameters and .* in group 0"):
        optimizer_factory.build_optimizer(name, {}, groups())
    optimizer_factory.build_optimizer(name, {key: value}, groups())
