"""Tests of `deepspeed.linear` and `deepspeed.ops.fp_quantizer` against plain PyTorch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from windlass.base.errors import ConfigError, ModelError
from windlass.compat.fp_quantizer import FP_Quantize, matmul_fp8
from windlass.compat.op_builders import FPQuantizerBuilder
from windlass.compat.optimized_linear import (
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    OptimizedLinearInit,
    QuantizationConfig,
    QuantizedLinear,
    QuantizedParameter,
    init_lora,
)


@pytest.mark.parametrize(("bits", "error"), [(4, 0.16), (6, 0.07), (8, 0.035), (12, 0.017)])
@pytest.mark.parametrize("apart", [False, True])
def test_values_come_back_up_to_half_a_step(bits: int, error: float, apart: bool) -> None:
    torch.manual_seed(0)
    quantizer, values = FP_Quantize(group_size=64), torch.randn(6, 128, dtype=torch.bfloat16)
    found = quantizer.quantize(values, q_bits=bits, return_meta_tensor=apart)
    packed, scale = found if apart else (found, None)
    assert packed.dtype == torch.uint8 and packed.numel() == values.numel() * bits // 8 + (0 if apart else 48)
    back = quantizer.dequantize(packed, q_bits=bits, scale=scale)
    assert back.dtype == values.dtype and back.shape == values.shape
    groups = values.float().view(-1, 64)
    assert ((back.float().view(-1, 64) - groups).norm() / groups.norm()) < error
    rows = quantizer.selective_dequantize(packed, torch.tensor([4, 1]), q_bits=bits, scale=scale)
    assert torch.equal(rows, back[[4, 1]])
    assert torch.equal(
        quantizer.get_scales(), groups.abs().amax(1, keepdim=True) / {4: 6, 6: 28, 8: 480, 12: 496}[bits]
    )


def test_the_op_is_that_of_the_class() -> None:
    op, values = FPQuantizerBuilder().load(), torch.randn(100)
    packed = op.quantize(None, values, 32, False, 6, 2)
    assert torch.equal(packed, FP_Quantize(group_size=32).quantize(values, q_bits=6))
    out = op.dequantize(torch.empty(100), packed, 32, 2, 3)
    assert (out - values).abs().max() < values.abs().max() / 8
    quantizer = FP_Quantize(QuantizationConfig(group_size=32))
    x = torch.randn(3, 32)
    for weight in (torch.randn(32, 16), torch.randn(32, 15)):
        codes, scale = quantizer.quantize(weight, return_meta_tensor=True)
        assert codes.shape == weight.shape
        expected = x @ quantizer.dequantize(quantizer.quantize(weight))
        for given in (scale, quantizer.get_scales()):
            assert torch.equal(matmul_fp8(x, codes, given, 32, quantizer), expected)
    odd = torch.randn(3, 7)  # 21 elements, not a multiple of the group size
    codes, scale = quantizer.quantize(odd, return_meta_tensor=True)
    assert codes.shape == odd.shape
    assert torch.equal(quantizer.dequantize(codes, scale=scale), quantizer.dequantize(quantizer.quantize(odd)))
    with pytest.raises(ModelError, match="q_bits is 5"):
        quantizer.quantize(weight, q_bits=5)


@pytest.mark.parametrize("quantization", [None, QuantizationConfig(group_size=32), QuantizationConfig(6, 2, 48)])
def test_adapters_train_as_beside_a_plain_layer(quantization: QuantizationConfig | None) -> None:
    torch.manual_seed(0)
    layer = OptimizedLinear(32, 24, True, LoRAConfig(lora_r=4, lora_alpha=6), quantization, dtype=torch.float32)
    assert isinstance(layer, LoRAOptimizedLinear) and layer.lora_scaling_factor == 1.5
    base = nn.Linear(32, 24)
    layer.load_state_dict(base.state_dict())  # state of a plain layer, without adapters
    if quantization is None:
        assert torch.equal(layer.weight, base.weight)
    else:
        form = quantization.weight_format()
        assert torch.equal(layer.weight, form.unpack(form.pack(base.weight)))
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {
        "lora_weight_1.weight",
        "lora_weight_2.weight",
    }
    x, down, up = torch.randn(5, 32), layer.lora_weight_1.weight.detach().clone(), torch.zeros(24, 4)
    assert torch.equal(layer(x), F.linear(x, layer.weight, base.bias))
    down.requires_grad_()
    up.requires_grad_()
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1), torch.optim.SGD([down, up], 0.1)]
    for _ in range(3):
        found = layer(x)
        expected = F.linear(x, layer.weight, base.bias) + 1.5 * (x @ down.T @ up.T)
        torch.testing.assert_close(found, expected)
        (found.square().sum() + expected.square().sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(layer.lora_weight_2.weight, up)
    twin = copy.deepcopy(layer)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("quantization", [None, QuantizationConfig(group_size=32)], ids=["plain", "packed"])
def test_delayed_init_and_disable_of_adapters(quantization: QuantizationConfig | None) -> None:
    config = LoRAConfig(lora_r=4, delay_lora_init=True)
    layer = LoRAOptimizedLinear(32, 24, True, config, quantization, dtype=torch.float32).requires_grad_(False)
    layer.init_lora()
    adapters = {"lora_weight_1.weight", "lora_weight_2.weight"}
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == adapters
    nn.init.ones_(layer.lora_weight_2.weight)
    weight = layer.weight.clone()
    layer.disable()
    layer.disable()
    layer.init_lora()
    assert {name: p.requires_grad for name, p in layer.named_parameters()} == {"base.weight": False, "base.bias": False}
    x, base = torch.randn(5, 32), nn.Linear(32, 24)
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.base.bias))
    layer.load_state_dict(base.state_dict())
    assert torch.equal(layer(x), base(x))


def test_kinds_of_layers() -> None:
    assert type(OptimizedLinear(8, 4)) is nn.Linear and OptimizedLinear(8, 4).weight.dtype == torch.bfloat16
    packed = OptimizedLinear(64, 32, quantization_config=QuantizationConfig(group_size=64), dtype=torch.float32)
    assert isinstance(packed, QuantizedLinear)
    assert sum(p.nbytes for p in packed.parameters()) < 0.3 * 4 * 64 * 32
    with pytest.raises(ConfigError, match="lora_config is {'r': 4}; pass a LoRAConfig"):
        OptimizedLinear(8, 4, lora_config={"r": 4})
    with pytest.raises(ConfigError, match="offload_param"):
        OptimizedLinear(8, 4, lora_config=LoRAConfig(offload=True))


def test_layers_made_in_the_context_have_adapters() -> None:
    with OptimizedLinearInit(LoRAConfig(lora_r=2), QuantizationConfig(group_size=32)):
        model = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
    assert nn.Linear.__module__ == "torch.nn.modules.linear" and type(nn.Linear(2, 2)) is nn.Linear
    assert all(isinstance(model[place], LoRAOptimizedLinear) for place in (0, 2))
    init_lora(model)
    assert sum(p.requires_grad for p in model.parameters()) == 4
    assert model(torch.randn(3, 32)).shape == (3, 4)


def test_in_strict_mode_layers_made_in_the_context_are_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_DEEPSPEED_STRICT", "1")
    with OptimizedLinearInit(LoRAConfig(lora_r=2)):
        layer = nn.Linear(4, 4)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packed", [None, QuantizationConfig(group_size=32)], ids=["plain", "packed"])
def test_pretrained_values_are_those_of_the_bases(
    tmp_path: Path, packed: QuantizationConfig | None, tied: bool
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=tied, **sizes)).eval()
    plain.save_pretrained(tmp_path)
    with OptimizedLinearInit(LoRAConfig(lora_r=2), packed):
        model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        again, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    ids = torch.arange(12).view(1, 12)
    expected = plain(ids).logits
    assert (model(ids).logits - expected).abs().max() <= (0.05 if packed else 0) * expected.abs().max()
    assert torch.equal(again.eval()(ids).logits, model(ids).logits) and not report["missing_keys"]
    assert type(model.lm_head) is type(model.model.layers[0].mlp.up_proj) is LoRAOptimizedLinear
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {
        "lora_weight_1",
        "lora_weight_2",
    }
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path).lm_head) is nn.Linear  # outside of the context


def test_a_parameter_of_packed_bytes() -> None:
    values = torch.randn(4, 8, 16, dtype=torch.bfloat16)
    packed = QuantizedParameter(values, quantization_config=QuantizationConfig(group_size=32))
    assert packed.dtype == torch.uint8 and not packed.requires_grad
    back = packed.dequantized()
    assert back.shape == values.shape and back.dtype == values.dtype
    assert (back - values).abs().max() < values.abs().max() / 16
    with pytest.raises(ValueError, match="requires_grad is True"):
        QuantizedParameter(values, requires_grad=True)
    with pytest.raises(ModelError, match="quantizer is a int"):
        QuantizedParameter(values, quantizer=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "copied",
    [
        lambda parameter: QuantizedParameter(parameter.data, **parameter.__dict__),
        copy.deepcopy,
        lambda parameter: pickle.loads(pickle.dumps(parameter)),
    ],
    ids=["attributes", "deepcopy", "pickle"],
)
def test_a_copy_of_packed_bytes_is_not_packed_again(copied: Callable[[QuantizedParameter], QuantizedParameter]) -> None:
    packed = QuantizedParameter(torch.randn(8, 32), quantization_config=QuantizationConfig(q_bits=6, group_size=32))
    made = copied(packed)
    assert type(made) is QuantizedParameter and made is not packed
    assert torch.equal(made.data, packed.data) and torch.equal(made.dequantized(), packed.dequantized())
    assert made.quantization_config == packed.quantization_config


def test_builder_returns_quantization_dtype_and_range() -> None:
    assert FPQuantizerBuilder.get_default_quant_dtype() is torch.uint8
    assert [FPQuantizerBuilder.get_quant_range(bits) for bits in (6, 8)] == [28, 480]
    with pytest.raises(ModelError, match="q_bits is 5"):
        FPQuantizerBuilder.get_quant_range(5)
