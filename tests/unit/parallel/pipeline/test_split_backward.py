"""Tests that a split backward gives the gradients of a full one: bitwise for inputs, up to rounding for weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from windlass.base.errors import ModelError
from windlass.parallel.activation_checkpoint_api import checkpoint
from windlass.parallel.pipeline.split_backward import SplitBackward


class Mlp(nn.Module):
    """Linear layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4, bias=False))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return [self.body(x) + y]


class Repeated(nn.Module):
    """Model that applies a weight and a linear layer three times, and uses the weight once more for another output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for _ in range(3):
            x = torch.tanh(self.other(x) @ self.weight.T.contiguous())
        return [x * y, self.weight.exp().sum(0) * x]


class Beside(nn.Module):
    """Model with an output of only parameters, an output without trainable parameters, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table, self.frozen = nn.Parameter(torch.randn(4)), nn.Embedding(3, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        looked_up = self.table(torch.tensor([0, 2]))
        return [self.frozen(x) * self.scale.exp(), looked_up * self.scale.exp(), y.detach() * 2]


class Checkpointed(Mlp):
    """Model with a recomputed part."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return [checkpoint(self.body, x) * y]


class Hooked(Mlp):
    """Model with hooks that scale gradients."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        middle = self.body[:3](x)
        middle.register_hook(lambda gradient: 2 * gradient)
        made = F.linear(middle, self.body[3].weight)
        made.register_hook(lambda gradient: 3 * gradient)
        return [made, y]


MODELS: list[Callable[[], nn.Module]] = [Mlp, Repeated, Beside, Checkpointed, Hooked]


def _made(build: Callable[[], nn.Module], learns: tuple[bool, bool]) -> tuple[nn.Module, list[Tensor], Any]:
    torch.manual_seed(0)
    model = build().double()  # fp64: other orders of sums differ by less than the tolerance
    given = [torch.randn(2, 4, dtype=torch.float64).requires_grad_(learns[number]) for number in range(2)]
    return model, given, model(*given)


def _seeded(outputs: Any) -> tuple[list[Tensor], list[Tensor]]:
    made = [out for out in outputs if out.requires_grad]
    return made, [torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5)) for out in made]


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("learns", [(True, True), (True, False), (False, True), (False, False)])
def test_two_parts_equal_one_backward(build: Callable[[], nn.Module], learns: tuple[bool, bool]) -> None:
    plain, wanted_inputs, outputs = _made(build, learns)
    torch.autograd.backward(*_seeded(outputs))

    model, given, outputs = _made(build, learns)
    made, seeds = _seeded(outputs)
    leaves = [tensor for tensor in given if tensor.requires_grad]
    later = SplitBackward([get_gradient_edge(out) for out in made], seeds, leaves)
    del outputs, made
    assert later
    if leaves:
        later.backward_inputs()
        for have, want in zip(given, wanted_inputs, strict=True):
            assert (have.grad is None) == (want.grad is None)
            assert want.grad is None or torch.equal(have.grad, want.grad)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert later
    later.backward_weights()
    assert not later
    for (name, have), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (have.grad is None) == (want.grad is None), name
        assert want.grad is None or torch.allclose(have.grad, want.grad, rtol=1e-12, atol=1e-12), name
    for have, want in zip(given, wanted_inputs, strict=True):
        assert want.grad is None or torch.equal(have.grad, want.grad)


def test_reentrant_checkpointing_is_refused() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    out = torch.utils.checkpoint.checkpoint(nn.Linear(4, 4), x, use_reentrant=True)
    later = SplitBackward([get_gradient_edge(out)], [torch.ones(2, 4)], [x])
    with pytest.raises(ModelError, match='zero-bubble.*use_reentrant=False.*or write "1f1b"'):
        later.backward_inputs()


def test_parameter_gradients_are_accumulated_once() -> None:
    model, given, outputs = _made(Mlp, (True, True))
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    made, seeds = _seeded(outputs)
    later = SplitBackward([get_gradient_edge(out) for out in made], seeds, given)
    later.backward_inputs()
    assert not seen
    began: list[int] = []
    later.backward_weights(lambda: began.append(len(seen)))
    assert began == [0] and sorted(seen) == sorted(name for name, _ in model.named_parameters())


def test_second_part_does_not_repeat_the_first() -> None:
    """The weight part does not repeat the input part: each part runs one half of a matrix product's backward."""
    counted: list[tuple[bool, bool]] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            counted.append((True, True))
            return gradients[0] @ weight.T, x.T @ gradients[0]

    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    x = torch.randn(2, 4, requires_grad=True)
    out = x
    for weight in weights:
        out = Product.apply(out, weight)
    later = SplitBackward([get_gradient_edge(out)], [torch.ones_like(out)], [x])
    later.backward_inputs()
    assert len(counted) == 3
    later.backward_weights()
    assert len(counted) == 6  # each product's backward ran once more, for its weight
    plain = torch.autograd.grad((x @ weights[0] @ weights[1] @ weights[2]).sum(), weights)
    assert all(torch.allclose(weight.grad, want) for weight, want in zip(weights, plain, strict=True))
