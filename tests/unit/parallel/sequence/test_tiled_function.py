"""Tests that a computation in tiles equals the untiled one: results, gradients, and one gradient per parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.unit.parallel.sequence.tiled_models import GatedMLP, Largest
from windlass.base.errors import ModelError
from windlass.parallel.sequence.tiled_function import Tiling, run_tiled
from windlass.parallel.sequence.tiled_mlp import find_mlps, install_tiled_mlp


def pair(tokens: int | None, **changes: object) -> tuple[GatedMLP, GatedMLP]:
    """Return an MLP, and a copy that computes `tokens` tokens at a time."""
    torch.manual_seed(0)
    plain = GatedMLP(**changes)
    parts = copy.deepcopy(plain)
    install_tiled_mlp(parts, tokens)
    return plain, parts


def trained(mlp: nn.Module, hidden: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """Return the output, and the gradients of the input and of the parameters."""
    own = hidden.clone().requires_grad_()
    output = mlp(own)
    output.backward(gradient)
    return output.detach(), own.grad, {name: p.grad for name, p in mlp.named_parameters()}


@pytest.mark.parametrize("tokens", [1, 3, 7, 100, None])
@pytest.mark.parametrize("shape", [(13, 8), (1, 13, 8), (2, 13, 8), (2, 3, 5, 8)])
def test_tiled_mlp_equals_the_mlp(tokens: int | None, shape: tuple[int, ...]) -> None:
    plain, parts = pair(tokens)
    hidden, gradient = torch.randn(shape), torch.randn(shape)
    expected, actual = trained(plain, hidden, gradient), trained(parts, hidden, gradient)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_parameter_hooks_run_once() -> None:
    _, parts = pair(2)
    received: list[str] = []
    for name, parameter in parts.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: received.append(name))
    trained(parts, torch.randn(9, 8), torch.randn(9, 8))
    assert sorted(received) == sorted(name for name, _ in parts.named_parameters())


def test_a_frozen_parameter_and_a_frozen_input() -> None:
    plain, parts = pair(2)
    for mlp in (plain, parts):
        mlp.up.weight.requires_grad_(False)
    hidden, gradient = torch.randn(9, 8), torch.randn(9, 8)
    torch.testing.assert_close(trained(parts, hidden, gradient), trained(plain, hidden, gradient))
    parts.zero_grad()
    parts(hidden).backward(gradient)
    torch.testing.assert_close(parts.down.weight.grad, plain.down.weight.grad)
    parts.requires_grad_(False)
    assert not parts(hidden).requires_grad


def test_16_bit_gradients_are_added_up_in_32() -> None:
    """16-bit gradients are summed in fp32: 200 tiles summed in bf16 would be off by a hundredth or more."""
    plain, parts = pair(1, dtype=torch.bfloat16)
    hidden, gradient = torch.rand(200, 8, dtype=torch.bfloat16), torch.rand(200, 8, dtype=torch.bfloat16)
    exact = trained(copy.deepcopy(plain).float(), hidden.float(), gradient.float())[2]
    result = trained(parts, hidden, gradient)[2]
    for name, item in result.items():
        assert item.dtype == torch.bfloat16
        assert float((item.float() - exact[name]).abs().max() / exact[name].abs().max()) < 6e-3, name


def test_dropout_is_the_same_in_the_backward() -> None:
    _, parts = pair(3, drop=0.5)
    hidden = torch.randn(10, 8)
    torch.manual_seed(5)
    output, to_input, _ = trained(parts, hidden, torch.ones(10, 8))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    again, pieces = hidden.clone().requires_grad_(), []
    for piece in again.split(3):
        pieces.append(parts.forward.args[1](piece))
    torch.testing.assert_close(torch.cat(pieces), output)
    assert torch.equal(torch.get_rng_state(), after)  # the backward has not advanced the global generator
    torch.cat(pieces).backward(torch.ones(10, 8))
    torch.testing.assert_close(again.grad, to_input)


class FunctionalDropoutMLP(nn.Module):
    """MLP that drops elements without a dropout module, and whose argument has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.up(x), 0.5, self.training))


def test_dropout_without_a_module_is_the_same_in_the_backward() -> None:
    torch.manual_seed(0)
    parts = FunctionalDropoutMLP()
    install_tiled_mlp(parts, 3)
    hidden = torch.randn(10, 8, requires_grad=True)
    output = parts(hidden)
    torch.manual_seed(1)  # other random numbers than those of the forward would follow
    output.sum().backward()
    torch.testing.assert_close((hidden.grad * hidden).sum(), output.sum())  # linear, given the dropped elements


def test_input_may_be_a_keyword_argument() -> None:
    torch.manual_seed(0)
    parts = FunctionalDropoutMLP().eval()
    install_tiled_mlp(parts, 3)
    hidden = torch.randn(10, 8)
    torch.testing.assert_close(parts(x=hidden), parts(hidden))
    torch.testing.assert_close(parts(x=hidden[:2]), parts(hidden[:2]))
    with pytest.raises(
        TypeError, match=r"a tiled FunctionalDropoutMLP takes hidden states only, and was called with 1 "
    ):
        parts(hidden, scale=2)


def test_autocast_is_the_same_in_the_backward_and_leaves_no_casts_behind() -> None:
    plain, parts = pair(2)
    hidden, gradient = torch.randn(9, 8), torch.randn(9, 8)
    results = []
    for mlp in (plain, parts):
        own = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = mlp(own)
            beside = nn.functional.linear(own, mlp.up.weight)  # needs the weight's cached cast with its autograd graph
        (output * gradient).sum().backward(retain_graph=True)
        beside.sum().backward()
        results.append((output.detach(), own.grad, [p.grad for p in mlp.parameters()]))
    assert results[1][0].dtype == torch.bfloat16
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)


def test_without_gradients_nothing_is_kept() -> None:
    plain, parts = pair(2)
    hidden = torch.randn(9, 8)
    with torch.no_grad():
        assert not parts(hidden).requires_grad
        torch.testing.assert_close(parts(hidden), plain(hidden))


@pytest.mark.parametrize("tokens", [64, 128, 256, 512])
def test_intermediate_memory_is_independent_of_the_tokens(tokens: int) -> None:
    plain, parts = pair(16, features=8, between=96)
    sizes = []
    for mlp in (plain, parts):
        hidden = torch.randn(tokens, 8, requires_grad=True)
        with Largest() as largest:
            mlp(hidden).sum().backward()
        sizes.append(largest.elements)
    assert sizes == [tokens * 96, max(16 * 96, tokens * 8)]


def test_model_keeps_class_and_names_and_copies_are_independent() -> None:
    _, parts = pair(2)
    assert type(parts) is GatedMLP and set(parts.state_dict()) == set(GatedMLP().state_dict())
    other = copy.deepcopy(parts)
    with torch.no_grad():
        other.down.bias.add_(1)
    hidden = torch.randn(5, 8)
    torch.testing.assert_close(other(hidden), parts(hidden) + 1)
    with pytest.raises(ModelError, match="tiled already"):
        install_tiled_mlp(parts)


def test_sums_over_tiles() -> None:
    weight = torch.randn(8, requires_grad=True)
    hidden, labels = torch.randn(7, 8, requires_grad=True), torch.arange(7)

    def function(states: Tensor, numbers: Tensor) -> Tensor:
        return ((states @ weight) * numbers).sum()

    total = run_tiled(Tiling(function, 2, sums_outputs=True), [hidden, labels], [weight])
    actual = torch.autograd.grad(3 * total, [hidden, weight])
    expected = torch.autograd.grad(3 * function(hidden, labels), [hidden, weight])
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(0, keepdim=True),
        lambda x: torch.stack([x.sum(0), x.square().sum(0)]),  # two rows from each tile, also from a smaller one
        lambda x: x[1::2],
        lambda x: x[: len(x) // 4 * 3],  # no row from a last tile of 1 token
    ],
    ids=["one", "two", "odd", "whole"],
)
@pytest.mark.parametrize("tokens", [8, 9, 10, 11])
def test_outputs_of_any_size_are_concatenated(function: Callable[[Tensor], Tensor], tokens: int) -> None:
    hidden = torch.randn(tokens, 3, requires_grad=True)
    results = [run_tiled(Tiling(function, 4), [hidden]), torch.cat([function(part) for part in hidden.split(4)])]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(found.square().sum(), [hidden]) for found in results))


def test_mlps_are_recognized_by_structure() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 20}
    llama = LlamaForCausalLM(LlamaConfig(intermediate_size=24, **small))
    assert [name for name, _ in find_mlps(llama)] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=20, **ends))
    assert [name for name, _ in find_mlps(gpt2)] == ["transformer.h.0.mlp"]
    assert [name for name, _ in find_mlps(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))] == [""]
    convolved = nn.Sequential(nn.Linear(4, 8), nn.Conv1d(8, 8, 3), nn.Linear(8, 4))
    assert list(find_mlps(convolved)) == []
    assert list(find_mlps(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))) == []
    with pytest.raises(ModelError, match="no linear layer"):
        install_tiled_mlp(nn.GELU())
