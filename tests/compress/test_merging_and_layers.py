"""Tests of layer importance, merging and low rank, against their formulas."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.causal_models import build
from tests.tiny_causal_configs import make_tiny_model
from windlass.base.errors import ConfigError, ModelError
from windlass.compress import layer_importance
from windlass.compress.block_calibration import InputStatistics
from windlass.compress.conv1d_layers import use_linear_class
from windlass.compress.layer_importance import (
    block_influences,
    choose_layers,
    every_other,
    losses_without,
    mean_loss,
    remove_layers,
    shorten_layers,
    skip_layers,
)
from windlass.compress.low_rank import factorize_linear_layers, low_rank_factors, rank_of_share
from windlass.compress.low_rank_config import apply_ranks
from windlass.compress.merge_models import dare_merge, linear_merge, merge_models, spherical_merge, ties_merge
from windlass.compress.packed_model import load_packed_model
from windlass.compress.prune_model import prune_model
from windlass.kernels.packed_linear import PackedLinear

BATCHES = [torch.arange(3, 23).view(2, 10)]


def deep(name: str = "llama", layers: int = 4, **changes: Any) -> Any:
    return build(name, **({"n_layer": layers} if name == "gpt2" else {"num_hidden_layers": layers}), **changes).eval()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gpt_neox", "qwen2_moe"])
def test_a_removed_layer_is_a_skipped_one(name: str, tmp_path: Any) -> None:
    model = deep(name)
    with skip_layers(model, [0, 2]), torch.no_grad():
        expected = model(BATCHES[0], use_cache=False).logits
    remove_layers(model, [0, 2])
    with torch.no_grad():
        torch.testing.assert_close(model(BATCHES[0]).logits, expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(found(BATCHES[0]).logits, expected, rtol=1e-5, atol=1e-5)
        generated = found.generate(BATCHES[0][:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 13), "the cache counts the layers that are there"


def test_influence_and_losses_equal_plain_forwards() -> None:
    model = deep(layers=3)
    with torch.no_grad():
        hidden = model.model(BATCHES[0], output_hidden_states=True, use_cache=False).hidden_states
        last: list[torch.Tensor] = []
        handle = model.model.layers[-1].register_forward_hook(lambda module, given, out: last.append(out))
        model(BATCHES[0], use_cache=False)
        handle.remove()
    states = [*hidden[:3], last[0] if isinstance(last[0], torch.Tensor) else last[0][0]]
    wanted = [1 - float(nn.functional.cosine_similarity(a, b, dim=-1).mean()) for a, b in itertools.pairwise(states)]
    assert block_influences(model, BATCHES) == pytest.approx(wanted, abs=1e-5)
    for number, found in losses_without(model, BATCHES).items():
        smaller = copy.deepcopy(model)
        remove_layers(smaller, [number])
        assert found == pytest.approx(mean_loss(smaller, BATCHES), abs=1e-5)


def test_layers_without_effect_are_chosen() -> None:
    model = deep(layers=5)
    with torch.no_grad():
        for number in (1, 4):
            model.model.layers[number].self_attn.o_proj.weight.zero_()
            model.model.layers[number].mlp.down_proj.weight.zero_()
    with torch.no_grad():
        wanted = model(BATCHES[0], use_cache=False).logits

    def distance(one: Any, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(one(batch, use_cache=False).logits, wanted)

    assert choose_layers(model, 2, BATCHES, distance) == [1, 4]


def test_a_text_without_a_loss_is_refused() -> None:
    one_token = [torch.arange(4, 8)[:, None]]  # nothing to predict
    with pytest.raises(ConfigError, match="the loss on the calibration text is nan.*rows of at least two tokens"):
        choose_layers(deep(layers=5), 2, one_token)


@pytest.mark.parametrize("kind", ["greedy", "influence", "spaced"])
def test_the_layers_of_the_least_measured_loss_are_chosen(kind: str) -> None:
    """A table gives the loss for each set of skipped layers, so that each way to choose layers is the best in turn."""
    model = deep(layers=5)

    def skipped(one: Any, batch: torch.Tensor) -> frozenset[int]:
        states: list[torch.Tensor] = []
        handles = [
            module.register_forward_pre_hook(lambda module, given: states.append(given[0]))
            for module in (*one.model.layers, one.model.norm)
        ]
        one(batch, use_cache=False)
        for handle in handles:
            handle.remove()
        return frozenset(n for n, (a, b) in enumerate(itertools.pairwise(states)) if torch.equal(a, b))

    influences = block_influences(model, BATCHES)
    least = sorted(range(5), key=lambda number: influences[number])[:2]
    pairs = {"spaced": frozenset(every_other(5, 2)), "influence": frozenset(least)}
    first = next(number for number in range(5) if not any(number in pair for pair in pairs.values()))
    second = next(number for number in range(5) if number != first and {first, number} not in pairs.values())
    pairs["greedy"] = frozenset((first, second))
    table = {frozenset((first,)): 1.0, pairs["greedy"]: 5.0, frozenset(): 0.0}
    table |= {pair: 6.0 for name, pair in pairs.items() if name != "greedy"}
    table[pairs[kind]] = 2.0

    def loss(one: Any, batch: torch.Tensor) -> torch.Tensor:
        return torch.tensor(table.get(skipped(one, batch), 9.0))

    assert len(set(pairs.values())) == 3, "the three ways differ"
    assert choose_layers(model, 2, BATCHES, loss) == sorted(pairs[kind])


def test_layers_are_merged_only_where_that_is_better() -> None:
    model = deep(layers=5)
    chosen = choose_layers(model, 2, BATCHES)
    with skip_layers(model, chosen):
        before = mean_loss(model, BATCHES)
    steps = shorten_layers(model, 2, BATCHES)
    assert len(steps) == 2 and len(model.model.layers) == model.config.num_hidden_layers == 3
    assert mean_loss(model, BATCHES) <= before + 1e-6, "merged only where that is better"
    assert all(f"layer {number}: " in step for number, step in zip(sorted(chosen), steps, strict=True))
    assert float(steps[-1].rpartition(" ")[2]) == pytest.approx(mean_loss(model, BATCHES), abs=1e-4)


def test_evenly_spaced_layers_are_different_and_keep_the_ends_if_possible() -> None:
    assert every_other(12, 3) == [2, 5, 9] and every_other(6, 2) == [1, 3] and every_other(3, 2) == [0, 2]
    for total in range(1, 20):
        for count in range(1, total):
            found = every_other(total, count)
            assert found == sorted(set(found)) and len(found) == count, (total, count)
            assert count > total - 2 or found[0] > 0 and found[-1] < total - 1, (total, count)


@pytest.mark.parametrize(("name", "number", "said"), [("zamba2", 0, "KeyError"), ("glm_moe_dsa", 2, "its loss is")])
def test_layers_on_which_others_depend_are_not_removed(
    name: str, number: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_importance, "choose_layers", lambda *_: [number])
    with pytest.raises(ModelError, match=f"layer {number} of this .* others depend on it: without it .*{said}"):
        shorten_layers(make_tiny_model(name), 1, [torch.arange(5, 29).view(2, 12)])


def test_steps_name_layers_by_the_numbers_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([1.0, 0.5, 0.5, 1.0, 0.5, 0.9, 0.5])  # layers 0 and 2: removed, merged into each neighbour, check
    monkeypatch.setattr(layer_importance, "choose_layers", lambda *_: [0, 2])
    monkeypatch.setattr(layer_importance, "mean_loss", lambda *_: next(losses))
    steps = shorten_layers(deep(layers=4), 2, BATCHES)
    assert steps == ["layer 0: merged into 1, loss 0.5000", "layer 2: merged into 1, loss 0.5000"]


def test_merged_layers_are_the_weighted_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([1.0, 0.9, 0.5, 0.5])  # without layer 1, with it merged into 0, into 2; final loss
    monkeypatch.setattr(layer_importance, "choose_layers", lambda *_: [1])
    monkeypatch.setattr(layer_importance, "mean_loss", lambda *_: next(losses))
    model = deep(layers=3)
    one, two = (dict(copy.deepcopy(model.model.layers[n]).named_parameters()) for n in (1, 2))
    shorten_layers(model, 1, BATCHES)
    for name, parameter in model.model.layers[1].named_parameters():
        torch.testing.assert_close(parameter.detach(), 0.75 * two[name].detach() + 0.25 * one[name].detach())
    assert len(model.model.layers) == 2 and model.model.layers[1].self_attn.layer_idx == 1


def test_layers_with_other_shapes_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_importance, "choose_layers", lambda *_: [1])
    monkeypatch.setattr(layer_importance, "mean_loss", lambda *_: 1.0)
    model = deep(layers=3)
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(2, 2))
    before = copy.deepcopy(model.model.layers[2].state_dict())
    assert "merged" not in shorten_layers(model, 1, BATCHES)[0]
    assert all(torch.equal(value, before[name]) for name, value in model.model.layers[1].state_dict().items())


def test_merging_equals_the_formulas() -> None:
    torch.manual_seed(0)
    base, one, two = (torch.randn(6, 5) for _ in range(3))
    torch.testing.assert_close(linear_merge([one, two], [1, 3]), 0.25 * one + 0.75 * two)
    angle = torch.acos((one * two).sum() / (one.norm() * two.norm()))
    wanted = (torch.sin(0.7 * angle) * one + torch.sin(0.3 * angle) * two) / torch.sin(angle)
    torch.testing.assert_close(spherical_merge(one, two, 0.3), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(spherical_merge(one, 2 * one, 0.5), 1.5 * one)
    found = ties_merge(base, [one, two], [1.0, 0.5], 0.4)
    vectors = []
    for tensor in (one, two):
        flat = (tensor - base).flatten().tolist()
        kept = sorted(range(30), key=lambda place: -abs(flat[place]))[:12]
        vectors.append([flat[place] if place in kept else 0.0 for place in range(30)])
    for place in range(30):
        weighted = [vectors[0][place], 0.5 * vectors[1][place]]
        sign = (sum(weighted) > 0) - (sum(weighted) < 0)
        same = [(w, value) for w, value in zip((1.0, 0.5), weighted, strict=True) if value * sign > 0]
        merged = sum(value for _, value in same) / sum(w for w, _ in same) if same else 0.0
        assert float(found.flatten()[place]) == pytest.approx(float(base.flatten()[place]) + merged, abs=1e-5)
    large = torch.ones(200, 200)
    thinned = dare_merge(torch.zeros(200, 200), [large], [2.0], 0.25)
    assert set(thinned.unique().tolist()) == {0.0, 8.0} and float(thinned.mean()) == pytest.approx(2.0, rel=0.05)
    torch.testing.assert_close(dare_merge(base, [one, two], [0.5, 0.5], 1.0), 0.5 * (one + two))


@pytest.mark.parametrize("method", ["linear", "ties", "dare"])
def test_a_merge_stays_on_the_device_of_its_models(method: str) -> None:
    base, one, two = (torch.empty(6, 5, device="meta") for _ in range(3))  # stands in for an accelerator
    if method == "linear":
        found = linear_merge([one, two], [1, 3])
    else:
        found = (ties_merge if method == "ties" else dare_merge)(base, [one, two], [1.0, 0.5], 0.4)
    assert found.is_meta and found.shape == base.shape


def test_models_are_merged_whole_or_refused() -> None:
    base, one, two = (build("llama", seed) for seed in range(3))
    found = copy.deepcopy(base)
    found.load_state_dict(merge_models([one, two], weights=[1, 1]))
    for name, parameter in found.named_parameters():
        wanted = 0.5 * (one.get_parameter(name) + two.get_parameter(name)).detach()
        torch.testing.assert_close(parameter.detach(), wanted)
    for method in ("ties", "dare"):
        assert merge_models([one, two], method, base=base).keys() == base.state_dict().keys()
        with pytest.raises(ConfigError, match=f"{method} needs base"):
            merge_models([one, two], method)
    assert merge_models([one, two], "slerp").keys() == base.state_dict().keys()
    with pytest.raises(ConfigError, match="two models, not 3"):
        merge_models([one, two, base], "slerp")
    with pytest.raises(ConfigError, match="method is 'mean'"):
        merge_models([one, two], "mean")
    with pytest.raises(ConfigError, match="one each"):
        merge_models([one, two], weights=[1.0])
    with pytest.raises(ConfigError, match="density is 0"):
        merge_models([one, two], "ties", base=base, density=0)
    with pytest.raises(ModelError, match="merge models of one architecture"):
        merge_models([one, build("llama", intermediate_size=40)])


def test_packed_weights_are_merged_only_if_they_are_equal() -> None:
    pair: list[Any] = [nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 4)) for _ in range(2)]
    one, two = pair
    same = PackedLinear.from_linear(one[0])
    one[0], other = copy.deepcopy(same), two[0]
    two[0] = copy.deepcopy(same)
    with torch.no_grad():
        two[0].bias.add_(1)
    merged = merge_models([one, two])  # as of models with adapters beside one packed base
    torch.testing.assert_close(merged["0.bias"], one[0].bias + 0.5)
    torch.testing.assert_close(merged["1.weight"], (one[1].weight + two[1].weight) / 2)
    two[0] = PackedLinear.from_linear(other)
    with pytest.raises(ModelError, match="layer '0' has packed weights, which differ"):
        merge_models([one, two])


def test_factors_are_the_best_of_their_rank() -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 20)
    inputs = torch.randn(100, 5) @ torch.randn(5, 20) + 0.1 * torch.randn(100, 20)
    hessian = inputs.t() @ inputs
    up, down = low_rank_factors(weight, 4)
    values = torch.linalg.svdvals(weight)
    assert float((up @ down - weight).norm()) == pytest.approx(float(values[4:].norm()), rel=1e-4)
    aware_up, aware_down = low_rank_factors(weight, 4, hessian)
    error = (inputs @ (aware_up @ aware_down - weight).t()).norm()
    factor = torch.linalg.cholesky(hessian.double())
    wanted = torch.linalg.svdvals(weight.double() @ factor)[4:].norm()
    assert float(error) == pytest.approx(float(wanted), rel=1e-3)
    assert error < 0.9 * (inputs @ (up @ down - weight).t()).norm()
    whole_up, whole_down = low_rank_factors(weight, 12, hessian)
    torch.testing.assert_close(whole_up @ whole_down, weight, rtol=1e-3, atol=1e-3)
    common = torch.randn(8, 512) + 5  # fewer inputs than features: rounding makes their Hessian indefinite
    few = low_rank_factors(torch.randn(64, 512), 16, common.t() @ common)
    assert all(bool(torch.isfinite(factor).all()) for factor in few)
    assert InputStatistics.of(4, "meta").hessian.is_meta, "on the device of the inputs"
    with pytest.raises(ConfigError, match="rank is 13"):
        low_rank_factors(weight, 13)


def test_factorized_models_are_smaller_and_train() -> None:
    model = deep()
    wide = copy.deepcopy(model)
    before = sum(parameter.numel() for parameter in model.parameters())
    model.model.train()
    ranks = factorize_linear_layers(model, 0.5, lambda name: "mlp" in name, batches=BATCHES)
    assert len(ranks) == 12 and set(ranks.values()) == {rank_of_share(32, 48, 0.5)}
    assert not model.training and all(module.training for module in model.model.modules())
    after = sum(parameter.numel() for parameter in model.parameters())
    assert before - after >= 12 * 32 * 48 // 2
    loss = model(BATCHES[0], labels=BATCHES[0]).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    plain = copy.deepcopy(wide)
    factorize_linear_layers(plain, 0.5, lambda name: "mlp" in name)

    def difference(other: Any) -> float:
        with torch.no_grad():
            return float((other(BATCHES[0]).logits - wide(BATCHES[0]).logits).norm())

    assert difference(model) < difference(plain)
    with pytest.raises(ConfigError, match="share is 1.5"):
        factorize_linear_layers(wide, 1.5)


class Repeated(nn.Module):
    """Model that uses one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = self.first

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu())
        return out


def test_a_layer_used_in_two_places_is_factorized_in_both() -> None:
    torch.manual_seed(0)
    model = Repeated()
    before = sum(parameter.numel() for parameter in model.parameters())
    assert factorize_linear_layers(model, 0.5) == {"first": 4}
    assert model.last is model.first and sum(parameter.numel() for parameter in model.parameters()) < before
    loaded = Repeated()
    apply_ranks(loaded, {"first": 4, "first.1": 2})
    assert loaded.last is loaded.first and isinstance(loaded.first, nn.Sequential)
    assert isinstance(loaded.first[1], nn.Sequential)


def test_an_error_leaves_all_layers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"1\.weight has values that are not finite"):
        factorize_linear_layers(model, 0.5)
    assert all(type(layer) is nn.Linear for layer in model)


def test_models_that_read_the_weights_of_factorized_layers_still_run() -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=41, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)  # its fused forward reads weights and biases
    models: list[tuple[Any, Tensor]] = [(T5EncoderModel(config), BATCHES[0]), (layer, torch.randn(2, 5, 16))]
    for model, example in models:
        model.eval()
        plain = copy.deepcopy(model)
        factorize_linear_layers(model, 0.6)
        for name, module in plain.named_modules():
            if type(module) is nn.Linear:
                first, second = model.get_submodule(name)
                module.weight = nn.Parameter(second.weight @ first.weight)
        with torch.no_grad():
            found, expected = model(example), plain(example)
        if not isinstance(found, Tensor):
            found, expected = found.last_hidden_state, expected.last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_layers_that_share_a_weight_share_its_factors(tmp_path: Path) -> None:
    model = make_tiny_model("zamba")  # two blocks share the weights of their attention
    ids = BATCHES[0]
    ranks = factorize_linear_layers(model, 0.5, lambda name: "shared_transf" in name, batches=[ids])
    one, other = (model.get_submodule(name) for name in ranks if name.endswith("q_proj"))
    assert one is not other and all(a.weight is b.weight for a, b in zip(one, other, strict=True))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_packed_model(tmp_path)(ids).logits, model(ids).logits)


def test_factorized_models_lose_layers_and_are_saved(tmp_path: Path) -> None:
    model = deep()
    factorize_linear_layers(model, 0.5, lambda name: "mlp" in name)
    prune_model(model, {"layers": 1}, batches=BATCHES)
    with pytest.raises(ConfigError, match=r"prune heads = 1, but layers .* in two factors .*; prune before"):
        prune_model(model, {"heads": 1}, importance="magnitude")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_packed_model(tmp_path)(BATCHES[0]).logits, model(BATCHES[0]).logits)


def test_factorized_layers_of_a_family_with_its_own_linear_class_are_loaded(tmp_path: Path) -> None:
    model = build("falcon").eval()
    use_linear_class(model)  # as windlass loads it
    assert factorize_linear_layers(model, 0.5)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_packed_model(tmp_path)(BATCHES[0]).logits, model(BATCHES[0]).logits)


def test_factorized_models_are_saved_with_their_ranks(tmp_path: Path) -> None:
    stored = deep()
    factorize_linear_layers(stored, 0.5, lambda name: "mlp" in name)
    factorize_linear_layers(stored, 0.5, lambda name: name.endswith(("o_proj", "0.mlp.up_proj.1")))
    remove_layers(stored, [1])
    stored.save_pretrained(tmp_path)
    loaded = load_packed_model(tmp_path)
    assert sum(parameter.numel() for parameter in loaded.parameters() if parameter.requires_grad) == sum(
        parameter.numel() for parameter in stored.parameters()
    )
    with torch.no_grad():
        assert torch.equal(loaded(BATCHES[0]).logits, stored(BATCHES[0]).logits)
    entry = json.loads((tmp_path / "config.json").read_text())
    entry["windlass_low_rank"]["model.norm"] = 2
    (tmp_path / "config.json").write_text(json.dumps(entry))
    with pytest.raises(
        ModelError, match=r"windlass_low_rank names 'model.norm', and Llama.* has no linear layer of this name"
    ):
        load_packed_model(tmp_path)
