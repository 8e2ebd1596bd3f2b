"""Tests of optimizers that need full parameters, and of 8-bit states, with parameters sharded over tp or ep."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import STEPS, Case, Found, batch, build, check, config_of, hold, hold_all, plain, train
from windlass.base.errors import ModelError
from windlass.optim import Lamb

LAMB = (("lr", 1e-2), ("weight_decay", 0.02), ("eps", 1e-4))
MUON = (("lr", 1e-2), ("weight_decay", 0.02), ("eps", 1e-4))
ROWS = (("lr", 1e-2),)

_CASES = [
    Case("llama", (("tp", 2),), stage=1, optimizer="Lamb", params=LAMB),
    Case("gpt2", (("tp", 2),), stage=3, tied=True, optimizer="Lamb", params=LAMB, host=True),
    Case("uneven", (("tp", 2),), stage=2, optimizer="Lamb", params=LAMB, zero=(("sub_group_size", 3000),)),
    Case("mixtral", (("ep", 2),), stage=2, optimizer="Lamb", params=LAMB),
    Case("mixtral", (("ep", 2), ("tp", 2)), stage=3, optimizer="Lamb", params=LAMB),
    Case("llama", (("tp", 2),), stage=2, optimizer="Adafactor", params=ROWS, bound=5e-5),
]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_whole_parameter_rules_on_parts_equal_one_process(case: Case) -> None:
    check(case)


# ------------------------------------------------------------------------------------------------------------- Muon

_MATRIX_CASES = [
    Case("llama", (("tp", 2),), stage=0, optimizer="Muon", params=MUON),
    Case("uneven", (("tp", 2),), stage=3, world=4, optimizer="Muon", params=MUON),
    Case("mixtral", (("ep", 2),), stage=3, optimizer="Muon", params=MUON),
]


def exact(matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Return the result of Muon's iteration in float64: X <- a X + b (X X') X + c (X X')^2 X from X / |X|."""
    a, b, c = coefficients
    x = matrix.double() / matrix.double().norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x.to(matrix.dtype)


def train_exactly(case: Case) -> Found:
    with patch("windlass.optim.muon.orthogonalize", exact):
        return train(case, 2)


@pytest.mark.parametrize("case", _MATRIX_CASES, ids=str)
def test_muon_on_parts_equals_one_process(case: Case) -> None:
    """Both sides orthogonalize in float64. In bf16, CPUs round matrix products differently, and the five iterations
    amplify these differences up to 485 times (3.4445^5; 3.4445 is the slope of Muon's polynomial at 0). The unit test
    of Muon covers bf16."""
    actual = run_ranks(train_exactly, case.ranks, case)
    with patch("windlass.optim.muon.orthogonalize", exact):
        hold_all(case, actual, plain.__wrapped__, 2)


@pytest.mark.parametrize(("rule", "params"), [pytest.param("Lamb", LAMB, marks=pytest.mark.slow), ("Adafactor", ROWS)])
def test_whole_parameter_states_are_resharded_over_other_axes(rule: str, params: Any, tmp_path: Path) -> None:
    cut = Case("llama", (("tp", 2),), stage=1, optimizer=rule, params=params, bound=5e-5)
    dense = Case("llama", (("tp", 1),), stage=3, optimizer=rule, params=params, bound=5e-5)
    # one data-loading rank on two ranks of tp, then on one rank; and back
    run_ranks(train, 2, cut, 2, str(tmp_path / "cut"))
    expected = plain("llama", False, 1, 1, STEPS, rule, params)
    actual = run_ranks(train, 1, dense, STEPS - 2, str(tmp_path / "dense"), str(tmp_path / "cut"))
    hold(dense, actual, expected, first=2)
    later = plain("llama", False, 1, 1, STEPS + 2, rule, params)
    hold(cut, run_ranks(train, 2, cut, 2, None, str(tmp_path / "dense")), later, first=STEPS)


# -------------------------------------------------------------------------------------------------- states of 8 bits


def eight_bits(
    model: str, axes: dict[str, int], stage: int, steps: int, save: str | None, source: str | None
) -> dict[str, Any]:
    """Train with 8-bit moments. Return full parameters and decoded states, at the end and right after the load."""
    import windlass

    config = config_of(Case(model, tuple(axes.items()), stage=stage))
    del config["optimizer"]
    made = partial(windlass.optim.CPUAdam, lr=2e-3, eps=1e-4, weight_decay=0.02, state_dtype="8bit")
    engine = windlass.initialize(model=build(model, tied=False), optimizer=made, config=config)[0]

    def whole() -> dict[str, Any]:
        named = list(engine.module.named_parameters())
        return {
            "params": {n: windlass.zero.full_param(p).detach().clone() for n, p in named},
            **{key: {n: windlass.zero.full_state(p, key) for n, p in named} for key in ("exp_avg", "exp_avg_sq")},
        }

    if source is not None:
        engine.load_checkpoint(source)
    before = whole()
    for step in range(engine.global_steps, engine.global_steps + steps):
        engine.backward(engine(**batch(step, 0, engine.data_loading_ranks[1])).loss)
        engine.step()
    if save is not None:
        engine.save_checkpoint(save)
    results = {"before": before, "after": whole()}
    engine.destroy()
    return results


def _codes_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two 8-bit states, relative to the largest element of each state."""
    pairs = [(one[key][name], other[key][name]) for key in ("exp_avg", "exp_avg_sq") for name in one[key]]
    return max(float((a - b).abs().max()) / float(b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("model", "axis"), [("llama", "tp"), pytest.param("mixtral", "ep", marks=pytest.mark.slow)])
def test_8_bit_states_of_parts_resume_in_any_layout(model: str, axis: str, tmp_path: Path) -> None:
    cut, dense = {axis: 2}, {axis: 1}
    saved, again, back = (str(tmp_path / name) for name in ("cut", "dense", "back"))
    first = run_ranks(eight_bits, 2, model, cut, 1, 2, saved, None)
    on = run_ranks(eight_bits, 2, model, cut, 1, 2, None, saved)
    straight = run_ranks(eight_bits, 2, model, cut, 1, 4, None, None)
    for item, other, begun in zip(on, straight, first, strict=True):  # the same sharding: bitwise equal
        for key, values in item["after"].items():
            assert all(torch.equal(value, other["after"][key][name]) for name, value in values.items()), key
        assert _codes_apart(item["before"], begun["after"]) == 0
    full = run_ranks(eight_bits, 1, model, dense, 3, 0, again, saved)[0]
    assert _codes_apart(full["before"], first[0]["after"]) < 1 / 64
    returned = run_ranks(eight_bits, 2, model, cut, 2, 0, back, again)[0]
    assert _codes_apart(returned["before"], full["after"]) < 1 / 64
    expected = plain(model, False, 2 if axis == "ep" else 1, 1, 4)["params"]
    for name, value in straight[0]["after"]["params"].items():  # Adam moves about lr in a step
        assert float((value - expected[name]).abs().max()) < 4 * 2e-3, name


def refused() -> str:
    import windlass

    config = config_of(Case("llama", (("tp", 2),), stage=1))
    del config["optimizer"]
    made = partial(windlass.optim.CPULamb, lr=1e-2, state_dtype="8bit")
    with pytest.raises(ModelError) as caught:
        windlass.initialize(model=build("llama", tied=False), optimizer=made, config=config)
    return str(caught.value)


def test_whole_parameter_rules_with_8_bit_states_are_refused() -> None:
    for text in run_ranks(refused, 2):
        assert "CPULamb" in text and "rounded once more at each step" in text and "is sharded over tp" in text


# ------------------------------------------------------------------------------------------- states from before a run

_RULES: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=2e-3, eps=1e-4),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "Lamb": partial(Lamb, lr=1e-2, eps=1e-4),
}


def step_plainly(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        model(**batch(step, 0, 0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def continue_in_engine(
    model: str, rule: str, axes: dict[str, int], stage: int, keeps_loss: bool = False
) -> dict[str, torch.Tensor]:
    """Step a model plainly, then in an engine that gets the optimizer with its states. All ranks have the same data.

    Args:
        keeps_loss: keep a loss from before the engine, whose graph has gradient nodes of the full shapes.
    """
    import windlass

    made = build(model, tied=False)
    optimizer = _RULES[rule](made.parameters())
    step_plainly(made, optimizer, 0, 2)
    config = config_of(Case(model, tuple(axes.items()), stage=stage))
    del config["optimizer"]
    config["gradient_clipping"] = 0.0
    kept = made(**batch(0, 0, 0)).loss if keeps_loss else None
    engine = windlass.initialize(model=made, optimizer=optimizer, config=config)[0]
    for step in range(2, 4):
        if "pp" in axes:
            engine.train_batch(iter([batch(step, 0, 0)]))
            continue
        engine.backward(engine(**batch(step, 0, 0)).loss)
        engine.step()
    state = engine.full_state_dict()
    engine.destroy()
    if kept is not None:
        # Autograd raises RuntimeError if a backward first needs a tensor that the engine has changed.
        with pytest.raises((ModelError, RuntimeError), match="loss from before initialize|modified by an inplace"):
            kept.backward()
    return state


@pytest.mark.parametrize(
    ("model", "axes", "stage"),
    [("llama", {"tp": 2}, 0), ("gpt2", {"tp": 2}, 3), ("mixtral", {"ep": 2}, 1)],
    ids=str,
)
def test_a_loss_from_before_initialize_may_stay_alive(model: str, axes: dict[str, int], stage: int) -> None:
    wanted = build(model, tied=False)
    step_plainly(wanted, _RULES["SGD"](wanted.parameters()), 0, 4)
    found = run_ranks(continue_in_engine, 2, model, "SGD", axes, stage, True)[0]
    for name, value in wanted.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=2e-5, msg=f"{name} differs")


@pytest.mark.parametrize(
    ("model", "rule", "axes", "stage"),
    [
        ("llama", "AdamW", {"tp": 2}, 0),
        ("gpt2", "SGD", {"tp": 2}, 3),
        ("llama", "Adagrad", {"tp": 2}, 1),
        ("mixtral", "AdamW", {"ep": 2}, 2),
        ("llama", "AdamW", {"pp": 2}, 1),
        pytest.param("llama", "Lamb", {"tp": 2}, 2, marks=pytest.mark.slow),
        pytest.param("mixtral", "Lamb", {"ep": 2, "tp": 2}, 1, marks=pytest.mark.slow),
        pytest.param("mixtral", "SGD", {"ep": 2, "tp": 2}, 3, marks=pytest.mark.slow),
        pytest.param("gpt2", "AdamW", {"pp": 2, "tp": 2}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_states_from_before_initialize_are_sharded_with_their_parameters(
    model: str, rule: str, axes: dict[str, int], stage: int
) -> None:
    wanted = build(model, tied=False)
    step_plainly(wanted, _RULES[rule](wanted.parameters()), 0, 4)
    ranks = math.prod(axes.values())
    found = run_ranks(continue_in_engine, ranks, model, rule, axes, stage)[0]
    for name, value in wanted.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-4, atol=2e-5, msg=f"{name} differs")
