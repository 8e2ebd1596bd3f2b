"""Tests of packed directories whose files name tensors differently from the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.causal_models import build
from tests.tiny_causal_configs import make_tiny_model
from windlass.base.errors import ModelError
from windlass.compress.checkpoint_names import CheckpointNames
from windlass.compress.model_directory import ModelDirectory, build_empty
from windlass.compress.packed_directory import write_packed_directory
from windlass.compress.packed_model import load_packed_model
from windlass.compress.post_training import RoundingOptions, compress_directory
from windlass.compress.quantization_config import describe_formats
from windlass.compress.rounded_model import load_rounded_model
from windlass.inference.llm import LLM
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import get_weight_format

IDS = torch.arange(20).view(2, 10)
EXPERTS = ("mixtral", "qwen2_moe")


def saved(directory: Path, name: str) -> Any:
    model = build(name, hidden_size=64, intermediate_size=96, tie_word_embeddings=False).eval()
    model.save_pretrained(directory)
    return model


def round_layers(model: Any, form: str, *, head: bool, experts: bool = False) -> Any:
    chosen = get_weight_format(form)
    with torch.no_grad():
        for module in model.modules():
            if type(module) is torch.nn.Linear and (head or module is not model.get_output_embeddings()):
                module.weight.copy_(chosen.unpack(chosen.pack(module.weight)))
            for name, stacked in module.named_parameters(recurse=False):
                if experts and stacked.dim() == 3:
                    assert name in ("gate_up_proj", "down_proj")
                    stacked.copy_(chosen.unpack(chosen.pack(stacked.flatten(0, 1))).view_as(stacked))
    return model


@pytest.mark.parametrize("name", ["gpt_neox", *EXPERTS])
def test_renamed_and_joined_tensors_are_loaded(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide", name)
    report = write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32", head=True)
    assert not any(name.endswith(("lm_head", "embed_out")) for name in report.kept)
    routers = {name: reason for name, reason in report.kept.items() if name.endswith(("gate", "shared_expert_gate"))}
    assert report.kept == routers and all("Router is not a linear layer" in reason for reason in routers.values())
    if name == "gpt_neox":
        assert "embed_out" in report.layers and "lm_head" not in report.layers
    found = load_packed_model(tmp_path / "packed")
    packed = sum(isinstance(module, PackedLinear) for module in found.modules())
    assert packed == len(report.layers) > 4
    experts = sum(one.numel() for one in model.parameters() if one.dim() == 3)
    held = [m for n, m in found.named_modules() if ".experts." in n and isinstance(m, PackedLinear)]
    assert sum(m.in_features * m.out_features for m in held) == experts and bool(experts) == (name in EXPERTS)
    with torch.no_grad():
        wanted = round_layers(model, "int4_g32", head=True, experts=True)(IDS).logits
        torch.testing.assert_close(found(IDS).logits, wanted, rtol=1e-5, atol=1e-5)
    with LLM(tmp_path / "packed", skip_tokenizer_init=True, max_sequences=2, max_tokens_per_step=32) as llm:
        assert len(llm.generate([[3, 4, 5]])[0].outputs[0].token_ids) > 0


@pytest.mark.parametrize("name", EXPERTS)
def test_every_tensor_of_the_files_gets_the_place_that_transformers_gives_it(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide", name)
    directory = ModelDirectory(tmp_path / "wide")
    names = CheckpointNames(build_empty(directory), directory.places)
    assert not names.unknown and names.converted
    state = model.state_dict()
    for source, target in names.renamed.items():
        assert torch.equal(directory.read(source), state[target])
    for entry in names.converted.values():
        for target, value in names.convert(entry, directory.read).items():
            assert torch.equal(value, state[target])


def test_packed_experts_of_other_programs_stay_packed(tmp_path: Path) -> None:
    """Other programs pack the matrices of each expert separately, under the names of the files. Only the experts are
    packed here, and one matrix of the first one is not."""
    model = saved(tmp_path / "wide", "mixtral")
    form = get_weight_format("int8_g32")
    tensors, layers, features = {}, {}, {}
    for name, tensor in load_file(tmp_path / "wide" / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if ".experts." not in name or ".layers.0" in name and ".experts.0.w1" in name:
            tensors[name] = tensor
            continue
        layers[layer], features[layer] = form.name, tensor.shape[1]
        tensors |= {f"{layer}.{part}": value for part, value in form.pack(tensor).items()}
    (tmp_path / "packed").mkdir()
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    entry = describe_formats(layers, features, [])
    (tmp_path / "packed" / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    found = load_packed_model(tmp_path / "packed")
    assert sum(isinstance(module, PackedLinear) for module in found.modules()) == 23
    for number, layer in enumerate(model.model.layers):
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            wide = weight[0, :96].clone()
            weight.data.copy_(form.unpack(form.pack(weight.data.flatten(0, 1))).view_as(weight))
            if number == 0 and weight is layer.mlp.experts.gate_up_proj:
                weight.data[0, :96] = wide
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    damaged = {name: value for name, value in tensors.items() if ".experts.1.w3." not in name}
    save_file(damaged, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 2 tensors of the model: .*experts\.1\.up_proj.*copy its files again"):
        load_packed_model(tmp_path / "packed")


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_weights_that_several_layers_share_stay_wide(method: Any, tmp_path: Path) -> None:
    make_tiny_model("zamba2").save_pretrained(tmp_path / "wide")
    batches = [IDS.clone(), IDS.flip(1)] if method == "gptq" else []
    report, _ = compress_directory(
        tmp_path / "wide", tmp_path / "packed", "int4_g32", RoundingOptions(method), batches=batches
    )
    shared = [name for name, reason in report.kept.items() if reason == "it shares another tensor"]
    assert any("shared_transformer" in name for name in shared) and any("mamba" in name for name in report.layers)
    found = load_packed_model(tmp_path / "packed")
    wanted = make_tiny_model("zamba2")
    state = {name: value for name, value in found.state_dict().items() if value.dtype != torch.uint8}
    packed = {f"{n}.weight": one.unpack() for n, one in found.named_modules() if isinstance(one, PackedLinear)}
    assert len(packed) == len(report.layers)
    wanted.load_state_dict({**state, **packed})
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, wanted(IDS).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_weights_beside_packed_tied_layers_stay_tied(tmp_path: Path) -> None:
    model = make_tiny_model("zamba2")
    model.save_pretrained(tmp_path / "wide")
    found = load_rounded_model(tmp_path / "wide", "int8")
    round_layers(model, "int8", head=False)
    torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert any("shared_transformer" in name for name, one in found.named_modules() if isinstance(one, PackedLinear))
    assert found.get_output_embeddings().weight is found.get_input_embeddings().weight


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_experts_are_calibrated_with_their_own_tokens(name: str, method: Any, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide", name)
    batches = [torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    stacked = sum(one.shape[0] * (1 + (leaf == "gate_up_proj")) for leaf, one in named_stacks(model))
    errors: dict[str, float] = {}
    for one in ("rtn", method):
        report, results = compress_directory(
            tmp_path / "wide", tmp_path / one, "int3_g32", RoundingOptions(one), batches=batches
        )
        experts = [layer for layer in report.layers if ".experts." in layer]
        assert len(results) == len(report.layers) and len(experts) == stacked
        with torch.no_grad():
            found = [load_packed_model(tmp_path / one)(batch).logits - model(batch).logits for batch in batches]
        errors[one] = sum(float(difference.square().sum()) for difference in found)
    rounded = [one.error for one in results if ".experts." in one.name and one.error is not None]
    assert rounded and max(rounded) < 0.2
    assert errors[method] < (errors["rtn"] if method == "gptq" else 1.5 * errors["rtn"])


def named_stacks(model: Any) -> list[tuple[str, torch.Tensor]]:
    found = [(name.rpartition(".")[2], one) for name, one in model.named_parameters()]
    return [(leaf, one) for leaf, one in found if one.dim() == 3]


@pytest.mark.parametrize(("activations", "rounds"), [("auto", True), ("float", False)])
def test_a_directory_of_w8a8_is_served_with_int8_inputs(activations: str, rounds: bool, tmp_path: Path) -> None:
    saved(tmp_path / "wide", "llama")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8")
    entry = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert entry["config_groups"]["group_0"]["input_activations"]["num_bits"] == 8
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_sequences": 2, "max_tokens_per_step": 32}
    with LLM(tmp_path / "packed", activations=activations, **options) as llm:
        found = {g.panels.quantize_inputs for g in llm.engine.runner._packed.groups if g.panels.format.name == "int8"}
    assert found == {rounds}
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    path.write_text(json.dumps(config))
    with LLM(tmp_path / "packed", activations=activations, **options) as llm:
        assert not any(group.panels.quantize_inputs for group in llm.engine.runner._packed.groups)


@pytest.mark.parametrize("name", ["gpt_neox", *EXPERTS])
def test_a_model_is_rounded_while_it_is_read_by_the_names_of_its_files(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide", name)
    found = load_rounded_model(tmp_path / "wide", "int4_g32")
    with torch.no_grad():
        wanted = round_layers(model, "int4_g32", head=False)(IDS).logits
        torch.testing.assert_close(found(IDS).logits, wanted, rtol=1e-5, atol=1e-5)


def test_other_readers_find_a_renamed_layer_by_its_name_in_the_model(tmp_path: Path) -> None:
    saved(tmp_path / "wide", "gpt_neox")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32")
    entry = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert entry["ignore"] == ["embed_out", "lm_head"]
    write_packed_directory(
        tmp_path / "wide", tmp_path / "mixed", lambda layer: "int8_g32" if layer == "embed_out" else "int4_g32"
    )
    entry = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    targets = [group["targets"] for group in entry["config_groups"].values()]
    assert ["embed_out", "lm_head"] in targets


def test_subclasses_that_compute_the_same_are_packed(tmp_path: Path) -> None:
    model: Any = build("falcon", hidden_size=64, num_attention_heads=4).eval()
    assert type(model.transformer.h[0].mlp.dense_h_to_4h) is not torch.nn.Linear
    model.save_pretrained(tmp_path / "wide")
    report, results = compress_directory(
        tmp_path / "wide", tmp_path / "packed", "int4_g32", RoundingOptions("gptq"), batches=[IDS]
    )
    assert len(report.layers) == 8 and all(one.error is not None for one in results)
    found = load_packed_model(tmp_path / "packed")
    state = {f"{name}.weight": m.weight for name, m in found.named_modules() if isinstance(m, PackedLinear)}
    state |= {name: value for name, value in found.state_dict().items() if name in model.state_dict()}
    model.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
