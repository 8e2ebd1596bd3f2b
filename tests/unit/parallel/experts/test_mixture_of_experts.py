"""Tests that `MoE` in one process equals the token-by-token reference: outputs, losses, counts, gradients."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.oracle import relative_error
from tests.unit.parallel.experts.reference_moe import Words, slow_moe
from windlass.base.errors import ConfigError
from windlass.parallel.experts import MixtureOfExperts, StackedMLP

HIDDEN, EXPERTS, TOKENS = 8, 6, 14

ROUTERS: dict[str, dict[str, Any]] = {
    "top1": {"k": 1},
    "top2": {"k": 2, "top2_2nd_expert_sampling": False},
    "top2 second drawn": {"k": 2},
    "top3": {"k": 3},
    "all": {"k": EXPERTS},
    "top1 sigmoid": {"k": 1, "score_function": "sigmoid"},
    "top3 sigmoid scaled": {"k": 3, "score_function": "sigmoid", "routed_scaling_factor": 2.5},
    "top2 not normalized": {"k": 2, "normalize_weights": False, "top2_2nd_expert_sampling": False},
    "top1 rsample": {"k": 1, "noisy_gate_policy": "RSample"},
    "top2 rsample": {"k": 2, "noisy_gate_policy": "RSample"},
    "top1 jitter": {"k": 1, "noisy_gate_policy": "Jitter"},
    "groups by their best": {
        "k": 2,
        "num_expert_groups": 3,
        "num_limited_groups": 2,
        "top2_2nd_expert_sampling": False,
    },
    "groups by their two best": {
        "k": 2,
        "num_expert_groups": 3,
        "num_limited_groups": 1,
        "score_function": "sigmoid",
        "top2_2nd_expert_sampling": False,
    },
    "second drawn in groups": {"k": 2, "num_expert_groups": 3, "num_limited_groups": 2},
    "z-loss": {"k": 2, "z_loss_weight": 0.1, "top2_2nd_expert_sampling": False},
}
CAPACITIES: dict[str, dict[str, Any]] = {
    "top1 last left out": {"k": 1, "use_rts": False},
    "top1 any left out": {"k": 1},
    "top2": {"k": 2, "top2_2nd_expert_sampling": False},
    "top2 second drawn": {"k": 2},
    "top2 rsample": {"k": 2, "noisy_gate_policy": "RSample"},
    "top3 least likely left out": {"k": 3},
    "top3 last left out": {"k": 3, "capacity_priority": "position"},
    "top3 any left out": {"k": 3, "capacity_priority": "random"},
    "top2 sigmoid not normalized": {
        "k": 2,
        "score_function": "sigmoid",
        "normalize_weights": False,
        "top2_2nd_expert_sampling": False,
    },
}


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 12), nn.GELU(), nn.Linear(12, HIDDEN))


def build(seed: int = 0, **words: Any) -> MixtureOfExperts:
    """Return a layer with random, different experts."""
    torch.manual_seed(seed)
    layer = MixtureOfExperts(HIDDEN, expert(), EXPERTS, **words)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layer


def words_of(layer: MixtureOfExperts) -> Words:
    """Return the layer's routing options for the reference."""
    gate: Any = layer.deepspeed_moe["gate"]
    rule, limit = gate.routing_rule, gate.capacity_limit
    words = Words(
        rule.k,
        rule.score_function,
        rule.noise,
        rule.sample_second_expert,
        rule.num_expert_groups,
        rule.num_limited_groups,
        rule.normalize_weights,
        rule.routed_scaling_factor,
        z_weight=gate.z_loss_weight,
    )
    return (
        words
        if limit is None
        else replace(words, factor=limit.capacity_factor, minimum=limit.min_capacity, priority=limit.capacity_priority)
    )


def slow(layer: MixtureOfExperts, tokens: Tensor, **more: Any) -> tuple[Tensor, Tensor, list[int]]:
    gate: Any = layer.deepspeed_moe["gate"]
    experts: Any = layer.deepspeed_moe["experts"]
    return slow_moe(tokens, gate.wg.weight, list(experts.deepspeed_experts), words_of(layer), **more)


def gradients(layer: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters and of the tokens, zeros for an expert that no token chose."""
    results = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in layer.named_parameters()}
    assert tokens.grad is not None
    return {**results, "tokens": tokens.grad}


def hold(layer: MixtureOfExperts, tokens: Tensor, **more: Any) -> None:
    """Assert that the fast implementation equals the reference with the same random numbers."""
    other, others = copy.deepcopy(layer), tokens.clone().requires_grad_()
    tokens = tokens.clone().requires_grad_()
    used = more.get("used")
    torch.manual_seed(7)
    flags = None if used is None else torch.tensor(used).float()
    output, loss, counts = layer(tokens, flags)
    torch.manual_seed(7)
    expected, wanted_loss, wanted_counts = slow(other, others, **more)
    pull = torch.randn_like(output)
    ((output * pull).sum() + loss).backward()
    ((expected * pull).sum() + wanted_loss).backward()
    assert counts.tolist() == wanted_counts
    error, where = relative_error(
        {"output": output.detach(), "loss": loss.detach()}, {"output": expected.detach(), "loss": wanted_loss.detach()}
    )
    assert error < 1e-5, (where, error)
    error, where = relative_error(gradients(layer, tokens), gradients(other, others))
    assert error < 1e-5, (where, error)


@pytest.mark.parametrize("router", ROUTERS)
def test_dropless_layer_equals_the_reference(router: str) -> None:
    hold(build(drop_tokens=False, **ROUTERS[router]), torch.randn(TOKENS, HIDDEN))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("router", CAPACITIES)
def test_dropping_equals_the_reference_per_token(router: str, factor: float) -> None:
    layer = build(capacity_factor=factor, min_capacity=0, **CAPACITIES[router])
    tokens = torch.randn(TOKENS, HIDDEN) + 0.7  # some experts are over capacity
    torch.manual_seed(7)
    routed = layer.deepspeed_moe["gate"](tokens)
    assert (routed.expert_index == EXPERTS).any(), "nobody was left out: this shows nothing"
    hold(layer, tokens)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("words", [{"k": 2, "drop_tokens": False}, {"k": 1, "capacity_factor": 0.6, "min_capacity": 0}])
def test_stacked_experts_equal_single_ones(words: dict[str, Any], gated: bool, bias: bool) -> None:
    torch.manual_seed(0)
    stacked = StackedMLP(HIDDEN, 12, EXPERTS, gated=gated, bias=bias, activation=None if gated else nn.Tanh())
    layer = MixtureOfExperts(HIDDEN, stacked, EXPERTS, **words)
    up, added = ("gate_up_proj" if gated else "up_proj"), torch.zeros(EXPERTS, 1)

    def one(of: Any, number: int) -> Any:
        """Return expert `number` as an explicit function."""

        def run(row: Tensor) -> Tensor:
            inner = row @ getattr(of, up)[number].T + (getattr(of, f"{up}_bias") if bias else added)[number]
            inner = inner[:, :12] * inner[:, :12].sigmoid() * inner[:, 12:] if gated else inner.tanh()
            return inner @ of.down_proj[number].T + (of.down_proj_bias if bias else added)[number]

        return run

    other, tokens = copy.deepcopy(layer), torch.randn(TOKENS, HIDDEN)
    gate: Any = other.deepspeed_moe["gate"]
    singles = [one(other.deepspeed_moe["experts"], number) for number in range(EXPERTS)]
    given, others = tokens.clone().requires_grad_(), tokens.clone().requires_grad_()
    torch.manual_seed(7)
    output, _, _ = layer(given)
    torch.manual_seed(7)
    expected, _, _ = slow_moe(others, gate.wg.weight, singles, words_of(other))
    output.square().sum().backward()
    expected.square().sum().backward()
    assert relative_error({"output": output.detach()}, {"output": expected.detach()})[0] < 1e-5
    error, where = relative_error(gradients(layer, given), gradients(other, others))
    assert error < 1e-5, (where, error)


def test_unused_tokens_are_not_routed() -> None:
    used = [t % 3 != 0 for t in range(TOKENS)]
    for words in ({"drop_tokens": False}, {"capacity_factor": 0.6, "min_capacity": 1}):
        layer = build(k=1, **words)
        tokens = torch.randn(TOKENS, HIDDEN)
        hold(layer, tokens, used=used)
        output, _, counts = layer(tokens, torch.tensor(used))
        assert not output[~torch.tensor(used)].any() and int(counts.sum()) == sum(used)


def test_unchosen_experts_get_zero_gradients() -> None:
    layer = build(k=1, drop_tokens=False)
    output, _, counts = layer(torch.randn(1, HIDDEN))
    output.sum().backward()
    experts: Any = layer.deepspeed_moe["experts"]
    for number, item in enumerate(experts.deepspeed_experts):
        moved = any(bool(parameter.grad.any()) for parameter in item.parameters())
        assert moved == bool(counts[number])


def test_empty_input() -> None:
    layer = build(k=2)
    output, loss, counts = layer(torch.randn(0, HIDDEN, requires_grad=True))
    (output.sum() + loss).backward()
    assert output.shape == (0, HIDDEN) and not loss.item() and counts.tolist() == [0] * EXPERTS
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_residual_and_shared_experts() -> None:
    """As in PR-MoE, a learned softmax weights the dense module and the routed experts. A shared expert is added."""
    torch.manual_seed(0)
    own, shared = expert(), expert()
    layer = MixtureOfExperts(HIDDEN, own, EXPERTS, k=1, drop_tokens=False, use_residual=True, shared_expert=shared)
    assert layer.mlp is own
    tokens = torch.randn(2, 7, HIDDEN)
    output, _, _ = layer(tokens)
    routed, _, _ = slow(layer, tokens.view(-1, HIDDEN))
    share = layer.coefficient(tokens).softmax(-1)
    expected = routed.view_as(tokens) * share[..., :1] + own(tokens) * share[..., 1:] + shared(tokens)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


class WithBias(nn.Module):
    """Linear layer that returns its bias beside its output, as Megatron's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        return self.linear(rows), None


def test_an_expert_may_return_a_tuple() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(HIDDEN, WithBias(), 2, k=2, drop_tokens=False, use_residual=True)
    tokens = torch.randn(5, HIDDEN)
    linear = layer.mlp.linear  # type: ignore[union-attr]
    torch.testing.assert_close(layer(tokens)[0], linear(tokens))


def test_noise_and_sampling_apply_in_training_only() -> None:
    for words in ({"k": 1, "noisy_gate_policy": "RSample"}, {"k": 1, "noisy_gate_policy": "Jitter"}, {"k": 2}):
        layer = build(drop_tokens=False, **words)
        tokens = torch.randn(TOKENS, HIDDEN)
        noisy = {str(layer(tokens)[0].tolist()) for _ in range(4)}
        assert len(noisy) > 1, words
        layer.eval()
        assert len({str(layer(tokens)[0].tolist()) for _ in range(4)}) == 1, words


def test_evaluation_has_its_own_capacity() -> None:
    layer = build(k=1, capacity_factor=0.2, eval_capacity_factor=float(EXPERTS), min_capacity=0)
    tokens = torch.randn(TOKENS, HIDDEN)
    assert (layer(tokens)[0].abs().sum(-1) == 0).any()
    assert not (layer.eval()(tokens)[0].abs().sum(-1) == 0).any()


def test_bf16_is_close_to_fp32() -> None:
    layer = build(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    tokens = torch.randn(TOKENS, HIDDEN).bfloat16()
    expected, _, _ = layer(tokens.float())
    half = copy.deepcopy(layer).bfloat16()
    gate: Any = half.deepspeed_moe["gate"]
    gate.wg.weight.data = layer.deepspeed_moe["gate"].wg.weight.data.clone()  # type: ignore[union-attr]
    actual, loss, _ = half(tokens)
    assert actual.dtype == torch.bfloat16
    error, _ = relative_error({"output": actual.detach().float()}, {"output": expected.detach()})
    assert error < 2e-2
    (actual.float().sum() + loss).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in half.parameters())


def test_under_autocast_the_router_stays_fp32() -> None:
    layer = build(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
    tokens = torch.randn(TOKENS, HIDDEN)
    expected, wanted_loss, wanted_counts = layer(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        actual, loss, counts = layer(tokens)
    assert torch.equal(counts, wanted_counts) and torch.equal(loss, wanted_loss)
    assert relative_error({"output": actual.detach()}, {"output": expected.detach()})[0] < 2e-2


def test_names_equal_deepspeed() -> None:
    names = set(build(use_residual=True).state_dict())
    assert {"deepspeed_moe.gate.wg.weight", "deepspeed_moe.experts.deepspeed_experts.5.2.bias"} < names
    assert {"mlp.0.weight", "coefficient.weight", "coefficient.bias"} < names
    assert len(names) == 1 + 4 * EXPERTS + 4 + 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"k": 7}, "k = 7 of 6 experts"),
        ({"k": 0}, "k = 0 of 6 experts"),
        ({"ep_size": 7}, "6 experts can't be distributed over ep_size = 7"),
        ({"noisy_gate_policy": "Loud"}, "noisy_gate_policy = 'Loud'"),
        ({"capacity_priority": "scores"}, "capacity_priority = 'scores'; write one of position, random, score"),
        ({"score_function": "tanh"}, "score = 'tanh'"),
        ({"num_expert_groups": 4}, "6 experts can't form 4 equal groups"),
        ({"num_expert_groups": 3, "num_limited_groups": 4}, "of which 4 are kept"),
        (
            {"num_expert_groups": 3, "num_limited_groups": 1, "k": 3},
            "k = 3 experts of a token can't be chosen from 1 groups of 2",
        ),
    ],
)
def test_incompatible_options_are_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        MixtureOfExperts(HIDDEN, expert(), EXPERTS, **words)


def test_number_of_stacked_experts_must_match() -> None:
    with pytest.raises(ConfigError, match="a StackedMLP of 4 experts can't be 6 experts; pass equal numbers"):
        MixtureOfExperts(HIDDEN, StackedMLP(HIDDEN, 12, 4), EXPERTS)
    with pytest.raises(ConfigError, match="6 experts and the residual one"):
        MixtureOfExperts(HIDDEN, StackedMLP(HIDDEN, 12, EXPERTS), EXPERTS, use_residual=True)
