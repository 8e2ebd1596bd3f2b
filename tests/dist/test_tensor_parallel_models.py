"""Tests of tensor parallelism on models of unknown classes, and on parameters that are sharded already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.causal_models import VOCABULARY, build, language
from tests.dist.harness import RankError, run_ranks
from tests.dist.tensor_parallel_runs import (
    EXACT,
    added_up,
    gather_full_tensor,
    pair,
    stepped,
    tensor_axis,
    whole_gradients,
    whole_values,
)
from tests.hf_models import t5
from tests.oracle import relative_error
from windlass.comm.mesh import build_mesh
from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.experts import MixtureOfExperts as MoE
from windlass.parallel.experts import StackedMLP
from windlass.parallel.placement import Placement, compute_shard_range, get_placement, make_ranges_along, set_placement
from windlass.parallel.tensor import apply_tensor_parallel


class Mixer(nn.Module):
    """Attention with two key heads for four query heads, fused in sections, and an unusual name for the head count."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = 4
        self.everything = nn.Linear(32, 32 + 16 + 16)
        self.back = nn.Linear(32, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.everything(hidden)
        size = made.shape[-1] // 8
        query, key, value = made.split([4 * size, 2 * size, 2 * size], -1)
        query, key, value = (item.unflatten(-1, (-1, 8)).transpose(1, 2) for item in (query, key, value))
        key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], 1) for item in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.back(mixed.transpose(1, 2).flatten(2))


class Widened(nn.Module):
    """Feed-forward block with unusual layer names."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(40, 32)
        self.gates = nn.Linear(32, 80)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gates(hidden).chunk(2, -1)
        return self.out(functional.silu(gate) * up)


class Strange(nn.Module):
    """User-defined model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.steps = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "mix": Mixer(), "wide": Widened()}) for _ in range(2)
        )
        self.say = nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids)
        for step in self.steps:
            hidden = hidden + step["mix"](step["norm"](hidden))
            hidden = hidden + checkpoint(step["wide"], hidden, use_reentrant=False)
        return self.say(hidden)


TABLE = {
    r"steps\.\d+\.mix\.everything": "column:32+16+16 of 4+2+2 heads",
    r"steps\.\d+\.mix\.back": "row of 4 heads",
    r"steps\.\d+\.wide\.gates": "column:40+40",
    r"steps\.\d+\.wide\.out": "row",
    "tokens|say": "vocabulary",
}


def strange() -> tuple[float, tuple[float, str]]:
    torch.manual_seed(0)
    plain, model, axis = Strange(), Strange(), tensor_axis()
    model.load_state_dict(plain.state_dict())
    apply_tensor_parallel(model, axis, tensor_table=TABLE)
    logits = 0.0
    for seed in range(3):
        batch = language(seed)
        want, have = plain(batch["input_ids"]), model(batch["input_ids"])
        logits = max(logits, relative_error({"logits": have}, {"logits": want})[0])
        for item, text in ((plain, want), (model, have)):
            functional.cross_entropy(text.flatten(0, 1), batch["labels"].flatten()).backward()
            stepped(item)
    return logits, relative_error(whole_values(model, axis), dict(plain.named_parameters()))


def test_table_shards_an_unknown_model() -> None:
    for logits, parameters in run_ranks(strange, 2):
        assert logits < EXACT
        assert parameters[0] < EXACT, parameters


class Halved(nn.Module):
    """Trained activation without a class of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor([0.3]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.where(hidden > 0, hidden, self.share * hidden)


class Bent(nn.Module):
    """Feed-forward layers with trained activations, and a trained factor after the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Sequential(nn.Linear(8, 24), nn.PReLU(), nn.Linear(24, 8))])
        self.steps.append(nn.ModuleDict({"up": nn.Linear(8, 24), "act_fn": Halved(), "down": nn.Linear(24, 8)}))
        self.out = nn.PReLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.steps[0](hidden)
        for name in ("up", "act_fn", "down"):
            hidden = self.steps[1][name](hidden)
        return self.out(hidden)


def gradient_error(
    build: Callable[[], nn.Module], options: dict[str, Any], cut_norms: bool = False
) -> tuple[float, str]:
    torch.manual_seed(0)
    plain, model, axis = build(), build(), tensor_axis()
    model.load_state_dict(plain.state_dict())
    apply_tensor_parallel(model, axis, tensor_table=options, tp_sequence_norms=cut_norms)
    inputs = torch.randn(2, 5, 8)
    for one in (plain, model):
        one(inputs).square().sum().backward()
    added_up(model, axis)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return relative_error(whole_gradients(model, axis), expected)


@pytest.mark.parametrize(
    "options", [{}, {r"steps\.0\.0": "column", r"steps\.0\.2": "row"}], ids=["traced", "from the table"]
)
def test_trained_activations_between_sharded_layers_get_full_gradients(options: dict[str, Any]) -> None:
    for gradients in run_ranks(gradient_error, 2, Bent, options):
        assert gradients[0] < EXACT, gradients


class Surrounded(nn.Module):
    """Feed-forward layers with trained activations before, between and after them."""

    def __init__(self, *, in_sequence: bool) -> None:
        super().__init__()
        layers = [nn.PReLU(), nn.Linear(8, 24), nn.PReLU(), nn.Linear(24, 8), nn.PReLU()]
        names = ("act_in", "up", "act", "down", "act_out")
        self.steps = nn.Sequential(*layers) if in_sequence else nn.ModuleDict(dict(zip(names, layers, strict=True)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = hidden
        for step in self.steps.children():
            found = step(found)
        return hidden + found


STATED = {"steps.up": "column", "steps.down": "row", "steps.act": "partial", r"steps\.act_\w+": "replicated"}


@pytest.mark.parametrize(
    ("options", "in_sequence"),
    [({r"steps\.1": "column", r"steps\.3": "row"}, True), (STATED, False)],
    ids=["by their order", "from the table"],
)
def test_trained_activations_around_sharded_layers_keep_their_gradients(
    options: dict[str, Any], in_sequence: bool
) -> None:
    for gradients in run_ranks(gradient_error, 2, partial(Surrounded, in_sequence=in_sequence), options):
        assert gradients[0] < EXACT, gradients


def test_trained_activations_that_may_be_beside_sharded_layers_are_refused() -> None:
    options = {name: STATED[name] for name in ("steps.up", "steps.down")}
    with pytest.raises(RankError, match=r"unknown whether it is between steps.up and steps.down, .*\(partial\)"):
        run_ranks(gradient_error, 2, partial(Surrounded, in_sequence=False), options)


class Scaled(nn.Module):
    """Feed-forward layers with one trained factor between them."""

    def __init__(self, *, in_module: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.factor = Halved() if in_module else nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = self.up(hidden)
        return self.down(self.factor(wide) if isinstance(self.factor, nn.Module) else self.factor * wide)


@pytest.mark.parametrize("in_module", [True, False])
def test_trained_numbers_of_unknown_place_are_refused_and_stated_ones_get_full_gradients(in_module: bool) -> None:
    options = {"up": "column", "down": "row"}
    with pytest.raises(RankError, match="can't shard factor: .* unknown whether it is between up and down"):
        run_ranks(gradient_error, 2, partial(Scaled, in_module=in_module), options)
    for gradients in run_ranks(
        gradient_error, 2, partial(Scaled, in_module=in_module), {**options, "factor": "partial"}
    ):
        assert gradients[0] < EXACT, gradients


class Step(nn.Module):
    """Feed-forward layers with a trained factor of the residual and one of the result, each of any shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(8), nn.ParameterDict({"share": torch.tensor(0.4)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(8, 24), "down": nn.Linear(24, 8)})
        self.factor = nn.Parameter(torch.full(shape, 0.7))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = functional.gelu(self.mlp["up"](self.norm(hidden)))
        return self.gate["share"] * hidden + self.factor * self.mlp["down"](wide)


def steps(shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(Step(shape), Step(shape))


@pytest.mark.parametrize("cut_norms", [False, True])
@pytest.mark.parametrize("shape", [(), (8,), (1, 1, 8)], ids=str)
def test_trained_factors_around_sharded_layers_get_full_gradients(shape: tuple[int, ...], cut_norms: bool) -> None:
    options = {r".*\.up": "column", r".*\.down": "row", r".*\.factor": "replicated"}
    if len(shape) < 2:
        del options[r".*\.factor"]
    for gradients in run_ranks(gradient_error, 2, partial(steps, shape), options, cut_norms):
        assert gradients[0] < EXACT, gradients


class Blended(nn.Module):
    """Layer whose attention gets the same hidden states as queries, keys and values. It is in a list for one `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        attention: nn.Module = nn.MultiheadAttention(8, 2, batch_first=True) if kind != "sharded" else Triple()
        self.parts = nn.ModuleList([attention]) if kind == "replicated in a list" else attention
        self.norm, self.mlp = nn.LayerNorm(8), nn.ModuleDict({"up": nn.Linear(8, 24), "down": nn.Linear(24, 8)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attention = self.parts[0] if isinstance(self.parts, nn.ModuleList) else self.parts
        normed = self.norm(hidden)
        hidden = hidden + attention(normed, normed, normed)[0]
        return hidden + self.mlp["down"](functional.gelu(self.mlp["up"](hidden)))


class Triple(nn.Module):
    """Attention with separate arguments for queries, keys and values. It returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor]:
        made = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        heads = (one.unflatten(-1, (-1, 4)).transpose(1, 2) for one in made)
        return (self.o_proj(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)),)


@pytest.mark.parametrize("kind", ["sharded", "replicated", "replicated in a list"])
def test_sequences_are_whole_in_attention_that_gets_them_three_times(kind: str) -> None:
    options = {r".*\.up": "column", r".*\.down": "row"}
    if kind != "sharded":
        options[r".*\.parts(\.0)?(\.out_proj)?"] = "replicated"
    for gradients in run_ranks(gradient_error, 2, partial(blended, kind), options, True):
        assert gradients[0] < EXACT, gradients


class Apart(nn.Module):
    """Layer whose attention gets keys and values with a norm of their own, or hidden states of an encoder."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if kind == "replicated" else Triple()
        self.norm, self.key_norm, self.kind = nn.LayerNorm(8), nn.LayerNorm(8), kind
        self.change: Callable[[Any], torch.Tensor] = self.key_norm.forward
        self.mlp = nn.ModuleDict({"up": nn.Linear(8, 24), "down": nn.Linear(24, 8)})

    def forward(self, hidden: torch.Tensor, states: Any) -> torch.Tensor:
        if self.kind == "changed":
            source = self.change(states)
        elif self.kind == "normed encoder":
            source = self.key_norm(states)
        else:
            source = states if self.kind == "encoder" else self.key_norm(hidden)
        hidden = hidden + self.attention(self.norm(hidden), source, source)[0]
        return hidden + self.mlp["down"](functional.gelu(self.mlp["up"](hidden)))


class ApartLayers(nn.Module):
    """Layers beside hidden states of an encoder, which are as long as the part of the sequence on one rank."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.recomputes = nn.ModuleList(Apart(kind) for _ in range(2)), kind == "recomputed"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        states = hidden[:, :3] * 2
        for layer in self.layers:
            hidden = (
                checkpoint(layer, hidden, states, use_reentrant=False) if self.recomputes else layer(hidden, states)
            )
        return hidden


@pytest.mark.parametrize("kind", ["sharded", "replicated", "recomputed", "encoder"])
def test_keys_and_values_with_a_norm_of_their_own_are_of_the_whole_sequence(kind: str) -> None:
    options = {r".*\.up": "column", r".*\.down": "row"}
    if kind == "replicated":
        options[r".*\.attention(\.out_proj)?"] = "replicated"
    for gradients in run_ranks(gradient_error, 2, partial(ApartLayers, kind), options, True):
        assert gradients[0] < EXACT, gradients


class Encoded(nn.Module):
    """Layers that change full hidden states of an encoder, which may be as long as the part of the sequence on one
    rank or on each."""

    def __init__(self, kind: str, length: int) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Apart("changed") for _ in range(2))
        self.kind, self.length = kind, length

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)[:, : self.length]
        states: Any = hidden[:, : (self.length + 1) // 2]
        for layer in self.layers:
            layer.change = (lambda given: given["states"]) if self.kind == "in a dict" else (lambda given: given * 0.5)
            hidden = layer(hidden, {"states": states} if self.kind == "in a dict" else states)
        return hidden


@pytest.mark.parametrize("length", [4, 5])
@pytest.mark.parametrize("kind", ["scaled", "in a dict"])
def test_states_of_an_encoder_that_a_layer_changes_stay_full(kind: str, length: int) -> None:
    options = {r".*\.up": "column", r".*\.down": "row", "first": "replicated"}
    for gradients in run_ranks(gradient_error, 2, partial(Encoded, kind, length), options, True):
        assert gradients[0] < EXACT, gradients


def test_norms_of_full_keys_and_values_between_parts_of_the_sequence_are_refused() -> None:
    with pytest.raises(RankError, match=r"layers\.0\.key_norm .* keys and values of layers\.0\.attention, .* are full"):
        run_ranks(gradient_error, 2, partial(ApartLayers, "normed encoder"), {}, True)


class Multiplied(Apart):
    """Layer that multiplies its tokens by one state for all of them."""

    def forward(self, hidden: torch.Tensor, states: Any) -> torch.Tensor:
        return super().forward(hidden * (1 + states), states)


class OneState(nn.Module):
    """Layers that multiply tokens by a trained state for all of them, or attend to it."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends, kind = attends, Apart if attends else Multiplied
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(kind("encoder") for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        states = self.first(hidden[:, : 2 if self.attends else 1])
        for layer in self.layers:
            hidden = layer(hidden, states)
        return hidden


def test_a_state_for_all_tokens_is_refused_where_a_layer_combines_it_with_its_part_of_them() -> None:
    options = {r".*\.up": "column", r".*\.down": "row", "first": "replicated"}
    for gradients in run_ranks(gradient_error, 2, partial(OneState, True), options, True):
        assert gradients[0] < EXACT, gradients
    with pytest.raises(RankError, match=r"combines its argument 1 \(counted from 0\) with its part of the tokens"):
        run_ranks(gradient_error, 2, partial(OneState, False), options, True)


class GatedLayers(nn.Module):
    """Layers that also get an argument. For the kind "frozen", its gradient is partial on each rank and trains nothing;
    for the kind "in place", the first layer changes the argument in place.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(8, 8), kind
        make = partial(Apart, "changed") if kind == "in place" else partial(Multiplied, "encoder")
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.first.requires_grad_(kind != "frozen")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kind == "frozen":
            hidden = self.first(hidden).requires_grad_()  # as enable_input_require_grads of transformers
            states = hidden.mean(1, keepdim=True)
        else:
            states = self.first(hidden[:, :1])
        for number, layer in enumerate(self.layers):
            layer.change = torch.Tensor.contiguous if number else lambda given: given.mul_(1.5)
            hidden = layer(hidden, states)
        return hidden


@pytest.mark.parametrize("kind", ["frozen", "in place"])
def test_arguments_whose_gradients_are_partial_train_where_no_parameter_gets_them(kind: str) -> None:
    options = {r".*\.up": "column", r".*\.down": "row", "first": "replicated"}
    for gradients in run_ranks(gradient_error, 2, partial(GatedLayers, kind), options, True):
        assert gradients[0] < EXACT, gradients


def shared_bias_error(cut_norms: bool) -> tuple[float, str]:
    """Return the largest relative error of the gradients of MPNet, whose layers share one bias of all heads."""
    from transformers import MPNetConfig, MPNetForMaskedLM

    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 32}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = MPNetConfig(**sizes, **dropouts, vocab_size=64, initializer_range=0.4)  # type: ignore[arg-type]
    torch.manual_seed(0)
    plain = MPNetForMaskedLM(config).train()
    model, axis = copy.deepcopy(plain), tensor_axis()
    apply_tensor_parallel(model, axis, tp_sequence_norms=cut_norms)
    ids = torch.randint(3, 60, (2, 7))
    for one in (plain, model):
        one(input_ids=ids, labels=ids).loss.backward()
    added_up(model, axis)
    expected = {
        name: parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None and "attn.k.bias" not in name  # gradients of key biases are rounding errors
    }
    found = whole_gradients(model, axis)
    return relative_error({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("cut_norms", [False, True])
def test_a_bias_of_all_heads_that_layers_share_gets_its_full_gradient(cut_norms: bool) -> None:
    for gradients in run_ranks(shared_bias_error, 2, cut_norms):
        assert gradients[0] < 1e-4, gradients


class Skipping(nn.Module):
    """Layers of which the last gets the output of the first too, and applies a replicated matrix to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SkipLayer() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](hidden, None)
        return self.layers[2](self.layers[1](first, None), first)  # type: ignore[no-any-return]


class SkipLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if residual is not None:
            hidden = hidden + self.mix(residual)
        return hidden + self.down(functional.gelu(self.up(hidden)))


def test_a_replicated_matrix_gets_the_part_that_an_earlier_layer_returned() -> None:
    options = {r".*\.up": "column", r".*\.down": "row", r".*\.mix": "replicated"}
    for gradients in run_ranks(gradient_error, 2, Skipping, options, True):
        assert gradients[0] < EXACT, gradients


class Shifted(Apart):
    """Layer that adds the product of a replicated matrix and one state to all of its tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.shift = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, states: Any) -> torch.Tensor:
        return super().forward(hidden + self.shift(states), None)


class ShiftedLayers(nn.Module):
    """Layers beside one state that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shifted("sharded") for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        states = hidden[:, :1].cos()
        for layer in self.layers:
            hidden = layer(hidden, states)
        return hidden


def test_a_replicated_matrix_gets_a_state_for_all_tokens_beside_parts_of_unequal_length() -> None:
    options = {r".*\.up": "column", r".*\.down": "row", r".*\.shift": "replicated"}
    for gradients in run_ranks(gradient_error, 2, ShiftedLayers, options, True):
        assert gradients[0] < EXACT, gradients


def blended(kind: str) -> nn.Module:
    return nn.Sequential(Blended(kind), Blended(kind))


class PerHead(nn.Module):
    """Attention with a norm of the queries of each head, and a vector for each distance of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
        self.norm_q, self.before, self.distances = nn.LayerNorm(4), nn.LayerNorm(8), nn.Embedding(9, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.before(hidden)
        made = (self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden))
        query, key, value = (one.unflatten(-1, (-1, 4)).transpose(1, 2) for one in made)
        query, places = self.norm_q(query), torch.arange(hidden.shape[1])
        scores = query @ key.transpose(2, 3)
        scores = scores + torch.einsum("bhqd,qkd->bhqk", query, self.distances(places[:, None] - places + 4))
        return self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("cut_norms", [False, True])
def test_modules_for_the_features_of_a_head_get_full_gradients(cut_norms: bool) -> None:
    for gradients in run_ranks(gradient_error, 2, per_head, {}, cut_norms):
        assert gradients[0] < EXACT, gradients


def per_head() -> nn.Module:
    return nn.Sequential(nn.Sequential(PerHead()), nn.Sequential(PerHead()))


class Residual(nn.Module):
    """Attention beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = PerHead()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.attention(hidden)


class Stages(nn.Module):
    """Blocks in lists inside a list, which the forward calls one by one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        blocks = [[Residual(), Residual()] for _ in range(2)]
        self.stages = nn.ModuleList(nn.ModuleList(two) if kind == "lists" else nn.Sequential(*two) for two in blocks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                hidden = block(hidden)
        return hidden


def test_blocks_of_lists_inside_a_list_share_the_sequence() -> None:
    for gradients in run_ranks(gradient_error, 2, partial(Stages, "lists"), {}, True):
        assert gradients[0] < EXACT, gradients
    with pytest.raises(
        RankError, match=r"around stages\.0, whose modules are called one by one; call stages\.0 itself"
    ):
        run_ranks(gradient_error, 2, partial(Stages, "sequentials"), {}, True)


class Warm(nn.Module):
    """Attention with a temperature in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale = 2, nn.ParameterDict({"temperature": torch.tensor(0.7)})
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = (self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden))
        query, key, value = (one.unflatten(-1, (-1, 4)).transpose(1, 2) for one in made)
        scores = query @ key.transpose(2, 3) * self.scale["temperature"]
        return self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def test_trained_numbers_in_modules_of_attention_are_refused_and_stated_ones_get_full_gradients() -> None:
    with pytest.raises(
        RankError, match=r"can't shard scale\.temperature: it trains one number in attention of 2 heads"
    ):
        run_ranks(gradient_error, 2, Warm, {})
    for key in ("scale", r"scale\.temperature"):
        for gradients in run_ranks(gradient_error, 2, Warm, {key: "partial"}):
            assert gradients[0] < EXACT, gradients


class Added(PerHead):
    """Attention with a residual connection."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + super().forward(hidden)


class Alternating(nn.Module):
    """List of attention and feed-forward layers. Residual connections are inside of them only for the kind "inside"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.outside, attention = kind != "inside", PerHead if kind != "inside" else Added
        self.layers = nn.ModuleList(one() for _ in range(2) for one in (attention, FeedForward))
        if kind == "pairs":
            self.layers = nn.ModuleList(nn.ModuleList([attention(), FeedForward()]) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for one in self.layers:
            for layer in one if isinstance(one, nn.ModuleList) else [one]:
                hidden = hidden + layer(hidden) if self.outside else layer(hidden)
        return hidden


class FeedForward(nn.Module):
    """Feed-forward layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


def test_attention_that_is_a_layer_gets_the_whole_sequence_for_its_norms_and_residual() -> None:
    for gradients in run_ranks(gradient_error, 2, partial(Alternating, "inside"), {}, True):
        assert gradients[0] < EXACT, gradients


@pytest.mark.parametrize("kind", ["outside", "pairs"])
def test_residual_connections_around_layers_that_share_the_sequence_are_explained(kind: str) -> None:
    last = "3" if kind == "outside" else r"0\.1"
    first = "0" if kind == "outside" else r"0\.0"
    with pytest.raises(
        RankError, match=rf"from the first layer, layers\.{first}, to the last one, layers\.{last}, and"
    ):
        run_ranks(gradient_error, 2, partial(Alternating, kind), {}, True)


class _Named(nn.Module):
    """Layers that are called with their hidden states as a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden=hidden)
        return hidden


def test_hidden_states_under_other_keywords_are_refused() -> None:
    with pytest.raises(RankError, match=r"keyword arguments only \(hidden\), .* pass them as the first positional"):
        run_ranks(gradient_error, 2, _Named, {}, True)


class Gated(nn.Module):
    """Two linear layers that take the same input. Their sizes would fit one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.left(hidden) * self.right(hidden)


def test_layers_that_were_taken_for_a_chain_are_named() -> None:
    with pytest.raises(RankError, match=r"can't shard right: its input has 8 features, not the 4 .*tensor_table"):
        run_ranks(gradient_error, 2, Gated, {})


class _ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(input=hidden).relu())


def test_inputs_by_keyword_are_refused() -> None:
    with pytest.raises(RankError, match="a Linear that tensor parallelism shards was called with its input as a keyw"):
        run_ranks(gradient_error, 2, _ByKeyword, {})


@pytest.mark.parametrize(
    "between", [nn.Softmax(-1), nn.LayerNorm(24, elementwise_affine=False)], ids=["softmax", "norm"]
)
def test_a_norm_without_parameters_between_sharded_layers_is_refused(between: nn.Module) -> None:
    """Each rank would normalize over its own features."""
    with pytest.raises(RankError, match=r"can't shard 1: it computes with all 24 input features of 2.*tensor_table"):
        run_ranks(gradient_error, 2, partial(_with_module_between, between), {})


def _with_module_between(between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), between, nn.Linear(24, 8))


class Mixed(nn.Module):
    """User-defined model with mixtures of experts."""

    def __init__(self, expert: nn.Module, **options: Any) -> None:
        super().__init__()
        self.steps = nn.ModuleList(
            nn.ModuleDict(
                {
                    "mlp": nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)),
                    "moe": MoE(
                        8, copy.deepcopy(expert), 4, k=2, drop_tokens=False, top2_2nd_expert_sampling=False, **options
                    ),
                }
            )
            for _ in range(2)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        loss = hidden.new_zeros(())
        for step in self.steps:
            hidden = hidden + step["mlp"](hidden)
            routed, balance, _ = step["moe"](hidden)
            hidden, loss = hidden + routed, loss + balance
        return hidden.square().mean() + 0.1 * loss


def expert_of(kind: str) -> nn.Module:
    if kind in ("stacked", "trained activation"):
        return StackedMLP(8, 16, 4, activation=nn.PReLU() if kind == "trained activation" else None)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def of_mixtures(kind: str, sharded: bool) -> tuple[tuple[float, str], set[str]]:
    """Return the error of tensor-parallel gradients, and the names of sharded parameters of experts and gates."""
    torch.manual_seed(0)
    options = {"use_residual": kind == "residual", "enable_expert_tensor_parallelism": sharded}
    plain, axis = Mixed(expert_of(kind), **options), tensor_axis()
    model = copy.deepcopy(plain)
    apply_tensor_parallel(model, axis)
    hidden = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    plain(hidden).backward(), model(hidden).backward()
    added_up(model, axis)
    error = relative_error(
        whole_gradients(model, axis), {name: parameter.grad for name, parameter in plain.named_parameters()}
    )
    cut = {name for name, parameter in model.named_parameters() if get_placement(parameter).sharded_axes}
    return error, {name for name in cut if ".experts." in name or ".gate." in name}


@pytest.mark.parametrize("kind", ["modules", "residual", "stacked", "trained activation"])
def test_experts_are_sharded_only_if_the_layer_enables_it(kind: str) -> None:
    for sharded in (False, True):
        for error, cut in run_ranks(of_mixtures, 2, kind, sharded):
            assert error[0] < EXACT, error
            assert bool(cut) is sharded and not any(".gate." in name for name in cut)


def of_relative_positions(cut_norms: bool) -> tuple[float, tuple[float, str], list[int]]:
    """Run a T5, with a bias for each head and distance of two tokens, whose decoder attends to the hidden states of its
    encoder. Return the errors and the table's local shape."""
    plain, axis = t5(), tensor_axis()
    model = copy.deepcopy(plain)
    apply_tensor_parallel(model, axis, tp_sequence_norms=cut_norms)
    batch = language(0)
    want, have = plain(**batch).loss, model(**batch).loss
    want.backward(), have.backward()
    added_up(model, axis)
    error = relative_error(
        whole_gradients(model, axis), {name: parameter.grad for name, parameter in plain.named_parameters()}
    )
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    return abs(float(have) - float(want)), error, list(table.shape)


@pytest.mark.parametrize("cut_norms", [False, True])
def test_biases_of_relative_positions_are_sharded_by_heads(cut_norms: bool) -> None:
    for loss, gradients, shape in run_ranks(of_relative_positions, 2, cut_norms):
        assert loss < EXACT
        assert gradients[0] < EXACT, gradients
        assert shape == [32, 2]  # 2 of 4 heads


def placed(name: str) -> tuple[int, int, bool]:
    """Return the number of local elements, the number of all elements, and True if tied weights are still tied."""
    _, model, _, _ = pair(name, {}, {})
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    here = sum(parameter.numel() for parameter in model.parameters())
    return here, sum(torch.Size(get_placement(item).global_shape).numel() for item in model.parameters()), tied


def test_tied_weights_stay_tied_and_memory_is_sharded() -> None:
    (first, full, tied), (second, _, also) = run_ranks(placed, 2, "gpt2")
    norms_and_biases = 2 * (4 * 24 + 24 + 24) + 2 * 24 + 32 * 24  # replicated; 32 * 24 is the embedding of positions
    assert first + second == full + norms_and_biases
    assert tied and also


def of_experts() -> tuple[set[str], bool, list[int]]:
    """Shard the features of experts that are already distributed over ep.

    Return the axes, True if the gathered parameters equal the plain model's, and the local shape.
    """
    mesh = build_mesh(MeshShape(ep=2, tp=2))
    plain, model = build("mixtral"), build("mixtral")
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            span = compute_shard_range(4, 2, mesh.ep.index)
            full = tuple(parameter.shape)
            parameter.data = parameter.data[slice(*span)].clone()
            set_placement(
                parameter, Placement(full, make_ranges_along(full, 0, [span]), frozenset({"ep"}), is_expert=True)
            )
    apply_tensor_parallel(model, mesh.tp)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    placement = get_placement(experts)
    values = dict(plain.named_parameters())
    same = all(
        torch.equal(gather_full_tensor(value.data, get_placement(value), mesh.ep, mesh.tp), values[name])
        for name, value in model.named_parameters()
    )
    assert placement.is_expert
    return set(placement.sharded_axes), same, list(experts.shape)


def test_experts_can_be_distributed_over_other_ranks() -> None:
    result = run_ranks(of_experts, 4)
    assert [shape for _, _, shape in result] == [[2, 32, 32], [2, 16, 32]] * 2  # 2 of 4 experts; 16 or 8 of 24 features
    assert all(cut == {"ep", "tp"} and same for cut, same, _ in result)


def shard_twice() -> None:
    model, axis = build("llama"), tensor_axis()
    apply_tensor_parallel(model, axis)
    apply_tensor_parallel(model, axis)


def test_model_is_sharded_once() -> None:
    with pytest.raises(RankError, match="model.embed_tokens.weight is sharded over tp already; shard a model once"):
        run_ranks(shard_twice, 2)
