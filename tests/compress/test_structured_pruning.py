"""Laws of structured pruning: the smaller model computes what the masked one does, and is an ordinary model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import windlass
from tests.causal_models import VOCABULARY, build, model_of
from tests.tiny_causal_configs import make_tiny_model
from windlass.base.errors import ConfigError, ModelError
from windlass.base.module_modes import evaluating
from windlass.compress import layer_importance
from windlass.compress.layer_importance import remove_layers
from windlass.compress.model_directory import ModelDirectory, build_empty
from windlass.compress.packed_model import load_packed_model
from windlass.compress.prune_directory import load_wide_model
from windlass.compress.prune_model import prune_model
from windlass.compress.pruned_config import PRUNING_ENTRY, describe_widths
from windlass.compress.pruning_units import UnitGroup, choose_units, count_kept, mask_units, remove_units
from windlass.compress.transformer_units import find_transformer_units, fit_module
from windlass.compress.unit_importance import language_loss, unit_scores

IDS = torch.arange(3, 23).view(2, 10)

ROWS = [
    *((name, "ffn") for name in ("llama", "phi3", "gemma3", "cohere", "olmo2", "gpt_neox", "mixtral", "qwen2_moe")),
    *((name, "ffn") for name in ("gpt2", "opt", "bert", "falcon", "gpt_oss")),
    *((name, "heads") for name in ("llama", "qwen3", "phi3", "gemma2", "cohere", "gpt_neox", "gpt2", "opt", "bert")),
    *((name, "groups") for name in ("llama", "qwen3", "gemma3", "mixtral", "phi3")),
]


@pytest.mark.parametrize("name", ["llama", "falcon", "gpt_bigcode"])
def test_the_only_key_head_stays(name: str, tmp_path: Path) -> None:
    model: Any = build(name, **({"num_key_value_heads": 1} if name == "llama" else {})).eval()
    smaller, masked, _ = pruned_and_masked(model, "heads", 1)
    prune_model(model, {"heads": 1}, importance="magnitude")
    model.save_pretrained(tmp_path)
    own = PRUNING_ENTRY in ModelDirectory(tmp_path).config
    loaded = load_packed_model(tmp_path) if own else AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = masked(IDS).logits
        for found in (smaller, model, loaded):
            torch.testing.assert_close(found(IDS).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kinds", [("heads", "groups"), ("groups", "heads")])
def test_heads_with_keys_of_their_own_are_removed_under_both_names(kinds: tuple[str, str], tmp_path: Path) -> None:
    model: Any = build("gpt2", n_head=4).eval()
    for kind in kinds:
        prune_model(model, {kind: 1}, importance="magnitude")
    model.save_pretrained(tmp_path)
    loaded = load_packed_model(tmp_path)
    assert loaded.transformer.h[0].attn.num_heads == 2
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kinds", ["groups heads", "heads groups", "groups heads groups", "heads groups heads"])
def test_heads_that_share_keys_are_removed_before_and_after_their_groups(kinds: str, tmp_path: Path) -> None:
    # the size of a head follows from the hidden size, so that no key of the configuration describes fewer heads
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    sizes |= {"vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4}
    model: Any = model_of("StableLmForCausalLM", **sizes).eval()
    for kind in kinds.split():
        prune_model(model, {kind: 1}, importance="magnitude")
    model.save_pretrained(tmp_path)
    loaded = load_packed_model(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def pruned_and_masked(model: Any, kind: str, share: float = 0.5) -> tuple[Any, Any, list[UnitGroup]]:
    """Return a pruned copy of a model, a copy with the same units set to 0, and the groups of units."""
    groups = find_transformer_units(model, [kind])
    masked, smaller = copy.deepcopy(model), copy.deepcopy(model)
    scores = unit_scores(model, groups, "magnitude")
    kept = [choose_units(group, score, count_kept(group, share)) for group, score in zip(groups, scores, strict=True)]
    for group, one in zip(groups, kept, strict=True):
        mask_units(masked, group, one)
    remove_units(smaller, list(zip(groups, kept, strict=True)))
    for group, one in zip(groups, kept, strict=True):
        fit_module(smaller, group, len(one[group.parts[0]]))
    describe_widths(smaller, [(group, len(one[group.parts[0]])) for group, one in zip(groups, kept, strict=True)])
    return smaller, masked, groups


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_the_pruned_model_is_the_masked_one(name: str, kind: str, tmp_path: Path) -> None:
    model: Any = (
        build(name, num_attention_heads=4, num_key_value_heads=4 if name in ("gpt_neox",) else 2)
        if (name not in ("gpt2", "falcon"))
        else build(name, **({"n_head": 4} if name == "gpt2" else {}))
    )
    model.eval()
    smaller, masked, groups = pruned_and_masked(model, kind)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())
    assert len(groups) >= model.config.num_hidden_layers
    with torch.no_grad():
        torch.testing.assert_close(smaller(IDS).logits, masked(IDS).logits, rtol=1e-5, atol=1e-5)
    # the same by `prune_model`; then saved, loaded and trained
    prune_model(model, {kind: 0.5}, importance="magnitude")
    with torch.no_grad():
        expected = masked(IDS).logits
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "small")
    own = PRUNING_ENTRY in ModelDirectory(tmp_path / "small").config
    assert own == (kind == "heads" and name in ("gpt_neox", "gpt2", "opt", "bert")), "families without a head size"
    source = AutoModelForCausalLM if not own else None
    found = (
        source.from_pretrained(tmp_path / "small")
        if source is not None
        else windlass.from_pretrained(AutoModelForCausalLM, tmp_path / "small")
    )
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    found.requires_grad_(True)
    language_loss(found, IDS).backward()
    assert all(p.grad is not None for n, p in found.named_parameters() if "experts" not in n)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_removed_experts_are_never_chosen(name: str, tmp_path: Path) -> None:
    model: Any = build(name).eval()
    groups = find_transformer_units(model, ["experts"])
    masked = copy.deepcopy(model)
    scores = unit_scores(model, groups, "activation", [IDS])
    for group, score in zip(groups, scores, strict=True):
        kept = choose_units(group, score, count_kept(group, 1))
        gone = [one for one in range(group.units) if one not in kept[None].tolist()]
        router = masked.get_submodule(group.name.rpartition(".")[0])
        linear = next(m for n, m in router.named_modules() if n in ("gate", "router"))
        linear.register_buffer("mask", torch.zeros(group.units).index_fill_(0, torch.tensor(gone), float("-inf")))
        before = torch.nn.functional.linear
        linear.forward = _masked_forward(linear, before)
    report = prune_model(model, {"experts": 1}, batches=[IDS])
    assert report.units["experts"] == (4 * len(groups), 3 * len(groups))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, masked(IDS).logits, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "small")
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="experts = 2 leaves 1 of the 3 of .* which needs 2"):
        prune_model(model, {"experts": 2}, importance="magnitude")


def _masked_forward(module: Any, linear: Any) -> Any:
    """Return a router's forward that adds `module.mask`, -inf for removed experts, to its logits."""
    original = type(module).forward

    def forward(hidden: torch.Tensor) -> Any:
        def masked(*arguments: Any) -> torch.Tensor:
            return linear(*arguments) + module.mask  # type: ignore[no-any-return]

        torch.nn.functional.linear = masked
        try:
            return original(module, hidden)
        finally:
            torch.nn.functional.linear = linear

    return forward


def test_importances_equal_their_formulas() -> None:
    model: Any = build("llama").eval()
    groups = find_transformer_units(model, ["ffn"])
    name = groups[1].name
    mlp = model.get_submodule(name)
    inputs: list[torch.Tensor] = []
    handle = mlp.down_proj.register_forward_pre_hook(lambda module, given: inputs.append(given[0].detach()))
    loss = language_loss(model, IDS)
    handle.remove()
    loss.backward()
    weight = mlp.down_proj.weight
    x = inputs[0].flatten(0, 1)
    wanted = (weight.detach().square().sum(0) * x.square().mean(0)).sqrt()
    torch.testing.assert_close(unit_scores(model, groups, "activation", [IDS])[1][None], wanted)
    taylor = (weight.detach() * weight.grad).sum(0).square()
    torch.testing.assert_close(unit_scores(model, groups, "taylor", [IDS])[1][None], taylor, rtol=1e-3, atol=1e-9)
    squares = mlp.gate_proj.weight.square().sum(1) + mlp.up_proj.weight.square().sum(1) + weight.square().sum(0)
    torch.testing.assert_close(unit_scores(model, groups, "magnitude")[1][None], squares.detach().sqrt())


@pytest.mark.parametrize("importance", ["magnitude", "activation", "taylor"])
def test_units_without_any_effect_are_removed_first(importance: str) -> None:
    model: Any = build("mixtral", num_attention_heads=4).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj[:, :, 5:13] = 0
            layer.mlp.experts.gate_up_proj[:, 5:13] *= 1e-3
            layer.mlp.experts.gate_up_proj[:, 29:37] *= 1e-3
            layer.self_attn.o_proj.weight[:, 8:16] = 0
            layer.self_attn.o_proj.weight[:, 24:32] = 0
            layer.self_attn.q_proj.weight[8:16] *= 1e-3
            layer.self_attn.q_proj.weight[24:32] *= 1e-3
        expected = model(IDS).logits
        prune_model(model, {"ffn": 8, "heads": 0.5}, importance=importance, batches=[IDS])
        assert model.config.intermediate_size == 16 and model.config.num_attention_heads == 2
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_classifier_and_tied_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    model: Any = BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, num_labels=3, **sizes)).eval()
    batch = {"input_ids": IDS, "labels": torch.tensor([0, 2])}
    report = prune_model(model, {"layers": 1, "heads": 1, "ffn": 0.25}, importance="taylor", batches=[batch])
    assert report.units == {"layers": (4, 3), "heads": (12, 9), "ffn": (144, 108)} and len(report.layers) == 1
    assert report.parameters_after < report.parameters_before
    model.save_pretrained(tmp_path / "small")
    found = windlass.from_pretrained(AutoModelForSequenceClassification, tmp_path / "small")
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    directory = ModelDirectory(tmp_path / "small")
    assert directory.config["num_hidden_layers"] == 3 and directory.config["intermediate_size"] == 36
    tied: Any = build("llama", tie_word_embeddings=True).eval()
    prune_model(tied, {"groups": 1}, importance="magnitude")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    # The pruned model, whose configuration has windlass's own widths, is pruned again.
    again = build_empty(directory, AutoModelForSequenceClassification)
    assert [tuple(p.shape) for p in again.parameters()] == [tuple(p.shape) for p in model.parameters()]
    prune_model(model, {"heads": 1}, importance="magnitude")
    model.save_pretrained(tmp_path / "smaller")
    found = windlass.from_pretrained(AutoModelForSequenceClassification, tmp_path / "smaller")
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


class Residual(nn.Module):
    """Convolutions with a norm, a residual, a depthwise layer, and a classifier after flattening."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Sequential(nn.Conv2d(8, 12, 1), nn.ReLU(), nn.Conv2d(12, 8, 3, padding=1))
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.hidden = nn.Linear(8 * 4, 10)
        self.out = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.depthwise(x + self.inner(x))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        out: torch.Tensor = self.out(nn.functional.gelu(self.hidden(x)))
        return out


def test_channel_units_of_plain_modules() -> None:
    from windlass.compress.channel_units import find_channel_units

    torch.manual_seed(0)
    model = Residual()
    images = torch.randn(6, 3, 4, 4)
    model(images)  # changes the running statistics
    model.eval()
    groups = {group.name: group for group in find_channel_units(model, images)}
    assert {name: (one.kind, one.units) for name, one in groups.items()} == {
        "stem": ("channels", 8),
        "inner.0": ("channels", 12),
        "hidden": ("ffn", 10),
    }
    coupled = {tensor.name for tensor in groups["stem"].tensors}
    assert {"stem.weight", "norm.running_var", "inner.0.weight", "inner.2.weight", "depthwise.weight"} <= coupled
    assert next(t for t in groups["stem"].tensors if t.name == "hidden.weight").index.shape == (8, 4)
    masked, smaller = copy.deepcopy(model), copy.deepcopy(model)
    kept = {name: {None: torch.arange(0, group.units, 2)} for name, group in groups.items()}
    for name, group in groups.items():
        mask_units(masked, group, kept[name])
    remove_units(smaller, [(group, kept[name]) for name, group in groups.items()])
    assert smaller.depthwise.groups == 4 and smaller.hidden.in_features == 16 and smaller.norm.num_features == 4
    torch.testing.assert_close(smaller(images), masked(images), rtol=1e-5, atol=1e-5)

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    report = prune_model(
        model, {"channels": 0.25, "ffn": 0.5}, importance="taylor", batches=[(images, torch.arange(6) % 5)], loss=loss,
        example=images,
    )  # fmt: skip
    assert report.units == {"channels": (20, 15), "ffn": (10, 5)} and model.out.in_features == 5


class Concatenation(nn.Module):
    """Two prunable layers of different widths and the input, concatenated before a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(23)
        self.inner = nn.Conv2d(23, 6, 1)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.cat([torch.relu(self.first(x)), torch.relu(self.second(x)), x], 1)
        out: torch.Tensor = self.out(torch.relu(self.inner(torch.relu(self.norm(parts)))))
        return out


class Tied(nn.Module):
    """Layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        self.second.weight = self.first.weight
        self.other, self.own = nn.Linear(8, 3), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x)) + torch.relu(self.second(x))
        out: torch.Tensor = self.out(hidden) + self.other(torch.relu(self.second(x)))
        return out + self.out(torch.relu(self.own(x)))


@pytest.mark.parametrize(
    ("model", "example", "names"),
    [
        (Concatenation, torch.randn(2, 3, 6, 6), ["first", "second", "inner"]),
        (Tied, torch.randn(2, 4), ["first"]),
    ],
)
def test_tensors_of_several_groups_lose_the_units_of_each(
    model: type[nn.Module], example: torch.Tensor, names: list[str]
) -> None:
    from windlass.compress.channel_units import find_channel_units

    torch.manual_seed(0)
    whole = model()
    whole(example)
    whole.eval()
    groups = find_channel_units(whole, example)
    assert [group.name for group in groups] == names
    masked, smaller = copy.deepcopy(whole), copy.deepcopy(whole)
    kept = [{None: torch.arange(place % 2, group.units, 2 + place)} for place, group in enumerate(groups)]
    for group, one in zip(groups, kept, strict=True):
        mask_units(masked, group, one)
    remove_units(smaller, list(zip(groups, kept, strict=True)))
    torch.testing.assert_close(smaller(example), masked(example), rtol=1e-5, atol=1e-5)
    if isinstance(smaller, Tied):
        assert smaller.second.weight is smaller.first.weight and smaller.second.out_features == 4


class Fixed(nn.Module):
    """Layers `first` and `second`, whose channels must stay for the reason `kind`, and the prunable layer `inner`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner, self.out = nn.Linear(8, 12), nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if self.kind == "parameter":
            hidden = hidden * self.scale
        elif self.kind == "input":
            hidden = hidden + x
        elif self.kind == "size":
            hidden = hidden.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
        hidden = self.second(hidden) + self.second(x) if self.kind == "second call" else self.second(hidden)
        out: torch.Tensor = self.out(torch.relu(self.inner(torch.tanh(hidden).sum(-1, keepdim=True).expand(-1, 8))))
        return out


@pytest.mark.parametrize("kind", ["parameter", "input", "size", "second call"])
def test_channels_that_meet_values_of_a_fixed_size_stay(kind: str) -> None:
    torch.manual_seed(0)
    model, example = Fixed(kind), torch.randn(2, 8)
    report = prune_model(
        model, {"ffn": 4}, importance="magnitude", loss=lambda module, batch: module(batch).sum(), example=example
    )
    assert report.units == {"ffn": (12, 8)} and model.inner.out_features == 8
    model(example)


class Noisy(nn.Module):
    """Model that draws random numbers in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(torch.relu(self.inner(x)))
        return out + torch.randn_like(out)


class OneValue(nn.Module):
    """Perceptron with one output feature; `result` makes one value for each sample, or for the batch."""

    def __init__(self, result: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.result = nn.Linear(4, 6), nn.Linear(6, 1), result

    def forward(self, x: Tensor) -> Tensor:
        return self.result(self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize("result", [lambda y: y.squeeze(-1), torch.mean, torch.Tensor.flatten])
def test_units_of_a_model_with_one_value_are_found(result: Callable[[Tensor], Tensor]) -> None:
    from windlass.compress.channel_units import find_channel_units

    assert [(group.name, group.units) for group in find_channel_units(OneValue(result), torch.randn(3, 4))] == [
        ("up", 6)
    ]


def test_layers_that_run_on_single_samples_keep_their_channels() -> None:
    from windlass.compress.channel_units import find_channel_units

    each = OneValue(lambda y: y)
    each.forward = lambda x: torch.stack([OneValue.forward(each, row) for row in x])  # type: ignore[method-assign]
    assert find_channel_units(each, torch.randn(3, 4)) == []


def test_units_of_a_model_that_draws_random_numbers_are_found() -> None:
    from windlass.compress.channel_units import find_channel_units

    torch.manual_seed(0)
    assert [group.name for group in find_channel_units(Noisy(), torch.randn(2, 8))] == ["inner"]


class Adapter(nn.Linear):
    """Layer whose weight contains an addend in eval mode only."""

    def train(self, mode: bool = True) -> Adapter:
        if mode != self.training:
            self.weight.data.add_(-1.0 if mode else 1.0)
        super().train(mode)
        return self


def test_the_mode_is_restored_by_the_method_of_a_class() -> None:
    model = nn.Sequential(Adapter(4, 4), nn.ReLU())
    before = model[0].weight.detach().clone()
    with evaluating(model):
        torch.testing.assert_close(model[0].weight.detach(), before + 1)
    torch.testing.assert_close(model[0].weight.detach(), before)
    assert model[0].training


@pytest.mark.parametrize("removed", [4, 40])
def test_each_module_keeps_its_mode(removed: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).train()
    model[0].eval()
    with pytest.raises(ConfigError) if removed == 40 else nullcontext():
        prune_model(model, {"ffn": removed}, importance="magnitude", example=torch.randn(2, 8))
    assert [module.training for module in model] == [False, True, True, True] and model.training


def test_encoders_of_torch_keep_their_attention() -> None:
    from windlass.compress.channel_units import find_channel_units

    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3))
    groups = find_channel_units(model, torch.randn(2, 5, 16))
    assert [(group.name, group.units) for group in groups] == [(f"0.layers.{n}.linear1", 32) for n in (0, 1)]


def test_bad_input_is_refused_with_the_reason() -> None:
    model: Any = build("llama")
    with pytest.raises(ConfigError, match="heads = 3, but model.layers.0.self_attn has 2 of them for each key head"):
        prune_model(model, {"heads": 3, "layers": 1}, importance="magnitude", batches=[IDS])
    assert len(model.model.layers) == 2, "nothing is removed before all kinds were checked"
    with pytest.raises(ConfigError, match="prune layers = 2, but the model has 2 layers"):
        prune_model(model, {"layers": 2}, batches=[IDS])
    with pytest.raises(ConfigError, match="measured on a calibration text"):
        prune_model(model, {"layers": 1})
    with pytest.raises(ConfigError, match="activation needs a calibration text"):
        prune_model(model, {"ffn": 0.5})
    with pytest.raises(ConfigError, match="prune has rows; it supports layers, experts"):
        prune_model(model, {"rows": 0.5})
    with pytest.raises(ConfigError, match="importance is 'l1'"):
        prune_model(model, {"ffn": 0.5}, importance="l1")
    with pytest.raises(ConfigError, match=r"ffn = 1.5; write a share below 1, or a whole number"):
        prune_model(model, {"ffn": 1.5})
    for wrong in (float("nan"), float("inf"), -0.5):
        with pytest.raises(ConfigError, match=r"ffn = \S+; write a share below 1, or a whole number"):
            prune_model(model, {"ffn": wrong}, importance="magnitude")
    with pytest.raises(ConfigError, match=r"heads = 0.2 removes none of the 2 heads of .* with one key head"):
        prune_model(model, {"heads": 0.2}, importance="magnitude")
    with pytest.raises(ConfigError, match=r"layers = 0.2 removes none of the 2 layers"):
        prune_model(model, {"layers": 0.2}, batches=[IDS])
    with pytest.raises(ConfigError, match=r"ffn = 3 leaves 21 features of the experts .* in multiples of 8"):
        prune_model(build("mixtral"), {"ffn": 3}, importance="magnitude")
    with pytest.raises(ConfigError, match="has no experts that can be removed"):
        prune_model(model, {"experts": 1}, importance="magnitude")
    with pytest.raises(ConfigError, match="needs example inputs"):
        prune_model(nn.Sequential(nn.Linear(2, 2)), {"ffn": 0.5}, importance="magnitude")
    with pytest.raises(ModelError, match=r"the heads of .*self_attn cannot be removed: the features of all heads"):
        prune_model(build("olmo2"), {"heads": 1}, importance="magnitude")


@pytest.mark.parametrize("failing", [8, 10, 11, 12, 13])
def test_a_model_is_as_before_if_its_pruning_fails(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss fails while layers are chosen, while one is merged, before heads and before features are removed."""
    calls = 0

    def loss(module: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RuntimeError("no loss")
        return language_loss(module, batch) / calls  # each trial seems better, so that layers are merged

    monkeypatch.setattr(layer_importance, "_check_removed", lambda *_: None)
    model: Any = build("gpt2", n_head=4, n_layer=3).train()
    before, config = copy.deepcopy(model), model.config.to_dict()
    with pytest.raises(RuntimeError, match="no loss"):
        prune_model(model, {"layers": 1, "heads": 1, "ffn": 0.5}, importance="taylor", batches=[IDS], loss=loss)
    assert str(model) == str(before) and model.config.to_dict() == config and model.training
    assert model.transformer.h[2].attn.layer_idx == 2 and model.transformer.h[0].attn.num_heads == 4
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    prune_model(model, {"layers": 1, "heads": 1, "ffn": 0.5}, importance="magnitude", batches=[IDS])
    assert len(model.transformer.h) == 2 and torch.isfinite(model(IDS).logits).all()


@pytest.mark.parametrize("kind", ["heads", "groups"])
def test_heads_of_a_configuration_with_other_values_in_each_layer_are_removed(kind: str, tmp_path: Path) -> None:
    """Its `head_dim` differs between layers, and reading it from the configuration of the model raises an error."""
    torch.manual_seed(0)
    model: Any = make_tiny_model("gemma4_unified_text").eval()
    prune_model(model, {kind: 1}, importance="magnitude")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_model_that_no_configuration_describes_is_as_before() -> None:
    sparse: Any = build("qwen2_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[]).eval()
    expected = sparse(IDS).logits
    with pytest.raises(ModelError, match="whose kind follows from their number"):
        prune_model(sparse, {"layers": 1}, batches=[IDS])
    assert len(sparse.model.layers) == sparse.config.num_hidden_layers == 4
    assert torch.equal(sparse(IDS).logits, expected)


def test_sizes_stay_multiples_that_kernels_like() -> None:
    group = UnitGroup("mlp", "ffn", 11008, ())
    assert count_kept(group, 0.25) == 8192 and count_kept(group, 0.3) % 128 == 0
    assert count_kept(UnitGroup("mlp", "ffn", 48, ()), 0.25) == 36
    assert count_kept(group, 100) == 10908, "a number is taken as it is"


def test_config_lists_unrelated_to_layers_are_unchanged() -> None:
    model: Any = build("llama", num_hidden_layers=3, eos_token_id=[1, 2, 3])
    remove_layers(model, [1])
    assert model.config.eos_token_id == [1, 2, 3] and model.config.num_hidden_layers == 2


def test_layers_whose_function_follows_from_their_number_are_not_removed() -> None:
    sparse: Any = build("qwen2_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[])
    with pytest.raises(ModelError, match="whose kind follows from their number; prune other kinds"):
        prune_model(sparse, {"layers": 1}, batches=[IDS])
    scaled: Any = build("gpt2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ModelError, match="divide their attention scores by their number"):
        prune_model(scaled, {"layers": 1}, batches=[IDS])


def test_layers_are_removed_after_heads(tmp_path: Path) -> None:
    model: Any = build("gpt2", n_head=4, n_layer=3).eval()
    prune_model(model, {"heads": 1}, importance="magnitude")
    prune_model(model, {"layers": 1}, batches=[IDS])
    model.save_pretrained(tmp_path / "small")
    found = windlass.from_pretrained(AutoModelForCausalLM, tmp_path / "small")
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert all(one.requires_grad for one in load_wide_model(ModelDirectory(tmp_path / "small")).parameters())


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_a_number_of_heads_that_does_not_divide_the_hidden_size_is_loaded(name: str, tmp_path: Path) -> None:
    model: Any = build(name, num_attention_heads=4, num_key_value_heads=4).eval()
    prune_model(model, {"heads": 1}, importance="magnitude")
    model.save_pretrained(tmp_path / "small")
    assert PRUNING_ENTRY in ModelDirectory(tmp_path / "small").config, "transformers refuses 3 heads of 32 features"
    found = windlass.from_pretrained(AutoModelForCausalLM, tmp_path / "small")
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
