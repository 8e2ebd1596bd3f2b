"""Tests of the allowlist of elementwise optimizers by property, and of fused updates against plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.optim import Lamb, Lion, Muon, OneBitAdam, ZeroOneAdam
from windlass.optim.elementwise_optimizers import enable_fused_step, is_elementwise, supports_grad_scale

O = torch.optim  # noqa: E741
VARIANTS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (O.SGD, {}),
    (O.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (O.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (O.SGD, {"momentum": 0.9, "dampening": 0.3, "fused": True}),
    (O.Adam, {"weight_decay": 0.1}),
    (O.Adam, {"amsgrad": True, "maximize": True}),
    (O.Adam, {"amsgrad": True, "fused": True, "weight_decay": 0.1}),
    (O.Adam, {"foreach": True}),
    (O.AdamW, {}),
    (O.AdamW, {"amsgrad": True, "maximize": True}),
    (O.AdamW, {"fused": True}),
    (O.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    (O.Adagrad, {"fused": True, "maximize": True}),
    (O.Adadelta, {"weight_decay": 0.1, "maximize": True}),
    (O.RMSprop, {}),
    (O.RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    (O.Adamax, {"weight_decay": 0.1, "maximize": True}),
    (O.NAdam, {"weight_decay": 0.1}),
    (O.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    (O.RAdam, {"weight_decay": 0.1}),
    (O.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
    (O.ASGD, {"t0": 2.0, "weight_decay": 0.1, "maximize": True}),
    (O.Rprop, {"maximize": True}),
    (Lion, {"weight_decay": 0.1}),
]
STEPS = 8  # RAdam changes its formula at the sixth step


def step_all(cls: type[torch.optim.Optimizer], options: dict[str, Any], spans: list[slice], size: int) -> torch.Tensor:
    """Return the weights after `STEPS` updates, with each span of the parameter as a separate parameter."""
    generator = torch.Generator().manual_seed(size)
    start = torch.randn(size, generator=generator)
    parts = [start[span].clone().requires_grad_() for span in spans]
    make: Any = cls
    optimizer = make(parts, lr=0.01, **options)
    for _ in range(STEPS):
        grad = torch.randn(size, generator=generator)
        for part, span in zip(parts, spans, strict=True):
            part.grad = grad[span].clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts])


@pytest.mark.parametrize(("cls", "options"), VARIANTS, ids=[f"{c.__name__}-{'-'.join(o)}" for c, o in VARIANTS])
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_updating_spans_equals_updating_the_whole(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, 90))
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    spans = [slice(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
    full = step_all(cls, options, [slice(0, size)], size)
    parted = step_all(cls, options, spans, size)
    torch.testing.assert_close(parted, full, rtol=1e-6, atol=1e-7)


def test_property_test_detects_an_optimizer_with_a_norm() -> None:
    full = step_all(Lamb, {}, [slice(0, 8)], 8)
    parted = step_all(Lamb, {}, [slice(0, 3), slice(3, 8)], 8)
    assert (full - parted).abs().max() > 1e-4


def test_every_class_of_the_allowlist_is_in_the_property_test() -> None:
    covered = {cls for cls, _ in VARIANTS}
    weight = torch.zeros(2, 2, requires_grad=True)
    for name, cls in vars(torch.optim).items():
        if isinstance(cls, type) and issubclass(cls, O.Optimizer) and cls is not O.Optimizer:
            make: Any = cls
            assert is_elementwise(make([weight])) == (cls in covered), name


@pytest.mark.parametrize("cls", [Lamb, Muon, torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS])
def test_whole_tensor_rules_are_not_elementwise(cls: Any) -> None:
    assert not is_elementwise(cls([torch.zeros(2, 2, requires_grad=True)]))


def test_subclass_is_not_elementwise_by_inheritance() -> None:
    class Normed(torch.optim.AdamW):
        pass

    optimizer = Normed([torch.zeros(2, requires_grad=True)])
    assert not is_elementwise(optimizer)
    assert not enable_fused_step(optimizer)
    assert not supports_grad_scale(optimizer)


FUSED: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {"weight_decay": 0.1}),
]


def run(optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def pair(cls: Any, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in [(9, 5), (70,)]]
    plain, other = ([p.to(dtype, copy=True).requires_grad_() for p in start] for _ in range(2))
    return cls(plain, **options), cls(other, **options)


def weights(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for g in optimizer.param_groups for p in g["params"]])


@pytest.mark.parametrize(("cls", "options"), FUSED)
@pytest.mark.parametrize("warm", [0, 3])
def test_the_fused_step_is_preferred_and_equal_even_in_mid_run(cls: Any, options: dict[str, Any], warm: int) -> None:
    plain, fused = pair(cls, options)
    run(plain, warm, seed=4)
    run(fused, warm, seed=4)
    assert not supports_grad_scale(fused)
    assert enable_fused_step(fused)
    assert all(group["fused"] for group in fused.param_groups)
    run(plain, 4, seed=5)
    run(fused, 4, seed=5)
    torch.testing.assert_close(weights(fused), weights(plain), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fused_step_runs_in_other_dtypes(dtype: torch.dtype) -> None:
    plain, fused = pair(torch.optim.AdamW, {}, dtype)
    assert enable_fused_step(fused)
    run(plain, 2, seed=4)
    run(fused, 2, seed=4)
    torch.testing.assert_close(weights(fused), weights(plain), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    "options",
    [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}, {"lr": torch.tensor(0.1)}],
)
def test_user_choice_of_implementation_is_kept(options: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)], **options)
    before = optimizer.param_groups[0]["fused"]
    assert not enable_fused_step(optimizer)
    assert optimizer.param_groups[0]["fused"] is before


def test_only_groups_with_a_kernel_switch_to_fused() -> None:
    real = torch.zeros(2, requires_grad=True)
    strange = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    optimizer = torch.optim.AdamW([{"params": [real]}, {"params": [strange]}])
    assert not enable_fused_step(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [True, None]
    run(optimizer, 1, seed=0)


@pytest.mark.parametrize(("cls", "options"), FUSED)
def test_grad_scale_divides_gradients_and_found_inf_skips(cls: Any, options: dict[str, Any]) -> None:
    plain, scaled = pair(cls, options)
    assert enable_fused_step(scaled) and supports_grad_scale(scaled)
    generator = torch.Generator().manual_seed(6)
    for _ in range(3):
        for p, q in zip(plain.param_groups[0]["params"], scaled.param_groups[0]["params"], strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad * 64
        scaled.grad_scale, scaled.found_inf = torch.tensor(64.0), torch.tensor(0.0)
        plain.step()
        scaled.step()
        for p, q in zip(plain.param_groups[0]["params"], scaled.param_groups[0]["params"], strict=True):
            torch.testing.assert_close(q.grad, p.grad)
    torch.testing.assert_close(weights(scaled), weights(plain), rtol=1e-6, atol=1e-6)
    before = weights(scaled)
    scaled.found_inf = torch.tensor(1.0)
    scaled.step()
    assert torch.equal(weights(scaled), before)
    scaled.grad_scale = scaled.found_inf = None
    run(plain, 1, seed=7)
    run(scaled, 1, seed=7)
    torch.testing.assert_close(weights(scaled), weights(plain), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [OneBitAdam, ZeroOneAdam])
def test_state_bytes_without_bias_correction_are_predicted(cls: Any) -> None:
    from windlass.optim.elementwise_optimizers import measure_state_bytes

    assert measure_state_bytes(cls([torch.nn.Parameter(torch.ones(4))], bias_correction=False), torch.float32) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.Rprop, {}),
    ],
)
def test_predicted_state_bytes_equal_allocated_bytes(cls: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    from windlass.optim.elementwise_optimizers import measure_state_bytes

    parameter = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    optimizer = cls([parameter], lr=0.1, **options)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *arguments: calls.append(1))
    # empty except for Adagrad, which creates its state at construction
    before = {key: value.clone() for key, value in optimizer.state[parameter].items()}
    results = measure_state_bytes(optimizer, dtype)
    assert not calls and list(optimizer.state) == [parameter] and bool((parameter == 1).all())
    assert all(torch.equal(value, optimizer.state[parameter][key]) for key, value in before.items())
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor) and value.dim()]
    assert results * 1000 == sum(state.numel() * state.element_size() for state in states)
