"""Tests of accessing a sharded parameter."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from windlass.base.errors import ShardedParameterError
from windlass.zero.core.sharded_parameter import ShardedParameter, handler_of, mark_sharded, mark_unsharded


class FakeUnit:
    def __init__(self, parameter: nn.Parameter, answer: bool) -> None:
        self.names, self.parameters, self.asked = ["layer.weight"], [parameter], 0
        self.value, self.answer = parameter.detach().clone(), answer

    def name_of(self, parameter: nn.Parameter) -> str:
        return self.names[0]

    def gather_parameter(self, parameter: nn.Parameter, together: Any) -> bool:
        self.asked += 1
        if self.answer:
            mark_unsharded(self.parameters[0])
            self.parameters[0].data = self.value
        return self.answer


@pytest.fixture
def released() -> tuple[nn.Parameter, FakeUnit]:
    parameter = nn.Parameter(torch.randn(3, 4))
    unit = FakeUnit(parameter, answer=False)
    mark_sharded(parameter, unit)
    return parameter, unit


def test_sharded_parameter_keeps_shape_and_identity_without_memory(released: tuple[nn.Parameter, FakeUnit]) -> None:
    parameter, unit = released
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, ShardedParameter)
    assert parameter.shape == (3, 4) and parameter.numel() == 12 and parameter.dtype == torch.float32
    assert parameter.requires_grad and parameter.grad is None and parameter.is_leaf
    assert parameter.type() == "torch.FloatTensor"
    assert "layer" not in repr(parameter) and "3, 4" in repr(parameter)
    assert handler_of(parameter) is unit and unit.asked == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p + 1,
        lambda p: p.sum(),
        lambda p: torch.nn.functional.linear(torch.ones(1, 4), p),
        lambda p: torch.cat([torch.zeros(1, 4), p]),
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p[0],
        lambda p: p.to("cpu", torch.float32, False, True),  # makes a copy
        lambda p: p.to("cpu", copy=True),
        lambda p: p.type("torch.DoubleTensor"),
        lambda p: p.double() + 1,
        lambda p: p.to(torch.zeros(1, dtype=torch.float64)).sum(),
        lambda p: p.type(torch.float16)[0].fill_(0),  # filling one row needs the values of the other rows
        lambda p: p.bfloat16().add_(1),
        lambda p: p.half().data,
        lambda p: p.to(torch.float16).tolist(),
        lambda p: torch.empty(3, 4).copy_(p.half()),
        lambda p: copy.deepcopy(p.half()),
        lambda p: pickle.dumps(p.half()),
        lambda p: p.tolist(),
        copy.deepcopy,
        pickle.dumps,
    ],
)
def test_use_of_sharded_values_raises_with_a_fix(released: tuple[nn.Parameter, FakeUnit], use: Any) -> None:
    with pytest.raises(ShardedParameterError, match=r"layer\.weight.*GatheredParameters"):
        use(released[0])


@pytest.mark.parametrize(
    "create",
    [
        lambda p: torch.full_like(p, 0.5, memory_format=torch.preserve_format),
        lambda p: torch.zeros_like(p, dtype=torch.float64),
        torch.randn_like,
        lambda p: p.new_ones(2),
    ],
)
def test_tensor_like_a_sharded_parameter_needs_no_values(released: tuple[nn.Parameter, FakeUnit], create: Any) -> None:
    parameter = released[0]
    like = nn.Parameter(torch.empty(parameter.shape))
    torch.manual_seed(0)
    expected = create(like)
    torch.manual_seed(0)
    found = create(parameter)
    assert type(found) is torch.Tensor and found.dtype == expected.dtype and torch.equal(found, expected)
    found.add_(1)  # the new tensor has memory of its own
    assert isinstance(parameter, ShardedParameter)


CASTS = {
    "float": lambda p: p.float(),
    "half": lambda p: p.half(),
    "to": lambda p: p.to(torch.float64),
    "like": lambda p: p.to(torch.zeros(1, dtype=torch.bfloat16)),
    "type": lambda p: p.type(torch.float64),
}
FILLS = [
    lambda t: nn.init.normal_(t, std=0.02),
    lambda t: nn.init.normal_(tensor=t),
    lambda t: nn.init.xavier_uniform_(t),
    lambda t: nn.init.trunc_normal_(t, std=0.02),
    lambda t: t.zero_(),
    lambda t: t.copy_(torch.ones(4)),
]


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("fill", FILLS)
def test_copy_in_another_dtype_can_be_initialized(cast: Any, fill: Any) -> None:
    """A copy in another dtype has the values, dtype and random numbers of plain PyTorch. The parameter is unchanged."""
    plain = nn.Parameter(torch.randn(3, 4, dtype=torch.float16 if cast is not CASTS["half"] else torch.float32))
    parameter, result = nn.Parameter(plain.detach().clone()), []
    mark_sharded(parameter, unit := FakeUnit(parameter, answer=False))
    for item in (plain, parameter):
        torch.manual_seed(3)
        with torch.no_grad():
            copied = cast(item)
            assert copied.dtype != item.dtype and copied.shape == item.shape and copied.is_floating_point()
            fill(copied)
        result.append((copied, torch.rand(1)))
    assert type(result[1][0]) is torch.Tensor and torch.equal(result[0][0], result[1][0])
    assert torch.equal(result[0][1], result[1][1])
    assert isinstance(parameter, ShardedParameter) and handler_of(parameter) is unit


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_weight_norm_can_be_initialized_and_not_read(norm: Any) -> None:
    """An initializer of a weight behind weight_norm draws the random numbers that it draws in plain PyTorch."""
    draws = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own warning about the older weight_norm
        convs = [norm(nn.Conv1d(4, 4, 3), name="weight", dim=2) for _ in range(2)]
    parameters = [item for item in convs[1].parameters() if item.dim() > 1]
    units = [FakeUnit(item, answer=False) for item in parameters]
    for parameter, unit in zip(parameters, units, strict=True):
        mark_sharded(parameter, unit)
    for conv in convs:
        hooks = [hook for hook in conv._forward_pre_hooks.values() if hasattr(hook, "compute_weight")]
        weight = hooks[0].compute_weight(conv) if hooks else conv.weight
        assert weight.shape == (4, 4, 3)
        torch.manual_seed(3)
        with torch.no_grad():
            draws.append((nn.init.normal_(weight).detach(), torch.rand(1)))
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
    with pytest.raises(ShardedParameterError, match=r"layer\.weight.*GatheredParameters"):
        convs[1](torch.ones(1, 4, 5))


@pytest.mark.parametrize("cast", [lambda p: p.float(), lambda p: p.to(torch.float32), lambda p: p.type(torch.float32)])
def test_cast_to_the_same_dtype_returns_the_parameter(released: tuple[nn.Parameter, FakeUnit], cast: Any) -> None:
    released[0].mark = 1  # type: ignore[attr-defined]
    assert cast(released[0]) is released[0] and cast(released[0]).mark == 1


@pytest.mark.parametrize(
    "move",
    [
        lambda p: p.cpu(),
        lambda p: p.to("cpu"),
        lambda p: p.to("cpu", torch.float32, True),
        lambda p: p.to(device="cpu", dtype=None, non_blocking=False),
        lambda p: p.to(torch.zeros(1)),
    ],
)
def test_to_device_leaves_a_sharded_parameter_unchanged(released: tuple[nn.Parameter, FakeUnit], move: Any) -> None:
    parameter, unit = released
    assert move(parameter) is parameter and isinstance(parameter, ShardedParameter) and unit.asked == 0
    module = nn.Module()
    module.weight = parameter
    assert module.to("cpu").cpu().weight is parameter and isinstance(parameter, ShardedParameter)


def test_write_to_a_sharded_parameter_is_refused(released: tuple[nn.Parameter, FakeUnit]) -> None:
    with torch.no_grad(), pytest.raises(ShardedParameterError):
        released[0].fill_(1.0)
    with pytest.raises(ShardedParameterError):
        released[0].data = torch.zeros(3, 4)


def test_state_dict_raises_rather_than_giving_an_empty_tensor(released: tuple[nn.Parameter, FakeUnit]) -> None:
    module = nn.Module()
    module.weight = released[0]
    with pytest.raises(ShardedParameterError):
        module.state_dict()


def test_access_in_a_forward_unshards_the_unit() -> None:
    parameter = nn.Parameter(torch.randn(3, 4))
    unit = FakeUnit(parameter, answer=True)
    mark_sharded(parameter, unit)  # type: ignore[arg-type]
    out = torch.nn.functional.linear(torch.ones(1, 4), parameter)
    assert torch.equal(out, torch.ones(1, 4) @ unit.value.T) and type(parameter) is nn.Parameter
    out.sum().backward()
    assert parameter.grad is not None


def test_hooks_and_flags_may_be_set_while_sharded(released: tuple[nn.Parameter, FakeUnit]) -> None:
    parameter = released[0]
    parameter.requires_grad_(False)
    assert not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_hook(lambda g: g)
    parameter.grad = None
