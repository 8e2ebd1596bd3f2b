"""Tests of checkpoints of GPTQ and AWQ: loaded weights are those that the layouts define."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.causal_models import VOCABULARY
from tests.compress.test_packed_directory import IDS, saved
from tests.inference.greedy_reference import assert_greedy, make_prompts
from windlass.base.errors import ModelError
from windlass.compress.packed_model import load_packed_model
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.packed_linear import PackedLinear
from windlass.parallel.tensor.packed_sharding import plan_packed_part


def bits_of(values: list[int], bits: int) -> list[int]:
    """Pack values of `bits` bits each, without gaps, into signed 32-bit words."""
    whole = sum(value << (bits * place) for place, value in enumerate(values))
    words = [whole >> (32 * i) & 0xFFFFFFFF for i in range(len(values) * bits // 32)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def gptq(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor, bits: int, version: int) -> dict[str, Tensor]:
    """Return codes `[in, out]` and zero points `[groups, out]` in the layout of AutoGPTQ."""
    columns = [bits_of(column.tolist(), bits) for column in codes.t()]
    stored = (zeros - int(version == 1)) % 2**bits
    return {
        "qweight": torch.tensor(columns, dtype=torch.int32).t().contiguous(),
        "qzeros": torch.tensor([bits_of(row.tolist(), bits) for row in stored], dtype=torch.int32),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return codes `[in, out]` and zero points `[groups, out]` in the layout of AutoAWQ."""

    def words(matrix: Tensor) -> Tensor:
        ordered = matrix.view(len(matrix), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
        return torch.tensor([bits_of(row.tolist(), 4) for row in ordered], dtype=torch.int32)

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}


def quantized_copy(
    source: Path, target: Path, entry: dict[str, Any], symmetric: bool, ordered: bool = True
) -> dict[str, Tensor]:
    """Write a checkpoint with random codes. Return the weight that the codes encode for each layer."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": entry}))
    tensors, weights = load_file(source / "model.safetensors"), {}
    bits, size, generator = entry["bits"], entry["group_size"], torch.Generator().manual_seed(1)
    for name in [name for name in tensors if "proj" in name]:
        out, features = tensors.pop(name).shape
        groups = torch.arange(features) // (size if size > 0 else features)
        if not ordered:
            groups = groups[torch.randperm(features, generator=generator)]
        shape = (int(groups.max()) + 1, out)
        codes = torch.randint(2**bits, (features, out), generator=generator)
        zeros = (
            torch.full(shape, 2 ** (bits - 1)) if symmetric else torch.randint(1, 2**bits, shape, generator=generator)
        )
        scales = (torch.rand(shape, generator=generator) / 20 + 0.001).half()
        layer = name.removesuffix(".weight")
        weights[layer] = ((codes - zeros[groups]) * scales[groups].float()).t().contiguous()
        version = 2 if entry.get("checkpoint_format") == "gptq_v2" else 1
        made = (
            awq(codes, zeros, scales)
            if entry["quant_method"] == "awq"
            else gptq(codes, zeros, scales, groups, bits, version)
        )
        tensors |= {f"{layer}.{part}": tensor for part, tensor in made.items()}
    save_file(tensors, target / "model.safetensors")
    return weights


@pytest.mark.parametrize(
    ("entry", "symmetric", "name"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, True, "int4_g32"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}, False, "int4_g32_zp"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, False, "int3_g32_zp"),
        ({"quant_method": "gptq", "bits": 2, "group_size": -1}, False, "int2_zp"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, True, "int8_g32"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, True, "int8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, False, "int4_g32_zp"),
    ],
    ids=str,
)
def test_checkpoints_have_the_numbers_of_their_layout(
    entry: dict[str, Any], symmetric: bool, name: str, tmp_path: Path
) -> None:
    model = saved(tmp_path / "wide")
    weights = quantized_copy(tmp_path / "wide", tmp_path / "packed", entry, symmetric)
    found = load_packed_model(tmp_path / "packed")
    for layer, weight in weights.items():
        packed = found.get_submodule(layer)
        assert isinstance(packed, PackedLinear) and packed.format.name == name
        assert torch.equal(packed.unpack(), weight), layer
        model.get_submodule(layer).weight.data.copy_(weight)
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_layers_with_their_own_bits_are_read(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    own = {"bits": 8, "group_size": 32}
    for target, settings in (("packed", {}), ("packed8", own)):
        entry = {"quant_method": "gptq", "bits": 4, "group_size": 32, **settings}
        weights = quantized_copy(tmp_path / "wide", tmp_path / target, entry, True)
    first, second = (tmp_path / name / "model.safetensors" for name in ("packed", "packed8"))
    wider = {name: tensor for name, tensor in load_file(second).items() if "q_proj" in name}
    save_file({**load_file(first), **wider}, first)
    with pytest.raises(ModelError, match=r"q_proj' .* has 128 input features of 4 bits, and g_idx has 64"):
        load_packed_model(tmp_path / "packed")
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["dynamic"] = {"-:.*embed": {}, r"+:.*\.q_proj": own}
    path.write_text(json.dumps(config))
    found = load_packed_model(tmp_path / "packed")
    layer = "model.layers.0.self_attn.q_proj"
    assert torch.equal(found.get_submodule(layer).unpack(), weights[layer])
    assert found.get_submodule("model.layers.0.self_attn.k_proj").format.name == "int4_g32"


@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (4, True), (3, True), (8, False)])
def test_gptq_activation_order_stays_packed(bits: int, symmetric: bool, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide")
    entry = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": True}
    weights = quantized_copy(tmp_path / "wide", tmp_path / "packed", entry, symmetric, ordered=False)
    found = load_packed_model(tmp_path / "packed")
    for layer, weight in weights.items():
        packed = found.get_submodule(layer)
        assert packed.format.name == f"int{bits}_g32{'' if symmetric else '_zp'}_ordered"
        assert torch.equal(packed.unpack(), weight)
        assert sum(one.numel() for one in packed.parameters()) < weight.numel() * (bits + 2) / 8 + 8 * weight.shape[1]
        model.get_submodule(layer).weight.data.copy_(weight)
    with torch.no_grad():
        for _ in range(2):  # the second product has panels
            torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_sequences": 8, "max_tokens_per_step": 64}
    with LLM(tmp_path / "packed", activations="float", **options) as llm:
        assert sum(one.order is not None for one in llm.engine.runner._packed.groups) == len(weights)
        assert llm.engine.runner.program is not None
        outputs = llm.generate(make_prompts(4, VOCABULARY, 20), SamplingParams(temperature=0, max_tokens=8, logprobs=2))
    assert_greedy(model, outputs)
    with LLM(tmp_path / "packed", **options) as llm:
        groups = [one.panels for one in llm.engine.runner._packed.groups if one.order is not None]
        assert all(one.quantize_inputs == (bits < 8) for one in groups)
        assert llm.generate([[3, 4, 5]])[0].outputs[0].token_ids


@pytest.mark.parametrize("first", [True, False])
def test_ranks_divide_scattered_groups_by_outputs_only(first: bool) -> None:
    layer = PackedLinear.from_linear(torch.nn.Linear(128, 64), "int4_g32_ordered")
    half = ((0, 64),) if first else ((64, 128),)
    with pytest.raises(ModelError, match="'int4_g32_ordered' and cannot be sharded over tp"):
        plan_packed_part("up", layer, 1, half, "tp")
    local, cuts = plan_packed_part("up", layer, 0, ((0, 32),) if first else ((32, 64),), "tp")
    assert local == (32, 128) and "weight_order" not in [name for name, _, _ in cuts]


def test_scattered_groups_of_several_sizes_are_loaded_as_floats(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    entry = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    quantized_copy(tmp_path / "wide", tmp_path / "packed", entry, False, ordered=False)
    file, layer = tmp_path / "packed" / "model.safetensors", "model.layers.0.self_attn.q_proj"
    tensors = load_file(file)
    before = load_packed_model(tmp_path / "packed").get_submodule(layer).unpack()
    order = tensors[f"{layer}.g_idx"]
    place = int((order == 0).nonzero()[0])
    order[place] = 1
    save_file(tensors, file)
    packed = load_packed_model(tmp_path / "packed").get_submodule(layer)
    assert packed.format.name == "fp32"
    others = torch.arange(64) != place
    assert torch.equal(packed.unpack()[:, others], before[:, others])


def test_adapters_train_on_scattered_groups(tmp_path: Path) -> None:
    model = saved(tmp_path / "wide")
    entry = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    weights = quantized_copy(tmp_path / "wide", tmp_path / "packed", entry, False, ordered=False)
    found = load_packed_model(tmp_path / "packed")
    grads = []
    for one in (found, model):
        if one is model:
            for layer, weight in weights.items():
                model.get_submodule(layer).weight.data.copy_(weight)
        embeddings = one.get_input_embeddings()(IDS).detach().requires_grad_()
        one(inputs_embeds=embeddings).logits.square().sum().backward()
        grads.append(embeddings.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5 * float(grads[1].abs().max()))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("factor", [2.0**-24, 2.0**24])
def test_scales_outside_of_float16_keep_their_numbers(bits: int, factor: float, tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    entry = {"quant_method": "gptq", "bits": bits, "group_size": 32}
    weights = quantized_copy(tmp_path / "wide", tmp_path / "packed", entry, False)
    file, layer = tmp_path / "packed" / "model.safetensors", "model.layers.0.self_attn.q_proj"
    tensors = load_file(file)
    tensors[f"{layer}.scales"] = tensors[f"{layer}.scales"].float() * factor
    save_file(tensors, file)
    found = load_packed_model(tmp_path / "packed")
    assert torch.equal(found.get_submodule(layer).unpack(), weights[layer] * factor)
    assert found.get_submodule("model.layers.0.self_attn.k_proj").format.name == f"int{bits}_g32_zp"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bits": 5}, "bits is 5; windlass reads 2, 3, 4 and 8"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv', is not read"),
        ({"group_size": 16}, "groups of 16, with zero points"),
    ],
)
def test_checkpoints_of_other_kinds_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    entry = {"quant_method": "gptq", "bits": 4, "group_size": change.get("group_size", 32)}
    quantized_copy(tmp_path / "wide", tmp_path / "packed", entry, False)
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {**entry, **change}}))
    with pytest.raises(ModelError, match=said):
        load_packed_model(tmp_path / "packed")
