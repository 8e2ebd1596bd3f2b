"""Tests of DeepSpeed's optimizer classes: torch's updates, DeepSpeed's arguments, and refused variants."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.compat.optimizer_classes import optimizer_kind_of
from windlass.compat.optimizers.deepspeed_cpu_optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion
from windlass.compat.optimizers.deepspeed_muon import Muon, muon_update
from windlass.compat.optimizers.fused_optimizers import FusedAdam, FusedLamb, FusedLion
from windlass.compat.optimizers.one_bit_optimizers import OnebitAdam, OnebitLamb, ZeroOneAdam
from windlass.config import load_config
from windlass.optim import Lamb, Lion
from windlass.optim.elementwise_optimizers import is_elementwise

ALL = (FusedAdam, FusedLion, FusedLamb, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion)
Make = Callable[[Any], torch.optim.Optimizer]


def stepped(make: Make) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    optimizer = make([{"params": [layer.weight]}, {"params": [layer.bias], "weight_decay": 0.0}])
    for step in range(4):
        optimizer.zero_grad()
        layer(torch.randn(6, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in layer.parameters()]


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1)),
        (
            lambda p: FusedAdam(p, lr=0.1, betas=[0.8, 0.9], weight_decay=0.1, adam_w_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.1),
        ),
        (
            lambda p: DeepSpeedCPUAdam(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        ),
        (
            lambda p: DeepSpeedCPUAdam(p, lr=0.1, weight_decay=0.1, adamw_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
        ),
        (
            lambda p: DeepSpeedCPUAdagrad(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
        ),
        (lambda p: FusedLion(p, lr=0.01), lambda p: Lion(p, lr=0.01, betas=(0.9, 0.999))),
        (lambda p: DeepSpeedCPULion(p, lr=0.01), lambda p: Lion(p, lr=0.01, betas=(0.9, 0.999))),
        (lambda p: FusedLamb(p, lr=0.1), lambda p: Lamb(p, lr=0.1)),
    ],
)
def test_steps_equal_the_torch_optimizers(ours: Make, torchs: Make) -> None:
    for actual, expected in zip(stepped(ours), stepped(torchs), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("cls", ALL)
def test_classes_are_torch_optimizers(cls: type[torch.optim.Optimizer]) -> None:
    optimizer = cls([nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups[0]["lr"] == (1e-2 if cls is DeepSpeedCPUAdagrad else 1e-3)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # torch's schedulers accept the optimizer


def test_positional_arguments_equal_deepspeed() -> None:
    parameter = [nn.Parameter(torch.zeros(2))]
    group = FusedAdam(parameter, 0.5, True, (0.1, 0.2), 1e-3, False, 0.3).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.1, 0.2), 1e-3, 0.3)
    group = DeepSpeedCPUAdam(parameter, 0.5, True, (0.1, 0.2), 1e-3, 0.3, False, False).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["decoupled_weight_decay"]) == (0.5, 0.3, False)
    assert DeepSpeedCPUAdagrad(parameter, 0.5, 1e-3, 0.3).param_groups[0]["eps"] == 1e-3
    group = OnebitAdam(parameter, None, 0.5, 7, False, (0.1, 0.2), 1e-3, False, 0.3).param_groups[0]
    assert (group["lr"], group["freeze_step"], group["bias_correction"]) == (0.5, 7, False)
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.1, 0.2), 1e-3, 0.3)
    group = ZeroOneAdam(parameter, None, 0.5, False, (0.1, 0.2), 1e-3, False, 0.3, 0.0, 7, 3, 4, 5).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["var_freeze_step"]) == (0.5, 0.3, 7)
    assert (group["var_update_scaler"], group["local_step_scaler"], group["local_step_clipper"]) == (3, 4, 5)
    group = OnebitLamb(parameter, None, 0.5, 7, False, (0.1, 0.2), 1e-3, False, 0.3, 0.0, 9.0, 0.5).param_groups[0]
    assert (group["freeze_step"], group["weight_decay"], group["max_coeff"], group["min_coeff"]) == (7, 0.3, 9.0, 0.5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: FusedAdam(p, amsgrad=True), "amsgrad"),
        (lambda p: FusedAdam(p, bias_correction=False), "bias_correction"),
        (lambda p: DeepSpeedCPUAdam(p, amsgrad=True), "amsgrad"),
        (lambda p: DeepSpeedCPUAdam(p, bias_correction=False), "bias_correction"),
        (lambda p: DeepSpeedCPUAdagrad(p, amsgrad=True), "amsgrad"),
    ],
)
def test_unsupported_variants_are_refused(make: Make, named: str) -> None:
    with pytest.raises(RuntimeError, match=named):
        make([nn.Parameter(torch.zeros(2))])


def test_cpu_optimizers_accept_adamw_mode() -> None:
    for cls in (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion):
        cls([nn.Parameter(torch.zeros(2))], lr=0.1, weight_decay=0.1, adamw_mode=False)


def test_narrow_states() -> None:
    parameter = nn.Parameter(torch.ones(300))
    parameter.grad = torch.ones(300)
    optimizer = DeepSpeedCPUAdam([parameter], fp32_optimizer_states=False)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("adamw_mode", [True, False])
def test_subgroups_step_and_roll_back(adamw_mode: bool) -> None:
    """`step_subgroup` equals torch's step and keeps states by subgroup number; `rollback_subgroup` undoes one step."""
    torch.manual_seed(0)
    start = torch.randn(70)
    parameter, reference, other = (nn.Parameter(start.clone()) for _ in range(3))
    optimizer = DeepSpeedCPUAdam([parameter], lr=0.1, weight_decay=0.1, adamw_mode=adamw_mode)
    plain = (torch.optim.AdamW if adamw_mode else torch.optim.Adam)([reference], lr=0.1, weight_decay=0.1)
    seen: list[tuple[torch.Tensor, ...]] = [(start.clone(), torch.zeros(70), torch.zeros(70))]
    gradients = [torch.randn(70) for _ in range(3)]
    for number, gradient in enumerate(gradients, 1):
        parameter.grad = reference.grad = gradient
        optimizer.step_subgroup(4)
        plain.step()
        state = optimizer.state[4]
        assert state["step"] == number and set(optimizer.state) == {4}
        torch.testing.assert_close(parameter, reference)
        seen.append((parameter.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
    optimizer.param_groups[0]["params"] = [other]
    other.grad = gradients[0]
    optimizer.step_subgroup(5)  # another subgroup has its own states
    torch.testing.assert_close(other.detach(), seen[1][0])
    assert (optimizer.state[5]["step"], optimizer.state[4]["step"]) == (1, 3)
    optimizer.param_groups[0]["params"] = [parameter]
    for number in (2, 1, 0):
        parameter.grad = gradients[number]
        optimizer.rollback_subgroup(sub_group_id=4)
        found = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
        assert state["step"] == number
        torch.testing.assert_close(found, seen[number], rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="Cannot rollback sub_group_id 4: step count is 0"):
        optimizer.rollback_subgroup(4)
    with pytest.raises(RuntimeError, match="Cannot rollback optimizer state for sub_group_id 9: it has none"):
        optimizer.rollback_subgroup(9)
    optimizer.add_param_group({"params": [other]})
    with pytest.raises(ModelError, match="2 parameters have gradients"):
        optimizer.step_subgroup(4)


def test_muon_update_is_the_direction_of_the_optimizer() -> None:
    torch.manual_seed(0)
    weight, momentum = nn.Parameter(torch.randn(8, 4)), torch.zeros(8, 4)
    optimizer = Muon([weight], lr=0.5)
    for _ in range(2):
        before, weight.grad = weight.detach().clone(), torch.randn(8, 4)
        optimizer.step()
        direction = muon_update(weight.grad, momentum)
        torch.testing.assert_close(before - 0.5 * direction, weight.detach(), rtol=2e-2, atol=3e-3)  # computed in bf16


@pytest.mark.parametrize(
    ("shape", "options", "matrix", "scale"),
    [
        ((3, 8, 4), {}, (8, 4), 2**0.5),  # three experts
        ((3, 8, 4), {"is_expert_group": True}, (8, 4), 2**0.5),
        ((6, 2, 5, 3), {}, (6, 30), (5 / 3) ** 0.5),  # a convolution, scaled by the sizes of its kernel
        ((6, 2, 5, 3), {"is_expert_group": True}, (5, 3), (5 / 3) ** 0.5),
        ((8, 3), {"num_heads": 2}, (4, 3), (4 / 3) ** 0.5),
    ],
)
def test_muon_update_of_a_stack_of_matrices(
    shape: tuple[int, ...], options: dict[str, Any], matrix: tuple[int, int], scale: float
) -> None:
    torch.manual_seed(0)
    grad = torch.randn(shape)
    found = muon_update(grad, torch.zeros(shape), **options)
    alone = [muon_update(one, torch.zeros(matrix)) for one in grad.view(-1, *matrix)]
    expected = torch.stack(alone).view(shape) * (scale / max(1.0, matrix[0] / matrix[1]) ** 0.5)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=3e-3)  # computed in bf16


def test_muon_update_keeps_its_momentum_after_an_overflow() -> None:
    momentum, grad = torch.ones(2, 3), torch.tensor([[1.0, 2.0, 3.0], [4.0, torch.inf, 6.0]])
    assert torch.equal(muon_update(grad.clone(), momentum), grad) and torch.equal(momentum, torch.ones(2, 3))
    with pytest.raises(ValueError, match="4 heads"):
        muon_update(torch.ones(2, 3), momentum, num_heads=4)


def test_zero_grad_honors_set_to_none() -> None:
    for none in (True, False):
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        FusedAdam([parameter], set_grad_none=none).zero_grad()
        assert (parameter.grad is None) == none


def test_classes_are_elementwise_and_their_subclasses_are_not() -> None:
    class Mine(FusedAdam):
        pass

    parameter = [nn.Parameter(torch.zeros(2))]
    assert all(is_elementwise(cls(parameter)) == (cls is not FusedLamb) for cls in ALL)
    assert not is_elementwise(Mine(parameter)), "a subclass may look at a whole tensor"


def test_hooks_run_once_a_step() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # torch now wraps `Adam.step`, which FusedAdam inherits, in hooks
    optimizer, calls = FusedAdam([parameter]), []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_adagrad_accepts_sparse_gradients_as_torch_does() -> None:
    """After four steps, each on a few random rows, the weights equal those of torch's sparse Adagrad."""
    from windlass.base.errors import ModelError
    from windlass.compat.optimizers.deepspeed_cpu_optimizers import DeepSpeedCPUAdagrad

    own, theirs = (torch.nn.Embedding(16, 4, sparse=True) for _ in range(2))
    theirs.load_state_dict(own.state_dict())
    optimizers = DeepSpeedCPUAdagrad(own.parameters(), lr=0.1), torch.optim.Adagrad(theirs.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(0)
    for _ in range(4):
        rows = torch.randint(0, 16, (5,), generator=draw)
        for model, optimizer in zip((own, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(rows).square().sum().backward()
            assert model.weight.grad.is_sparse  # type: ignore[union-attr]
            optimizer.step()
    torch.testing.assert_close(own.weight, theirs.weight)
    decaying = DeepSpeedCPUAdagrad(own.parameters(), weight_decay=0.1)
    with pytest.raises(ModelError, match="is sparse; make it dense"):
        decaying.step()


@pytest.mark.parametrize(("device", "kind"), [(None, "bf16"), ("none", "bf16"), ("cpu", "stages 1 and 2")])
def test_fp32_accumulation_of_stage_1_has_its_own_class_without_offload(device: str | None, kind: str) -> None:
    """bf16 with fp32 accumulation has its own class at stage 1 unless the optimizer is on the CPU, as in DeepSpeed."""
    zero = {"stage": 1} | ({"offload_optimizer": {"device": device}} if device else {})
    given = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": zero}
    assert optimizer_kind_of(load_config(given)) == kind


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_state_dict_of_deepspeeds_fused_adam_is_loaded(decoupled: bool) -> None:
    """Its groups do not name the kind of weight decay, and only the last parameter of a group counts steps."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4)) for _ in range(2)]
    plain_parameters = [nn.Parameter(one.detach().clone()) for one in parameters]
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.2}
    moments = [{"exp_avg": torch.randn(4), "exp_avg_sq": torch.rand(4)} for _ in parameters]
    saved = {
        "state": {number: {**one, "step": 3 * number} for number, one in enumerate(moments)},
        "param_groups": [{**options, "bias_correction": True, "step": 0, "params": [0, 1]}],
    }
    ours = FusedAdam(parameters, lr=1.0, adam_w_mode=decoupled)
    ours.load_state_dict(saved)
    plain: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
    plain = plain(plain_parameters, **options)
    for one, own in zip(plain_parameters, moments, strict=True):
        plain.state[one] = {"step": torch.tensor(3.0), **{name: value.clone() for name, value in own.items()}}
    for _ in range(2):
        for one, other in zip(parameters, plain_parameters, strict=True):
            one.grad, other.grad = torch.ones(4), torch.ones(4)
        ours.step()
        plain.step()
    for one, other in zip(parameters, plain_parameters, strict=True):
        torch.testing.assert_close(one, other)
    saved["param_groups"][0]["bias_correction"] = False
    with pytest.raises(RuntimeError, match="bias_correction is false"):
        ours.load_state_dict(saved)


def test_a_copy_of_fused_adam_steps_like_it() -> None:
    layer = nn.Linear(3, 2)
    optimizer = FusedAdam(layer.parameters(), lr=0.1, weight_decay=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    copied, other = copy.deepcopy((optimizer, layer))
    for one, own in ((optimizer, layer), (copied, other)):
        one.zero_grad()
        own(torch.ones(1, 3)).sum().backward()
        one.step()
    torch.testing.assert_close(list(layer.parameters()), list(other.parameters()))


def test_a_state_dict_of_deepspeeds_adagrad_is_loaded() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = DeepSpeedCPUAdagrad([parameter], lr=0.5)
    group = {"lr": 0.5, "eps": 1e-10, "weight_decay": 0.0, "amsgrad": False, "params": [0]}
    squares = torch.full((4,), 3.0)
    optimizer.load_state_dict({"state": {0: {"step": 2, "exp_avg_sq": squares}}, "param_groups": [group]})
    parameter.grad = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((4,), 1 - 0.5 / 2))  # sqrt(3 + 1) is 2
