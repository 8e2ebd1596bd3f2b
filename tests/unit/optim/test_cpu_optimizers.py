"""Tests that the CPU optimizers equal torch's and windlass's other ones, also with narrow states, on every path."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from windlass.base.errors import ConfigError, ModelError
from windlass.kernels.kernel_dispatch import REFERENCE_PATH, list_kernel_paths
from windlass.optim import CPUSGD, CPUAdagrad, CPUAdam, CPULamb, CPULion, Lamb, Lion
from windlass.optim.native_cpu_equivalent import make_native_cpu_equivalent

O = torch.optim  # noqa: E741
native = pytest.mark.skipif(len(list_kernel_paths()) == 1, reason="no native module was built")
OWN: list[tuple[Any, dict[str, Any]]] = [
    (CPUAdam, {"weight_decay": 0.1}),
    (CPUAdam, {"amsgrad": True}),
    (CPULion, {}),
    (CPUAdagrad, {"initial_accumulator_value": 0.1}),
    (CPUSGD, {"momentum": 0.9}),
    (CPUSGD, {}),
    (CPULamb, {}),
]
STATE_DTYPES = ["fp32", "bf16", "8bit"]


@pytest.fixture(
    autouse=True, params=[list_kernel_paths()[0], REFERENCE_PATH] if len(list_kernel_paths()) > 1 else [REFERENCE_PATH]
)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WINDLASS_KERNELS", request.param)
    return str(request.param)


def parameters(sizes: tuple[int, ...] = (640, 96), dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 1, scale: float = 1.0) -> torch.Tensor:
    """Return the flattened weights after `steps` updates with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in own:
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
        optimizer.step()
    return torch.cat([p.detach().flatten().float() for p in own])


FUSED: list[tuple[Any, dict[str, Any], Any, dict[str, Any]]] = [
    (O.AdamW, {}, CPUAdam, {"weight_decay": 0.01}),
    (O.AdamW, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}, CPUAdam, {}),
    (O.AdamW, {"betas": (0.4, 0.9), "eps": 1e-3}, CPUAdam, {"weight_decay": 0.01}),
    (O.Adam, {}, CPUAdam, {"adamw_mode": False}),
    (O.Adam, {"weight_decay": 0.1, "amsgrad": True}, CPUAdam, {"adamw_mode": False}),
    (O.SGD, {"lr": 0.1}, CPUSGD, {}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}, CPUSGD, {}),
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}, CPUSGD, {}),
    (O.Adagrad, {"lr": 0.1, "weight_decay": 0.1, "lr_decay": 0.1}, CPUAdagrad, {}),
    (O.Adagrad, {"initial_accumulator_value": 0.1, "maximize": True}, CPUAdagrad, {}),
]


@pytest.mark.parametrize(("cls", "options", "own", "more"), FUSED)
def test_step_equals_the_fused_step_of_torch_bitwise(
    cls: Any, options: dict[str, Any], own: Any, more: dict[str, Any]
) -> None:
    theirs = cls(parameters(), **options, fused=True)
    ours = own(parameters(), **{**options, **more})
    for steps in range(1, 5):
        assert torch.equal(train(ours, 1, steps), train(theirs, 1, steps))
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        kept = {key for key, value in theirs.state[q].items() if value is not None}
        assert kept == set(ours.state[p])
        assert all(torch.equal(ours.state[p][key], theirs.state[q][key]) for key in kept)


@pytest.mark.parametrize(
    ("cls", "own", "options"),
    [
        (Lion, CPULion, {"weight_decay": 0.1}),
        (Lamb, CPULamb, {"weight_decay": 0.1}),
        (Lamb, CPULamb, {"eps_inside_sqrt": True, "bias_correction": False}),
    ],
)
def test_step_equals_the_windlass_optimizer(cls: Any, own: Any, options: dict[str, Any]) -> None:
    theirs, ours = cls(parameters((333, 50)), **options), own(parameters((333, 50)), **options)
    torch.testing.assert_close(train(ours, 5), train(theirs, 5), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("cls", "options", "own", "more"), FUSED)
def test_infinities_and_nans_propagate_as_in_torch(
    cls: Any, options: dict[str, Any], own: Any, more: dict[str, Any]
) -> None:
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, -2.0, 1e-40])
    weights = [torch.nn.Parameter(odd.repeat_interleave(8)) for _ in range(2)]
    theirs, ours = cls(weights[:1], **options, fused=True), own(weights[1:], **{**options, **more})
    for turn in (1, 2):
        for weight in weights:
            weight.grad = (odd * turn).repeat(8)
        theirs.step()
        ours.step()
        torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cls", [O.AdamW, O.Adam, O.SGD, O.Adagrad])
def test_odd_lengths_are_within_1e_6_of_torch(cls: Any) -> None:
    """Lengths that do not fill a vector are within 1e-6 of torch.

    Torch rounds the tail of a vector differently; here every element is computed in the same way.
    """
    ours = make_native_cpu_equivalent(cls(parameters((1, 7, 333)), lr=0.1))
    if ours is None:
        pytest.skip("the reference path replaces no optimizer")
    theirs = cls(parameters((1, 7, 333)), lr=0.1, fused=True)
    torch.testing.assert_close(train(ours, 5), train(theirs, 5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("cls", "options"), OWN)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_a_loaded_state_continues_bitwise(cls: Any, options: dict[str, Any], state_dtype: str) -> None:
    first = cls(parameters(), state_dtype=state_dtype, **options)
    train(first, 3)
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    own = [torch.nn.Parameter(p.detach().clone()) for group in first.param_groups for p in group["params"]]
    second = cls(own, state_dtype=state_dtype, **options)
    second.load_state_dict(saved)
    assert torch.equal(train(first, 3, seed=2), train(second, 3, seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loaded_states_have_the_dtype_of_this_optimizer(dtype: torch.dtype) -> None:
    wide = CPUAdam(parameters(dtype=dtype))
    train(wide, 3)
    before = next(iter(wide.state.values()))
    for state_dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("8bit", torch.uint8)):
        own = CPUAdam(parameters(dtype=dtype), state_dtype=state_dtype)
        own.load_state_dict(wide.state_dict())
        state = next(iter(own.state.values()))
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == kind
        assert ("exp_avg_scale" in state) == (kind == torch.uint8)
        back = CPUAdam(parameters(dtype=dtype))
        back.load_state_dict(own.state_dict())
        after = next(iter(back.state.values()))
        assert after["exp_avg"].dtype == torch.float32 and after["step"] == 3
        tolerance = {"fp32": 0.0, "bf16": 2**-8, "8bit": 1 / 15}[state_dtype]
        torch.testing.assert_close(after["exp_avg_sq"], before["exp_avg_sq"], rtol=tolerance, atol=0)


def test_state_dict_is_interchangeable_with_torch() -> None:
    theirs, ours = O.AdamW(parameters(), fused=True), CPUAdam(parameters(), weight_decay=0.01)
    train(theirs, 2)
    train(ours, 2)
    crossed, back = CPUAdam(ours.param_groups[0]["params"]), O.AdamW(theirs.param_groups[0]["params"], fused=True)
    crossed.load_state_dict(theirs.state_dict())
    back.load_state_dict({**ours.state_dict(), "param_groups": theirs.state_dict()["param_groups"]})
    assert torch.equal(train(crossed, 3, seed=5), train(back, 3, seed=5))


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_low_precision_states_converge_to_the_same_minimum(state_dtype: str) -> None:
    """AdamW on least squares: the final loss with narrow states is close to that with fp32 states."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 64, generator=generator) * torch.logspace(-2, 1, 64)
    targets = inputs @ torch.randn(64, 8, generator=generator) + 0.1 * torch.randn(512, 8, generator=generator)

    def fit(state_dtype: str) -> float:
        weight = torch.nn.Parameter(torch.zeros(64, 8))
        optimizer = CPUAdam([weight], lr=0.02, state_dtype=state_dtype)
        for _ in range(400):
            optimizer.zero_grad()
            loss = (inputs @ weight - targets).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    assert fit(state_dtype) == pytest.approx(fit("fp32"), rel=0.05)


@pytest.mark.parametrize(("cls", "options"), OWN)
def test_scaled_16_bit_gradients_and_16_bit_copies(cls: Any, options: dict[str, Any]) -> None:
    """One pass equals torch's three: casting the gradient up, the update, casting the parameter down."""
    plain, mixed = cls(parameters(), **options), cls(parameters(), **options)
    own, theirs = mixed.param_groups[0]["params"], plain.param_groups[0]["params"]
    mixed.low_precision_copies = {p: torch.empty(p.shape, dtype=torch.bfloat16) for p in own}
    mixed.grad_scale, mixed.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    for step in range(3):
        gradients = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16() for p in own]
        mixed.gradient_overrides = {p: 64 * gradient for p, gradient in zip(own, gradients, strict=True)}
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.float()
        mixed.step()
        plain.step()
    for p, q in zip(own, theirs, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(mixed.low_precision_copies[p], p.detach().bfloat16())
    mixed.found_inf = torch.tensor(1.0)
    before = copy.deepcopy(mixed.state_dict())
    mixed.step()
    assert all(torch.equal(p, q) for p, q in zip(own, theirs, strict=True))
    for number, state in mixed.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][number][key]) for key, value in state.items())


def test_grad_scaler_is_supported() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer, scaler = CPUSGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.zeros(8))
    optimizer.zero_grad()
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.zeros(8)) and scaler.get_scale() == 512.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_parameters_are_widened_and_rounded_to_nearest(dtype: torch.dtype) -> None:
    half = CPUAdam(parameters(dtype=dtype), lr=0.01)
    wide = CPUAdam([torch.nn.Parameter(p.detach().float()) for p in half.param_groups[0]["params"]], lr=0.01)
    gradient = torch.Generator().manual_seed(3)
    for p, q in zip(half.param_groups[0]["params"], wide.param_groups[0]["params"], strict=True):
        p.grad = torch.randn(p.shape, generator=gradient).to(dtype)
        q.grad = p.grad.float()
    half.step()
    wide.step()
    for p, q in zip(half.param_groups[0]["params"], wide.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q.to(dtype))
        assert half.state[p]["exp_avg"].dtype == torch.float32


def test_groups_schedules_closures_and_unused_parameters() -> None:
    first, second, unused = parameters((16, 16, 16))
    ours = CPUAdam([{"params": [first], "lr": 0.1}, {"params": [second, unused], "weight_decay": 0.5}], lr=0.2)
    schedule = torch.optim.lr_scheduler.StepLR(ours, 1, gamma=0.5)
    before = unused.detach().clone()

    def closure() -> torch.Tensor:
        ours.zero_grad()
        loss = (first * second).sum()
        loss.backward()
        return loss

    assert torch.is_tensor(ours.step(closure))
    schedule.step()
    assert [group["lr"] for group in ours.param_groups] == [0.05, 0.1]
    ours.step(closure)
    assert torch.equal(unused, before) and unused not in ours.state
    assert ours.state[first]["step"] == 2 and ours.state[first]["step"].dim() == 0


def test_non_contiguous_parameters() -> None:
    for make in (lambda: torch.zeros(6, 8)[:, ::2], lambda: torch.zeros(4, 6).t()):
        strange = torch.nn.Parameter(make())
        strange.data.copy_(torch.arange(24.0).view(6, 4))
        plain = torch.nn.Parameter(torch.arange(24.0).view(6, 4).clone())
        for p in (strange, plain):
            p.grad = torch.linspace(-1, 1, 24).view(6, 4)
        optimizers = [CPUAdam([p], lr=0.1, weight_decay=0.1) for p in (strange, plain)]
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(strange, plain)


def test_step_bumps_the_version_of_saved_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    loss = weight.square().sum()
    weight.grad = torch.ones(3)
    CPUSGD([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fp32_optimizer_states_argument_equals_deepspeed() -> None:
    assert CPUAdam(parameters(), fp32_optimizer_states=False).defaults["state_dtype"] == "bf16"
    assert CPUAdam(parameters(), state_dtype=torch.uint8).defaults["state_dtype"] == "8bit"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CPUAdam(parameters(), lr=-1.0), "CPUAdam: lr is -1.0"),
        (lambda: CPUAdam(parameters(), betas=(0.9, 1.0)), r"CPUAdam: betas are \(0.9, 1.0\)"),
        (lambda: CPUAdam(parameters(), state_dtype="fp16"), "CPUAdam: state_dtype is 'fp16'.*fp32, bf16, 8bit"),
        (lambda: CPUAdagrad(parameters(), eps=float("nan")), "CPUAdagrad: eps is nan"),
        (lambda: CPUSGD(parameters(), nesterov=True), "CPUSGD: nesterov needs a momentum"),
        (lambda: CPULamb(parameters(), min_coeff=11.0), "CPULamb: need 0 <= min_coeff"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_tensors_without_a_kernel_are_refused() -> None:
    double = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    double.grad = torch.zeros_like(double)
    with pytest.raises(ModelError, match="float64"):
        CPUAdam([double]).step()
    table = torch.nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ModelError, match=r"CPUSGD: .*\(5, 3\) is sparse"):
        CPUSGD(table.parameters()).step()


@pytest.mark.parametrize("cls", [O.Adam, O.AdamW, O.SGD, O.Adagrad, Lion])
@pytest.mark.parametrize("warm", [0, 2])
def test_native_equivalent_continues_the_state(cls: Any, warm: int, path: str) -> None:
    theirs, others = cls(parameters(), lr=0.01), cls(parameters(), lr=0.01)
    train(theirs, warm)
    train(others, warm)
    ours = make_native_cpu_equivalent(others)
    if path == REFERENCE_PATH:
        assert ours is None
        return
    assert ours is not None and type(ours).__name__.startswith("CPU")
    torch.testing.assert_close(train(ours, 3, seed=7), train(theirs, 3, seed=7), rtol=1e-6, atol=1e-6)
    assert ours.param_groups[0]["lr"] == 0.01 and ours.param_groups is not others.param_groups


@native
@pytest.mark.parametrize(
    "make",
    [
        lambda p: O.AdamW(p, foreach=True),
        lambda p: O.AdamW(p, fused=False),
        lambda p: O.AdamW(p, lr=torch.tensor(0.1)),
        lambda p: O.Adam(p, capturable=True),
        lambda p: O.Adam(p, differentiable=True),
        lambda p: O.RMSprop(p),
        lambda p: type("Mine", (O.AdamW,), {})(p),
        lambda p: O.SGD([p[0], torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))]),
        lambda p: Lamb(p),
    ],
)
def test_optimizer_without_native_equivalent_is_kept(make: Any) -> None:
    assert make_native_cpu_equivalent(make(parameters())) is None


@pytest.mark.parametrize(("cls", "options"), OWN)
def test_copies_and_pickles_step_equally(cls: Any, options: dict[str, Any]) -> None:
    first = cls(parameters(), **options)
    train(first, 2)
    second = pickle.loads(pickle.dumps(copy.deepcopy(first)))
    assert torch.equal(train(first, 2, seed=4), train(second, 2, seed=4))


@pytest.mark.parametrize("cls", [CPUAdam, CPUAdagrad, CPULamb])
def test_step_counts_saved_as_numbers_are_loaded(cls: Any) -> None:
    first, second = cls(parameters()), cls(parameters())
    train(first, 2)
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    train(second, 2)
    second.load_state_dict(saved)
    assert torch.equal(train(first, 2, seed=2), train(second, 2, seed=2))


def test_a_state_dict_of_deepspeeds_adam_is_loaded() -> None:
    """Its groups have no `maximize` and no `decoupled_weight_decay`: that is an attribute of DeepSpeed's optimizer."""
    options: dict[str, Any] = {"weight_decay": 0.1, "adamw_mode": False}
    first, second = CPUAdam(parameters(), **options), CPUAdam(parameters(), **options)
    train(first, 2)
    train(second, 2)
    saved = copy.deepcopy(first.state_dict())
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad", "params")
    saved["param_groups"] = [{key: group[key] for key in names} for group in saved["param_groups"]]
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    second.load_state_dict(saved)
    assert torch.equal(train(first, 2, seed=2), train(second, 2, seed=2))
